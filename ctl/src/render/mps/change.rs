//! Results of MPS commands, what these commands wait for, and new log lines.

use gpush_api::{MpsDaemon, MpsLog, MpsLogs, MpsSetResponse, MpsState};

use super::{clients, displayed_argument, label, memory, notes, remedy, state};
use crate::render::{
    Appearance,
    appearance::{NOTE, QUIET, count, paint},
    trouble,
};

/// Draws a target as one line with its notes, after a start, stop, restart or drain. `in_maintenance` matters because
/// gpushd starts no daemons during maintenance.
pub(crate) fn ended(daemon: &MpsDaemon, in_maintenance: bool, look: &Appearance) -> String {
    let (word, style) = state(daemon.state);
    let what = match (daemon.state, daemon.pid) {
        (MpsState::Ready, Some(pid)) => format!(", its daemon has pid {pid}"),
        (MpsState::Stopped, _) if daemon.ends.is_some() => "; the daemon is no longer needed".to_owned(),
        (MpsState::Stopped, _) if in_maintenance => {
            format!(
                "; after `gpushctl maintenance leave`, `gpushctl mps start {}` starts the daemon again",
                displayed_argument(daemon, look)
            )
        }
        (MpsState::Stopped, _) => {
            format!("; `gpushctl mps start {}` starts the daemon again", displayed_argument(daemon, look))
        }
        _ => String::new(),
    };
    let first = format!("{}: ", label(daemon, look));
    let lines = look.wrap(&first, &format!("{word}{what}"));
    // Color only the state, which is the first occurrence of `word`.
    let mut out = lines.join("\n").replacen(word, &paint(style, word), 1) + "\n";
    for line in notes(daemon, "  ! ", look) {
        out += &(line + "\n");
    }
    // The first line already names the command that starts a stopped daemon.
    let remedy = remedy(daemon, look).filter(|_| daemon.state != MpsState::Stopped);
    for line in remedy.iter().flat_map(|text| look.wrap("", text)) {
        out += &(paint(NOTE, &line) + "\n");
    }
    out
}

/// Says that a daemon was not stopped in time, and which clients prevented it.
pub(crate) fn not_stopped(daemon: &MpsDaemon, look: &Appearance) -> String {
    let who = match daemon.clients.as_slice() {
        [] => String::new(),
        clients => format!("; still connected: {}", clients::names(clients, look)),
    };
    let text = format!("the daemon was not stopped, and admits new clients again{who}");
    look.wrap(&format!("{}: ", label(daemon, look)), &text).join("\n") + "\n"
}

/// Describes in one line what a command waits for.
pub(crate) fn waits(daemon: &MpsDaemon, look: &Appearance) -> String {
    let (word, _) = state(daemon.state);
    let who = match daemon.state {
        MpsState::Draining | MpsState::Stopping if !daemon.clients.is_empty() => {
            format!("; still connected: {}", clients::names(&daemon.clients, look))
        }
        MpsState::BackingOff => daemon.next_start_at.map_or_else(String::new, |at| {
            // If the daemon has not failed, its first reason is what it waits for.
            let waits = daemon.reasons.first().filter(|_| daemon.failures == 0);
            let what = waits.map_or(", restarts", |_| ", next check");
            let why = waits.map_or_else(String::new, |reason| format!(": {}", look.clean(reason)));
            format!("{what} {}{why}", look.ahead(at))
        }),
        MpsState::Stopped
        | MpsState::Starting
        | MpsState::Ready
        | MpsState::Fault
        | MpsState::Hung
        | MpsState::GivenUp
        | MpsState::Draining
        | MpsState::Stopping => String::new(),
    };
    format!("{}: {word}{who}", label(daemon, look))
}

/// Draws the result of `gpushctl mps set`.
pub(crate) fn set(set: &MpsSetResponse, look: &Appearance) -> String {
    let daemon = &set.daemon;
    let mut out = match &daemon.in_force {
        Some(now) => format!(
            "{}: {} % for each client, memory {}, priority {}\n",
            label(daemon, look),
            now.percentage,
            memory(now.memory_limit_mib),
            now.priority
        ),
        None => format!(
            "{}: the limits take effect when the daemon answers; its state is {}\n",
            label(daemon, look),
            state(daemon.state).0
        ),
    };
    for text in &set.reaches {
        out += &(look.wrap("  ", &look.clean(text)).join("\n") + "\n");
    }
    for line in notes(daemon, "  ! ", look) {
        out += &(line + "\n");
    }
    out
}

/// Draws the lines of logs. If there are several logs, each one starts with its path.
pub(crate) fn logs(logs: &MpsLogs, look: &Appearance) -> String {
    let text: Vec<String> = logs.files.iter().map(|file| log(file, logs.files.len() > 1, look)).collect();
    text.join(if logs.files.len() > 1 { "\n" } else { "" })
}

/// Draws new lines of logs. `named` says whether to draw the paths of the logs.
pub(crate) fn more_logs(new: &MpsLogs, named: bool, look: &Appearance) -> String {
    new.files.iter().map(|file| log(file, named, look)).collect()
}

fn log(file: &MpsLog, named: bool, look: &Appearance) -> String {
    let name = if named { paint(QUIET, &format!("==> {} <==", look.clean(&file.path))) + "\n" } else { String::new() };
    let mut out = name;
    out.extend(file.lines.iter().map(|line| look.clean(line) + "\n"));
    if let Some(error) = &file.error {
        let lines = trouble::lines("!", error, 0, look);
        out += &(lines.join("\n") + "\n");
    } else if file.lines.is_empty() && file.left_out > 0 {
        let what = format!("({}, all about gpushd's own requests: `--all` shows them)", count(file.left_out, "line"));
        out += &(paint(QUIET, &what) + "\n");
    } else if file.lines.is_empty() {
        out += &(paint(QUIET, "(empty)") + "\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn stopped_daemon_starts_only_after_maintenance() {
        let daemon = MpsDaemon { state: MpsState::Stopped, pid: None, ..fixtures::mps::daemon(0) };
        let look = fixtures::look(120, Charset::Ascii);
        let text = |in_maintenance| fixtures::plain(&ended(&daemon, in_maintenance, &look));
        assert!(text(true).contains("after `gpushctl maintenance leave`, `gpushctl mps start 0`"), "{}", text(true));
        assert!(!text(false).contains("maintenance"), "{}", text(false));
    }
}
