//! gpushd's systemd units: whether gpushd runs, fails or is stopped.

use std::collections::BTreeMap;

use crate::Host;

/// The service.
pub(crate) const SERVICE: &str = "gpushd.service";

/// Properties that are read of a unit.
const PROPERTIES: &str = "--property=LoadState,UnitFileState,ActiveState,SubState,Result,NRestarts,ExecMainStatus";

/// Number of restarts after which a service that is starting is considered to fail.
const MANY_RESTARTS: u32 = 2;

/// Prefixes of log lines that explain why gpushd ended. systemd writes the second kind if it cannot start gpushd.
const REASONS: [&str; 3] = ["gpushd: ", "gpushd.service: Failed at step ", "error: "];

/// The state of a gpushd service that cannot answer requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Service {
    /// gpushd is stopped. A request would start it.
    Stopped,
    /// gpushd fails each time systemd starts it.
    Failing {
        /// The state as `systemctl` shows it, such as `activating (auto-restart)`.
        state: String,
        /// Number of restarts since an administrator or a request started the service.
        restarts: u32,
        /// Exit status of the last gpushd.
        status: String,
        /// The last log line with a reason, if the caller may read the log.
        line: Option<String>,
    },
}

impl Service {
    /// Returns the state of gpushd.service; `None` if gpushd runs or starts, or if its state is unknown.
    #[must_use]
    pub fn find(host: &Host) -> Option<Self> {
        let unit = Unit::find(host, SERVICE)?;
        match (unit.get("ActiveState"), unit.get("SubState")) {
            ("inactive", _) if unit.get("LoadState") == "loaded" => Some(Self::Stopped),
            ("failed", _) => Some(unit.failing(host)),
            // gpushd exits with success so that systemd restarts it, for example after the driver was loaded.
            ("activating", "auto-restart") if unit.get("Result") != "success" => Some(unit.failing(host)),
            ("activating", _) if unit.restarts() >= MANY_RESTARTS => Some(unit.failing(host)),
            _ => None,
        }
    }
}

/// The properties of a unit that systemd knows.
#[derive(Debug)]
pub(crate) struct Unit(BTreeMap<String, String>);

impl Unit {
    /// Reads the properties; `None` if systemd does not run or does not know the unit.
    pub(crate) fn find(host: &Host, name: &str) -> Option<Self> {
        if !host.has("run/systemd/system") {
            return None;
        }
        let printed = host.run("usr/bin/systemctl", &["show", PROPERTIES, name])?;
        let properties = printed.lines().filter_map(|line| line.split_once('='));
        let unit = Self(properties.map(|(key, value)| (key.to_owned(), value.to_owned())).collect());
        (!matches!(unit.get("LoadState"), "" | "not-found")).then_some(unit)
    }

    fn get(&self, property: &str) -> &str {
        self.0.get(property).map_or("", String::as_str)
    }

    pub(crate) fn is_active(&self) -> bool {
        self.get("ActiveState") == "active"
    }

    /// Returns whether systemd never starts the unit.
    pub(crate) fn is_masked(&self) -> bool {
        self.get("LoadState") == "masked"
    }

    /// Returns whether the unit does not start at boot.
    pub(crate) fn is_disabled(&self) -> bool {
        self.get("UnitFileState") == "disabled"
    }

    fn restarts(&self) -> u32 {
        self.get("NRestarts").parse().unwrap_or(0)
    }

    fn failing(&self, host: &Host) -> Service {
        let log = host.run("usr/bin/journalctl", &["-q", "-u", SERVICE, "-n", "50", "-o", "cat", "--no-pager"]);
        Service::Failing {
            state: format!("{} ({})", self.get("ActiveState"), self.get("SubState")),
            restarts: self.restarts(),
            status: self.get("ExecMainStatus").to_owned(),
            line: log.and_then(|log| reason(&log)),
        }
    }
}

/// Returns the last line of a log that explains why gpushd ended.
fn reason(log: &str) -> Option<String> {
    let is_reason = |line: &&str| REASONS.iter().any(|beginning| line.starts_with(beginning));
    log.lines().rev().find(is_reason).map(|line| line.trim().to_owned())
}
