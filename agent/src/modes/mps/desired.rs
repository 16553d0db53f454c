//! The desired state of a daemon.

use std::path::{Path, PathBuf};

use gpush_core::{sharing::SharingTarget, supervisor::SupervisorPolicy};
use gpush_mps::daemon::Desired;

use super::Mps;
use crate::state::HostState;

/// Returns the desired state of a target's daemon. `short` is the short name of the target.
pub(super) fn desired_state(
    mps: &Mps,
    host: &HostState,
    short: &str,
    target: &SharingTarget,
    driver: Option<String>,
) -> Desired {
    let settings = &host.config.mps;
    let constants = &mps.handles.context.host_services.constants;
    let usual = gpush_core::config::Mps::default();
    Desired {
        policy: host.mps.policy(target),
        gpu_uuid: target.gpu_uuid.clone(),
        supervision: SupervisorPolicy {
            restart_hung_with_clients: settings.restart_hung_with_clients,
            ..constants.mps.clone()
        },
        health: settings.health,
        control: program(mps, &settings.control, &usual.control),
        server: program(mps, &settings.server(), &usual.server()),
        driver,
        logs: mps.log_directory(&settings.log_directory, &usual.log_directory).join(short),
        log_bytes: constants.mps_log,
    }
}

/// Returns the path of one of NVIDIA's programs.
pub(super) fn program(mps: &Mps, configured: &str, usual: &str) -> PathBuf {
    program_in(mps.programs.as_deref(), configured, usual)
}

/// `programs` is the directory of NVIDIA's programs if the command line names one.
fn program_in(programs: Option<&Path>, configured: &str, usual: &str) -> PathBuf {
    match programs {
        Some(dir) if configured == usual => dir.join(PathBuf::from(usual).file_name().unwrap_or_default()),
        Some(_) | None => PathBuf::from(configured),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configured_program_outranks_the_directory_of_programs() {
        let usual = "/usr/bin/nvidia-cuda-mps-control";
        for (directory, configured, expected) in [
            (None, usual, usual),
            (None, "/opt/control", "/opt/control"),
            (Some(Path::new("/sim")), usual, "/sim/nvidia-cuda-mps-control"),
            (Some(Path::new("/sim")), "/opt/control", "/opt/control"),
        ] {
            assert_eq!(program_in(directory, configured, usual), Path::new(expected));
        }
    }
}
