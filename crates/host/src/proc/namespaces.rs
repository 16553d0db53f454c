//! Namespaces of a process, compared with those of gpushd.

use std::fs;

use super::{AnyPid, Status, positive, read};

/// Returns whether a process is in gpushd's own pid and user namespaces. The user ids of such a
/// process are user ids of the host.
///
/// Root of a container is in another pid or user namespace. If gpushd is not permitted to see the
/// namespaces of the process (`PTRACE_MODE_READ`), this function compares the pids and the map of
/// user ids instead. Returns `false` for an unknown process.
pub fn is_on_this_host(pid: impl AnyPid) -> bool {
    is_in_our_pid_namespace(pid) && is_in_our_user_namespace(pid)
}

/// Returns whether a process is in gpushd's own pid namespace.
pub fn is_in_our_pid_namespace(pid: impl AnyPid) -> bool {
    match same(pid, "pid") {
        Some(same) => same,
        None => Status::of(pid).is_some_and(|status| status.pids.len() == 1),
    }
}

/// Returns whether a process is in gpushd's own network namespace.
pub fn is_in_our_network(pid: impl AnyPid) -> Option<bool> {
    same(pid, "net")
}

fn is_in_our_user_namespace(pid: impl AnyPid) -> bool {
    let map = |pid: &str| read::read(format!("/proc/{pid}/uid_map")).ok();
    match same(pid, "user") {
        Some(same) => same,
        None => positive(pid).and_then(|pid| map(&pid.to_string())).is_some_and(|its| Some(its) == map("self")),
    }
}

/// Compares a namespace of a process with gpushd's own; `None` if gpushd is not permitted to see
/// the namespace, or there is no such process.
fn same(pid: impl AnyPid, kind: &str) -> Option<bool> {
    let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    Some(of(&positive(pid)?.to_string())? == of("self")?)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Read},
        process::{Command, Stdio},
    };

    use super::*;

    /// Starts a process in other namespaces with `unshare`, and passes its pid to `check`.
    fn in_other_namespaces(flags: &[&str], check: impl FnOnce(u32)) {
        let mut command = Command::new("unshare");
        command.args(flags).args(["sh", "-c", "echo up; read x"]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let Ok(mut child) = child else { return println!("SKIPPED namespaces {flags:?}: no unshare here") };
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.is_empty() {
            let mut why = String::new();
            child.stderr.take().unwrap().read_to_string(&mut why).unwrap();
            println!("SKIPPED namespaces {flags:?}: {}", why.trim());
        } else {
            let children = format!("/proc/{0}/task/{0}/children", child.id());
            let children = read::text(fs::File::open(children).unwrap()).unwrap();
            check(children.split_whitespace().next().map_or(child.id(), |pid| pid.parse().unwrap()));
        }
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn own_process_is_on_this_host_and_an_unknown_one_is_not() {
        let me = std::process::id();
        assert!(is_on_this_host(me) && is_in_our_pid_namespace(me));
        assert_eq!(is_in_our_network(me), Some(true));
        assert!(!is_on_this_host(i32::MAX) && !is_on_this_host(0));
        assert_eq!(is_in_our_network(i32::MAX), None);
    }

    #[test]
    fn process_in_another_pid_namespace_is_not_on_this_host() {
        in_other_namespaces(&["--fork", "--pid"], |pid| {
            assert!(!is_in_our_pid_namespace(pid) && !is_on_this_host(pid));
            // If gpushd is not permitted to see the namespaces, `is_on_this_host` compares the
            // number of pids instead.
            assert_eq!(Status::of(pid).unwrap().pids.len(), 2);
        });
    }

    #[test]
    fn process_in_another_user_namespace_is_not_on_this_host() {
        in_other_namespaces(&["--user", "--map-root-user"], |pid| {
            assert!(is_in_our_pid_namespace(pid) && !is_on_this_host(pid));
        });
    }
}
