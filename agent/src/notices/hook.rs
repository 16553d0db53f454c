//! Runs the program in `notify.command` for each notice, for example to send mail, and sets the comments of Slurm jobs. The
//! program gets the notice as a JSON object on its standard input.
//!
//! `queue` says which notices wait. One program of each sort runs at a time.
//!
//! The program never runs as root: it runs as the user in `notify.user`, or as a user that systemd creates for the run, in
//! a sandbox. Without systemd it runs as `nobody`. A hook that fails or hangs delays only later runs of the hook.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::{GpuUuid, LeaseHolder, LeaseId, LeaseNotice, NoticeChange};
use gpush_core::config;
use gpush_host::{
    helper::{End, Job},
    subtask, systemd,
};
use gpush_locked::Locked;
use nix::unistd::User;
use serde::Serialize;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{
    job_comment,
    queue::{HookRun, JobComment, NoticeQueue},
};
use crate::system::{host_services::HostServices, tasks::Tasks};

/// Maximum run time of the hook.
const DEADLINE: Duration = Duration::from_secs(10);

/// Uid and gid of `nobody`.
const NOBODY: u32 = 65_534;

/// The name of the runs.
const OPERATION: &str = "notify";

/// The hook. A handle, cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct NoticeHook(Arc<HookParts>);

#[derive(Debug, Default)]
struct HookParts {
    queue: Locked<NoticeQueue>,
    has_run: Notify,
    has_comment: Notify,
}

impl NoticeHook {
    /// Runs the hook for a notice, if the config has one, and sets the comment of the Slurm job of the lease. Does not wait
    /// for the programs.
    pub(super) fn run(&self, notify: &config::Notify, change: &NoticeChange, job: Option<u32>) {
        let lease = change.lease_id;
        if let Some(job) = job.filter(|_| notify.job_comment) {
            self.0.queue.lock().add_comment(JobComment { lease, job, text: change.notice.text.clone() });
            self.0.has_comment.notify_one();
        }
        if notify.command.is_none() {
            return;
        }
        let run = HookRun { notify: notify.clone(), change: change.clone() };
        if self.0.queue.lock().add_run(run) {
            self.0.has_run.notify_one();
        } else {
            tracing::warn!(%lease, "lease {lease}: the hook of [notify] is too slow, so it does not run for a notice");
        }
    }

    /// Runs the hook and sets the comments for the notices that wait, until gpushd stops.
    pub(super) async fn serve(self, host_services: Arc<HostServices>, tasks: Tasks, stopping: CancellationToken) {
        let HookParts { queue, has_run, has_comment } = &*self.0;
        let hook = async {
            loop {
                // The lock must not be held while the program runs.
                let next = queue.lock().next_run();
                match next {
                    Some(HookRun { notify, change }) => {
                        let _unfinished = tasks.unfinished();
                        execute(&host_services, &notify, &change).await;
                    }
                    None if stopping.run_until_cancelled(has_run.notified()).await.is_none() => return,
                    None => {}
                }
                if stopping.is_cancelled() {
                    return;
                }
            }
        };
        let comments = async {
            loop {
                let next = queue.lock().next_comment();
                match next {
                    Some(comment) => {
                        let _unfinished = tasks.unfinished();
                        job_comment::set(&host_services, &comment).await;
                    }
                    None if stopping.run_until_cancelled(has_comment.notified()).await.is_none() => return,
                    None => {}
                }
                if stopping.is_cancelled() {
                    return;
                }
            }
        };
        tokio::join!(hook, comments);
    }
}

/// The standard input of the hook, one JSON object.
#[derive(Serialize)]
struct HookInput<'a> {
    lease_id: LeaseId,
    holder: &'a LeaseHolder,
    gpu_uuids: &'a [GpuUuid],
    #[serde(flatten)]
    notice: &'a LeaseNotice,
}

