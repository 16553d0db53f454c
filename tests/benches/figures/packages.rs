//! Sizes of the packages for hosts, and the duration of an installation.

use std::{path::Path, process::Command, time::Instant};

use gpush_tests::machine::{Machine, packages};

use crate::report::{Report, median};

/// Number of installations, each on a new machine.
const INSTALLATIONS: usize = 5;

/// Measures the packages in the directory that `GPUSH_TEST_PACKAGES` names.
pub(crate) fn run() -> Report {
    let version = env!("CARGO_PKG_VERSION");
    let deb = format!("gpush_{version}-1_amd64.deb");
    let size = |name: &str| std::fs::metadata(packages().join(name)).map_or(f64::NAN, |meta| mebibytes(meta.len()));
    let files = [size(&deb), size(&format!("gpush-{version}-1.x86_64.rpm"))];
    let installed = mebibytes(installed_kib(&packages().join(&deb)).unwrap_or(u64::MAX) << 10);
    let mut times = Vec::new();
    for _ in 0..INSTALLATIONS {
        let Some(machine) = Machine::boot("the duration of an installation") else { break };
        let begun = Instant::now();
        // When this command returns, gpushd is ready.
        let _ = machine.install_package(None);
        times.push(begun.elapsed().as_secs_f64());
    }
    let mut report = Report::new(
        "Packages",
        &format!(
            "`cargo xtask package` builds the packages for x86_64. The last row is the median time of {INSTALLATIONS} \
             installations with `dpkg`, each in a new container with Debian and systemd. The time ends when gpushd is \
             ready."
        ),
        &["", "measured"],
    );
    let [packed, rpm] = files;
    let install = median(times);
    for (what, measured) in [
        ("gpush, .deb", format!("{packed:.1} MiB")),
        ("gpush, .rpm", format!("{rpm:.1} MiB")),
        ("gpush, installed", format!("{installed:.1} MiB")),
        ("installation", format!("{install:.2} s")),
    ] {
        report.rows.push(vec![what.to_owned(), measured]);
    }
    let largest = packed.max(rpm);
    report.target("size of the package", "at most 9 MiB", &format!("{largest:.1} MiB"), largest <= 9.0);
    report.target("installed size", "at most 30 MiB", &format!("{installed:.1} MiB"), installed <= 30.0);
    report.target("installation", "under 2 s", &format!("{install:.2} s"), install < 2.0);
    report
}

#[expect(clippy::cast_precision_loss, reason = "sizes of packages are small")]
fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Returns the installed size that a .deb states.
fn installed_kib(deb: &Path) -> Option<u64> {
    let output = Command::new("dpkg-deb").arg("--field").arg(deb).arg("Installed-Size").output().ok()?;
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}
