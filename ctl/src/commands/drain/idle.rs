//! Waits until cordoned GPUs are idle, and says what it waits for.

use std::time::{Duration, Instant};

use gpush_api::{ApiError, Code, Gpu, GpuIndex, GpuState, LOST_GPU_HINT, Lease, MpsDaemon, Process};
use gpush_client::{Client, Error};
use gpush_core::{duration, refusal};
use jiff::Timestamp;

use super::lease_end::LeaseEnd;
use crate::{
    commands::{events::may_pass, lease},
    exit::{Failure, INTERRUPTED},
    output::Output,
    render::cordon,
};

/// Interval at which the command polls GPUs that are in use. gpushd reads the GPUs again only after
/// this time.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How long the command waits for a gpushd that does not answer, or has not read the GPUs since its start.
const AWAY: Duration = Duration::from_secs(60);

/// Reason to wait if gpushd has not read a GPU since the cordon.
const UNREAD: &str = "gpushd has not read the GPU since it was cordoned";

/// How waiting for idle GPUs ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::commands) enum Waited {
    Idle,
    TooLong,
    Interrupted,
}

impl Waited {
    pub(in crate::commands) fn exit_status(self) -> u8 {
        match self {
            Self::Idle => 0,
            Self::TooLong => Code::TimedOut.exit_status(),
            Self::Interrupted => INTERRUPTED,
        }
    }
}

/// The index of a GPU that is not idle, and the reason.
type WaitReason = (GpuIndex, String);

/// The result of waiting for idle GPUs, with the GPUs that are still in use or lost.
#[derive(Debug)]
pub(super) struct WaitEnd {
    pub(super) waited: Waited,
    /// Indexes of the GPUs that are not idle.
    pub(super) left: Vec<GpuIndex>,
    /// The error about lost GPUs, whose processes are not known. The command does not wait for them.
    pub(super) lost: Option<ApiError>,
}

