//! The host, gpushd and the model, and the comparison of gpushd with the model.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use gpush_api::{Lease as Shown, LeaseState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
};

use super::{
    model::{Lease, Model, Share, Target},
    observed::{Observed, Planted},
};

const HOST: &str = "[[gpu]]\nmodel = \"a100-40\"\nmig = true\n[[gpu]]\nmodel = \"l4\"\ncount = 4\n";

const CONFIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.20gb\", \"2g.10gb\", \"1g.5gb*2\"]\n\
                      [[gpu]]\nmatch = [\"1\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 3 }\n\
                      [[gpu]]\nmatch = [\"2-4\"]\nmode = \"exclusive\"\n";

/// Layouts of GPU 0.
pub(super) const LAYOUTS: [&[&str]; 2] = [&["3g.20gb", "2g.10gb", "1g.5gb*2"], &["2g.10gb*3", "1g.5gb"]];

/// The profiles of [`LAYOUTS`], and a profile that neither layout has.
pub(super) const PROFILES: [&str; 4] = ["1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb"];

/// Time within which gpushd must show a change.
pub(super) const SOON: Duration = Duration::from_secs(10);

pub(super) struct World {
    // This must be the first field, so that it is dropped before the host.
    agent: Option<Agent>,
    pub(super) host: Host,
    pub(super) model: Model,
    pub(super) observed: Observed,
    pub(super) checks: u64,
    pub(super) counts: BTreeMap<String, u32>,
}

impl World {
    pub(super) fn up(planted: Option<Planted>) -> Self {
        let mut world = Self {
            agent: None,
            host: Host::up(HOST),
            model: Model::default(),
            observed: Observed::new(planted),
            checks: 0,
            counts: BTreeMap::new(),
        };
        world.start_agent();
        world.learn_targets();
        world
    }

    pub(super) fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("gpushd runs")
    }

    pub(super) fn log(&self) -> String {
        let log = self.agent.as_ref().map(Agent::log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    pub(super) fn count(&mut self, what: impl Into<String>) {
        *self.counts.entry(what.into()).or_default() += 1;
    }

    pub(super) fn start_agent(&mut self) {
        self.agent = Some(Setup::on(&self.host).config(CONFIG).env("GPUSH_LOG", "info").start());
        self.agent().wait_for_layouts_at_start();
        let _begun = self.agent().settle();
        self.agent().settle_reads();
    }

    pub(super) fn kill_agent(&mut self) {
        self.agent.take().expect("gpushd runs").kill();
    }

    pub(super) fn stop_agent(&mut self) {
        self.agent.take().expect("gpushd runs").stop();
    }

    /// Reads the targets from gpushd. For targets that still exist, keeps the recorded processes.
    pub(super) fn learn_targets(&mut self) {
        let mut targets = BTreeMap::new();
        for gpu in self.agent().gpus() {
            let index = gpu.index as usize;
            let mut add = |uuid: String, share: Share, most: usize, place: String| {
                let old = self.model.targets.get(&uuid);
                let processes = old.map(|old| old.processes.clone()).unwrap_or_default();
                targets.insert(uuid, Target { gpu: index, share, most, place, processes });
            };
            match index {
                0 => {
                    for instance in gpu.mig.iter().flat_map(|mig| &mig.instances) {
                        let profile = PROFILES.into_iter().find(|profile| *profile == instance.profile);
                        let place = format!("--gpu 0 --gi {} --ci {}", instance.id, instance.compute[0].id);
                        let uuid = instance.compute[0].uuid.clone().expect("a UUID");
                        add(uuid, Share::Mig(profile.expect("a profile of a layout")), 1, place);
                    }
                }
                1 => add(gpu.uuid, Share::Timeslice, 3, "--gpu 1".to_owned()),
                index => add(gpu.uuid, Share::Whole, 1, format!("--gpu {index}")),
            }
        }
        self.model.targets = targets;
    }

    /// Compares gpushd with the model. Retries for a while, because gpushd may show the end of a
    /// lease late.
    pub(super) fn check(&mut self) -> Result<(), String> {
        let began = Instant::now();
        loop {
            let difference = self.difference();
            self.checks += 1;
            match difference {
                None => return Ok(()),
                Some(what) if began.elapsed() > SOON => return Err(what),
                Some(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Returns a description of the first difference between gpushd and the model.
    fn difference(&self) -> Option<String> {
        let shown: BTreeMap<String, Lease> =
            self.observed.open(self.agent()).iter().map(|lease| (lease.id.to_string(), lease_of(lease))).collect();
        if shown != self.model.open {
            return Some(format!("gpushd shows {shown:#?}\nthe model has {:#?}", self.model.open));
        }
        let (id, ended) = self.model.ended.last_key_value()?;
        match self.observed.one(self.agent(), id) {
            Ok(lease) if lease_of(&lease) == *ended => None,
            other => Some(format!("gpushd shows {id} as {other:?}, the model has {ended:?}")),
        }
    }

    /// Checks that each leased MIG device still exists.
    pub(super) fn leased_devices_exist(&self) -> Result<(), String> {
        let gpus = self.agent().gpus();
        let instances = gpus.iter().flat_map(|gpu| &gpu.mig).flat_map(|mig| &mig.instances);
        let devices: BTreeSet<&String> =
            instances.flat_map(|instance| &instance.compute).filter_map(|compute| compute.uuid.as_ref()).collect();
        let leased = self.model.open.iter().flat_map(|(id, lease)| lease.targets.iter().map(move |uuid| (id, uuid)));
        for (id, uuid) in leased.filter(|(_, uuid)| uuid.starts_with("MIG-")) {
            if !devices.contains(uuid) {
                return Err(format!("{uuid} of {id} was destroyed"));
            }
        }
        Ok(())
    }
}

/// Converts a lease of the API into a lease of the model.
pub(super) fn lease_of(lease: &Shown) -> Lease {
    let mut targets: Vec<String> = lease.members.iter().map(|member| member.target.clone()).collect();
    targets.sort();
    let reason = lease.reason.filter(|_| matches!(lease.state, LeaseState::Releasing | LeaseState::Ended));
    Lease { holder: lease.holder.uid, kind: lease.kind, state: lease.state, reason, targets }
}
