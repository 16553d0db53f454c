//! Clients of several users at a time, which a rule may ask for: whether the control daemon can. Those that are
//! known serve one user, and let another one's clients hang until the first one's have ended. So what it says
//! of itself is asked, and where it can't the target is one user's at a time, and says so.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, SystemTime},
};

use gpush_api::{MpsPolicy, MpsUsers};
use gpush_host::helper::Helpers;
use gpush_mps::protocol::version;
use tokio::process::Command;

/// How long it may take to print its help.
const DEADLINE: Duration = Duration::from_secs(2);

/// What a control daemon says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Says {
    /// Nothing of several users.
    One,
    /// That it can serve them.
    Many,
    /// Nothing: it can't be run.
    Nothing,
}

/// What a program says, and which file that was.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    program: PathBuf,
    written: Option<SystemTime>,
    says: Says,
}

/// Asks a program, unless `before` is of the same file.
pub(super) async fn ask(program: &Path, before: Option<Asked>) -> Asked {
    let written = std::fs::metadata(program).and_then(|meta| meta.modified()).ok();
    if let Some(before) = before.filter(|before| before.program == program && before.written == written) {
        return before;
    }
    let asked = Asked { program: program.to_owned(), written, says: says(program).await };
    tracing::warn!("users = \"many\": {}", why(&asked));
    asked
}

async fn says(program: &Path) -> Says {
    if Helpers::may_run(&program.to_string_lossy()).is_err() {
        return Says::Nothing;
    }
    let mut help = Command::new(program);
    help.arg("-h").env_clear().current_dir("/").stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(DEADLINE, help.output()).await {
        Ok(Ok(output)) if version::names_many_users(&String::from_utf8_lossy(&output.stdout)) => Says::Many,
        Ok(Ok(_)) => Says::One,
        Ok(Err(_)) | Err(_) => Says::Nothing,
    }
}

/// Why clients of several users can't be had.
pub(super) fn why(asked: &Asked) -> String {
    let program = asked.program.display();
    let why = match asked.says {
        Says::One => format!("{program} serves one user at a time"),
        Says::Many => format!("{program} may serve several, and this gpushd does not know how to have it do so"),
        Says::Nothing => format!("{program} does not say whether it can serve several"),
    };
    format!("clients of several users are wanted, and can't be had: {why}; it is one user's at a time")
}

/// What a policy comes to.
pub(super) fn had(policy: MpsPolicy) -> MpsPolicy {
    MpsPolicy { users: MpsUsers::One, ..policy }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_is_asked_once_and_again_when_it_is_another() {
        // As gpushd has it: below directories that are root's, or ours, alone.
        let dir = tempfile::tempdir_in("/usr/local/share").or_else(|_| tempfile::tempdir()).unwrap();
        let program = dir.path().join("nvidia-cuda-mps-control");
        let write = |says: &str| {
            std::fs::write(&program, format!("#!/bin/sh\necho {says}\n")).unwrap();
            std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        };
        let nothing = ask(&program, None).await;
        assert_eq!(nothing.says, Says::Nothing);
        assert!(why(&nothing).contains("does not say"), "{}", why(&nothing));
        write("Copyright");
        if Helpers::may_run(&program.to_string_lossy()).is_err() {
            println!("SKIPPED programs that answer: {} is not ours alone", dir.path().display());
            return;
        }
        let one = ask(&program, Some(nothing)).await;
        assert_eq!(one.says, Says::One);
        assert_eq!(ask(&program, Some(Asked { says: Says::Many, ..one.clone() })).await.says, Says::Many, "not again");
        write("-multiuser-server");
        std::fs::File::open(&program).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(ask(&program, Some(one)).await.says, Says::Many);
    }
}