/// Waits until cordoned GPUs are idle, and ends their leases if `lease_end` says so. One lost GPU does not end the wait
/// for the others.
pub(super) async fn until_idle(
    client: &mut Client,
    gpus: &mut [Gpu],
    timeout: Option<Duration>,
    mut lease_end: Option<LeaseEnd>,
    quiet: bool,
    out: &Output,
) -> Result<WaitEnd, Failure> {
    // Accept only readings from after the cordon: an earlier reading might not show a process that started just before
    // the cordon.
    let since = gpus.iter().flat_map(|gpu| &gpu.cordons).map(|cordon| cordon.since).max().unwrap_or(Timestamp::MIN);
    let limit = tokio::time::sleep(timeout.unwrap_or(duration::LONGEST));
    let interrupt = tokio::signal::ctrl_c();
    tokio::pin!(limit, interrupt);
    let mut printed: Vec<(GpuIndex, String)> = Vec::new();
    let mut away: Option<Instant> = None;
    let mut left: Vec<(GpuIndex, String)> = gpus.iter().map(|gpu| (gpu.index, UNREAD.to_owned())).collect();
    let mut lost = None;
    loop {
        match read_users(client, gpus).await {
            Ok((daemons, leases)) => {
                (left, lost) = reasons_to_wait(gpus, &daemons, &leases, since)?;
                away = None;
                if let Some(lease_end) = &mut lease_end {
                    lease_end.end(client, gpus, &leases, quiet, out).await;
                }
            }
            // gpushd may be restarting, or may not have read the GPUs since its start.
            Err(error) if may_pass(&error) && away.get_or_insert_with(Instant::now).elapsed() < AWAY => {}
            Err(error) => return Err(error.into()),
        }
        if left.is_empty() {
            return Ok(WaitEnd { waited: Waited::Idle, left: Vec::new(), lost });
        }
        if printed != left && !quiet {
            // Do not print that gpushctl waits for a reading of a GPU: the reading arrives before a user could read
            // the message.
            let reported = left.iter().filter(|one| !printed.contains(one) && one.1 != UNREAD);
            out.remark(&reported.map(|(index, why)| cordon::waits(*index, why, &out.look)).collect::<String>());
            printed.clone_from(&left);
        }
        let indexes = left.iter().map(|(index, _)| *index).collect();
        tokio::select! {
            () = &mut limit => return Ok(WaitEnd { waited: Waited::TooLong, left: indexes, lost }),
            _ = &mut interrupt => return Ok(WaitEnd { waited: Waited::Interrupted, left: indexes, lost }),
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
    }
}

/// Reads the GPUs again, and then the MPS daemons and leases of the host.
async fn read_users(client: &mut Client, gpus: &mut [Gpu]) -> Result<(Vec<MpsDaemon>, Vec<Lease>), Error> {
    for gpu in gpus.iter_mut() {
        *gpu = client.gpu(gpu.uuid.as_str()).await?;
    }
    Ok((client.mps().await?, client.leases(0).await?))
}

/// Returns why GPUs are not idle, by index, and the error about lost GPUs.
///
/// # Errors
/// If the host is in maintenance.
fn reasons_to_wait(
    gpus: &[Gpu],
    daemons: &[MpsDaemon],
    leases: &[Lease],
    since: Timestamp,
) -> Result<(Vec<WaitReason>, Option<ApiError>), ApiError> {
    let (mut left, mut lost) = (Vec::new(), Vec::new());
    for gpu in gpus {
        match reason_to_wait(gpu, daemons, leases, since) {
            Ok(why) => left.extend(why.map(|why| (gpu.index, why))),
            Err(error) if error.code == Code::GpuLost => lost.push(error),
            Err(error) => return Err(error),
        }
    }
    let error = match lost.len() {
        0 | 1 => lost.pop(),
        number => {
            let message = format!("{number} of {} GPUs are lost, so their processes are not known", gpus.len());
            Some(ApiError::several(message, lost))
        }
    };
    Ok((left, error))
}

/// Returns why a GPU is not idle. Ignores readings that are not from after `since`.
fn reason_to_wait(
    gpu: &Gpu,
    daemons: &[MpsDaemon],
    leases: &[Lease],
    since: Timestamp,
) -> Result<Option<String>, ApiError> {
    let gone = |code, what: &str, hint: String| {
        let message = format!("GPU {} ({}) {what}, so its processes are not known", gpu.index, gpu.uuid);
        let mut error = ApiError::new(code, message).hint(hint);
        error.causes.clone_from(&gpu.reasons);
        Err(error)
    };
    match gpu.state {
        GpuState::Lost => {
            return gone(Code::GpuLost, "is lost", LOST_GPU_HINT.to_owned());
        }
        GpuState::Maintenance => {
            let hint = "to end maintenance: `gpushctl maintenance leave` (administrator)".to_owned();
            return gone(Code::Conflict, "is in maintenance", hint);
        }
        GpuState::Changing => return Ok(Some("an operation is changing the GPU".to_owned())),
        GpuState::Unknown => return Ok(Some("the GPU can't be read now".to_owned())),
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Held => {}
    }
    let mut users: Vec<String> = users(gpu, daemons).into_iter().map(refusal::holder).collect();
    users.extend(lease::holders(gpu, leases));
    if gpu.cordons.is_empty() {
        let message =
            format!("GPU {} is not cordoned any more: another administrator has run `gpu uncordon`", gpu.index);
        let hint = format!("to drain it again: `gpushctl gpu drain {}` (administrator)", gpu.index);
        return Err(ApiError::new(Code::Conflict, message).hint(hint));
    }
    if !users.is_empty() {
        return Ok(Some(format!("used by {}", refusal::list(&users, "and"))));
    }
    if !gpu.processes_known {
        return Ok(Some("the driver does not report which processes use the GPU".to_owned()));
    }
    // The API gives whole seconds, so a reading from the second of the cordon may be from before the cordon.
    Ok((gpu.stale || gpu.observed_at <= since).then(|| UNREAD.to_owned()))
}

/// Returns the processes that use a GPU. Leaves out MPS servers, because gpushd also lists their
/// clients.
fn users<'a>(gpu: &'a Gpu, daemons: &[MpsDaemon]) -> Vec<&'a Process> {
    let servers: Vec<u32> = daemons.iter().flat_map(|one| &one.servers).filter_map(|server| server.pid).collect();
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let within = instances.flat_map(|one| one.processes.iter().chain(one.compute.iter().flat_map(|c| &c.processes)));
    let all = gpu.processes.iter().chain(within);
    all.filter(|process| process.pid.is_none_or(|pid| !servers.contains(&pid))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::fixtures;

    fn cordoned(index: u32) -> Gpu {
        let cordon = gpush_api::Cordon {
            cause: "admin".to_owned(),
            reason: String::new(),
            by: None,
            since: Timestamp::UNIX_EPOCH,
        };
        Gpu { cordons: vec![cordon], ..fixtures::gpu(index, "A100", 40_960, None) }
    }

    /// Fault: `gpu drain --end-after` ended the lease of a GPU that another administrator had uncordoned meanwhile.
    #[test]
    fn drain_ends_when_its_gpu_is_uncordoned() {
        let gpu = Gpu { cordons: Vec::new(), ..cordoned(3) };
        let error = reason_to_wait(&gpu, &[], &[], Timestamp::MIN).unwrap_err();
        assert!(
            error.code == Code::Conflict && error.message.starts_with("GPU 3 is not cordoned any more"),
            "{error:?}"
        );
    }

    /// Fault: `gpu drain all` ended at the first lost GPU, and did not wait for the others.
    #[test]
    fn lost_gpu_does_not_end_the_wait_for_others() {
        let gpu = |index, state| Gpu { state, ..cordoned(index) };
        let gpus = [gpu(0, GpuState::Lost), gpu(1, GpuState::Changing), gpu(2, GpuState::Ready)];
        let (left, lost) = reasons_to_wait(&gpus, &[], &[], Timestamp::MIN).unwrap();
        assert_eq!(left, [(GpuIndex(1), "an operation is changing the GPU".to_owned())]);
        let lost = lost.unwrap();
        assert!(lost.code == Code::GpuLost && lost.message.starts_with("GPU 0 "), "{lost:?}");
        let both = [gpu(0, GpuState::Lost), gpu(1, GpuState::Lost), gpu(2, GpuState::Ready)];
        let (left, lost) = reasons_to_wait(&both, &[], &[], Timestamp::MIN).unwrap();
        assert!(left.is_empty());
        assert_eq!(lost.unwrap().message, "2 of 3 GPUs are lost, so their processes are not known");
        let maintenance = [gpu(0, GpuState::Lost), gpu(1, GpuState::Maintenance)];
        assert!(reasons_to_wait(&maintenance, &[], &[], Timestamp::UNIX_EPOCH).is_err());
    }

    /// Fault: a reading from the same second, but from before the cordon, did not show a process that had just started.
    #[test]
    fn reading_in_same_second_as_cordon_is_not_accepted() {
        let gpu = cordoned(0);
        let second = jiff::SignedDuration::from_secs(1);
        let why = |since| reason_to_wait(&gpu, &[], &[], since).unwrap();
        assert_eq!(why(gpu.observed_at), Some(UNREAD.to_owned()));
        assert_eq!(why(gpu.observed_at - second), None);
    }

    /// A server may run on without clients.
    #[test]
    fn mps_client_keeps_a_drain_waiting_and_its_server_does_not() {
        let daemon = fixtures::mps::busy();
        let server = daemon.servers[0].pid.unwrap();
        let mut gpu = cordoned(0);
        gpu.processes = vec![fixtures::process(server, "alice", "nvidia-cuda-mps-server", 30)];
        let why = |gpu: &Gpu| reason_to_wait(gpu, std::slice::from_ref(&daemon), &[], Timestamp::MIN).unwrap();
        assert_eq!(why(&gpu), None);
        gpu.processes.push(fixtures::process(7001, "alice", "train.py", 400));
        let named = why(&gpu).unwrap();
        assert!(named.starts_with("used by pid 7001") && !named.contains(&server.to_string()), "{named}");
    }

    /// Earlier fault: `gpu reset --wait` said that the GPU stays cordoned, and did not name `maintenance leave`.
    #[test]
    fn error_for_gpu_in_maintenance_names_maintenance_leave() {
        let mut gpu = fixtures::mixed().remove(0);
        gpu.state = GpuState::Maintenance;
        let error = reason_to_wait(&gpu, &[], &[], Timestamp::UNIX_EPOCH).unwrap_err();
        assert_eq!(error.hint.as_deref(), Some("to end maintenance: `gpushctl maintenance leave` (administrator)"));
        assert_eq!(error.outcome, None, "`gpu reset` has cleared its cordon");
    }
}
