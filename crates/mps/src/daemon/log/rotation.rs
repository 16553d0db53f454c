//! Keeping the logs of a daemon small, beside its task: NVIDIA's are never rotated, and whoever may enter a pipe
//! directory can write into them as fast as the disk takes it.
//!
//! ```text
//! sleep, the less the faster it grows ─► larger than wanted? ─► its end copied to `.1`, the log cut ─┐
//!   ▲                                                                                               │
//!   └── far too much in a minute: told, with whose the directory is ◄──────────────────────────────┘
//! ```
//!
//! They are written to by append, so a copy and a cut lose nothing but what is said in between. Disks are waited
//! for by threads of their own, whether the daemon answers or not.

use std::{
    collections::VecDeque,
    fs::{self, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep},
};

use super::{CONTROL_LOG, SERVER_LOG};
use crate::daemon::task::SupervisorTask;

/// What is behind the name of a log in that of the one before.
pub(super) const BEFORE: &str = ".1";

/// Between two looks at one that stands still, and at one that grows as fast as can be.
const PAUSE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(50));

/// So many times its largest size …
const MUCH: u64 = 16;

/// … within this time nobody has to say.
const WITHIN: Duration = Duration::from_secs(60);

/// Largest size where the config has none for it any more.
const USUAL: u64 = 16 << 20;

/// Whose logs are kept, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
struct RotationConfig {
    target: String,
    dir: PathBuf,
    /// Size at which one is rotated, bytes.
    most: u64,
    /// Whose the pipe directory is.
    user: Option<u32>,
}

/// Who keeps the logs of one daemon.
#[derive(Debug, Default)]
pub(in crate::daemon) struct LogRotation {
    keeps: Option<(watch::Sender<RotationConfig>, JoinHandle<()>)>,
    told: Arc<Mutex<Option<String>>>,
}

impl Drop for LogRotation {
    fn drop(&mut self) {
        if let Some((_, task)) = &self.keeps {
            task.abort();
        }
    }
}

impl SupervisorTask {
    /// ServerSettings the logs of its daemon kept from now on.
    pub(in crate::daemon) fn keep_logs(&mut self) {
        let Some(spec) = self.spec.as_ref().filter(|_| self.process.is_some()) else { return };
        let most = self.wanted.as_ref().map_or(USUAL, |wanted| wanted.log_bytes);
        let (target, dir, user) = (self.target.clone(), spec.logs.clone(), spec.user);
        self.keeper.keep(RotationConfig { target, dir, most, user });
    }
}

impl LogRotation {
    fn keep(&mut self, kept: RotationConfig) {
        match &self.keeps {
            // What was seen of them goes on.
            Some((now, _)) => {
                now.send_if_modified(|now| {
                    let is_other = *now != kept;
                    *now = kept;
                    is_other
                });
            }
            None => {
                let (now, how) = watch::channel(kept);
                self.keeps = Some((now, tokio::spawn(keep(how, Arc::clone(&self.told)))));
            }
        }
    }

    /// That one grows beyond reason.
    pub(in crate::daemon) fn told(&self) -> Option<String> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn keep(how: watch::Receiver<RotationConfig>, told: Arc<Mutex<Option<String>>>) {
    let mut logs = [CONTROL_LOG, SERVER_LOG].map(Growth::of);
    let mut pause = PAUSE.0;
    loop {
        let kept = how.borrow().clone();
        let (dir, most, mut those) = (kept.dir.clone(), kept.most, logs.clone());
        let looked = tokio::task::spawn_blocking(move || {
            those.iter_mut().for_each(|log| log.look(&dir, most));
            those
        });
        match looked.await {
            Ok(looked) => logs = looked,
            // gpushd ends.
            Err(_) => return,
        }
        let is = logs.iter().find_map(|log| log.words(&kept));
        {
            let mut was = told.lock().unwrap_or_else(PoisonError::into_inner);
            if let (None, Some(is)) = (&*was, &is) {
                tracing::warn!(mps = kept.target, uid = kept.user, "{is}");
            }
            *was = is;
        }
        let fastest = logs.iter().map(|log| log.grown).max().unwrap_or_default();
        pause = next(pause, fastest, kept.most);
        sleep(pause).await;
    }
}

/// When one that grew so much during a pause is looked at again: before it is larger than wanted.
fn next(pause: Duration, grown: u64, most: u64) -> Duration {
    if grown == 0 {
        return PAUSE.0;
    }
    #[allow(clippy::cast_precision_loss, reason = "a pause, roughly")]
    let left = pause.mul_f64((most as f64 / grown as f64).min(1e3));
    left.clamp(PAUSE.1, PAUSE.0)
}

/// How a log grows.
#[derive(Debug, Clone)]
struct Growth {
    name: &'static str,
    /// Its size when it was looked at last.
    size: Option<u64>,
    /// How much it grew until then.
    grown: u64,
    /// How much it grew lately, and when.
    lately: VecDeque<(Instant, u64)>,
    /// Why it could not be rotated last.
    failed: Option<String>,
}

impl Growth {
    fn of(name: &'static str) -> Self {
        Self { name, size: None, grown: 0, lately: VecDeque::new(), failed: None }
    }

