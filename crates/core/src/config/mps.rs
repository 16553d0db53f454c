//! `[mps]`: the paths of NVIDIA's Multi-Process Service, and the supervision of its daemons. The
//! rules determine which GPUs are shared through MPS, and how.

use std::time::Duration;

use toml::de::DeTable;

use super::{reader::Reader, toml_text::text};
use crate::{diagnostic::Problem, quote::Quoted, supervisor::SupervisorPolicy};

/// File name of the MPS server. The control daemon searches its PATH for this name.
const SERVER: &str = "nvidia-cuda-mps-server";

/// `[mps]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mps {
    /// Absolute path of `nvidia-cuda-mps-control`.
    pub control: String,
    /// Absolute path of `nvidia-cuda-mps-server`. The directory of this file is the PATH of the
    /// daemons.
    pub server: String,
    /// Absolute path of the directory that contains a log directory for each daemon.
    pub log_directory: String,
    /// Size in MiB at which a log is rotated.
    pub log_mib: u32,
    /// Interval in seconds between two health checks of a daemon.
    pub health_s: u32,
    /// Maximum number of seconds until a new daemon answers.
    pub start_s: u32,
    /// Pause in seconds before the restart that follows the second failure. Each further failure
    /// doubles the pause. After the first failure there is no pause.
    pub pause_s: u32,
    /// Longest pause in seconds.
    pub longest_pause_s: u32,
    /// Number of failures within `within_s` after which gpushd gives up.
    pub failures: u32,
    /// Period in seconds in which `failures` are counted.
    pub within_s: u32,
    /// Maximum number of seconds for a daemon to end. After that time, gpushd kills it.
    pub stop_s: u32,
    /// Whether gpushd restarts a hung daemon that has clients. A restart ends the clients.
    pub restart_hung_with_clients: bool,
}

impl Default for Mps {
    fn default() -> Self {
        Self {
            control: "/usr/bin/nvidia-cuda-mps-control".to_owned(),
            server: format!("/usr/bin/{SERVER}"),
            log_directory: "/var/log/gpush-mps".to_owned(),
            log_mib: 16,
            health_s: 15,
            start_s: 10,
            pause_s: 1,
            longest_pause_s: 60,
            failures: 5,
            within_s: 600,
            stop_s: 10,
            restart_hung_with_clients: false,
        }
    }
}

impl Mps {
    /// Returns the policy for the supervisors.
    #[must_use]
    pub fn policy(&self) -> SupervisorPolicy {
        let seconds = |seconds: u32| Duration::from_secs(u64::from(seconds));
        SupervisorPolicy {
            start: seconds(self.start_s),
            pause: seconds(self.pause_s),
            longest_pause: seconds(self.longest_pause_s),
            failures: usize::try_from(self.failures).unwrap_or(usize::MAX),
            within: seconds(self.within_s),
            stop: seconds(self.stop_s),
            restart_hung_with_clients: self.restart_hung_with_clients,
        }
    }
}

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Mps {
    let default = Mps::default();
    let pause_s = reader.number(table, "pause_s", 1..=3600, default.pause_s);
    Mps {
        control: reader.absolute(table, "control", &default.control).unwrap_or(default.control),
        server: server(reader, table, &default.server).unwrap_or(default.server),
        log_directory: reader.absolute(table, "log_directory", &default.log_directory).unwrap_or(default.log_directory),
        log_mib: reader.number(table, "log_mib", 1..=1024, default.log_mib),
        health_s: reader.number(table, "health_s", 1..=3600, default.health_s),
        start_s: reader.number(table, "start_s", 1..=600, default.start_s),
        pause_s,
        longest_pause_s: longest_pause_s(reader, table, pause_s, default.longest_pause_s),
        failures: reader.number(table, "failures", 1..=100, default.failures),
        within_s: reader.number(table, "within_s", 1..=86_400, default.within_s),
        stop_s: reader.number(table, "stop_s", 1..=600, default.stop_s),
        restart_hung_with_clients: reader
            .flag(table, "restart_hung_with_clients")
            .unwrap_or(default.restart_hung_with_clients),
    }
}

/// Returns the keys with their values as TOML.
pub(super) fn written(mps: &Mps) -> [(&'static str, String); 12] {
    [
        ("control", text(&mps.control)),
        ("server", text(&mps.server)),
        ("log_directory", text(&mps.log_directory)),
        ("log_mib", mps.log_mib.to_string()),
        ("health_s", mps.health_s.to_string()),
        ("start_s", mps.start_s.to_string()),
        ("pause_s", mps.pause_s.to_string()),
        ("longest_pause_s", mps.longest_pause_s.to_string()),
        ("failures", mps.failures.to_string()),
        ("within_s", mps.within_s.to_string()),
        ("stop_s", mps.stop_s.to_string()),
        ("restart_hung_with_clients", mps.restart_hung_with_clients.to_string()),
    ]
}

/// Reads the path of the server. The control daemon gets only the directory of the path, as PATH,
/// and searches it for the name [`SERVER`]. So other file names, and directories with a colon, are
/// refused.
fn server(reader: &mut Reader<'_>, table: &DeTable<'_>, default: &str) -> Option<String> {
    let text = reader.absolute_text(table, "server", default)?;
    let (directory, name) = text.value.rsplit_once('/')?;
    let hint = format!("write the path of {SERVER}, such as \"{default}\"");
    if name != SERVER {
        let problem = format!(
            "`server` {} has the wrong name: the MPS daemon looks for \
            `{SERVER}`",
            Quoted(&text.value)
        );
        reader.report(Problem::new(text.span, problem, hint));
        return None;
    }
    if directory.contains(':') {
        let problem = format!(
            "`server` {} contains a colon: PATH cannot contain a directory with a colon in its name",
            Quoted(&text.value)
        );
        reader.report(Problem::new(
            text.span,
            problem,
            "write a path without a colon, such as the path of a symbolic link",
        ));
        return None;
    }
    Some(text.value)
}

/// Reads the longest pause, which must be at least `pause_s`. If the key is missing, returns the
/// larger of `default` and `pause_s`.
fn longest_pause_s(reader: &mut Reader<'_>, table: &DeTable<'_>, pause_s: u32, default: u32) -> u32 {
    let longest = reader.number(table, "longest_pause_s", 1..=3600, default.max(pause_s));
    if longest < pause_s {
        let problem = format!("`longest_pause_s` = {longest} is less than `pause_s` = {pause_s}");
        let hint = format!("write a number from {pause_s} to 3600");
        reader.report_at(table, "longest_pause_s", problem, hint);
    }
    longest
}
