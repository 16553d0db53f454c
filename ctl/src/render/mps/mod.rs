//! MPS as text: targets, their users, and their settings.
//!
//! | file | subject |
//! |---|---|
//! | `list` | the table of targets, and the lines of targets below their GPU |
//! | `show` | all details of a target |
//! | `clients` | the clients of targets |
//! | `change` | results of commands, and what they wait for |

pub(crate) mod change;
pub(crate) mod clients;
pub(crate) mod list;
pub(crate) mod show;

use anstyle::Style;
use gpush_api::{MemoryLimit, MpsDaemon, MpsServerState, MpsState};

use super::{
    Appearance,
    appearance::{BAD, NEW, NOTE, QUIET, paint},
    bar,
};

/// Returns a state as text, with its style.
pub(crate) fn state(state: MpsState) -> (&'static str, Style) {
    match state {
        MpsState::Stopped => ("stopped", QUIET),
        MpsState::Starting => ("starting", NOTE),
        MpsState::Ready => ("ready", NEW),
        MpsState::Fault => ("fault", BAD),
        MpsState::Hung => ("hung", BAD),
        MpsState::BackingOff => ("backing off", BAD),
        MpsState::GivenUp => ("given up", BAD),
        MpsState::Draining => ("draining", NOTE),
        MpsState::Stopping => ("stopping", NOTE),
    }
}

/// Returns an explanation for a state for which gpushd gives no reason.
fn unexplained(state: MpsState) -> &'static str {
    match state {
        MpsState::Stopped | MpsState::Starting | MpsState::Ready | MpsState::Stopping => "",
        MpsState::Fault => "its server had a fatal fault, or ends right after its start",
        MpsState::Hung => "its control daemon runs but does not answer",
        MpsState::BackingOff => "its control daemon ended, and gpushd starts it again",
        MpsState::GivenUp => "its control daemon ended too often; an administrator must start it",
        MpsState::Draining => "no new clients; connected clients may finish",
    }
}

fn server_state(state: MpsServerState) -> (&'static str, Style) {
    match state {
        MpsServerState::Initializing => ("starting", NOTE),
        MpsServerState::Active => ("active", NEW),
        MpsServerState::Fault => ("fault", BAD),
    }
}

/// Colors each word separately, because a table breaks its cells at blanks.
fn paint_words(style: Style, text: &str) -> String {
    text.split(' ').map(|word| paint(style, word)).collect::<Vec<_>>().join(" ")
}

/// Returns the name of a target in messages. If the driver does not list its GPU, returns the short name, which
/// commands also accept.
pub(crate) fn label(daemon: &MpsDaemon, look: &Appearance) -> String {
    look.clean(&if daemon.gpu.is_some() { daemon.label() } else { daemon.target.clone() })
}

/// Returns the name of a target in commands: the index of its GPU, `1:2g.20gb@2`, or its short name.
pub(crate) fn displayed_argument(daemon: &MpsDaemon, look: &Appearance) -> String {
    look.clean(&argument(daemon))
}

/// Returns the same name as [`displayed_argument`], with all characters, even if the terminal cannot show them.
pub(crate) fn argument(daemon: &MpsDaemon) -> String {
    match (daemon.gpu, &daemon.device) {
        (Some(gpu), None) => gpu.to_string(),
        (Some(gpu), Some(device)) => format!("{gpu}:{device}"),
        (None, _) => daemon.target.clone(),
    }
}

/// Formats a memory limit as a user types it: in GiB if possible, such as `8G`, else in MiB, such as `1536M`.
pub(crate) fn memory(limit: Option<MemoryLimit>) -> String {
    match limit {
        None => "all".to_owned(),
        Some(limit) if limit.mib() % 1024 == 0 => format!("{}G", limit.mib() / 1024),
        Some(limit) => limit.to_string(),
    }
}

/// Returns the name of a user, or else the uid. `None` if neither is known.
pub(super) fn user(name: Option<&String>, uid: Option<u32>, look: &Appearance) -> Option<String> {
    name.map(|name| look.clean(name)).or_else(|| uid.map(|uid| format!("uid {uid}")))
}

/// Returns the user that a daemon serves now.
pub(crate) fn current_user(daemon: &MpsDaemon, look: &Appearance) -> Option<String> {
    user(daemon.user.as_ref(), daemon.uid, look)
}

/// Returns how many clients a daemon has and may have: `2/48`. The first number is `?` if it is not known.
pub(crate) fn of_how_many(daemon: &MpsDaemon) -> String {
    let count = if daemon.clients_known { daemon.clients.len().to_string() } else { "?".to_owned() };
    format!("{count}/{}", daemon.wanted.max_clients)
}

/// Returns the sum of the percentages of all leases and the limit of this sum: as a bar, and as text.
fn granted_bar(daemon: &MpsDaemon, columns: usize, look: &Appearance) -> (String, String) {
    let line = bar::part(daemon.granted_percent.into(), daemon.wanted.total_percentage.into(), columns, look);
    (line, format!("{}/{}%", daemon.granted_percent, daemon.wanted.total_percentage))
}

