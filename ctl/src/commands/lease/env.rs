//! `gpushctl lease env`: prints the environment of a lease as text.

use gpush_api::{ApiError, Code, LeaseGrant, LeaseId};
use gpush_core::lease::environment::{Environment, SHELL_FAILURE};

use super::grant::{self, Asked};
use crate::{
    args::{Global, LeaseBindingFlags, RequestFlags},
    exit::{Failure, Outcome},
    output::Output,
    render::lease,
};

pub(super) fn run(
    global: &Global,
    id: Option<LeaseId>,
    flags: &RequestFlags,
    held: &LeaseBindingFlags,
    quiet: bool,
    out: &Output,
) -> Outcome {
    let printed = print(global, id, flags, held, quiet, out);
    if printed.is_err() && !out.json {
        // `eval "$(gpushctl lease env L17)"` ignores the exit status of gpushctl. So print a
        // command that fails; otherwise the next program would run without the lease.
        out.verbatim(SHELL_FAILURE.as_bytes())?;
    }
    printed
}

fn print(
    global: &Global,
    id: Option<LeaseId>,
    flags: &RequestFlags,
    held: &LeaseBindingFlags,
    quiet: bool,
    out: &Output,
) -> Outcome {
    let format = out.environment_format()?;
    if id.is_some() && (flags.is_given() || held.with.is_some() || held.user.is_some()) {
        let error = ApiError::new(Code::BadRequest, "LEASE cannot be combined with options that request a new lease");
        return Err(error.hint("leave out LEASE to request a new lease").into());
    }
    let asked = match id {
        Some(_) => None,
        None => Some(Asked { request: grant::bound(flags, held)?, quiet }),
    };
    super::super::ask(global, async |client| {
        let granted = match (id, &asked) {
            (Some(id), _) => client.lease_environment(id).await?,
            (None, Some(asked)) => grant::granted(client, global, asked, out).await?,
            (None, None) => return Ok(0),
        };
        let printed = parse_environment(&granted).map_err(Failure::from).and_then(|environment| {
            grant::warn(&granted, quiet, out);
            out.verbatim(environment.text(format).as_bytes())
        });
        if let (Err(failure), Some(_)) = (printed, &asked) {
            // The user did not get the environment and cannot use the new lease, so release it.
            let _ = client.lease_release(granted.lease.id).await;
            return Err(failure);
        }
        // Print the id of a new lease, because the user needs the id to release the lease.
        if asked.is_some() && !quiet {
            out.remark(&lease::started(&granted.lease, &out.look));
        }
        Ok(0)
    })
}

/// Parses and checks the environment of a lease: only plain values may reach a shell or a command.
pub(super) fn parse_environment(granted: &LeaseGrant) -> Result<Environment, ApiError> {
    Environment::from_variables(&granted.environment).map_err(|error| {
        let message = format!("gpushd sent an environment for {} that gpushctl cannot use", granted.lease.id);
        let error = ApiError::new(Code::Unreachable, message).cause(error.to_string());
        error.hint("compare the versions of gpushd and gpushctl with `gpushctl version`")
    })
}
