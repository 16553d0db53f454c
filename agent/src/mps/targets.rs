//! Which daemons there shall be, and seeing to it: whenever the config or what stands on a GPU is another.
//!
//! ```text
//! a daemon was found, or its target is wanted ──► an entry, a task that lives for it
//!    wanted ───────────────────────────────────► Want(policy): started, or set
//!    not wanted, or stopped by hand ───────────► Want(nothing): drained, ended
//!    its GPU can't be seen ────────────────────► left alone: what runs there may be in use
//! gone, and not wanted ────────────────────────► no entry, no directory
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use gpush_api::{Gpu, GpuState, Happening, Mode, MpsChange, MpsPolicy, MpsUsers};
use gpush_core::{
    config::Config,
    sharing::{self, Sharing, Target},
    supervisor::State,
};
use gpush_mps::daemon::{
    Daemon, Desired as Wanted, RecordedUsers as OnRecord, Report as Seen, Request as Do, Sources, TargetDir as Place,
    sweep_removed,
};
use jiff::{SignedDuration, Timestamp};
use tokio::{task::JoinSet, time::Instant};

use super::{Entry, Mps, clients, compute_mode, many, moves::Moves, records, shares, view};
use crate::{caller::Viewer, eligibility};

/// Between two looks although nothing is said to be different; at what ends by itself, when there is such.
const LOOK: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(1));

/// Looks after the daemons until the agent stops. They go on.
pub(crate) async fn run(mps: Mps) {
    // The first look may take as long as the driver does.
    let (mut next, mut settle_at) = (Instant::now(), Instant::now());
    let mut snapshots = mps.handles.state.watch();
    let mut changes = 0;
    loop {
        let woken = tokio::select! {
            Ok(host) = snapshots.wait_for(|host| host.changes != changes) => {
                changes = host.changes;
                true
            }
            () = mps.handles.stopping.cancelled() => return,
            () = mps.wake.notified() => true,
            () = tokio::time::sleep_until(next) => false,
        };
        // Whether a share has ended is asked of the kernel and the clock; what GPUs hold, of the driver, which takes
        // its time.
        let ended = shares::expire(&mps).await;
        if woken || ended || Instant::now() >= settle_at {
            settle(&mps).await;
            mps.handles.shared_gpus.look();
            settle_at = Instant::now() + LOOK.0;
        }
        next = if shares::end_by_themselves(&mps) { settle_at.min(Instant::now() + LOOK.1) } else { settle_at };
    }
}

/// Goes on with the daemons that an agent before left running. Before anybody can ask: one that is not known yet is
/// none to whoever asks.
pub(crate) fn find(mps: &Mps) {
    let mut known = BTreeSet::new();
    sweep_removed(&mps.base);
    for (place, spec) in Place::all(&mps.base) {
        known.insert(spec.target.clone());
        let daemon = live(mps, &spec.target, &spec.gpu_uuid, &spec.uuid, place);
        let turn = Arc::default();
        let entry = Entry { short: spec.target, gpu_uuid: spec.gpu_uuid, target: None, daemon, turn };
        mps.entries().insert(spec.uuid, entry);
    }
    let (hands, stopping) = (mps.hands.clone(), mps.handles.stopping.clone());
    tokio::spawn(async move { stopping.run_until_cancelled(hands.end_orphans(known)).await });
}

