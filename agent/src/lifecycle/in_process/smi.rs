//! `nvidia-smi compute-policy` of an in-process test: a table of levels that can fail.

use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar},
};

use gpush_api::TimesliceLevel;
use gpush_host::helper::{End, Ended, Job, scripted::ScriptedPrograms};
use gpush_locked::Locked;

/// The scripted `nvidia-smi`.
#[derive(Debug)]
pub(super) struct ScriptedSmi {
    script: Locked<SmiScript>,
    released: Condvar,
}

#[derive(Debug, Default)]
struct SmiScript {
    /// UUID and level of each GPU, by index.
    gpus: Vec<(String, TimesliceLevel)>,
    /// What `--list` reports about each GPU in place of its level.
    list_fails: Option<&'static str>,
    /// For a GPU, what `--set-timeslice` prints in place of setting the level. With an empty text, it reports success.
    set_fails: BTreeMap<usize, &'static str>,
    /// Whether calls are held, until [`ScriptedSmi::clear_faults`].
    is_held: bool,
    times_out: bool,
    /// The arguments of each call.
    calls: Vec<String>,
}

impl ScriptedSmi {
    pub(super) fn new(uuids: impl Iterator<Item = String>) -> Arc<Self> {
        let gpus = uuids.map(|uuid| (uuid, TimesliceLevel::Default)).collect();
        Arc::new(Self { script: Locked::new(SmiScript { gpus, ..SmiScript::default() }), released: Condvar::new() })
    }

    /// Returns the level of a GPU.
    pub(super) fn level(&self, gpu: usize) -> TimesliceLevel {
        self.script.lock().gpus[gpu].1
    }

    /// Sets the level of a GPU, as another program does.
    pub(super) fn set_level(&self, gpu: usize, level: TimesliceLevel) {
        self.script.lock().gpus[gpu].1 = level;
    }

    /// Returns the calls since the last call of this function.
    pub(super) fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.script.lock().calls)
    }

    /// Lets all lists report this text in place of each level, such as `Not Supported`.
    pub(super) fn fail_list(&self, text: &'static str) {
        self.script.lock().list_fails = Some(text);
    }

    /// Lets changes of a GPU fail with this text. If it is empty, changes report success and have no effect.
    pub(super) fn fail_set(&self, gpu: usize, text: &'static str) {
        self.script.lock().set_fails.insert(gpu, text);
    }

    /// Lets all calls pass their deadline.
    pub(super) fn time_out(&self) {
        self.script.lock().times_out = true;
    }

    /// Holds all calls until [`Self::clear_faults`].
    pub(super) fn hold(&self) {
        self.script.lock().is_held = true;
    }

    /// Ends all faults.
    pub(super) fn clear_faults(&self) {
        let mut script = self.script.lock();
        script.set_fails.clear();
        (script.list_fails, script.times_out, script.is_held) = (None, false, false);
        self.released.notify_all();
    }

    /// Lets held calls go on.
    pub(super) fn release(&self) {
        self.script.lock().is_held = false;
        self.released.notify_all();
    }
}

impl ScriptedPrograms for ScriptedSmi {
    fn run(&self, job: &Job) -> Ended {
        let mut script = self.script.lock();
        script.calls.push(job.args.join(" "));
        while script.is_held {
            script = self.released.wait(script).expect("no test panics while it holds the lock");
        }
        if script.times_out {
            return Ended { end: End::TimedOut, output: String::new() };
        }
        let failed = |output: String| Ended { end: End::Exited(3), output };
        match job.args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["compute-policy", "-l"] => match script.list_fails {
                Some(text) => {
                    let line = |gpu: usize| format!("Failed to get compute policies for GPU {gpu} : {text}\n");
                    failed((0..script.gpus.len()).map(line).collect())
                }
                None => {
                    let line = |(gpu, (_, level)): (usize, &(String, TimesliceLevel))| {
                        format!("| {gpu} Timeslice {level} |\n")
                    };
                    Ended { end: End::Exited(0), output: script.gpus.iter().enumerate().map(line).collect() }
                }
            },
            ["compute-policy", "--set-timeslice", number, "-i", uuid] => {
                let gpu = script.gpus.iter().position(|(named, _)| named == uuid).expect("a GPU");
                match script.set_fails.get(&gpu) {
                    Some(&"") => {}
                    Some(text) => {
                        return failed(format!("Failed to set timeslice policy for GPU {gpu} : {text}\n"));
                    }
                    None => script.gpus[gpu].1 = TimesliceLevel::ALL[number.parse::<usize>().expect("a number")],
                }
                Ended { end: End::Exited(0), output: String::new() }
            }
            _ => failed(format!("unknown: {:?}", job.args)),
        }
    }
}
