//! The error for a connection that ended before the answer.
//!
//! Directly after `systemctl mask --now gpushd`, systemd still listens on the socket. The first client connects, systemd
//! cannot start the masked service, and closes the socket. So the client gets `ECONNRESET` and not `ECONNREFUSED`.

use gpush_api::{ApiError, Code};

use super::{Facts, is_masked, start};
use crate::question::Question;

/// Returns the error message for a connection that gpushd, or systemd in its place, closed before it answered.
pub(crate) fn explain_lost(question: &Question<'_>, facts: &Facts) -> ApiError {
    let path = facts.socket.path.display();
    let error = ApiError::new(
        Code::Unreachable,
        format!("gpushd at {path} closed the connection before it answered {question}"),
    );
    let outcome = question.key.is_some().then(|| question.commands_showing_outcome());
    match (is_masked(facts), outcome) {
        (true, None) => error.hint(start(facts)),
        (true, Some(commands)) => {
            error.hint(format!("{}. gpushd may have carried out the request: check with {commands}", start(facts)))
        }
        (false, None) => {
            error.hint("find the cause with `systemctl status gpushd` and `journalctl -u gpushd`").retryable()
        }
        (false, Some(commands)) => {
            error.hint(format!("gpushd may have carried out the request: check with {commands}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        explain::PathContent,
        socket::{DEFAULT_SOCKET, Origin, Socket},
    };

    fn facts(masked: Vec<&'static str>) -> Facts {
        Facts {
            socket: Socket::given(DEFAULT_SOCKET, Origin::System),
            found: PathContent::Nothing,
            own: None,
            uid: 0,
            user: "root".into(),
            unit_installed: true,
            socket_unit_installed: true,
            masked,
        }
    }

    /// Fault: the first `gpushctl status` after `systemctl mask --now gpushd` did not name `systemctl unmask`.
    #[test]
    fn lost_connection_to_masked_unit_hints_at_unmask() {
        let read = Question::get("/v1/gpus");
        let error = explain_lost(&read, &facts(vec!["gpushd.service"]));
        assert_eq!(
            error.hint.as_deref(),
            Some(
                "systemd does not start masked units: run `systemctl unmask gpushd.service`, then `systemctl start gpushd`"
            )
        );
        assert!(!error.retryable, "another attempt cannot succeed");
        let change = Question { method: "POST", path: "/v1/apply", key: Some("key".to_owned()), ..read };
        let hint = explain_lost(&change, &facts(vec!["gpushd.service"])).hint.unwrap();
        assert!(hint.contains("systemctl unmask") && hint.contains("`gpushctl operation list`"), "{hint}");
    }

    #[test]
    fn lost_connection_to_unmasked_unit_hints_at_the_journal() {
        let error = explain_lost(&Question::get("/v1/gpus"), &facts(Vec::new()));
        assert!(error.retryable && error.hint.unwrap().contains("journalctl -u gpushd"));
    }
}
