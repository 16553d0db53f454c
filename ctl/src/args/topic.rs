//! The topics of `explain`.

use gpush_api::Code;

/// A topic of `explain`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Topic {
    /// The list of topics.
    All,
    /// What each mechanism isolates.
    Isolation,
    /// A fixed text.
    Page(Page),
    /// An Xid error of the driver.
    Xid(u64),
    /// The code of an error, or an exit status.
    Code(Code),
    /// UUID of a MIG device.
    MigDevice(String),
}

/// A topic with a fixed text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Page {
    Mig,
    Mps,
    Timeslice,
    Lease,
    States,
    Xid,
    ExitCodes,
}

impl Page {
    /// All pages, in the order of the list of topics.
    pub(crate) const ALL: [Self; 7] =
        [Self::Mig, Self::Mps, Self::Timeslice, Self::Lease, Self::States, Self::Xid, Self::ExitCodes];

    /// Returns the name of the topic on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mig => "mig",
            Self::Mps => "mps",
            Self::Timeslice => "timeslice",
            Self::Lease => "lease",
            Self::States => "states",
            Self::Xid => "xid",
            Self::ExitCodes => "exit-codes",
        }
    }

    fn named(name: &str) -> Option<Self> {
        let name = match name {
            "time-slicing" | "timeslicing" => "timeslice",
            "leases" => "lease",
            "state" => "states",
            "exit" | "exit-status" | "exit-code" | "status" => "exit-codes",
            other => other,
        };
        Self::ALL.into_iter().find(|page| page.name() == name)
    }
}

/// Codes of errors that gpushctl shows, in the order of the documentation.
pub(crate) const CODES: [Code; 20] = [
    Code::BadRequest,
    Code::NotFound,
    Code::UnknownProfile,
    Code::LayoutImpossible,
    Code::ConfigInvalid,
    Code::Blocked,
    Code::Conflict,
    Code::Resetting,
    Code::Denied,
    Code::Unavailable,
    Code::Stopping,
    Code::Unreachable,
    Code::Unsupported,
    Code::DriverTimeout,
    Code::TimedOut,
    Code::Cancelled,
    Code::DriverUnavailable,
    Code::DriverError,
    Code::GpuLost,
    Code::Internal,
];

impl Topic {
    /// Parses the words after `explain`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let word = text.trim().to_ascii_lowercase();
        if word == "isolation" {
            return Ok(Self::Isolation);
        }
        if let Some(page) = Page::named(&word) {
            return Ok(Self::Page(page));
        }
        let number = word.strip_prefix("xid").map(|rest| rest.trim_start_matches(['-', '=', ' ', ':']));
        if let Some(number) = number.and_then(|number| number.parse().ok()) {
            return Ok(Self::Xid(number));
        }
        if let Some(code) = CODES.into_iter().find(|code| code_name(*code) == word) {
            return Ok(Self::Code(code));
        }
        match text.trim() {
            uuid if uuid.len() > 4 && uuid.is_ascii() && uuid[..4].eq_ignore_ascii_case("MIG-") => {
                Ok(Self::MigDevice(format!("MIG-{}", &uuid[4..])))
            }
            _ => Err("`gpushctl explain` lists the topics".to_owned()),
        }
    }
}

/// Returns the name of a code in JSON documents, such as `not_found`.
pub(crate) fn code_name(code: Code) -> String {
    serde_json::to_value(code).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}
