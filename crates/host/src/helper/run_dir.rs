//! The directory of a run, `<operation>.<step>.<count>`, with the files `spec.json`, `lock`, `begun` and
//! `outcome.json`.

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

/// Maximum number of characters of a program's output in messages.
const SHOWN: usize = 2000;

/// The program that a keeper runs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Spec {
    /// The file that gpushd checked.
    pub(super) program: PathBuf,
    /// The name under which the program is executed (`argv[0]`).
    pub(super) name: String,
    pub(super) args: Vec<String>,
    pub(super) env: BTreeMap<String, String>,
    /// Standard input; empty if `None`.
    #[serde(default)]
    pub(super) input: Option<String>,
    pub(super) deadline_ms: u64,
    pub(super) grace_ms: u64,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The program ended with this status.
    Exited(i32),
    /// A signal that gpushd did not send ended the program.
    Signalled(i32),
    /// The program passed its deadline, and the keeper ended it.
    TimedOut,
    /// The kernel refused to execute the program.
    NotStarted(String),
    /// The program began. How it ended is unknown.
    Lost,
    /// The program never began, and can no longer begin.
    Void,
    /// The keeper killed the program, but the program has not ended.
    Hangs,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(0) => write!(f, "succeeded"),
            Self::Exited(status) => write!(f, "ended with status {status}"),
            Self::Signalled(signal) => write!(f, "was ended by signal {signal}"),
            Self::TimedOut => write!(f, "did not end in time and was ended"),
            Self::NotStarted(why) => write!(f, "can't be started: {why}"),
            Self::Lost => write!(f, "was interrupted; it is not known how much of it ran"),
            Self::Void => write!(f, "was never started"),
            Self::Hangs => write!(f, "can't be ended: it hangs in the kernel"),
        }
    }
}

/// The end of a run with its output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// How the run ended.
    pub end: End,
    /// Standard output and standard error together, truncated.
    pub output: String,
}

impl Ended {
    /// Returns the output as the end of a sentence, `: …`; empty if there is no output.
    pub fn output_suffix(&self) -> String {
        let lines: Vec<&str> = self.output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let printed: String = text::plain(&lines.join(" | ")).chars().take(SHOWN).collect();
        if printed.is_empty() { printed } else { format!(": {printed}") }
    }
}

#[derive(Debug)]
pub(super) struct RunDir {
    dir: PathBuf,
    name: String,
}

