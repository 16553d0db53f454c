//! `[mps]`: the paths of NVIDIA's Multi-Process Service, and the supervision of its daemons. The
//! rules determine which GPUs are shared through MPS, and how.

use std::{path::Path, time::Duration};

use toml::de::DeTable;

use super::{
    reader::{HOUR, Reader, SECOND},
    toml_text::{span, text},
};
use crate::{diagnostic::Problem, quote::Quoted};

/// File name of the MPS server. The control daemon searches its PATH for this name.
const SERVER: &str = "nvidia-cuda-mps-server";

/// `[mps]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mps {
    /// Absolute path of `nvidia-cuda-mps-control`. The server is in the same directory, which is the PATH of the
    /// daemons.
    pub control: String,
    /// Absolute path of the directory that contains a log directory for each daemon.
    pub log_directory: String,
    /// Interval between two health checks of a daemon.
    pub health: Duration,
    /// Whether gpushd restarts a hung daemon that has clients. A restart ends the clients.
    pub restart_hung_with_clients: bool,
}

impl Default for Mps {
    fn default() -> Self {
        Self {
            control: "/usr/bin/nvidia-cuda-mps-control".to_owned(),
            log_directory: "/var/log/gpush-mps".to_owned(),
            health: Duration::from_secs(15),
            restart_hung_with_clients: false,
        }
    }
}

impl Mps {
    /// Returns the path of the server: NVIDIA's file name in the directory of the control daemon.
    #[must_use]
    pub fn server(&self) -> String {
        Path::new(&self.control).with_file_name(SERVER).to_string_lossy().into_owned()
    }
}

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Mps {
    let default = Mps::default();
    Mps {
        control: control(reader, table, &default.control).unwrap_or(default.control),
        log_directory: reader.absolute(table, "log_directory", &default.log_directory).unwrap_or(default.log_directory),
        health: reader.duration(table, "health", SECOND..=HOUR, default.health),
        restart_hung_with_clients: reader
            .flag(table, "restart_hung_with_clients")
            .unwrap_or(default.restart_hung_with_clients),
    }
}

/// Returns the keys with their values as TOML.
pub(super) fn written(mps: &Mps) -> [(&'static str, String); 4] {
    [
        ("control", text(&mps.control)),
        ("log_directory", text(&mps.log_directory)),
        ("health", span(mps.health)),
        ("restart_hung_with_clients", mps.restart_hung_with_clients.to_string()),
    ]
}

/// Reads the path of the control daemon. The daemon gets the directory of the path, as PATH, and searches it for the
/// server. So a directory with a colon is refused.
fn control(reader: &mut Reader<'_>, table: &DeTable<'_>, default: &str) -> Option<String> {
    let text = reader.absolute_text(table, "control", default)?;
    let (directory, _) = text.value.rsplit_once('/')?;
    if directory.contains(':') {
        let problem = format!(
            "`control` {} contains a colon: PATH cannot contain a directory with a colon in its name",
            Quoted(&text.value)
        );
        let hint = "write a path without a colon, such as the path of a symbolic link";
        reader.report(Problem::new(text.span, problem, hint));
        return None;
    }
    Some(text.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mps_server_is_in_the_directory_of_the_control_daemon() {
        let at = |control: &str| Mps { control: control.to_owned(), ..Mps::default() }.server();
        assert_eq!(at("/opt/mps/control"), "/opt/mps/nvidia-cuda-mps-server");
        assert_eq!(Mps::default().server(), "/usr/bin/nvidia-cuda-mps-server");
    }
}
