//! MPS for people: what is shared, by whom it is used, and what a share is worth.
//!
//! | file | subject |
//! |---|---|
//! | `list` | the table of targets, and the line of one below its GPU |
//! | `show` | everything about one |
//! | `clients` | who computes there |
//! | `change` | what a change came to, and what is waited for |

pub(crate) mod change;
pub(crate) mod clients;
pub(crate) mod list;
pub(crate) mod show;

use anstyle::Style;
use gpush_api::{MemoryLimit, MpsDaemon, MpsServerState, MpsState};

use super::{
    Look, bar,
    look::{BAD, NEW, NOTE, QUIET, paint},
};

/// A state in words, and how loud it is.
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

/// What a state means where nobody explained it.
fn unexplained(state: MpsState) -> &'static str {
    match state {
        MpsState::Stopped | MpsState::Starting | MpsState::Ready | MpsState::Stopping => "",
        MpsState::Fault => "its server had a fatal fault, or ends when it is started",
        MpsState::Hung => "its control daemon runs but does not answer",
        MpsState::BackingOff => "its control daemon ended, and gpushd starts it again",
        MpsState::GivenUp => "its control daemon ended too often; an administrator must start it",
        MpsState::Draining => "no new clients; connected clients may finish",
    }
}

/// A state of a server in a word, and how loud it is.
fn server_state(state: MpsServerState) -> (&'static str, Style) {
    match state {
        MpsServerState::Initializing => ("starting", NOTE),
        MpsServerState::Active => ("active", NEW),
        MpsServerState::Fault => ("fault", BAD),
    }
}

/// Text in a style, word by word: a cell of a table breaks at blanks.
fn words(style: Style, text: &str) -> String {
    text.split(' ').map(|word| paint(style, word)).collect::<Vec<_>>().join(" ")
}

/// The target in words; by its short name, which is found as well, while the driver does not show its GPU.
pub(crate) fn label(daemon: &MpsDaemon, look: &Look) -> String {
    look.clean(&if daemon.gpu.is_some() { daemon.label() } else { daemon.target.clone() })
}

/// What to type to name it: the index of its GPU, `1:2g.20gb@2`, or its short name.
pub(crate) fn typed(daemon: &MpsDaemon, look: &Look) -> String {
    look.clean(&match (daemon.gpu, &daemon.device) {
        (Some(gpu), None) => gpu.to_string(),
        (Some(gpu), Some(device)) => format!("{gpu}:{device}"),
        (None, _) => daemon.target.clone(),
    })
}

/// A memory limit as it is typed, in GiB where it is whole: `8G`, `1536M`.
pub(crate) fn memory(limit: Option<MemoryLimit>) -> String {
    match limit {
        None => "all".to_owned(),
        Some(limit) if limit.mib() % 1024 == 0 => format!("{}G", limit.mib() / 1024),
        Some(limit) => limit.to_string(),
    }
}

/// A user by name, or by number; `None` where neither is known.
pub(super) fn user(name: Option<&String>, uid: Option<u32>, look: &Look) -> Option<String> {
    name.map(|name| look.clean(name)).or_else(|| uid.map(|uid| format!("uid {uid}")))
}

/// Whose it is now.
pub(crate) fn admitted(daemon: &MpsDaemon, look: &Look) -> Option<String> {
    user(daemon.user.as_ref(), daemon.uid, look)
}

/// Its clients and how many it may have: `2/48`, `?/48` where nobody can tell.
pub(crate) fn of_how_many(daemon: &MpsDaemon) -> String {
    let count = if daemon.clients_known { daemon.clients.len().to_string() } else { "?".to_owned() };
    format!("{count}/{}", daemon.wanted.max_clients)
}

/// The sum of the percentages of its leases and its limit, as a line and in figures.
fn given(daemon: &MpsDaemon, columns: usize, look: &Look) -> (String, String) {
    let line = bar::part(daemon.granted_percent.into(), daemon.wanted.shares_percent.into(), columns, look);
    (line, format!("{}/{}%", daemon.granted_percent, daemon.wanted.shares_percent))
}

/// Columns of that line.
fn bar_columns(look: &Look) -> usize {
    match look.width {
        0..100 => 8,
        100..140 => 12,
        _ => 20,
    }
}

/// What one should know about it, each a line or more after `first`; nothing when all is well.
pub(crate) fn notes(daemon: &MpsDaemon, first: &str, look: &Look) -> Vec<String> {
    let mut out = Vec::new();
    let mut note = |style: Style, text: &str| {
        out.extend(look.wrap(first, &look.clean(text)).iter().map(|line| paint(style, line)));
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
        note(style, &format!("{word}: {}", unexplained(daemon.state)));
    }
    for reason in &daemon.reasons {
        // One that serves may have something that is not as it should be: that is not why it is ready.
        let plain = reason.starts_with(word) || daemon.state == MpsState::Ready;
        note(style, &if plain { reason.clone() } else { format!("{word}: {reason}") });
    }
    if let (MpsState::BackingOff, Some(next)) = (daemon.state, daemon.next_start_at) {
        let ahead = look.ahead(next);
        note(
            style,
            &match daemon.failures {
                // Nothing of its own is wrong: something is in its way, and the reasons say what.
                0 => format!("it has not failed; gpushd checks again {ahead}"),
                1 => format!("it has failed once; started again {ahead}"),
                times => format!("it has failed {times} times; started again {ahead}"),
            },
        );
    }
    for finding in &daemon.findings {
        note(NOTE, finding);
    }
    out
}

/// What to type about it, where there is something to do by hand.
fn way_out(daemon: &MpsDaemon, look: &Look) -> Option<String> {
    let target = typed(daemon, look);
    let what = match daemon.state {
        MpsState::Fault | MpsState::Hung => {
            format!(
                "`gpushctl mps logs {target}` shows more; `gpushctl mps restart {target} --force` replaces it, and \
                ends its clients (administrator)"
            )
        }
        MpsState::BackingOff => format!("`gpushctl mps logs {target}` shows more (administrator)"),
        MpsState::GivenUp => {
            format!(
                "`gpushctl mps logs {target}` shows more, `gpushctl mps start {target}` tries again \
                (administrator)"
            )
        }
        MpsState::Stopped | MpsState::Starting | MpsState::Ready | MpsState::Draining | MpsState::Stopping => {
            return None;
        }
    };
    Some(what)
}

/// A quiet mark for what is not there or not known.
const NONE: &str = "-";

/// A heading of a part.
fn section(name: &str) -> String {
    paint(super::look::STRONG, name) + "\n"
}
