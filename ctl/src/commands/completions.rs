//! `gpushctl completions SHELL`, and `gpushctl man DIR`, with which packages make the man pages.

use std::path::Path;

use clap::{Command, CommandFactory};

use crate::{args::Cli, exit::{self, Outcome}, output::Output};

pub(super) fn script(shell: clap_complete::Shell, out: &Output) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "gpushctl", &mut script);
    out.verbatim(&script)?;
    Ok(0)
}

/// Writes `gpushctl.1` and a page for each command.
pub(super) fn man(dir: &Path) -> Outcome {
    std::fs::create_dir_all(dir).map_err(|e| exit::io(format!("can't make the directory {}", dir.display()), &e))?;
    let mut command = Cli::command();
    command.build();
    pages(&command, "gpushctl", dir)?;
    Ok(0)
}

fn pages(command: &Command, name: &str, dir: &Path) -> Result<(), exit::Failure> {
    let file = dir.join(format!("{name}.1"));
    let mut page = Vec::new();
    let titled = command.clone().name(name.to_owned()).bin_name(name.replace('-', " "));
    let rendered = clap_mangen::Man::new(titled).title(name.to_uppercase()).render(&mut page);
    rendered
        .and_then(|()| std::fs::write(&file, page))
        .map_err(|e| exit::io(format!("can't write {}", file.display()), &e))?;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        pages(sub, &format!("{name}-{}", sub.get_name()), dir)?;
    }
    Ok(())
}
