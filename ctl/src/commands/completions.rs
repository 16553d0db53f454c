//! `gpushctl completions SHELL`.

use crate::{
    args::Shell,
    complete,
    exit::{self, Outcome},
    output::Output,
};

pub(super) fn script(shell: Shell, out: &Output) -> Outcome {
    let script = complete::script(shell.name()).map_err(|error| exit::io("cannot write the script", &error))?;
    out.verbatim(&script)?;
    Ok(0)
}
