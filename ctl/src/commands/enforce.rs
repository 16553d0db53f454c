//! `gpushctl enforce`: whether the kernel denies the GPUs to login sessions.

use std::{
    ffi::OsString,
    io::{ErrorKind, IsTerminal},
    os::unix::process::CommandExt,
    path::Path,
    process::Command,
};

use gpush_api::{DeviceEnforcement, EnforcedUnit, EnforcementRequest, EnforcementState};
use gpush_client::Client;

use crate::{
    args::{Enforce, EnforceOnArgs, Global, Why},
    exit::{self, DIFFERS, Outcome},
    output::Output,
    render::enforce,
};

/// Environment variable with the shell of the user.
const SHELL: &str = "SHELL";

/// The shell if the environment names none.
const DEFAULT_SHELL: &str = "/bin/sh";

pub(super) fn run(global: &Global, command: Enforce, out: &Output) -> Outcome {
    match command {
        Enforce::Status => super::ask(global, async |client| status(client, out).await),
        Enforce::Plan => super::ask(global, async |client| {
            let plan = client.enforcement_plan().await?;
            out.show(&plan, |look| enforce::plan(&plan, look))?;
            Ok(0)
        }),
        Enforce::On(EnforceOnArgs { force, why: Why { reason } }) => super::ask(global, async |client| {
            let before = client.enforcement().await?;
            let after = client.enforcement_on(&EnforcementRequest { force, reason }).await?;
            out.change(units(&before) != units(&after), &after, |look| enforce::status(&after, look))?;
            Ok(0)
        }),
        Enforce::Off(Why { reason }) => super::ask(global, async |client| {
            let before = client.enforcement().await?;
            let after = client.enforcement_off(&EnforcementRequest { force: false, reason }).await?;
            out.change(units(&before) != units(&after), &after, |look| enforce::status(&after, look))?;
            Ok(0)
        }),
        Enforce::Shell { command } => shell(global, command, out),
    }
}

async fn status(client: &mut Client, out: &Output) -> Outcome {
    let found = client.enforcement().await?;
    out.show(&found, |look| enforce::status(&found, look))?;
    let is_wanted = !found.enforced_gpus.is_empty();
    Ok(if is_wanted && found.state != EnforcementState::Verified { DIFFERS } else { 0 })
}

fn units(of: &DeviceEnforcement) -> &[EnforcedUnit] {
    &of.units
}

/// Moves this process out of its login session. Then executes the command, or the user's shell if there is none.
fn shell(global: &Global, command: Vec<OsString>, out: &Output) -> Outcome {
    let mut words = command.into_iter();
    let program = words.next().or_else(|| std::env::var_os(SHELL)).unwrap_or_else(|| DEFAULT_SHELL.into());
    let scope = super::ask(global, async |client| Ok(client.leave_session().await?))?;
    if std::io::stderr().is_terminal() {
        out.remark(&format!("in {}: this process can open the GPUs\n", out.look.clean(&scope.unit)));
    }
    let cause = Command::new(&program).args(words).exec();
    let error = exit::io(format!("cannot run {}", Path::new(&program).display()), &cause);
    let error = match cause.kind() {
        ErrorKind::NotFound => error.hint("check the name of the command, which follows `--`"),
        _ => error,
    };
    Err(error.into())
}
