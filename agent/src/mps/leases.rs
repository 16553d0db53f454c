//! What leases need from MPS targets: names, offers, admission of lease holders, and clients.
//!
//! Only holders of leases have access to the pipe directory of a target. They get access before the grant is recorded.
//! If clients of another user are connected, admission fails, and no grant is recorded.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt,
    path::Path,
    time::Duration,
};

use gpush_api::{
    ApiError, Code, LeaseMember, MemberShare, MemoryLimit, MpsSettings, MpsState, MpsUsers, Percentage, Priority,
};
use gpush_core::{sharing, supervisor::SupervisorState};
use gpush_host::proc::{self, Environment, FileId};
use gpush_mps::daemon::{DaemonRequest, Report};

use super::{Entry, Mps, base_lock_path, daemon_state, targets::DesiredTargets, view};
use crate::{caller::Viewer, state::LeaseTable};

/// Environment variable of an MPS client. It contains the client's pipe directory.
const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// Finds the UUID of the target that a text names.
///
/// # Errors
/// If the text matches no target, or several.
pub(crate) fn target(mps: &Mps, text: &str) -> Result<String, ApiError> {
    view::find(mps, text).map(|(uuid, _)| uuid)
}

/// The MPS daemons that gpushd supervises.
#[derive(Debug, Default)]
pub(crate) struct Supervised {
    /// UUIDs of all targets with a daemon.
    pub(crate) targets: BTreeSet<String>,
    /// UUIDs of the targets whose daemon an operation has ended. gpushd removes such a daemon soon after the operation.
    pub(crate) ended: BTreeSet<String>,
    /// For each target in use, by UUID, the user whose clients are connected.
    pub(crate) users: BTreeMap<String, u32>,
}

/// Returns the MPS daemons that gpushd supervises.
pub(crate) fn daemons(mps: &Mps) -> Supervised {
    let mut all = Supervised::default();
    for (uuid, entry) in mps.entries().iter() {
        let seen = entry.daemon.last_report();
        all.targets.insert(uuid.clone());
        if seen.state == SupervisorState::Stopped && !seen.behind && !mps.is_active(uuid) {
            all.ended.insert(uuid.clone());
        }
        let is_used = !seen.clients.is_empty() || !seen.waiting.is_empty();
        all.users.extend(seen.user.filter(|_| is_used).map(|user| (uuid.clone(), user)));
    }
    all
}

/// Returns the targets whose daemons admit new clients now.
pub(crate) fn serving(mps: &Mps) -> BTreeSet<String> {
    let outlook = DesiredTargets::of(mps, Viewer::Agent);
    let entries = mps.entries().clone();
    let serves = |(uuid, entry): &(String, Entry)| {
        daemon_state::admits(&entry.daemon.last_report()) && outlook.why_removed(uuid, entry).is_none()
    };
    entries.into_iter().filter(serves).map(|(uuid, _)| uuid).collect()
}

/// Returns whether any daemon is starting, will soon be started, or runs but does not admit clients yet.
pub(crate) fn is_starting(mps: &Mps) -> bool {
    let starts = |entry: &Entry| {
        let seen = entry.daemon.last_report();
        matches!(daemon_state::state(&seen), MpsState::Starting | MpsState::Ready) && !daemon_state::admits(&seen)
    };
    mps.entries().values().any(starts) || DesiredTargets::of(mps, Viewer::Agent).has_pending(mps)
}

/// Checks that a target has a daemon that admits clients.
///
/// # Errors
/// If no client can be admitted. The error says why.
pub(crate) fn serves(mps: &Mps, target: &str) -> Result<(), ApiError> {
    let Some(entry) = mps.entries().get(target).cloned() else {
        return Err(ApiError::new(Code::Conflict, format!("{target} is no longer shared through MPS"))
            .hint("list the targets with `gpushctl mps list`"));
    };
    let label = daemon_state::label(&entry, target);
    if let Some(why) = DesiredTargets::of(mps, Viewer::Agent).why_removed(target, &entry) {
        return Err(daemon_state::removed_target_error(&label, &entry, why));
    }
    let seen = entry.daemon.last_report();
    if daemon_state::admits(&seen) {
        return Ok(());
    }
    Err(daemon_state::not_granting_error(&label, &entry, &seen, mps.record(target).stopped.is_some()))
}

/// Returns the settings for the clients of a lease: the requested values, and the values of the daemon for settings
/// that were not requested.
///
/// # Errors
/// If a value exceeds a limit of the daemon or the memory of the target.
pub(crate) fn client_settings(
    mps: &Mps,
    target: &str,
    percentage: Percentage,
    memory_limit: Option<MemoryLimit>,
    priority: Option<Priority>,
) -> Result<MpsSettings, ApiError> {
    serves(mps, target)?;
    let Some(entry) = mps.entries().get(target).cloned() else { return Ok(MpsSettings::default()) };
    let label = daemon_state::label(&entry, target);
    let ceiling = entry.daemon.last_report().policy.unwrap_or_default().settings;
    let bad = |what: String| {
        Err(ApiError::new(Code::BadRequest, format!("cannot grant a lease on {label}: {what}"))
            .hint("request a lower value"))
    };
    if percentage > ceiling.percentage {
        return bad(format!("{percentage} % exceeds the limit for each client, {} %", ceiling.percentage));
    }
    let memory_limit_mib = memory_limit.or(ceiling.memory_limit_mib);
    if let (Some(asked), Some(most)) = (memory_limit_mib, ceiling.memory_limit_mib)
        && asked > most
    {
        return bad(format!("memory limit {asked} exceeds the limit for each client, {most}"));
    }
    let priority = priority.unwrap_or(ceiling.priority);
    if priority < ceiling.priority {
        return bad(format!("priority `{priority}` is above the priority of the daemon, `{}`", ceiling.priority));
    }
    let settings = MpsSettings { percentage, memory_limit_mib, priority };
    if let Some(memory) = entry.target.as_ref().and_then(|target| target.memory_mib) {
        sharing::check_memory_limit(&settings, memory, &label)?;
    }
    Ok(settings)
}

