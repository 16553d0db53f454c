//! `gpushctl mps`.
//!
//! | file | subject |
//! |---|---|
//! | `follow` | `start`, `stop`, `restart`, `drain`: asked for, then watched to their end |
//! | `logs` | `logs`, and what is new in them |
//! | `share` | `env` and `release` |
//! | `run` | `run`: a share for as long as a command runs |
//! | `shell` | an environment in the syntax of a shell |

mod follow;
mod logs;
mod run;
mod share;
mod shell;

use gpush_api::{Gpu, MpsDaemon, MpsEndRequest, MpsSetRequest};
use gpush_client::Client;

use self::follow::{Change, Watch};
use crate::{
    args::{Ceilings, Followed, Global, Mps},
    exit::{Failure, Outcome},
    output::Output,
    render::mps::{change, clients, list, show},
};

pub(super) fn run(global: &Global, command: Mps, out: &Output) -> Outcome {
    match command {
        // It asks twice, with a command in between that may last for days.
        Mps::Run { of, ceilings, command } => run::run(global, &of.target, ceilings, &command, out),
        other => super::ask(global, async |client| asked(client, other, out).await),
    }
}

async fn asked(client: &mut Client, command: Mps, out: &Output) -> Outcome {
    match command {
        Mps::List => {
            let daemons = client.mps().await?;
            out.show(&daemons, |look| list::list(&daemons, look))?;
        }
        Mps::Show { of } => {
            let daemon = client.mps_daemon(&of.target).await?;
            out.show(&daemon, |look| show::show(&daemon, look))?;
        }
        Mps::Clients { target } => {
            let daemons = named(client, target.as_deref()).await?;
            out.show(&daemons, |look| clients::all(&daemons, look))?;
        }
        Mps::Set { of, ceilings, reset } => {
            let Ceilings { percentage, memory, priority } = ceilings;
            let request = MpsSetRequest { percentage, memory_limit_mib: memory, priority, reset };
            let set = client.mps_set(&of.target, &request).await?;
            out.show(&set, |look| change::set(&set, look))?;
        }
        Mps::Start { of, followed } => return follow::start(client, &of.target, watch(followed), out).await,
        Mps::Stop { of, force, followed } => {
            let how = MpsEndRequest { force: force.force, end_after_s: None };
            return follow::end(client, Change::Stop, &of.target, &how, watch(followed), out).await;
        }
        Mps::Restart { of, force, followed } => {
            let how = MpsEndRequest { force: force.force, end_after_s: None };
            return follow::end(client, Change::Restart, &of.target, &how, watch(followed), out).await;
        }
        Mps::Drain { of, end_after, wait, no_wait, quiet } => {
            let how = MpsEndRequest { force: false, end_after_s: end_after };
            let watch = if no_wait { Watch::Not } else { Watch::For { seconds: wait, quiet } };
            return follow::end(client, Change::Drain, &of.target, &how, watch, out).await;
        }
        Mps::Logs { of, lines, all, follow: false } => logs::last(client, &of.target, lines, all, out).await?,
        Mps::Logs { of, lines, all, follow: true } => return logs::follow(client, &of.target, lines, all, out).await,
        Mps::Env { of, ceilings, until, shell } => {
            share::env(client, &of.target, ceilings, until, shell, out).await?;
        }
        Mps::Release { shares } => share::release(client, &shares, out).await?,
        // Nothing that asks once.
        Mps::Run { .. } => {}
    }
    Ok(0)
}

fn watch(Followed { wait, no_wait, quiet }: Followed) -> Watch {
    if no_wait { Watch::Not } else { Watch::For { seconds: Some(wait), quiet } }
}

/// One target, or all.
async fn named(client: &mut Client, target: Option<&str>) -> Result<Vec<MpsDaemon>, Failure> {
    Ok(match target {
        Some(target) => vec![client.mps_daemon(target).await?],
        None => client.mps().await?,
    })
}

/// The daemons of these GPUs, which are asked for only where one has to do with MPS: a look at a host
/// without it costs nothing. That they can't be told is no reason not to show the rest.
pub(super) async fn of(client: &mut Client, gpus: &[Gpu], out: &Output) -> Vec<MpsDaemon> {
    if !gpus.iter().any(list::concerns) {
        return Vec::new();
    }
    match client.mps().await {
        Ok(mut daemons) => {
            daemons.retain(|daemon| gpus.iter().any(|gpu| daemon.gpu == Some(gpu.index)));
            daemons
        }
        Err(error) => {
            out.remark(&out.look.wrap("MPS is not shown: ", &error.error.message).join("\n"));
            out.remark("\n");
            Vec::new()
        }
    }
}
