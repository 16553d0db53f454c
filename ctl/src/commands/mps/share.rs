//! `gpushctl mps env` and `release`: shares for programs that the user starts.

use std::io::IsTerminal;

use gpush_api::{ApiError, Code, MpsShareRequest, MpsShareTaken};
use gpush_client::Client;
use nix::{
    errno::Errno,
    sys::signal::kill,
    unistd::{Pid, getsid},
};

use super::shell;
use crate::{
    args::{Ceilings, Shell, Until},
    exit::Failure,
    output::Output,
    render::mps::change,
};

/// Returns the request, without the end of the share.
pub(super) fn request(Ceilings { percentage, memory, priority }: Ceilings) -> MpsShareRequest {
    MpsShareRequest { percentage, memory_limit_mib: memory, priority, with_pid: None, for_s: None }
}

pub(super) async fn env(
    client: &mut Client,
    target: &str,
    ceilings: Ceilings,
    Until { span, with }: Until,
    shell: Shell,
    out: &Output,
) -> Result<(), Failure> {
    let taken = match take(client, target, ceilings, span, with).await {
        Ok(taken) => taken,
        Err(failure) => {
            // `eval "$(gpushctl mps env 0)"` ignores the exit status of the command in it. Without this word the
            // program after it would run outside of MPS.
            if out.is_drawn() {
                out.verbatim(b"false\n")?;
            }
            return Err(failure);
        }
    };
    if let Err(failure) = hand_out(&taken, shell, out) {
        // The user did not get the environment of the share.
        let _ = client.mps_release(&taken.share.id).await;
        return Err(failure);
    }
    if std::io::stderr().is_terminal() {
        out.remark(&change::taken(&taken.share, &out.look));
    }
    Ok(())
}

async fn take(
    client: &mut Client,
    target: &str,
    ceilings: Ceilings,
    span: Option<u64>,
    with: Option<u32>,
) -> Result<MpsShareTaken, Failure> {
    let with_pid = match (span, with) {
        (None, None) => Some(session()?),
        (Some(_), _) | (None, Some(_)) => with,
    };
    Ok(client.mps_take_share(target, &MpsShareRequest { with_pid, for_s: span, ..request(ceilings) }).await?)
}

fn hand_out(taken: &MpsShareTaken, shell: Shell, out: &Output) -> Result<(), Failure> {
    if out.json {
        return out.document(taken);
    }
    out.verbatim(shell::lines(shell, &left_over(&taken.environment), &taken.environment)?.as_bytes())
}

/// Returns the MPS variables of this process that are not among these: they are from another share.
pub(super) fn left_over(environment: &[(String, String)]) -> Vec<String> {
    let around = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    around.filter(|name| name.starts_with(shell::OURS) && environment.iter().all(|(one, _)| one != name)).collect()
}

/// Returns the leader of the session of this command. A share without another end ends with it.
fn session() -> Result<u32, ApiError> {
    let no_end = |cause: String| {
        let error = ApiError::new(Code::BadRequest, "the share needs an end").cause(cause);
        error.hint("add `--for 2h`, or `--with $$` to end it with the shell")
    };
    let leader = getsid(None).map_err(|errno| no_end(format!("cannot find the session of this command: {errno}")))?;
    // 0 is a process outside of this container; 1 never ends.
    let pid = u32::try_from(leader.as_raw()).ok().filter(|pid| *pid > 1);
    let pid = pid.ok_or_else(|| no_end("this command runs outside a login session".to_owned()))?;
    match kill(Pid::from_raw(leader.as_raw()), None) {
        Ok(()) => Ok(pid),
        Err(Errno::ESRCH) => Err(no_end(format!("the leader of this session, pid {pid}, has ended"))),
        Err(Errno::EPERM) => Err(no_end(format!("the leader of this session, pid {pid}, belongs to another user"))),
        Err(errno) => Err(no_end(format!("cannot check the leader of this session, pid {pid}: {errno}"))),
    }
}

pub(super) async fn release(client: &mut Client, ids: &[String], out: &Output) -> Result<(), Failure> {
    let (mut released, mut errors) = (Vec::new(), Vec::new());
    // An unknown share does not affect the others.
    for id in ids {
        match client.mps_release(id).await {
            Ok(share) => released.push(share),
            Err(error) if error.kind == gpush_client::Kind::Answer => errors.push(ApiError::from(error)),
            Err(error) => return Err(error.into()),
        }
    }
    if errors.is_empty() {
        return out.show(&released, |look| change::released(&released, look));
    }
    let mut error = if errors.len() == 1 {
        errors.swap_remove(0)
    } else {
        ApiError::several(format!("{} of {} shares can't be given back", errors.len(), ids.len()), errors)
    };
    if !released.is_empty() {
        let given: Vec<&str> = released.iter().map(|share| share.id.as_str()).collect();
        error = error.outcome(format!("given back: {}", given.join(", ")));
    }
    Err(error.into())
}