fn live(mps: &Mps, short: &str, gpu_uuid: &str, uuid: &str, place: Place) -> Daemon {
    let (shared, of) = (mps.clone(), uuid.to_owned());
    let target = short.to_owned();
    let changed = move |seen: &Seen| {
        let Some(entry) = shared.entries().get(&of).cloned() else { return };
        let name = view::name(&entry);
        let (gpu_uuid, gpu) = (entry.gpu_uuid, entry.target.map(|target| target.gpu));
        let state = view::state(seen);
        let mut reasons = view::reasons(seen, &name);
        reasons.extend(seen.news.clone());
        match seen.state {
            // It serves, and not as it should: why is not in the log otherwise.
            State::Hung { .. } | State::Fault { .. } => {
                tracing::warn!(mps = target, "the MPS daemon is {}: {}", state.name(), reasons.join("; "));
            }
            State::Stopped
            | State::Starting { .. }
            | State::Found { .. }
            | State::Ready { .. }
            | State::BackingOff { .. }
            | State::GivenUp
            | State::Draining { .. }
            | State::Stopping { .. } => tracing::info!(mps = target, "the MPS daemon is {}", state.name()),
        }
        let (uuid, target) = (of.clone(), target.clone());
        shared.handles.state.events().publish(Happening::Mps(Box::new(MpsChange {
            target,
            uuid,
            gpu_uuid,
            gpu,
            state,
            reasons,
        })));
        // One that came up after nobody waited for it any more has no compute mode yet.
        if matches!(seen.state, State::Stopped | State::Ready { .. }) {
            shared.settle();
        }
    };
    let witness = clients::witness(mps, gpu_uuid, uuid);
    let (shared, of) = (mps.clone(), uuid.to_owned());
    let on_record: OnRecord = Arc::new(move || match shared.record(&of).stopped {
        Some(_) => BTreeSet::new(),
        None => shared.shares_of(&of).iter().map(|share| share.by.uid).collect(),
    });
    let shared = mps.clone();
    let hands_off = Arc::new(move || {
        let entered = shared.handles.state.maintenance().is_some();
        entered.then(|| "the host is in maintenance: no MPS daemon is started before that is over".to_owned())
    });
    let sources = Sources { driver_clients: witness, recorded_users: on_record, start_blocked: hands_off };
    Daemon::of(short, uuid, place, mps.hands.clone(), sources, changed)
}

/// Has each daemon be as it is wanted now.
pub(super) async fn settle(mps: &Mps) {
    // Two at once would each go by what it has seen itself, and one of them before the other's end.
    let _alone = mps.settling.lock().await;
    let config = mps.handles.state.config();
    let Ok(observed) = mps.handles.readings.host().await else { return };
    let mut gpus = observed.gpus(Viewer::Log);
    let moving = mps.moving();
    // The operation that changes it wants its daemon now, as its last step.
    for gpu in gpus.iter_mut().filter(|gpu| gpu.state == GpuState::Changing && moving.coming.contains(&gpu.uuid)) {
        gpu.state = GpuState::Ready;
    }
    let had: BTreeSet<String> = mps.entries().keys().cloned().collect();
    let found = sharing::decide(&config, &gpus, &had);
    mps.find(found.findings);
    let targets: BTreeMap<String, Target> =
        found.targets.into_iter().map(|target| (target.uuid.clone(), target)).collect();
    for target in targets.values().filter(|target| may_come(mps, &moving, target)) {
        enter(mps, target);
        // What was set above a rule stands until the rule is another.
        records::unset(mps, target).await;
    }
    if targets.values().any(|target| target.policy.users == MpsUsers::Many) {
        let program = program(mps, &config.mps.control, &gpush_core::config::Mps::default().control);
        let before = mps.many().clone();
        let asked = many::ask(&program, before).await;
        *mps.many() = Some(asked);
    }
    let driver = mps.handles.hardware.status().driver.map(|driver| driver.version);
    let entries = mps.entries().clone();
    let mut settled = JoinSet::new();
    for (uuid, entry) in entries {
        let seen = gpus.iter().find(|gpu| gpu.uuid == entry.gpu_uuid);
        // One that an operation brought up, and that was taken back with it, is none.
        let target = targets.get(&uuid).filter(|target| may_come(mps, &moving, target));
        let target = target.filter(|_| !moving.aside.contains(&uuid)).cloned();
        let aside = moving.aside.contains(&uuid);
        let unseen = found.unseen.contains(&entry.gpu_uuid) || !can_be_judged(seen);
        // What an operation brought up, an operation ends; and while a layout only is wanted, what it will
        // take away stands.
        let stands = mps.is_in_force(&uuid) && seen.is_none_or(|gpu| gpu.mode != Mode::Unmanaged)
            || seen.is_some_and(|gpu| uuid != gpu.uuid && !gpu.drift.is_empty());
        if target.is_none() && !aside && (unseen || stands) {
            continue;
        }
        let wanted = target.map(|target| Box::new(wanted(mps, &config, &entry, &target, driver.clone())));
        let mps = mps.clone();
        settled.spawn(async move { one(&mps, &uuid, &entry, wanted).await });
    }
    settled.join_all().await;
}

