//! `gpushctl ps`.

use gpush_api::GpuProcesses;
use gpush_client::Client;

use crate::{
    args::PsArgs,
    exit::{DIFFERS, Failure, Outcome},
    output::Output,
    render::processes,
};

pub(super) async fn run(client: &mut Client, args: &PsArgs, out: &Output) -> Outcome {
    let mut all = client.processes().await?;
    let selectors = args.which.selectors();
    if !selectors.is_empty() {
        only(client, &mut all, &selectors).await?;
    }
    if let Some(user) = &args.user {
        let uid = super::lease::uid_of(user)?;
        let hidden = all.processes.iter().filter(|one| one.process.uid.is_none()).count();
        all.processes.retain(|one| one.process.uid == Some(uid) || one.account.as_ref() == Some(user));
        if hidden > 0 && all.processes.is_empty() {
            let what = if hidden == 1 { "1 process of another user is" } else { "processes of other users are" };
            let text = format!("{what} not shown: only administrators see whose processes these are");
            out.remark(&(out.look.wrap("! ", &text).join("\n") + "\n"));
        }
    }
    if args.unleased {
        all.processes.retain(|one| one.unleased.is_some());
    }
    out.list(&all, |look| processes::list(&all, args.unleased, look))?;
    Ok(match all.unknown.first() {
        _ if !args.unleased => 0,
        _ if !all.processes.is_empty() => DIFFERS,
        // The processes of a GPU are unknown, so some may be unleased: this is an error.
        Some(one) => one.error.code.exit_status(),
        None => 0,
    })
}

/// Keeps only the processes of the selected GPUs.
async fn only(client: &mut Client, all: &mut GpuProcesses, selectors: &[String]) -> Result<(), Failure> {
    let host = client.gpus(false).await?;
    let chosen = super::select_of(client, host, selectors).await?;
    let is_chosen = |uuid: &str| chosen.iter().any(|gpu| gpu.uuid == uuid);
    all.processes.retain(|one| is_chosen(one.gpu_uuid.as_str()));
    all.unknown.retain(|one| is_chosen(one.gpu_uuid.as_str()));
    Ok(())
}
