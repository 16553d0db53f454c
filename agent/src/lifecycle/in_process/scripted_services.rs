//! The scripted `systemctl` and hooks of an in-process test. They record each call and report a state.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_host::helper::{End, Ended, Job, scripted::ScriptedPrograms};
use gpush_locked::Locked;

use super::smi::ScriptedSmi;

/// The scripted services and hooks.
#[derive(Debug, Default)]
pub(super) struct ScriptedServices(Locked<ServiceScript>);

#[derive(Debug, Default)]
struct ServiceScript {
    /// The services that run.
    running: BTreeSet<String>,
    /// How the calls end that fail, such as `stop nvsm` or `hook-before`.
    ends: BTreeMap<String, End>,
    /// The calls, in the same form. A call of the hook `after` also has the result of the operation.
    calls: Vec<String>,
    /// What programs have read from their standard input.
    inputs: Vec<String>,
    /// Number of nodes of each Slurm job; 1 for jobs that are not here.
    job_nodes: BTreeMap<u32, u32>,
}

impl ScriptedServices {
    /// Starts a service, without gpushd.
    pub(super) fn start(&self, service: &str) {
        self.0.lock().running.insert(service.to_owned());
    }

    /// Returns whether a service runs.
    pub(super) fn runs(&self, service: &str) -> bool {
        self.0.lock().running.contains(service)
    }

    /// Makes a call such as `stop nvsm` or `hook-before` end this way, without an effect.
    pub(super) fn end(&self, call: &str, end: End) {
        self.0.lock().ends.insert(call.to_owned(), end);
    }

    /// Makes squeue say that a job runs on this number of nodes.
    pub(super) fn set_job_nodes(&self, job: u32, nodes: u32) {
        self.0.lock().job_nodes.insert(job, nodes);
    }

    /// Lets all calls succeed.
    pub(super) fn clear_faults(&self) {
        self.0.lock().ends.clear();
    }

    /// Returns the calls since the last call of this function.
    pub(super) fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().calls)
    }

    /// Returns what programs have read from their standard input.
    pub(super) fn inputs(&self) -> Vec<String> {
        self.0.lock().inputs.clone()
    }

    fn run(&self, job: &Job) -> Ended {
        let mut script = self.0.lock();
        if let Some(job) = job.step.strip_prefix("squeue-").and_then(|job| job.parse::<u32>().ok()) {
            let nodes = script.job_nodes.get(&job).copied().unwrap_or(1);
            return Ended { end: End::Exited(0), output: format!("{job}|{job}|N/A|0|{nodes}|\n") };
        }
        let unit = job.args.get(1).map(|unit| unit.trim_end_matches(".service").to_owned());
        let call = match (job.args.first(), &unit) {
            (Some(verb), Some(service)) => format!("{verb} {service}"),
            _ => job.step.clone(),
        };
        let result = job.env.get("GPUSH_RESULT").map_or_else(String::new, |result| format!(" {result}"));
        script.calls.push(format!("{call}{result}"));
        script.inputs.extend(job.input.clone());
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
