//! The processes that use an instance, as a text that fits into the available width.

use gpush_api::{Process, ProcessKind};

use super::{Appearance, appearance::width};

/// Text for a process of another user whose details are hidden.
pub(crate) const ANOTHER: &str = "used by another user";

/// Text for a process whose user gpushd could not find out. It may belong to the caller.
pub(crate) const UNIDENTIFIED: &str = "user not known yet";

/// Describes a process: `alice 4123 /usr/bin/python train.py`. Leaves out details that are hidden.
pub(crate) fn process(process: &Process, look: &Appearance) -> String {
    let command = process.command.as_deref().unwrap_or_default();
    format!("{} {}", name(process, look), look.clean(command)).trim_end().to_owned()
}

/// Describes a process as [`process`] does, but leaves out the directory of the program.
pub(crate) fn brief(process: &Process, look: &Appearance) -> String {
    let command = process.command.as_deref().unwrap_or_default();
    let (program, arguments) = command.split_once(' ').unwrap_or((command, ""));
    let program = program.rsplit('/').next().unwrap_or(program);
    let text = format!("{} {} {}", name(process, look), look.clean(program), look.clean(arguments));
    text.trim_end().to_owned()
}

/// Returns `alice 4123`, without the command.
fn name(process: &Process, look: &Appearance) -> String {
    let user = match (&process.user, process.uid) {
        (Some(user), _) => Some(look.clean(user)),
        (None, Some(uid)) => Some(format!("uid {uid}")),
        (None, None) => None,
    };
    match (user, process.pid) {
        (Some(user), Some(pid)) => format!("{user} {pid}"),
        (Some(user), None) => user,
        (None, Some(pid)) => format!("pid {pid}"),
        (None, None) if process.unidentified => UNIDENTIFIED.to_owned(),
        (None, None) => ANOTHER.to_owned(),
    }
}

/// Describes processes in one line of `room` columns: as many names as fit, and then the number of further processes.
/// If there is only one process, also shows its command.
pub(crate) fn line(processes: &[&Process], room: usize, look: &Appearance) -> String {
    match processes {
        [] => String::new(),
        [one] => look.fit(&brief(one, look), room),
        all if !look.wraps => all.iter().map(|one| brief(one, look)).collect::<Vec<_>>().join(", "),
        all => {
            let mut names: Vec<String> = Vec::new();
            let mut hidden = 0;
            for process in all {
                if name(process, look) == ANOTHER {
                    hidden += 1;
                } else {
                    names.push(name(process, look));
                }
            }
            // Count all hidden processes as one, because their number does not matter.
            if hidden > 0 {
                names.push(if names.is_empty() { ANOTHER.to_owned() } else { "another user".to_owned() });
            }
            for shown in (1..=names.len()).rev() {
                let more = names.len() - shown;
                let mut text = names[..shown].join(", ");
                if more > 0 {
                    text += &format!(" +{more}");
                }
                if width(&text) <= room || shown == 1 {
                    return look.fit(&text, room);
                }
            }
            String::new()
        }
    }
}

/// Returns the minimum width that [`fn@line`] needs for the complete first name and the number of further processes.
pub(crate) fn least(processes: &[&Process], look: &Appearance) -> usize {
    let others = processes.len().saturating_sub(1);
    let count = if others > 0 { format!(" +{others}").len() } else { 0 };
    processes.first().map_or(0, |first| width(&name(first, look)) + count)
}

/// Returns what a process uses the GPU for.
pub(crate) fn kind(kind: ProcessKind) -> &'static str {
    match kind {
        ProcessKind::Compute => "compute",
        ProcessKind::Graphics => "graphics",
        ProcessKind::MpsClient => "MPS client",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn process_names_become_a_count_if_space_is_short() {
        let look = fixtures::look(80, Charset::Utf8);
        let alice = fixtures::process(4123, "alice", "python train.py", 100);
        let bob = fixtures::process(991, "bob", "jupyter", 100);
        let hidden = fixtures::hidden();
        let line = |all: &[&Process], room| line(all, room, &look);
        assert_eq!(line(&[], 20), "");
        assert_eq!(line(&[&alice], 40), "alice 4123 python train.py");
        assert_eq!(line(&[&alice], 20), "alice 4123 python t…");
        let deep = fixtures::process(7, "bob", "/opt/env/bin/python /srv/train.py", 100);
        assert_eq!(line(&[&deep], 40), "bob 7 python /srv/train.py");
        assert_eq!(process(&deep, &look), "bob 7 /opt/env/bin/python /srv/train.py");
        assert_eq!(line(&[&alice, &bob], 20), "alice 4123, bob 991");
        assert_eq!(line(&[&alice, &bob, &alice], 20), "alice 4123 +2");
        assert_eq!(line(&[&hidden], 40), ANOTHER);
        assert_eq!(line(&[&hidden, &hidden], 40), ANOTHER);
        assert_eq!(line(&[&hidden, &bob, &hidden], 40), "bob 991, another user");
        assert_eq!(line(&[&hidden, &bob], 12), "bob 991 +1");
        // Fault: on a busy host, a lease's own process was shown as a process of another user.
        let unidentified = Process { unidentified: true, ..hidden };
        assert_eq!(line(&[&unidentified], 40), "user not known yet");
        assert_eq!(line(&[&unidentified, &bob], 40), "user not known yet, bob 991");
        assert_eq!(line(&[&alice, &bob], 8), "alice 4…");
    }
}
