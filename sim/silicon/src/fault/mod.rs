//! Faults: rules that make driver calls fail, wait, hang, return wrong results, or kill the process
//! that calls.
//!
//! The rules are in `faults.toml` in the host's directory. The file is read again when it changes:
//!
//! ```toml
//! [[fault]]
//! function = "nvmlGpuInstanceDestroy"   # a name (any version of it), or a pattern with `*`
//! gpu = 2                               # default: any GPU
//! rc = "IN_USE"                         # the call returns this and does nothing
//! after = 1                             # the first matching call passes
//! times = 3                             # then three fail, and all later ones pass
//! ```
//!
//! The counters are in the shared state, so they count the calls of all processes. The simulated
//! library calls [`Host::before`] before every driver call, and [`Host::after`] at its end, with
//! the result of [`Host::before`]:
//!
//! ```text
//!  match rules ─▶ count, mutate the state (under the lock) ─▶ delay, hang, kill "before" ─▶ Decision
//!      Decision.rc set: return it ─┐
//!      else: do the call ──────────┴─▶ Host::after: kill "after"
//! ```

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use nix::sys::signal::{Signal, kill};

use crate::host::{Host, HostError};
use crate::latency;
use crate::machine::{Counter, Machine, Pid, Process, ProcessKind};
use crate::returns::Return;

mod rule;

pub use rule::{
    COMPUTE_POLICY_LIST, COMPUTE_POLICY_SET, Code, GPU_RESET, Kill, Mutation, Rule, RuleError, Rules as RuleFile,
};

/// Initial content of `faults.toml`.
pub(crate) const EMPTY: &str = "# Fault rules of this simulated host: `gpush-sim fault --help`.\n";

/// A driver call with its objects, as fault rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call<'a> {
    /// Name of the exported function.
    pub function: &'a str,
    /// GPU that the call concerns.
    pub gpu: Option<u32>,
    /// GPU instance that the call concerns.
    pub gpu_instance: Option<u32>,
    /// Compute instance that the call concerns.
    pub compute_instance: Option<u32>,
}

impl<'a> Call<'a> {
    /// Creates a call that concerns no GPU.
    #[must_use]
    pub const fn new(function: &'a str) -> Self {
        Self { function, gpu: None, gpu_instance: None, compute_instance: None }
    }

    /// Creates a call that concerns a GPU.
    #[must_use]
    pub const fn on(function: &'a str, gpu: u32) -> Self {
        Self { function, gpu: Some(gpu), gpu_instance: None, compute_instance: None }
    }

    /// Returns the call, with its GPU instance added.
    #[must_use]
    pub const fn gpu_instance(self, id: u32) -> Self {
        Self { gpu_instance: Some(id), ..self }
    }

    /// Returns the call, with its compute instance added.
    #[must_use]
    pub const fn compute_instance(self, id: u32) -> Self {
        Self { compute_instance: Some(id), ..self }
    }
}

/// The effect of fault rules on a call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use = "return `rc` if it is set, and pass this to Host::after"]
pub struct Decision {
    /// The call returns this code, and has no effect.
    pub rc: Option<Return>,
    /// `SetMigMode` succeeds with this activation status, and the mode remains pending.
    pub activation_status: Option<Return>,
    /// Whether the call returns the objects that existed at the caller's `nvmlInit`, not the
    /// present objects.
    pub stale: bool,
    /// The process to kill when the call has ended.
    kill_after: Option<Victim>,
}

/// The process to kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    /// The caller.
    Caller,
    /// The caller's parent first, and then the caller.
    Both,
}

/// The rules from the last read of the file, and the stamp of the file at that time.
#[derive(Debug)]
pub(crate) struct Rules {
    path: PathBuf,
    read: Mutex<Option<(Stamp, Numbered)>>,
}

/// A value that shows whether the file has changed. Computing it does not read the file.
type Stamp = Option<(SystemTime, u64, u64)>;

/// Rules with their fingerprints.
type Numbered = Arc<[(u64, Rule)]>;

