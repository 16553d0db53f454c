//! `gpushctl quota`.

use gpush_client::{Client, QuotaQuery};

use crate::{args::QuotaArgs, exit::Outcome, output::Output, render::quota};

pub(super) async fn run(client: &mut Client, args: &QuotaArgs, out: &Output) -> Outcome {
    if args.all {
        let quotas = client.quotas(QuotaQuery::All).await?;
        out.list(&quotas, |look| quota::list(&quotas, look))?;
        return Ok(0);
    }
    let query = match &args.user {
        Some(user) => QuotaQuery::User(super::lease::uid_of(user)?),
        None => QuotaQuery::Caller,
    };
    // gpushd answers about one user with one quota.
    if let [quota] = client.quotas(query).await?.as_slice() {
        let only_slurm =
            !quota.slurm_gpus.is_empty() && super::offered::is_only_of_slurm(&client.gpus(false).await?, quota);
        out.show(quota, |look| quota::page(quota, only_slurm, look))?;
    }
    Ok(0)
}
