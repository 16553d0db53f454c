//! `gpushctl process list`.

use gpush_api::GpuProcesses;
use gpush_client::Client;

use crate::{
    args::Process,
    exit::{DIFFERS, Failure, Outcome},
    output::Output,
    render::processes,
};

pub(super) async fn run(client: &mut Client, command: &Process, out: &Output) -> Outcome {
    let Process::List { unleased, which } = command;
    let mut all = client.processes().await?;
    let selectors = which.selectors();
    if !selectors.is_empty() {
        only(client, &mut all, &selectors).await?;
    }
    if *unleased {
        all.processes.retain(|one| one.unleased.is_some());
    }
    out.list(&all, |look| processes::list(&all, *unleased, look))?;
    Ok(match all.unseen.first() {
        _ if !unleased => 0,
        _ if !all.processes.is_empty() => DIFFERS,
        // If the processes cannot be listed, it is not known whether any of them are unleased.
        Some(error) => error.code.exit_status(),
        None => 0,
    })
}

/// Keeps only the processes of the selected GPUs.
async fn only(client: &mut Client, all: &mut GpuProcesses, selectors: &[String]) -> Result<(), Failure> {
    let host = client.gpus(false).await?;
    let chosen = super::select_of(client, host.clone(), selectors).await?;
    all.processes.retain(|one| chosen.iter().any(|gpu| gpu.uuid == one.gpu_uuid));
    // An error that does not name another GPU may concern all GPUs.
    let others = |message: &str| {
        let named = |gpu: &&gpush_api::Gpu| message.contains(&gpu.uuid);
        host.iter().any(|gpu| named(&gpu)) && !chosen.iter().any(|gpu| named(&gpu))
    };
    all.unseen.retain(|error| !others(&error.message));
    Ok(())
}
