//! Faults of the simulated MPS programs. The fault rules are in a file. The programs read the file
//! again at every check, so a user can change the rules while the programs run.
//!
//! ```toml
//! [[fault]]
//! id = 1
//! kind = "silent-hello"
//! on = "gpu-0"       # part of a pipe directory or of CUDA_VISIBLE_DEVICES; default: all
//! times = 2          # default: as long as the rule exists
//! ```
//!
//! The file is `mps-faults.toml` in the simulated host whose `bin` contains the program. The
//! program does not find the file through the environment, because a caller may clear the
//! environment. Outside a simulated host, `$MPS_SIM_FAULTS` names the file.
//!
//! A blocked program continues when its rule is removed. If the file is invalid, the programs end:
//! otherwise a typing error would mean "no faults".

use std::{
    fs::{File, OpenOptions},
    io::{Read, Seek, Write},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context, bail};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

/// Environment variable that names the file outside a simulated host.
pub const VARIABLE: &str = "MPS_SIM_FAULTS";
/// Name of the file in a simulated host.
pub const FILE: &str = "mps-faults.toml";

/// Interval at which a blocked program checks its rule.
pub(crate) const LOOK: Duration = Duration::from_millis(20);

/// The kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The daemon accepts a connection, but sends no greeting.
    SilentHello,
    /// The daemon sends its greeting `ms` milliseconds late.
    SlowHello,
    /// The daemon sends a greeting with an unknown protocol version. Only programs of that version
    /// understand it.
    ForeignHello,
    /// The daemon behaves as if another process held the control connection.
    BusyUi,
    /// The daemon executes a command, but does not send the answer.
    EmptyReply,
    /// During a session, the daemon blocks when it writes to its log, as if the pipe were full.
    UnreadPipe,
    /// The daemon's pid file names another process.
    StalePidFile,
    /// A server ends immediately after its start.
    ServerDies,
    /// A server never reports that it is ready.
    NeverActive,
    /// A server reports a fatal exception.
    Fault,
    /// The daemon is killed, and its server continues.
    OrphanServer,
    /// The daemon hangs.
    HungDaemon,
    /// A simulated client of another user waits for a server, or is served.
    SecondUid,
    /// The command `quit` takes `ms` milliseconds longer.
    SlowQuit,
    /// The daemon begins to listen `ms` milliseconds late.
    SlowStart,
}

impl Kind {
    /// All kinds with their names.
    pub const NAMES: [(&'static str, Self); 15] = [
        ("silent-hello", Self::SilentHello),
        ("slow-hello", Self::SlowHello),
        ("foreign-hello", Self::ForeignHello),
        ("busy-ui", Self::BusyUi),
        ("empty-reply", Self::EmptyReply),
        ("unread-pipe", Self::UnreadPipe),
        ("stale-pid-file", Self::StalePidFile),
        ("server-dies", Self::ServerDies),
        ("never-active", Self::NeverActive),
        ("fault", Self::Fault),
        ("orphan-server", Self::OrphanServer),
        ("hung-daemon", Self::HungDaemon),
        ("second-uid", Self::SecondUid),
        ("slow-quit", Self::SlowQuit),
        ("slow-start", Self::SlowStart),
    ];

    /// Returns the name of the kind.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.into_iter().find_map(|(name, kind)| (kind == self).then_some(name)).unwrap_or_default()
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::NAMES
            .into_iter()
            .find_map(|(name, kind)| (name == text).then_some(kind))
            .ok_or_else(|| format!("`{text}` is none of {}", Self::NAMES.map(|(name, _)| name).join(", ")))
    }
}

/// A fault rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Identifies the rule. The id of a removed rule is not used again.
    pub id: u64,
    /// The kind.
    pub kind: Kind,
    /// A text. The rule applies to the daemons whose pipe directory or visible devices contain this
    /// text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on: Option<String>,
    /// Maximum number of times that the fault happens. If absent, there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<u64>,
    /// Delay of the slow kinds, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<u64>,
    /// Number of times that the fault has happened.
    #[serde(default)]
    pub fired: u64,
}

impl Rule {
    fn is_left(&self) -> bool {
        self.times.is_none_or(|times| self.fired < times)
    }

    /// Returns the delay of a rule of kind `slow-hello`, `slow-quit` or `slow-start`.
    pub(crate) fn longer(&self) -> Duration {
        Duration::from_millis(self.ms.unwrap_or(3000))
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    #[serde(default)]
    fault: Vec<Rule>,
}

/// The rules of a file.
#[derive(Debug, Clone)]
pub struct FaultFile {
    path: PathBuf,
}

impl FaultFile {
    /// Returns the fault file of a simulated host.
    #[must_use]
    pub fn of_host(dir: &Path) -> Self {
        Self { path: dir.join(FILE) }
    }

    /// Returns the fault file at a path.
    #[must_use]
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Returns the rules, oldest first.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn rules(&self) -> anyhow::Result<Vec<Rule>> {
        match File::open(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", self.path.display())),
            Ok(file) => {
                let mut held = locked(file, FlockArg::LockShared)?;
                self.read(&mut held)
            }
        }
    }

    /// Adds a rule, and returns its id.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub fn add(&self, kind: Kind, on: Option<String>, times: Option<u64>, ms: Option<u64>) -> anyhow::Result<u64> {
        self.change(true, |rules| {
            let id = rules.iter().map(|rule| rule.id).max().unwrap_or(0) + 1;
            rules.push(Rule { id, kind, on, times, ms, fired: 0 });
            id
        })
    }

