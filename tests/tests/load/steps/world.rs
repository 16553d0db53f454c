//! The host, gpushd, and the model of their state.

use std::{
    collections::BTreeMap,
    process::{Child, Command},
};

use gpush_api::MpsState;
use gpush_tests::{
    agent::{Agent, Setup, real_layout},
    host::Host,
    mps::{Client, daemon, pid_of, reaches},
};
use nix::sys::signal::Signal;

const HOST: &str = "[[gpu]]\nmodel = \"a100-40\"\nmig = true\ncount = 2\n[[gpu]]\nmodel = \"l4\"\ncount = 2\n";
const CONFIG: &str = "[mps]\nhealth = \"1s\"\n# --constants mps.start=5s,mps.stop=2s,mps.pause=1s,mps.longest_pause=1s,mps.failures=100,mps.within=60s\n\
                      [[gpu]]\nname = \"cut\"\nmatch = [\"0-1\"]\nmode = \"mig\"\nlayout = [\"7g.40gb\"]\n\
                      [[gpu]]\nname = \"shared\"\nmatch = [\"2-3\"]\nmode = \"mps\"\n";

/// Indexes of the GPUs that have MIG layouts. The next constant has the MPS targets.
pub(super) const MIG: [usize; 2] = [0, 1];
pub(super) const MPS: [&str; 2] = ["2", "3"];

/// A lease in the model.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) id: String,
    pub(super) environment: Vec<(String, String)>,
    /// The process to which the lease is bound. When the process ends, the lease ends.
    pub(super) process: Option<Child>,
}

impl Drop for Granted {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// An MPS target in the model.
#[derive(Debug, Default)]
pub(super) struct Target {
    pub(super) stopped: bool,
    /// Active thread percentage of the target's clients.
    pub(super) percentage: u32,
    pub(super) leases: Vec<Granted>,
    pub(super) clients: Vec<Client>,
    /// Pid of the target's daemon.
    pub(super) pid: i32,
}

impl Target {
    pub(super) fn is_used(&self) -> bool {
        !self.leases.is_empty() || !self.clients.is_empty()
    }
}

/// A process that uses a MIG instance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    pub(super) gi: u64,
    pub(super) pid: u32,
}

/// A GPU with a MIG layout, in the model.
#[derive(Debug, Default)]
pub(super) struct Cut {
    /// The GPU's instances, in the form of [`real_layout`].
    pub(super) instances: Vec<String>,
    pub(super) held: Vec<Held>,
    pub(super) cordoned: bool,
}

pub(super) struct World {
    // This must be the first field, so that it is dropped before the host. Otherwise gpushd would
    // restart the daemons that the host ends.
    agent: Option<Agent>,
    pub(super) host: Host,
    pub(super) targets: BTreeMap<&'static str, Target>,
    pub(super) cuts: [Cut; 2],
    /// Whether the current step may change MIG layouts.
    pub(super) operates: bool,
    /// Description of the current step, for failure messages.
    pub(super) step: String,
    /// Number of conditions that were checked so far.
    pub(super) checks: u64,
    /// How often each outcome of an operation and each refusal occurred.
    pub(super) outcomes: BTreeMap<String, u32>,
}

impl World {
    pub(super) fn up() -> Self {
        let host = Host::up(HOST);
        let mut world = Self {
            agent: None,
            host,
            targets: BTreeMap::new(),
            cuts: <[Cut; 2]>::default(),
            operates: false,
            step: "start".to_owned(),
            checks: 0,
            outcomes: BTreeMap::new(),
        };
        world.start_agent();
        for name in MPS {
            let pid = pid_of(&reaches(world.agent(), name, MpsState::Ready));
            world.targets.insert(name, Target { percentage: 100, pid, ..Target::default() });
        }
        let _begun = world.agent().settle();
        for gpu in MIG {
            world.cuts[gpu].instances = real_layout(&world.host, gpu);
        }
        world
    }

    pub(super) fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("gpushd runs")
    }

    pub(super) fn start_agent(&mut self) {
        self.agent = Some(Setup::on(&self.host).config(CONFIG).env("GPUSH_LOG", "info").start());
    }

    pub(super) fn kill_agent(&mut self) {
        self.agent.take().expect("gpushd runs").kill();
    }

    /// Begins a step and clears the trace of driver calls.
    pub(super) fn begin(&mut self, step: String) {
        (self.step, self.operates) = (step, false);
        self.host.start_trace();
    }

    pub(super) fn target(&mut self, rng: &mut fastrand::Rng) -> (&'static str, &mut Target) {
        let name = MPS[rng.usize(..MPS.len())];
        (name, self.targets.get_mut(name).expect("a target"))
    }

    pub(super) fn count(&mut self, outcome: impl Into<String>) {
        *self.outcomes.entry(outcome.into()).or_default() += 1;
    }

    /// Fails the test. The message has the step with its seed, and the log of gpushd.
    pub(super) fn fail(&self, what: &str) -> ! {
        panic!("{}: {what}\n{}", self.step, self.agent.as_ref().map(Agent::log).unwrap_or_default())
    }

    /// Waits until a target's daemon is ready, and records the daemon's pid.
    pub(super) fn note_daemon(&mut self, name: &'static str) {
        let pid = pid_of(&reaches(self.agent(), name, MpsState::Ready));
        self.targets.get_mut(name).expect("a target").pid = pid;
    }

    /// Waits until gpushd has read its GPUs and found its daemons.
    pub(super) fn wait_until_known(&self) {
        for name in MPS {
            self.agent().await_that("its targets", || self.agent().get(&format!("/v1/mps/{name}")).status == 200);
        }
        self.agent().await_that("its GPUs", || self.agent().gpus().iter().all(|gpu| !gpu.stale));
        for (name, target) in &self.targets {
            if !target.stopped {
                let same = || daemon(self.agent(), name).state == MpsState::Ready;
                self.agent().await_that("its daemons", same);
            }
        }
    }
}

pub(super) fn kill_agent(world: &mut World, _: &mut fastrand::Rng) -> bool {
    world.kill_agent();
    world.start_agent();
    world.wait_until_known();
    true
}

pub(super) fn stop_agent(world: &mut World, _: &mut fastrand::Rng) -> bool {
    world.agent.take().expect("gpushd runs").stop();
    world.start_agent();
    world.wait_until_known();
    true
}

pub(super) fn reload(world: &mut World, _: &mut fastrand::Rng) -> bool {
    let answer = world.agent().post("/v1/config/reload", &serde_json::json!({}));
    if answer.status != 200 {
        world.fail(&format!("the reload of the same config: {:?}", answer.error()));
    }
    true
}

/// Starts a process of the current user that does nothing.
pub(super) fn sleeper() -> Child {
    Command::new("sleep").arg("100000").spawn().expect("sleep")
}

pub(super) fn kill(pid: i32) {
    let _ = gpush_tests::mps::signal(pid, Signal::SIGKILL);
}
