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
//! library calls [`crate::Host::before`] before every driver call, and [`crate::Host::after`] at its end,
//! with the result of `before`:
//!
//! ```text
//!  match rules ─▶ count, mutate the state (under the lock) ─▶ delay, hang, kill "before" ─▶ Decision
//!      Decision.rc set: return it ─┐
//!      else: do the call ──────────┴─▶ Host::after: kill "after"
//! ```

use std::time::Duration;

use crate::machine::{Machine, Pid, Process, ProcessKind};
use crate::returns::Return;

mod rule;

pub(crate) use rule::numbered;
pub use rule::{
    COMPUTE_POLICY_LIST, COMPUTE_POLICY_SET, Code, GPU_RESET, Kill, Mutation, Rule, RuleError, Rules as RuleFile,
    Sensor,
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
    /// How the values of the call are wrong.
    pub sensor: Option<Sensor>,
    /// The process to kill when the call has ended.
    pub(crate) kill_after: Option<Victim>,
}

/// The process to kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    /// The caller.
    Caller,
    /// The caller's parent first, and then the caller.
    Both,
}

/// The combined effects of the rules that apply to a call.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) decision: Decision,
    pub(crate) delay: Duration,
    pub(crate) kill_before: Option<Victim>,
    /// Fingerprint of the rule that makes the call hang. The call continues when this rule is
    /// removed.
    pub(crate) hang: Option<u64>,
}

/// Counts a call for its matching rules, and combines the effects of the rules that take effect.
/// Changes the machine if a rule requires that. This is the part of [`crate::Host::before`] without I/O.
pub(crate) fn judge(machine: &mut Machine, rules: &[&(u64, Rule)], call: &Call<'_>, caller: Pid) -> Outcome {
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
        decision.sensor = decision.sensor.or(rule.sensor);
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
