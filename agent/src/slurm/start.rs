//! Prolog: begins the lease of a job.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_api::{ApiError, Code, LeaseBinding, LeaseId, LeaseState, SlurmJobStart, SlurmJobStarted, SlurmOutcome};
use gpush_core::{
    config::Busy,
    lease::request::{normalized, spec},
    slurm::decide,
};
use gpush_store::AuditEvent;
use tokio::sync::OwnedMutexGuard;

use super::{
    Slurm, SlurmParts, Started,
    allocation::{Allocation, Wanted, owned},
    end, left, time_until,
};
use crate::{
    leases::{JobKey, JobTerms, environment_of_job, of_job, request_for_job},
    requests::caller::{Caller, Viewer},
    state::HostState,
    system::backoff::backoff,
};

/// First and longest pause before gpushd tries a request again after a temporary error. The pause doubles each time.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// Longest pause before gpushd tries a request again that was refused for lack of capacity. gpushd tries again at once when
/// a lease ends.
const CAPACITY_PAUSE: Duration = Duration::from_secs(1);

/// Time before the deadline of the hook at which a job stops waiting for capacity: gpushd must still record the refusal and
/// answer. Without an answer, Slurm would drain the node.
const ANSWER: Duration = Duration::from_secs(4);

/// Begins the lease of a job. `lock` is the lock of the job.
///
/// # Errors
/// If the node cannot serve the job. The error says why.
pub(super) async fn start(
    handle: &Slurm,
    caller: &Caller,
    key: &JobKey,
    job: &SlurmJobStart,
    lock: OwnedMutexGuard<()>,
) -> Result<Started, ApiError> {
    let (slurm, lock) = (&*handle.0, Arc::new(lock));
    let mut last: Option<ApiError> = None;
    let mut pauses = backoff(PAUSE);
    let mut waited_since: Option<Instant> = None;
    let error = loop {
        let pause = pauses.next().unwrap_or(PAUSE.1);
        let time = match left(job.until_ms) {
            Ok(time) => time,
            Err(late) => break last.unwrap_or(late),
        };
        // Limit the time, because an attempt may wait for an operation on the job's GPUs, or for an MPS daemon. An
        // attempt must not be interrupted, because it would leave capacity reserved. So after the deadline, the attempt
        // continues, and gpushd ends a lease that is granted too late.
        let open = open_leases(&slurm.context.state.now());
        let attempted = {
            let (slurm, caller, key, job) = (handle.clone(), caller.clone(), key.clone(), job.clone());
            let lock = Arc::clone(&lock);
            slurm.0.leases.clone().execute(async move {
                let result = attempt(&slurm.0, &caller, &key, &job).await;
                drop(lock);
                result
            })
        };
        match tokio::time::timeout(time, attempted).await {
            Ok(Ok(started)) => return Ok(started),
            Ok(Err(error)) if decide::is_busy(&error) && waits(slurm) && time_to_wait(job.until_ms) > pause => {
                waited_since.get_or_insert_with(|| {
                    tracing::info!(uid = job.uid, "job {} of cluster {} waits: {error}", job.job, job.cluster);
                    Instant::now()
                });
                last = Some(error);
                tokio::time::sleep(pause).await;
                let mut changes = slurm.context.state.watch();
                let other = changes.wait_for(|host| open_leases(host) != open);
                tokio::select! {
                    _ = other => {}
                    () = tokio::time::sleep(CAPACITY_PAUSE.min(time_to_wait(job.until_ms))) => {}
                    // The hook repeats the request, and the next gpushd answers it.
                    () = slurm.context.stopping.cancelled() => {
                        return Err(ApiError::stopping("gpushd is stopping while the job waits for its share"));
                    }
                }
            }
            // The error is temporary, for example because an MPS daemon is starting. Try again until the deadline of
            // the hook.
            Ok(Err(error)) if error.retryable && time_until(job.until_ms) > pause => {
                last = Some(error);
                tokio::time::sleep(pause).await;
            }
            Ok(Err(error)) => break error,
            Err(_) => break last.unwrap_or_else(late),
        }
    };
    let Ok(seen) = slurm.context.readings.host().await else { return Err(error) };
    let gpus = seen.gpus(Viewer::Log);
    let allocation = Allocation::of(&seen.host, &gpus, &job.devices);
    if !decide::is_refusal(error.code) && !is_of_mps(slurm, &allocation, &error) {
        return Err(error);
    }
    // Refuse the job instead of returning an error, because a user can cause this failure: the job must fail, but Slurm
    // must not drain the node.
    let owned = owned(&seen.host, &gpus);
    let error = match error.code {
        Code::Blocked => match waited_since.map(|since| since.elapsed().as_secs()) {
            Some(seconds) => {
                error.cause(format!("gpushd has waited for {seconds} s for the capacity (slurm.deadline)"))
            }
            None => error,
        },
        Code::TimedOut => error.cause("the MPS daemon of a GPU of the job may be slow to answer"),
        _ => error,
    };
    let refused = refuse(slurm, caller, job, error).await;
    Ok(Started { answer: SlurmJobStarted { owned, ..refused.answer }, ..refused })
}

