//! Results of `gpushctl enforce`.

use gpush_api::{
    DeviceEnforcement, DeviceProbe, EnforcedUnit, EnforcementEffect, EnforcementPlan, EnforcementReach,
    EnforcementState, ProbeResult,
};

use super::{
    Appearance,
    names::gpu_numbers,
    table::{Align, table},
};

/// Draws whether the kernel denies the GPUs to login sessions.
pub(crate) fn status(found: &DeviceEnforcement, look: &Appearance) -> String {
    let head = match found.state {
        EnforcementState::Verified => "Enforced: the kernel denies the GPUs to login sessions, as probes have shown.",
        EnforcementState::Unverified => "Not enforced: the host has the setting, but it does not work.",
        EnforcementState::Off => "Not enforced: login sessions can open the GPUs.",
    };
    let mut facts = vec![head.to_owned()];
    if let Some(reason) = &found.reason {
        facts.push(format!("Reason: {}.", look.clean(reason)));
    }
    if !found.enforced_gpus.is_empty() {
        let gpus = gpu_numbers(&found.enforced_gpus);
        facts.push(match found.state {
            EnforcementState::Verified => format!("Rules enforce leases of {gpus}."),
            EnforcementState::Off | EnforcementState::Unverified => format!(
                "Rules with lease = \"enforced\" have {gpus}: gpushd grants no leases of them, unless `enforce_missing` is \
                 \"grant\"."
            ),
        });
    }
    if !found.other_gpus.is_empty() {
        facts.push(format!("Login sessions cannot open {} either.", gpu_numbers(&found.other_gpus)));
    }
    let mut out = look.wrap("", &facts.join(" ")).join("\n") + "\n";
    let rows: Vec<Vec<String>> = found.units.iter().map(|unit| of_unit(unit, look)).collect();
    if !rows.is_empty() {
        let columns = [("UNIT", Align::Left), ("OPENS GPUS", Align::Left), ("SET BY", Align::Left)];
        out += &("\n".to_owned() + &table(&columns, rows, 0, look));
    }
    let rows: Vec<Vec<String>> = found.probes.iter().map(|probe| of_probe(probe, look)).collect();
    if !rows.is_empty() {
        let columns = [("PROBE", Align::Left), ("DEVICE", Align::Left), ("RESULT", Align::Left)];
        out += &("\n".to_owned() + &table(&columns, rows, 0, look));
    }
    out
}

fn of_unit(unit: &EnforcedUnit, look: &Appearance) -> Vec<String> {
    let opens = if unit.denies_gpus { "no" } else { "yes" };
    let by = match (unit.denies_gpus, unit.set_by_gpush) {
        (_, true) => "gpush",
        (true, false) => "administrator",
        (false, false) => "-",
    };
    vec![look.clean(&unit.unit), opens.to_owned(), by.to_owned()]
}

fn of_probe(probe: &DeviceProbe, look: &Appearance) -> Vec<String> {
    let result = match (probe.result, &probe.reason) {
        (ProbeResult::Denied, _) => "denied".to_owned(),
        (ProbeResult::Allowed, _) => "allowed".to_owned(),
        (ProbeResult::Failed, Some(reason)) => format!("failed: {}", look.clean(reason)),
        (ProbeResult::Failed, None) => "failed".to_owned(),
    };
    vec![probe.place.describe().to_owned(), look.clean(&probe.device), result]
}

