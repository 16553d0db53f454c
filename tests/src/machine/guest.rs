//! gpush in a machine: installed with the commands of docs/install.md, on a simulated host.

use std::path::{Path, PathBuf};

use super::Machine;
use crate::{
    host::program,
    page::{blocks, document},
};

/// Path of the built programs in the machine.
pub(super) const BUILT: &str = "/opt/built";

/// Path of the checkout in the machine.
pub(super) const REPOSITORY: &str = "/opt/gpush";

/// Path of the simulated host in the machine.
const HOST: &str = "/var/lib/gpush-sim";

/// Returns the directory of the built programs on this host.
pub(super) fn built() -> PathBuf {
    program("gpushd").parent().expect("a program is somewhere").to_owned()
}

/// Returns the directory of the checkout on this host.
pub(super) fn repository() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("tests are in the repository").to_owned()
}

impl Machine {
    /// Installs gpush with the commands of docs/install.md, and enables it without starting it.
    ///
    /// # Panics
    /// If the commands of the page fail.
    pub fn install(&self) {
        let page = document("install.md");
        let [_, install, enable, _] = &blocks(&page, "sh")[..] else {
            panic!("install.md has other blocks than it had")
        };
        let install: String = install
            .replace("target/release", BUILT)
            .lines()
            .filter(|line| !line.contains("/man/"))
            .fold(String::new(), |text, line| text + line + "\n");
        self.sh(&format!("set -e\ncd {REPOSITORY}\n{install}"));
        // The page ends with calls of gpushctl. The tests run their own commands instead.
        let enable: Vec<_> = enable.lines().filter(|line| !line.starts_with("gpushctl")).collect();
        self.sh(&format!("set -e\n{}", enable.join("\n").replace(" --now", "")));
    }

    /// Installs a package of the debug build, in the workspace's version (`None`) or in another
    /// version. Returns the output of `dpkg`, or `None` if the package does not exist because
    /// `cargo xtask test` has not built it.
    ///
    /// # Panics
    /// If the package cannot be installed.
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

    /// Makes gpushd use a simulated host, described in TOML. The unit's sandbox gets one exception:
    /// the directory of the simulated host.
    ///
    /// # Panics
    /// If the description is refused.
    pub fn simulated_host(&self, toml: &str) {
        self.write("/srv/host.toml", toml);
        self.sh(&format!("GPUSH_SIM_LIBRARY={BUILT}/libnvidia_ml.so {BUILT}/gpush-sim up /srv/host.toml {HOST}"));
        let script = format!(r#"eval "$({BUILT}/gpush-sim env {HOST})"; env"#);
        let text = self.sh(&script);
        let seen = ["NVML_SIM_STATE=", "LD_LIBRARY_PATH=", "GPUSH_BOOT_ID_FILE=", "GPUSH_PROC=", "GPUSH_NVIDIA_SMI="];
        // The unit's own socket and state directory remain in use.
        let set = text.lines().filter(|line| seen.iter().any(|name| line.starts_with(name)));
        let set: String = set.map(|line| format!("Environment=\"{line}\"\n")).collect();
        self.write(
            "/etc/systemd/system/gpushd.service.d/simulated.conf",
            format!("[Service]\n{set}ReadWritePaths={HOST}\n"),
        );
        self.sh("systemctl daemon-reload");
    }
}
