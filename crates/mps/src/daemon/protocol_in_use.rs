//! Describes the protocol that gpushd uses with a daemon, and recognizes daemons whose protocol gpushd does not
//! support.

use std::{fs::File, io::Read};

use crate::protocol::{
    control::{Control, Protocol},
    version::{self, Known, TESTED},
};
use gpush_host::proc;

/// Size in bytes up to which gpushd searches a program for its version. NVIDIA's program has 54 kB.
const LARGEST: u64 = 1 << 20;

/// Describes the protocol in use with the daemon of this pid, and the version of the daemon's
/// program. That version may differ from the driver's version. Uses the driver's version if the
/// program contains no version.
pub(super) fn describe(control: &Control, pid: i32, driver: Option<&str>) -> String {
    let (own, tried) = (program_version(pid), tested_branches());
    let version = match (&own, driver) {
        (Some(own), _) => format!("version {own}, "),
        (None, Some(driver)) => format!("of driver {driver}, "),
        (None, None) => String::new(),
    };
    match (control.protocol(), own.as_deref().or(driver).and_then(version::known)) {
        (Protocol::FrontEnd(what), _) => {
            format!(
                "{version}connection through NVIDIA's front-end: this gpushd does not know the daemon's own \
            protocol ({what})"
            )
        }
        (Protocol::Direct, Some(Known::Tested)) => format!("{version}direct connection"),
        (Protocol::Direct, Some(Known::Untried(_)) | None) => {
            format!("{version}direct connection (gpush was tested only with versions {tried})")
        }
    }
}

/// Lists the driver branches with which the protocol was tested.
fn tested_branches() -> String {
    let [first @ .., last] = TESTED.map(|branch| branch.to_string());
    format!("{} and {last}", first.join(", "))
}

/// Returns the version of the program that a process executes. Works even if the program's file was
/// replaced.
fn program_version(pid: i32) -> Option<String> {
    let program = File::open(format!("/proc/{pid}/exe")).ok()?;
    if program.metadata().ok()?.len() > LARGEST {
        return None;
    }
    let mut bytes = Vec::new();
    program.take(LARGEST).read_to_end(&mut bytes).ok()?;
    version::of_program(&bytes).map(str::to_owned)
}

/// Returns why gpushd does not support a daemon, judged by its command line and environment.
pub(super) fn unsupported(pid: i32) -> Option<String> {
    let of = |what: &str| proc::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
    version::unsupported(&of("cmdline"), &of("environ")).map(|what| what.to_string())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn driver_version_is_used_when_the_program_names_none() {
        let control = Control::of(Path::new("/nowhere"));
        let words = |driver| describe(&control, i32::MAX, driver);
        assert_eq!(words(Some("550.163.01")), "of driver 550.163.01, direct connection");
        assert_eq!(
            words(Some("570.86.15")),
            "of driver 570.86.15, direct connection (gpush was tested only with versions 535, 550, 555 and 580)"
        );
        assert_eq!(words(None), "direct connection (gpush was tested only with versions 535, 550, 555 and 580)");
        assert_eq!(unsupported(i32::MAX), None);
    }
}
