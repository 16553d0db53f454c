//! Why an MPS daemon is in its state, as sentences.

use gpush_api::text::local_time;
use jiff::Unit;

use super::report::DaemonReport;
use crate::supervisor::SupervisorState;

/// Returns the reasons for the state of a daemon, one sentence each. `name` is the name of its target in commands.
#[must_use]
pub fn reasons(seen: &DaemonReport, name: &str) -> Vec<String> {
    let mut reasons = seen.trouble.clone();
    let inside = seen.client_count();
    let clients = if inside == 1 { "its client".to_owned() } else { format!("its {inside} clients") };
    match &seen.state {
        SupervisorState::Hung { .. } if !seen.clients_known => reasons.push(format!(
            "gpushd does not restart the daemon, because its clients are not known; to restart it and end all \
            clients: `gpushctl mps restart {name} --force` (administrator)"
        )),
        SupervisorState::Hung { .. } if inside > 0 => {
            reasons.push(format!("gpushd does not restart the daemon, because that would end {clients}"));
        }
        SupervisorState::BackingOff { .. } if seen.failures == 0 => {
            reasons.push("gpushd tries again until it can start a daemon".to_owned());
        }
        SupervisorState::GivenUp => reasons.push(format!(
            "the daemon failed {} times, so gpushd does not start it again: remove the cause, then start it with \
            `gpushctl mps start {name}` (administrator)",
            seen.failures
        )),
        SupervisorState::Draining { .. } => reasons.push(finishing(&clients, inside, seen)),
        SupervisorState::Stopped if seen.behind => reasons.push(finishing(&clients, inside, seen)),
        SupervisorState::Stopped
        | SupervisorState::Starting { .. }
        | SupervisorState::Found { .. }
        | SupervisorState::Ready { .. }
        | SupervisorState::Hung { .. }
        | SupervisorState::Fault { .. }
        | SupervisorState::BackingOff { .. }
        | SupervisorState::Stopping { .. } => {}
    }
    reasons
}

/// Returns a sentence that says until when the clients of a draining daemon may run.
fn finishing(clients: &str, inside: usize, seen: &DaemonReport) -> String {
    if seen.serves_leases {
        return for_leases(inside, seen);
    }
    let end = if inside == 1 { "is then ended" } else { "are then ended" };
    match seen.until {
        Some(until) => {
            let until = local_time(until);
            format!("no new client is admitted; {clients} may run until {until}, and {end}")
        }
        None => format!("no new client is admitted; {clients} may finish"),
    }
}

/// Returns a sentence that says that the daemon ends when the leases on its target have ended.
fn for_leases(inside: usize, seen: &DaemonReport) -> String {
    let clients = match inside {
        0 => String::new(),
        1 => " and its client".to_owned(),
        more => format!(" and its {more} clients"),
    };
    let end = match seen.until {
        Some(until) => format!(", at the latest at {}", until.round(Unit::Second).unwrap_or(until)),
        None => String::new(),
    };
    format!(
        "no new lease is granted; the daemon ends after the leases on its GPU or MIG device{clients} have ended{end}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mps::scene::{READY, report};

    fn hung(clients: usize) -> DaemonReport {
        let state = SupervisorState::Hung { pid: 1, silences: 2 };
        DaemonReport { clients: vec![(2, 3); clients], ..report(state) }
    }

    #[test]
    fn hung_daemon_stays_because_of_its_clients() {
        assert!(reasons(&report(READY), "0").is_empty() && reasons(&hung(0), "0").is_empty());
        let why = "gpushd does not restart the daemon, because that would end its client";
        assert_eq!(reasons(&hung(1), "0"), [why]);
        assert!(reasons(&hung(2), "0")[0].ends_with("its 2 clients"));
        let unknown = DaemonReport { clients_known: false, ..hung(0) };
        assert!(reasons(&unknown, "0:1g.10gb@1")[0].contains("`gpushctl mps restart 0:1g.10gb@1 --force`"));
    }

    #[test]
    fn draining_daemon_names_what_it_waits_for() {
        let state = SupervisorState::Draining { pid: 1, until: None, served: true };
        let draining = DaemonReport { clients: vec![(2, 3)], ..report(state) };
        assert_eq!(reasons(&draining, "0"), ["no new client is admitted; its client may finish"]);
        let until = Some(jiff::Timestamp::UNIX_EPOCH);
        let ends = DaemonReport { until, ..draining.clone() };
        let until = local_time(jiff::Timestamp::UNIX_EPOCH);
        let end = format!("no new client is admitted; its client may run until {until}, and is then ended");
        assert_eq!(reasons(&ends, "0"), [end]);
        let for_leases = DaemonReport { serves_leases: true, clients: Vec::new(), ..draining };
        let why = "no new lease is granted; the daemon ends after the leases on its GPU or MIG device have ended";
        assert_eq!(reasons(&for_leases, "0"), [why]);
    }
}