async fn execute(host_services: &HostServices, notify: &config::Notify, change: &NoticeChange) {
    let NoticeChange { lease_id: lease, holder, gpu_uuids, notice } = change;
    let lease = *lease;
    let input = serde_json::to_string(&HookInput { lease_id: lease, holder, gpu_uuids, notice });
    let (Some(command), Ok(input)) = (&notify.command, input) else { return };
    // The helper checks only setpriv or systemd-run, so check the hook here.
    if let Err(error) = gpush_host::helper::Helpers::may_run(command) {
        return tracing::warn!(%lease, "lease {lease}: {error}");
    }
    let user = notify.user.clone();
    let Some(user) = subtask::blocking(move || unprivileged(user.as_deref())).await else { return };
    let (program, args) = match user {
        Ok(user) => as_user(command, user),
        Err(why) => return tracing::warn!(%lease, "lease {lease}: the hook {command} does not run: {why}"),
    };
    let job = Job {
        operation: OPERATION.to_owned(),
        step: format!("{lease}"),
        program,
        args,
        env: BTreeMap::new(),
        input: Some(input + "\n"),
        deadline: DEADLINE,
        routine: true,
    };
    match host_services.helpers.run(job).await {
        Ok(ended) if ended.end == End::Exited(0) => {
            tracing::info!(%lease, "lease {lease}: the hook {command} has run{}", ended.output_suffix());
        }
        Ok(ended) => {
            tracing::warn!(%lease, "lease {lease}: the hook {command} {}{}", ended.end, ended.output_suffix());
        }
        Err(error) => tracing::warn!(%lease, "lease {lease}: {error}"),
    }
    host_services.helpers.forget(OPERATION);
}

/// Uid and gid of the user that runs the hook.
type Ids = (u32, u32);

/// Looks up the user that runs the hook. Returns `Ok(None)` if the config does not name a user.
///
/// # Errors
/// The host has no such user, or the user is root under another name.
fn unprivileged(user: Option<&str>) -> Result<Option<Ids>, String> {
    let Some(user) = user else { return Ok(None) };
    match User::from_name(user) {
        Ok(Some(found)) if found.uid.is_root() => Err(format!("{user} has uid 0")),
        Ok(Some(found)) => Ok(Some((found.uid.as_raw(), found.gid.as_raw()))),
        Ok(None) => Err(format!("this host has no user {user}")),
        Err(errno) => Err(format!("cannot look up {user}: {errno}")),
    }
}

/// Returns the program and the arguments that run a command as a user, without privileges.
fn as_user(command: &str, user: Option<Ids>) -> (String, Vec<String>) {
    let is_root = nix::unistd::geteuid().is_root();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    if !is_root {
        // gpushd itself is unprivileged.
        return (command.to_owned(), Vec::new());
    }
    if !systemd::is_the_service_manager() {
        let (uid, gid) = user.unwrap_or((NOBODY, NOBODY));
        let (uid, gid) = (format!("--reuid={uid}"), format!("--regid={gid}"));
        return (
            "/usr/bin/setpriv".to_owned(),
            words(&[&uid, &gid, "--clear-groups", "--no-new-privs", "--", command]),
        );
    }
    let user = user.map_or_else(|| "DynamicUser=yes".to_owned(), |(uid, _)| format!("User={uid}"));
    let mut args: Vec<String> = words(&["--quiet", "--pipe", "--wait", "--collect", "--service-type=exec"]);
    let properties = [
        user.as_str(),
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "PrivateTmp=yes",
        "PrivateDevices=yes",
        "RuntimeMaxSec=10",
        "MemoryMax=256M",
        "TasksMax=64",
    ];
    args.extend(properties.iter().map(|property| format!("--property={property}")));
    args.extend(words(&["--", command]));
    ("/usr/bin/systemd-run".to_owned(), args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hook_never_runs_as_root() {
        assert_eq!(unprivileged(None), Ok(None));
        assert!(unprivileged(Some("root")).unwrap_err().contains("uid 0"));
        assert!(unprivileged(Some("no-such-user")).unwrap_err().contains("no user"));
        assert_eq!(unprivileged(Some("daemon")).map(|ids| ids.map(|(uid, _)| uid > 0)), Ok(Some(true)));
        if nix::unistd::geteuid().is_root() {
            let (program, args) = as_user("/bin/true", None);
            let drops = args.iter().any(|arg| arg == "--reuid=65534" || arg == "--property=DynamicUser=yes");
            assert!(drops && program != "/bin/true" && args.last().is_some_and(|last| last == "/bin/true"), "{args:?}");
        }
    }
}
