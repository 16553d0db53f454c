//! `gpushctl bill`.

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use gpush_api::{BillModel, UsageGrouping};

use super::{
    month::{MonthName, month},
    usage::grouping,
};

/// Text after the options: notes and examples.
pub(super) const NOTES: &str = "\
A month is closed about an hour after its end. The bill of a closed month never
changes. The prices are those of `[[price]]` in the config when the month is
closed. Users see their own bill, administrators that of all users and the
capacity that no lease was charged for.

-o csv prints one row for each lease, target and hour, and --focus prints the
same rows in the columns of FOCUS 1.2.

Examples:
  gpushctl bill --month 2026-11
  gpushctl bill --month 2026-11 --by account --model used
  gpushctl bill --month 2026-11 -o csv > 2026-11.csv
  gpushctl bill --month 2026-11 --focus > 2026-11-focus.csv";

/// `gpushctl bill`.
#[derive(Debug, Args)]
pub(crate) struct BillArgs {
    /// Month in UTC, such as 2026-11 [default: the present month]
    #[arg(long, value_name = "MONTH", value_parser = month)]
    pub(crate) month: Option<MonthName>,
    /// What the bill charges for: held shares, busy shares, or a price per lease
    #[arg(long, value_name = "MODEL", default_value = "requested", value_parser = model())]
    pub(crate) model: BillModel,
    /// What each line is about
    #[arg(long, value_name = "WHAT", default_value = "user", value_parser = grouping())]
    pub(crate) by: UsageGrouping,
    /// Only leases of USER; for administrators
    #[arg(long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// Print the rows as CSV in the columns of FOCUS 1.2
    #[arg(long)]
    pub(crate) focus: bool,
}

#[cfg(test)]
impl BillArgs {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        self.user.is_some()
    }
}

fn model() -> impl TypedValueParser<Value = BillModel> {
    let names = PossibleValuesParser::new(BillModel::ALL.map(BillModel::name));
    names.map(|name| BillModel::ALL.into_iter().find(|one| one.name() == name).unwrap_or_default())
}
