//! gpushd itself: units, sockets, reachability, version and health.

use std::{fs, os::unix::fs::MetadataExt};

use gpush_api::{ApiError, Code, Gpu, RuleView};

use crate::{
    Area, Finding, Host, Service,
    service::{SERVICE, Unit},
};

/// The socket that all users may use.
const PUBLIC: &str = "run/gpush/gpushd.sock";

/// Sockets of the system service, with their units.
const SOCKETS: [(&str, &str); 2] = [(PUBLIC, "gpushd.socket"), ("run/gpush/admin.sock", "gpushd-admin.socket")];

/// Config file of the system service.
pub(crate) const CONFIG: &str = "/etc/gpush/config.toml";

/// The unit that other services wait for at boot. gpushd does not need it.
const READY: &str = "gpush-ready.service";

/// The result of asking gpushd.
#[derive(Debug, Clone)]
pub enum Agent {
    /// gpushd did not answer, with the error.
    Unreachable(ApiError),
    /// gpushd was not asked, because systemd shows that it does not run.
    NotAsked(Service),
    /// gpushd answered.
    Reached {
        /// Version of gpushd.
        version: String,
        /// Version of the calling program. This program is in the same package as gpushd, so both
        /// versions must be equal.
        own: String,
        /// The errors in gpushd's health; empty when it is healthy.
        troubles: Vec<ApiError>,
        /// The GPUs; empty if they were not asked for.
        gpus: Vec<Gpu>,
        /// The rules of the effective config.
        rules: Vec<RuleView>,
        /// Path of the config file that gpushd uses. If it is absent, gpushd uses the defaults, or
        /// could not load the file of the system service.
        config_path: Option<String>,
        /// Whether the driver can limit the memory of a cgroup.
        has_memory_limits: bool,
    },
}

impl Agent {
    /// Returns the GPUs and the rules of the config; both are empty if they are not known.
    pub(crate) fn gpus(&self) -> (&[Gpu], &[RuleView]) {
        match self {
            Self::Unreachable(_) | Self::NotAsked(_) => (&[], &[]),
            Self::Reached { gpus, rules, .. } => (gpus, rules),
        }
    }

    /// Returns the path of the config file that gpushd uses. If this is not known, returns the path of the system
    /// service.
    pub(crate) fn config_path(&self) -> &str {
        match self {
            Self::Reached { config_path: Some(path), .. } => path,
            Self::Reached { config_path: None, .. } | Self::Unreachable(_) | Self::NotAsked(_) => CONFIG,
        }
    }
}

pub(crate) fn examine(host: &Host, agent: &Agent) -> Vec<Finding> {
    let mut findings = Vec::new();
    let masked = masked(host);
    let is_blocked = masked.iter().any(|unit| *unit != READY);
    match agent {
        // The finding about the masked units says why.
        Agent::Unreachable(_) | Agent::NotAsked(_) if is_blocked => {}
        Agent::Unreachable(error) => findings.push(match Service::find(host) {
            Some(failing @ Service::Failing { .. }) => not_running(host, &failing),
            Some(Service::Stopped) | None => unreachable(error),
        }),
        Agent::NotAsked(service) => findings.push(not_running(host, service)),
        Agent::Reached { version, own, troubles, has_memory_limits, gpus: _, rules: _, config_path: _ } => {
            if *has_memory_limits {
                let message = "the driver can limit the memory of a cgroup; gpushd does not use this limit";
                findings.push(Finding::ok(Area::Agent, message));
            }
            if version == own {
                findings.push(Finding::ok(Area::Agent, format!("gpushd {version} answers")));
            } else {
                let message = format!("gpushd has version {version}, but gpushctl has version {own}");
                let hint = "run `systemctl restart gpushd`; the programs of users continue meanwhile";
                findings.push(Finding::warning(Area::Agent, message, hint));
            }
            findings.extend(troubles.iter().map(trouble));
        }
    }
    if host.has("run/systemd/system") {
        findings.extend(masked_units(&masked, is_blocked));
        if !is_blocked {
            findings.extend(sockets(host));
        }
        findings.extend(disabled(host));
    }
    findings
}

fn unreachable(error: &ApiError) -> Finding {
    let hint = error.hint.clone().unwrap_or_else(|| "see `systemctl status gpushd`".to_owned());
    let finding = Finding::problem(Area::Agent, error.message.clone(), hint);
    error.causes.iter().cloned().fold(finding, Finding::cause)
}

