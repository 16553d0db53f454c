//! The units whose processes may open no GPU: `user.slice`, and the services that run jobs of users.
//!
//! systemd applies a list to running processes at once, also to sessions that exist, and keeps it in
//! `/etc/systemd/system.control`. gpushd changes only a list that it has set itself.

use gpush_api::{ApiError, Code, EnforcedUnit};
use gpush_core::lease::access::{SESSIONS, session_devices};
use gpush_host::systemd::{self, FIRST_WITHOUT_GAPS, Lasts, Manager, UnitDevices};

/// Services that run programs of users outside of `user.slice`.
const JOBS_OF_USERS: [&str; 3] = ["cron.service", "crond.service", "atd.service"];

/// Reads the units. A service of [`JOBS_OF_USERS`] that does not run is left out.
///
/// # Errors
/// If systemd does not answer.
pub(super) async fn read(manager: &Manager) -> Result<Vec<EnforcedUnit>, systemd::Error> {
    let mut units = Vec::new();
    for unit in present(manager).await? {
        let devices = manager.devices(unit).await?;
        let (denies_gpus, set_by_gpush) = (devices.denies_gpus(), is_own(&devices));
        units.push(EnforcedUnit { unit: unit.to_owned(), denies_gpus, set_by_gpush });
    }
    Ok(units)
}

/// Returns `user.slice`, and the services of [`JOBS_OF_USERS`] that run.
async fn present(manager: &Manager) -> Result<Vec<&'static str>, systemd::Error> {
    let mut units = vec![SESSIONS];
    for unit in JOBS_OF_USERS {
        if !manager.running(unit).await?.is_empty() {
            units.push(unit);
        }
    }
    Ok(units)
}

/// Returns whether login sessions may open no GPU.
pub(super) fn denies_sessions(units: &[EnforcedUnit]) -> bool {
    units.iter().any(|unit| unit.unit == SESSIONS && unit.denies_gpus)
}

/// Returns why jobs of users may open GPUs, although login sessions may not: a service that started later.
pub(super) fn open_unit(units: &[EnforcedUnit]) -> Option<String> {
    let open = units.iter().find(|unit| !unit.denies_gpus)?;
    Some(format!(
        "`DeviceAllow=` of {} does not deny the GPUs; repeat `gpushctl enforce on` (administrator)",
        open.unit
    ))
}

/// Denies the GPUs to all units. Returns the units that were changed.
///
/// # Errors
/// If systemd refuses.
pub(super) async fn deny(manager: &Manager) -> Result<Vec<String>, systemd::Error> {
    let mut changed = Vec::new();
    for unit in read(manager).await?.into_iter().filter(|unit| !unit.denies_gpus) {
        manager.set_devices(&unit.unit, Lasts::Forever, &session_devices()).await?;
        changed.push(unit.unit);
    }
    Ok(changed)
}

/// Opens the units that [`deny`] has changed, also services that do not run now. Returns them.
///
/// # Errors
/// If systemd refuses.
pub(super) async fn open(manager: &Manager) -> Result<Vec<String>, systemd::Error> {
    let mut changed = Vec::new();
    for unit in [SESSIONS].into_iter().chain(JOBS_OF_USERS) {
        let devices = match manager.devices(unit).await {
            Ok(devices) => devices,
            Err(error) if error.is_not_loaded() => continue,
            Err(error) => return Err(error),
        };
        if is_own(&devices) {
            manager.open_devices(unit, Lasts::Forever).await?;
            changed.push(unit.to_owned());
        }
    }
    Ok(changed)
}

/// Returns whether gpushd has set the list.
fn is_own(devices: &UnitDevices) -> bool {
    let own = session_devices();
    devices.allowed.len() == own.len()
        && own.iter().all(|device| devices.allowed.iter().any(|pattern| *pattern == device.pattern()))
}

/// Returns why this host cannot deny the GPUs; `None` if it can.
pub(super) fn unsupported(systemd_version: Option<u32>, is_unified: bool) -> Option<String> {
    match systemd_version {
        Some(version) if version < FIRST_WITHOUT_GAPS => {
            return Some(format!(
                "systemd {version} opens all devices for a moment at each `systemctl daemon-reload`; version \
                 {FIRST_WITHOUT_GAPS} or later does not"
            ));
        }
        None => return Some("the version of systemd is not known".to_owned()),
        Some(_) => {}
    }
    (!is_unified).then(|| "the host does not use cgroup v2".to_owned())
}

/// Returns the error for a call that systemd refused.
pub(super) fn failed(error: &systemd::Error) -> ApiError {
    ApiError::new(Code::Unavailable, "cannot change which devices login sessions may open")
        .cause(error.in_full())
        .hint("see `systemctl status dbus.service`, and then `gpushctl enforce status`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_list_is_recognized() {
        let mut devices = UnitDevices {
            policy: "closed".to_owned(),
            allowed: session_devices().iter().rev().map(|device| device.pattern()).collect(),
        };
        assert!(is_own(&devices) && devices.denies_gpus());
        devices.allowed.pop();
        assert!(!is_own(&devices) && devices.denies_gpus(), "an administrator has changed the list");
    }

    #[test]
    fn old_systemd_is_refused_with_the_reason() {
        assert!(unsupported(Some(249), true).is_some_and(|why| why.starts_with("systemd 249 opens all devices")));
        assert!(unsupported(None, true).is_some() && unsupported(Some(257), true).is_none());
        assert!(unsupported(Some(257), false).is_some_and(|why| why.contains("cgroup v2")));
    }
}
