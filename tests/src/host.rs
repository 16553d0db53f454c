//! A simulated host under test.
//!
//! The harness runs the programs and the library of the simulator, as a user does. It does not
//! depend on the format of the simulator's state, and links no code of the simulator. Each test has
//! a separate host in a temporary directory. Dropping the host removes the directory.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A simulated host, which exists from [`Host::up`] until this value is dropped.
#[derive(Debug)]
pub struct Host {
    // When this field is dropped, the host's directory is removed.
    _scratch: tempfile::TempDir,
    dir: PathBuf,
    env: BTreeMap<String, String>,
}

/// A line of the host's trace: a driver call that changes the hardware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traced {
    /// Pid of the caller.
    pub pid: u32,
    /// NVML function, such as `nvmlGpuInstanceDestroy`.
    pub function: String,
    /// Index of the GPU that the call changes.
    pub gpu: Option<u32>,
    /// Object and arguments of the call, such as `gi=2 ci=0`, `profile=9 placement=4:4` or `gi=2
    /// profile=0`.
    pub arguments: String,
    /// NVML return code; 0 is success.
    pub rc: u32,
}

impl Host {
    /// Starts a host from the name of a preset, or from a description in TOML. If the text contains
    /// `=` or a line break, it is a description.
    ///
    /// # Panics
    /// If `gpush-sim` is not built or refuses the description.
    #[must_use]
    pub fn up(preset_or_toml: &str) -> Self {
        let scratch = tempfile::Builder::new().prefix("gpush-host-").tempdir().expect("a temporary directory");
        let dir = scratch.path().join("host");
        let what = if preset_or_toml.contains(['=', '\n']) {
            let file = scratch.path().join("host.toml");
            std::fs::write(&file, preset_or_toml).expect("the description can be written");
            file.into_os_string()
        } else {
            preset_or_toml.into()
        };
        let up = gpush_sim().arg("up").arg(what).arg(&dir).output().expect("gpush-sim can be started");
        assert!(up.status.success(), "gpush-sim up {preset_or_toml}: {}", String::from_utf8_lossy(&up.stderr));
        let env = environment_of(&dir);
        assert!(env.contains_key("NVML_SIM_STATE"), "gpush-sim env names no NVML_SIM_STATE: {env:?}");
        Self { _scratch: scratch, dir, env }
    }

