//! The stage of a test: the hardware under test, and the script of its worker.

#![allow(dead_code)] // Each test program uses a part of this.

use std::{fs, path::PathBuf, time::Duration};

use gpush_api::GpuUuid;
use gpush_nvml::{Hardware, Options};
use nix::{sys::signal::kill, unistd::Pid};

pub(crate) fn gpu(uuid: &str) -> GpuUuid {
    GpuUuid::from(uuid)
}

/// The hardware under test, and the directory of its worker's script.
pub(crate) struct Stage {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) hardware: Hardware,
}

impl Stage {
    pub(crate) fn new(behaviour: &str) -> Self {
        Self::with(behaviour, |_| {})
    }

    pub(crate) fn with(behaviour: &str, change: impl FnOnce(&mut Options)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("behaviour"), behaviour).unwrap();
        let mut options = Options::of_this_program();
        options.args = ["--ignored", "--exact", "scripted::worker"].map(str::to_owned).to_vec();
        options.library = Some(dir.path().to_owned());
        // The limit is short only if the script contains a hang, so that the other tests do not
        // fail on a busy machine.
        let allowed = if behaviour.contains("hang") || behaviour.contains("gate") { 1 } else { 30 };
        options.deadlines.read = Duration::from_secs(allowed);
        options.deadlines.change = Duration::from_secs(allowed);
        options.deadlines.grace = Duration::from_millis(200);
        options.deadlines.retry = Duration::from_millis(20);
        change(&mut options);
        let hardware = Hardware::start(options);
        Self { dir, hardware }
    }

    pub(crate) fn behave(&self, behaviour: &str) {
        let fresh = self.dir.path().join("fresh");
        fs::write(&fresh, behaviour).unwrap();
        fs::rename(fresh, self.dir.path().join("behaviour")).unwrap();
    }

    /// A gate at which a call waits until the gate is opened.
    pub(crate) fn gate(&self) -> Gate {
        let path = self.dir.path().join("gate");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        Gate(path)
    }

    pub(crate) fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    pub(crate) async fn pid(&self) -> u32 {
        self.hardware.driver().await.unwrap();
        self.hardware.status().worker.unwrap()
    }
}

pub(crate) struct Gate(PathBuf);

impl Gate {
    /// Waits until a call has arrived, and lets it pass.
    pub(crate) fn open(&self) {
        fs::File::create(&self.0).unwrap();
    }
}

pub(crate) fn alive(pid: u32) -> bool {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), None).is_ok()
}

/// Waits for the end of a process that is not a child of the test.
pub(crate) async fn gone(pid: u32) {
    while alive(pid) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
