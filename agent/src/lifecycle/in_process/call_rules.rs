//! Rules for calls of the scripted driver: which call fails, waits, or ends a program.

use gpush_nvml::{ErrorKind, proto::Request};

/// The names of calls: see [`Request::name`].
pub(super) const READ: &str = "reading the GPU";
pub(super) const CREATE: &str = "creating a GPU instance";
pub(super) const CREATE_COMPUTE: &str = "creating a compute instance";
pub(super) const DESTROY: &str = "destroying a GPU instance";
pub(super) const DESTROY_COMPUTE: &str = "destroying a compute instance";
pub(super) const SET_MODE: &str = "setting MIG mode";
/// Every call that changes the GPU.
pub(super) const ANY_CHANGE: &str = "any change";

/// When a program ends, compared with the call that ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndMoment {
    /// Before the call changes anything.
    Before,
    /// After the call has taken effect, but before its reply.
    After,
}

/// What a rule does to a call.
#[derive(Debug, Clone)]
pub(super) enum CallEffect {
    /// The call takes effect.
    Succeed,
    Fail(ErrorKind),
    /// A reading does not contain the processes, but this error.
    HideProcesses(&'static str),
    /// The GPU falls off the bus. All later calls for it fail.
    LoseGpu,
    /// A call that sets the MIG mode changes nothing, and reports why.
    KeepMode(ErrorKind),
    /// The driver worker dies.
    EndWorker(EndMoment),
    /// gpushd ends: see [`super::InProcess::died`].
    EndGpushd(EndMoment),
}

/// A rule for the calls of one name on one GPU.
#[derive(Debug, Clone)]
pub(super) struct CallRule {
    /// The name of the call, or [`ANY_CHANGE`].
    call: &'static str,
    /// Index of the GPU.
    gpu: u32,
    /// How many further calls are not affected.
    after: u32,
    /// How many calls are affected then.
    times: u32,
    /// Whether the call first waits for [`super::gpus::ScriptedGpus::release`].
    pub(super) held: bool,
    pub(super) effect: CallEffect,
}

impl CallRule {
    /// Creates a rule for all calls of this name on a GPU. The calls take effect.
    pub(super) fn on(call: &'static str, gpu: u32) -> Self {
        Self { call, gpu, after: 0, times: u32::MAX, held: false, effect: CallEffect::Succeed }
    }

    /// Does not affect the next `after` calls.
    pub(super) fn after(self, after: u32) -> Self {
        Self { after, ..self }
    }

    /// Affects only this number of calls.
    pub(super) fn times(self, times: u32) -> Self {
        Self { times, ..self }
    }

    /// Affects only one call.
    pub(super) fn once(self) -> Self {
        self.times(1)
    }

    /// Lets the calls wait.
    pub(super) fn held(self) -> Self {
        Self { held: true, ..self }
    }

    /// Lets the calls fail.
    pub(super) fn fails(self, kind: ErrorKind) -> Self {
        self.with(CallEffect::Fail(kind))
    }

    /// Sets the effect.
    pub(super) fn with(self, effect: CallEffect) -> Self {
        Self { effect, ..self }
    }

    /// Counts a call. Returns whether the rule affects the call.
    fn counts(&mut self, request: &Request, gpu: u32) -> bool {
        let is_named = self.call == request.name() || (self.call == ANY_CHANGE && request.is_mutation());
        if !is_named || self.gpu != gpu || self.times == 0 {
            return false;
        }
        if self.after > 0 {
            self.after -= 1;
            return false;
        }
        true
    }
}

/// Returns the first rule that affects a call. Later rules still count the call.
pub(super) fn applicable(rules: &mut [CallRule], request: &Request, gpu: u32) -> Option<CallRule> {
    let mut found = None;
    for rule in rules {
        if rule.counts(request, gpu) && found.is_none() {
            rule.times -= 1;
            found = Some(rule.clone());
        }
    }
    found
}
