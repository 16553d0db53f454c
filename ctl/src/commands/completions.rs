//! `gpushctl completions SHELL`.

use clap::CommandFactory;

use crate::{args::Cli, exit::Outcome, output::Output};

pub(super) fn script(shell: clap_complete::Shell, out: &Output) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "gpushctl", &mut script);
    out.verbatim(&script)?;
    Ok(0)
}