    /// Lets other users enter the host's directories.
    ///
    /// # Panics
    /// If a mode cannot be changed.
    #[must_use]
    pub fn opened(self) -> Self {
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("its mode can be changed");
        };
        // By default, only the user of the test can enter this directory.
        mode(self.dir().parent().expect("a directory"), 0o755);
        // Programs on the simulated host register in this directory.
        mode(&self.dir().join("proc"), 0o777);
        self
    }

    /// Replaces the host by another host in the same directory, for example with another driver. No
    /// process may have the driver open at this time.
    ///
    /// # Panics
    /// If a process has the driver open, or the description is refused.
    pub fn replace(&self, toml: &str) {
        self.sim::<&str>("down", &[]);
        let file = self.scratch("another.toml");
        std::fs::write(&file, toml).expect("the description can be written");
        let up = gpush_sim().arg("up").arg(&file).arg(&self.dir).output().expect("gpush-sim can be started");
        assert!(up.status.success(), "gpush-sim up: {}", String::from_utf8_lossy(&up.stderr));
    }

    /// Returns the host's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns a path for a file of the test, next to the host's directory. The file is removed
    /// together with the host.
    #[must_use]
    pub fn scratch(&self, name: &str) -> PathBuf {
        self._scratch.path().join(name)
    }

    /// Returns the path of the simulated `libnvidia-ml.so.1`.
    #[must_use]
    pub fn library(&self) -> PathBuf {
        self.dir.join("lib/libnvidia-ml.so.1")
    }

    /// Returns the environment variables that make a program use this host.
    #[must_use]
    pub fn env(&self) -> &BTreeMap<String, String> {
        &self.env
    }

    /// Returns a command that uses this host.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.envs(&self.env);
        command
    }

    /// Runs `gpush-sim SUBCOMMAND DIR ARGS…` and returns its standard output.
    ///
    /// # Panics
    /// If the command fails.
    pub fn sim<S: AsRef<std::ffi::OsStr>>(&self, subcommand: &str, args: &[S]) -> String {
        let output = self.try_sim(subcommand, args);
        assert!(output.status.success(), "gpush-sim {subcommand}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Does the same as [`Host::sim`], for a command that may fail.
    ///
    /// # Panics
    /// If `gpush-sim` cannot be started.
    pub fn try_sim<S: AsRef<std::ffi::OsStr>>(&self, subcommand: &str, args: &[S]) -> Output {
        gpush_sim().arg(subcommand).arg(&self.dir).args(args).output().expect("gpush-sim can be started")
    }

    /// Adds a fault rule. `rule` is the rest of the command after `gpush-sim fault DIR add`, such
    /// as `nvmlGpuInstanceDestroy --gpu 0 --rc IN_USE --times 1`.
    ///
    /// # Panics
    /// If the rule is refused.
    pub fn fault(&self, rule: &str) {
        let words: Vec<&str> = std::iter::once("add").chain(rule.split_whitespace()).collect();
        self.sim("fault", &words);
    }

    /// Removes all fault rules. A call that hangs because of a rule then continues.
    ///
    /// # Panics
    /// If the rules cannot be removed.
    pub fn clear_faults(&self) {
        self.sim("fault", &["clear"]);
    }

    /// Starts a process that sleeps, and registers it on a GPU or MIG device. `place` is the rest
    /// of the command after `gpush-sim process DIR add`, such as `--gpu 0 --gi 2 --ci 0 --memory
    /// 1024`. Returns the pid. The process ends together with the host.
    ///
    /// # Panics
    /// If the place is refused.
    pub fn process(&self, place: &str) -> u32 {
        let words: Vec<&str> = ["add", "--spawn"].into_iter().chain(place.split_whitespace()).collect();
        let output = self.sim("process", &words);
        output.trim().parse().unwrap_or_else(|_| panic!("gpush-sim process add --spawn printed {output:?}"))
    }

    /// Does the same as [`Host::process`]. The environment of the process names a lease.
    ///
    /// # Panics
    /// If the place is refused.
    pub fn process_of_lease(&self, place: &str, lease: &str) -> u32 {
        let mut command = gpush_sim();
        command.arg("process").arg(&self.dir).args(["add", "--spawn"]).args(place.split_whitespace());
        let output = command.env("GPUSH_LEASE", lease).output().expect("gpush-sim can be started");
        assert!(output.status.success(), "gpush-sim process: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().parse().expect("a pid")
    }

    /// Ends a process that [`Host::process`] started.
    ///
    /// # Panics
    /// If the process does not exist.
    pub fn end_process(&self, pid: u32) {
        self.sim("process", &["remove", &pid.to_string()]);
    }

    /// Returns the host as `gpush-sim show --json` prints it: its real state, read without NVML.
    ///
    /// # Panics
    /// If the host cannot be read.
    #[must_use]
    pub fn show(&self) -> serde_json::Value {
        serde_json::from_str(&self.sim("show", &["--json"])).expect("gpush-sim show --json prints JSON")
    }

    /// Starts recording the driver calls that change the hardware. [`Host::trace`] returns them.
    ///
    /// # Panics
    /// If the trace file cannot be written.
    pub fn start_trace(&self) {
        std::fs::write(self.dir.join("trace"), "").expect("the trace can be started");
    }

    /// Returns the driver calls since [`Host::start_trace`] that change the hardware, in order.
    ///
    /// # Panics
    /// If recording is off, or a line has an unknown form.
    #[must_use]
    pub fn trace(&self) -> Vec<Traced> {
        self.trace_after(0).0
    }

    /// Does the same as [`Host::trace`], for the calls after the first `offset` bytes of the trace. Also returns the
    /// offset of the next call.
    ///
    /// # Panics
    /// If recording is off, or a line has an unknown form.
    #[must_use]
    pub fn trace_after(&self, offset: usize) -> (Vec<Traced>, usize) {
        let text = std::fs::read_to_string(self.dir.join("trace")).expect("start_trace() was called");
        // A program may be writing the last line.
        let end = text.rfind('\n').map_or(0, |last| last + 1);
        let lines = text.get(offset..end).unwrap_or_default().lines();
        let calls = lines.map(|line| parse_trace(line).unwrap_or_else(|| panic!("trace line {line:?}")));
        (calls.collect(), end)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // The simulated daemons end together with their host. NVIDIA's control daemons do not, so
        // kill them.
        if self.dir.join("real").exists() {
            for pid in crate::mps::controls(&self.dir) {
                let _ended = crate::mps::signal(pid, nix::sys::signal::Signal::SIGKILL);
            }
        }
        // Ignore errors: the directory is removed even after an error, and a drop must not panic.
        let _ = gpush_sim().arg("down").arg(&self.dir).stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

/// Returns the path of a program of the workspace, such as `gpushd`, in the build profile of the
/// running test.
///
/// # Panics
/// If the program is not built. When cargo tests one package, it builds only the programs of that
/// package.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its path");
    // target/<profile>/deps/<test> → target/<profile>
    let profile = test.parent().and_then(Path::parent).expect("tests run from target/<profile>/deps");
    let path = profile.join(name);
    assert!(
        path.exists(),
        "{} is not built: run `cargo build --workspace` first, or `cargo xtask test` which does",
        path.display()
    );
    path
}

fn gpush_sim() -> Command {
    let mut command = Command::new(program("gpush-sim"));
    // A developer may have selected another simulated host in the environment. So remove this
    // selection.
    command.env_remove("NVML_SIM_STATE").env("GPUSH_SIM_LIBRARY", program("libnvidia_ml.so"));
    command
}

/// Returns the variables that `eval "$(gpush-sim env DIR)"` sets or changes in a shell.
fn environment_of(dir: &Path) -> BTreeMap<String, String> {
    let script = r#"set -e; eval "$("$0" env "$1")"; env -0"#;
    let output = Command::new("sh").arg("-c").arg(script).arg(program("gpush-sim")).arg(dir).output();
    let output = output.expect("sh can be started");
    assert!(output.status.success(), "gpush-sim env: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    text.split('\0')
        .filter_map(|entry| entry.split_once('='))
        // The shell sets `_` itself. If a variable has the same value as in this process, it was
        // not changed.
        .filter(|(key, value)| *key != "_" && std::env::var(key).ok().as_deref() != Some(*value))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

/// Parses `pid function gpu arguments -> NAME (code)`.
fn parse_trace(line: &str) -> Option<Traced> {
    let (call, outcome) = line.rsplit_once(" -> ")?;
    let mut words = call.splitn(4, ' ');
    Some(Traced {
        pid: words.next()?.parse().ok()?,
        function: words.next()?.to_owned(),
        gpu: words.next()?.parse().ok(),
        arguments: words.next().unwrap_or_default().to_owned(),
        rc: outcome.trim_end_matches(')').rsplit_once('(')?.1.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_lines_are_parsed() {
        let traced = parse_trace("12 nvmlGpuInstanceDestroy 0 gi=3 -> IN_USE (19)").unwrap();
        assert_eq!((traced.pid, traced.function.as_str(), traced.gpu), (12, "nvmlGpuInstanceDestroy", Some(0)));
        assert_eq!((traced.arguments.as_str(), traced.rc), ("gi=3", 19));
        let bare = parse_trace("12 nvmlX -  -> SUCCESS (0)").unwrap();
        assert_eq!((bare.gpu, bare.arguments.as_str(), bare.rc), (None, "", 0));
        assert!(parse_trace("12 nvmlGpuInstanceDestroy 0").is_none());
    }
}
