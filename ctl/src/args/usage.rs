//! `gpushctl usage`.

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use gpush_api::UsageGrouping;
use jiff::Timestamp;

use super::{
    month::{MonthName, month},
    values::since,
};

/// Text after the options: notes and examples.
pub(super) const NOTES: &str = "\
The parts of the held time are: busy, idle (with a process and without work),
empty (without a process), and unknown. A lease with several targets counts
once for each. Users see their own use, administrators that of all users. For
use older than 40 days, gpushd may have only sums of UTC days.

Examples:
  gpushctl usage
  gpushctl usage --since 30d --by group
  gpushctl usage --month 2026-11 --by job -o csv";

/// `gpushctl usage`.
#[derive(Debug, Args)]
pub(crate) struct UsageArgs {
    /// Only the use after TIME: a time such as 2026-01-31T08:00Z, or how long ago, such as 7d [default: 24h]
    #[arg(long, value_name = "TIME", value_parser = since, allow_negative_numbers = true)]
    pub(crate) since: Option<Timestamp>,
    /// Only the use in MONTH (UTC), such as 2026-11
    #[arg(long, value_name = "MONTH", value_parser = month, conflicts_with = "since")]
    pub(crate) month: Option<MonthName>,
    /// What each line is about
    #[arg(long, value_name = "WHAT", default_value = "user", value_parser = grouping())]
    pub(crate) by: UsageGrouping,
    /// Only leases of USER; for administrators
    #[arg(long, value_name = "USER")]
    pub(crate) user: Option<String>,
}

#[cfg(test)]
impl UsageArgs {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        self.user.is_some()
    }
}

pub(super) fn grouping() -> impl TypedValueParser<Value = UsageGrouping> {
    let names = PossibleValuesParser::new(UsageGrouping::ALL.map(UsageGrouping::name));
    names.map(|name| UsageGrouping::ALL.into_iter().find(|one| one.name() == name).unwrap_or_default())
}
