//! The protocol against NVIDIA's own control daemon, which needs no GPU to run.
//!
//! Helpers outside `#[test]` functions may panic too: that is how a test fails.
#![allow(clippy::unwrap_used)]

use std::{
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use gpush_api::{MemoryLimit, Percentage, Priority};
use gpush_mps::{
    control::{Control, ControlError},
    lock,
    session::SessionError,
};

const LONG: Duration = Duration::from_secs(10);
const PROGRAM: &str = "nvidia-cuda-mps-control";

/// A daemon of its own directory, in the foreground; ended when dropped.
struct Real {
    child: Child,
    dir: tempfile::TempDir,
}

impl Real {
    /// Starts one; nothing where it is not installed.
    async fn start() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, log) = (dir.path().join("pipe"), dir.path().join("log"));
        std::fs::create_dir(&pipe).unwrap();
        std::fs::create_dir(&log).unwrap();
        let spawned = Command::new(PROGRAM)
            .arg("-f")
            .env_clear()
            .env("PATH", std::env::var_os("PATH")?)
            .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
            .env("CUDA_MPS_LOG_DIRECTORY", &log)
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(dir.path().join("out")).unwrap())
            .stderr(Stdio::null())
            .spawn();
        let Ok(child) = spawned else {
            println!("SKIPPED {PROGRAM}: not installed; `cargo xtask test` as root installs it");
            return None;
        };
        let real = Self { child, dir };
        let control = Control::of(&real.pipe());
        while control.daemon(LONG).await.is_err() {
            tokio::task::yield_now().await;
        }
        Some(real)
    }

    fn pipe(&self) -> PathBuf {
        self.dir.path().join("pipe")
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn the_daemon_is_who_holds_the_lock_and_who_greets() {
    let Some(real) = Real::start().await else { return };
    let control = Control::of(&real.pipe());
    let daemon = control.daemon(LONG).await.unwrap();
    assert_eq!((daemon.pid, daemon.uid), (real.pid(), nix::unistd::geteuid().as_raw()));
    assert_eq!(lock::holder(&real.pipe()).unwrap(), Some(real.pid()));
    assert_eq!(lock::holder(real.dir.path()).unwrap(), None);
}

#[tokio::test]
async fn what_is_set_is_read_back() {
    let Some(real) = Real::start().await else { return };
    let control = Control::of(&real.pipe());
    assert_eq!(control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
    for text in ["25", "12.5", "33.3", "0.1", "100"] {
        let percentage = text.parse().unwrap();
        control.set_default_percentage(percentage, LONG).await.unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(control.default_percentage(LONG).await.unwrap(), percentage);
    }
    assert_eq!(control.default_memory_limit(LONG).await.unwrap(), None);
    for text in ["1M", "512M", "1536M", "8G", "80G"] {
        let limit: MemoryLimit = text.parse().unwrap();
        control.set_default_memory_limit(Some(limit), LONG).await.unwrap_or_else(|e| panic!("{text}: {e}"));
    }
    control.set_default_memory_limit(None, LONG).await.unwrap();
    assert_eq!(control.default_memory_limit(LONG).await.unwrap(), None);
    for priority in [Priority::BelowNormal, Priority::Normal] {
        control.set_default_priority(priority, LONG).await.unwrap();
    }
    assert_eq!(control.servers(LONG).await.unwrap(), [] as [i32; 0]);
}

#[tokio::test]
async fn twenty_who_ask_at_once_are_all_answered() {
    let Some(real) = Real::start().await else { return };
    let control = std::sync::Arc::new(Control::of(&real.pipe()));
    let asked = (0..20).map(|_| {
        let control = std::sync::Arc::clone(&control);
        tokio::spawn(async move { control.default_percentage(LONG).await })
    });
    for asked in asked.collect::<Vec<_>>() {
        assert_eq!(asked.await.unwrap().unwrap(), Percentage::ALL);
    }
}

#[tokio::test]
async fn somebody_at_a_prompt_makes_it_busy_and_it_answers_when_he_is_gone() {
    let Some(real) = Real::start().await else { return };
    let sit_down = || {
        let mut prompt = Command::new(PROGRAM);
        prompt.env("CUDA_MPS_PIPE_DIRECTORY", real.pipe()).stdin(Stdio::piped()).stdout(Stdio::null());
        prompt.spawn().unwrap()
    };
    let mut prompt = sit_down();
    let control = Control::of(&real.pipe());
    // It has its ear a moment after it starts, unless we had it just then: then it ends.
    let busy = loop {
        if let Err(error) = control.default_percentage(Duration::from_millis(300)).await {
            break error;
        }
        if prompt.try_wait().unwrap().is_some() {
            prompt = sit_down();
        }
    };
    assert!(matches!(busy, ControlError::Busy | ControlError::Session(SessionError::Silent { .. })), "{busy:?}");
    drop(prompt.stdin.take());
    prompt.wait().unwrap();
    assert_eq!(control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
}

#[tokio::test]
async fn a_daemon_that_is_gone_is_absent_and_one_that_is_told_ends() {
    let Some(mut real) = Real::start().await else { return };
    let control = Control::of(&real.pipe());
    control.quit(None, LONG).await.unwrap();
    real.child.wait().unwrap();
    let gone = control.default_percentage(LONG).await.unwrap_err();
    assert!(matches!(gone, ControlError::Session(SessionError::Absent { .. })), "{gone:?}");
    assert_eq!(lock::holder(&real.pipe()).unwrap(), None);
}

#[tokio::test]
async fn one_that_stands_still_is_silent() {
    let Some(real) = Real::start().await else { return };
    let pid = nix::unistd::Pid::from_raw(real.pid());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    let control = Control::of(&real.pipe());
    let silent = control.default_percentage(Duration::from_millis(200)).await.unwrap_err();
    assert!(matches!(silent, ControlError::Session(SessionError::Silent { .. })), "{silent:?}");
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).unwrap();
    assert_eq!(control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
}

#[tokio::test]
async fn what_is_no_daemon_is_told_apart() {
    let absent = Control::of(Path::new("/nonexistent")).daemon(LONG).await.unwrap_err();
    assert!(matches!(absent, ControlError::Session(SessionError::Absent { .. })), "{absent:?}");
    let dir = tempfile::tempdir().unwrap();
    let other = std::os::unix::net::UnixListener::bind(dir.path().join("control_privileged")).unwrap();
    let stream = Control::of(dir.path()).daemon(LONG).await.unwrap_err();
    assert!(matches!(stream, ControlError::Session(SessionError::System(_))), "{stream:?}");
    drop((other, UnixStream::pair()));
}
