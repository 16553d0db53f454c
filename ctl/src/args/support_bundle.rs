//! The arguments of `support-bundle`.

use std::path::PathBuf;

use clap::Args;

/// The end of `gpushctl support-bundle --help`.
pub(super) const NOTES: &str = "\
Lists the files of the archive with their sizes, then asks before it writes.
Without a terminal, it does not ask. It never overwrites a file, and sends
nothing. bundle.json in the archive says which parts are missing, and why.

The archive has only the texts of a fixed list of fields: states, versions,
identifiers, layouts and settings. It has user ids, but no user names. The
text (left out) replaces command lines, reasons, hooks and other texts, and
messages that can repeat them. As root it collects more: the audit trail and
what gpushd wrote to the log. Read the archive before you send it.

Examples:
  gpushctl support-bundle
  gpushctl support-bundle --file /tmp/gpush.tar.gz --yes";

#[derive(Debug, Args)]
pub(crate) struct SupportBundleArgs {
    /// File to write [default: gpush-support-TIME.tar.gz in the current directory]
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Write without asking
    #[arg(long, short)]
    pub(crate) yes: bool,
}
