//! `gpushctl man DIR`: writes the man pages. The builds of the packages run this command.

use std::path::Path;

use clap::CommandFactory;

use crate::{
    args::Cli,
    exit::{self, Outcome},
};

/// The section FILES of the man page gpushctl(1).
const FILES: [(&str, &str); 5] = [
    ("/run/gpush/gpushd.sock", "Socket of the host's agent"),
    ("/run/gpush/admin.sock", "Second socket of the host's agent, for root and the user that gpushd runs as"),
    ("$XDG_RUNTIME_DIR/gpush/gpushd.sock", "Socket of a user's own gpushd, used if the host has none"),
    ("/etc/gpush/config.toml", "Config of gpushd, which `config check` and offline plans read"),
    gpush_man::DOCUMENTS,
];

/// Writes the man page gpushctl(1), and one page for each command.
pub(super) fn pages(dir: &Path) -> Outcome {
    std::fs::create_dir_all(dir).map_err(|e| exit::io(format!("can't make the directory {}", dir.display()), &e))?;
    gpush_man::write_pages(Cli::command(), "gpushctl", &FILES, dir)
        .map_err(|e| exit::io(format!("can't write man pages into {}", dir.display()), &e))?;
    Ok(0)
}
