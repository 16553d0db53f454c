//! GPUs as the API shows them: what the hardware says, what is wanted of it, what the agent
//! is doing with it, less what the asker may not see.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, Code, Cordon, Gpu, GpuState, Memory, Mode, Process, TimesliceView};
use gpush_core::{
    config::Config,
    desired,
    selector::{Selector, is_absent},
};
use gpush_nvml::{DriverError, Identity, Reading};
use gpush_store::{Lost, Override};

use crate::{
    agent::Agent,
    auth::Asker,
    cordon, maintenance, mps,
    observe::{Host, Moment, Sight},
    overrides, redact, state,
};

/// All GPUs, as `asker` may see them; profiles included.
pub(crate) async fn gpus(agent: &Agent, asker: &Asker) -> Result<Vec<Gpu>, ApiError> {
    let mut gpus = compose(agent, asker, host(agent).await?);
    gpus.iter_mut().for_each(|gpu| state::progress(agent, gpu));
    Ok(gpus)
}

/// UUIDs of the GPUs that selectors with commas between mean, of those that were seen so far.
///
/// # Errors
/// When one of them means none, or no GPU was seen yet.
pub(crate) fn meant(agent: &Agent, text: &str) -> Result<Vec<String>, ApiError> {
    let host = agent.observer.known().map_err(|error| no_driver(&error))?;
    let gpus = compose(agent, &Asker::agent(), host);
    let meant = Selector::resolve(&[text], &gpus).map_err(|error| absent(agent, error))?;
    Ok(meant.into_iter().map(|at| gpus[at].uuid.clone()).collect())
}

/// Why the driver can't say which GPU the one of an index is that it lists.
pub(crate) fn nameless(index: u32, error: &DriverError) -> ApiError {
    let said = error.to_api();
    let causes = [vec![said.message], said.causes].concat();
    ApiError { message: format!("GPU {index} can't be identified"), causes, ..said }
}

/// An error of a selector: where the driver lists a GPU of the index that seems to be none's, that one's.
pub(crate) fn absent(agent: &Agent, error: ApiError) -> ApiError {
    let Ok(host) = agent.observer.known() else { return error };
    let listed = host.nameless.iter().find(|(index, _)| is_absent(&error, *index));
    listed.map(|(index, why)| nameless(*index, why)).unwrap_or(error)
}

/// The host, or why it can't be seen.
pub(crate) async fn host(agent: &Agent) -> Result<Host, ApiError> {
    if let Some(maintenance) = agent.conditions.maintenance() {
        return agent.observer.last_seen().ok_or_else(|| maintenance::nothing_seen(&maintenance));
    }
    agent.observer.recent().await.map_err(|error| no_driver(&error))
}

/// Why nothing can be seen at all.
pub(crate) fn no_driver(error: &DriverError) -> ApiError {
    let said = error.to_api();
    if error.is_driver_unavailable() {
        return said;
    }
    // Whatever it was, there is no driver to speak of for now.
    ApiError { code: gpush_api::Code::DriverUnavailable, ..said }
        .hint("see the log of gpushd: `journalctl -u gpushd`")
        .retryable()
}

/// The GPUs of `host`, as `asker` may see them.
pub(crate) fn compose(agent: &Agent, asker: &Asker, host: Host) -> Vec<Gpu> {
    Facts::of(agent, host).seen_by(asker)
}

/// The same as plans see them: without processes that hold a GPU for nobody.
pub(crate) async fn compose_freed(agent: &Agent, asker: &Asker, host: Host) -> Vec<Gpu> {
    let mut facts = Facts::of(agent, host);
    facts.idle = mps::idle(agent).await;
    facts.seen_by(asker)
}

/// All GPUs as plans see them.
pub(crate) async fn freed(agent: &Agent, asker: &Asker) -> Result<Vec<Gpu>, ApiError> {
    let mut gpus = compose_freed(agent, asker, host(agent).await?).await;
    gpus.iter_mut().for_each(|gpu| state::progress(agent, gpu));
    Ok(gpus)
}

