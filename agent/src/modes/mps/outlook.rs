//! Which targets of a snapshot serve clients, and which target a request names.

use std::sync::Arc;

use gpush_api::{ApiError, Code};
use gpush_core::mps::{DesiredTargets, MpsTarget};

use super::missing;
use crate::{requests::caller::Viewer, state::HostState};

/// Returns the targets of a snapshot, with those that its config requires. Until gpushd knows the GPUs, no GPU requires a
/// target.
pub(crate) fn outlook(host: &Arc<HostState>, viewer: Viewer) -> DesiredTargets<'_> {
    let gpus = host.check_known().map(|()| host.gpus(viewer)).unwrap_or_default();
    DesiredTargets::new(&host.config, gpus, &host.mps)
}

/// Returns the target that a text names.
///
/// # Errors
/// If the text matches no target, or several.
pub(crate) fn find<'a>(host: &'a Arc<HostState>, text: &str) -> Result<&'a Arc<MpsTarget>, ApiError> {
    let outlook = outlook(host, Viewer::Agent);
    outlook.find(text).map_err(|error| match error.code {
        Code::NotFound => missing::explain(host, &outlook, text, error),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use gpush_core::{config::Config, mps::MpsTargetRecord};

    use super::*;
    use crate::state::{
        State,
        tests::{list, read},
    };

    fn error(state: &State) -> ApiError {
        find(&state.now(), "0").unwrap_err()
    }

    /// A target that does not exist yet is unavailable. The client may try again.
    #[test]
    fn target_is_not_found_only_if_gpushd_knows_its_gpu() {
        let state = State::empty();
        assert_eq!(error(&state).code, Code::Unavailable, "the driver has not answered");
        list(&state, &[0]);
        assert_eq!(error(&state).code, Code::Unavailable, "the GPU was not read");
        read(&state, 0);
        let unknown = error(&state);
        assert_eq!((unknown.code, unknown.retryable), (Code::NotFound, false));
        list(&state, &[]);
        assert_eq!(error(&state).code, Code::GpuLost);
    }

    #[test]
    fn target_that_the_reconciler_is_about_to_add_is_unavailable() {
        let state = State::empty();
        list(&state, &[0]);
        read(&state, 0);
        let config = Config::parse("[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n", "c").unwrap();
        state.replace_config(Arc::new(config), 1);
        let due = error(&state);
        assert_eq!(due.code, Code::NotFound);
        assert!(due.causes.iter().any(|cause| cause.contains("`gpushctl apply 0`")), "{due:?}");
        let in_force = |record| MpsTargetRecord { in_force: Some(String::new()), ..record };
        state.change_mps(|targets| targets.change_record(&"GPU-0".into(), in_force));
        let pending = error(&state);
        assert_eq!((pending.code, pending.retryable), (Code::Unavailable, true));
        assert_eq!(pending.causes, ["gpushd has not started the MPS daemons of the config yet"]);
    }
}
