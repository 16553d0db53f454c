//! `gpushctl mps`.
//!
//! | file | subject |
//! |---|---|
//! | `follow` | `start`, `stop`, `restart`: makes the request and waits for its end |
//! | `logs` | `logs`: the last lines of the logs, and new lines |

mod follow;
mod logs;

use std::time::Duration;

use gpush_api::{Gpu, GpuIndex, Mode, MpsActionRequest, MpsClient, MpsDaemon, MpsSetRequest, TargetUuid};
use gpush_client::Client;
use serde::Serialize;

use self::follow::{Change, Watch};
use crate::{
    args::{Ceilings, Followed, Global, Mps},
    exit::{Failure, Outcome},
    output::Output,
    render::{
        gpu::of_other_modes,
        mps::{change, clients, list, show},
    },
};

/// How long a command waits for a daemon to start or stop, without `--timeout`.
const USUAL_CHANGE: Duration = Duration::from_secs(60);

/// A client in the output of `gpushctl mps clients -o json`, with its target.
#[derive(Debug, Serialize)]
pub(super) struct ListedClient<'d> {
    target: &'d str,
    uuid: &'d TargetUuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<GpuIndex>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<&'d str>,
    #[serde(flatten)]
    client: &'d MpsClient,
}

impl<'d> ListedClient<'d> {
    pub(super) fn of(daemon: &'d MpsDaemon) -> impl Iterator<Item = Self> {
        daemon.clients.iter().map(|client| Self {
            target: &daemon.target,
            uuid: &daemon.uuid,
            gpu: daemon.gpu,
            device: daemon.device.as_deref(),
            client,
        })
    }
}

pub(super) fn run(global: &Global, command: Mps, out: &Output) -> Outcome {
    super::ask(global, async |client| asked(client, command, out).await)
}

async fn asked(client: &mut Client, command: Mps, out: &Output) -> Outcome {
    match command {
        Mps::List { which } => {
            let selectors = which.selectors();
            let (daemons, none) = of_gpus(client, &selectors).await?;
            let rules = if daemons.is_empty() && out.is_drawn() { rules(client).await } else { Vec::new() };
            out.list(&daemons, |look| {
                let list = list::list(&daemons, &rules, look);
                match &none {
                    Some(none) => list.or_empty(&look.wrap("", none).join("\n")),
                    None => list,
                }
            })?;
        }
        Mps::Show { of } => {
            let daemon = client.mps_daemon(of.text()).await?;
            out.show(&daemon, |look| show::show(&daemon, look))?;
        }
        Mps::Clients { target, which } => {
            let (daemons, none) = match target {
                Some(target) => (vec![client.mps_daemon(&target).await?], None),
                None => of_gpus(client, &which.gpus).await?,
            };
            let document: Vec<ListedClient<'_>> = daemons.iter().flat_map(ListedClient::of).collect();
            out.list(&document, |look| {
                let list = clients::all(&daemons, look);
                match none.as_ref().filter(|_| daemons.is_empty()) {
                    Some(none) => list.or_empty(&look.wrap("", none).join("\n")),
                    None => list,
                }
            })?;
        }
        Mps::Set { of, ceilings, reset } => {
            let Ceilings { percentage, memory, priority } = ceilings;
            let request = MpsSetRequest { percentage, memory_limit_mib: memory, priority, reset };
            // Only JSON says whether the request has changed something.
            let before = if out.json { Some(client.mps_daemon(of.text()).await?.wanted) } else { None };
            let set = client.mps_set(of.text(), &request).await?;
            let changed = before.is_none_or(|before| before != set.daemon.wanted);
            out.change(changed, &set, |look| change::set(&set, look))?;
        }
        Mps::Start { of, followed } => return follow::start(client, of.text(), watch(followed), out).await,
        Mps::Stop { of, force, queueing, end_after, followed } if queueing.seconds.is_some() && !force.force => {
            return follow::stop_when_free(client, of.text(), queueing.finite(), end_after, followed, out).await;
        }
        Mps::Stop { of, force, queueing: _, end_after: _, followed } => {
            let how = MpsActionRequest { force: force.force, end_after_s: None };
            return follow::end(client, Change::Stop, of.text(), &how, watch(followed), out).await;
        }
        Mps::Restart { of, force, followed } => {
            let how = MpsActionRequest { force: force.force, end_after_s: None };
            return follow::end(client, Change::Restart, of.text(), &how, watch(followed), out).await;
        }
        Mps::Logs { of, number, all, follow: false } => logs::last(client, of.text(), number, all, out).await?,
        Mps::Logs { of, number, all, follow: true } => return logs::follow(client, of.text(), number, all, out).await,
    }
    Ok(0)
}

/// Returns how to wait for a change that takes seconds.
fn watch(Followed { timeout, detach, quiet }: Followed) -> Watch {
    let limit = Some(timeout.unwrap_or(USUAL_CHANGE));
    if detach { Watch::Not } else { Watch::For { limit, quiet, undone: false } }
}

/// Returns the targets on the selected GPUs; all targets if there are no selectors. With selectors, also returns a text
/// for an empty list, which says that these GPUs are not shared.
async fn of_gpus(client: &mut Client, selectors: &[String]) -> Result<(Vec<MpsDaemon>, Option<String>), Failure> {
    let mut daemons = client.mps().await?;
    if selectors.is_empty() {
        return Ok((daemons, None));
    }
    let gpus = client.gpus(false).await?;
    let gpus = super::select_of(client, gpus, selectors).await?;
    daemons.retain(|daemon| gpus.iter().any(|gpu| daemon.gpu == Some(gpu.index)));
    Ok((daemons, Some(of_other_modes(&gpus, "shared through MPS"))))
}

/// Returns the names of the rules with mode `mps`, to explain an empty list. Returns none if gpushd
/// does not show its config.
async fn rules(client: &mut Client) -> Vec<String> {
    let Ok(config) = client.config().await else { return Vec::new() };
    config.rules.into_iter().filter(|rule| rule.mode == Mode::Mps).map(|rule| rule.name).collect()
}

/// Returns the MPS daemons of these GPUs. Requests them only if one of the GPUs uses MPS. If the
/// request fails, the command still shows the rest.
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
