//! The arguments of `support-bundle`.

use std::path::PathBuf;

use clap::Args;

/// The end of `gpushctl support-bundle --help`.
pub(super) const NOTES: &str = "\
Lists the files of the archive with their sizes, then asks before it writes.
Without a terminal, it does not ask. It never overwrites a file, and sends
nothing. bundle.json in the archive says which parts are missing, and why.

User names become user ids, and command lines of processes are left out.
As root it collects more: the audit trail and the journal of gpushd.

It always leaves out secrets in these forms: the values of names such as
password, token, secret or api_key; the password in -u USER:PASSWORD; user and
password in URLs; tokens of well-known services; and private keys (PEM). It
cannot find other secrets. Read the archive before you send it.

Examples:
  gpushctl support-bundle
  gpushctl support-bundle --file /tmp/gpush.tar.gz --yes";

#[derive(Debug, Args)]
pub(crate) struct SupportBundleArgs {
    /// File to write [default: gpush-support-TIME.tar.gz in the current directory]
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Keep user names and command lines of processes
    #[arg(long)]
    pub(crate) with_names: bool,
    /// Write without asking
    #[arg(long, short)]
    pub(crate) yes: bool,
}
