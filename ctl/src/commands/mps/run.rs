//! `gpushctl mps run`: a share for as long as a command runs.
//!
//! ```text
//! a share that ends with this process ─► this process becomes the command (exec)
//!                                        └► it can't: the share is given back
//! ```
//!
//! So the share belongs to the command: no process in between can end it, and terminal, signals and exit status are
//! those of the command.

use std::{ffi::OsString, io::ErrorKind, os::unix::process::CommandExt, path::Path, process::Command, time::Duration};

use gpush_api::{ApiError, Code, MpsShareRequest, MpsShareTaken};

use super::share;
use crate::{
    args::{Ceilings, Global},
    exit::{self, Failure, NO_COMMAND, NOT_FOUND, NOT_RUN, Outcome},
    output::Output,
};

/// How long the release of the share may take. A share that is not released by then ends with this process.
const GIVING_BACK: Duration = Duration::from_secs(2);

pub(super) fn run(global: &Global, target: &str, ceilings: Ceilings, command: &[OsString], out: &Output) -> Outcome {
    let Some((program, arguments)) = command.split_first() else {
        return own(ApiError::new(Code::BadRequest, "a command is missing").into(), NO_COMMAND, out);
    };
    let wanted = MpsShareRequest { with_pid: Some(std::process::id()), ..share::request(ceilings) };
    let taken = super::super::with_agent(global, async |client| Ok(client.mps_take_share(target, &wanted).await?));
    let taken = match taken {
        Ok(taken) => taken,
        Err(failure) => return own(failure, NO_COMMAND, out),
    };
    let cause = become_it(&taken, program, arguments);
    give_back(global, &taken);
    let status = if cause.kind() == ErrorKind::NotFound { NOT_FOUND } else { NOT_RUN };
    own(exit::io(format!("can't run {}", Path::new(program).display()), &cause).into(), status, out)
}

/// Prints an error of `mps run` itself, and ends with its exit status.
fn own(failure: Failure, status: u8, out: &Output) -> Outcome {
    match failure {
        Failure::Error(error) => out.error(&error),
        Failure::BrokenPipe => {}
    }
    Ok(status)
}

/// Executes the command in this process; returns only with the error if that fails.
fn become_it(taken: &MpsShareTaken, program: &OsString, arguments: &[OsString]) -> std::io::Error {
    let mut command = Command::new(program);
    command.args(arguments);
    for name in share::left_over(&taken.environment) {
        command.env_remove(name);
    }
    command.envs(taken.environment.iter().map(|(name, value)| (name, value))).exec()
}

/// Releases the share. A failure is not reported: the share ends with this process.
fn give_back(global: &Global, taken: &MpsShareTaken) {
    let _ = super::super::with_agent(global, async |client| {
        let _ = tokio::time::timeout(GIVING_BACK, client.mps_release(&taken.share.id)).await;
        Ok(())
    });
}
