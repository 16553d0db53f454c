//! `gpushctl quota`.

use clap::Args;

/// Text after the options: notes and examples.
pub(super) const NOTES: &str = "\
Only the first quota of the config that names a user applies to the user. The
page names later quotas, which have no effect.

Examples:
  gpushctl quota
  gpushctl quota --user anna
  gpushctl quota --all";

/// `gpushctl quota`.
#[derive(Debug, Args)]
pub(crate) struct QuotaArgs {
    /// Quota of USER (name or uid); for administrators
    #[arg(long, value_name = "USER", conflicts_with = "all")]
    pub(crate) user: Option<String>,
    /// Quotas of all users with leases, and of all users that a quota names; for administrators
    #[arg(long)]
    pub(crate) all: bool,
}

#[cfg(test)]
impl QuotaArgs {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        self.all || self.user.is_some()
    }
}
