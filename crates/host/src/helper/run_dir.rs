//! What is on disk of a run: `spec.json`, `lock`, `begun`, `outcome.json` in a directory of its own,
//! named `<operation>.<step>.<count>`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use gpush_api::text;
use serde::{Deserialize, Serialize};

/// Characters of a program's output that are told.
const TOLD: usize = 2000;

/// What a keeper is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Spec {
    /// The file that was checked.
    pub(super) program: PathBuf,
    /// How the program is called: its own name for itself.
    pub(super) name: String,
    pub(super) args: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) deadline_ms: u64,
    pub(super) grace_ms: u64,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// With this status.
    Exited(i32),
    /// By this signal, which was not ours.
    Signalled(i32),
    /// Its time was up, and it was ended.
    TimedOut,
    /// The kernel would not start it.
    NotStarted(String),
    /// It began, and how it ended nobody has seen.
    Lost,
    /// It was never begun, and will not be.
    Void,
    /// It was killed and is still there.
    Hangs,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(0) => write!(f, "ended well"),
            Self::Exited(status) => write!(f, "ended with status {status}"),
            Self::Signalled(signal) => write!(f, "was ended by signal {signal}"),
            Self::TimedOut => write!(f, "did not end in time and was ended"),
            Self::NotStarted(why) => write!(f, "can't be started: {why}"),
            Self::Lost => write!(f, "was cut off, how far it came is not known"),
            Self::Void => write!(f, "was never begun"),
            Self::Hangs => write!(f, "can't be ended: it hangs in the kernel"),
        }
    }
}

/// The end of a run, and what it said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// How it ended.
    pub end: End,
    /// Standard output and error together, cut.
    pub output: String,
}

impl Ended {
    /// What it said, to be put behind a sentence; empty when it said nothing.
    pub fn said(&self) -> String {
        let lines: Vec<&str> = self.output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let said: String = text::plain(&lines.join(" | ")).chars().take(TOLD).collect();
        if said.is_empty() { said } else { format!(": {said}") }
    }
}

/// The directory of a run.
#[derive(Debug)]
pub(super) struct Place {
    dir: PathBuf,
    name: String,
}

