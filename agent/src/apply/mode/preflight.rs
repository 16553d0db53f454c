//! What stands in the way of a reset, looked for before anything is done: processes that have the
//! GPU open and that gpushd may not stop, and a virtual machine around us.

use gpush_api::{ApiError, Code, Gpu, GpuPlan, Refusal, Reset};
use gpush_core::{holders as judged, refusal};
use gpush_host::helper::Helpers;

use super::holders;
use crate::{agent::Shared, auth::Asker};

/// Refuses those plans with a reset that can't be carried out now. `gpus` are the host's.
pub(in crate::apply) async fn examine(agent: &Shared, asker: &Asker, gpus: &[Gpu], plans: &mut [GpuPlan]) {
    let config = agent.settings.config();
    let guest = plans.iter().any(|plan| plan.reset.is_some()) && is_guest(agent);
    for plan in plans {
        let Some(reset) = plan.reset.as_ref() else { continue };
        let label = format!("GPU {} ({})", plan.gpu, plan.uuid);
        let concerned = |gpu: &&Gpu| gpu.uuid == plan.uuid || reset.together.iter().any(|peer| peer.uuid == gpu.uuid);
        let minors: Vec<u32> = gpus.iter().filter(concerned).map(|gpu| gpu.minor).collect();
        let refused = if guest {
            let refusal = if plan.enables_mig {
                Refusal::MigOff { reset_pending: false }
            } else {
                Refusal::MigOn { reset_pending: false }
            };
            Some((refusal::explain(&refusal, plan.gpu, &label), Some(refusal)))
        } else if let Err(error) = programs(agent, reset) {
            Some((error, None))
        } else {
            match holders::scan(agent, &minors).await {
                Err(error) => Some((error, None)),
                Ok(found) => {
                    let hide = |holder: gpush_api::Holder| {
                        if asker.may_see(holder.uid) { holder } else { holders::blank(holder) }
                    };
                    let mut left = judged::obstacles(found, &config.mode_change.services);
                    // They are ended first, if the plan takes their targets away.
                    let idle = agent.mps.idle();
                    left.retain(|holder| holder.pid.is_none_or(|pid| !idle.contains(&pid)));
                    let left: Vec<_> = left.into_iter().map(hide).collect();
                    (!left.is_empty()).then(|| (judged::explain(&label, &left), Some(Refusal::Held { holders: left })))
                }
            }
        };
        if let Some((error, refusal)) = refused {
            *plan = GpuPlan { refusal, ..plan.without_steps().refused(error) };
        }
    }
}

/// Whether all that a reset runs can be run.
fn programs(agent: &Shared, reset: &Reset) -> Result<(), ApiError> {
    let change = &agent.settings.config().mode_change;
    let systemctl = (!reset.services.is_empty()).then(|| change.systemctl.clone());
    let programs = reset.hooks.iter().cloned().chain(systemctl).chain([agent.outside.nvidia_smi(change)]);
    programs.into_iter().try_for_each(|program| Helpers::may_run(&program).map(|_| ()))
}

/// Whether this is a virtual machine: the processor says so to whoever runs in one.
fn is_guest(agent: &Shared) -> bool {
    let text = std::fs::read_to_string(agent.outside.proc.join("cpuinfo")).unwrap_or_default();
    let flags = text.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
}

/// Refuses to reset GPUs along with others while something would be lost by it. That the mode of one of
/// `ours` waits for a reset is the operation's own doing.
///
/// # Errors
/// When one of them is in use, holds instances, or can't be read.
pub(super) async fn must_be_free(agent: &Shared, uuids: &[String], ours: &[String]) -> Result<(), ApiError> {
    for (uuid, reading) in agent.observer.now(uuids).await {
        let why = match reading {
            Err(error) => {
                let said = error.to_api();
                let message = format!("{uuid} would be reset as well, and can't be read");
                let causes = [vec![said.message.clone()], said.causes.clone()].concat();
                return Err(ApiError { message, causes, ..said });
            }
            Ok(reading) if !reading.processes.is_empty() || !reading.processes_known => {
                "it is in use, or may be".to_owned()
            }
            Ok(reading) if reading.mig.as_ref().is_some_and(|mig| !mig.instances.is_empty()) => {
                "it has GPU instances, which a reset destroys".to_owned()
            }
            Ok(reading)
                if !ours.contains(&uuid) && reading.mig.as_ref().is_some_and(|mig| mig.enabled != mig.pending) =>
            {
                "it waits for a reset to change its MIG mode, which this one would do".to_owned()
            }
            Ok(_) => continue,
        };
        let message = format!("{uuid} would be reset as well, and must not be");
        return Err(ApiError::new(Code::Blocked, message)
            .cause(why)
            .hint("free it, then ask again: `gpushctl status` shows it"));
    }
    Ok(())
}

/// Minor numbers of GPUs.
///
/// # Errors
/// When one of them is not known.
pub(super) async fn minors(agent: &Shared, uuids: &[String]) -> Result<Vec<u32>, ApiError> {
    let host = crate::view::host(agent).await?;
    let minor = |uuid: &String| {
        let sight = host.gpus.iter().find(|sight| sight.identity.uuid == *uuid);
        sight.map(|sight| sight.identity.minor).ok_or_else(|| {
            ApiError::new(Code::NotFound, format!("there is no {uuid} any more"))
                .hint("`gpushctl status` shows the GPUs")
        })
    };
    uuids.iter().map(minor).collect()
}

/// Who has the GPU open, as everybody may read it: for a change that the driver called busy.
pub(in crate::apply) async fn suspects(agent: &Shared, uuid: &str) -> Vec<String> {
    let Ok(minors) = minors(agent, &[uuid.to_owned()]).await else { return Vec::new() };
    let Ok(found) = holders::scan(agent, &minors).await else { return Vec::new() };
    for holder in &found {
        tracing::warn!(gpu = uuid, "held by {}", judged::words(holder));
    }
    found.into_iter().map(|holder| format!("held by {}", judged::words(&holders::blank(holder)))).collect()
}
