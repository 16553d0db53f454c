//! `gpushctl gpu cordon|drain|uncordon`.
//!
//! `gpu drain` cordons the GPUs and waits until gpushd's readings show no process and no lease. The command also waits
//! for leases, because their holders may start programs at any time. Waiting changes nothing, so a drain is not an
//! operation of gpushd: the user can interrupt the command and start it again. `--end-after` limits the wait for leases.

mod idle;
mod lease_end;
mod temporary;

use gpush_api::{ApiError, Code, Gpu, GpuIndex, GpuState, ReasonRequest};
use gpush_client::Client;
use gpush_core::duration;

pub(super) use self::{idle::Waited, temporary::TemporaryCordons};
use self::{
    idle::{WaitEnd, until_idle},
    lease_end::LeaseEnd,
};
use crate::{
    args::{DrainArgs, SomeGpus, Why},
    exit::{Failure, Outcome},
    output::{ChangedGpus, Output},
    render::{
        cordon,
        names::{gpu_numbers, was_or_were},
    },
};

/// Returns the selected GPUs. Later requests use their UUIDs, because an index may belong to
/// another GPU by then.
async fn selected(client: &mut Client, which: &SomeGpus) -> Result<Vec<Gpu>, Failure> {
    let gpus = client.gpus(false).await?;
    super::select_of(client, gpus, &which.selectors()).await
}

/// GPUs that a command has cordoned.
struct Cordoned {
    gpus: Vec<Gpu>,
    /// Whether the command has added a cordon or changed the reason of a cordon.
    changed: bool,
}

async fn cordon_gpus(client: &mut Client, which: &SomeGpus, why: &Why) -> Result<Cordoned, Failure> {
    let why = ReasonRequest { reason: why.reason.clone() };
    let (mut gpus, mut changed) = (Vec::new(), false);
    for before in selected(client, which).await? {
        let gpu = client.cordon(before.uuid.as_str(), &why).await?;
        changed |= causes(&before) != causes(&gpu);
        gpus.push(gpu);
    }
    Ok(Cordoned { gpus, changed })
}

/// Returns cause and reason of each cordon of a GPU.
fn causes(gpu: &Gpu) -> Vec<(&str, &str)> {
    gpu.cordons.iter().map(|cordon| (&*cordon.cause, &*cordon.reason)).collect()
}

pub(super) async fn cordon(client: &mut Client, which: &SomeGpus, why: &Why, out: &Output) -> Outcome {
    let Cordoned { gpus, changed } = cordon_gpus(client, which, why).await?;
    out.change(changed, &ChangedGpus { gpus: &gpus }, |look| cordon::cordoned(&gpus, look))?;
    Ok(0)
}

pub(super) async fn uncordon(client: &mut Client, which: &SomeGpus, why: &Why, out: &Output) -> Outcome {
    let why = ReasonRequest { reason: why.reason.clone() };
    let before = selected(client, which).await?;
    let mut gpus = Vec::new();
    for gpu in &before {
        gpus.push(client.uncordon(gpu.uuid.as_str(), &why).await?);
    }
    let changed = before.iter().any(|gpu| !gpu.cordons.is_empty());
    out.change(changed, &ChangedGpus { gpus: &gpus }, |look| cordon::uncordoned(&before, &gpus, look))?;
    Ok(0)
}

/// Cordons the GPUs, and prints the command that waits until they are idle.
async fn begin(client: &mut Client, which: &SomeGpus, why: &Why, out: &Output) -> Outcome {
    let Cordoned { gpus, changed } = cordon_gpus(client, which, why).await?;
    out.change(changed, &ChangedGpus { gpus: &gpus }, |look| cordon::draining(&gpus, look))?;
    Ok(0)
}

/// Runs `gpu drain`.
pub(super) async fn drain(client: &mut Client, args: &DrainArgs, out: &Output) -> Outcome {
    let DrainArgs { which, why, timeout, end_after, notice, detach, quiet } = args;
    if *detach {
        return begin(client, which, why, out).await;
    }
    if let (Some(after), Some(notice)) = (end_after, notice)
        && notice > after
    {
        let message = "the notice is longer than the time of `--end-after`";
        let error = ApiError::new(Code::BadRequest, message);
        return Err(error.hint("give a shorter `--notice`: the leases end this long before their processes").into());
    }
    let Cordoned { mut gpus, changed } = cordon_gpus(client, which, why).await?;
    let lease_end = end_after.map(|after| {
        let indexes: Vec<GpuIndex> = gpus.iter().map(|gpu| gpu.index).collect();
        let usual = || format!("drain of {}", gpu_numbers(&indexes));
        LeaseEnd::new(after, *notice, why.reason.clone().filter(|reason| !reason.is_empty()).unwrap_or_else(usual))
    });
    let WaitEnd { waited, left, lost } =
        until_idle(client, &mut gpus, *timeout, lease_end, *quiet, out).await.map_err(still_cordoned)?;
    let numbers = gpu_numbers(&left);
    let stay = if left.len() == 1 { "it stays cordoned" } else { "they stay cordoned" };
    match waited {
        Waited::Idle if lost.is_some() && out.json => {}
        Waited::Idle => {
            gpus.retain(|gpu| gpu.state != GpuState::Lost);
            out.change(changed, &ChangedGpus { gpus: &gpus }, |look| cordon::drained(&gpus, look))?;
        }
        Waited::TooLong if out.json => {
            out.change(changed, &ChangedGpus { gpus: &gpus }, |_| String::new())?;
        }
        Waited::TooLong => {
            let within = duration::format(timeout.unwrap_or_default());
            let indexes = left.iter().map(GpuIndex::to_string).collect::<Vec<_>>().join(",");
            let next = format!(
                "`gpushctl gpu drain {indexes}` waits again; `gpushctl gpu uncordon {indexes}` ends the cordon"
            );
            let text = format!("{numbers} {} not idle within {within}; {stay}. {next}.", was_or_were(&left));
            out.remark(&(out.look.wrap("", &text).join("\n") + "\n"));
        }
        Waited::Interrupted => out.remark(&format!("{numbers}: interrupted; {stay}.\n")),
    }
    match lost.filter(|_| waited == Waited::Idle) {
        Some(error) => Err(still_cordoned(error.into())),
        None => Ok(waited.exit_status()),
    }
}

/// Adds to an error that the GPUs of `gpu drain` are still cordoned.
fn still_cordoned(failure: Failure) -> Failure {
    match failure {
        Failure::Error(error) if matches!(error.code, Code::GpuLost | Code::Conflict) && error.outcome.is_none() => {
            (*error).outcome("the GPUs stay cordoned").into()
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::ApiError;

    use super::*;

    #[test]
    fn error_of_a_drain_says_that_the_cordon_stays() {
        let error = ApiError::new(Code::GpuLost, "GPU 0 is lost");
        let Failure::Error(error) = still_cordoned(error.into()) else { panic!("an error") };
        assert_eq!(error.outcome.as_deref(), Some("the GPUs stay cordoned"));
    }
}
