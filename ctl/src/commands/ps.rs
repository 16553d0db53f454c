//! `gpushctl ps`.

use gpush_api::{ApiError, Code, GpuProcesses};
use gpush_client::Client;

use crate::{
    args::{PsArgs, typed},
    exit::{DIFFERS, Failure, Outcome},
    output::Output,
    render::processes,
};

pub(super) async fn run(client: &mut Client, args: &PsArgs, out: &Output) -> Outcome {
    let mut all = client.processes().await?;
    let selectors = args.which.selectors();
    if !selectors.is_empty() {
        only(client, &mut all, &selectors).await?;
    }
    if let Some(user) = &args.user {
        let uid = super::lease::uid_of(user)?;
        if let Some(text) = keep_user(&mut all, uid, user) {
            out.remark(&(out.look.wrap("! ", &text).join("\n") + "\n"));
        }
    }
    if args.unleased {
        all.processes.retain(|one| one.unleased.is_some());
    }
    out.list(&all, |look| processes::list(&all, args.unleased, look))?;
    Ok(match all.unknown.first() {
        _ if !args.unleased => 0,
        _ if !all.processes.is_empty() => DIFFERS,
        // The processes of a GPU are unknown, so some may be unleased: this is an error.
        Some(one) => one.error.code.exit_status(),
        None => 0,
    })
}

/// Keeps only the processes of the selected GPUs.
async fn only(client: &mut Client, all: &mut GpuProcesses, selectors: &[String]) -> Result<(), Failure> {
    let host = client.gpus(false).await?;
    let chosen = super::select_of(client, host, selectors).await.map_err(|failure| match (failure, selectors) {
        (Failure::Error(error), [name]) if error.code == Code::NotFound => match name.parse::<u32>() {
            Ok(number) => of_number(*error, number).into(),
            Err(_) if super::lease::uid_of(name).is_ok() => of_user(*error, name).into(),
            Err(_) => (*error).into(),
        },
        (failure, _) => failure,
    })?;
    let is_chosen = |uuid: &str| chosen.iter().any(|gpu| gpu.uuid == uuid);
    all.processes.retain(|one| is_chosen(one.gpu_uuid.as_str()));
    all.unknown.retain(|one| is_chosen(one.gpu_uuid.as_str()));
    Ok(())
}

/// Adds the hint for a name that no GPU has, but a user of this host.
fn of_user(error: ApiError, name: &str) -> ApiError {
    match typed::command_line(["gpushctl", "ps", "--user", name]) {
        Some(command) => error.hint(format!("for the processes of a user: `{command}`")),
        None => error,
    }
}

/// Largest number that is probably the index of a GPU. A larger one is a process.
const LARGEST_INDEX: u32 = 63;

/// Adds the hint for a number that is not the index of a GPU, but perhaps a process.
fn of_number(error: ApiError, number: u32) -> ApiError {
    if number <= LARGEST_INDEX {
        return error;
    }
    error.hint(format!("for process {number}, search the list: `gpushctl ps | grep -w {number}`"))
}

/// Keeps only the processes of a user. If none is left, returns a remark about the processes whose users the caller may not
/// see.
fn keep_user(all: &mut GpuProcesses, uid: u32, user: &str) -> Option<String> {
    let hidden = all.processes.iter().filter(|one| one.process.uid.is_none()).count();
    all.processes.retain(|one| one.process.uid == Some(uid) || one.account.as_deref() == Some(user));
    (hidden > 0 && all.processes.is_empty()).then(|| {
        let what = if hidden == 1 { "1 process of another user is" } else { "processes of other users are" };
        format!("{what} not shown: only administrators see whose processes these are")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: the hint for `ps anna` was about the names of GPUs.
    #[test]
    fn name_of_a_user_leads_to_the_option_for_users() {
        let error = of_user(ApiError::new(Code::NotFound, "no GPU is named `anna`"), "anna");
        assert_eq!(error.hint.as_deref(), Some("for the processes of a user: `gpushctl ps --user anna`"));
    }

    /// Fault: the hint for `ps 1234` and `ps --gpu 9` was about the user with this uid.
    #[test]
    fn number_is_a_process_or_a_gpu() {
        let error =
            |number| of_number(ApiError::new(Code::NotFound, "there is no GPU").hint("list"), number).hint.unwrap();
        assert!(error(1234).contains("`gpushctl ps | grep -w 1234`"));
        assert_eq!(error(9), "list");
    }

    /// Fault: for a caller who is not an administrator, the list was empty without a reason.
    #[test]
    fn processes_of_unknown_users_are_mentioned_if_no_process_is_left() {
        let host = |uids: &[Option<u32>]| {
            let process = |uid: &Option<u32>| serde_json::json!({"gpu": 0, "gpu_uuid": "GPU-1", "target": "GPU-1", "uid": uid, "kind": "compute"});
            let processes: Vec<_> = uids.iter().map(process).collect();
            serde_json::from_value::<GpuProcesses>(serde_json::json!({"policy": "report", "gpu_processes": processes}))
                .unwrap()
        };
        let kept = |uids: &[Option<u32>]| {
            let mut all = host(uids);
            let remark = keep_user(&mut all, 1000, "alice");
            (all.processes.len(), remark)
        };
        assert_eq!(kept(&[Some(1000), None]), (1, None));
        assert_eq!(kept(&[Some(1001)]), (0, None));
        let (left, remark) = kept(&[None, Some(1001)]);
        assert!(left == 0 && remark.unwrap().starts_with("1 process of another user is not shown"));
        assert!(kept(&[None, None]).1.unwrap().starts_with("processes of other users are not shown"));
    }
}
