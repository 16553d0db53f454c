//! The complete description of a target.

use std::collections::BTreeMap;

use gpush_api::{Gpu, Lease, Mode, MpsClient, MpsDaemon};

use super::{desired_targets::DesiredTargets, summary::summary, target::MpsTarget};

/// What the description of a target shows, but no snapshot contains: users, processes, and what the caller may see of
/// them.
#[derive(Debug, Clone, Default)]
pub struct ShownFacts {
    /// The clients of the daemon, with their users.
    pub clients: Vec<MpsClient>,
    /// The uid of each server's process, by pid, and the name of this user.
    pub server_users: BTreeMap<u32, (u32, Option<String>)>,
    /// The leases on the target.
    pub leases: Vec<Lease>,
    /// The part of the target that these leases may use, in tenths of a percent.
    pub granted_tenths: u32,
    /// Name of the user whose clients the daemon serves.
    pub user: Option<String>,
    /// The processes that prevent the daemon from answering, one sentence each.
    pub connection_holders: Vec<String>,
    /// Problems with the clients, one sentence each.
    pub client_findings: Vec<String>,
    /// The clients that wait for the end of another user's clients, one sentence each.
    pub waiting: Vec<String>,
    /// Why the GPU of the target accepts no new leases.
    pub unavailable: Option<String>,
}

/// Describes a target completely, for a caller who may see everything in `facts`.
#[must_use]
pub fn describe(outlook: &DesiredTargets<'_>, target: &MpsTarget, facts: ShownFacts) -> MpsDaemon {
    let targets = outlook.targets;
    let mut daemon = summary(&outlook.gpus, target);
    daemon.reasons.extend(facts.connection_holders);
    daemon.ends = outlook.why_removed(target);
    let single_user = target.desired.as_ref().and_then(|desired| targets.reason_single_user(desired));
    let bypass = targets.bypass_error(&target.gpu_uuid, &target.label()).filter(|_| target.is_whole_gpu());
    let gpu = outlook.gpus.iter().find(|gpu| gpu.uuid == target.gpu_uuid);
    daemon.findings = facts.client_findings;
    daemon.findings.extend(single_user.map(str::to_owned));
    daemon.findings.extend(facts.waiting);
    daemon.findings.extend(targets.findings_of(target));
    daemon.findings.extend(bypass.map(|error| error.sentences().join(": ")));
    daemon.findings.extend(match (&daemon.ends, gpu) {
        (Some(why), Some(gpu)) => Some(end_finding(why, gpu)),
        (Some(_), None) | (None, _) => facts.unavailable,
    });
    for server in &mut daemon.servers {
        if let Some((uid, user)) = server.pid.and_then(|pid| facts.server_users.get(&pid)) {
            (server.uid, server.user) = (Some(*uid), user.clone());
        }
    }
    // Show the user to every caller, as the list of leases does: users who wait for the daemon must see who uses it.
    let is_used = !facts.leases.is_empty() || !facts.clients.is_empty() || !target.report.waiting.is_empty();
    daemon.uid = target.report.user.filter(|_| is_used);
    daemon.user = facts.user.filter(|_| daemon.uid.is_some());
    if let Some(desired) = &target.desired {
        // A stopped daemon does not report the desired settings, because it has not received them. So add them here.
        daemon.wanted = targets.policy(desired);
    }
    (daemon.clients, daemon.leases) = (facts.clients, facts.leases);
    daemon.granted_percent = facts.granted_tenths.div_ceil(10);
    daemon.rule = targets.record(&target.uuid).set.map(|set| set.rule);
    daemon.stays_stopped = targets.is_stopped(&target.uuid);
    daemon
}

/// Returns the finding for a target that is about to be removed.
fn end_finding(why: &str, gpu: &Gpu) -> String {
    match gpu.mode {
        // If no rule claims the GPU, gpushd stops the daemon itself, so the finding names no command.
        Mode::NoRule | Mode::Unmanaged => {
            format!("no lease is granted: {why}; running leases may finish, then the daemon ends")
        }
        Mode::Exclusive | Mode::Mig | Mode::Mps | Mode::Timeslice => format!(
            "no lease is granted: {why}; running leases may finish, then `gpushctl apply {}` (administrator) ends the \
            daemon",
            gpu.index
        ),
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::MpsUsers;

    use super::*;
    use crate::{
        config::Config,
        mps::{
            MultiUserSupport,
            report::DaemonReport,
            scene::{READY, config, gpu_target, gpus, report, targets},
        },
    };

    fn facts() -> ShownFacts {
        ShownFacts { unavailable: Some("GPU 0 is cordoned".to_owned()), ..ShownFacts::default() }
    }

    #[test]
    fn target_without_users_shows_no_user() {
        let seen = DaemonReport { user: Some(1000), servers: vec![(5, None)], ..report(READY) };
        let (all, gpus, config) = (targets([gpu_target(0, seen)]), gpus(), config(""));
        let outlook = DesiredTargets::new(&config, &gpus, &all);
        let user = Some("alice".to_owned());
        let server_users = BTreeMap::from([(5, (0, Some("root".to_owned())))]);
        let idle =
            describe(&outlook, &all.by_uuid["GPU-0"], ShownFacts { user: user.clone(), server_users, ..facts() });
        assert_eq!((idle.uid, idle.user, idle.granted_percent), (None, None, 0));
        assert_eq!((idle.servers[0].uid, idle.servers[0].user.as_deref()), (Some(0), Some("root")));
        assert_eq!((idle.findings.as_slice(), idle.ends), (["GPU 0 is cordoned".to_owned()].as_slice(), None));
        let client = MpsClient {
            pid: Some(7),
            server: Some(5),
            uid: Some(1000),
            user: user.clone(),
            command: None,
            lease: None,
            unattributed: false,
            unidentified: false,
        };
        let used = ShownFacts { user, clients: vec![client], granted_tenths: 255, ..facts() };
        let used = describe(&outlook, &all.by_uuid["GPU-0"], used);
        assert_eq!((used.uid, used.user.as_deref(), used.granted_percent), (Some(1000), Some("alice"), 26));
    }

    #[test]
    fn ended_target_names_command_only_if_rule_claims_gpu() {
        let (all, mut gpus) = (targets([gpu_target(0, report(READY))]), gpus());
        let none = Config::default();
        let finding = |gpus: &[Gpu]| {
            let outlook = DesiredTargets::new(&none, gpus, &all);
            describe(&outlook, &all.by_uuid["GPU-0"], facts()).findings.join("; ")
        };
        assert!(finding(&gpus).ends_with("then the daemon ends"), "{}", finding(&gpus));
        gpus[0].mode = Mode::Exclusive;
        assert!(finding(&gpus).ends_with("then `gpushctl apply 0` (administrator) ends the daemon"));
    }

    #[test]
    fn findings_explain_bypass_and_single_user() {
        let (gpus, config) = (gpus(), config("users = \"many\""));
        let mut target = gpu_target(0, report(READY));
        target.desired.as_mut().unwrap().policy.users = MpsUsers::Many;
        let mut all = targets([target]);
        all.set_bypass_reason(&"GPU-0".into(), Some("denied"));
        all.multi_user = MultiUserSupport::Unsupported("one user at a time".to_owned());
        let outlook = DesiredTargets::new(&config, &gpus, &all);
        let found = describe(&outlook, &all.by_uuid["GPU-0"], ShownFacts::default());
        assert_eq!(found.findings[0], "one user at a time");
        assert!(found.findings[1].starts_with("programs can bypass MPS on GPU 0"), "{found:?}");
        assert_eq!(found.wanted.users, MpsUsers::One);
    }
}
