//! `gpushctl completions SHELL`, and `gpushctl man DIR`, with which packages make the man pages.

use std::path::Path;

use clap::CommandFactory;

use crate::{
    args::Cli,
    exit::{self, Outcome},
    output::Output,
};

pub(super) fn script(shell: clap_complete::Shell, out: &Output) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "gpushctl", &mut script);
    out.verbatim(&script)?;
    Ok(0)
}

/// Writes `gpushctl.1` and a page for each command.
pub(super) fn man(dir: &Path) -> Outcome {
    std::fs::create_dir_all(dir).map_err(|e| exit::io(format!("can't make the directory {}", dir.display()), &e))?;
    clap_mangen::generate_to(Cli::command(), dir)
        .map_err(|e| exit::io(format!("can't write man pages into {}", dir.display()), &e))?;
    Ok(0)
}
