//! Names of GPUs and of their states.

use anstyle::Style;
use gpush_api::{Actor, GpuIndex, GpuState};

use super::{
    Appearance,
    appearance::{BAD, NOTE, PLAIN},
};

/// Returns a state as text, with its style.
pub(crate) fn state(state: GpuState) -> (&'static str, Style) {
    match state {
        GpuState::Ready => ("ready", PLAIN),
        GpuState::Cordoned => ("cordoned", NOTE),
        GpuState::Changing => ("changing", NOTE),
        GpuState::Held => ("held", BAD),
        GpuState::Maintenance => ("maintenance", NOTE),
        GpuState::Degraded => ("degraded", BAD),
        GpuState::Unknown => ("unknown", BAD),
        GpuState::Lost => ("lost", BAD),
    }
}

/// Returns the name of a user, or else the uid. `account` is the user who owns the uid as a subordinate uid. Does not remove
/// control characters.
pub(crate) fn user_name(user: Option<&str>, uid: u32, account: Option<&str>) -> String {
    match (user, account) {
        (Some(user), _) => user.to_owned(),
        (None, Some(account)) => format!("{uid} (subordinate of {account})"),
        (None, None) => format!("uid {uid}"),
    }
}

/// Returns the name of the user who made a request, or else the uid.
pub(crate) fn actor(actor: &Actor, look: &Appearance) -> String {
    look.clean(&user_name(actor.user.as_deref(), actor.uid, None))
}

/// Returns `GPU 3` or `GPUs 0-3, 5`.
pub(crate) fn gpu_numbers(indexes: &[GpuIndex]) -> String {
    let mut sorted = indexes.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let text = gpush_core::selector::ranges(sorted).join(", ");
    if indexes.len() == 1 { format!("GPU {text}") } else { format!("GPUs {text}") }
}

/// Returns the verb for this number of GPUs: `was` or `were`.
pub(crate) fn was_or_were(gpus: &[GpuIndex]) -> &'static str {
    if gpus.len() == 1 { "was" } else { "were" }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: a subordinate uid of a user looked like any unknown uid.
    #[test]
    fn subordinate_uid_is_shown_with_its_owner() {
        assert_eq!(user_name(None, 100_000, Some("anna")), "100000 (subordinate of anna)");
        assert_eq!(user_name(None, 100_000, None), "uid 100000");
        assert_eq!(user_name(Some("bob"), 1001, None), "bob");
    }
}
