//! `gpushctl run`: holds a lease while a command runs.
//!
//! ```text
//! a lease with a new scope for this process ─► this process becomes the command (exec)
//!                                              └► exec fails: the lease is released
//! ```
//!
//! The process that requests the lease becomes the command, so the lease belongs to the command itself. There is no
//! process in between whose exit could end the lease. The terminal, signals and exit status are those of the command.

use std::{
    ffi::OsString,
    io::{ErrorKind, IsTerminal},
    os::unix::process::CommandExt,
    path::Path,
    process::Command,
    time::Duration,
};

use gpush_api::{ApiError, BindTo, Code, LeaseBinding, LeaseGrant, LeaseHolder, LeaseId, LeaseState};
use gpush_client::Client;
use gpush_core::lease::environment::Environment;
use gpush_host::cgroup::is_in_container;

use super::{env, grant, unrunnable};
use crate::{
    args::{Global, RunArgs, typed::command_line},
    exit::{self, Failure, NO_COMMAND, NOT_FOUND, NOT_RUN, Outcome},
    output::Output,
    render::lease,
};

/// Maximum time for the release of a lease if the command cannot run. Without a release, the lease ends when this
/// process exits.
const RELEASE: Duration = Duration::from_secs(2);

/// Maximum length of a command in a hint, in bytes.
const LONGEST_TYPED: usize = 60;

/// Environment variable that names the lease of a process.
const LEASE: &str = "GPUSH_LEASE";

/// Prefix of the environment variables for MPS. gpushctl removes these variables, because they may belong to another
/// lease.
const MPS: &str = "CUDA_MPS_";

pub(super) fn run(global: &Global, args: &RunArgs, out: &Output) -> Outcome {
    let Some((program, arguments)) = args.command.split_first() else {
        return report_error(ApiError::new(Code::BadRequest, "a command is missing").into(), NO_COMMAND, out);
    };
    let (granted, environment, is_new) = match lease(global, args, out) {
        Ok(found) => found,
        Err(Failure::Error(error)) => {
            let error = with_typed_command(*error, &args.command);
            return report_error(error.into(), NO_COMMAND, out);
        }
        Err(failure) => return report_error(failure, NO_COMMAND, out),
    };
    grant::warn(&granted, args.quiet, out);
    if is_new && !args.quiet && std::io::stderr().is_terminal() {
        out.remark(&lease::started(&granted.lease, &out.look));
    }
    let cause = execute(&environment, program, arguments);
    if is_new {
        release(global, granted.lease.id);
    }
    let status = if cause.kind() == ErrorKind::NotFound { NOT_FOUND } else { NOT_RUN };
    let error = exit::io(format!("cannot run {}", Path::new(program).display()), &cause);
    let error = match unrunnable::hint(&args.command, cause.kind()) {
        Some(hint) => error.hint(hint),
        None => error,
    };
    report_error(error.into(), status, out)
}

/// Puts the typed command into the hint of an error, in place of `COMMAND`, so that the user can copy the hint.
fn with_typed_command(mut error: ApiError, command: &[OsString]) -> ApiError {
    let words: Option<Vec<&str>> = command.iter().map(|word| word.to_str()).collect();
    let typed = words.and_then(command_line).filter(|typed| typed.len() <= LONGEST_TYPED);
    if let (Some(hint), Some(typed)) = (&mut error.hint, typed) {
        *hint = hint.replace(" -- COMMAND`", &format!(" -- {typed}`"));
    }
    error
}

/// Prints an error of `gpushctl run` itself, and returns its exit status.
pub(super) fn report_error(failure: Failure, status: u8, out: &Output) -> Outcome {
    match failure {
        Failure::Error(error) => out.error(&error),
        Failure::BrokenPipe => {}
    }
    Ok(status)
}

/// Returns the lease for the command and its environment. The last value is true if the lease is new.
fn lease(global: &Global, args: &RunArgs, out: &Output) -> Result<(LeaseGrant, Environment, bool), Failure> {
    let is_request = args.request.is_given();
    if args.lease.is_some() && is_request {
        let error =
            ApiError::new(Code::BadRequest, "`--lease` cannot be combined with options that request a new lease");
        return Err(error.hint("leave out `--lease` to request a new lease").into());
    }
    let mut request = args.request.request().map_err(ApiError::from)?;
    request.process = Some(std::process::id());
    // Request a new scope, which contains all processes that the command starts. If gpushd cannot create a scope, the
    // lease ends when this process exits.
    request.bind_to = BindTo::Scope;
    let asked = grant::Asked { request, quiet: args.quiet };
    super::super::ask(global, async |client| {
        let around = match args.lease {
            Some(_) => None,
            None => open_lease(client).await,
        };
        let enters = match (args.lease, around) {
            (None, Some(around)) if is_request => return Err(nested(around).into()),
            (lease, around) => lease.or(around),
        };
        let granted = match enters {
            Some(id) => enter(client, id, args.lease.is_some()).await?,
            None => grant::granted(client, global, &asked, out).await?,
        };
        match env::parse_environment(&granted) {
            Ok(environment) => Ok((granted, environment, enters.is_none())),
            Err(error) => {
                if enters.is_none() {
                    let _ = client.lease_release(granted.lease.id).await;
                }
                Err(error.into())
            }
        }
    })
}

