//! The scripted `systemctl` and hooks of an in-process test. They record each call and report a state.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Condvar},
};

use gpush_host::helper::{End, Ended, Job, scripted::ScriptedPrograms};
use gpush_locked::Locked;

use super::smi::ScriptedSmi;

/// The scripted services and hooks.
#[derive(Debug, Default)]
pub(super) struct ScriptedServices {
    script: Locked<ServiceScript>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct ServiceScript {
    /// The services that run.
    running: BTreeSet<String>,
    /// How the calls end that fail, such as `stop nvsm` or `hook-before`.
    ends: BTreeMap<String, End>,
    /// The calls, in the same form. A call of the hook `after` also has the result of the operation.
    calls: Vec<String>,
    /// The call that is held, such as `hook-before`.
    held: Option<String>,
}

impl ScriptedServices {
    /// Starts a service, without gpushd.
    pub(super) fn start(&self, service: &str) {
        self.script.lock().running.insert(service.to_owned());
    }

    /// Returns whether a service runs.
    pub(super) fn runs(&self, service: &str) -> bool {
        self.script.lock().running.contains(service)
    }

    /// Makes a call such as `stop nvsm` or `hook-before` end this way, without an effect.
    pub(super) fn end(&self, call: &str, end: End) {
        self.script.lock().ends.insert(call.to_owned(), end);
    }

    /// Holds this call, such as `hook-before`, until [`Self::release`].
    pub(super) fn hold(&self, call: &str) {
        self.script.lock().held = Some(call.to_owned());
    }

    /// Returns whether there was this call since the last call of [`Self::take_calls`].
    pub(super) fn is_called(&self, call: &str) -> bool {
        self.script.lock().calls.iter().any(|one| one == call)
    }

    /// Lets the held call go on.
    pub(super) fn release(&self) {
        self.script.lock().held = None;
        self.released.notify_all();
    }

    /// Lets all calls succeed.
    pub(super) fn clear_faults(&self) {
        self.script.lock().ends.clear();
    }

    /// Returns the calls since the last call of this function.
    pub(super) fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.script.lock().calls)
    }

    fn run(&self, job: &Job) -> Ended {
        let mut script = self.script.lock();
        let unit = job.args.get(1).map(|unit| unit.trim_end_matches(".service").to_owned());
        let call = match (job.args.first(), &unit) {
            (Some(verb), Some(service)) => format!("{verb} {service}"),
            _ => job.step.clone(),
        };
        let result = job.env.get("GPUSH_RESULT").map_or_else(String::new, |result| format!(" {result}"));
        script.calls.push(format!("{call}{result}"));
        while script.held.as_ref() == Some(&call) {
            script = self.released.wait(script).expect("no test panics while it holds the lock");
        }
        let failed = script.ends.get(&call).cloned();
        let end = failed.unwrap_or_else(|| match (job.args.first().map(String::as_str), unit) {
            (Some("is-active"), Some(service)) => End::Exited(if script.running.contains(&service) { 0 } else { 3 }),
            (Some("start"), Some(service)) => {
                script.running.insert(service);
                End::Exited(0)
            }
            (Some("stop"), Some(service)) => {
                script.running.remove(&service);
                End::Exited(0)
            }
            _ => End::Exited(0),
        });
        Ended { end, output: String::new() }
    }
}

/// All helper programs of a host.
#[derive(Debug)]
pub(super) struct ScriptedHelpers {
    pub(super) smi: Arc<ScriptedSmi>,
    pub(super) services: Arc<ScriptedServices>,
}

impl ScriptedPrograms for ScriptedHelpers {
    fn run(&self, job: &Job) -> Ended {
        if job.args.first().is_some_and(|arg| arg == "compute-policy") {
            self.smi.run(job)
        } else {
            self.services.run(job)
        }
    }
}
