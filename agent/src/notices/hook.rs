//! Runs the program in `notify.command` for each notice, for example to send mail, and sets the comments of Slurm jobs. The
//! program gets the notice as a JSON object on its standard input.
//!
//! ```text
//! notice ─► queue of [`WAITING`], else left out and logged ─► one program at a time ─► log
//! ```
//!
//! The program never runs as root: it runs as the user in `notify.user`, or as a user that systemd creates for the run, in
//! a sandbox. Without systemd it runs as `nobody`. A hook that fails or hangs delays only later runs of the hook.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::{GpuUuid, LeaseHolder, LeaseId, LeaseNotice, NoticeChange};
use gpush_core::config::Notify;
use gpush_host::{
    helper::{End, Job},
    subtask, systemd,
};
use nix::unistd::User;
use serde::Serialize;
use tokio::sync::{Mutex, mpsc};
use tokio_util::sync::CancellationToken;

use super::job_comment;
use crate::system::{host_services::HostServices, tasks::Tasks};

/// Maximum number of notices that wait for the hook.
const WAITING: usize = 64;

/// Maximum run time of the hook.
const DEADLINE: Duration = Duration::from_secs(10);

/// Uid and gid of `nobody`.
const NOBODY: u32 = 65_534;

/// The name of the runs.
const OPERATION: &str = "notify";

/// A notice that waits for its programs.
#[derive(Debug, Clone)]
struct WaitingNotice {
    /// The settings with which the hook runs.
    notify: Notify,
    change: NoticeChange,
    /// The Slurm job of the lease, if its comment is set.
    job: Option<u32>,
}

/// The hook. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct NoticeHook {
    runs: mpsc::Sender<WaitingNotice>,
    /// The receiving end of the queue.
    waiting: Arc<Mutex<mpsc::Receiver<WaitingNotice>>>,
}

impl NoticeHook {
    pub(super) fn new() -> Self {
        let (runs, waiting) = mpsc::channel(WAITING);
        Self { runs, waiting: Arc::new(Mutex::new(waiting)) }
    }

    /// Runs the hook for a notice, if the config has one, and sets the comment of the Slurm job of the lease. Does not wait
    /// for the programs.
    pub(super) fn run(&self, notify: &Notify, change: &NoticeChange, job: Option<u32>) {
        let job = job.filter(|_| notify.job_comment);
        if notify.command.is_none() && job.is_none() {
            return;
        }
        let waiting = WaitingNotice { notify: notify.clone(), change: change.clone(), job };
        if self.runs.try_send(waiting).is_err() {
            let lease = change.lease_id;
            tracing::warn!(%lease, "lease {lease}: the hook of [notify] is too slow, so it does not run for a notice");
        }
    }

    /// Runs the hook for the notices that wait, one after the other, until gpushd stops.
    pub(super) async fn serve(self, host_services: Arc<HostServices>, tasks: Tasks, stopping: CancellationToken) {
        let mut waiting = self.waiting.lock().await;
        while let Some(Some(WaitingNotice { notify, change, job })) = stopping.run_until_cancelled(waiting.recv()).await
        {
            let _unfinished = tasks.unfinished();
            execute(&host_services, &notify, &change).await;
            if let Some(job) = job {
                job_comment::set(&host_services, change.lease_id, job, &change.notice.text).await;
            }
        }
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

async fn execute(host_services: &HostServices, notify: &Notify, change: &NoticeChange) {
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

    /// While the hook hangs, notices wait for it up to a limit, and the delivery of notices goes on.
    #[test]
    fn hook_that_hangs_delays_no_notice() {
        let hook = NoticeHook::new();
        let notify = Notify { command: Some("/bin/mail".to_owned()), ..Notify::default() };
        let change = NoticeChange {
            lease_id: LeaseId(1),
            holder: LeaseHolder { uid: 1000, user: None },
            gpu_uuids: Vec::new(),
            notice: LeaseNotice {
                at: jiff::Timestamp::UNIX_EPOCH,
                kind: gpush_api::NoticeKind::Revoked,
                text: "exam".to_owned(),
                ends_at: None,
                terminals: None,
            },
        };
        for _ in 0..1000 {
            hook.run(&notify, &change, Some(7));
        }
        assert_eq!(hook.waiting.try_lock().unwrap().len(), WAITING);
        let without = NoticeHook::new();
        without.run(&Notify { job_comment: false, ..Notify::default() }, &change, Some(7));
        without.run(&Notify::default(), &change, None);
        assert_eq!(without.waiting.try_lock().unwrap().len(), 0, "there is no program to run");
    }

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
