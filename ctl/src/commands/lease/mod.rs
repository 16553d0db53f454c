//! `gpushctl lease` and `gpushctl run`.
//!
//! | file | subject |
//! |---|---|
//! | `grant` | requests a lease and waits in the queue; determines what ends the lease |
//! | `run` | `run`: this process becomes the command |
//! | `unrunnable` | hints for a command that `run` cannot run |
//! | `env` | `lease env`: the environment as text |
//! | `list` | `lease list`, `lease show` |
//! | `end` | `lease renew`, `lease end` |
//! | `idle` | `lease keep`, `lease idle` |

mod end;
mod env;
mod grant;
mod idle;
mod list;
mod run;
mod unrunnable;

use gpush_api::{ApiError, Code, Gpu, Lease, LeaseGrant, text::local_time};
use gpush_client::Client;

pub(super) use self::grant::uid_of;
use self::{
    grant::Asked,
    list::{Ended, Holders},
};
use crate::{
    args::{self, Global, RunArgs},
    exit::{Failure, NO_COMMAND, Outcome},
    output::Output,
    render::lease,
};

pub(super) fn become_command(global: &Global, args: &RunArgs, out: &Output) -> Outcome {
    run::run(global, args, out)
}

/// Ends `gpushctl run` with the error that its command line is invalid.
pub(super) fn refused(error: ApiError, out: &Output) -> Outcome {
    run::report_error(error.into(), NO_COMMAND, out)
}

pub(super) fn run(global: &Global, command: args::Lease, out: &Output) -> Outcome {
    match command {
        args::Lease::Request { request, held, quiet } => {
            let asked = Asked { request: grant::bound(&request, &held)?, quiet };
            super::ask(global, async |client| requested(client, global, &asked, out).await)
        }
        args::Lease::Env { lease, request, held, quiet } => env::run(global, lease, &request, &held, quiet, out),
        args::Lease::List { which, mine, user, job, ended, since } => {
            let ended = Ended::of(ended, since);
            let holders = match &user {
                Some(user) => Holders::User(user),
                None if mine => Holders::Caller,
                None => Holders::All,
            };
            super::ask(global, async |client| list::list(client, &which, holders, job, ended, out).await)
        }
        args::Lease::Show { leases } => super::ask(global, async |client| list::show(client, &leases, out).await),
        args::Lease::Renew { lease, duration } => {
            super::ask(global, async |client| end::renew(client, lease, duration, out).await)
        }
        args::Lease::Keep(args) => super::ask(global, async |client| idle::keep(client, &args, out).await),
        args::Lease::Idle(args) => super::ask(global, async |client| idle::idle(client, &args, out).await),
        args::Lease::End(args) => super::ask(global, async |client| end::end(client, &args, out).await),
    }
}

async fn requested(client: &mut Client, global: &Global, asked: &Asked, out: &Output) -> Outcome {
    let granted = grant::granted(client, global, asked, out).await?;
    let gpus = gpus(client).await;
    if let Err(failure) = print(&granted, &gpus, asked.quiet, out) {
        // Release the lease, because the user does not know the id of the lease and so cannot
        // release it.
        let _ = client.lease_release(granted.lease.id).await;
        return Err(failure);
    }
    Ok(0)
}

fn print(granted: &LeaseGrant, gpus: &[Gpu], quiet: bool, out: &Output) -> Result<(), Failure> {
    grant::warn(granted, quiet, out);
    if out.json {
        return out.change(true, granted, |_| String::new());
    }
    out.list(granted, |look| lease::granted(granted, gpus, look))
}

/// Returns the GPUs of the host, to show the names of targets. If this fails, the output shows
/// UUIDs.
async fn gpus(client: &mut Client) -> Vec<Gpu> {
    client.gpus(false).await.unwrap_or_default()
}

/// Returns whether a GPU has leases or may get them. gpushd grants no leases on a GPU without a
/// rule, but a lease continues when the rule of its GPU is removed.
fn may_have_leases(gpu: &Gpu) -> bool {
    gpu.rule.is_some() || !gpu.leases.is_empty()
}

/// Returns the leases that have not ended. Requests them only if one of the GPUs may have some. If
/// the request fails, the command still shows the rest.
pub(super) async fn of(client: &mut Client, gpus: &[Gpu], out: &Output) -> Vec<Lease> {
    if !gpus.iter().any(may_have_leases) {
        return Vec::new();
    }
    match client.leases(0).await {
        Ok(leases) => leases,
        // This gpushd is too old for leases.
        Err(error) if error.code() == Code::NotFound => Vec::new(),
        Err(error) => {
            out.remark(&(out.look.wrap("leases are not shown: ", &error.error.message).join("\n") + "\n"));
            Vec::new()
        }
    }
}

/// Describes the leases on a GPU with their holders, such as `lease L17 of alice`. Includes leases
/// without a process, because their holders can start programs at any time.
pub(super) fn holders(gpu: &Gpu, leases: &[Lease]) -> Vec<String> {
    let has_gpu = |lease: &&Lease| lease.members.iter().any(|member| member.gpu_uuid == gpu.uuid);
    let holding = leases.iter().filter(|lease| lease.state.holds_capacity()).filter(has_gpu);
    let name = |lease: &Lease| {
        let user = lease.holder.user.clone().unwrap_or_else(|| format!("uid {}", lease.holder.uid));
        let end = lease.expires_at.map_or_else(String::new, |at| format!(" until {}", local_time(at)));
        format!("lease {} of {user}{end}", lease.id)
    };
    holding.map(name).collect()
}

#[cfg(test)]
mod tests {
    use gpush_api::LeaseUse;

    use super::*;
    use crate::render::fixtures;

    /// Fault: `status` did not show a lease on a GPU whose rule was removed.
    #[test]
    fn gpu_without_a_rule_may_still_have_leases() {
        let lease = fixtures::lease::mps();
        let mut gpu = fixtures::gpu(0, "NVIDIA A100", 81_920, None);
        gpu.rule = None;
        assert!(!may_have_leases(&gpu));
        gpu.leases = LeaseUse::of(&lease, &lease.members[0].gpu_uuid).collect();
        assert!(may_have_leases(&gpu));
    }
}
