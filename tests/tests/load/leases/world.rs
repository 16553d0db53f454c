//! The host, gpushd and the model, and the comparison of gpushd and the hardware with the model.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use gpush_api::{
    ApiError, ComputeMode, Gpu, GpuIndex, GpuState, Lease as Shown, LeaseGrant, LeaseKind, LeaseState, MemberShare,
    MpsDaemon, MpsState, Operation, OperationSummary,
};
use gpush_tests::{
    agent::{Agent, PATIENCE, Setup},
    driver::hardware,
    host::Host,
    mps::{self, Client},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{
    hardware::Hardware,
    model::{self, Expected, Lease, Model, Share, Target},
    observed::{Observed, Planted},
    rules::{Offer, PROFILES, Rule, config},
};

/// Time within which gpushd must show a change.
pub(super) const SOON: Duration = Duration::from_secs(10);

pub(super) struct World {
    // This must be the first field, so that it is dropped before the host.
    agent: Option<Agent>,
    /// MPS clients, each with the lease that it names.
    pub(super) clients: Vec<(String, Client)>,
    pub(super) host: Host,
    pub(super) model: Model,
    pub(super) observed: Observed,
    hardware: Hardware,
    pub(super) auto_reconcile: bool,
    pub(super) checks: u64,
    pub(super) counts: BTreeMap<String, u32>,
}

impl World {
    /// Starts a host with one GPU for each rule, of which the first `with_mig` have MIG. Then starts
    /// gpushd with these rules.
    pub(super) fn up(rules: &[Rule], with_mig: usize, planted: Option<Planted>) -> Self {
        let mig = format!("[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\ncount = {with_mig}\n");
        let others = format!("[[gpu]]\nmodel = \"l4\"\ncount = {}\n", rules.len() - with_mig);
        let text = [(with_mig, mig), (rules.len() - with_mig, others)];
        let text: String = text.into_iter().filter(|(count, _)| *count > 0).map(|(_, text)| text).collect();
        let host = Host::up(&text);
        host.start_trace();
        let mut world = Self {
            agent: None,
            clients: Vec::new(),
            host,
            model: Model::default(),
            observed: Observed::new(planted),
            hardware: Hardware::default(),
            auto_reconcile: false,
            checks: 0,
            counts: BTreeMap::new(),
        };
        let gpu = |(index, rule): (usize, &Rule)| model::Gpu {
            uuid: String::new(),
            has_mig: index < with_mig,
            rule: *rule,
            overridden: None,
            in_force: *rule,
            is_closed: false,
        };
        world.model.gpus = rules.iter().enumerate().map(gpu).collect();
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

    /// Returns the rule of each GPU.
    pub(super) fn rules(&self) -> Vec<Rule> {
        self.model.gpus.iter().map(|gpu| gpu.rule).collect()
    }

    pub(super) fn set_rules(&mut self, rules: &[Rule]) {
        for (gpu, rule) in self.model.gpus.iter_mut().zip(rules) {
            gpu.rule = *rule;
        }
    }

    /// Returns the config with the rules of the model.
    pub(super) fn config(&self) -> String {
        config(&self.rules(), self.auto_reconcile)
    }

    pub(super) fn start_agent(&mut self) {
        self.agent = Some(Setup::on(&self.host).config(self.config()).env("GPUSH_LOG", "info").start());
        self.agent().wait_for_layouts_at_start();
        self.settle_operations();
        self.agent().settle_reads();
    }

    pub(super) fn kill_agent(&mut self) {
        self.agent.take().expect("gpushd runs").kill();
    }

    pub(super) fn stop_agent(&mut self) {
        self.agent.take().expect("gpushd runs").stop();
    }

    /// Reboots the host. All processes end.
    pub(super) fn reboot(&mut self) {
        self.kill_agent();
        self.clients.clear();
        self.host.sim::<&str>("reboot", &[]);
        for pid in mps::controls(&mps::base(&self.host)) {
            // The daemon may have ended already.
            let _ended = mps::signal(pid, Signal::SIGKILL);
        }
        self.model.reboot();
        self.start_agent();
        self.learn_targets();
    }

    /// Changes the compute mode of a GPU as another program would do it.
    pub(super) fn change_compute_mode(&self, uuid: &str) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let change = async { hardware(&self.host).set_compute_mode(&uuid.into(), ComputeMode::Prohibited).await };
        runtime.block_on(change).expect("the compute mode can be changed");
    }

    /// Waits until no operation is running.
    pub(super) fn settle_operations(&self) {
        let latest: Vec<OperationSummary> =
            serde_json::from_value(self.agent().get("/v1/operations?limit=20").json()).expect("operations");
        for one in latest.iter().filter(|one| !one.state.is_final()) {
            let _ended: Operation = self.agent().follow(self.agent().operation(&one.id));
        }
    }

    /// Reads the targets from gpushd. For targets that still exist, keeps the recorded processes.
    pub(super) fn learn_targets(&mut self) {
        let mut targets = BTreeMap::new();
        for shown in self.agent().gpus() {
            let index = shown.index.0 as usize;
            let gpu = &mut self.model.gpus[index];
            gpu.uuid = shown.uuid.to_string();
            let mut add = |uuid: String, offer: Offer, instance: Option<(u32, u32)>| {
                let old = self.model.targets.get(&uuid);
                let processes = old.map(|old| old.processes.clone()).unwrap_or_default();
                targets.insert(uuid, Target { gpu: index, offer, instance, processes });
            };
            let Some(layout) = gpu.in_force.layout() else {
                add(shown.uuid.to_string(), gpu.in_force.offer().expect("the offer of a whole GPU"), None);
                continue;
            };
            for instance in shown.mig.iter().flat_map(|mig| &mig.instances) {
                let [device] = instance.compute.as_slice() else { continue };
                let (Some(uuid), Some(profile)) =
                    (device.uuid.clone(), PROFILES.into_iter().find(|profile| *profile == instance.profile))
                else {
                    continue;
                };
                // While a change is pending, a device can have a profile that the layout in force lacks.
                let offer = layout.offer(profile).unwrap_or(Offer::Mig(profile));
                add(uuid.to_string(), offer, Some((instance.id, device.id)));
            }
        }
        self.model.targets = targets;
    }

    /// Records that a GPU has its desired rule, and checks that this changes no leased target.
    pub(super) fn settled(&mut self, gpu: usize) -> Result<(), String> {
        let (before, now) = (self.model.gpus[gpu].in_force, self.model.gpus[gpu].desired());
        self.model.gpus[gpu].in_force = now;
        self.learn_targets();
        let uuid = self.model.gpus[gpu].uuid.clone();
        for (id, lease) in self.model.open.iter().filter(|(_, lease)| lease.gpus.contains(&uuid)) {
            for target in &lease.targets {
                let offer = self.model.targets.get(target).filter(|target| target.gpu == gpu).map(|one| one.offer);
                if before != now && offer.is_none_or(|offer| offer.kind() != lease.kind) {
                    let what = format!("GPU {gpu} changed from {before:?} to {now:?}");
                    return Err(format!("{what} under {id} ({:?} on {target})", lease.kind));
                }
            }
        }
        Ok(())
    }

    /// Waits until gpushd shows no difference from the desired state of a GPU.
    pub(super) fn until_settled(&mut self, gpu: usize) -> Result<(), String> {
        let began = Instant::now();
        while !self.is_shown_as_settled(gpu) {
            if began.elapsed() > PATIENCE {
                return Err(format!("GPU {gpu} does not change to {:?}", self.model.gpus[gpu].desired()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.settle_operations();
        self.settled(gpu)
    }

    /// Returns whether gpushd shows that a GPU has its desired rule: no drift, no pending change, and exactly the MPS
    /// daemons of the layout.
    pub(super) fn is_shown_as_settled(&self, gpu: usize) -> bool {
        let index = u32::try_from(gpu).expect("an index");
        let shown: Gpu = serde_json::from_value(self.agent().get(&format!("/v1/gpus/{index}")).json()).expect("a GPU");
        let is_current = matches!(shown.state, GpuState::Ready | GpuState::Cordoned) && !shown.stale;
        let has_desired_daemons = || {
            let Some(layout) = self.model.gpus[gpu].desired().layout() else { return true };
            let instances = shown.mig.iter().flat_map(|mig| &mig.instances);
            let is_shared = |profile: &str| {
                let known = PROFILES.into_iter().find(|known| *known == profile);
                known.and_then(|known| layout.offer(known)) == Some(Offer::Mps)
            };
            let desired = instances.filter(|instance| is_shared(&instance.profile)).count();
            let daemons = mps::daemons(self.agent());
            let here: Vec<&MpsDaemon> = daemons.iter().filter(|daemon| daemon.gpu == Some(GpuIndex(index))).collect();
            here.len() == desired && here.iter().all(|one| one.state == MpsState::Ready && one.ends.is_none())
        };
        is_current && shown.pending.is_empty() && shown.drift.is_empty() && has_desired_daemons()
    }

    /// Finds out which GPUs without leases have got their desired rule.
    pub(super) fn refresh(&mut self) -> Result<(), String> {
        for gpu in 0..self.model.gpus.len() {
            let is_pending = !self.model.gpus[gpu].is_settled() && !self.model.is_occupied(gpu);
            if is_pending && self.is_shown_as_settled(gpu) {
                self.settled(gpu)?;
            }
        }
        Ok(())
    }

    /// Sends a request. If gpushd must grant the request but refuses it, repeats the request for a
    /// while. On a busy machine, the reading of a GPU can be late, and gpushd grants nothing on such a GPU.
    pub(super) fn request(
        &mut self,
        share: Share,
        count: usize,
        only: Option<usize>,
        holder: u32,
    ) -> (Expected, Result<LeaseGrant, ApiError>) {
        let expected = self.model.expects(share, count, only);
        let body = body(share, count, only, holder);
        let began = Instant::now();
        loop {
            match self.observed.request(self.agent(), &body) {
                Err(error) if expected == Expected::Granted && error.retryable && began.elapsed() < SOON => {
                    self.count("request repeated");
                    self.agent().settle_reads();
                }
                answer => return (expected, answer),
            }
        }
    }

    /// Records a grant.
    pub(super) fn granted(&mut self, grant: &LeaseGrant, share: Share, count: usize) -> Result<(), String> {
        let lease = lease_of(&grant.lease);
        for gpu in 0..self.model.gpus.len() {
            let one = &self.model.gpus[gpu];
            if one.is_settled() || !lease.gpus.contains(&one.uuid) {
                continue;
            }
            // The grant shows that the change is done, because only the desired rule offers the share.
            let from = (one.in_force, one.desired());
            if !self.model.is_occupied(gpu) && !from.0.changes_devices_only(from.1) {
                self.settled(gpu)?;
            } else {
                self.learn_targets();
            }
        }
        self.model.grant(&grant.lease.id.to_string(), share, count, lease)
    }

    /// Compares gpushd and the hardware with the model. Retries for a while, because gpushd may show the
    /// end of a lease late, and may still change a GPU without leases.
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

    /// Returns a description of the first difference.
    fn difference(&mut self) -> Option<String> {
        let agent = self.agent.as_ref().expect("gpushd runs");
        let shown = self.observed.open(agent).into_iter().filter(|lease| lease.state != LeaseState::Queued);
        let shown: BTreeMap<String, Lease> = shown.map(|lease| (lease.id.to_string(), lease_of(&lease))).collect();
        if let Some(why) = model::overlap(&shown) {
            return Some(why);
        }
        if shown != self.model.open {
            return Some(format!("gpushd shows {shown:#?}\nthe model has {:#?}", self.model.open));
        }
        if let Some((id, ended)) = self.model.last_ended() {
            match self.observed.one(agent, id) {
                Ok(lease) if lease_of(&lease) == *ended => {}
                other => return Some(format!("gpushd shows {id} as {other:?}, the model has {ended:?}")),
            }
        }
        shared_targets(&self.model, &mps::daemons(agent)).or_else(|| self.hardware.check(&self.host, &self.model).err())
    }
}

/// Returns the body of a lease request.
pub(super) fn body(share: Share, count: usize, only: Option<usize>, holder: u32) -> Value {
    let share = match share {
        Share::Mig(profile) => json!({ "kind": "mig_profile", "profile": profile }),
        Share::Mps(percent) => json!({ "kind": "mps", "percentage": percent }),
        Share::Timeslice => json!({ "kind": "timeslice" }),
        Share::Whole => json!({ "kind": "whole" }),
    };
    let gpus: Vec<String> = only.iter().map(usize::to_string).collect();
    json!({ "share": share, "count": count, "holder_uid": holder, "selectors": gpus })
}

/// Compares the MPS targets that gpushd shows with the leases: gpushd shows no daemon on a target that
/// is leased in another way, and grants at most 100 % of a target.
fn shared_targets(model: &Model, shown: &[MpsDaemon]) -> Option<String> {
    for daemon in shown {
        if daemon.granted_percent > 100 {
            return Some(format!("{} % of {} are granted", daemon.granted_percent, daemon.label()));
        }
        let is_other = |lease: &Lease| {
            lease.targets.iter().any(|target| daemon.uuid == target.as_str()) && lease.kind != LeaseKind::Mps
        };
        if let Some((id, lease)) = model.open.iter().find(|(_, lease)| daemon.pid.is_some() && is_other(lease)) {
            return Some(format!("gpushd shows an MPS daemon on {} of {id} ({:?})", daemon.label(), lease.kind));
        }
    }
    None
}

/// Converts a lease of the API into a lease of the model.
pub(super) fn lease_of(lease: &Shown) -> Lease {
    let mut targets: Vec<String> = lease.members.iter().map(|member| member.target.to_string()).collect();
    targets.sort();
    let reason = lease.reason.filter(|_| matches!(lease.state, LeaseState::Releasing | LeaseState::Ended));
    let percent = |share: &MemberShare| match share {
        MemberShare::Mps { percentage, .. } => u32::from(percentage.tenths()) / 10,
        _ => 0,
    };
    Lease {
        holder: lease.holder.uid,
        kind: lease.kind,
        state: lease.state,
        reason,
        targets,
        gpus: lease.members.iter().map(|member| member.gpu_uuid.to_string()).collect(),
        percent: lease.members.iter().map(|member| percent(&member.share)).sum(),
    }
}
