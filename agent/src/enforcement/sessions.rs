//! Processes of login sessions that have a GPU open, and login sessions outside of `user.slice`.

use gpush_core::lease::access::SessionProcess;
use gpush_host::{cgroup, device_files, proc};

use crate::state::context::HostContext;

/// Services in whose cgroups login sessions are, if `pam_systemd` does not move them to `user.slice`.
const LOGIN_SERVICES: [&str; 4] = ["ssh.service", "sshd.service", "xrdp-sesman.service", "jupyterhub.service"];

/// Returns the services in whose cgroups processes of users run.
pub(super) async fn services_with_sessions() -> Vec<String> {
    let has_users = |unit: &&str| {
        let processes = cgroup::processes(&format!("/system.slice/{unit}"));
        processes.is_some_and(|found| found.pids.iter().any(|pid| proc::owner(*pid).is_some_and(|uid| uid >= 1000)))
    };
    let found = gpush_host::subtask::blocking(move || {
        LOGIN_SERVICES.into_iter().filter(has_users).map(str::to_owned).collect()
    });
    found.await.unwrap_or_default()
}

/// Returns the processes below `user.slice` that have a GPU open. Without the right to read a process, leaves it out.
pub(super) async fn processes(context: &HostContext) -> Vec<SessionProcess> {
    let proc = context.host_services.proc.clone();
    let found = gpush_host::subtask::blocking(move || {
        let all = device_files::open_nodes(&proc).unwrap_or_default();
        let in_session = |pid: &u32| proc::cgroups(*pid).is_some_and(|text| cgroup::contains("/user.slice", &text));
        let of = |(pid, nodes): (u32, Vec<String>)| SessionProcess {
            pid,
            uid: proc::owner(pid),
            command: proc::name(pid),
            is_graphical: nodes.iter().any(|node| node == device_files::DISPLAY_NODE),
        };
        all.into_iter().filter(|(pid, _)| in_session(pid)).map(of).collect()
    });
    found.await.unwrap_or_default()
}
