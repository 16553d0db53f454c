//! Log rotation. NVIDIA does not rotate its logs, and any user with access can write into them as fast as the disk
//! allows.
//!
//! ```text
//! sleep, shorter while a log grows faster ─► too large? ─► copy its end to `.1`, truncate it ─┐
//!   ▲                                                                                         │
//!   └── far too much within a minute: a finding that names the user of the directory ◄────────┘
//! ```
//!
//! The daemon opens its log for appending, so gpushd can copy and then truncate the file. Only lines that are written
//! between the copy and the truncation are lost. The rotation runs in a separate task, on blocking threads, even if the
//! daemon does not answer.

use std::{
    collections::VecDeque,
    fs::{self, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::FutureExt as _;
use gpush_host::subtask;
use gpush_locked::Locked;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep},
};

use super::{CONTROL_LOG, SERVER_LOG};

/// Suffix of the previous log.
pub(super) const BEFORE: &str = ".1";

/// Longest and shortest pause between two checks.
const PAUSE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(50));

/// gpushd reports a flood if a log grows by this many times its size limit within [`WITHIN`].
const FLOOD: u64 = 16;

/// The period for [`FLOOD`].
const WITHIN: Duration = Duration::from_secs(60);

/// Which logs to rotate, and when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::daemon) struct RotationConfig {
    pub(in crate::daemon) target: String,
    pub(in crate::daemon) dir: PathBuf,
    /// Size in bytes at which a log is rotated.
    pub(in crate::daemon) most: u64,
    /// The user of the pipe directory.
    pub(in crate::daemon) user: Option<u32>,
}

/// The task that rotates the logs of a daemon.
#[derive(Debug, Default)]
pub(in crate::daemon) struct LogRotation {
    keeps: Option<(watch::Sender<RotationConfig>, JoinHandle<()>)>,
    reported: Arc<Locked<Option<String>>>,
}

impl Drop for LogRotation {
    fn drop(&mut self) {
        if let Some((_, task)) = &self.keeps {
            task.abort();
        }
    }
}

impl LogRotation {
    /// Starts rotating the logs of a daemon, or updates the limits.
    #[expect(clippy::disallowed_methods, reason = "the panic continues in the supervisor task")]
    pub(in crate::daemon) fn keep(&mut self, kept: RotationConfig) {
        match &mut self.keeps {
            // Update the running task, so that it keeps its measurements of the growth.
            Some((now, task)) => {
                // The rotation does not return. If it has panicked, the supervisor task panics too.
                task.now_or_never().and_then(subtask::output);
                now.send_if_modified(|now| {
                    let is_other = *now != kept;
                    *now = kept;
                    is_other
                });
            }
            None => {
                let (now, how) = watch::channel(kept);
                self.keeps = Some((now, tokio::spawn(keep(how, Arc::clone(&self.reported)))));
            }
        }
    }

    /// Describes a flooded log.
    pub(in crate::daemon) fn finding(&self) -> Option<String> {
        self.reported.lock().clone()
    }
}

async fn keep(how: watch::Receiver<RotationConfig>, reported: Arc<Locked<Option<String>>>) {
    let mut logs = [CONTROL_LOG, SERVER_LOG].map(Growth::of);
    let mut pause = PAUSE.0;
    loop {
        let kept = how.borrow().clone();
        let (dir, most, mut those) = (kept.dir.clone(), kept.most, logs.clone());
        let looked = subtask::blocking(move || {
            those.iter_mut().for_each(|log| log.check(&dir, most));
            those
        });
        match looked.await {
            Some(looked) => logs = looked,
            // gpushd is stopping.
            None => return,
        }
        let is = logs.iter().find_map(|log| log.finding(&kept));
        {
            let mut was = reported.lock();
            if let (None, Some(is)) = (&*was, &is) {
                tracing::warn!(mps = kept.target, uid = kept.user, "{is}");
            }
            *was = is;
        }
        let fastest = logs.iter().map(|log| log.grown).max().unwrap_or_default();
        pause = next_pause(pause, fastest, kept.most);
        sleep(pause).await;
    }
}

/// Returns the next pause. `grown` is the number of bytes by which the fastest log grew during the
/// last pause. With the returned pause, a log does not exceed its limit if it continues to grow at
/// this rate.
fn next_pause(pause: Duration, grown: u64, most: u64) -> Duration {
    if grown == 0 {
        return PAUSE.0;
    }
    #[allow(clippy::cast_precision_loss, reason = "a pause, roughly")]
    let left = pause.mul_f64((most as f64 / grown as f64).min(1e3));
    left.clamp(PAUSE.1, PAUSE.0)
}

#[derive(Debug, Clone)]
struct Growth {
    name: &'static str,
    /// Size at the last check.
    size: Option<u64>,
    /// Growth in bytes between the last two checks.
    grown: u64,
    /// Growth within [`WITHIN`]: time, bytes.
    lately: VecDeque<(Instant, u64)>,
    /// Error of the last rotation, if it failed.
    failed: Option<String>,
}

impl Growth {
    fn of(name: &'static str) -> Self {
        Self { name, size: None, grown: 0, lately: VecDeque::new(), failed: None }
    }

