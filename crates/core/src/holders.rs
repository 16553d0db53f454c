//! Holders that block a change or a reset because they have a GPU open: classification and messages.
//!
//! A process does not block the reset if it belongs to a service that gpushd may stop according to
//! the config. Every other process blocks the reset, and the message names that process with a
//! remedy. The remedies differ: stopping a monitor is harmless, but stopping a kubelet is not.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, Holder, LeaseUse};

use crate::lease::usage;

/// The remedy for a service whose process has a GPU open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServiceRemedy {
    /// The service may be stopped and restarted.
    Stop,
    /// The service runs programs of other users, which must be drained first.
    Drain,
    /// The service drives the display of the host.
    Display,
}

/// Services that are known to keep GPUs open.
const KNOWN: &[(&str, ServiceRemedy)] = &[
    ("nvidia-dcgm", ServiceRemedy::Stop),
    ("dcgm", ServiceRemedy::Stop),
    ("dcgm-exporter", ServiceRemedy::Stop),
    ("nvidia-dcgm-exporter", ServiceRemedy::Stop),
    ("nvidia-persistenced", ServiceRemedy::Stop),
    ("nvsm", ServiceRemedy::Stop),
    ("nvsm-core", ServiceRemedy::Stop),
    ("nvsm-mqtt", ServiceRemedy::Stop),
    ("kubelet", ServiceRemedy::Drain),
    ("containerd", ServiceRemedy::Drain),
    ("docker", ServiceRemedy::Drain),
    ("slurmd", ServiceRemedy::Drain),
    ("display-manager", ServiceRemedy::Display),
    ("gdm", ServiceRemedy::Display),
    ("gdm3", ServiceRemedy::Display),
    ("lightdm", ServiceRemedy::Display),
    ("sddm", ServiceRemedy::Display),
    ("xdm", ServiceRemedy::Display),
];

/// The service that manages the NVSwitches of a host. This service takes part in resets, so it does
/// not block a reset.
pub const FABRIC_MANAGER: &str = "nvidia-fabricmanager";

/// Returns the holders that still block the reset when the services in `stopped` have been stopped. Leaves out kernel
/// modules, because the driver itself decides whether a module blocks the reset.
#[must_use]
pub fn obstacles(found: Vec<Holder>, stopped: &[String]) -> Vec<Holder> {
    let stopped = |holder: &Holder| holder.service().is_some_and(|service| contains_service(stopped, service));
    let is_obstacle = |holder: &Holder| holder.module.is_none() && !stopped(holder) && !is_fabric_manager(holder);
    found.into_iter().filter(is_obstacle).collect()
}

/// Returns whether the list `services` in the config contains `service`.
#[must_use]
pub fn contains_service(services: &[String], service: &str) -> bool {
    services.iter().any(|name| name.strip_suffix(".service").unwrap_or(name) == service)
}

fn is_fabric_manager(holder: &Holder) -> bool {
    holder.uid == Some(0) && holder.service() == Some(FABRIC_MANAGER)
}

/// Returns the error for a change of MIG mode that these processes and leases block. `gpu` is the
/// name of the GPU in the message.
#[must_use]
pub fn explain(gpu: &str, holders: &[Holder], leases: &[LeaseUse]) -> ApiError {
    let message = format!("MIG mode of {gpu} can't be changed while the GPU is in use");
    blocked(message, holders, leases, BlockedChange::MigMode)
}

/// Returns the error for a change of how a GPU is shared that these processes and leases block. `message` says which
/// change.
#[must_use]
pub fn explain_sharing(message: String, holders: &[Holder], leases: &[LeaseUse]) -> ApiError {
    blocked(message, holders, leases, BlockedChange::Other)
}

fn blocked(message: String, holders: &[Holder], leases: &[LeaseUse], change: BlockedChange) -> ApiError {
    let mut error = ApiError::new(Code::Blocked, message);
    error.causes.extend(leases.iter().map(|lease| format!("held by {lease}")));
    error.causes.extend(holders.iter().map(|holder| format!("held by {}", describe(holder))));
    let mut hints: Vec<String> = usage::hint(leases.iter().map(|lease| lease.id)).into_iter().collect();
    hints.extend(remedies(holders, change));
    error.hint(hints.join("; ")).retryable()
}

/// Returns the error for a reset with `gpushctl gpu reset` that these holders block. `gpu` is the name of the GPU in the
/// message.
#[must_use]
pub fn explain_reset(gpu: &str, holders: &[Holder]) -> ApiError {
    let what = match holders.len() {
        1 => "1 process has it open".to_owned(),
        number => format!("{number} processes have it open"),
    };
    let mut error = ApiError::new(Code::Blocked, format!("cannot reset {gpu}: {what}"));
    error.causes.extend(holders.iter().map(|holder| format!("held by {}", describe(holder))));
    error.hint(remedies(holders, BlockedChange::Other).join("; ")).retryable()
}

/// A change that holders block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockedChange {
    /// A change of MIG mode, for which gpushd can stop services.
    MigMode,
    /// A change for which gpush stops no services, such as `gpushctl gpu reset`.
    Other,
}

