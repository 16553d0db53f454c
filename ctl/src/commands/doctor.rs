//! `gpushctl doctor`.

use std::path::Path;

use gpush_api::ApiError;
use gpush_client::{ADMIN_SOCKET, DEFAULT_SOCKET, Socket};
use gpush_doctor::{Agent, Area, Finding, Host, Service, Severity, examine};
use serde::Serialize;

use super::with_agent;
use crate::{
    args::Global,
    exit::{DIFFERS, Failure, Outcome},
    output::Output,
    render, socket,
};

/// The output of `gpushctl doctor --json`.
#[derive(Serialize)]
pub(super) struct Examination<'f> {
    #[serde(rename = "checks")]
    pub(super) findings: &'f [Finding],
}

pub(super) fn run(global: &Global, only: &[Area], quiet: bool, out: &Output) -> Outcome {
    let areas = if only.is_empty() { &Area::ALL[..] } else { only };
    // The areas that need gpushd, or the config that it uses.
    let asks = |area: &Area| matches!(area, Area::Agent | Area::Slurm | Area::Config | Area::Mps | Area::Driver);
    let host = Host::local();
    let agent = if !areas.iter().any(asks) {
        Agent::Unreachable(unasked())
    } else if is_of_system(&socket::chosen(global))
        && let Some(service) = Service::find(&host)
    {
        Agent::NotAsked(service)
    } else {
        ask(global, areas.contains(&Area::Slurm))?
    };
    let mut findings = examine(&host, &agent, areas);
    if quiet {
        findings.retain(|finding| finding.severity == Severity::Problem);
    }
    out.show(&Examination { findings: &findings }, |look| match quiet {
        true => render::doctor::problems(&findings, look),
        false => render::doctor::findings(&findings, look),
    })?;
    Ok(if findings.iter().any(|finding| finding.severity == Severity::Problem) { DIFFERS } else { 0 })
}

/// Returns whether a socket belongs to the system's gpushd.
fn is_of_system(socket: &Socket) -> bool {
    let public = Path::new(DEFAULT_SOCKET);
    socket.path == public || socket.path == public.with_file_name(ADMIN_SOCKET)
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
        let has_memory_limits = version.driver.is_some_and(|driver| driver.memory_limits);
        Ok(Agent::Reached {
            version: version.agent,
            own,
            troubles: health.errors,
            gpus,
            rules,
            config_path,
            has_memory_limits,
        })
    });
    match answer {
        Err(Failure::Error(error)) => Ok(Agent::Unreachable(*error)),
        other => other,
    }
}

/// Returns a placeholder for gpushd's answers, if no selected area needs them. The output never contains this
/// placeholder.
fn unasked() -> ApiError {
    ApiError::new(gpush_api::Code::Unavailable, "gpushd was not asked")
}
