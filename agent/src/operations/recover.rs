//! Recovery from a lost database: an administrator accepts that the records of grants are lost.
//!
//! Until an administrator accepts the loss, every GPU that the config manages is in the state
//! `held`: gpushd neither changes it nor grants leases on it. A reboot ends all grants, so after a
//! reboot no GPU is held.
//!
//! After the recovery, instances and MPS daemons stay as they are; gpushd shows differences from
//! the config as drift. A process that was already running may have had a lease. So the lack
//! of a lease is no reason for gpushd to end such a process.
//!
//! If the database was lost before this boot, no GPU is held, because no grant survives a reboot.
//! But overrides and cordons are lost too. So health reports the loss until an administrator
//! accepts it, or until the next boot.

use std::sync::Arc;

use gpush_api::{ApiError, Code, Gpu, Recovered};
use gpush_host::proc;
use gpush_store::{AuditEvent, BootRecord, KnownSince, Lost};
use tokio::sync::Mutex;

use crate::{
    modes::{
        mps::{self, Mps},
        shared_gpus::SharedGpus,
    },
    requests::{caller::Viewer, request::Request},
    state::{context::HostContext, is_managed},
};

/// Returns the health error about a lost database. It names the held GPUs.
pub(crate) fn health(lost: &Lost, gpus: &[Gpu]) -> ApiError {
    if !lost.holds {
        let mut error = ApiError::new(Code::Unavailable, "the database was lost before this boot")
            .cause(lost.cause.clone())
            .cause("overrides and cordons that were set before the loss are gone: only the config applies");
        error
            .causes
            .extend(lost.kept.iter().map(|kept| format!("the damaged database file is kept as {}", kept.display())));
        return error.hint(
            "set the missing overrides and cordons again, then acknowledge the loss with `gpushctl recover` \
            (administrator) or a reboot",
        );
    }
    let held: Vec<String> = gpus.iter().filter(|gpu| is_managed(gpu)).map(|gpu| gpu.index.to_string()).collect();
    let mut error =
        ApiError::new(Code::Unavailable, "the database was lost: the records of who uses the GPUs are gone")
            .cause(lost.cause.clone());
    if let Some(kept) = &lost.kept {
        error = error.cause(format!("the damaged database file is kept as {}", kept.display()));
    }
    error = match held.as_slice() {
        [] => error.cause("the config manages no GPU, so none is held"),
        [one] => error.cause(format!("GPU {one} is held: gpushd neither changes nor grants it")),
        several => error.cause(format!("GPUs {} are held: gpushd neither changes nor grants them", several.join(", "))),
    };
    error.hint(
        "check that no user needs the MIG instances that exist now, then release the GPUs with `gpushctl recover` \
        (administrator) or a reboot",
    )
}

/// Accepts the loss of a database. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct LossAcceptance {
    pub(crate) context: Arc<HostContext>,
    /// Provides the running MPS daemons. Recovery does not stop them.
    pub(crate) mps: Mps,
    /// Records the current compute modes of the GPUs with running MPS daemons. Recovery does not
    /// change these modes.
    pub(crate) shared_gpus: SharedGpus,
    /// Locked while maintenance begins or ends, or a loss of the database is accepted.
    pub(crate) host_lock: Arc<Mutex<()>>,
}

impl LossAcceptance {
    /// Accepts that the database was lost; does nothing if it was not lost.
    ///
    /// # Errors
    /// If the GPUs cannot be listed although there are MPS daemons, or if the acceptance cannot be
    /// recorded.
    pub(crate) async fn recover(&self, request: Request) -> Result<Recovered, ApiError> {
        let _lock = self.host_lock.lock().await;
        let host = self.context.state.now();
        let Some(lost) = host.lost.clone() else { return Ok(Recovered::default()) };
        if !host.rules_are_known {
            return Err(ApiError::new(
                Code::Conflict,
                "gpushd can't accept the loss of the database: the rules are not known",
            )
            .cause("gpushd can't use its config, so it does not know which GPUs to release")
            .hint("correct the config as `gpushctl status` says, then repeat the command"));
        }
        if !lost.holds {
            return self.acknowledge(request, lost).await;
        }
        let gpus = match self.context.readings.host().await {
            Ok(observed) => observed.gpus(Viewer::Agent),
            // Refuse, because gpushd needs the list of GPUs to record the running daemons.
            Err(error) if self.mps.is_used() => return Err(error),
            Err(_) => Vec::new(),
        };
        let standing = mps::RecordedSettings::of_running_daemons(&self.mps, &gpus);
        let modes = self.shared_gpus.records_of_running_daemons(&standing.exclusive(&self.mps, &gpus)).await;
        let released = gpus.into_iter().filter(is_managed).map(|gpu| gpu.uuid).collect();
        let uid = request.by.uid;
        let mut also = request.recorded("host".to_owned(), recovery);
        // The record of which layouts were applied on this boot is lost. Mark all of them as
        // applied, so that gpushd changes no GPU.
        let boot = BootRecord { complete: true, ..BootRecord::new(lost.boot_id.clone()) };
        // gpushd has granted nothing since the loss. So from now on, the record of grants is
        // complete.
        let known_since = proc::now();
        let known = KnownSince { boot_id: lost.boot_id.clone(), ticks: known_since };
        let (recorded, found) = (standing.clone(), modes.clone());
        self.context
            .store
            .write_ending(move |tx| {
                tx.accept_loss()?;
                tx.record_boot(&boot)?;
                tx.record_known_since(&known)?;
                recorded.record(tx)?;
                found.iter().try_for_each(|record| tx.set_shared_gpu(record.clone()).map(|_| ()))?;
                also(tx)
            })
            .await?;
        standing.apply(&self.mps);
        self.shared_gpus.apply(modes);
        self.context.state.accept_loss(known_since);
        tracing::info!(
            uid,
            "an administrator accepted the loss of the database ({}): gpushd releases the held GPUs",
            lost.cause
        );
        let kept = lost.kept.map(|kept| kept.display().to_string());
        Ok(Recovered { cause: Some(lost.cause), kept, released })
    }

    /// Accepts a loss after which no GPU was held. So no GPU needs to be released.
    async fn acknowledge(&self, request: Request, lost: Lost) -> Result<Recovered, ApiError> {
        let uid = request.by.uid;
        let mut also = request.recorded("host".to_owned(), recovery);
        let accepted = self.context.store.write_ending(move |tx| {
            tx.accept_loss()?;
            also(tx)
        });
        accepted.await?;
        self.context.state.acknowledge_loss();
        tracing::info!(uid, "an administrator acknowledged the loss of the database ({})", lost.cause);
        let kept = lost.kept.map(|kept| kept.display().to_string());
        Ok(Recovered { cause: Some(lost.cause), kept, released: Vec::new() })
    }
}

/// Returns the event that an administrator has accepted a lost database.
fn recovery(reason: Option<String>) -> AuditEvent {
    AuditEvent::Recover { cause: None, kept: None, reason }
}
