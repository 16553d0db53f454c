//! `gpushctl lease keep` and `gpushctl lease idle`.

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use gpush_api::{IdleAction, LeaseId};
use jiff::Timestamp;

use super::values::{lease, since, whole_seconds};

/// Text after the options of `lease keep`.
pub(super) const KEEP_NOTES: &str = "\
gpushd can end leases that are not used: see `lease idle`. While a lease is
kept, gpushd does not end it as unused. Then its unused time begins again. A
later keep replaces an earlier one. `lease end` still ends the lease.

Examples:
  gpushctl lease keep L17 --for 2h --reason 'demo at noon'";

/// Text after the options of `lease idle`.
pub(super) const IDLE_NOTES: &str = "\
Lists the open leases that are unused now, and what happens to them. Then a dry
run lists which leases gpushd would have reported or ended since TIME, by the
recorded use and the present config. It counts unused times of at least 5
minutes, and ignores keeps. Users see their leases, administrators all.

Examples:
  gpushctl lease idle
  gpushctl lease idle --since 30d --action end   with this action";

/// `gpushctl lease keep`.
#[derive(Debug, Args)]
pub(crate) struct LeaseKeepArgs {
    /// Lease, such as L17
    #[arg(value_name = "LEASE", value_parser = lease)]
    pub(crate) lease: LeaseId,
    /// Time from now, such as 2h; the config has a limit
    #[arg(long = "for", value_name = "DURATION", value_parser = whole_seconds, allow_negative_numbers = true)]
    pub(crate) duration: u64,
    /// Why the lease must stay; administrators see TEXT
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: String,
}

/// `gpushctl lease idle`.
#[derive(Debug, Args)]
pub(crate) struct LeaseIdleArgs {
    /// Dry run from TIME on: a time such as 2026-01-31T08:00Z, or how long ago, such as 7d [default: 7d]
    #[arg(long, value_name = "TIME", value_parser = since, allow_negative_numbers = true)]
    pub(crate) since: Option<Timestamp>,
    /// Assume ACTION in the dry run [default: that of the config]
    #[arg(long, value_name = "ACTION", value_parser = action())]
    pub(crate) action: Option<IdleAction>,
}

fn action() -> impl TypedValueParser<Value = IdleAction> {
    let names = PossibleValuesParser::new(IdleAction::ALL.map(IdleAction::name));
    names.map(|name| IdleAction::ALL.into_iter().find(|one| one.name() == name).unwrap_or(IdleAction::Report))
}