/// Whether a target gets a daemon: a MIG device by its layout; a full GPU when an operation says so.
fn may_come(mps: &Mps, moving: &Moves, target: &Target) -> bool {
    !target.full_gpu || mps.is_in_force(&target.uuid) || moving.coming.contains(&target.uuid)
}

/// Whether what is seen of a GPU tells that nothing on it is to be shared any more. One that is not even
/// listed may come back with all that is on it.
fn can_be_judged(gpu: Option<&Gpu>) -> bool {
    gpu.is_some_and(|gpu| match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => !gpu.stale,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    })
}

/// What is wanted of the host by what was seen of it last, for those who only ask.
#[derive(Debug)]
pub(super) struct Outlook {
    pub(super) gpus: Vec<Gpu>,
    decided: Sharing,
}

impl Outlook {
    pub(super) fn of(mps: &Mps, viewer: Viewer) -> Self {
        let gpus = eligibility::known(&mps.handles.readings, viewer);
        let had = mps.entries().keys().cloned().collect();
        let decided = sharing::decide(&mps.handles.state.config(), &gpus, &had);
        Self { gpus, decided }
    }

    /// Returns whether a target has no entry yet that will get one without an operation: gpushd has read its GPU, and
    /// not come to start its daemon.
    pub(super) fn has_pending(&self, mps: &Mps) -> bool {
        let known: BTreeSet<String> = mps.entries().keys().cloned().collect();
        let comes = |target: &Target| !target.full_gpu || mps.is_in_force(&target.uuid);
        self.decided.targets.iter().any(|target| !known.contains(&target.uuid) && comes(target))
    }

    /// Why a target that has a daemon is not to be one any more: whoever has something of it may finish.
    pub(super) fn ends(&self, uuid: &str, entry: &Entry) -> Option<String> {
        let gpu = self.gpus.iter().find(|gpu| gpu.uuid == entry.gpu_uuid)?;
        let is_wanted = self.decided.targets.iter().any(|target| target.uuid == uuid);
        if is_wanted || self.decided.unseen.contains(&gpu.uuid) || !can_be_judged(Some(gpu)) {
            return None;
        }
        let prefix = format!("{}: ", view::label(entry, uuid));
        let told: Vec<&str> = self.decided.findings.iter().filter_map(|one| one.strip_prefix(&prefix)).collect();
        Some(match (told.is_empty(), uuid == gpu.uuid) {
            (false, _) => told.join(", "),
            (true, true) => format!("the config wants GPU {} in mode {}", gpu.index, gpu.mode.name()),
            (true, false) => "its GPU's layout does not share it any more".to_owned(),
        })
    }
}

/// Makes an entry for a target, or brings its entry up to date.
fn enter(mps: &Mps, target: &Target) {
    let mut entries = mps.entries();
    if let Some(entry) = entries.get_mut(&target.uuid) {
        entry.target = Some(target.clone());
        return;
    }
    let taken: BTreeSet<String> = entries.values().map(|entry| entry.short.clone()).collect();
    let short = sharing::short_name(&target.uuid, &taken);
    let place = Place::of(&mps.base, &short);
    let daemon = live(mps, &short, &target.gpu_uuid, &target.uuid, place);
    let (gpu_uuid, turn) = (target.gpu_uuid.clone(), Arc::default());
    let entry = Entry { short, gpu_uuid, target: Some(target.clone()), daemon, turn };
    entries.insert(target.uuid.clone(), entry);
}