/// All that a view of the host is made of, whoever asks: of equal facts, equal views.
#[derive(Debug, PartialEq)]
pub(crate) struct Facts {
    config: Same<Config>,
    /// For what the GPUs that the config manages are held.
    lost: Option<Lost>,
    /// Processes that hold GPUs for nobody, and so are left out.
    idle: BTreeSet<u32>,
    gpus: Vec<GpuFacts>,
}

#[derive(Debug, PartialEq)]
struct GpuFacts {
    identity: Identity,
    reading: Option<Same<Reading>>,
    at: Moment,
    stale: bool,
    state: GpuState,
    reasons: Vec<String>,
    cordons: Vec<Cordon>,
    overridden: Option<Override>,
    /// Whether it is shared through MPS as a whole.
    shared: bool,
    /// What is known of its time-slice level; what is wanted of it is not in there yet.
    turns: Option<TimesliceView>,
}

/// Equal when it is the very same: nobody changes what is shared.
#[derive(Debug)]
struct Same<T>(Arc<T>);

impl<T> PartialEq for Same<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Those who see the same of the same facts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Viewer {
    /// Who sees everything.
    Admin,
    /// A user of whom something is to be seen.
    Own(u32),
    /// Any other.
    Anybody,
}

impl Facts {
    /// Those of the host as it was seen. What the readings say for the first time is taken in.
    pub(crate) fn of(agent: &Agent, host: Host) -> Self {
        let unsettled = agent.hardware.status().unsettled;
        let gpus = host.gpus.into_iter().map(|sight| GpuFacts::of(agent, &unsettled, sight)).collect();
        Self { config: Same(agent.settings.config()), lost: agent.held.lost(), idle: BTreeSet::new(), gpus }
    }

    /// UUID of the one at a position.
    pub(crate) fn uuid(&self, at: usize) -> &str {
        &self.gpus[at].identity.uuid
    }

    /// Whether no GPU is being changed: how far that is, is no fact of a moment ago.
    pub(crate) fn are_at_rest(&self) -> bool {
        self.gpus.iter().all(|gpu| !state::is_changing(&gpu.reasons))
    }

    /// As whom somebody sees them.
    pub(crate) fn viewer(&self, asker: &Asker) -> Viewer {
        let uid = asker.peer.uid;
        match asker {
            Asker { blind: true, .. } => Viewer::Anybody,
            Asker { admin: true, .. } => Viewer::Admin,
            Asker { .. } if self.gpus.iter().any(|gpu| gpu.concerns(uid)) => Viewer::Own(uid),
            Asker { .. } => Viewer::Anybody,
        }
    }

    /// The GPUs, as `asker` may see them.
    pub(crate) fn seen_by(&self, asker: &Asker) -> Vec<Gpu> {
        self.seen(asker, |_| true)
    }

    /// The one that a selector names, as `asker` may see it.
    ///
    /// # Errors
    /// When it names none, or several.
    pub(crate) fn find(&self, asker: &Asker, text: &str) -> Result<Gpu, ApiError> {
        let at = match self.gpus.iter().position(|gpu| gpu.identity.uuid == text) {
            Some(at) => at,
            None => self.position(asker, text)?,
        };
        Ok(self.seen(asker, |whole| whole == at).swap_remove(at))
    }

    /// Where the one is that a selector names.
    ///
    /// # Errors
    /// When it names none, or several.
    pub(crate) fn position(&self, asker: &Asker, text: &str) -> Result<usize, ApiError> {
        match Selector::resolve(&[text], &self.seen(asker, |_| false))?.as_slice() {
            [one] => Ok(*one),
            several => {
                Err(ApiError::new(Code::BadRequest, format!("{text:?} names {} GPUs, one is wanted", several.len()))
                    .hint("give an index, a UUID or a PCI address: `gpushctl gpu list` shows them"))
            }
        }
    }

