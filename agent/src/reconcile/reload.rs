//! Reload of the config, all or nothing, on SIGHUP or through the API.
//!
//! ```text
//! read ─┬─ invalid, or cannot be applied ──────────────► refused: the old config stays, health reports the error
//!       ├─ changes the rule under an override ─────────► refused, unless `clear_overrides` is set
//!       └─ recorded, with the overrides that it ends ──► active
//! ```
//!
//! One task does all reloads, one after the other. The same task handles signals, and owns the socket and the log,
//! whose settings take effect at once.

use std::sync::Arc;

use gpush_api::{Actor, ApiError, Code, ConfigDiff, Gpu, GpuDiff, GpuState, GpuUuid, Reloaded};
use gpush_core::{
    config::Config,
    desired::{self, KnownHost},
};
use gpush_store::{AuditEvent, DONE};
use tokio::sync::{mpsc, oneshot};

use crate::{
    modes::{mig::reset::not_resetting, mps::Mps, timeslice::Timeslice},
    operations::overrides,
    requests::caller::Viewer,
    state::{OverrideEffect, State, context::HostContext, readings::Readings, unidentified, words},
    system::settings::Candidate,
};

/// Maximum number of reloads that wait.
const MOST_WAITING: usize = 16;

/// A request for a reload.
#[derive(Debug)]
pub(crate) struct ReloadCommand {
    /// The caller; `None` for a signal.
    pub(crate) by: Option<Actor>,
    /// Whether to end the overrides whose rule the new file changes.
    pub(crate) clear_overrides: bool,
    /// The generation of the desired state that the caller has seen. The reload is refused if the generation has
    /// changed since.
    pub(crate) expected: Option<u64>,
}

impl ReloadCommand {
    /// Returns the request for a SIGHUP.
    pub(crate) fn signal() -> Self {
        Self { by: None, clear_overrides: false, expected: None }
    }
}

/// A request for a reload, and the channel for its result.
type PendingReload = (ReloadCommand, oneshot::Sender<Result<Reloaded, ApiError>>);

/// Sends requests for reloads. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct ReloadSender(mpsc::Sender<PendingReload>);

/// Receives requests for reloads.
#[derive(Debug)]
pub(crate) struct ReloadReceiver(mpsc::Receiver<PendingReload>);

/// Creates the sender and the receiver.
pub(crate) fn channel() -> (ReloadSender, ReloadReceiver) {
    let (sender, receiver) = mpsc::channel(MOST_WAITING);
    (ReloadSender(sender), ReloadReceiver(receiver))
}

impl ReloadSender {
    /// Requests a reload and waits for its result.
    ///
    /// # Errors
    /// If the config is refused, or gpushd is stopping.
    pub(crate) async fn ask(&self, wish: ReloadCommand) -> Result<Reloaded, ApiError> {
        let stopping = || {
            ApiError::stopping("gpushd is stopping and does not reload the config")
                .hint("gpushd reads the config when it starts again: `systemctl status gpushd` shows its state")
        };
        let (reply, answer) = oneshot::channel();
        self.0.send((wish, reply)).await.map_err(|_| stopping())?;
        answer.await.unwrap_or_else(|_| Err(stopping()))
    }
}

impl ReloadReceiver {
    /// Waits for the next request. Never returns if all senders are dropped.
    pub(crate) async fn next(&mut self) -> PendingReload {
        match self.0.recv().await {
            Some(asked) => asked,
            None => std::future::pending().await,
        }
    }
}

/// Reloads the config.
#[derive(Debug)]
pub(crate) struct Reload {
    pub(crate) context: Arc<HostContext>,
    /// Adapts the MPS daemons to the config.
    pub(crate) mps: Mps,
    /// Adapts the time-slice levels of GPUs to the config.
    pub(crate) timeslice: Timeslice,
}

impl Reload {
    /// Reloads the config.
    ///
    /// # Errors
    /// If the file is invalid, cannot be applied, or changes a rule whose GPU has an override. The old config then
    /// stays active, and health reports the problem.
    pub(crate) async fn carry_out(&self, wish: ReloadCommand) -> Result<Reloaded, ApiError> {
        if wish.expected.is_some_and(|expected| expected != self.context.state.now().generation) {
            // Health does not report this refusal, because the file is not the problem.
            let current = self.context.state.now().generation;
            let message = format!("the desired state has changed: its generation is {current}");
            return Err(ApiError::new(Code::Conflict, message).cause("nothing was changed").hint(
                "check the difference (`gpushctl config diff`), then repeat the request with the new \
                    generation",
            ));
        }
        match self.load(wish).await {
            Ok(reloaded) => {
                self.mps.wake_all();
                self.timeslice.restart_reconcile();
                // The new rules may permit what waiting requests ask for.
                self.context.lanes.make_room();
                Ok(reloaded)
            }
            Err(error) => Err(self.context.settings.refuse(error)),
        }
    }

