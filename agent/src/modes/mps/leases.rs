//! What leases need from MPS targets: admission of lease holders, and clients.
//!
//! Only holders of leases have access to the pipe directory of a target. They get access before the grant is recorded.
//! If clients of another user are connected, admission fails, and no grant is recorded.

use std::{ffi::OsStr, io, os::unix::ffi::OsStrExt, path::Path, time::Duration};

use gpush_api::{GpuUuid, LeaseMember, MemberShare, TargetUuid};
use gpush_core::mps::{DaemonReport, MpsTarget, NotServing};
use gpush_host::proc::{self, Environment, FileId};
use gpush_mps::daemon::DaemonRequest;

use super::{Mps, base_lock_path, outlook::outlook};
use crate::{requests::caller::Viewer, state::HostState};

/// Environment variable of an MPS client. It contains the client's pipe directory.
const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// Admits lease holders to the MPS targets of a grant that is about to be recorded. If a daemon still belongs to a
/// previous user, replaces the daemon.
///
/// # Errors
/// If a daemon does not serve or has just ended, or clients of another user are connected.
pub(crate) async fn prepare(mps: &Mps, members: &[LeaseMember]) -> Result<(), NotServing> {
    for target in targets(members) {
        let Some(handle) = mps.daemon(target) else { return serves(mps, target).map(drop) };
        // Operations and stops of the daemon use this lock too. So from now on they see the reserved capacity.
        let _turn = handle.turn.lock().await;
        serves(mps, target)?;
        handle.daemon.send(DaemonRequest::Users(mps.admitted(target))).await?;
        // Check again, because the daemon may have exited meanwhile.
        let target = serves(mps, target)?;
        if has_just_ended(&target.report) {
            return Err(target.just_ended());
        }
    }
    Ok(())
}

/// Returns a target whose daemon admits clients now.
///
/// # Errors
/// If no client can be admitted. The error says why.
fn serves(mps: &Mps, target: &TargetUuid) -> Result<MpsTarget, NotServing> {
    let host = mps.handles.context.state.now();
    outlook(&host, Viewer::Agent).serves(target).cloned()
}

/// Returns whether the process of a daemon has ended or was killed. The report of the daemon may still say that the
/// daemon serves, because gpushd learns of the end a few milliseconds later. A program that starts in this time
/// would find a socket without a daemon, and would use the GPU without MPS.
fn has_just_ended(seen: &DaemonReport) -> bool {
    seen.pid.is_none_or(proc::is_ending)
}

/// Gives the lease holders on these targets access to the pipe directories, and takes the access from all other users.
pub(crate) async fn admit(mps: &Mps, members: &[LeaseMember]) {
    for uuid in targets(members) {
        let (Some(handle), Some(target)) = (mps.daemon(uuid), mps.target(uuid)) else { continue };
        let turn = handle.turn.lock().await;
        if let Err(error) = handle.daemon.send(DaemonRequest::Users(mps.admitted(uuid))).await {
            let short = &target.short;
            tracing::error!(mps = short, "cannot set which users have access to the MPS daemon {short}: {error}");
        }
        drop(turn);
        // Wake the reconciler: if no rule requires the daemon any more, the reconciler can stop the daemon now.
        mps.wakes.wake(&target.gpu_uuid);
    }
}

fn targets(members: &[LeaseMember]) -> impl Iterator<Item = &TargetUuid> {
    let is_mps = |member: &&LeaseMember| matches!(member.share, MemberShare::Mps { .. });
    members.iter().filter(is_mps).map(|member| &member.target)
}

/// Returns the pipe directory of a target's daemon.
pub(crate) fn pipe_directory(mps: &Mps, target: &TargetUuid) -> Option<String> {
    mps.target(target)?.report.pipe.as_ref().map(|path| path.display().to_string())
}

/// Polls a target's daemon and returns the pids of its clients. `None` if the daemon does not report them.
pub(crate) async fn clients_now(mps: &Mps, target: &TargetUuid) -> Option<Vec<u32>> {
    if let Some(handle) = mps.daemon(target) {
        handle.daemon.refresh(Duration::ZERO).await;
    }
    let Some(target) = mps.target(target) else { return Some(Vec::new()) };
    target.report.clients_known.then(|| target.report.client_pids().collect())
}

