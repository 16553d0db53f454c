//! Errors for an MPS target that gpushd does not find: the name is wrong, or the target cannot be known yet.
//!
//! | reason | code | retryable |
//! |---|---|---|
//! | the driver has not answered this gpushd yet | `unavailable` | yes |
//! | gpushd has read the GPU but not started its daemon yet | `unavailable` | yes |
//! | the GPU cannot be read | `unavailable` | yes |
//! | the GPU is lost | `gpu_lost` | no |
//! | there is no driver, or gpushd was started in maintenance | the error of that condition | as that error |
//! | none of these | `not_found` | no |

use gpush_api::{ApiError, Code, GpuState, GpuUuid, Mode};
use gpush_core::mps::DesiredTargets;
use gpush_nvml::{DriverError, ErrorKind};

use crate::{
    modes::eligibility,
    state::{GpuSnapshot, HostState, no_driver, words},
};

/// Checks that gpushd knows the GPUs of the host. Until gpushd knows the GPUs, it cannot say that a target does not
/// exist.
///
/// # Errors
/// If gpushd does not know the GPUs. The error says why.
pub(crate) fn gpus_known(host: &HostState) -> Result<(), ApiError> {
    match (&host.driver, &host.maintenance) {
        (_, Some(maintenance)) if !host.was_listed => Err(words::not_read_error(maintenance)),
        (Some(error), None) if error.kind == ErrorKind::WorkerUnavailable => Err(starting(error)),
        (Some(error), None) => Err(no_driver(error)),
        (_, _) => Ok(()),
    }
}

/// Checks that gpushd can name the GPUs of daemons. A daemon that a previous gpushd left running exists before gpushd
/// has read its GPU. `unplaced` are the UUIDs of the GPUs of such daemons.
///
/// # Errors
/// If gpushd does not know the GPUs, or has not tried to read one of the `unplaced` GPUs yet. The error says why.
pub(super) fn gpus_can_be_named<'a>(
    host: &HostState,
    mut unplaced: impl Iterator<Item = &'a GpuUuid>,
) -> Result<(), ApiError> {
    if !host.was_listed {
        gpus_known(host)?;
    }
    match unplaced.find(|gpu| host.gpu(gpu).is_some_and(GpuSnapshot::is_unread)) {
        Some(gpu) => Err(not_read(gpu)),
        None => Ok(()),
    }
}

fn not_read(gpu: &GpuUuid) -> ApiError {
    ApiError::new(Code::Unavailable, format!("GPU {gpu} is not known yet: the driver has not answered"))
        .hint("try again in a moment; `gpushctl status` shows whether the driver answers")
        .retryable()
}

fn starting(error: &DriverError) -> ApiError {
    ApiError::new(Code::Unavailable, "the GPUs are not known yet: the driver has not answered")
        .cause(error.to_string())
        .hint("try again in a moment; `gpushctl status` shows whether the driver answers")
        .retryable()
}

/// Returns the error for `text`, which matches no target. Returns the argument `not_found` if there is no better
/// reason.
pub(super) fn explain(host: &HostState, outlook: &DesiredTargets<'_>, text: &str, not_found: ApiError) -> ApiError {
    if let Err(error) = gpus_known(host) {
        return error;
    }
    // A text such as `0:2g.20gb@2` names a MIG device, in this example on GPU 0.
    let gpu = text.split(':').next().unwrap_or(text).trim();
    if let Some(unidentified) = host.unidentified_among(&[gpu]) {
        return unidentified;
    }
    if let Ok(at) = host.position(gpu) {
        let gpu = &host.gpus[at].gpu;
        if matches!(gpu.state, GpuState::Lost | GpuState::Unknown)
            && let Some(error) = eligibility::refusal(gpu, &format!("GPU {}", gpu.index))
        {
            return error;
        }
    }
    if outlook.has_pending() {
        return ApiError::new(Code::Unavailable, not_found.message)
            .cause("gpushd has not started the MPS daemons of the config yet")
            .hint("try again in a moment; `gpushctl mps list` shows the targets")
            .retryable();
    }
    match host.position(text.trim()) {
        Ok(at) => without_rule(host, &host.gpus[at], not_found),
        Err(_) => not_found,
    }
}

/// Says how a GPU is shared through MPS, if its rule has another mode. In mode `mig`, its MIG devices may be targets.
fn without_rule(host: &HostState, gpu: &GpuSnapshot, not_found: ApiError) -> ApiError {
    let mode = gpu.rule.and_then(|rule| host.config.rules.get(rule)).map(|rule| rule.mode);
    match mode {
        Some(Mode::Mps | Mode::Mig) => not_found,
        Some(Mode::NoRule | Mode::Unmanaged | Mode::Exclusive | Mode::Timeslice) | None => {
            let index = gpu.gpu.index;
            ApiError::new(Code::NotFound, format!("GPU {index} is not shared through MPS")).hint(format!(
                "give GPU {index} a rule with mode = \"mps\" in the config, then run `gpushctl apply {index}` \
                (administrator)"
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gpush_core::config::Config;

    use super::*;
    use crate::{
        requests::caller::Viewer,
        state::{
            State,
            tests::{list, read},
        },
    };

    /// Fault: the hint for `mps start 7` named the targets of other GPUs.
    #[test]
    fn gpu_without_a_rule_for_mps_leads_to_a_rule() {
        let state = State::empty();
        list(&state, &[0, 1]);
        (0..2).for_each(|gpu| read(&state, gpu));
        let config = "[[gpu]]\nmatch = \"1\"\nmode = \"mig\"\nlayout = [\"2g.20gb:mps\"]\n";
        state.replace_config(Arc::new(Config::parse(config, "c").unwrap()), 1);
        let host = state.now();
        let error = |text: &str| {
            let not_found = ApiError::new(Code::NotFound, "no target");
            explain(&host, &DesiredTargets::new(&host.config, host.gpus(Viewer::Agent), &host.mps), text, not_found)
        };
        assert_eq!(error("0").message, "GPU 0 is not shared through MPS");
        assert!(error("0").hint.unwrap().contains("`gpushctl apply 0` (administrator)"));
        for other in ["1", "9", "0:2g.20gb@0"] {
            assert_eq!(error(other).message, "no target", "{other}");
        }
    }

    #[test]
    fn targets_are_unavailable_while_the_driver_starts() {
        let state = State::empty();
        let error = gpus_known(&state.now()).unwrap_err();
        assert_eq!((error.code, error.retryable), (Code::Unavailable, true));
    }

    /// Fault: while the driver started, the list of daemons succeeded, but did not name the GPUs of the daemons.
    #[test]
    fn daemons_are_unavailable_while_their_gpus_cannot_be_named() {
        let state = State::empty();
        let error = gpus_can_be_named(&state.now(), [&"GPU-0".into()].into_iter()).unwrap_err();
        assert_eq!((error.code, error.retryable), (Code::Unavailable, true));
        // The driver listed the GPUs, but then its worker ended: gpushd still knows the GPUs.
        let host = HostState { was_listed: true, ..HostState::clone(&state.now()) };
        assert!(gpus_known(&host).is_err());
        assert_eq!(gpus_can_be_named(&host, [&"GPU-0".into()].into_iter()), Ok(()));
    }

    #[test]
    fn targets_without_a_driver_give_the_error_of_the_driver() {
        let no_driver = DriverError::new(ErrorKind::DriverNotLoaded, "listing the GPUs");
        let host = HostState { driver: Some(no_driver), ..HostState::clone(&State::empty().now()) };
        assert_eq!(gpus_known(&host).unwrap_err().code, Code::DriverUnavailable);
    }
}