/// Returns the lease that the environment of this process names. Returns `None` if that lease has ended, for
/// example in an old shell.
async fn open_lease(client: &mut Client) -> Option<LeaseId> {
    let id: LeaseId = std::env::var(LEASE).ok()?.parse().ok()?;
    let lease = client.lease_of(id).await.ok()?;
    let is_open = matches!(lease.state, LeaseState::Granting | LeaseState::Active);
    (is_open && lease.holder.uid == nix::unistd::getuid().as_raw()).then_some(id)
}

fn nested(around: LeaseId) -> ApiError {
    let error = ApiError::new(Code::BadRequest, format!("this command already runs in lease {around}"));
    let error = error.cause(format!("{LEASE}={around} is set: a request would give the command two leases"));
    error.hint(format!(
        "to run the command in {around}, leave out the options that request a lease; to request another lease, first \
        run `unset {LEASE}`"
    ))
}

/// Returns the environment of a lease that the user holds.
///
/// Refuses the lease of a Slurm job, which a process can enter only through Slurm. Refuses the lease of a container if
/// `--lease` names it. Does not refuse it if `GPUSH_LEASE` names it, because this variable is set inside the container.
async fn enter(client: &mut Client, id: LeaseId, named: bool) -> Result<LeaseGrant, Failure> {
    let granted = client.lease_environment(id).await?;
    let refused = |code, message: String| ApiError::new(code, message);
    let holder = &granted.lease.holder;
    if holder.uid != nix::unistd::getuid().as_raw() {
        return Err(of_other_user(id, holder).into());
    }
    if let LeaseBinding::Job { job, .. } = &granted.lease.binding {
        let error = refused(Code::Denied, format!("lease {id} belongs to Slurm job {job}"));
        return Err(error.hint(format!("run the command in the job: 'srun --jobid={job} --overlap COMMAND'")).into());
    }
    if let LeaseBinding::Cgroup { cgroup: Some(cgroup), .. } = &granted.lease.binding
        && named
        && is_in_container(cgroup)
    {
        let error = refused(Code::Denied, format!("lease {id} belongs to a container"));
        let error = error.cause(format!("its processes are in the cgroup {cgroup}"));
        return Err(error.hint("run the command in the container, as with `docker exec CONTAINER COMMAND`").into());
    }
    // If the kernel denies the GPUs to login sessions, gpushd moves this process out of its session.
    client.lease_enter(id).await?;
    Ok(granted)
}

/// Returns the error for the lease of another user. gpushd gives its environment only to the holder and administrators.
fn of_other_user(id: LeaseId, holder: &LeaseHolder) -> ApiError {
    let name = holder.user.clone().unwrap_or_else(|| format!("uid {}", holder.uid));
    let error = ApiError::new(Code::Denied, format!("cannot run a command in lease {id}: {name} holds it"));
    let error = error.cause("a lease is for the processes of its holder, also if an administrator starts them");
    // `runuser` needs the name of a user.
    match &holder.user {
        Some(user) => {
            error.hint(format!("run it as the holder: `runuser -u {user} -- gpushctl run --lease {id} -- COMMAND`"))
        }
        None => error.hint("request a lease of your own: `gpushctl run -- COMMAND`"),
    }
}

/// Replaces this process by the command. Returns only if this fails.
fn execute(environment: &Environment, program: &OsString, arguments: &[OsString]) -> std::io::Error {
    let mut command = Command::new(program);
    command.args(arguments);
    let left_over = std::env::vars_os().map(|(name, _)| name);
    for name in left_over.filter(|name| name.to_str().is_some_and(|name| name.starts_with(MPS))) {
        command.env_remove(name);
    }
    for name in environment.unset() {
        command.env_remove(name);
    }
    command.envs(environment.variables()).exec()
}

/// Releases the lease. Ignores errors, because the lease ends anyway when this process exits.
fn release(global: &Global, id: LeaseId) {
    let _ = super::super::with_agent(global, async |client| {
        let _ = tokio::time::timeout(RELEASE, client.lease_release(id)).await;
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: the error said that administrators may use the lease, and the hint was about the leases of root.
    #[test]
    fn lease_of_another_user_is_used_as_that_user() {
        let holder = |user: Option<&str>| LeaseHolder { uid: 1000, user: user.map(str::to_owned) };
        let error = of_other_user(LeaseId(2), &holder(Some("anna")));
        assert_eq!(error.message, "cannot run a command in lease L2: anna holds it");
        assert!(error.hint.unwrap().contains("runuser -u anna -- gpushctl run --lease L2"));
        assert!(of_other_user(LeaseId(2), &holder(None)).hint.unwrap().contains("`gpushctl run -- COMMAND`"));
    }

    #[test]
    fn hint_contains_the_typed_command() {
        let error =
            || ApiError::new(Code::Unsupported, "no whole GPU").hint("as with `gpushctl run --mps 25 -- COMMAND`");
        let hint = |words: &[&str]| {
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            with_typed_command(error(), &words).hint.unwrap()
        };
        assert_eq!(hint(&["python", "a b.py"]), "as with `gpushctl run --mps 25 -- python 'a b.py'`");
        assert_eq!(hint(&["python", &"x".repeat(80)]), "as with `gpushctl run --mps 25 -- COMMAND`");
        assert_eq!(hint(&["a`b"]), "as with `gpushctl run --mps 25 -- COMMAND`", "it would end the quotes");
    }
}
