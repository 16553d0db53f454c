//! `gpushctl enforce`.

use std::ffi::OsString;

use clap::{Args, Subcommand};

use super::Why;

#[derive(Debug, Subcommand)]
pub(crate) enum Enforce {
    /// Show whether the kernel denies the GPUs to login sessions
    #[command(after_help = "\
gpushd checks this again: it runs programs that try to open a GPU. Exit status
3: a rule has lease = \"enforced\", but the host does not enforce it.

Examples:
  gpushctl enforce status")]
    Status,
    /// Show what `enforce on` changes on this host, and what it does not reach
    #[command(after_help = "\
Examples:
  gpushctl enforce plan")]
    Plan,
    /// Let the kernel deny the GPUs to login sessions
    #[command(after_help = "\
Sets DeviceAllow= of user.slice, and of cron and at. This concerns running
sessions too, and root in them. `gpushctl run -- COMMAND` opens the GPUs.
systemd keeps the setting; `enforce off` removes it.

Examples:
  gpushctl enforce plan
  gpushctl enforce on")]
    On(EnforceOnArgs),
    /// Let login sessions open the GPUs again
    #[command(after_help = "\
Examples:
  gpushctl enforce off --reason 'driver test'")]
    Off(Why),
    /// Run a shell or a command that can open the GPUs, as root
    #[command(after_help = "\
Moves this process out of the login session, and then runs the command.

Examples:
  gpushctl enforce shell
  gpushctl enforce shell -- nvidia-smi")]
    Shell {
        /// Command to run [default: $SHELL, or /bin/sh]
        #[arg(last = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct EnforceOnArgs {
    /// Continue although graphical sessions use a GPU
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) why: Why,
}

#[cfg(test)]
impl Enforce {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        match self {
            Self::Status => false,
            Self::Plan | Self::On(_) | Self::Off(_) | Self::Shell { .. } => true,
        }
    }
}
