//! Kernel and systemd: checks for the oldest supported versions.

use crate::{Area, Finding, Host};

/// Oldest supported kernel. It has all system calls that gpushd needs, such as `pidfd_open`.
const KERNEL: (u32, u32) = (5, 4);

/// Oldest supported systemd. Older versions do not support some settings of gpush's units.
const SYSTEMD: u32 = 245;

pub(crate) fn examine(host: &Host) -> Vec<Finding> {
    vec![kernel(host), systemd(host)]
}

fn kernel(host: &Host) -> Finding {
    let release = host.read("proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let version = match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor),
        _ => {
            let hint = "see /proc/sys/kernel/osrelease";
            return Finding::warning(Area::System, "the version of the kernel is unknown", hint);
        }
    };
    if version < KERNEL {
        let message = format!("Linux {release} is too old: gpush needs {}.{} or later", KERNEL.0, KERNEL.1);
        return Finding::problem(
            Area::System,
            message,
            "install a newer kernel, or a newer release of the distribution",
        );
    }
    Finding::ok(Area::System, format!("Linux {release}"))
}

fn systemd(host: &Host) -> Finding {
    if !host.has("run/systemd/system") {
        let message = "systemd is not running, so MPS daemons are child processes of gpushd";
        let hint = "run gpushd as a systemd service, so that MPS daemons do not end with gpushd";
        return Finding::warning(Area::System, message, hint);
    }
    let printed = host.run("usr/bin/systemctl", &["--version"]).unwrap_or_default();
    let version = printed.split_whitespace().nth(1).and_then(|word| {
        let digits: String = word.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    });
    match version {
        None => Finding::warning(Area::System, "the version of systemd is unknown", "see `systemctl --version`"),
        Some(version) if version < SYSTEMD => {
            let message = format!("systemd {version} is too old: gpush needs {SYSTEMD} or later");
            Finding::problem(Area::System, message, "install a newer release of the distribution")
        }
        Some(version) => Finding::ok(Area::System, format!("systemd {version}")),
    }
}