/// Returns whether a process is a client of another gpushd: the environment of the process names a pipe directory of
/// that gpushd. If so, the lease that the process names also belongs to the other gpushd, because lease
/// numbers are unique only within one gpushd.
///
/// The pipe directory is BASE/TARGET/NUMBER, where BASE has the lock file of a gpushd. `base` is the directory of this
/// gpushd.
///
/// # Errors
/// gpushd has no free file descriptor or memory, or the kernel does not answer.
pub(crate) fn is_of_another_agent(pid: u32, base: &Path) -> io::Result<bool> {
    let Environment::Set(pipe) = proc::environment(pid, PIPE_DIRECTORY)? else { return Ok(false) };
    let pipe = Path::new(OsStr::from_bytes(&pipe));
    let Some(of_pipe) = pipe.ancestors().nth(2).filter(|_| !pipe.starts_with(base)) else { return Ok(false) };
    let lock = proc::visible_file(pid, &base_lock_path(of_pipe))?;
    let own_lock = std::fs::symlink_metadata(base_lock_path(base)).ok().map(|meta| FileId::of(&meta));
    Ok(lock.is_some() && lock != own_lock)
}

/// Returns whether one of these GPUs has a target with a daemon.
pub(crate) fn has_target(host: &HostState, gpus: &[GpuUuid]) -> bool {
    host.mps.all().any(|target| gpus.contains(&target.gpu_uuid))
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command};

    use gpush_api::Priority;

    use super::*;
    use crate::modes::scene::mig_member;

    #[test]
    fn only_shares_of_mps_targets_need_admission() {
        let share = |share| LeaseMember { share, ..mig_member("GPU-0", "MIG-0", "1g.10gb") };
        let percentage = "25".parse().unwrap();
        let mps = MemberShare::Mps { percentage, memory_limit_mib: None, priority: Priority::default() };
        let timeslice = MemberShare::Timeslice { replicas: 2, level: None, compute_mode: None };
        let mig = MemberShare::Mig { profile: "1g.10gb".to_owned() };
        let members = [mig, timeslice, MemberShare::Whole, mps].map(share);
        assert_eq!(targets(&members).count(), 1);
        assert_eq!(targets(&members[..3]).count(), 0);
    }

    /// Fault: if the MPS pipe directory of a process was not created by gpushd, gpushd assumed that the process
    /// belonged to another gpushd. So the lease of the process ended while the process ran without using the GPU.
    #[test]
    fn pipe_directory_decides_which_gpushd_owns_process() {
        let scratch = tempfile::tempdir().unwrap();
        let [own, other, users] = ["own", "other", "users"].map(|name| scratch.path().join(name));
        for base in [&own, &other, &users] {
            fs::create_dir_all(base.join("g1/3")).unwrap();
        }
        for base in [&own, &other] {
            fs::write(base_lock_path(base), "").unwrap();
        }
        // The directory of this gpushd, at another path.
        let same = scratch.path().join("same");
        std::os::unix::fs::symlink(&own, &same).unwrap();
        let is_of_another = |pipe: &Path| {
            let mut process = Command::new("sleep").arg("600").env(PIPE_DIRECTORY, pipe).spawn().unwrap();
            // `spawn` may return before the kernel shows the environment of the new program.
            while fs::read(format!("/proc/{}/environ", process.id())).unwrap().is_empty() {
                std::thread::yield_now();
            }
            let found = is_of_another_agent(process.id(), &own).unwrap();
            process.kill().and_then(|()| process.wait()).unwrap();
            found
        };
        assert!(is_of_another(&other.join("g1/3")));
        for base in [&own, &same, &users] {
            assert!(!is_of_another(&base.join("g1/3")), "{}", base.display());
        }
        assert!(!is_of_another(Path::new("relative")) && !is_of_another(Path::new("")));
    }
}