/// Returns how long a job may still wait for capacity.
fn time_to_wait(until_ms: i64) -> Duration {
    time_until(until_ms).saturating_sub(ANSWER)
}

/// Returns whether a job waits for capacity.
fn waits(slurm: &SlurmParts) -> bool {
    slurm.leases.config().slurm.busy == Busy::Wait
}

/// Returns the leases that have not ended.
fn open_leases(host: &HostState) -> Vec<LeaseId> {
    host.leases.open.keys().copied().collect()
}

/// Returns whether the node can serve jobs, but the MPS daemons of a job's GPUs do not serve this job. A user can cause
/// this: a client can crash the server, a connection can block the daemon, and clients of one user prevent the daemon
/// from changing to the next user.
fn is_of_mps(slurm: &SlurmParts, allocation: &Allocation, error: &ApiError) -> bool {
    let is_usable =
        slurm.context.read_only.is_none() && slurm.context.store.refusal().is_none() && allocation.check_node().is_ok();
    let gpus = allocation.gpus();
    is_usable
        && (slurm.leases.lacks_an_mps_daemon(&gpus)
            || slurm.leases.has_mps_target(&gpus) && decide::may_be_of_mps(error.code, error.retryable))
}

async fn attempt(slurm: &SlurmParts, caller: &Caller, key: &JobKey, job: &SlurmJobStart) -> Result<Started, ApiError> {
    let seen = slurm.context.readings.host().await?;
    let gpus = seen.gpus(Viewer::Log);
    let owned = owned(&seen.host, &gpus);
    let answer = |outcome| Started { answer: SlurmJobStarted { outcome, owned: owned.clone() }, delivery: None };
    let allocation = Allocation::of(&seen.host, &gpus, &job.devices);
    if !seen.host.rules_are_known {
        // gpushd does not know which GPUs are reserved for Slurm, so no job may use a GPU.
        allocation.check_node()?;
    }
    // If Slurm allocated a device that this host does not have, it may be a device that is reserved for Slurm.
    let concerned = job.request.is_some() || allocation.is_owned() || allocation.has_unknown() && !owned.is_empty();
    let earlier = of_job(&slurm.leases, key);
    if !concerned && earlier.is_empty() {
        return Ok(answer(SlurmOutcome::NotConcerned));
    }
    let wanted = match (allocation.request(job.request.as_ref(), job.uid), allocation.check_node()) {
        (wanted, Ok(())) => wanted,
        // gpushd can never grant this request, even after the GPU becomes usable, so refuse it.
        (Err(refusal), Err(_)) if concerned && !allocation.has_unknown() => Err(refusal),
        (_, Err(error)) if concerned => return Err(error),
        (_, Err(_)) => return Ok(answer(SlurmOutcome::NotConcerned)),
    };
    for (lease, restart) in &earlier {
        let is_same = *restart == job.restart
            && lease.record.holder.uid == job.uid
            && lease.state.name() == LeaseState::Active
            && wanted.as_ref().is_ok_and(|wanted| wanted.is_met_by(&lease.record));
        if is_same {
            // The lease already exists: Prolog runs again, or repeats its request because it did not get the first
            // answer.
            let grant = Box::new(environment_of_job(&slurm.leases, caller, lease)?);
            return Ok(answer(SlurmOutcome::Granted { grant }));
        }
    }
    // The leases in `earlier` are from earlier runs of the job, from an earlier job with the same id, or from this run
    // with other devices.
    let leftovers = slurm.leases.config().slurm.leftovers;
    end::release_all(slurm, caller, earlier.iter().map(|(lease, _)| lease.id()), leftovers).await?;
    if !concerned {
        return Ok(answer(SlurmOutcome::NotConcerned));
    }
    if let Some(why) = &slurm.context.read_only {
        return Err(why.clone());
    }
    let granted = match wanted {
        Ok(wanted) => request(slurm, caller, job, wanted).await,
        Err(error) => Err(error),
    };
    match granted {
        Ok(started) => Ok(Started { answer: SlurmJobStarted { owned, ..started.answer }, ..started }),
        // Processes of an earlier run may still use the capacity for a moment, so let the caller try again.
        Err(error) if error.retryable && !of_job(&slurm.leases, key).is_empty() => Err(error),
        Err(error) if decide::is_refusal(error.code) => {
            if error.code == Code::Blocked {
                // The GPU may look blocked only because its reading is old. That is no reason to refuse the job, so
                // check the node again.
                let seen = slurm.context.readings.host().await?;
                Allocation::of(&seen.host, &seen.gpus(Viewer::Log), &job.devices).check_node()?;
            }
            if decide::is_busy(&error) && waits(slurm) {
                return Err(error);
            }
            let refused = refuse(slurm, caller, job, error).await;
            Ok(Started { answer: SlurmJobStarted { owned, ..refused.answer }, ..refused })
        }
        Err(error) => Err(error),
    }
}