impl Rules {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, read: Mutex::new(None) }
    }

    /// Returns the current rules. Returns no rules if the file does not exist.
    pub(crate) fn current(&self) -> Result<Numbered, HostError> {
        use std::os::unix::fs::MetadataExt;
        let stamp = || -> Stamp {
            let found = std::fs::metadata(&self.path).ok()?;
            Some((found.modified().ok()?, found.len(), found.ino()))
        };
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let now = stamp();
        if let Some((then, rules)) = read.as_ref()
            && *then == now
        {
            return Ok(Arc::clone(rules));
        }
        let rules: Numbered = match std::fs::read_to_string(&self.path) {
            Ok(text) => rule::numbered(RuleFile::parse(&text)?.fault).into(),
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Arc::new([]),
            Err(cause) => return Err(HostError::io("cannot read", &self.path, cause)),
        };
        *read = Some((now, Arc::clone(&rules)));
        Ok(rules)
    }
}

/// The combined effects of the rules that apply to a call.
#[derive(Debug, Default)]
struct Outcome {
    decision: Decision,
    delay: Duration,
    kill_before: Option<Victim>,
    /// Fingerprint of the rule that makes the call hang. The call continues when this rule is
    /// removed.
    hang: Option<u64>,
}

/// Counts a call for its matching rules, and combines the effects of the rules that take effect.
/// Changes the machine if a rule requires that. This is the part of [`Host::before`] without I/O.
fn judge(machine: &mut Machine, rules: &[&(u64, Rule)], call: &Call<'_>, caller: Pid) -> Outcome {
    let mut outcome = Outcome::default();
    for (fingerprint, rule) in rules {
        let counter = machine.state.faults.entry(*fingerprint).or_default();
        counter.seen += 1;
        if !rule.fires(*counter, *fingerprint) {
            continue;
        }
        counter.fired += 1;
        let decision = &mut outcome.decision;
        decision.rc = decision.rc.or(rule.rc.map(Return::from));
        decision.activation_status = decision.activation_status.or(rule.activation_status.map(Return::from));
        outcome.delay += Duration::from_millis(rule.delay_ms);
        if rule.hang {
            outcome.hang = Some(*fingerprint);
        }
        let victim = if rule.parent { Victim::Both } else { Victim::Caller };
        match rule.kill {
            Some(Kill::Before) => outcome.kill_before = Some(victim),
            Some(Kill::After) => decision.kill_after = Some(victim),
            None => {}
        }
        let gpu = rule.gpu.or(call.gpu);
        if let (Some(xid), Some(gpu)) = (rule.xid, gpu) {
            // If the instance of the call no longer exists, report the Xid error for the whole GPU.
            let reported = machine.xid(gpu, xid, call.gpu_instance, call.compute_instance);
            if reported == Err(Return::NotFound) {
                let _no_gpu = machine.xid(gpu, xid, None, None);
            }
        }
        match (rule.mutate, gpu) {
            (Some(Mutation::Lose), Some(gpu)) => {
                let _no_gpu = machine.lose(gpu);
                decision.rc = decision.rc.or(Some(Return::GpuIsLost));
            }
            (Some(Mutation::Leak), Some(gpu)) => {
                let _gone = machine.attach(
                    gpu,
                    Process {
                        pid: caller,
                        kind: ProcessKind::Handle,
                        memory_mib: 0,
                        gpu_instance: rule.gpu_instance.or(call.gpu_instance),
                        compute_instance: call.compute_instance,
                    },
                );
            }
            (Some(Mutation::Stale), _) => decision.stale = true,
            (Some(Mutation::Lose | Mutation::Leak) | None, _) => {}
        }
    }
    outcome
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
        crate::host::write_whole(&self.dir().join("faults.toml"), file.render()?.as_bytes())?;
        // Remove the counters of removed rules. If a user adds such a rule again, it must start
        // with new counters.
        let known: Vec<u64> = rule::numbered(file.fault.clone()).into_iter().map(|(own, _)| own).collect();
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