/// Returns the width of the bar of `granted_bar`.
fn bar_columns(look: &Appearance) -> usize {
    match look.width {
        0..100 => 8,
        100..140 => 12,
        _ => 20,
    }
}

/// Returns the notes about a daemon; none if all is well. Each note starts with `first` and has one or more lines. If a
/// note is about a state that a user requested, it has the mark `*` instead of `!`.
pub(crate) fn notes(daemon: &MpsDaemon, first: &str, look: &Appearance) -> Vec<String> {
    let mut out = Vec::new();
    // `first` already names the target, so remove the name of the target from the texts.
    let names = [Some(daemon.label()), daemon.gpu.map(|gpu| format!("GPU {gpu}"))];
    let unnamed = |text: &str| {
        let mut prefixes = names.iter().flatten().map(|name| format!("{name}: "));
        prefixes.find_map(|prefix| text.strip_prefix(&prefix).map(str::to_owned)).unwrap_or_else(|| text.to_owned())
    };
    let requested = match daemon.state {
        MpsState::Stopped | MpsState::Starting | MpsState::Draining | MpsState::Stopping => {
            Some(first.replacen('!', "*", 1))
        }
        MpsState::Ready | MpsState::Fault | MpsState::Hung | MpsState::BackingOff | MpsState::GivenUp => None,
    };
    let requested = requested.as_deref().unwrap_or(first);
    let mut note = |first: &str, style: Style, text: &str| {
        out.extend(look.wrap(first, &look.clean(&unnamed(text))).iter().map(|line| paint(style, line)));
    };
    let (word, style) = state(daemon.state);
    let style = match daemon.state {
        MpsState::Ready | MpsState::Stopped => NOTE,
        MpsState::Starting
        | MpsState::Fault
        | MpsState::Hung
        | MpsState::BackingOff
        | MpsState::GivenUp
        | MpsState::Draining
        | MpsState::Stopping => style,
    };
    if daemon.reasons.is_empty() && !unexplained(daemon.state).is_empty() {
        note(requested, style, &format!("{word}: {}", unexplained(daemon.state)));
    }
    for reason in &daemon.reasons {
        // If the daemon is ready, a reason describes only a problem, not the state. So leave out the word for the
        // state.
        let is_ready = daemon.state == MpsState::Ready;
        note(requested, style, &if is_ready { reason.clone() } else { format!("{word}: {}", unnamed(reason)) });
    }
    if let (MpsState::BackingOff, Some(next)) = (daemon.state, daemon.next_start_at) {
        let ahead = look.ahead(next);
        note(
            first,
            style,
            &match daemon.failures {
                // The daemon has not failed. The reasons say what gpushd waits for before it starts the daemon.
                0 => format!("the daemon has not failed; gpushd checks again {ahead}"),
                1 => format!("the daemon has failed once; gpushd restarts it {ahead}"),
                times => format!("the daemon has failed {times} times; gpushd restarts it {ahead}"),
            },
        );
    }
    for finding in &daemon.findings {
        note(first, NOTE, finding);
    }
    out
}

/// Returns the commands with which the user can solve the problem of a daemon, if any.
fn remedy(daemon: &MpsDaemon, look: &Appearance) -> Option<String> {
    let target = displayed_argument(daemon, look);
    let what = match daemon.state {
        MpsState::Fault | MpsState::Hung => {
            format!(
                "an administrator can see more with `gpushctl mps logs {target}`, or replace the daemon and end its \
                clients with `gpushctl mps restart {target} --force`"
            )
        }
        MpsState::BackingOff => format!("an administrator can see more with `gpushctl mps logs {target}`"),
        MpsState::GivenUp => {
            format!(
                "an administrator can see more with `gpushctl mps logs {target}`, and start the daemon again with \
                `gpushctl mps start {target}`"
            )
        }
        MpsState::Stopped if daemon.stays_stopped => {
            format!("an administrator stopped the daemon, and can start it again with `gpushctl mps start {target}`")
        }
        MpsState::Stopped | MpsState::Starting | MpsState::Ready | MpsState::Draining | MpsState::Stopping => {
            return None;
        }
    };
    Some(what)
}

/// Text for a missing or unknown value.
const NONE: &str = "-";

/// Returns the heading of a section.
fn section(name: &str) -> String {
    paint(super::appearance::STRONG, name) + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn note_does_not_repeat_the_name_of_its_target() {
        let look = fixtures::look(100, Charset::Ascii);
        let mut one = fixtures::mps::daemon(4);
        let printed = |daemon: &MpsDaemon| {
            fixtures::plain(&notes(daemon, &format!("! {}: ", label(daemon, &look)), &look).join("\n"))
        };
        one.findings = vec!["GPU 4: its compute mode cannot be read".to_owned()];
        assert_eq!(printed(&one), "! GPU 4: its compute mode cannot be read");
        one.findings = vec!["GPU 5: its compute mode cannot be read".to_owned()];
        assert!(printed(&one).contains("GPU 4: GPU 5: "), "another GPU is named");
        one.findings.clear();
        (one.state, one.reasons) = (MpsState::Hung, vec!["GPU 4: no answer".to_owned()]);
        assert_eq!(printed(&one), "! GPU 4: hung: no answer");
    }
}
