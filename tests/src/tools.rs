//! Programs that tests run and that `cargo xtask test` installs: Python clients in a private
//! environment, Slurm's NVML plugin, and Prometheus. A test that does not find a program reports `SKIPPED`.

use std::path::{Path, PathBuf};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned()
}

/// Returns the path of a file. Its directory is the value of an environment variable, or a
/// directory of `target/` if the variable is not set.
fn below(variable: &str, directory: &str, file: &str) -> Option<PathBuf> {
    let directory =
        std::env::var_os(variable).map_or_else(|| workspace().join("target").join(directory), PathBuf::from);
    let path = directory.join(file);
    if path.exists() {
        return Some(path);
    }
    println!("SKIPPED {file}: not in {}; install it with `cargo xtask test`", directory.display());
    None
}

/// Returns the path of a program in the private Python environment. If the program is not
/// installed, prints a message and returns `None`.
#[must_use]
pub fn python_program(name: &str) -> Option<PathBuf> {
    below("GPUSH_TEST_VENV", "venv", &format!("bin/{name}"))
}

/// Returns the path of Slurm's NVML plugin. If the plugin is not installed, prints a message and
/// returns `None`.
#[must_use]
pub fn slurm_nvml_plugin() -> Option<PathBuf> {
    below("GPUSH_TEST_SLURM_PLUGINS", "slurm-plugins", "gpu_nvml.so")
}

/// Returns the path of a program of Prometheus, `prometheus` or `promtool`. If the program is not installed, prints a
/// message and returns `None`.
#[must_use]
pub fn prometheus_program(name: &str) -> Option<PathBuf> {
    below("GPUSH_TEST_PROMETHEUS", "prometheus", name)
}

/// Returns the path of a program in `PATH`, `/usr/sbin` or `/sbin`. If the program is not
/// installed, prints a message and returns `None`.
#[must_use]
pub fn program_on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let administrators = [PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")];
    let found = std::env::split_paths(&path).chain(administrators).map(|dir| dir.join(name)).find(|file| file.exists());
    if found.is_none() {
        println!("SKIPPED {name}: not on PATH; install it with `cargo xtask test`");
    }
    found
}

/// Returns the path of a script in `tests/clients`.
#[must_use]
pub fn client_script(name: &str) -> PathBuf {
    workspace().join("tests/clients").join(name)
}
