//! `gpushctl lease keep` and `gpushctl lease idle`.

use gpush_api::LeaseKeepRequest;
use gpush_client::Client;
use jiff::{SignedDuration, Timestamp};

use crate::{
    args::{LeaseIdleArgs, LeaseKeepArgs},
    exit::Outcome,
    output::Output,
    render::lease,
};

pub(super) async fn keep(client: &mut Client, args: &LeaseKeepArgs, out: &Output) -> Outcome {
    let request = LeaseKeepRequest { duration_s: args.duration, reason: args.reason.clone() };
    let kept = client.lease_keep(args.lease, &request).await?;
    out.change(true, &kept, |look| lease::keeping(&kept, look))?;
    Ok(0)
}

pub(super) async fn idle(client: &mut Client, args: &LeaseIdleArgs, out: &Output) -> Outcome {
    let week = SignedDuration::from_hours(7 * 24);
    let since = args.since.unwrap_or_else(|| Timestamp::now().saturating_sub(week).unwrap_or(Timestamp::MIN));
    let report = client.idle_leases(since, args.action).await?;
    out.list(&report, |look| lease::idle_report(&report, look))?;
    Ok(0)
}