    async fn load(&self, wish: ReloadCommand) -> Result<Reloaded, ApiError> {
        let candidate = self.context.settings.candidate()?;
        let before = self.context.settings.config();
        // Without a driver, gpushd does not know which GPUs a rule claims. The list is then empty, and any rule counts
        // as changed.
        let gpus = read_gpus(&self.context.readings).await.unwrap_or_default();
        // As at a start of gpushd, overrides stay if gpushd does not know the rules that they override.
        let touched = match self.context.settings.rules_are_known() {
            true => overridden_changes(&self.context.state, &before, &candidate.config, &gpus),
            false => Vec::new(),
        };
        if !touched.is_empty() && !wish.clear_overrides {
            return Err(overridden_error(&touched));
        }
        let changed = *before != candidate.config;
        let uuids: Vec<GpuUuid> = touched.iter().map(|one| one.gpu_uuid.clone()).collect();
        let path = self.context.settings.path().display().to_string();
        let (by, expected) = (wish.by, wish.expected);
        let written = self.context.store.write_ending(move |tx| {
            overrides::check_generation(tx, expected)?;
            let mut effects = Vec::new();
            for uuid in &uuids {
                effects.extend(overrides::end(tx, uuid, by.as_ref(), |ended| AuditEvent::OverrideClear {
                    ended,
                    operation_id: None,
                    reload: Some(path.clone()),
                })?);
            }
            let generation = if changed { tx.next_generation() } else { tx.generation() };
            let event = AuditEvent::ConfigReload {
                path: path.clone(),
                config_changed: changed,
                overrides_ended: uuids.clone(),
            };
            tx.audit(event.record(by.clone(), "config", DONE))?;
            Ok((effects, generation))
        });
        let (effects, generation) = written.await?;
        let (settings, accounts) = (before.differences(&candidate.in_file), candidate.accounts());
        self.context.settings.activate(candidate);
        self.context.state.override_effects(&effects);
        self.context.state.replace_config(self.context.settings.config(), generation);
        // Read the GPUs again, because their drift is now the difference from the new config.
        let gpus = read_gpus(&self.context.readings).await.unwrap_or_default();
        let now = self.context.settings.config();
        let driver = self.context.hardware.status().driver;
        let mut findings = findings(&now, KnownHost { gpus: &gpus, driver: driver.as_ref() });
        // An old driver is the reason that the findings already have.
        if driver.is_none_or(|driver| desired::serves_many_users(&driver)) {
            findings.extend(self.mps.reason_single_user(&now).await);
        }
        findings.extend(delayed_changes(&gpus));
        let file = self.context.settings.file();
        findings.extend(self.context.users.account_notes(file.as_deref(), &accounts).await);
        let gpus = differing(desired::compare(&before, Some(&now), &gpus));
        let ended = effects.into_iter().filter_map(|effect| match effect {
            OverrideEffect::Ended { one, .. } => {
                Some(touched.iter().find(|other| other.gpu_uuid == one.gpu_uuid)?.clone())
            }
            OverrideEffect::Made(_) => None,
        });
        Ok(Reloaded {
            path: self.context.settings.file(),
            settings,
            gpus,
            ended: ended.collect(),
            findings,
            generation,
        })
    }
}

/// Returns all GPUs, without details that only some users may see.
async fn read_gpus(readings: &Readings) -> Result<Vec<Gpu>, ApiError> {
    readings.host().await.map(|observed| observed.gpus(Viewer::Agent))
}

/// Returns the remarks of `gpushctl config check` about a config, and the layouts that it refuses. Returns none while the
/// GPUs are not known: then no selector matches.
fn findings(config: &Config, host: KnownHost<'_>) -> Vec<String> {
    if host.gpus.is_empty() {
        return Vec::new();
    }
    let mut found = desired::impossible_rule_layouts(config, host.gpus);
    found.extend(desired::findings(config, Some(host)).iter().map(ToString::to_string));
    found
}

