//! The fault rules of a host: reads and writes `faults.toml`, and applies the rules to calls.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use gpush_locked::Locked;
use nix::sys::signal::{Signal, kill};

use super::{Host, HostError, write_whole};
use crate::fault::{Call, Decision, Rule, RuleError, RuleFile, Victim, judge, numbered};
use crate::latency;
use crate::machine::{Counter, Pid};

/// The rules from the last read of the file, and the stamp of the file at that time.
#[derive(Debug)]
pub(super) struct Rules {
    path: PathBuf,
    read: Locked<Option<(Stamp, Numbered)>>,
}

/// A value that shows whether the file has changed. Computing it does not read the file.
type Stamp = Option<(SystemTime, u64, u64)>;

/// Rules with their fingerprints.
type Numbered = Arc<[(u64, Rule)]>;

impl Rules {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, read: Locked::new(None) }
    }

    /// Returns the current rules. Returns no rules if the file does not exist.
    pub(super) fn current(&self) -> Result<Numbered, HostError> {
        use std::os::unix::fs::MetadataExt;
        let stamp = || -> Stamp {
            let found = std::fs::metadata(&self.path).ok()?;
            Some((found.modified().ok()?, found.len(), found.ino()))
        };
        let mut read = self.read.lock();
        let now = stamp();
        if let Some((then, rules)) = read.as_ref()
            && *then == now
        {
            return Ok(Arc::clone(rules));
        }
        let rules: Numbered = match std::fs::read_to_string(&self.path) {
            Ok(text) => numbered(RuleFile::parse(&text)?.fault).into(),
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Arc::new([]),
            Err(cause) => return Err(HostError::io("cannot read", &self.path, cause)),
        };
        *read = Some((now, Arc::clone(&rules)));
        Ok(rules)
    }
}

impl Host {
    /// Applies the fault rules, and waits as long as the rules and the host's latencies require. If
    /// a rule kills the caller, does not return. The caller must hold no lock.
    ///
    /// # Errors
    /// If `faults.toml` is invalid, or the state cannot be used.
    pub fn before(&self, call: &Call<'_>) -> Result<Decision, HostError> {
        let rules = self.rules()?.current()?;
        if self.hardware().latencies {
            let generation = self.read()?.state().next_generation;
            std::thread::sleep(latency::of(call.function, call.gpu.unwrap_or(0), generation));
        }
        if rules.is_empty() {
            return Ok(Decision::default());
        }
        let root = nix::unistd::geteuid().is_root();
        let matching: Vec<&(u64, Rule)> = rules.iter().filter(|(_, rule)| rule.matches(call, root)).collect();
        if matching.is_empty() {
            return Ok(Decision::default());
        }
        let caller = Pid::own();
        let outcome = self.update(|machine| Ok::<_, HostError>(judge(machine, &matching, call, caller)))?;
        std::thread::sleep(outcome.delay);
        if let Some(fingerprint) = outcome.hang {
            self.hang(fingerprint);
        }
        if let Some(victim) = outcome.kill_before {
            die(victim);
        }
        Ok(outcome.decision)
    }

    /// Ends a call that began with [`Host::before`]. If a rule kills the caller after the call,
    /// does not return.
    pub fn after(&self, decision: Decision) {
        if let Some(victim) = decision.kill_after {
            die(victim);
        }
    }

    /// Waits until a rule is removed.
    fn hang(&self, fingerprint: u64) {
        loop {
            let rules = self.rules().and_then(Rules::current);
            match rules {
                Ok(rules) if rules.iter().any(|(own, _)| *own == fingerprint) => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(_) => return,
                // If the file is invalid, a user may be editing it. So treat the rule as present: the call continues to
                // hang. If the host was removed, the call returns.
                Err(_) if self.dir().exists() => std::thread::sleep(Duration::from_millis(5)),
                Err(_) => return,
            }
        }
    }

    /// Returns the current fault rules with their counters.
    ///
    /// # Errors
    /// If `faults.toml` is invalid, or the state cannot be used.
    pub fn faults(&self) -> Result<Vec<(Rule, Counter)>, HostError> {
        let rules = self.rules()?.current()?;
        let machine = self.read()?;
        let counters = &machine.state().faults;
        let with = |(own, rule): &(u64, Rule)| (rule.clone(), counters.get(own).copied().unwrap_or_default());
        Ok(rules.iter().map(with).collect())
    }

    /// Adds a fault rule.
    ///
    /// # Errors
    /// If the rule or the file is invalid, or the file cannot be written.
    pub fn add_fault(&self, rule: Rule) -> Result<(), HostError> {
        let mut file = self.fault_file()?;
        file.fault.push(rule);
        self.write_faults(&file)
    }

    /// Removes the fault rule at a position (counted from 0), or all rules, together with their
    /// counters. Returns the number of removed rules.
    ///
    /// # Errors
    /// If the file cannot be written, or no rule has this position.
    pub fn clear_faults(&self, position: Option<usize>) -> Result<usize, HostError> {
        let Some(position) = position else {
            // If the file is invalid, count no rules and continue, because the removal of all rules repairs the file.
            let count = self.rules()?.current().map_or(0, |rules| rules.len());
            self.write_faults(&RuleFile { fault: Vec::new() })?;
            return Ok(count);
        };
        let mut file = self.fault_file()?;
        if position >= file.fault.len() {
            return Err(RuleError::new(
                format!("there is no rule {position}"),
                format!("there are {}; see `gpush-sim fault {} list`", file.fault.len(), self.dir().display()),
            )
            .into());
        }
        file.fault.remove(position);
        self.write_faults(&file)?;
        Ok(1)
    }

    fn fault_file(&self) -> Result<RuleFile, HostError> {
        Ok(RuleFile { fault: self.rules()?.current()?.iter().map(|(_, rule)| rule.clone()).collect() })
    }

    fn write_faults(&self, file: &RuleFile) -> Result<(), HostError> {
        write_whole(&self.dir().join("faults.toml"), file.render()?.as_bytes())?;
        // Remove the counters of removed rules. If a user adds such a rule again, it must start
        // with new counters.
        let known: Vec<u64> = numbered(file.fault.clone()).into_iter().map(|(own, _)| own).collect();
        self.update(|machine| {
            machine.state.faults.retain(|own, _| known.contains(own));
            Ok(())
        })
    }
}

/// Ends this process as a crash would: no cleanup code runs. If the victim includes the parent,
/// kills the parent first, so that it cannot react to the end of this process.
fn die(victim: Victim) {
    let own = nix::unistd::Pid::this();
    let parent = nix::unistd::Pid::parent();
    if victim == Victim::Both && parent.as_raw() > 1 {
        let _gone = kill(parent, Signal::SIGKILL);
    }
    while kill(own, Signal::SIGKILL).is_ok() {
        std::thread::park();
    }
}
