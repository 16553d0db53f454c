//! Loss of the database, and the GPUs that are `held` for it.
//!
//! A database that was lost on this boot recorded promises that are still in effect. Every GPU that the
//! config manages is held then: gpushd neither changes it nor grants shares of it, until the host is
//! rebooted or an administrator accepts the loss. After that the hardware is left as it is, MPS daemons
//! included; its difference from the config shows as drift. Processes that were running by then may have
//! had a share, and are never ended for having none.
//!
//! A loss that is found on a new boot holds nothing: promises end with their boot. Health reports it until
//! it is accepted or until the next boot, because overrides and cordons are gone.

use std::sync::{Mutex, MutexGuard, PoisonError};

use gpush_api::{ApiError, Code, Gpu, Mode, Recovered};
use gpush_host::proc;
use gpush_store::{BootRecord, KnownSince, Lost};

use crate::{agent::Shared, auth::Asker, mps, request::Request, shared_gpus, view};

/// What was lost.
#[derive(Debug, Default)]
pub(crate) struct Held(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// What is not accepted.
    lost: Option<Lost>,
    /// When something was accepted last on this boot, in clock ticks since that.
    known_since: Option<u64>,
}

impl Held {
    /// As the store has it.
    pub(crate) fn new(lost: Option<Lost>, known_since: Option<u64>) -> Self {
        Self(Mutex::new(State { lost, known_since }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The loss for which managed GPUs are held.
    pub(crate) fn lost(&self) -> Option<Lost> {
        self.unaccepted().filter(|lost| lost.holds)
    }

    /// The loss that is not accepted yet, whether or not GPUs are held for it.
    pub(crate) fn unaccepted(&self) -> Option<Lost> {
        self.state().lost.clone()
    }

    /// Whether what was given to a process may have been forgotten, or to one that it comes from: by its start.
    pub(crate) fn may_have_forgotten(&self, start: u64) -> bool {
        self.state().known_since.is_some_and(|since| start <= since)
    }
}

/// Why a GPU is held, if it is.
pub(crate) fn reason(lost: &Lost, gpu: &Gpu) -> Option<String> {
    is_managed(gpu).then(|| format!("the database was lost ({})", lost.cause))
}

fn is_managed(gpu: &Gpu) -> bool {
    match gpu.mode {
        Mode::Unmanaged => false,
        Mode::Exclusive | Mode::Mig | Mode::Mps | Mode::Timeslice => true,
    }
}

/// The loss as a cause of degraded health, with the GPUs that are held for it.
pub(crate) fn health(lost: &Lost, gpus: &[Gpu]) -> ApiError {
    if !lost.holds {
        let mut error = ApiError::new(Code::Unavailable, "the database was lost before this boot")
            .cause(lost.cause.clone())
            .cause("overrides and cordons that were set before are gone; the config applies");
        error.causes.extend(lost.kept.iter().map(|kept| format!("the damaged one is kept as {}", kept.display())));
        return error.hint("set again what is missing, then acknowledge with `gpushctl recover`; a reboot does too");
    }
    let held: Vec<String> = gpus.iter().filter(|gpu| is_managed(gpu)).map(|gpu| gpu.index.to_string()).collect();
    let mut error =
        ApiError::new(Code::Unavailable, "the database was lost: what was promised about GPUs is not known")
            .cause(lost.cause.clone());
    if let Some(kept) = &lost.kept {
        error = error.cause(format!("the damaged one is kept as {}", kept.display()));
    }
    error = match held.as_slice() {
        [] => error.cause("the config manages no GPU that could be held for it"),
        [one] => error.cause(format!("GPU {one} is held: it is neither reshaped nor handed out")),
        several => {
            error.cause(format!("GPUs {} are held: they are neither reshaped nor handed out", several.join(", ")))
        }
    };
    error.hint("see that nobody relies on them as they are, then `gpushctl recover`; a reboot ends it too")
}

/// Accepts the loss.
///
/// # Errors
/// When it can't be recorded.
pub(crate) async fn recover(agent: &Shared, request: Request) -> Result<Recovered, ApiError> {
    let _turn = agent.turn.lock().await;
    let Some(lost) = agent.held.unaccepted() else { return Ok(Recovered::default()) };
    if !lost.holds {
        return acknowledge(agent, request, lost).await;
    }
    let gpus = match view::gpus(agent, &Asker::agent()).await {
        Ok(gpus) => gpus,
        // Whose daemons stand there can't be told: they would be taken for nobody's.
        Err(error) if agent.mps.is_used() => return Err(error),
        Err(_) => Vec::new(),
    };
    let standing = mps::Lasting::of_what_stands(agent, &gpus);
    let modes = shared_gpus::as_found(agent, &standing.exclusive(agent, &gpus)).await;
    let released = gpus.into_iter().filter(is_managed).map(|gpu| gpu.uuid).collect();
    let uid = request.by.uid;
    let mut also = request.recorded("recover", "host".to_owned());
    // On this boot the layouts count as applied: whether they were is what was lost.
    let boot = BootRecord { complete: true, ..BootRecord::new(lost.boot_id.clone()) };
    // Nobody was given anything while it was lost.
    let known_since = proc::now();
    let known = KnownSince { boot_id: lost.boot_id.clone(), ticks: known_since };
    let (recorded, found) = (standing.clone(), modes.clone());
    agent
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
    standing.take_in(agent);
    shared_gpus::take_in(agent, modes);
    *agent.held.state() = State { lost: None, known_since: Some(known_since) };
    tracing::info!(uid, "the loss of the database was accepted: {}", lost.cause);
    agent.startup.look_again();
    let kept = lost.kept.map(|kept| kept.display().to_string());
    Ok(Recovered { cause: Some(lost.cause), kept, released })
}

/// Accepts a loss for which nothing is held.
async fn acknowledge(agent: &Shared, request: Request, lost: Lost) -> Result<Recovered, ApiError> {
    let uid = request.by.uid;
    let mut also = request.recorded("recover", "host".to_owned());
    let accepted = agent.store.write_ending(move |tx| {
        tx.accept_loss()?;
        also(tx)
    });
    accepted.await?;
    agent.held.state().lost = None;
    tracing::info!(uid, "the loss of the database was acknowledged: {}", lost.cause);
    let kept = lost.kept.map(|kept| kept.display().to_string());
    Ok(Recovered { cause: Some(lost.cause), kept, released: Vec::new() })
}
