//! Changes of MIG mode, and the resets that they need on Ampere.
//!
//! ```text
//! around: services stopped, hook ─► set the mode on all ─┬─ in force on all ───────────────► done
//!   (each noted for undoing before)                      └─ waits for a reset
//!                                                              │ one at a time on this host
//!                                       the driver worker is ended and gone
//!                                                              ▼
//!                                       who has the GPUs open? ── somebody ──► failed, named
//!                                                              │ nobody
//!                                                              ▼
//!                                       reset, beside gpushd, of these GPUs alone
//!                                                              ▼
//!                                       a new worker ─► each GPU by its UUID ─► in force, read back
//! ```
//!
//! Going back takes the same way with the mode from before. What was noted for undoing is undone
//! at the operation's end, whatever that is, or by the next gpushd: see `around`.
//!
//! | file | subject |
//! |---|---|
//! | `around` | services and hooks, before and after |
//! | `preflight` | what stands in the way, before anything is planned to be done |
//! | `holders` | who has a GPU open |

pub(super) mod around;
mod holders;
pub(super) mod preflight;

use gpush_host::helper::{End, Job};
pub(super) use holders::fabric_manager_runs;

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{ApiError, Code};

use super::{
    Part,
    step::{self, Switched, Trouble},
};
use crate::{agent::Shared, operation::Ongoing};

/// The step under which resets run.
pub(super) const RESET: &str = "reset";

/// Lets the driver be used again when dropped.
struct Paused<'a>(&'a Shared);

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.0.hardware.unpause();
    }
}

/// Switches MIG mode on several GPUs, as steps of their plans; those with trouble, by position.
pub(super) async fn carry_out(
    agent: &Shared,
    ongoing: &Ongoing,
    parts: &[&Part],
    enable: bool,
) -> BTreeMap<usize, Trouble> {
    for part in parts {
        let doing = if enable { "switching MIG mode on" } else { "switching MIG mode off" };
        ongoing.progress(part.position, |progress| progress.doing = Some(doing.to_owned()));
    }
    let troubled = switch(agent, &ongoing.id(), parts, enable, Some(ongoing)).await;
    for part in parts {
        ongoing.progress(part.position, |progress| {
            progress.doing = None;
            match troubled.get(&part.position) {
                Some(trouble) => progress.error = Some(trouble.error().clone()),
                None => progress.done += 1,
            }
        });
    }
    troubled
}

/// Switches MIG mode on several GPUs and makes sure that it is in force; those with trouble, by
/// position. When one of them refuses, none is reset; nor once `until` is cancelled.
pub(super) async fn switch(
    agent: &Shared,
    operation: &str,
    parts: &[&Part],
    enable: bool,
    until: Option<&Ongoing>,
) -> BTreeMap<usize, Trouble> {
    let mut troubled = BTreeMap::new();
    let mut due = Vec::new();
    for part in parts {
        match step::set_mode(agent, part, enable).await {
            Ok(Switched::InForce) => {}
            Ok(Switched::Pending(_)) if part.resets => due.push(*part),
            Ok(Switched::Pending(error)) => {
                troubled.insert(part.position, Trouble::Failed(error));
            }
            Err(trouble) => {
                troubled.insert(part.position, trouble);
            }
        }
    }
    if !troubled.is_empty() || due.is_empty() {
        return troubled;
    }
    let outcome = reset(agent, operation, &due, until).await;
    let to = if enable { "on" } else { "off" };
    for part in due {
        let failed = |error: ApiError| {
            Trouble::Failed(ApiError {
                causes: [vec![error.message], error.causes].concat(),
                message: format!("{}: switching MIG mode {to} failed", part.label()),
                ..error
            })
        };
        // What was not even tried can't have had an effect.
        let reading = match step::read(agent, part).await {
            Ok(reading) => reading,
            Err(trouble) => {
                troubled.insert(part.position, trouble);
                continue;
            }
        };
        let in_force = reading.mig.as_ref().is_some_and(|mig| (mig.enabled, mig.pending) == (enable, enable));
        match (&outcome, in_force) {
            (_, true) => {}
            (Err(error), false) if error.code == Code::Cancelled => {
                troubled.insert(part.position, Trouble::Failed(error.clone()));
            }
            (Err(error), false) => {
                troubled.insert(part.position, failed(error.clone()));
            }
            (Ok(()), false) => {
                let error = ApiError::new(Code::DriverError, "the GPU was reset, and the mode is not in force");
                let seen = "what the driver says of it may be in the kernel's log: `dmesg | grep -i -e nvrm -e xid`";
                troubled.insert(part.position, failed(error.hint(seen)));
            }
        }
    }
    troubled
}

