//! The topics of `explain`.

use gpush_api::Code;
use gpush_core::lint::Lint;

/// Text after the options: notes and examples.
pub(super) const NOTES: &str = "\
Without TOPIC, lists the topics. Except for a MIG device, the command works
without gpushd. For a MIG device that has ended, it says which operation
destroyed the device, who leased it, and what its GPU has now.

Examples:
  gpushctl explain
  gpushctl explain isolation
  gpushctl explain xid-79
  gpushctl explain layout_impossible
  gpushctl explain G001
  gpushctl explain MIG-5d1b4e2a-7c33-5e0a-9d61-2f0d8a1c4b7e";

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
    /// A mistake in a config, by its number.
    Lint(Lint),
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
    Quota,
    States,
    Held,
    Cordoned,
    Lost,
    Drift,
    MigMode,
    Xid,
    ExitCodes,
}

impl Page {
    /// All pages, in the order of the list of topics.
    pub(crate) const ALL: [Self; 13] = [
        Self::Mig,
        Self::MigMode,
        Self::Mps,
        Self::Timeslice,
        Self::Lease,
        Self::Quota,
        Self::States,
        Self::Held,
        Self::Cordoned,
        Self::Lost,
        Self::Drift,
        Self::Xid,
        Self::ExitCodes,
    ];

    /// Returns the name of the topic on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mig => "mig",
            Self::Mps => "mps",
            Self::Timeslice => "timeslice",
            Self::Lease => "lease",
            Self::Quota => "quota",
            Self::States => "states",
            Self::Held => "held",
            Self::Cordoned => "cordoned",
            Self::Lost => "lost",
            Self::Drift => "drift",
            Self::MigMode => "mig-mode",
            Self::Xid => "xid",
            Self::ExitCodes => "exit-codes",
        }
    }

    fn named(name: &str) -> Option<Self> {
        let name = match name {
            "time-slicing" | "timeslicing" => "timeslice",
            "leases" | "releasing" | "granting" | "queued" | "active" | "ended" => "lease",
            "quotas" | "limits" => "quota",
            "state" | "ready" | "maintenance" | "unknown" | "changing" | "degraded" => "states",
            "cordon" | "drain" | "drained" | "uncordon" => "cordoned",
            "mig_mode" | "migmode" => "mig-mode",
            "xids" => "xid",
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
        if let Some(lint) = Lint::numbered(&word).or_else(|| Lint::numbered(&padded(&word))) {
            return Ok(Self::Lint(lint));
        }
        // No known Xid error has the number of an exit status.
        let is_exit_status = |number: u64| matches!(number, 0..=8 | 125..=127 | 130);
        if word.parse().is_ok_and(is_exit_status) {
            return Ok(Self::Page(Page::ExitCodes));
        }
        let number = word.strip_prefix("xid").unwrap_or(&word).trim_start_matches(['-', '=', ' ', ':', '_']);
        if let Ok(number) = number.parse() {
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

/// Writes the number of a lint with three digits: `g005` for `g5`.
fn padded(word: &str) -> String {
    let number = word.strip_prefix('g').and_then(|number| number.parse::<u16>().ok());
    number.map_or_else(|| word.to_owned(), |number| format!("g{number:03}"))
}

/// Returns the name of a code in JSON documents, such as `not_found`.
pub(crate) fn code_name(code: Code) -> String {
    serde_json::to_value(code).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_output_name_topics() {
        for (typed, topic) in [
            ("48", Topic::Xid(48)),
            ("xid-79", Topic::Xid(79)),
            ("XID 79", Topic::Xid(79)),
            ("4", Topic::Page(Page::ExitCodes)),
            ("130", Topic::Page(Page::ExitCodes)),
            ("releasing", Topic::Page(Page::Lease)),
            ("degraded", Topic::Page(Page::States)),
            ("held", Topic::Page(Page::Held)),
            ("cordon", Topic::Page(Page::Cordoned)),
            ("lost", Topic::Page(Page::Lost)),
            ("drift", Topic::Page(Page::Drift)),
            ("quota", Topic::Page(Page::Quota)),
            ("mig-mode", Topic::Page(Page::MigMode)),
            ("G001", Topic::Lint(Lint::TimesliceIsolation)),
            ("g006", Topic::Lint(Lint::UnusualRatio)),
            ("G6", Topic::Lint(Lint::UnusualRatio)),
        ] {
            assert_eq!(Topic::parse(typed), Ok(topic), "{typed}");
        }
        assert!(Topic::parse("bogus").is_err() && Topic::parse("G000").is_err());
    }
}
