//! Finds out whether an MPS daemon can serve several users at a time, which a rule requests with `users = "many"`. If
//! the daemon cannot, the target serves one user at a time, and a finding says so.

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use gpush_api::{MpsPolicy, MpsUsers};
use gpush_mps::daemon::multi_user::{self, Support};

/// Whether the MPS control program supports several users, and the modification time of the program file.
#[derive(Debug, Clone)]
pub(super) struct ProgramSupport {
    program: PathBuf,
    written: Option<SystemTime>,
    support: Support,
}

/// Finds out what the control program supports. Returns `before` if it is a result for the same file.
pub(super) async fn probe(program: &Path, before: Option<ProgramSupport>) -> ProgramSupport {
    let written = std::fs::metadata(program).and_then(|meta| meta.modified()).ok();
    let is_same = |before: &ProgramSupport| before.program == program && before.written == written;
    let is_known = |before: &ProgramSupport| before.support != Support::Unknown;
    if let Some(before) = before.filter(|before| is_same(before) && is_known(before)) {
        return before;
    }
    let asked = ProgramSupport { program: program.to_owned(), written, support: multi_user::support(program).await };
    match reason_single_user(&asked) {
        Some(why) => tracing::warn!("{why}"),
        None => tracing::info!("{} supports users = \"many\"", program.display()),
    }
    asked
}

/// If a rule requests several users but the target serves only one at a time, returns the reason.
pub(super) fn reason_single_user(asked: &ProgramSupport) -> Option<String> {
    let program = asked.program.display();
    let why = match asked.support {
        Support::Supported => return None,
        Support::Unsupported => format!("{program} does not know the option {}", multi_user::OPTION),
        Support::NeedsRoot => {
            format!("only root may start {program} with {}, and gpushd is not root", multi_user::OPTION)
        }
        Support::Unknown => format!("gpushd cannot run {program}"),
    };
    Some(format!("the rule has users = \"many\", but this target serves one user at a time: {why}"))
}

/// Returns the effective policy: several users only if the control program supports them.
pub(super) fn effective_policy(policy: MpsPolicy, asked: Option<&ProgramSupport>) -> MpsPolicy {
    match asked {
        Some(ProgramSupport { support: Support::Supported, .. }) => policy,
        Some(_) | None => MpsPolicy { users: MpsUsers::One, ..policy },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(support: Support) -> ProgramSupport {
        ProgramSupport { program: "/usr/bin/nvidia-cuda-mps-control".into(), written: None, support }
    }

    #[test]
    fn several_users_are_served_only_where_supported() {
        let rule = MpsPolicy { users: MpsUsers::Many, ..MpsPolicy::default() };
        let users = |asked: Option<&ProgramSupport>| effective_policy(rule.clone(), asked).users;
        assert_eq!(users(None), MpsUsers::One);
        assert_eq!(users(Some(&asked(Support::Supported))), MpsUsers::Many);
        assert_eq!(reason_single_user(&asked(Support::Supported)), None);
        for support in [Support::Unsupported, Support::NeedsRoot, Support::Unknown] {
            assert_eq!(users(Some(&asked(support))), MpsUsers::One);
            assert!(reason_single_user(&asked(support)).unwrap().contains("serves one user at a time: "));
        }
    }

    #[tokio::test]
    async fn program_is_asked_again_only_after_it_changed() {
        let program = tempfile::NamedTempFile::new().unwrap();
        let first = probe(program.path(), None).await;
        let known = ProgramSupport { support: Support::Supported, ..first };
        assert_eq!(probe(program.path(), Some(known.clone())).await.support, Support::Supported);
        program.as_file().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert_ne!(probe(program.path(), Some(known)).await.support, Support::Supported);
    }
}
