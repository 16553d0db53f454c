//! How a daemon is spoken to, in words; and what it is, when it is one that can't be spoken to yet.

use std::{fs::File, io::Read};

use crate::protocol::{
    control::{Control, Protocol},
    version::{self, Known, TRIED},
};
use gpush_host::proc;

/// Largest program that is searched for its version, bytes. NVIDIA's has 0.3 MB.
const LARGEST: u64 = 1 << 20;

/// How the daemon of a pid is spoken to. Its version is that of its program, which may be another than that of the
/// driver, and that of the driver where the program does not tell.
pub(super) fn words(control: &Control, pid: i32, driver: Option<&str>) -> String {
    let (own, tried) = (of_process(pid), TRIED.map(|branch| branch.to_string()).join(" and "));
    let version = match (&own, driver) {
        (Some(own), _) => format!("version {own}, "),
        (None, Some(driver)) => format!("of driver {driver}, "),
        (None, None) => String::new(),
    };
    match (control.protocol(), own.as_deref().or(driver).and_then(version::known)) {
        (Protocol::FrontEnd(what), _) => {
            format!("{version}through NVIDIA's front-end: its own protocol is not known to this gpushd, {what}")
        }
        (Protocol::Direct, Some(Known::Tried)) => format!("{version}spoken to directly"),
        (Protocol::Direct, Some(Known::Untried(_)) | None) => {
            format!("{version}spoken to directly, which was tried with {tried}")
        }
    }
}

/// Version of the program that a process runs, also when its file is another by now.
fn of_process(pid: i32) -> Option<String> {
    let program = File::open(format!("/proc/{pid}/exe")).ok()?;
    if program.metadata().ok()?.len() > LARGEST {
        return None;
    }
    let mut bytes = Vec::new();
    program.take(LARGEST).read_to_end(&mut bytes).ok()?;
    version::of_program(&bytes).map(str::to_owned)
}

/// Why a daemon that does not answer as it should can't, if it is for the way that it was started.
pub(super) fn unsupported(pid: i32) -> Option<String> {
    let of = |what: &str| proc::read(format!("/proc/{pid}/{what}")).unwrap_or_default();
    version::unsupported(&of("cmdline"), &of("environ")).map(|what| what.to_string())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_driver_tells_where_the_program_does_not() {
        let control = Control::of(Path::new("/nowhere"));
        let words = |driver| words(&control, i32::MAX, driver);
        assert_eq!(words(Some("550.163.01")), "of driver 550.163.01, spoken to directly");
        assert_eq!(
            words(Some("580.65.06")),
            "of driver 580.65.06, spoken to directly, which was tried with 535 and 550"
        );
        assert_eq!(words(None), "spoken to directly, which was tried with 535 and 550");
        assert_eq!(unsupported(i32::MAX), None);
    }
}
