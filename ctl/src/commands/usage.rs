//! `gpushctl usage`.

use gpush_client::Client;
use jiff::Timestamp;
use nix::unistd::{Uid, User};

use super::lease::uid_of;
use crate::{args::UsageArgs, exit::Outcome, output::Output, render::usage_report};

pub(super) async fn run(client: &mut Client, args: &UsageArgs, out: &Output) -> Outcome {
    let user = args.user.as_deref().map(recorded_name);
    let report = client.usage_report(period(args), args.by, user.as_deref()).await?;
    if let Some(user) = args.user.as_deref().filter(|_| report.lines.is_empty()) {
        // A user who was deleted since still has the recorded use, so only a user without use is looked up.
        uid_of(user)?;
    }
    // Read the GPUs to show their indexes. Without a driver, the output shows UUIDs.
    let gpus = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
    out.list(&report, |look| usage_report::list(&report, &gpus, look))?;
    Ok(0)
}

/// Returns the period that the arguments name. The present month ends now.
fn period(args: &UsageArgs) -> (Option<Timestamp>, Option<Timestamp>) {
    match &args.month {
        Some(month) => (Some(month.from), Some(month.until).filter(|until| *until <= Timestamp::now())),
        None => (args.since, None),
    }
}

/// Returns the name with which the use of a user is recorded: the name of a uid, if this host has one.
pub(super) fn recorded_name(user: &str) -> String {
    let named = user.parse().ok().and_then(|uid| User::from_uid(Uid::from_raw(uid)).ok().flatten());
    named.map_or_else(|| user.to_owned(), |found| found.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uid_is_converted_to_the_recorded_name() {
        assert_eq!(recorded_name("0"), "root");
        for kept in ["anna", "4000000000", "99999999999"] {
            assert_eq!(recorded_name(kept), kept);
        }
    }
}
