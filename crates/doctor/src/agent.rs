//! gpushd itself: sockets, reachability, version and health.

use gpush_api::{ApiError, Gpu, RuleView};

use crate::{Area, Finding, Host};

/// Sockets of the system service.
const SOCKETS: [&str; 2] = ["run/gpush/gpushd.sock", "run/gpush/admin.sock"];

/// The result of asking gpushd.
#[derive(Debug, Clone)]
pub enum Agent {
    /// gpushd did not answer, with the error.
    Unreachable(ApiError),
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
    },
}

impl Agent {
    /// Returns the GPUs and the rules of the config; both are empty if they are not known.
    pub(crate) fn gpus(&self) -> (&[Gpu], &[RuleView]) {
        match self {
            Self::Unreachable(_) => (&[], &[]),
            Self::Reached { gpus, rules, .. } => (gpus, rules),
        }
    }
}

pub(crate) fn examine(host: &Host, agent: &Agent) -> Vec<Finding> {
    let mut findings = Vec::new();
    match agent {
        Agent::Unreachable(error) => {
            let hint = error.hint.clone().unwrap_or_else(|| "see `systemctl status gpushd`".to_owned());
            let finding = Finding::problem(Area::Agent, error.message.clone(), hint);
            findings.push(error.causes.iter().cloned().fold(finding, Finding::cause));
        }
        Agent::Reached { version, own, troubles, gpus: _, rules: _, config_path: _ } => {
            if version == own {
                findings.push(Finding::ok(Area::Agent, format!("gpushd {version} answers")));
            } else {
                let message = format!("gpushd has version {version}, but gpushctl has version {own}");
                let hint = "run `systemctl restart gpushd`; the programs of users continue meanwhile";
                findings.push(Finding::warning(Area::Agent, message, hint));
            }
            findings.extend(troubles.iter().map(|trouble| {
                let hint = trouble.hint.clone().unwrap_or_else(|| "see `gpushctl status`".to_owned());
                let finding = Finding::warning(Area::Agent, trouble.message.clone(), hint);
                trouble.causes.iter().cloned().fold(finding, Finding::cause)
            }));
        }
    }
    if host.has("run/systemd/system") {
        let missing: Vec<&str> = SOCKETS.into_iter().filter(|socket| !host.has(socket)).collect();
        if !missing.is_empty() {
            let message = format!("/{} is missing", missing.join(" and /"));
            let hint = "start the sockets with `systemctl start gpushd.socket gpushd-admin.socket`";
            findings.push(Finding::problem(Area::Agent, message, hint));
        }
    }
    findings
}
