//! Layouts at start, and drift put right by itself where the config wants that.
//!
//! Instances don't survive a reboot, so the config's layouts are applied when the agent starts on
//! another boot than the one it has on record. On the same boot it leaves alone what it finds: the
//! difference may be somebody's intent. With `auto_reconcile` it is put right all the same, at
//! start, after a reload and whenever it is found.
//!
//! ```text
//! start ─► same boot as recorded? ── yes ─► drift is shown
//!             │ no                              │ auto_reconcile
//!             ▼                                 ▼
//!         wait for the driver ─► one operation a GPU that differs ─► boot recorded
//! ```
//!
//! Each GPU has an operation of its own: one that can't have its layout costs no other.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use gpush_api::{ApiError, Code, Gpu, LayoutSource, Mode, OperationState, PlanRequest};
use gpush_core::config::Config;
use tokio::{sync::Notify, task::JoinSet};

use crate::{agent::Shared, apply, auth::Asker, view};

/// Between two looks for a driver that is not there, at first and at most.
const LOOK: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// Between two looks for drift, with `auto_reconcile`: usually, and at most while it fails.
const RECONCILE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// How often an operation that goes on is looked at again.
const FOLLOW: Duration = Duration::from_secs(60);

/// What went wrong with the layouts at start.
#[derive(Debug, Default)]
pub(crate) struct Startup {
    troubles: Mutex<Vec<(Option<String>, ApiError)>>,
    reloaded: Notify,
}

impl Startup {
    /// What went wrong, as far as it still matters: a GPU that has its layout by now is well.
    pub(crate) fn troubles(&self, gpus: &[Gpu]) -> Vec<ApiError> {
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        let drifts = |uuid: &str| gpus.iter().any(|gpu| gpu.uuid == uuid && !gpu.drift.is_empty());
        troubles.retain(|(uuid, _)| uuid.as_deref().is_none_or(drifts));
        troubles.iter().map(|(_, error)| error.clone()).collect()
    }

    /// The config is another.
    pub(crate) fn reloaded(&self) {
        self.reloaded.notify_one();
    }

    fn note(&self, uuid: Option<&str>, error: ApiError) {
        let mut troubles = self.troubles.lock().unwrap_or_else(PoisonError::into_inner);
        troubles.retain(|(other, _)| other.as_deref() != uuid);
        troubles.push((uuid.map(str::to_owned), error));
    }
}

/// What is to be done at start, by the config that the agent starts with.
#[derive(Debug)]
pub(crate) struct Due {
    /// Whether the layouts are applied.
    shape: bool,
    /// What is recorded once they are.
    record: Option<String>,
}

impl Startup {
    /// Compares this boot with the one on record.
    pub(crate) fn due(&self, config: &Config, boot: Result<String, ApiError>, recorded: Option<&str>) -> Due {
        let boot = match boot {
            Ok(boot) => boot,
            Err(error) => {
                tracing::error!("{error}: layouts are not applied at start");
                self.note(None, error);
                return Due { shape: false, record: None };
            }
        };
        let same = recorded == Some(boot.as_str());
        if same && !config.auto_reconcile {
            tracing::info!("started again on the same boot: what stands is left as it is");
        }
        let claims = config.rules.iter().any(|rule| rule.mode == Mode::Mig);
        Due { shape: claims && (!same || config.auto_reconcile), record: (!same).then_some(boot) }
    }
}

/// Applies what is to be applied without anybody asking, until the agent stops.
pub(crate) async fn run(agent: Shared, due: Due) {
    let stopping = agent.stopping.clone();
    let work = async {
        at_start(&agent, due).await;
        let mut pause = RECONCILE.0;
        loop {
            let reloaded = tokio::time::timeout(pause, agent.startup.reloaded.notified()).await.is_ok();
            if !agent.settings.config().auto_reconcile {
                continue;
            }
            // What can't be put right is not tried every minute: each attempt may cost instances.
            let all = shape(&agent, "mig.reconcile").await;
            pause = if all || reloaded { RECONCILE.0 } else { (pause * 2).min(RECONCILE.1) };
        }
    };
    tokio::select! {
        () = work => {}
        () = stopping.cancelled() => {}
    }
}