    fn leave_out(&self, gpu: &mut Gpu) {
        if self.idle.is_empty() {
            return;
        }
        let free = |all: &mut Vec<Process>| all.retain(|one| one.pid.is_none_or(|pid| !self.idle.contains(&pid)));
        free(&mut gpu.processes);
        for instance in gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances) {
            free(&mut instance.processes);
            instance.compute.iter_mut().for_each(|compute| free(&mut compute.processes));
        }
    }

    /// Those that `whole` names with what stands and runs on them, the others without.
    fn seen(&self, asker: &Asker, whole: impl Fn(usize) -> bool) -> Vec<Gpu> {
        let gpus = self.gpus.iter().enumerate();
        let mut gpus: Vec<Gpu> = gpus.map(|(at, gpu)| gpu.seen_by(asker, whole(at))).collect();
        desired::describe(&self.config.0, &mut gpus);
        for (gpu, facts) in gpus.iter_mut().zip(&self.gpus) {
            gpu.drift.extend(mps::drift(gpu, facts.shared));
            self.leave_out(gpu);
            if let Some(lost) = &self.lost {
                state::hold(lost, gpu);
            }
            redact::gpu(gpu, asker);
        }
        gpus
    }
}

impl GpuFacts {
    fn of(agent: &Agent, unsettled: &[String], sight: Sight) -> Self {
        let uuid = &sight.identity.uuid;
        let settled = !unsettled.contains(uuid) && agent.operations.holder(uuid).is_none();
        if let Some(reading) = sight.reading.as_ref().filter(|_| settled && sight.listed && sight.error.is_none()) {
            agent.conditions.consider(reading, sight.at.own);
        }
        if let Some(rows) = sight.reading.as_ref().and_then(|reading| reading.rows) {
            cordon::read(agent, uuid, rows);
        }
        let (state, reasons) = state::of(agent, unsettled, &sight);
        let (cordons, overridden) = (agent.conditions.cordons(uuid), agent.overrides.of(uuid));
        let turns = agent.timeslice.seen(uuid);
        let Sight { identity, reading, at, stale, .. } = sight;
        let shared = agent.mps.is_in_force(&identity.uuid);
        Self { identity, reading: reading.map(Same), at, stale, state, reasons, cordons, overridden, shared, turns }
    }

    /// Whether something of the user's is among them.
    fn concerns(&self, uid: u32) -> bool {
        let authors = self.cordons.iter().filter_map(|cordon| cordon.by.as_ref());
        let mut authors = authors.chain(self.overridden.as_ref().map(|one| &one.author));
        let own = |processes: &[Process]| processes.iter().any(|process| process.uid == Some(uid));
        authors.any(|author| author.uid == uid)
            || self.reading.as_ref().is_some_and(|Same(reading)| {
                let mut instances = reading.mig.iter().flat_map(|mig| &mig.instances);
                own(&reading.processes)
                    || instances.any(|instance| {
                        own(&instance.processes) || instance.compute.iter().any(|compute| own(&compute.processes))
                    })
            })
    }

    fn seen_by(&self, asker: &Asker, whole: bool) -> Gpu {
        let Self { identity, reading, at, stale, state, reasons, cordons, overridden, shared: _, turns } = self;
        let reading = reading.as_ref().map(|Same(reading)| reading).filter(|_| whole);
        let overridden = overridden.clone().map(|one| overrides::view(one, Some(identity.index), asker));
        Gpu {
            index: identity.index,
            uuid: identity.uuid.clone(),
            pci: identity.pci.clone(),
            pci_id: Some(format!("0x{:08X}", identity.pci_id)),
            pci_subsystem: identity.pci_subsystem.map(|id| format!("0x{id:08X}")),
            minor: identity.minor,
            name: identity.name.clone(),
            architecture: identity.architecture,
            memory: reading.map_or_else(Memory::default, |reading| reading.memory),
            mode: Mode::Unmanaged,
            rule: None,
            layout: None,
            overridden,
            drift: Vec::new(),
            state: *state,
            reasons: reasons.clone(),
            cordons: cordons.clone(),
            // Nothing is planned on it before there is a reading.
            mig: reading.and_then(|reading| reading.mig.clone()),
            compute_mode: reading.and_then(|reading| reading.compute_mode),
            timeslice: turns.clone(),
            nvlink: reading.and_then(|reading| reading.nvlink.clone()),
            processes: reading.map(|reading| reading.processes.clone()).unwrap_or_default(),
            processes_known: reading.is_none_or(|reading| reading.processes_known),
            observed_at: at.wall,
            stale: *stale,
        }
    }
}
