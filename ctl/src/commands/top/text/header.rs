//! The lines about the host: versions, leases, and what is wrong.

use gpush_api::{HealthStatus, LeaseState, UseState};

use crate::{
    commands::top::answers::HostAnswers,
    render::{
        Appearance,
        appearance::{BAD, NOTE, QUIET, count, paint, width},
        status,
    },
};

/// Maximum number of errors that are shown; `gpushctl status` shows all.
const MOST_ERRORS: usize = 2;

/// Whether gpushd answers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in super::super) enum Connection {
    /// gpushd has answered the last request.
    #[default]
    Answers,
    /// The last request failed.
    Failed { message: String },
}

/// Draws the lines above the list.
pub(in super::super) fn lines(answers: &HostAnswers, connection: &Connection, look: &Appearance) -> Vec<String> {
    let mut out = Vec::new();
    if let Connection::Failed { message } = connection {
        let text = format!("! the figures are {} old: {}", look.since(answers.at), look.clean(message));
        out.push(paint(BAD, &look.fit(&text, look.width)));
    }
    out.extend(status::title(&answers.status, look));
    let (leases, clock) = (leases(answers), look.clock(answers.at));
    // A narrow terminal has no room for the time.
    let fill = look.width.checked_sub(width(&leases) + width(&clock)).filter(|fill| *fill >= 2);
    let clock = fill.map_or_else(String::new, |fill| format!("{}{}", " ".repeat(fill), paint(QUIET, &clock)));
    out.push(format!("{}{clock}", look.fit(&leases, look.width)));
    if answers.status.health.status == HealthStatus::Degraded {
        out.extend(errors(answers, look));
    }
    if let Some(error) = &answers.processes_error {
        let text = format!("! processes are not known: {}", look.clean(error));
        out.push(paint(NOTE, &look.fit(&text, look.width)));
    }
    out
}

fn errors(answers: &HostAnswers, look: &Appearance) -> Vec<String> {
    let errors = &answers.status.health.errors;
    let shown = if errors.len() == MOST_ERRORS + 1 { errors.len() } else { MOST_ERRORS.min(errors.len()) };
    let line = |text: &str| paint(BAD, &look.fit(&format!("! {}", look.clean(text)), look.width));
    let mut out: Vec<String> = errors[..shown].iter().map(|error| line(&error.message)).collect();
    if shown < errors.len() {
        out.push(line(&format!("{} more errors: `gpushctl status` shows them", errors.len() - shown)));
    }
    out
}

/// Counts the leases: `5 leases: 2 busy, 1 idle; 1 waits`.
fn leases(answers: &HostAnswers) -> String {
    let leases = &answers.status.leases;
    let holding: Vec<_> = leases.iter().filter(|lease| lease.state.holds_capacity()).collect();
    let mut text = count(holding.len(), "lease");
    let state = |id| answers.usage.lease_usage.iter().find(|usage| usage.lease_id == id).map(|usage| usage.state);
    let parts = UseState::ALL.iter().filter_map(|of| {
        let number = holding.iter().filter(|lease| state(lease.id) == Some(*of)).count();
        (number > 0).then(|| format!("{number} {}", of.name()))
    });
    let parts: Vec<String> = parts.collect();
    if !parts.is_empty() {
        text += &format!(": {}", parts.join(", "));
    }
    let waiting = leases.iter().filter(|lease| lease.state == LeaseState::Queued).count();
    if waiting > 0 {
        text += &format!("; {waiting} {}", if waiting == 1 { "waits" } else { "wait" });
    }
    text
}