/// Returns the overrides of GPUs whose rule the new config changes.
fn overridden_changes(state: &State, before: &Config, after: &Config, gpus: &[Gpu]) -> Vec<gpush_api::Override> {
    let standing = overrides::all(state, gpus, Viewer::Agent);
    let uuids: Vec<GpuUuid> = standing.iter().map(|one| one.gpu_uuid.clone()).collect();
    let changed = desired::changed_under(before, after, gpus, &uuids);
    standing.into_iter().filter(|one| changed.contains(&one.gpu_uuid)).collect()
}

fn overridden_error(touched: &[gpush_api::Override]) -> ApiError {
    let say = |one: &gpush_api::Override| {
        let gpu = match one.gpu {
            Some(index) => format!("GPU {index} ({})", one.gpu_uuid),
            None => one.gpu_uuid.to_string(),
        };
        let reason = if one.reason.is_empty() { String::new() } else { format!(": {}", one.reason) };
        format!("{gpu} has an override by {}{reason}", words::actor(&one.by))
    };
    let message = match touched {
        [one] => format!("the file changes a rule that is overridden: {}", say(one)),
        several => format!("the file changes rules that are overridden on {} GPUs", several.len()),
    };
    let mut error = ApiError::new(Code::Conflict, message);
    if touched.len() > 1 {
        error.causes.extend(touched.iter().map(say));
    }
    error.hint(
        "`gpushctl config reload --clear-overrides` clears these overrides and loads the file; or leave these rules \
        unchanged: `gpushctl config diff` shows the difference",
    )
}

fn differing(gpus: Vec<GpuDiff>) -> Vec<GpuDiff> {
    let differs = |gpu: &GpuDiff| gpu.in_file.as_ref().is_some_and(|file| *file != gpu.in_force);
    gpus.into_iter().filter(differs).collect()
}

/// Describes the changes that leases delay, one sentence each.
fn delayed_changes(gpus: &[Gpu]) -> Vec<String> {
    gpus.iter().flat_map(|gpu| gpu.pending.iter().map(|change| change.describe(gpu.index))).collect()
}

/// Compares the config file with the active config. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Differences {
    pub(crate) context: Arc<HostContext>,
}

impl Differences {
    /// Compares the config file, the active config and the GPUs.
    pub(crate) async fn find(&self, viewer: Viewer) -> ConfigDiff {
        let generation = self.context.state.now().generation;
        let in_force = self.context.settings.config();
        let seen = self.context.readings.host().await.map(|observed| observed.gpus(viewer));
        let unseen = self.unseen(&seen);
        let gpus = seen.unwrap_or_default();
        let candidate = self.context.settings.candidate();
        let trouble = match &candidate {
            Ok(Candidate { config, .. }) => {
                let touched = overridden_changes(&self.context.state, &in_force, config, &gpus);
                (self.context.settings.rules_are_known() && !touched.is_empty()).then(|| overridden_error(&touched))
            }
            Err(error) => Some(error.clone()),
        };
        let candidate = candidate.ok();
        let settings = candidate.as_ref().map(|candidate| in_force.differences(&candidate.in_file)).unwrap_or_default();
        ConfigDiff {
            path: self.context.settings.file(),
            trouble,
            settings,
            gpus: desired::compare(&in_force, candidate.as_ref().map(|candidate| &candidate.config), &gpus),
            unseen,
            generation,
        }
    }

    /// Returns an error for each GPU that cannot be compared with the config.
    fn unseen(&self, seen: &Result<Vec<Gpu>, ApiError>) -> Vec<ApiError> {
        if let Some(maintenance) = self.context.state.maintenance() {
            return vec![words::refusal(&maintenance)];
        }
        let gpus = match (seen, not_resetting(&self.context.host_services)) {
            (Ok(gpus), Ok(())) => gpus,
            (Err(error), _) => return vec![error.clone()],
            (Ok(_), Err(resetting)) => return vec![resetting],
        };
        let host = self.context.state.now();
        let nameless = host.nameless.iter().map(|(index, error)| unidentified(*index, error));
        let managed = gpus.iter().filter(|gpu| gpu.mode.is_managed());
        let unknown = managed.filter(|gpu| gpu.stale || matches!(gpu.state, GpuState::Lost | GpuState::Unknown));
        let unknown = unknown.map(|gpu| {
            let message = format!("GPU {} ({}) can't be read, so its layout is not known", gpu.index, gpu.uuid);
            let code = if gpu.state == GpuState::Lost { Code::GpuLost } else { Code::DriverTimeout };
            let mut error =
                ApiError::new(code, message).hint(format!("see its state with `gpushctl gpu show {}`", gpu.index));
            error.causes.clone_from(&gpu.reasons);
            error
        });
        nameless.chain(unknown).collect()
    }
}