impl Place {
    /// Makes the place of a new run.
    pub(super) fn lay(below: &Path, prefix: &str, spec: &Spec) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(below)?;
        for count in 1.. {
            let name = format!("{prefix}.{count}");
            let dir = below.join(&name);
            match fs::DirBuilder::new().mode(0o700).create(&dir) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other?,
            }
            let place = Self { dir, name };
            File::create(place.dir.join("lock"))?;
            place.write("spec.json", &serde_json::to_vec(spec)?)?;
            File::open(below)?.sync_all()?;
            return Ok(place);
        }
        Err(io::Error::other("there are too many runs"))
    }

    /// The place in this directory.
    pub(super) fn at(dir: &Path) -> Self {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { dir: dir.to_owned(), name }
    }

    /// Those of an operation, in the order of their names.
    pub(super) fn all(below: &Path, operation: &str) -> Vec<Self> {
        let entries = fs::read_dir(below).into_iter().flatten().filter_map(Result::ok);
        let mut all: Vec<Self> = entries.map(|entry| Self::at(&entry.path())).collect();
        all.retain(|place| place.operation() == operation);
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    /// Operations that have places.
    pub(super) fn operations(below: &Path) -> BTreeSet<String> {
        let entries = fs::read_dir(below).into_iter().flatten().filter_map(Result::ok);
        entries.map(|entry| Self::at(&entry.path()).operation().to_owned()).collect()
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn operation(&self) -> &str {
        self.name.split('.').next().unwrap_or_default()
    }

    pub(super) fn step(&self) -> &str {
        self.name.split('.').nth(1).unwrap_or_default()
    }

    pub(super) fn spec(&self) -> Option<Spec> {
        serde_json::from_slice(&fs::read(self.dir.join("spec.json")).ok()?).ok()
    }

    pub(super) fn outcome(&self) -> Option<Ended> {
        serde_json::from_slice(&fs::read(self.dir.join("outcome.json")).ok()?).ok()
    }

    /// Notes that the program is about to be started.
    pub(super) fn begin(&self) -> io::Result<()> {
        self.write("begun", b"")
    }

    pub(super) fn conclude(&self, ended: &Ended) -> io::Result<()> {
        self.write("outcome.json", &serde_json::to_vec(ended)?)
    }

    /// The lock, if nobody has it.
    pub(super) fn lock(&self) -> io::Result<Option<File>> {
        let file = OpenOptions::new().read(true).write(true).open(self.dir.join("lock"))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Whether a keeper or its program is there, and no end of it on record.
    pub(super) fn runs(&self) -> bool {
        self.outcome().is_none() && matches!(self.lock(), Ok(None))
    }

    /// Makes sure that it does not begin any more; `false` when it has begun, or has ended.
    pub(super) fn void(&self) -> io::Result<bool> {
        let Some(_lock) = self.lock()? else { return Ok(false) };
        if self.outcome().is_some() || self.dir.join("begun").exists() {
            return Ok(false);
        }
        self.conclude(&Ended { end: End::Void, output: String::new() })?;
        Ok(true)
    }

    /// Its end, if it has one by now: told by its keeper, or seen from the lock that fell.
    pub(super) fn concluded(&self) -> Option<Ended> {
        if let Some(ended) = self.outcome() {
            return Some(ended);
        }
        let _lock = self.lock().ok()??;
        // Told between the two looks.
        if let Some(ended) = self.outcome() {
            return Some(ended);
        }
        let end = if self.dir.join("begun").exists() { End::Lost } else { End::Void };
        let ended = Ended { end, output: String::new() };
        if let Err(error) = self.conclude(&ended) {
            tracing::warn!("{}: its end can't be recorded: {error}", self.name);
        }
        Some(ended)
    }

    pub(super) fn remove(&self) {
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::warn!("{} can't be removed: {error}", self.dir.display());
        }
    }

    /// Writes a file whole and durably, or not at all.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let new = self.dir.join(format!("{name}.new"));
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, self.dir.join(name))?;
        File::open(&self.dir)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_what_its_lock_and_its_files_say() {
        let scratch = tempfile::tempdir().unwrap();
        let spec = Spec {
            program: "/bin/true".into(),
            name: "true".to_owned(),
            args: Vec::new(),
            env: BTreeMap::new(),
            deadline_ms: 1,
            grace_ms: 1,
        };
        let lay = || Place::lay(scratch.path(), "op-1.reset", &spec).unwrap();
        let end = |place: &Place| place.concluded().map(|ended| ended.end);
        // Asked for and never begun: nobody runs it any more, its keeper least of all.
        let place = lay();
        assert_eq!((place.name(), place.operation(), place.step()), ("op-1.reset.1", "op-1", "reset"));
        assert!(!place.runs());
        assert_eq!(end(&place), Some(End::Void));
        // Running: the lock is held, by the keeper or by the program alone.
        let place = lay();
        let lock = place.lock().unwrap().unwrap();
        let program = lock.try_clone().unwrap();
        place.begin().unwrap();
        assert!(place.runs() && place.lock().unwrap().is_none());
        drop(lock);
        assert_eq!((end(&place), place.void().unwrap()), (None, false));
        // Both gone, and no end told.
        drop(program);
        assert_eq!(end(&place), Some(End::Lost));
        assert!(!place.void().unwrap() && !place.runs());
        // Told: what holds the lock afterwards is no concern.
        let place = lay();
        let _lock = place.lock().unwrap().unwrap();
        place.conclude(&Ended { end: End::Exited(3), output: " a\n\n\u{1b}b ".to_owned() }).unwrap();
        assert_eq!(end(&place), Some(End::Exited(3)));
        assert_eq!(place.outcome().unwrap().said(), ": a | ?b");
        assert!(!place.runs());
        // Given up before it began.
        let place = lay();
        assert!(place.void().unwrap());
        assert_eq!(Place::all(scratch.path(), "op-1").len(), 4);
        assert!(Place::all(scratch.path(), "op-12").is_empty());
    }
}
