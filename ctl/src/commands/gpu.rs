//! `gpushctl gpu list`, `gpu show` and `gpu holders`; `cordon`, `drain` and `uncordon` are in `drain`, `reset` in `reset`.

use gpush_client::Client;

use super::{drain, reset};
use crate::{
    args::Gpu,
    exit::Outcome,
    output::Output,
    render::{gpu_list, holders, show},
};

pub(super) async fn run(client: &mut Client, command: &Gpu, out: &Output) -> Outcome {
    match command {
        Gpu::List(which) => {
            // Include the profiles in JSON, because users can save the output and use the file as a host for offline
            // plans.
            let gpus = client.gpus(out.json).await?;
            let gpus = super::select_of(client, gpus, &which.selectors()).await?;
            if gpus.is_empty() && out.is_drawn() {
                return Err(super::no_gpu().into());
            }
            out.list(&gpus, |look| gpu_list::gpus(&gpus, look))?;
        }
        Gpu::Show(which) => {
            let gpus = client.gpus(true).await?;
            let gpus = super::select_of(client, gpus, &which.selectors()).await?;
            if gpus.is_empty() {
                return Err(super::no_gpu().into());
            }
            if out.json {
                out.show(&gpus, |_| String::new())?;
                return Ok(0);
            }
            let mps = super::mps::of(client, &gpus, out).await;
            let leases = super::lease::of(client, &gpus, out).await;
            let devices = super::mig::devices(client, &gpus, &mps, &leases, out).await;
            let text = |look: &_| {
                gpus.iter().map(|gpu| show::gpu(gpu, &devices, &mps, &leases, look)).collect::<Vec<_>>().join("\n")
            };
            out.show(&gpus, text)?;
        }
        Gpu::Holders(which) => {
            let gpus = client.gpus(false).await?;
            let gpus = super::select_of(client, gpus, &which.selectors()).await?;
            let mut all = Vec::new();
            for gpu in &gpus {
                all.push(client.holders(gpu.uuid.as_str()).await?);
            }
            out.list(&all, |look| holders::list(&all, look))?;
        }
        Gpu::Cordon { which, why } => return drain::cordon(client, which, why, out).await,
        Gpu::Drain(args) => return drain::drain(client, args, out).await,
        Gpu::Uncordon { which, why } => return drain::uncordon(client, which, why, out).await,
        Gpu::Reset { which, yes, why, queueing } => {
            return reset::run(client, which, why, *yes, queueing.limit(), out).await;
        }
    }
    Ok(0)
}
