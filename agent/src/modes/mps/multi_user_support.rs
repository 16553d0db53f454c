//! Finds out whether an MPS daemon can serve several users at a time, which a rule requests with `users = "many"`. If
//! the daemon cannot, the target serves one user at a time, and a finding says so.

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use gpush_core::mps::MultiUserSupport;
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
fn reason_single_user(asked: &ProgramSupport) -> Option<String> {
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

/// Returns what is known about the control program, for the state of the host.
pub(super) fn of(asked: &ProgramSupport) -> MultiUserSupport {
    reason_single_user(asked).map_or(MultiUserSupport::Supported, MultiUserSupport::Unsupported)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(support: Support) -> ProgramSupport {
        ProgramSupport { program: "/usr/bin/nvidia-cuda-mps-control".into(), written: None, support }
    }

    #[test]
    fn program_without_support_has_a_reason() {
        assert_eq!(of(&asked(Support::Supported)), MultiUserSupport::Supported);
        for support in [Support::Unsupported, Support::NeedsRoot, Support::Unknown] {
            let MultiUserSupport::Unsupported(why) = of(&asked(support)) else { panic!("{support:?}") };
            assert!(why.contains("serves one user at a time: "), "{why}");
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