/// Draws what `enforce on` changes.
pub(crate) fn plan(plan: &EnforcementPlan, look: &Appearance) -> String {
    let mut out = String::new();
    if let Some(reason) = &plan.unsupported {
        let text = format!("This host cannot enforce leases: {}.", look.clean(reason));
        out += &(look.wrap("", &text).join("\n") + "\n");
    } else {
        let text = if plan.changes.is_empty() {
            "Nothing to change: this host denies the GPUs already.".to_owned()
        } else {
            let units: Vec<String> = plan.changes.iter().map(|unit| look.clean(unit)).collect();
            format!("Sets `DeviceAllow=` of {}.", units.join(", "))
        };
        out += &(look.wrap("", &text).join("\n") + "\n");
    }
    for (reach, heading) in [
        (EnforcementReach::Blocks, "Prevent `enforce on`, unless it has --force:"),
        (EnforcementReach::Denied, "Cannot open GPUs any more without a lease:"),
        (EnforcementReach::NotCovered, "Not covered:"),
    ] {
        let effects: Vec<&EnforcementEffect> = plan.effects.iter().filter(|effect| effect.reach == reach).collect();
        if effects.is_empty() {
            continue;
        }
        if !out.is_empty() {
            out.push('\n');
        }
        out += &(heading.to_owned() + "\n");
        for effect in effects {
            let hint = effect.hint.as_ref().map_or_else(String::new, |hint| format!(" Hint: {}.", look.clean(hint)));
            let text = format!("{}: {}.{hint}", look.clean(&effect.subject), look.clean(&effect.effect));
            out += &(look.wrap("  ", &text).join("\n") + "\n");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use gpush_api::{GpuIndex, LeaseId, ProbePlace};
    use gpush_core::lease::access::{HostFacts, SESSIONS, SessionProcess, host_plan};

    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn status_names_units_and_probes() {
        let look = fixtures::look(100, Charset::Ascii);
        let found = DeviceEnforcement {
            state: EnforcementState::Verified,
            enforced_gpus: vec![GpuIndex(0)],
            other_gpus: vec![GpuIndex(1), GpuIndex(2)],
            units: vec![EnforcedUnit { unit: "user.slice".to_owned(), denies_gpus: true, set_by_gpush: true }],
            probes: vec![DeviceProbe {
                place: ProbePlace::Session,
                device: "/dev/nvidia0".to_owned(),
                result: ProbeResult::Denied,
                reason: None,
            }],
            ..DeviceEnforcement::default()
        };
        let off = DeviceEnforcement {
            state: EnforcementState::Off,
            reason: Some("systemd is not the service manager here".to_owned()),
            enforced_gpus: vec![GpuIndex(0)],
            ..DeviceEnforcement::default()
        };
        let all = [status(&found, &look), status(&off, &look)].join("---\n");
        insta::assert_snapshot!(fixtures::plain(&all));
    }

    /// Returns a unit that denies the GPUs if `denies_gpus` is set.
    fn unit(unit: &str, denies_gpus: bool) -> EnforcedUnit {
        EnforcedUnit { unit: unit.to_owned(), denies_gpus, set_by_gpush: denies_gpus }
    }

    /// The texts are those of gpushd: the plan is made by the same function.
    #[test]
    fn plan_of_each_kind_of_host() {
        let plain = HostFacts { units: vec![unit(SESSIONS, false)], ..HostFacts::default() };
        let process = |pid, command: &str, is_graphical| SessionProcess {
            pid,
            uid: Some(1000),
            command: command.to_owned(),
            is_graphical,
        };
        let graphical =
            HostFacts { processes: vec![process(812, "Xorg", true), process(4711, "python3", false)], ..plain.clone() };
        let services = HostFacts {
            units: vec![unit(SESSIONS, false), unit("cron.service", false), unit("atd.service", false)],
            services: [("jupyterhub.service", "hub"), ("systemd-resolved.service", "systemd-resolve")]
                .map(|(unit, user)| (unit.to_owned(), user.to_owned()))
                .into(),
            services_with_sessions: vec!["ssh.service".to_owned()],
            runtimes: ["docker.service", "slurmd.service"].map(str::to_owned).into(),
            session_leases: vec![LeaseId(3), LeaseId(8)],
            other_gpus: vec![GpuIndex(2), GpuIndex(3)],
            has_graphics_nodes: true,
            ..HostFacts::default()
        };
        let old = HostFacts {
            unsupported: Some(
                "systemd 249 opens all devices for a moment at each `systemctl daemon-reload`; version 250 or later \
                 does not"
                    .to_owned(),
            ),
            ..plain.clone()
        };
        let installed =
            HostFacts { units: vec![unit(SESSIONS, true), unit("cron.service", true)], ..HostFacts::default() };
        let look = fixtures::look(100, Charset::Ascii);
        let hosts = [
            ("plain", plain),
            ("graphical session", graphical),
            ("services", services),
            ("old systemd", old),
            ("already installed", installed),
        ];
        let text: String =
            hosts.into_iter().map(|(name, host)| format!("=== {name}\n{}\n", plan(&host_plan(&host), &look))).collect();
        insta::assert_snapshot!(fixtures::plain(&text));
    }
}