/// Records that gpushd refuses a job, and returns the answer for Prolog.
async fn refuse(slurm: &SlurmParts, caller: &Caller, job: &SlurmJobStart, error: ApiError) -> Started {
    record_refusal(slurm, caller, job, &error).await;
    let reasons = error.sentences().into_iter().map(str::to_owned).collect();
    let hint = match error.code {
        // Replace the hint, because it names options of `gpushctl lease request`.
        Code::Blocked => Some("submit the job again later, or for another node".to_owned()),
        _ => error.hint,
    };
    Started {
        answer: SlurmJobStarted { outcome: SlurmOutcome::Refused { reasons, hint }, owned: Vec::new() },
        delivery: None,
    }
}

fn late() -> ApiError {
    ApiError::new(Code::TimedOut, "gpushd could not answer before the deadline of the hook")
        .hint("see the log of gpushd: `journalctl -u gpushd`")
}

/// Maximum length of the name and of the account of a job in characters.
const LONGEST_NAME: usize = 128;

/// Returns a name as it is recorded. Users choose the names of their jobs, and the store keeps them.
fn recorded(name: &str) -> String {
    name.chars().filter(|character| !character.is_control()).take(LONGEST_NAME).collect()
}

async fn request(
    slurm: &SlurmParts,
    caller: &Caller,
    job: &SlurmJobStart,
    wanted: Wanted,
) -> Result<Started, ApiError> {
    let binding = LeaseBinding::Job {
        cluster: job.cluster.clone(),
        job: job.job,
        node: job.node.clone(),
        restart: job.restart,
        leader: job.leader,
        cgroup: None,
        name: job.name.as_deref().map(recorded),
        account: job.account.as_deref().map(recorded),
    };
    let (targets, has_gres) = (wanted.targets, !job.devices.is_empty());
    let terms = JobTerms { binding, targets, has_gres, waits: waits(slurm) };
    let delivery = request_for_job(&slurm.leases, caller, wanted.request, &terms).await?;
    let grant = Box::new(delivery.grant().clone());
    let answer = SlurmJobStarted { outcome: SlurmOutcome::Granted { grant }, owned: Vec::new() };
    Ok(Started { answer, delivery: Some(delivery) })
}

/// Records in the log and the audit trail that gpushd refused a job. TaskProlog shows the reason to the user of the
/// job.
async fn record_refusal(slurm: &SlurmParts, caller: &Caller, job: &SlurmJobStart, error: &ApiError) {
    tracing::info!(uid = job.uid, "job {} of cluster {} was refused: {error}", job.job, job.cluster);
    // A request without a normal form is wrong, and `why` says so. Its text has no useful limit of length.
    let request = job.request.clone().and_then(|request| normalized(request).ok());
    let request = request.as_ref().map(spec);
    let event = AuditEvent::SlurmStart {
        cluster: job.cluster.clone(),
        uid: job.uid,
        request_spec: request,
        why: error.message.clone(),
    };
    let audit = event.record(Some(caller.actor(None)), format!("job {}", job.job), "refused");
    if let Err(error) = slurm.context.store.write(move |tx| tx.audit(audit.clone()).map(|_| ())).await {
        tracing::warn!("the refusal of job {} is not in the audit trail: {error}", job.job);
    }
}
