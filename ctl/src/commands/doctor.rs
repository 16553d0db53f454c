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

/// The output of `gpushctl doctor --json`.
#[derive(Serialize)]
pub(super) struct Examination<'f> {
    #[serde(rename = "checks")]
    pub(super) findings: &'f [Finding],
}

pub(super) fn run(global: &Global, only: &[Area], out: &Output) -> Outcome {
    let areas = if only.is_empty() { &Area::ALL[..] } else { only };
    // The areas that need gpushd, or the config that it uses.
    let asks = |area: &Area| matches!(area, Area::Agent | Area::Slurm | Area::Config | Area::Mps | Area::Driver);
    let agent =
        if areas.iter().any(asks) { ask(global, areas.contains(&Area::Slurm))? } else { Agent::Unreachable(unasked()) };
    let findings = examine(&Host::local(), &agent, areas);
    out.show(&Examination { findings: &findings }, |look| render::doctor::findings(&findings, look))?;
    Ok(if findings.iter().any(|finding| finding.severity == Severity::Problem) { DIFFERS } else { 0 })
}

/// Requests gpushd's version, health and GPUs. If gpushd cannot be reached, this is a result of the examination, not an
/// error.
fn ask(global: &Global, with_gpus: bool) -> Result<Agent, Failure> {
    let answer = with_agent(global, async |client| {
        let version = client.version().await?;
        let health = client.health().await?;
        let own = env!("CARGO_PKG_VERSION").to_owned();
        let gpus = if with_gpus { client.gpus(false).await? } else { Vec::new() };
        let config = client.config().await?;
        let (config_path, rules) = (config.path, config.rules);
        Ok(Agent::Reached { version: version.agent, own, troubles: health.errors, gpus, rules, config_path })
    });
    match answer {
        Err(Failure::Error(error)) => Ok(Agent::Unreachable(*error)),
        other => other,
    }
}

/// Returns a placeholder for gpushd's answers, if no selected area needs them. The output never contains this
/// placeholder.
fn unasked() -> ApiError {
    ApiError::new(gpush_api::Code::Unavailable, "the agent was not asked")
}