/// Why nothing is planned for now.
const RESETTING: &str = "a GPU is being reset, and until that is over no other can be read";

/// Whether an error is that of [`not_resetting`].
pub(crate) fn is_resetting(error: &ApiError) -> bool {
    error.message == RESETTING
}

/// Refuses what would have to read GPUs while one is being reset: nothing of ours may be open then, so
/// none can be read until it is over.
///
/// # Errors
/// [`Code::Conflict`] then; it passes.
pub(crate) fn not_resetting(agent: &Shared) -> Result<(), ApiError> {
    if agent.outside.driverless.try_read().is_ok() {
        return Ok(());
    }
    Err(ApiError::new(Code::Conflict, RESETTING)
        .hint("`gpushctl operation list` shows for which operation; ask again when it is over, or with --wait")
        .retryable())
}

/// Resets GPUs, and those that are reset with them, while nothing of ours has them open. With `until` it
/// is not begun once the operation is cancelled.
async fn reset(agent: &Shared, operation: &str, parts: &[&Part], until: Option<&Ongoing>) -> Result<(), ApiError> {
    let mut uuids: Vec<String> = parts.iter().map(|part| part.plan.uuid.clone()).collect();
    for reset in parts.iter().filter_map(|part| part.plan.reset.as_ref()) {
        uuids.extend(reset.together.iter().map(|peer| peer.uuid.clone()));
    }
    uuids.sort();
    uuids.dedup();
    let _alone = match until {
        None => agent.outside.driverless.write().await,
        Some(ongoing) => tokio::select! {
            biased;
            () = ongoing.cancelled().cancelled() => return Err(ongoing.why_cancelled()),
            alone = agent.outside.driverless.write() => alone,
        },
    };
    let peers: Vec<String> =
        uuids.iter().filter(|uuid| parts.iter().all(|part| part.plan.uuid != **uuid)).cloned().collect();
    let own = agent.operations.get(operation).await?.plans;
    let ours: Vec<String> =
        own.into_iter().filter(|plan| plan.enables_mig || plan.disables_mig).map(|plan| plan.uuid).collect();
    preflight::must_be_free(agent, &peers, &ours).await?;
    let minors = preflight::minors(agent, &uuids).await?;
    let _paused = Paused(agent);
    agent.hardware.pause().await.map_err(|error| {
        ApiError::new(Code::DriverError, "gpushd can't give the GPU up itself")
            .cause(error.to_string())
            .hint("a driver call hangs in the kernel: only a reboot of the host ends it")
    })?;
    let found = gpush_core::holders::obstacles(holders::scan(agent, &minors).await?, &[]);
    if !found.is_empty() {
        let label = parts.iter().map(|part| part.label()).collect::<Vec<_>>().join(", ");
        let in_full = gpush_core::holders::explain(&label, &found);
        tracing::error!(op = operation, "{in_full}; {}", in_full.causes.join("; "));
        let found: Vec<_> = found.into_iter().map(holders::blank).collect();
        return Err(gpush_core::holders::explain(&label, &found));
    }
    let config = agent.settings.config();
    let change = &config.mode_change;
    let job = Job {
        operation: operation.to_owned(),
        step: RESET.to_owned(),
        program: agent.outside.nvidia_smi(change),
        args: vec!["--gpu-reset".to_owned(), "-i".to_owned(), uuids.join(",")],
        env: BTreeMap::new(),
        deadline: Duration::from_secs(change.reset_s.into()),
        routine: false,
    };
    let ended = agent.outside.helpers.run(job).await?;
    match ended.end {
        End::Exited(0) => Ok(()),
        ref end @ (End::Exited(_)
        | End::Signalled(_)
        | End::TimedOut
        | End::NotStarted(_)
        | End::Lost
        | End::Void
        | End::Hangs) => Err(ApiError::new(Code::DriverError, format!("the reset {end}"))
            .cause(around::LOGGED)
            .hint("what the driver says of it may be in the kernel's log: `dmesg | grep -i -e nvrm -e xid`")),
    }
}
