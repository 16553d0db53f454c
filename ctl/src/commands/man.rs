//! `gpushctl man DIR`: writes the man pages. The builds of the packages run this command.

use std::path::Path;

use clap::{Command, CommandFactory};
use gpush_man::Appendix;

use crate::{
    args::Cli,
    exit::{self, Outcome},
};

/// The section FILES of the man page gpushctl(1).
const FILES: [(&str, &str); 5] = [
    ("/run/gpush/gpushd.sock", "Socket of the host's agent"),
    ("/run/gpush/admin.sock", "Second socket of the host's agent, for root and the user that gpushd runs as"),
    ("$XDG_RUNTIME_DIR/gpush/gpushd.sock", "Socket of a user's own agent, used if the host has none"),
    ("/etc/gpush/config.toml", "Config of the agent, which `config check` and offline plans read"),
    gpush_man::DOCUMENTS,
];

/// Writes the man page gpushctl(1), and one page for each command.
pub(super) fn pages(dir: &Path) -> Outcome {
    std::fs::create_dir_all(dir).map_err(|e| exit::io(format!("can't make the directory {}", dir.display()), &e))?;
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let write = |command: &Command, name: &str, appendix: &Appendix<'_>| -> std::io::Result<()> {
        std::fs::write(dir.join(format!("{name}.1")), gpush_man::page(command, name, "1", appendix)?)
    };
    page(&command, "gpushctl", None, &write)
        .map_err(|e| exit::io(format!("can't write man pages into {}", dir.display()), &e))?;
    Ok(0)
}

fn page(
    command: &Command,
    name: &str,
    parent: Option<&str>,
    write: &impl Fn(&Command, &str, &Appendix<'_>) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let see_also: Vec<String> =
        parent.map(|parent| format!("{parent}(1)")).into_iter().chain(["gpushd(8)".to_owned()]).collect();
    let files: &[(&str, &str)] = if parent.is_none() { &FILES } else { &[] };
    write(command, name, &Appendix { files, see_also: &see_also })?;
    for child in command.get_subcommands().filter(|child| !child.is_hide_set()) {
        page(child, &format!("{name}-{}", child.get_name()), Some(name), write)?;
    }
    Ok(())
}
