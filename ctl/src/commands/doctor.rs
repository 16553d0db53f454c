//! `gpushctl doctor`.

use gpush_api::ApiError;
use gpush_doctor::{Agent, Area, Finding, Host, Severity, examine};
use serde::Serialize;

use super::with_agent;
use crate::{
    args::Global,
    exit::{DIFFERS, Failure, Outcome},
    output::Output,
    render,
};

/// Output of `gpushctl doctor --json`.
#[derive(Serialize)]
struct Examination<'f> {
    findings: &'f [Finding],
}

pub(super) fn run(global: &Global, only: &[Area], out: &Output) -> Outcome {
    let areas = if only.is_empty() { &Area::ALL[..] } else { only };
    let agent = if areas.contains(&Area::Agent) { ask(global)? } else { Agent::Unreachable(unasked()) };
    let findings = examine(&Host::at("/"), &agent, areas);
    out.show(&Examination { findings: &findings }, |look| render::doctor::findings(&findings, look))?;
    Ok(if findings.iter().any(|finding| finding.severity == Severity::Problem) { DIFFERS } else { 0 })
}

/// Asks gpushd for its version and health. A gpushd that cannot be reached is a result, not an error.
fn ask(global: &Global) -> Result<Agent, Failure> {
    let answer = with_agent(global, async |client| {
        let version = client.version().await?;
        let health = client.health().await?;
        let own = env!("CARGO_PKG_VERSION").to_owned();
        Ok(Agent::Reached { version: version.agent, own, troubles: health.errors })
    });
    match answer {
        Err(Failure::Error(error)) => Ok(Agent::Unreachable(*error)),
        other => other,
    }
}

/// Returns a placeholder for gpushd's answer when the area of gpushd is not selected. The
/// placeholder is never shown.
fn unasked() -> ApiError {
    ApiError::new(gpush_api::Code::Unavailable, "the agent was not asked")
}
