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

/// Path of the packages in the machine.
pub(super) const PACKAGES: &str = "/opt/packages";

/// Environment variable with the directory of the packages to test. `cargo xtask soak` sets it to packages of the
/// release build, which also run on Debian 11.
const TESTED_PACKAGES: &str = "GPUSH_TEST_PACKAGES";

/// Path of the simulated host in the machine.
const HOST: &str = "/var/lib/gpush-sim";

/// Returns the directory of the built programs on this host.
pub(super) fn built() -> PathBuf {
    program("gpushd").parent().expect("a program is somewhere").to_owned()
}

/// Returns whether the packages to test are from the release build.
#[must_use]
pub fn packages_are_releases() -> bool {
    std::env::var_os(TESTED_PACKAGES).is_some()
}

/// Returns the directory of the packages on this host. By default, the packages are from the debug build.
#[must_use]
pub fn packages() -> PathBuf {
    std::env::var_os(TESTED_PACKAGES).map_or_else(|| built().join("packages"), PathBuf::from)
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
        let blocks = blocks(&page, "sh");
        let block = |command: &str| blocks.iter().find(|block| block.contains(command)).expect(command);
        let (install, enable) = (block("target/release/gpushd"), block("systemd-sysusers"));
        let install: String = install
            .replace("target/release", BUILT)
            .lines()
            .filter(|line| !line.contains("/man/"))
            .fold(String::new(), |text, line| text + line + "\n");
        self.sh(&format!("set -e\ncd {REPOSITORY}\n{install}"));
        // The page ends with calls of gpushctl. Leave them out, because the tests run their own commands.
        let enable: Vec<_> = enable.lines().filter(|line| !line.starts_with("gpushctl")).collect();
        self.sh(&format!("set -e\n{}", enable.join("\n").replace(" --now", "")));
    }

    /// Returns the path of a package file in the machine. `file` contains the placeholder `VERSION`. For `version`,
    /// `None` means the version of the workspace. Returns `None` if `cargo xtask test` has not built the file.
    #[must_use]
    pub fn package(&self, file: &str, version: Option<&str>) -> Option<String> {
        let file = file.replace("VERSION", version.unwrap_or(env!("CARGO_PKG_VERSION")));
        if packages().join(&file).is_file() {
            return Some(format!("{PACKAGES}/{file}"));
        }
        println!("SKIPPED packages: {file} is not there; `cargo xtask test` makes it where dpkg-deb and rpmbuild are");
        None
    }

    /// Installs the .deb of a version, as an unattended upgrade does. Returns the output of apt. Returns `None` if the
    /// package does not exist.
    ///
    /// # Panics
    /// If the package cannot be installed.
    #[must_use]
    pub fn install_package(&self, version: Option<&str>) -> Option<String> {
        let file = self.package("gpush_VERSION-1_amd64.deb", version)?;
        // Without package lists, apt starts faster. The dependencies of the package are in every machine.
        Some(self.sh(&format!(
            "DEBIAN_FRONTEND=noninteractive apt-get -q -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=/dev/null \
             install --yes --allow-downgrades {file} </dev/null 2>&1"
        )))
    }

    /// Makes gpushd use a simulated host, which `toml` describes. The sandbox of the unit gets one exception: the
    /// directory of the simulated host. If the package gpush-sim is installed, its programs simulate the host.
    /// Otherwise, the built programs do.
    ///
    /// # Panics
    /// If the description is refused.
    pub fn simulated_host(&self, toml: &str) {
        self.write("/srv/host.toml", toml);
        let simulator = if self.run("test -x /usr/bin/gpush-sim").status.success() {
            "/usr/bin/gpush-sim".to_owned()
        } else {
            format!("env GPUSH_SIM_LIBRARY={BUILT}/libnvidia_ml.so {BUILT}/gpush-sim")
        };
        self.sh(&format!("{simulator} up /srv/host.toml {HOST}"));
        let script = format!(r#"eval "$({simulator} env {HOST})"; env"#);
        let text = self.sh(&script);
        let seen = ["NVML_SIM_STATE=", "LD_LIBRARY_PATH=", "GPUSH_BOOT_ID_FILE=", "GPUSH_PROC=", "GPUSH_NVIDIA_SMI="];
        // Leave out the variables for socket and state directory, because gpushd uses the socket and the state
        // directory of its unit.
        let set = text.lines().filter(|line| seen.iter().any(|name| line.starts_with(name)));
        let set: String = set.map(|line| format!("Environment=\"{line}\"\n")).collect();
        self.write(
            "/etc/systemd/system/gpushd.service.d/simulated.conf",
            format!("[Service]\n{set}ReadWritePaths={HOST}\n"),
        );
        self.sh("systemctl daemon-reload");
    }
}