/// Admits lease holders to the MPS targets of a grant that is about to be recorded. If a daemon still belongs to a
/// previous user, replaces the daemon.
///
/// # Errors
/// If a daemon does not serve or has just ended, or clients of another user are connected.
pub(crate) async fn prepare(mps: &Mps, members: &[LeaseMember]) -> Result<(), ApiError> {
    for target in targets(members) {
        let entry = mps.entries().get(target).cloned();
        let Some(entry) = entry else { return serves(mps, target) };
        // Operations and stops of the daemon use this lock too. So from now on they see the reserved capacity.
        let _turn = entry.turn.lock().await;
        serves(mps, target)?;
        entry.daemon.send(DaemonRequest::Users(mps.admitted(target))).await?;
        // Check again, because the daemon may have exited meanwhile.
        serves(mps, target)?;
        if has_just_ended(&entry.daemon.last_report()) {
            return Err(daemon_state::just_ended_error(&daemon_state::label(&entry, target)));
        }
    }
    Ok(())
}

/// Returns whether the process of a daemon has ended or was killed. The report of the daemon may still say that the
/// daemon serves, because gpushd learns of the end a few milliseconds later. A program that starts in this time
/// would find a socket without a daemon, and would use the GPU without MPS.
fn has_just_ended(seen: &Report) -> bool {
    seen.pid.is_none_or(proc::is_ending)
}

/// Gives the lease holders on these targets access to the pipe directories, and takes the access from all other users.
pub(crate) async fn admit(mps: &Mps, members: &[LeaseMember]) {
    for target in targets(members) {
        let Some(entry) = mps.entries().get(target).cloned() else { continue };
        let turn = entry.turn.lock().await;
        if let Err(error) = entry.daemon.send(DaemonRequest::Users(mps.admitted(target))).await {
            tracing::error!(
                mps = entry.short,
                "cannot set which users have access to the MPS daemon {}: {error}",
                entry.short
            );
        }
        drop(turn);
        // Wake the reconciler: if no rule requires the daemon any more, the reconciler can stop the daemon now.
        mps.wakes.wake(&entry.gpu_uuid);
    }
}

fn targets(members: &[LeaseMember]) -> impl Iterator<Item = &str> {
    let is_mps = |member: &&LeaseMember| matches!(member.share, MemberShare::Mps { .. });
    members.iter().filter(is_mps).map(|member| member.target.as_str())
}

/// Returns the pipe directory of a target's daemon.
pub(crate) fn pipe_directory(mps: &Mps, target: &str) -> Option<String> {
    let seen = mps.entries().get(target)?.daemon.last_report();
    seen.pipe.map(|path| path.display().to_string())
}

/// Polls a target's daemon and returns the pids of its clients. `None` if the daemon does not report them.
pub(crate) async fn clients_now(mps: &Mps, target: &str) -> Option<Vec<u32>> {
    let Some(entry) = mps.entries().get(target).cloned() else { return Some(Vec::new()) };
    let seen = entry.daemon.fresh(Duration::ZERO).await;
    if !seen.clients_known {
        return None;
    }
    let clients = seen.clients.iter().map(|(_, client)| *client).chain(seen.waiting.iter().copied());
    Some(clients.filter_map(|pid| u32::try_from(pid).ok()).collect())
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
pub(crate) fn has_target(mps: &Mps, gpus: &[String]) -> bool {
    mps.entries().values().any(|entry| gpus.contains(&entry.gpu_uuid))
}

/// Returns an error for each target on these GPUs that does not serve clients.
pub(crate) fn not_serving(mps: &Mps, gpus: &[&str]) -> Vec<ApiError> {
    let entries = mps.entries().clone();
    let here = entries.into_iter().filter(|(_, entry)| gpus.contains(&entry.gpu_uuid.as_str()));
    here.filter_map(|(uuid, _)| serves(mps, &uuid).err()).collect()
}

/// For each target whose daemon serves one user at a time, returns that user: the holder of a lease on the target, or
/// else the user whose clients are connected.
pub(crate) fn single_users(mps: &Mps, table: &LeaseTable) -> Vec<(String, u32)> {
    let connected = daemons(mps).users;
    let entries = mps.entries().clone();
    let user = |(target, entry): (String, Entry)| {
        let serves_one = entry.daemon.last_report().policy.is_some_and(|policy| policy.users == MpsUsers::One);
        let holder = || table.members().find(|(_, member)| member.target == target).map(|(holder, _)| holder);
        let user = holder().or_else(|| connected.get(&target).copied()).filter(|_| serves_one)?;
        Some((target, user))
    };
    entries.into_iter().filter_map(user).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command};

    use super::*;

    /// Fault: if the MPS pipe directory of a process was not created by gpushd, gpushd assumed that the process
    /// belonged to another gpushd. So the lease of the process ended while the process ran without using the GPU.
    #[test]
    fn process_belongs_to_another_gpushd_only_with_its_pipe_directory() {
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
