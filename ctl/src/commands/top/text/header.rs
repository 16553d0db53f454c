//! The lines about the host: versions, leases, and what is wrong.

use anstream::adapter::strip_str;
use gpush_api::{ApiError, HealthStatus, LeaseState, UseState};
use jiff::SignedDuration;

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

/// Age of a sample from which on the picture mentions it. While a client watches, gpushd samples once a second.
const OLD: SignedDuration = SignedDuration::from_secs(5);

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
    out.extend(status::title(&answers.status, look).into_iter().map(|line| narrowed(line, look)));
    let (leases, clock) = (leases(answers), look.clock(answers.at));
    // A narrow terminal has no room for the time.
    let fill = look.width.checked_sub(width(&leases) + width(&clock)).filter(|fill| *fill >= 2);
    let clock = fill.map_or_else(String::new, |fill| format!("{}{}", " ".repeat(fill), paint(QUIET, &clock)));
    out.push(format!("{}{clock}", look.fit(&leases, look.width)));
    if answers.status.health.status == HealthStatus::Degraded {
        out.extend(errors(answers, look));
    }
    let age = answers.oldest_sample().map(|at| (at, answers.at.duration_since(at)));
    if let (Some((at, _)), Connection::Answers) = (age.filter(|(_, age)| *age > OLD), connection) {
        let text = format!("! the last sample is {} old", Appearance { now: answers.at, ..*look }.since(at));
        out.push(paint(NOTE, &look.fit(&text, look.width)));
    }
    if let Some(error) = &answers.processes_error {
        let text = format!("! processes are not known: {}", look.clean(error));
        out.push(paint(NOTE, &look.fit(&text, look.width)));
    }
    out
}

/// Cuts a line that is too wide for the terminal, and marks the cut. The line loses its colors.
fn narrowed(line: String, look: &Appearance) -> String {
    let plain = strip_str(&line).to_string();
    if width(&plain) <= look.width { line } else { look.fit(&plain, look.width) }
}

fn errors(answers: &HostAnswers, look: &Appearance) -> Vec<String> {
    // A message names its GPU by the UUID.
    let is_of_others = |error: &&ApiError| answers.others.iter().any(|gpu| error.message.contains(gpu.as_str()));
    let errors: Vec<&ApiError> = answers.status.health.errors.iter().filter(|error| !is_of_others(error)).collect();
    let shown = if errors.len() == MOST_ERRORS + 1 { errors.len() } else { MOST_ERRORS.min(errors.len()) };
    let lines = |text: &str| look.wrap("! ", &look.clean(text)).into_iter().map(|line| paint(BAD, &line));
    let mut out: Vec<String> = errors[..shown].iter().flat_map(|error| lines(&error.message)).collect();
    if shown < errors.len() {
        out.extend(lines(&format!("{} more errors: `gpushctl status` shows them", errors.len() - shown)));
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

#[cfg(test)]
mod tests {
    use gpush_api::Code;

    use super::*;
    use crate::{
        commands::top::samples,
        render::{Charset, fixtures},
    };

    fn drawn(answers: &HostAnswers) -> String {
        let look = fixtures::look(80, Charset::Ascii);
        fixtures::plain(&lines(answers, &Connection::Answers, &look).join("\n"))
    }

    /// Fault: the UUID of the GPU filled the line, and what is wrong was cut. `top 0` showed the errors of other GPUs.
    #[test]
    fn error_is_complete_and_belongs_to_a_selected_gpu() {
        let mut answers = samples::host();
        let gpu = answers.status.gpus[2].uuid.clone();
        let what = format!("GPU 2 ({gpu}): 1 process uses a device that belongs to others");
        answers.status.health.status = HealthStatus::Degraded;
        answers.status.health.errors = vec![ApiError::new(Code::Conflict, what)];
        let text = drawn(&answers).replace("\n  ", " ");
        assert!(text.contains("uses a device that belongs to others"), "{text}");
        answers.others.insert(gpu);
        assert!(!drawn(&answers).contains("belongs to others"), "{}", drawn(&answers));
    }

    #[test]
    fn old_sample_is_mentioned() {
        let mut answers = samples::host();
        assert!(!drawn(&answers).contains("the last sample is"));
        answers.at = answers.oldest_sample().unwrap() + SignedDuration::from_secs(15);
        assert!(drawn(&answers).contains("! the last sample is 15s old"), "{}", drawn(&answers));
    }
}
