//! All details of an MPS target.

use gpush_api::{Lease, MemberShare, MpsComputeMode, MpsDaemon, MpsState, MpsUsers};

use super::{
    NONE, clients, current_user, displayed_argument, granted_bar, label, memory, notes, paint_words, remedy, section,
    server_state, state, user,
};
use crate::render::{
    Appearance,
    appearance::{NOTE, QUIET, STRONG, count, pad, paint},
    lease,
    table::{Align, Narrow, fitted, table},
};

/// Number of blanks at the beginning of each line below a heading.
const INDENT: usize = 2;

/// Width of the column with the names of values, such as `state`.
const NAMES: usize = 14;

/// Draws `gpushctl mps show`.
pub(crate) fn show(daemon: &MpsDaemon, look: &Appearance) -> String {
    let (word, style) = state(daemon.state);
    let heading = paint(STRONG, &label(daemon, look));
    let mut out = format!("{heading}  {}, since {}\n", paint(style, word), look.ago(daemon.since));
    out += &daemon_facts(daemon, look);
    out += &(notes(daemon, "  ! ", look).join("\n") + "\n");
    if let Some(text) = remedy(daemon, look) {
        let lines = look.wrap("  ", &text);
        out += &(lines.iter().map(|line| paint(NOTE, line)).collect::<Vec<_>>().join("\n") + "\n");
    }
    // Without notes, the text already ends with an empty line. Remove it.
    out.truncate(out.trim_end().len());
    out += "\n\n";
    out += &settings(daemon, look);
    out += &format!("\n{}", section("Servers"));
    out += &servers(daemon, look);
    out += &format!("\n{}", section("Clients"));
    out += &if daemon.clients.is_empty() {
        clients::no_clients()
    } else {
        clients::table(std::slice::from_ref(daemon), false, INDENT, look)
    };
    let (bar, figures) = granted_bar(daemon, 20, look);
    out += &format!("\n{}  {bar} {figures}\n", paint(STRONG, "Leases"));
    out += &leases(daemon, look);
    out
}

/// Draws a name and its value. A long value continues on the next lines, in its column.
fn fact(name: &str, value: &str, look: &Appearance) -> String {
    let first = format!("  {}", pad(name, NAMES));
    let lines = look.wrap(&first, value).into_iter().map(|line| match line.strip_prefix(&first) {
        Some(rest) => format!("{}{rest}\n", paint(QUIET, &first)),
        None => line + "\n",
    });
    lines.collect()
}

/// Draws facts about the daemon: its identity, process, user and directories.
fn daemon_facts(daemon: &MpsDaemon, look: &Appearance) -> String {
    let mut out = fact("UUID", &look.clean(daemon.uuid.as_str()), look);
    out += &fact("short name", &look.clean(&daemon.target), look);
    let spoken = daemon.protocol.as_ref().map_or_else(String::new, |how| format!(", {}", look.clean(how)));
    let pid = daemon.pid.map_or_else(|| "none".to_owned(), |pid| format!("pid {pid}{spoken}"));
    out += &fact("daemon", &pid, look);
    let whose =
        match (daemon.state, current_user(daemon, look).filter(|_| !daemon.leases.is_empty()), daemon.wanted.users) {
            (MpsState::Ready, Some(user), MpsUsers::One) => {
                format!("{user}; others when the leases of {user} have ended")
            }
            (MpsState::Ready, Some(user), MpsUsers::Many) => format!("{user}, and other users"),
            (MpsState::Ready, None, _) => "no user: there is no lease".to_owned(),
            (other, ..) => format!("no user: {}", state(other).0),
        };
    out += &fact("admitted", &whose, look);
    // `fact` breaks lines only at blanks. A path has none, so users can copy it.
    for (name, path) in [("sockets", &daemon.pipe_directory), ("logs", &daemon.log_directory)] {
        if let Some(path) = path {
            out += &fact(name, &look.clean(path), look);
        }
    }
    out
}

