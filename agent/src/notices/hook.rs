//! Runs the program in `notify.command` for each notice, for example to send mail. The program gets the notice as a JSON
//! object on its standard input.
//!
//! ```text
//! notice ─► queue of [`WAITING`], else left out and logged ─► one program at a time ─► log
//! ```
//!
//! The program never runs as root: it runs as the user in `notify.user`, or as a user that systemd creates for the run, in
//! a sandbox. Without systemd it runs as `nobody`. A hook that fails or hangs delays only later runs of the hook.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::NoticeChange;
use gpush_core::config::Notify;
use gpush_host::{
    helper::{End, Job},
    systemd,
};
use gpush_locked::Locked;
use tokio::sync::mpsc;

use crate::system::{host_services::HostServices, tasks::Tasks};

/// Maximum number of notices that wait for the hook.
const WAITING: usize = 64;

/// Maximum run time of the hook.
const DEADLINE: Duration = Duration::from_secs(10);

/// The name of the runs.
const OPERATION: &str = "notify";

/// A notice, and the settings with which its hook runs.
type WaitingNotice = (Notify, NoticeChange);

/// The hook. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct NoticeHook {
    runs: mpsc::Sender<WaitingNotice>,
    /// Where the task gets the runs. The task takes it when it starts.
    waiting: Arc<Locked<Option<mpsc::Receiver<WaitingNotice>>>>,
}

impl NoticeHook {
    pub(super) fn new() -> Self {
        let (runs, waiting) = mpsc::channel(WAITING);
        Self { runs, waiting: Arc::new(Locked::new(Some(waiting))) }
    }

    /// Runs the hook for a notice, if the config has one.
    pub(super) fn run(&self, notify: &Notify, change: &NoticeChange) {
        if notify.command.is_some() && self.runs.try_send((notify.clone(), change.clone())).is_err() {
            let lease = change.lease_id;
            tracing::warn!(%lease, "lease {lease}: the hook of [notify] is too slow, so it does not run for a notice");
        }
    }

    /// Runs the hook for the notices that wait, one after the other.
    pub(super) async fn serve(self, host_services: Arc<HostServices>, tasks: Tasks) {
        let Some(mut waiting) = self.waiting.lock().take() else { return std::future::pending().await };
        while let Some((notify, change)) = waiting.recv().await {
            let _unfinished = tasks.unfinished();
            execute(&host_services, &notify, &change).await;
        }
    }
}

async fn execute(host_services: &HostServices, notify: &Notify, change: &NoticeChange) {
    let (Some(command), Ok(input)) = (&notify.command, serde_json::to_string(change)) else { return };
    let lease = change.lease_id;
    // The program that changes the user runs the hook, so check the hook itself here.
    if let Err(error) = gpush_host::helper::Helpers::may_run(command) {
        return tracing::warn!(%lease, "lease {lease}: {error}");
    }
    let (program, args) = as_user(command, notify.user.as_deref());
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

/// Returns the program and the arguments that run a command as a user, without privileges.
fn as_user(command: &str, user: Option<&str>) -> (String, Vec<String>) {
    let is_root = nix::unistd::geteuid().is_root();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    if !is_root {
        // gpushd itself is unprivileged.
        return (command.to_owned(), Vec::new());
    }
    if !systemd::is_the_service_manager() {
        let user = user.unwrap_or("nobody");
        let (uid, group) = (format!("--reuid={user}"), format!("--regid={user}"));
        let group = if user == "nobody" { "--regid=65534" } else { &group };
        return (
            "/usr/bin/setpriv".to_owned(),
            words(&[&uid, group, "--clear-groups", "--no-new-privs", "--", command]),
        );
    }
    let user = user.map_or_else(|| "DynamicUser=yes".to_owned(), |user| format!("User={user}"));
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
