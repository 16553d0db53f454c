//! gpush in a machine: installed by the commands of docs/install.md, with a simulated host.

use std::path::{Path, PathBuf};

use super::Machine;
use crate::{
    host::program,
    page::{blocks, document},
};

/// Path of the built programs inside.
pub(super) const BUILT: &str = "/opt/built";

/// Path of the checkout inside.
pub(super) const REPOSITORY: &str = "/opt/gpush";

/// The simulated host, inside.
const HOST: &str = "/var/lib/gpush-sim";

/// Returns the directory of the built programs.
pub(super) fn built() -> PathBuf {
    program("gpushd").parent().expect("a program is somewhere").to_owned()
}

/// Returns the directory of the checkout.
pub(super) fn repository() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("tests are in the repository").to_owned()
}

impl Machine {
    /// Installs gpush with the commands of docs/install.md, up to enabling it.
    ///
    /// # Panics
    /// When the page's commands fail.
    pub fn install(&self) {
        let page = document("install.md");
        let [_, install, enable] = &blocks(&page, "sh")[..] else { panic!("install.md has other blocks than it had") };
        let install: String = install
            .replace("target/release", BUILT)
            .lines()
            .filter(|line| !line.contains("/man/"))
            .fold(String::new(), |text, line| text + line + "\n");
        self.sh(&format!("set -e\ncd {REPOSITORY}\n{install}"));
        // The page ends with a trial of gpushctl, which the tests replace by their own commands.
        let enable: Vec<_> = enable.lines().filter(|line| !line.starts_with("gpushctl")).collect();
        self.sh(&format!("set -e\n{}", enable.join("\n").replace(" --now", "")));
    }

    /// Installs a package of the debug build, in the version that the tests are built with (`None`) or a later one.
    /// Returns what `dpkg` printed, or `None` where `cargo xtask test` made no packages.
    ///
    /// # Panics
    /// When the package can't be installed.
    #[must_use]
    pub fn install_package(&self, version: Option<&str>) -> Option<String> {
        let version = version.unwrap_or(env!("CARGO_PKG_VERSION"));
        let file = format!("packages/gpush_{version}-1_amd64.deb");
        if !built().join(&file).is_file() {
            println!("SKIPPED packages: {file} is not there; `cargo xtask test` makes it where dpkg-deb is installed");
            return None;
        }
        Some(self.sh(&format!("dpkg --force-confdef --force-confold --install {BUILT}/{file} 2>&1")))
    }

    /// Makes gpushd use a simulated host, described in TOML. The host's directory is the only exception from
    /// the unit's sandbox.
    ///
    /// # Panics
    /// When it is refused.
    pub fn simulated_host(&self, toml: &str) {
        self.write("/srv/host.toml", toml);
        self.sh(&format!("GPUSH_SIM_LIBRARY={BUILT}/libnvidia_ml.so {BUILT}/gpush-sim up /srv/host.toml {HOST}"));
        let script = format!(r#"eval "$({BUILT}/gpush-sim env {HOST})"; env"#);
        let text = self.sh(&script);
        let seen = ["NVML_SIM_STATE=", "LD_LIBRARY_PATH=", "GPUSH_BOOT_ID_FILE=", "GPUSH_PROC=", "GPUSH_NVIDIA_SMI="];
        // Socket and state directory remain those of the unit.
        let set = text.lines().filter(|line| seen.iter().any(|name| line.starts_with(name)));
        let set: String = set.map(|line| format!("Environment=\"{line}\"\n")).collect();
        self.write(
            "/etc/systemd/system/gpushd.service.d/simulated.conf",
            format!("[Service]\n{set}ReadWritePaths={HOST}\n"),
        );
        self.sh("systemctl daemon-reload");
    }
}
