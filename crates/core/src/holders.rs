//! Processes that block a reset because they have a GPU open: classification and messages.
//!
//! A process does not block the reset if it belongs to a service that gpushd may stop according to
//! the config. Every other process blocks the reset, and the message names that process with a
//! remedy. The remedies differ: stopping a monitor is harmless, but stopping a kubelet is not.

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

/// Returns the holders that still block the reset when the services in `stopped` have been stopped.
#[must_use]
pub fn obstacles(found: Vec<Holder>, stopped: &[String]) -> Vec<Holder> {
    let stopped = |holder: &Holder| holder.service.as_deref().is_some_and(|service| contains_service(stopped, service));
    found.into_iter().filter(|holder| !stopped(holder) && !is_fabric_manager(holder)).collect()
}

/// Returns whether the list `services` in the config contains `service`.
#[must_use]
pub fn contains_service(services: &[String], service: &str) -> bool {
    services.iter().any(|name| name.strip_suffix(".service").unwrap_or(name) == service)
}

fn is_fabric_manager(holder: &Holder) -> bool {
    holder.uid == Some(0) && holder.service.as_deref() == Some(FABRIC_MANAGER)
}

/// Returns the error for a change of MIG mode that these processes and leases block. `gpu` is the
/// name of the GPU in the message.
#[must_use]
pub fn explain(gpu: &str, holders: &[Holder], leases: &[LeaseUse]) -> ApiError {
    error(format!("MIG mode of {gpu} can't be changed while the GPU is in use"), holders, leases)
}

/// Returns the error for a change that these processes and leases block. `message` says which change.
#[must_use]
pub fn error(message: String, holders: &[Holder], leases: &[LeaseUse]) -> ApiError {
    let mut error = ApiError::new(Code::Blocked, message);
    error.causes.extend(leases.iter().map(|lease| format!("held by {lease}")));
    error.causes.extend(holders.iter().map(|holder| format!("held by {}", describe(holder))));
    let services: Vec<&str> = holders.iter().filter_map(|holder| holder.service.as_deref()).collect();
    let with = |way: ServiceRemedy| KNOWN.iter().filter(move |(_, of)| *of == way).map(|(name, _)| *name);
    let of = |way: ServiceRemedy| with(way).find(|name| services.contains(name));
    let mut stops: Vec<String> =
        with(ServiceRemedy::Stop).filter(|name| services.contains(name)).map(|name| format!("\"{name}\"")).collect();
    stops.sort();
    let known = |holder: &Holder| holder.service.as_deref().is_some_and(|s| KNOWN.iter().any(|(name, _)| *name == s));
    let mut hints: Vec<String> = usage::hint(leases.iter().map(|lease| lease.id)).into_iter().collect();
    if !stops.is_empty() {
        hints.push(format!(
            "set services = [{}] under [mode_change]: gpushd then stops these services for the change and starts them \
            again",
            stops.join(", ")
        ));
    }
    if let Some(name) = of(ServiceRemedy::Drain) {
        hints.push(format!("drain the node, then stop {name}"));
    }
    if let Some(name) = of(ServiceRemedy::Display) {
        hints.push(format!("stop the display: `systemctl stop {name}`"));
    }
    if !holders.iter().all(known) {
        hints.push("end these processes, then try again".to_owned());
    }
    error.hint(hints.join("; ")).retryable()
}

/// Describes a holder. The text contains all known facts:
/// `pid 4711 (alice, python train.py, service x, /dev/nvidia0)`.
#[must_use]
pub fn describe(holder: &Holder) -> String {
    let service = holder.service.as_ref().map(|name| format!("service {name}"));
    let devices = (!holder.devices.is_empty()).then(|| holder.devices.join(" "));
    let parts = [holder.user.clone(), holder.command.clone(), service, devices];
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
            service: service.map(str::to_owned),
            devices: vec!["/dev/nvidia0".to_owned()],
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
    }
}