/// One daemon as it is wanted, with its compute mode before and after.
async fn one(mps: &Mps, uuid: &str, entry: &Entry, wanted: Option<Box<Wanted>>) {
    let full = entry.target.as_ref().filter(|target| target.full_gpu);
    let is_wanted = wanted.is_some();
    if let (Some(wanted), Some(target)) = (&wanted, full) {
        // Before the daemon is there: nobody shall have come in past it.
        compute_mode::take(mps, target, wanted.policy.compute_mode).await;
    }
    // In turn with those who stop it, put it aside or take shares: what was decided before is no reason to
    // start one that somebody has stopped since, or to lock somebody out whose share is being recorded.
    let turn = entry.turn.lock().await;
    let aside = mps.moving().aside.contains(uuid);
    let stopped = mps.record(uuid).stopped;
    let want = if stopped.is_some() || aside { None } else { wanted };
    if let Err(error) = entry.daemon.have(Do::Want(want)).await {
        tracing::error!(mps = entry.short, "{error}");
    }
    // The time that its clients were given goes on over a restart of gpushd.
    if let Some(end_at) = stopped.and_then(|stopped| stopped.end_at)
        && is_drained_for_ever(&entry.daemon.seen())
    {
        let left = Duration::try_from(end_at.duration_since(Timestamp::now())).unwrap_or_default();
        if let Err(error) = entry.daemon.have(Do::Drain(Some(left))).await {
            tracing::error!(mps = entry.short, "{error}");
        }
    }
    let users = mps.shares_of(uuid).iter().map(|share| share.by.uid).collect();
    if let Err(error) = entry.daemon.have(Do::Users(users)).await {
        tracing::error!(mps = entry.short, "{error}");
    }
    drop(turn);
    if is_wanted || aside || entry.daemon.seen().state != State::Stopped {
        return;
    }
    let place = Place::of(&mps.base, &entry.short);
    if place.is_taken() {
        // What it started is on its way out, or serves somebody.
        if entry.daemon.seen().since > Timestamp::now() - SignedDuration::from_secs(5) {
            mps.settle_soon();
        }
        return;
    }
    // It is gone, and so is what it was for.
    // Its shares end first: a target that is not listed any more has none.
    shares::end_all_of(mps, uuid).await;
    compute_mode::put_back(mps, uuid).await;
    place.remove();
    mps.entries().remove(uuid);
    records::forget(mps, uuid).await;
    mps.handles.timeslice.settle();
}

/// Whether clients have all the time that they want.
fn is_drained_for_ever(seen: &Seen) -> bool {
    seen.until.is_none() && (seen.behind || matches!(seen.state, State::Draining { .. }))
}

/// How a target shall be shared: by its rule, and by what was set above that.
pub(super) fn policy(mps: &Mps, target: &Target) -> MpsPolicy {
    let set = mps.record(&target.uuid).set.filter(|set| set.rule == target.policy.settings);
    let settings = set.map_or_else(|| target.policy.settings.clone(), |set| set.settings);
    many::had(MpsPolicy { settings, ..target.policy.clone() }, mps.many().as_ref())
}

/// How the daemon of a target shall be.
fn wanted(mps: &Mps, config: &Config, entry: &Entry, target: &Target, driver: Option<String>) -> Wanted {
    let settings = &config.mps;
    let usual = gpush_core::config::Mps::default();
    Wanted {
        policy: policy(mps, target),
        gpu_uuid: target.gpu_uuid.clone(),
        supervision: settings.policy(),
        health: Duration::from_secs(settings.health_s.into()),
        control: program(mps, &settings.control, &usual.control),
        server: program(mps, &settings.server, &usual.server),
        driver,
        logs: mps.log_directory(&settings.log_directory, &usual.log_directory).join(&entry.short),
        log_bytes: u64::from(settings.log_mib) << 20,
    }
}

/// Where one of NVIDIA's programs is.
fn program(mps: &Mps, configured: &str, usual: &str) -> PathBuf {
    match &mps.programs {
        Some(dir) if configured == usual => dir.join(PathBuf::from(usual).file_name().unwrap_or_default()),
        Some(_) | None => PathBuf::from(configured),
    }
}
