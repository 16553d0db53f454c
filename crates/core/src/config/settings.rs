//! The settings as one list. The code that displays, compares and reports settings uses this list,
//! so that no setting is missing in any of them.

use super::{
    Allowed, Config, idle, limits, mps,
    processes::policy_name,
    quotas::{placement_name, user_limits_name},
    slurm,
    toml_text::{list, span, text},
};

/// Table, key, and value as TOML. The value is `None` if the setting is not set.
pub(super) type Setting = (&'static str, &'static str, Option<String>);

impl Config {
    /// Returns all settings except quotas, layouts and rules, in the order of the file.
    pub(super) fn settings(&self) -> Vec<Setting> {
        let Self {
            auto_reconcile,
            enforce,
            log,
            driver,
            api,
            access,
            limits,
            health,
            mode_change,
            mps,
            processes,
            leases,
            history,
            metrics,
            notify,
            idle: unused,
            slurm,
            defaults,
            ..
        } = self;
        let xids: Vec<String> = health.cordon_xids.iter().map(u32::to_string).collect();
        let together: Vec<String> = mode_change.reset_together.iter().map(ToString::to_string).collect();
        let allowed: Vec<String> = processes.allow.iter().map(allowed).collect();
        let mut all: Vec<Setting> = vec![
            ("", "auto_reconcile", Some(auto_reconcile.to_string())),
            ("", "enforce", Some(enforce.to_string())),
            ("log", "level", Some(text(log.level.name()))),
            ("driver", "library", Some(text(&driver.library))),
            ("api", "admin_socket", api.admin_socket.as_deref().map(text)),
            ("access", "admin_groups", Some(list(&access.admin_groups))),
        ];
        all.extend(limits::written(limits).map(|(key, value)| ("limits", key, Some(value))));
        all.extend([
            ("health", "cordon_xids", Some(format!("[{}]", xids.join(", ")))),
            ("health", "poll", Some(span(health.poll))),
            ("mode_change", "services", Some(list(&mode_change.services))),
            ("mode_change", "before", mode_change.before.as_deref().map(text)),
            ("mode_change", "after", mode_change.after.as_deref().map(text)),
            ("mode_change", "timeout", Some(span(mode_change.timeout))),
            ("mode_change", "nvidia_smi", Some(text(&mode_change.nvidia_smi))),
            ("mode_change", "reset_together", Some(list(&together))),
        ]);
        all.extend(mps::written(mps).map(|(key, value)| ("mps", key, Some(value))));
        all.extend([
            ("processes", "unleased", Some(text(policy_name(processes.unleased)))),
            ("processes", "grace", Some(span(processes.grace))),
            ("processes", "allow", Some(format!("[{}]", allowed.join(", ")))),
            ("leases", "placement", Some(text(placement_name(leases.placement)))),
            ("leases", "user_limits", Some(text(user_limits_name(leases.user_limits)))),
        ]);
        all.extend(history.written().map(|(key, value)| ("history", key, value)));
        all.extend(metrics.written().map(|(key, value)| ("metrics", key, value)));
        all.extend(notify.written().map(|(key, value)| ("notify", key, value)));
        all.extend(idle::written(unused).into_iter().map(|(key, value)| ("idle", key, Some(value))));
        all.extend(idle::written_exempt(&unused.exempt).map(|(key, value)| ("idle.exempt", key, Some(value))));
        all.extend(slurm::written(slurm).map(|(key, value)| ("slurm", key, value)));
        all.extend(defaults.written().map(|(key, value)| ("defaults", key, value.map(text))));
        all
    }
}

fn allowed(one: &Allowed) -> String {
    let exe = one.exe.as_deref().map(|exe| format!("exe = {}", text(exe)));
    let uid = one.uid.map(|uid| format!("uid = {uid}"));
    let pairs: Vec<String> = exe.into_iter().chain(uid).collect();
    format!("{{ {} }}", pairs.join(", "))
}
