//! `gpushctl usage`.

use gpush_client::Client;

use crate::{args::UsageArgs, exit::Outcome, output::Output, render::usage_report};

pub(super) async fn run(client: &mut Client, args: &UsageArgs, out: &Output) -> Outcome {
    let report = client.usage_report(args.since, args.by, args.user.as_deref()).await?;
    // Read the GPUs to show their indexes. Without a driver, the output shows UUIDs.
    let gpus = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
    out.list(&report, |look| usage_report::list(&report, &gpus, look))?;
    Ok(0)
}