async fn at_start(agent: &Shared, due: Due) {
    if due.shape {
        shape(agent, "mig.start").await;
    }
    let Some(boot) = due.record else { return };
    if let Err(error) = agent.store.write(move |tx| tx.record_boot(&boot)).await {
        tracing::error!("the boot can't be recorded: {error}");
        agent.startup.note(
            None,
            ApiError::new(Code::Internal, "the boot can't be recorded")
                .cause(error.to_string())
                .hint("until it can, the config's layouts are applied again each time gpushd starts"),
        );
    }
}

/// The id of this boot.
///
/// # Errors
/// When the file can't be read, or is empty.
pub(crate) fn boot_id(file: &Path) -> Result<String, ApiError> {
    let broken = |why: String| {
        ApiError::new(Code::Internal, format!("the boot id can't be read from {}", file.display())).cause(why)
    };
    let text = std::fs::read_to_string(file).map_err(|error| broken(error.to_string()))?;
    let boot_id = text.trim().to_owned();
    if boot_id.is_empty() { Err(broken("the file is empty".to_owned())) } else { Ok(boot_id) }
}

/// Gives every GPU that a rule claims for MIG its layout, if it differs; whether all have it now.
async fn shape(agent: &Shared, kind: &str) -> bool {
    let asker = Asker::agent();
    let gpus = with_driver(agent, &asker).await;
    let mut tasks = JoinSet::new();
    for gpu in gpus.into_iter().filter(|gpu| gpu.mode == Mode::Mig && !gpu.drift.is_empty()) {
        let (agent, asker, kind) = (Arc::clone(agent), asker.clone(), kind.to_owned());
        tasks.spawn(async move {
            let given = give_layout(&agent, &asker, &kind, &gpu).await;
            match &given {
                Ok(()) => {}
                // Somebody is at it; what comes of it shows as drift, or not.
                Err(error) if error.code == Code::Conflict => tracing::info!(gpu = gpu.uuid, "left alone: {error}"),
                Err(error) => {
                    let causes: String = error.causes.iter().map(|cause| format!("; {cause}")).collect();
                    tracing::error!(gpu = gpu.uuid, "{error}{causes}");
                    agent.startup.note(Some(&gpu.uuid), error.clone());
                }
            }
            given.is_ok()
        });
    }
    tasks.join_all().await.into_iter().all(|given| given)
}

/// The GPUs, once there is a driver.
async fn with_driver(agent: &Shared, asker: &Asker) -> Vec<Gpu> {
    let mut pause = LOOK.0;
    let mut said = false;
    loop {
        match view::gpus(agent, asker).await {
            Ok(gpus) => return gpus,
            Err(error) if !said => {
                tracing::warn!("layouts wait for the driver: {error}");
                said = true;
            }
            Err(_) => {}
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LOOK.1);
    }
}

async fn give_layout(agent: &Shared, asker: &Asker, kind: &str, gpu: &Gpu) -> Result<(), ApiError> {
    let request = PlanRequest { gpus: vec![gpu.uuid.clone()], layout: LayoutSource::Config };
    let mut operation = apply::begin(agent, asker, kind, &request).await?;
    while !operation.state.is_final() {
        operation = agent.operations.wait(&operation.id, operation.revision, FOLLOW).await?;
    }
    match (operation.state, operation.error) {
        (OperationState::Done, _) | (_, None) => Ok(()),
        (_, Some(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_id_that_is_missing_or_empty_is_said() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("boot_id");
        assert!(boot_id(&file).unwrap_err().message.contains("boot_id"));
        std::fs::write(&file, "\n").unwrap();
        assert_eq!(boot_id(&file).unwrap_err().causes, ["the file is empty"]);
        std::fs::write(&file, "b-1\n").unwrap();
        assert_eq!(boot_id(&file).unwrap(), "b-1");
    }
}