fn not_running(host: &Host, service: &Service) -> Finding {
    match service {
        Service::Stopped if SOCKETS.iter().all(|(socket, _)| host.has(socket)) => {
            let message = "gpushd is stopped; it starts with the first request";
            Finding::warning(Area::Agent, message, "to start it now, run `systemctl start gpushd`")
        }
        Service::Stopped => Finding::problem(Area::Agent, "gpushd is stopped", "run `systemctl start gpushd`"),
        Service::Failing { state, restarts, status, line } => {
            let restarts = if *restarts == 1 { "1 restart".to_owned() } else { format!("{restarts} restarts") };
            let message = format!("gpushd exits each time systemd starts it: {SERVICE} is {state}");
            let hint = "fix the cause, then run `systemctl restart gpushd`; `journalctl -u gpushd -n 20` shows the \
                        last log lines";
            let finding = Finding::problem(Area::Agent, message, hint);
            let finding = finding.cause(format!("{restarts}; the last gpushd ended with status {status}"));
            line.iter().fold(finding, |finding, line| finding.cause(format!("last error in the log: {line}")))
        }
    }
}

/// Returns the finding about an error in gpushd's health. With the code `unavailable`, gpushd refuses changes, or does
/// not know what it granted.
fn trouble(error: &ApiError) -> Finding {
    let hint = error.hint.clone().unwrap_or_else(|| "see `gpushctl status`".to_owned());
    let finding = if error.code == Code::Unavailable {
        Finding::problem(Area::Agent, error.message.clone(), hint)
    } else {
        Finding::warning(Area::Agent, error.message.clone(), hint)
    };
    error.causes.iter().cloned().fold(finding, Finding::cause)
}

/// Checks that the sockets exist, and that users may connect to the public one.
fn sockets(host: &Host) -> Vec<Finding> {
    let mut findings = Vec::new();
    let missing: Vec<(&str, &str)> = SOCKETS.into_iter().filter(|(socket, _)| !host.has(socket)).collect();
    if !missing.is_empty() {
        let paths: Vec<String> = missing.iter().map(|(socket, _)| format!("/{socket}")).collect();
        let units: Vec<&str> = missing.iter().map(|(_, unit)| *unit).collect();
        let is = if missing.len() == 1 { "is" } else { "are" };
        let message = format!("{} {is} missing", paths.join(" and "));
        // `systemctl start` does nothing for an active unit, even if its socket file was deleted.
        let is_active = |unit: &&str| Unit::find(host, unit).is_some_and(|unit| unit.is_active());
        let finding = if units.iter().any(is_active) {
            let hint = format!(
                "create the socket again with `systemctl restart {}`; the programs of users continue meanwhile",
                units.join(" ")
            );
            Finding::problem(Area::Agent, message, hint).cause("the file was deleted while its unit was active")
        } else {
            Finding::problem(Area::Agent, message, format!("run `systemctl start {}`", units.join(" ")))
        };
        findings.push(finding);
    }
    if let Ok(meta) = fs::metadata(host.path(PUBLIC)) {
        let mode = meta.mode() & 0o777;
        let is_open = mode & 0o002 != 0 || (mode & 0o020 != 0 && meta.gid() != 0);
        if !is_open {
            let message = format!("only root may connect to /{PUBLIC} (mode {mode:04o})");
            let hint = "run `systemctl edit gpushd.socket`; in [Socket], set SocketMode=0666 for all users, or \
                        SocketMode=0660 and SocketGroup=GROUP for one group; then run `systemctl restart gpushd.socket`";
            findings.push(Finding::warning(Area::Agent, message, hint));
        }
    }
    findings
}

/// Returns the masked units of gpush.
fn masked(host: &Host) -> Vec<&'static str> {
    let units = [SERVICE].into_iter().chain(SOCKETS.iter().map(|(_, unit)| *unit)).chain([READY]);
    units.filter(|unit| Unit::find(host, unit).is_some_and(|unit| unit.is_masked())).collect()
}

/// Returns the finding about masked units. `is_blocked` says whether gpushd needs one of them.
fn masked_units(masked: &[&str], is_blocked: bool) -> Option<Finding> {
    let is = match masked {
        [] => return None,
        [_] => "is",
        _ => "are",
    };
    let units = masked.join(" ");
    let message = format!("{} {is} masked, so systemd does not start", masked.join(" and "));
    let message = message + if masked.len() == 1 { " this unit" } else { " these units" };
    Some(if is_blocked {
        let hint = format!("run `systemctl unmask {units}`, then `systemctl start {SERVICE}`");
        Finding::problem(Area::Agent, message, hint)
    } else {
        Finding::warning(Area::Agent, message, format!("run `systemctl unmask {units}`"))
    })
}

/// Checks that systemd starts the units at boot.
fn disabled(host: &Host) -> Option<Finding> {
    let units = SOCKETS.iter().map(|(_, unit)| *unit).chain([SERVICE]);
    let units: Vec<&str> = units.filter(|unit| Unit::find(host, unit).is_some_and(|unit| unit.is_disabled())).collect();
    if units.is_empty() {
        return None;
    }
    let is = if units.len() == 1 { "is" } else { "are" };
    let message = format!("{} {is} not enabled, so gpush may not start at the next boot", units.join(" and "));
    let hint = format!("run `systemctl enable {}`", units.join(" "));
    Some(Finding::warning(Area::Agent, message, hint))
}