impl RunDir {
    /// Creates the directory of a new run.
    pub(super) fn create(below: &Path, prefix: &str, spec: &Spec) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(below)?;
        for count in 1.. {
            let name = format!("{prefix}.{count}");
            let dir = below.join(&name);
            match fs::DirBuilder::new().mode(0o700).create(&dir) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                other => other?,
            }
            let run = Self { dir, name };
            File::create(run.dir.join("lock"))?;
            run.write("spec.json", &serde_json::to_vec(spec)?)?;
            File::open(below)?.sync_all()?;
            return Ok(run);
        }
        Err(io::Error::other("there are too many runs"))
    }

    /// Returns the run in an existing directory.
    pub(super) fn at(dir: &Path) -> Self {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { dir: dir.to_owned(), name }
    }

    /// Returns the runs of an operation, sorted by name.
    pub(super) fn all(below: &Path, operation: &str) -> Vec<Self> {
        let entries = fs::read_dir(below).into_iter().flatten().filter_map(Result::ok);
        let mut all: Vec<Self> = entries.map(|entry| Self::at(&entry.path())).collect();
        all.retain(|run| run.operation() == operation);
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    /// Returns the operations that have runs.
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

    /// Records that the program is about to start.
    pub(super) fn begin(&self) -> io::Result<()> {
        self.write("begun", b"")
    }

    pub(super) fn record_outcome(&self, ended: &Ended) -> io::Result<()> {
        self.write("outcome.json", &serde_json::to_vec(ended)?)
    }

    /// Takes the lock; `None` if another process holds it.
    pub(super) fn lock(&self) -> io::Result<Option<File>> {
        // The program of a hook inherits the descriptor, and must not be able to write the file.
        let file = File::open(self.dir.join("lock"))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Returns whether the keeper or its program is running. Returns false as soon as an outcome is
    /// recorded.
    pub(super) fn runs(&self) -> bool {
        self.outcome().is_none() && matches!(self.lock(), Ok(None))
    }

    /// Prevents the run from beginning. Returns `false` if it has begun or ended.
    pub(super) fn cancel(&self) -> io::Result<bool> {
        let Some(_lock) = self.lock()? else { return Ok(false) };
        if self.outcome().is_some() || self.dir.join("begun").exists() {
            return Ok(false);
        }
        self.record_outcome(&Ended { end: End::Void, output: String::new() })?;
        Ok(true)
    }

    /// Returns the end of the run, if the run has ended. If no outcome is recorded, derives the end
    /// from the released lock.
    pub(super) fn final_outcome(&self) -> Option<Ended> {
        if let Some(ended) = self.outcome() {
            return Some(ended);
        }
        let _lock = self.lock().ok()??;
        // The keeper may have recorded the outcome between the first read and the lock.
        if let Some(ended) = self.outcome() {
            return Some(ended);
        }
        let end = if self.dir.join("begun").exists() { End::Lost } else { End::Void };
        let ended = Ended { end, output: String::new() };
        if let Err(error) = self.record_outcome(&ended) {
            tracing::warn!("cannot record the end of {}: {error}", self.name);
        }
        Some(ended)
    }

    pub(super) fn remove(&self) {
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::warn!("cannot remove {}: {error}", self.dir.display());
        }
    }

    /// Writes a file completely and durably, or not at all.
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
    fn lock_and_files_give_the_state_of_a_run() {
        let scratch = tempfile::tempdir().unwrap();
        let spec = Spec {
            program: "/bin/true".into(),
            name: "true".to_owned(),
            args: Vec::new(),
            env: BTreeMap::new(),
            input: None,
            deadline_ms: 1,
            grace_ms: 1,
        };
        let create = || RunDir::create(scratch.path(), "op-1.reset", &spec).unwrap();
        let end = |run: &RunDir| run.final_outcome().map(|ended| ended.end);
        // gpushd created the run, but the run never began. From now on, the keeper cannot begin it.
        let run = create();
        assert_eq!((run.name(), run.operation(), run.step()), ("op-1.reset.1", "op-1", "reset"));
        assert!(!run.runs());
        assert_eq!(end(&run), Some(End::Void));
        // A run is in progress while the keeper, or the program alone, holds the lock.
        let run = create();
        let lock = run.lock().unwrap().unwrap();
        let program = lock.try_clone().unwrap();
        run.begin().unwrap();
        assert!(run.runs() && run.lock().unwrap().is_none());
        drop(lock);
        assert_eq!((end(&run), run.cancel().unwrap()), (None, false));
        // Keeper and program have ended, and no outcome is recorded.
        drop(program);
        assert_eq!(end(&run), Some(End::Lost));
        assert!(!run.cancel().unwrap() && !run.runs());
        // With a recorded outcome, the lock no longer matters.
        let run = create();
        let _lock = run.lock().unwrap().unwrap();
        run.record_outcome(&Ended { end: End::Exited(3), output: " a\n\n\u{1b}b ".to_owned() }).unwrap();
        assert_eq!(end(&run), Some(End::Exited(3)));
        assert_eq!(run.outcome().unwrap().output_suffix(), ": a | ?b");
        assert!(!run.runs());
        // A run that is cancelled before it begins is void.
        let run = create();
        assert!(run.cancel().unwrap());
        assert_eq!(RunDir::all(scratch.path(), "op-1").len(), 4);
        assert!(RunDir::all(scratch.path(), "op-12").is_empty());
    }
}