    /// Looks how much it grew, and rotates it when it is too large.
    fn look(&mut self, dir: &Path, most: u64) {
        let now = Instant::now();
        while self.lately.front().is_some_and(|(at, _)| *at + WITHIN <= now) {
            self.lately.pop_front();
        }
        let path = dir.join(self.name);
        // Nothing was said yet, or not at all.
        let size = fs::metadata(&path).map_or(0, |meta| meta.len());
        self.grown = self.size.map_or(0, |before| size.saturating_sub(before));
        self.size = Some(size);
        if size > most {
            let rotated = rotate(&path, most);
            if let Some(cut) = rotated.cut {
                // Much may have been said while it was copied.
                self.grown += cut.saturating_sub(size);
                self.size = Some(0);
            }
            // LogParser once, and not twenty times a second.
            let failed = rotated.error.map(|error| error.to_string());
            if let Some(error) = failed.as_ref().filter(|_| failed != self.failed) {
                tracing::warn!("{} can't be rotated as it should: {error}", path.display());
            }
            self.failed = failed;
        }
        if self.grown > 0 {
            self.lately.push_back((now, self.grown));
        }
    }

    /// That it grew beyond reason.
    fn words(&self, kept: &RotationConfig) -> Option<String> {
        let lately: u64 = self.lately.iter().map(|(_, grown)| grown).sum();
        let whose = kept.user.map_or_else(|| "nobody's yet".to_owned(), |uid| format!("that of uid {uid}"));
        (lately > kept.most.saturating_mul(MUCH)).then(|| {
            format!(
                "{} grew by {} MiB within {} s, and is cut at {} MiB: whoever was let into its pipe directory, which is \
                 {whose}, can write into it. End what does, or its shares, and `gpushctl mps restart {}`",
                self.name,
                lately >> 20,
                WITHIN.as_secs(),
                kept.most >> 20,
                kept.target
            )
        })
    }
}

/// What came of a rotation: with a full disk it is cut though its end can't be kept.
#[derive(Debug, Default)]
struct Rotated {
    /// How large it was, if it was cut.
    cut: Option<u64>,
    error: Option<io::Error>,
}

/// Cuts a log, and keeps its end as the one before: all of it, unless it is far too large.
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
    // With the disk full the copy fails, and a log that is cut is better than none that can grow.
    let cut = log.metadata()?.len();
    log.set_len(0)?;
    Ok(Rotated { cut: Some(cut), error: kept.err() })
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Write};

    use super::*;

    #[test]
    fn a_log_is_cut_when_it_is_large_and_goes_on_where_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CONTROL_LOG);
        let mut log = OpenOptions::new().append(true).create(true).open(&path).unwrap();
        let mut growth = Growth::of(CONTROL_LOG);
        writeln!(log, "one\ntwo").unwrap();
        growth.look(dir.path(), 8);
        assert_eq!(fs::metadata(&path).unwrap().len(), 8, "it is not larger");
        growth.look(dir.path(), 7);
        writeln!(log, "three").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        assert_eq!(fs::read_to_string(dir.path().join("control.log.1")).unwrap(), "one\ntwo\n");
        // Of one that is far too large the end is kept.
        writeln!(log, "four and five").unwrap();
        growth.look(dir.path(), 5);
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
        assert_eq!(fs::read_to_string(dir.path().join("control.log.1")).unwrap(), "five\n");
    }

    #[test]
    fn one_that_grows_beyond_reason_is_told_with_whose_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let kept =
            RotationConfig { target: "g1".to_owned(), dir: dir.path().to_owned(), most: 1 << 20, user: Some(12) };
        let mut log = File::create(dir.path().join(CONTROL_LOG)).unwrap();
        let mut growth = Growth::of(CONTROL_LOG);
        let mut write = |growth: &mut Growth, mib: usize| {
            log.seek(SeekFrom::End(0)).unwrap();
            log.write_all(&vec![b'x'; mib << 20]).unwrap();
            growth.look(dir.path(), kept.most);
        };
        write(&mut growth, 20);
        assert_eq!(growth.words(&kept), None, "how long that took is not known");
        write(&mut growth, 10);
        write(&mut growth, 6);
        assert_eq!(growth.words(&kept), None, "it was cut meanwhile");
        write(&mut growth, 1);
        let words = growth.words(&kept).unwrap();
        assert!(words.starts_with("control.log grew by 17 MiB") && words.contains("uid 12"), "{words}");
        assert_eq!(fs::metadata(dir.path().join("control.log.1")).unwrap().len(), 1 << 20);
    }

    #[test]
    fn the_faster_it_grows_the_sooner_it_is_looked_at() {
        let long = PAUSE.0;
        assert_eq!((next(long, 0, 100), next(long, 1, 100), next(long, 100, 100)), (long, long, long));
        assert_eq!(next(long, 400, 100), long / 4);
        assert_eq!(next(long / 4, 10, 100), long);
        assert_eq!((next(long, u64::MAX, 1), next(PAUSE.1, 1, u64::MAX)), (PAUSE.1, long));
    }
}