/// Returns what an administrator can do about the holders.
fn remedies(holders: &[Holder], change: BlockedChange) -> Vec<String> {
    let services: Vec<&str> = holders.iter().filter_map(Holder::service).collect();
    let with = |way: ServiceRemedy| KNOWN.iter().filter(move |(_, of)| *of == way).map(|(name, _)| *name);
    let of = |way: ServiceRemedy| with(way).find(|name| services.contains(name));
    let mut stops: Vec<&str> = with(ServiceRemedy::Stop).filter(|name| services.contains(name)).collect();
    stops.sort_unstable();
    let known = |holder: &Holder| holder.service().is_some_and(|s| KNOWN.iter().any(|(name, _)| *name == s));
    let mut hints = Vec::new();
    if !stops.is_empty() {
        hints.push(match change {
            BlockedChange::MigMode => {
                let names: Vec<String> = stops.iter().map(|name| format!("\"{name}\"")).collect();
                format!(
                    "set services = [{}] under [mode_change]: gpushd then stops these services for the change and \
                    starts them again",
                    names.join(", ")
                )
            }
            BlockedChange::Other => format!("stop the services: `systemctl stop {}`", stops.join(" ")),
        });
    }
    if let Some(name) = of(ServiceRemedy::Drain) {
        hints.push(format!("drain the node, then stop {name}"));
    }
    if let Some(name) = of(ServiceRemedy::Display) {
        hints.push(format!("stop the display: `systemctl stop {name}`"));
    }
    let targets: BTreeSet<&str> = holders.iter().filter_map(|holder| holder.mps_target.as_deref()).collect();
    hints.extend(
        targets.into_iter().map(|target| format!("stop the MPS daemon: `gpushctl mps stop {target}` (administrator)")),
    );
    if !holders.iter().all(|holder| known(holder) || holder.mps_target.is_some()) {
        hints.push("end these processes, then try again".to_owned());
    }
    hints
}

/// Describes a holder. The text contains all known facts:
/// `pid 4711 (alice, python train.py, service x, /dev/nvidia0)`.
#[must_use]
pub fn describe(holder: &Holder) -> String {
    if let Some(module) = &holder.module {
        return format!("the kernel module {module}");
    }
    let unit = match (holder.service(), &holder.unit) {
        (Some(service), _) => Some(format!("service {service}")),
        (None, Some(unit)) => Some(format!("unit {unit}")),
        (None, None) => None,
    };
    let devices = (!holder.devices.is_empty()).then(|| holder.devices.join(" "));
    let parts = [holder.user.clone(), holder.mps.clone().or_else(|| holder.command.clone()), unit, devices];
    let about: Vec<String> = parts.into_iter().flatten().collect();
    // If the holder is a lease without processes, `pid` is `None` and `command` describes the
    // lease.
    if let (None, Some(lease)) = (holder.pid, &holder.command) {
        return lease.clone();
    }
    let who = holder.pid.map_or_else(|| "a process".to_owned(), |pid| format!("pid {pid}"));
    if about.is_empty() { who } else { format!("{who} ({})", about.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(pid: u32, command: &str, service: Option<&str>) -> Holder {
        Holder {
            pid: Some(pid),
            uid: Some(0),
            user: Some("root".to_owned()),
            command: Some(command.to_owned()),
            unit: service.map(|name| format!("{name}.service")),
            devices: vec!["/dev/nvidia0".to_owned()],
            ..Holder::default()
        }
    }

    #[test]
    fn stoppable_services_do_not_block_and_others_get_hints() {
        let all = vec![
            holder(1, "nv-hostengine", Some("nvidia-dcgm")),
            holder(2, "nv-fabricmanager", Some("nvidia-fabricmanager")),
            holder(3, "python train.py", None),
        ];
        let left = obstacles(all.clone(), &["nvidia-dcgm.service".to_owned()]);
        assert_eq!(left.iter().map(|h| h.pid).collect::<Vec<_>>(), [Some(3)], "resets go through the fabric manager");
        let users = Holder { uid: Some(1000), ..all[1].clone() };
        assert_eq!(obstacles(vec![users], &[]).len(), 1, "only root's is one");
        let error = explain("GPU 0", &all, &[]);
        assert_eq!(error.code, Code::Blocked);
        assert_eq!(error.causes[2], "held by pid 3 (root, python train.py, /dev/nvidia0)");
        assert_eq!(error.causes[0], "held by pid 1 (root, nv-hostengine, service nvidia-dcgm, /dev/nvidia0)");
        let hint = error.hint.unwrap();
        for part in ["services = [\"nvidia-dcgm\"]", "end these processes"] {
            assert!(hint.contains(part), "{hint}");
        }
        assert!(!explain("GPU 0", &all[..1], &[]).hint.unwrap().contains("end these"));
        let reset = explain_reset("GPU 0", &all[..1]);
        assert_eq!((reset.code, reset.message.as_str()), (Code::Blocked, "cannot reset GPU 0: 1 process has it open"));
        assert_eq!(reset.hint.unwrap(), "stop the services: `systemctl stop nvidia-dcgm`");
    }

    /// A kernel module never blocks a reset before the driver has refused it, but is named after that.
    #[test]
    fn kernel_modules_and_mps_servers_are_named() {
        let module = Holder { module: Some("nvidia_drm".to_owned()), ..Holder::default() };
        assert_eq!(describe(&module), "the kernel module nvidia_drm");
        assert_eq!(obstacles(vec![module], &[]), []);
        let server = Holder {
            mps: Some("MPS server of GPU 0".to_owned()),
            mps_target: Some("0".to_owned()),
            unit: Some("gpushd-mps@0.service".to_owned()),
            ..holder(7, "nvidia-cuda-mps-server", None)
        };
        assert_eq!(describe(&server), "pid 7 (root, MPS server of GPU 0, service gpushd-mps@0, /dev/nvidia0)");
        // Fault: the hint was to end the process, but gpushd starts a killed server again.
        let reset = explain_reset("GPU 0", std::slice::from_ref(&server));
        assert_eq!(reset.hint.as_deref(), Some("stop the MPS daemon: `gpushctl mps stop 0` (administrator)"));
        let shell = Holder { unit: Some("session-3.scope".to_owned()), ..holder(8, "nvtop", None) };
        assert_eq!(describe(&shell), "pid 8 (root, nvtop, unit session-3.scope, /dev/nvidia0)");
    }
}
