//! What is on record of targets beside their shares: whether the daemon of a full GPU is in force, who
//! stopped one, and what was set above a rule. What is recorded is known here only once it is durable;
//! what an operation brought about is recorded with its end.

use gpush_api::GpuPlan;
use gpush_core::sharing;
use gpush_store::{MpsTarget, StoreError, Tx};

use super::Mps;
use crate::agent::Shared;

impl Mps {
    /// What is on record of a target.
    pub(super) fn record(&self, uuid: &str) -> MpsTarget {
        let record = self.records().get(uuid).cloned();
        record.unwrap_or_else(|| MpsTarget { target: uuid.to_owned(), ..MpsTarget::default() })
    }

    /// Whether a daemon of a full GPU is in force: an operation brought it up on this boot.
    pub(crate) fn is_in_force(&self, uuid: &str) -> bool {
        self.records().get(uuid).is_some_and(|record| record.in_force.is_some())
    }
}

/// Records what there is to be remembered of a target, and what goes with it.
///
/// # Errors
/// When it can't be written; then it is as before.
pub(super) async fn keep(
    agent: &Shared,
    record: MpsTarget,
    mut also: impl FnMut(&mut Tx<'_>) -> Result<(), StoreError> + Send + 'static,
) -> Result<(), StoreError> {
    let kept = record.clone();
    let written = agent.store.write_ending(move |tx| {
        tx.set_mps_target(&kept)?;
        also(tx)
    });
    written.await?;
    take_in(agent, vec![record]);
    Ok(())
}

/// Forgets what was set above a rule that is another now.
pub(super) async fn unset(agent: &Shared, target: &sharing::Target) {
    let record = agent.mps.record(&target.uuid);
    if record.set.is_none() {
        return;
    }
    match keep(agent, MpsTarget { set: None, ..record }, |_| Ok(())).await {
        Ok(()) => tracing::info!("{} has another rule: what was set above the old one is void", target.label()),
        Err(error) => tracing::error!("{}: what was set above its rule before stands: {error}", target.label()),
    }
}

/// Forgets that a GPU was shared: no rule wanted it any more, and it is over.
pub(super) async fn forget(agent: &Shared, uuid: &str) {
    let known = agent.mps.record(uuid);
    let record = ended(&known);
    if record == known {
        return;
    }
    if let Err(error) = keep(agent, record, |_| Ok(())).await {
        tracing::error!(gpu = uuid, "that it is not shared any more can't be recorded: {error}");
    }
}

/// Of a daemon that shall not be any more.
fn ended(record: &MpsTarget) -> MpsTarget {
    MpsTarget { in_force: None, stopped_by: None, set: None, ..record.clone() }
}

/// What is on record once an operation with these plans is done.
pub(crate) fn lasting(agent: &Shared, plans: &[GpuPlan]) -> Vec<MpsTarget> {
    let mut lasting = Vec::new();
    for plan in plans {
        let record = agent.mps.record(&plan.uuid);
        if plan.starts_mps {
            // The store says of which boot.
            lasting.push(MpsTarget { in_force: Some(String::new()), ..record });
        } else if record.in_force.is_some() && plan.stops_mps.iter().any(|stop| stop.uuid == plan.uuid) {
            lasting.push(ended(&record));
        }
    }
    lasting
}

/// Records it, with the end of the operation.
///
/// # Errors
/// When it can't be written.
pub(crate) fn record(tx: &mut Tx<'_>, lasting: &[MpsTarget]) -> Result<(), StoreError> {
    lasting.iter().try_for_each(|target| tx.set_mps_target(target))
}

/// Takes in what was recorded.
pub(crate) fn take_in(agent: &Shared, lasting: Vec<MpsTarget>) {
    let mut records = agent.mps.records();
    for target in lasting {
        records.insert(target.target.clone(), target);
    }
}