    /// Removes one rule, or all rules. Returns the number of removed rules.
    ///
    /// # Errors
    /// If the file cannot be read or written, or no rule has this id.
    pub fn clear(&self, id: Option<u64>) -> anyhow::Result<usize> {
        let gone = self.change(true, |rules| {
            let before = rules.len();
            rules.retain(|rule| id.is_some_and(|id| rule.id != id));
            before - rules.len()
        })?;
        match id {
            Some(id) if gone == 0 => bail!("there is no fault {id}"),
            Some(_) | None => Ok(gone),
        }
    }

    fn change<T>(&self, create: bool, change: impl FnOnce(&mut Vec<Rule>) -> T) -> anyhow::Result<T> {
        let there = || format!("cannot write {}", self.path.display());
        let file = OpenOptions::new().read(true).write(true).create(create).truncate(false).open(&self.path);
        let file = file.with_context(there)?;
        if create {
            // Every user may write to the file, because servers count faults in it and may run as
            // any user. Ignore an error, which means that the file belongs to another user.
            let _not_mine = file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        }
        let mut held = locked(file, FlockArg::LockExclusive)?;
        let mut rules = self.read(&mut held)?;
        let result = change(&mut rules);
        let text = toml::to_string(&Rules { fault: rules })?;
        held.set_len(0).with_context(there)?;
        held.rewind().with_context(there)?;
        held.write_all(text.as_bytes()).with_context(there)?;
        Ok(result)
    }

    fn read(&self, file: &mut File) -> anyhow::Result<Vec<Rule>> {
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let rules: Rules = toml::from_str(&text).with_context(|| format!("in {}", self.path.display()))?;
        Ok(rules.fault)
    }
}

fn locked(file: File, how: FlockArg) -> anyhow::Result<Flock<File>> {
    Flock::lock(file, how).map_err(|(_, errno)| anyhow::anyhow!("cannot lock the faults: {errno}"))
}

/// The fault rules, as one program sees them.
#[derive(Debug, Clone)]
pub(crate) struct Faults {
    file: Option<FaultFile>,
    /// The pipe directory and the visible devices of the program.
    target: String,
}

impl Faults {
    pub(crate) fn of(file: Option<FaultFile>, target: String) -> Self {
        Self { file, target }
    }

    fn rules(&self) -> Vec<Rule> {
        let Some(file) = &self.file else { return Vec::new() };
        file.rules().unwrap_or_else(|error| {
            errln!("mps-sim: {error:#}");
            std::process::exit(70)
        })
    }

    /// Returns an active rule of this kind, if there is one.
    pub(crate) fn on(&self, kind: Kind) -> Option<Rule> {
        let concerned = |rule: &Rule| rule.on.as_ref().is_none_or(|part| self.target.contains(part.as_str()));
        self.rules().into_iter().find(|rule| rule.kind == kind && rule.is_left() && concerned(rule))
    }

    /// Returns an active rule of this kind, if there is one, and increments its count.
    pub(crate) fn fires(&self, kind: Kind) -> Option<Rule> {
        let rule = self.on(kind)?;
        if let Some(file) = &self.file {
            let count = |rules: &mut Vec<Rule>| {
                rules.iter_mut().filter(|one| one.id == rule.id).for_each(|one| one.fired += 1);
            };
            if let Err(error) = file.change(false, count) {
                errln!("mps-sim: this fault is not counted: {error:#}");
            }
        }
        Some(rule)
    }

    /// Returns whether a rule still exists, even if it has fired its maximum number of times.
    pub(crate) fn is_there(&self, rule: &Rule) -> bool {
        self.rules().iter().any(|one| one.id == rule.id)
    }

    /// Waits until a rule is removed.
    pub(crate) fn wait_out(&self, rule: &Rule) {
        while self.is_there(rule) {
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[test]
    fn fault_rule_is_targeted_counted_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let file = FaultFile::of_host(dir.path());
        assert_eq!(file.rules().unwrap(), []);
        let id = file.add(Kind::BusyUi, Some("gpu-1".to_owned()), Some(2), None).unwrap();
        let of = |target: &str| Faults::of(Some(file.clone()), target.to_owned());
        assert!(of("/run/gpu-0").fires(Kind::BusyUi).is_none());
        assert!(of("/run/gpu-1").fires(Kind::SilentHello).is_none());
        let rule = of("/run/gpu-1").fires(Kind::BusyUi).unwrap();
        assert!(of("/run/gpu-1").fires(Kind::BusyUi).is_some());
        assert!(of("/run/gpu-1").fires(Kind::BusyUi).is_none(), "used up");
        assert!(of("").is_there(&rule));
        assert!(file.clear(Some(id + 1)).is_err());
        assert_eq!(file.clear(Some(id)).unwrap(), 1);
        assert!(!of("").is_there(&rule));
    }

    #[test]
    fn every_fault_kind_parses_back() {
        for (name, kind) in Kind::NAMES {
            assert_eq!(name.parse(), Ok(kind));
            assert_eq!(toml::Value::try_from(kind).unwrap().as_str(), Some(name));
        }
        assert!("silent".parse::<Kind>().unwrap_err().contains("silent-hello"));
    }
}