    /// Measures the growth, and rotates the log if it is too large.
    fn check(&mut self, dir: &Path, most: u64) {
        let now = Instant::now();
        while self.lately.front().is_some_and(|(at, _)| *at + WITHIN <= now) {
            self.lately.pop_front();
        }
        let path = dir.join(self.name);
        // The log does not exist before its first line is written.
        let size = fs::metadata(&path).map_or(0, |meta| meta.len());
        self.grown = self.size.map_or(0, |before| size.saturating_sub(before));
        self.size = Some(size);
        if size > most {
            let rotated = rotate(&path, most);
            if let Some(cut) = rotated.cut {
                // The log may have grown while its end was copied.
                self.grown += cut.saturating_sub(size);
                self.size = Some(0);
            }
            // Log each reason only once.
            let failed = rotated.error.map(|error| error.to_string());
            if let Some(error) = failed.as_ref().filter(|_| failed != self.failed) {
                tracing::warn!("cannot rotate {}: {error}", path.display());
            }
            self.failed = failed;
        }
        if self.grown > 0 {
            self.lately.push_back((now, self.grown));
        }
    }

    /// Describes a flooded log.
    fn finding(&self, kept: &RotationConfig) -> Option<String> {
        let lately: u64 = self.lately.iter().map(|(_, grown)| grown).sum();
        let whose = kept.user.map_or_else(|| "no user yet".to_owned(), |uid| format!("uid {uid}"));
        (lately > kept.most.saturating_mul(FLOOD)).then(|| {
            format!(
                "{} grew by {} MiB within {}s, and gpushd truncates it at {} MiB. Users with access to the pipe \
                directory ({whose}) can write into this log. End the process that writes, or its lease, then run \
                `gpushctl mps restart {}` (administrator)",
                self.name,
                lately >> 20,
                WITHIN.as_secs(),
                kept.most >> 20,
                kept.target
            )
        })
    }
}

/// The result of a rotation. On a full disk, the log is truncated even if its end cannot be copied.
#[derive(Debug, Default)]
struct Rotated {
    /// Size of the log when it was truncated.
    cut: Option<u64>,
    error: Option<io::Error>,
}

/// Copies the end of a log to `.1` and truncates the log. Copies the whole log unless it is far too large.
fn rotate(path: &Path, most: u64) -> Rotated {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    match opened.and_then(|log| cut(&log, path, most)) {
        Ok(rotated) => rotated,
        Err(error) => Rotated { cut: None, error: Some(error) },
    }
}

fn cut(log: &fs::File, path: &Path, most: u64) -> io::Result<Rotated> {
    let kept = || -> io::Result<()> {
        let meta = log.metadata()?;
        let mut name = path.as_os_str().to_owned();
        name.push(BEFORE);
        let mut before = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(name)?;
        before.set_permissions(meta.permissions())?;
        let end = meta.len().saturating_sub(most);
        let from = if end > most { end } else { 0 };
        let mut log = log;
        log.seek(SeekFrom::Start(from))?;
        io::copy(&mut log.take(meta.len() - from), &mut before).map(|_| ())
    };
    let kept = kept();
    // The copy fails on a full disk. Truncate the log anyway: losing old lines is better than a log
    // that cannot grow.
    let cut = log.metadata()?.len();
    log.set_len(0)?;
    Ok(Rotated { cut: Some(cut), error: kept.err() })
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Write};

    use super::*;

    #[test]
    fn log_above_the_limit_is_copied_and_truncated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CONTROL_LOG);
        let mut log = OpenOptions::new().append(true).create(true).open(&path).unwrap();
        let mut growth = Growth::of(CONTROL_LOG);
        writeln!(log, "one\ntwo").unwrap();
        growth.check(dir.path(), 8);
        assert_eq!(fs::metadata(&path).unwrap().len(), 8, "it is not larger");
        growth.check(dir.path(), 7);
        writeln!(log, "three").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        assert_eq!(fs::read_to_string(dir.path().join("control.log.1")).unwrap(), "one\ntwo\n");
        // If the log is far too large, only its end is kept.
        writeln!(log, "four and five").unwrap();
        growth.check(dir.path(), 5);
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
        assert_eq!(fs::read_to_string(dir.path().join("control.log.1")).unwrap(), "five\n");
    }

    #[test]
    fn flooded_log_is_reported_with_the_user() {
        let dir = tempfile::tempdir().unwrap();
        let kept =
            RotationConfig { target: "g1".to_owned(), dir: dir.path().to_owned(), most: 1 << 20, user: Some(12) };
        let mut log = File::create(dir.path().join(CONTROL_LOG)).unwrap();
        let mut growth = Growth::of(CONTROL_LOG);
        let mut write = |growth: &mut Growth, mib: usize| {
            log.seek(SeekFrom::End(0)).unwrap();
            log.write_all(&vec![b'x'; mib << 20]).unwrap();
            growth.check(dir.path(), kept.most);
        };
        write(&mut growth, 20);
        assert_eq!(growth.finding(&kept), None, "how long that took is not known");
        write(&mut growth, 10);
        write(&mut growth, 6);
        assert_eq!(growth.finding(&kept), None, "it was cut meanwhile");
        write(&mut growth, 1);
        let words = growth.finding(&kept).unwrap();
        assert!(words.starts_with("control.log grew by 17 MiB") && words.contains("uid 12"), "{words}");
        assert_eq!(fs::metadata(dir.path().join("control.log.1")).unwrap().len(), 1 << 20);
    }

    #[test]
    fn faster_growth_shortens_the_pause() {
        let long = PAUSE.0;
        assert_eq!(
            (next_pause(long, 0, 100), next_pause(long, 1, 100), next_pause(long, 100, 100)),
            (long, long, long)
        );
        assert_eq!(next_pause(long, 400, 100), long / 4);
        assert_eq!(next_pause(long / 4, 10, 100), long);
        assert_eq!((next_pause(long, u64::MAX, 1), next_pause(PAUSE.1, 1, u64::MAX)), (PAUSE.1, long));
    }
}