/// Draws a table of the desired settings and of those that the daemon reports, with a mark where
/// they differ.
fn settings(daemon: &MpsDaemon, look: &Appearance) -> String {
    let wanted = &daemon.wanted.settings;
    let in_force = daemon.in_force.as_ref();
    // The daemon reports memory only in whole GiB, so ignore a smaller difference.
    let mib = |limit: Option<gpush_api::MemoryLimit>| limit.map(gpush_api::MemoryLimit::mib);
    let same_memory = |other| match (mib(wanted.memory_limit_mib), mib(other)) {
        (Some(wanted), Some(other)) => wanted.abs_diff(other) < 1024,
        (Some(wanted), None) => wanted < 1024,
        (None, Some(_)) => false,
        (None, None) => true,
    };
    let row = |name: &str, wanted: String, other: Option<(String, bool)>| {
        let (value, same) = other.unwrap_or_else(|| (NONE.to_owned(), true));
        let mark = if same { String::new() } else { paint_words(NOTE, "! not as desired") };
        vec![name.to_owned(), wanted, value, mark]
    };
    let rows = vec![
        row(
            "percentage",
            wanted.percentage.to_string(),
            in_force.map(|now| (now.percentage.to_string(), now.percentage == wanted.percentage)),
        ),
        row(
            "memory limit",
            memory(wanted.memory_limit_mib),
            in_force.map(|now| (memory(now.memory_limit_mib), same_memory(now.memory_limit_mib))),
        ),
        row(
            "priority",
            wanted.priority.to_string(),
            in_force.map(|now| (now.priority.to_string(), now.priority == wanted.priority)),
        ),
    ];
    let columns =
        [("EACH CLIENT", Align::Left), ("WANTED", Align::Right), ("IN FORCE", Align::Right), ("", Align::Left)];
    let mut out = section("Settings") + &table(&columns, rows, INDENT, look);
    if let Some(rule) = &daemon.rule {
        let text = format!(
            "by an administrator; `gpushctl mps set {} --reset` restores the values of the rule: {} %, memory {}, \
            priority {}",
            displayed_argument(daemon, look),
            rule.percentage,
            memory(rule.memory_limit_mib),
            rule.priority
        );
        out += &fact("set", &text, look);
    }
    let policy = &daemon.wanted;
    let users = match policy.users {
        MpsUsers::One => "of one user at a time",
        MpsUsers::Many => "of any users: one server, which runs as root, serves them all",
    };
    out += &fact("clients", &format!("{} at most, {users}", policy.max_clients), look);
    let over = if policy.total_percentage > 100 { ", more than the GPU has" } else { "" };
    out += &fact("leases", &format!("at most {} % in total{over}", policy.total_percentage), look);
    if daemon.device.is_none() {
        let mode = match policy.compute_mode {
            MpsComputeMode::ExclusiveProcess => "exclusive process: programs cannot bypass MPS",
            MpsComputeMode::Keep => "not changed: programs can bypass MPS",
        };
        out += &fact("compute mode", mode, look);
    }
    out
}

fn servers(daemon: &MpsDaemon, look: &Appearance) -> String {
    if daemon.servers.is_empty() {
        return paint(QUIET, "  none: the first client starts one") + "\n";
    }
    let row = |server: &gpush_api::MpsServer| {
        let state = server.state.map_or_else(
            || "not known".to_owned(),
            |state| {
                let (word, style) = server_state(state);
                paint_words(style, word)
            },
        );
        let serves = server.pid.map_or_else(
            || NONE.to_owned(),
            |pid| count(daemon.clients.iter().filter(|client| client.server == Some(pid)).count(), "client"),
        );
        vec![
            server.pid.map_or_else(|| NONE.to_owned(), |pid| pid.to_string()),
            user(server.user.as_ref(), server.uid, look).unwrap_or_else(|| NONE.to_owned()),
            state,
            serves,
        ]
    };
    let columns = [("PID", Align::Right), ("USER", Align::Left), ("STATE", Align::Left), ("SERVES", Align::Left)];
    table(&columns, daemon.servers.iter().map(row).collect(), INDENT, look)
}

fn leases(daemon: &MpsDaemon, look: &Appearance) -> String {
    use Align::{Left, Right};
    if daemon.leases.is_empty() {
        return paint(QUIET, "  none") + "\n";
    }
    let columns = [
        ("LEASE", Left),
        ("USER", Left),
        ("STATE", Left),
        ("PERCENT", Right),
        ("MEMORY", Right),
        ("PRIORITY", Left),
        ("ENDS", Left),
    ];
    let row = |lease: &Lease| {
        let settings = lease.members.iter().find(|member| member.target == daemon.uuid).map(|member| &member.share);
        let (percent, limit, priority) = match settings {
            Some(MemberShare::Mps { percentage, memory_limit_mib, priority }) => {
                (percentage.to_string(), memory(*memory_limit_mib), priority.to_string())
            }
            Some(_) | None => (NONE.to_owned(), NONE.to_owned(), NONE.to_owned()),
        };
        let (word, style) = lease::state(lease.state);
        vec![
            lease.id.to_string(),
            user(lease.holder.user.as_ref(), Some(lease.holder.uid), look).unwrap_or_default(),
            paint(style, word),
            percent,
            limit,
            priority,
            lease::end(lease, look),
        ]
    };
    let narrow = Narrow::spare(&["PRIORITY", "MEMORY"]).prose();
    fitted(&columns, daemon.leases.iter().map(row).collect(), narrow, INDENT, look)
}
