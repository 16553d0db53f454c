//! All MPS targets of the host: the reports about their daemons, their records, and what operations do with them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_api::{ApiError, Code, GpuUuid, LeaseMember, MpsPolicy, MpsUsers, TargetUuid};

use super::{record::MpsTargetRecord, report::DaemonReport, target::MpsTarget};
use crate::sharing::{Finding, SharingTarget};

/// The daemons that an operation starts or keeps stopped. Removed when the operation ends.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OperationDaemons {
    /// UUIDs of the targets whose daemons the operation keeps stopped.
    pub kept_stopped: BTreeSet<TargetUuid>,
    /// UUIDs of the GPUs on which the operation starts daemons.
    pub starting: BTreeSet<GpuUuid>,
    /// For each GPU on which the operation starts daemons of MIG devices and changes the override, by UUID, the layout
    /// after the operation. The change of the override is recorded only with the end of the operation.
    pub layouts: BTreeMap<GpuUuid, Vec<String>>,
}

/// Whether the MPS control program can serve several users.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MultiUserSupport {
    /// No rule has requested it yet, so gpushd has not probed the program.
    #[default]
    NotProbed,
    /// The program supports it.
    Supported,
    /// The program does not support it. Contains the reason, as a sentence.
    Unsupported(String),
}

/// The MPS daemons that gpushd supervises, as far as leases need them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SupervisedTargets {
    /// UUIDs of all targets with a daemon.
    pub targets: BTreeSet<TargetUuid>,
    /// UUIDs of the targets whose daemon an operation has ended. gpushd removes such a daemon soon after the operation.
    pub ended: BTreeSet<TargetUuid>,
    /// For each target in use, by UUID, the user whose clients are connected.
    pub users: BTreeMap<TargetUuid, u32>,
}

/// The MPS targets of a host. Cheap to clone: the targets are shared.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MpsTargets {
    /// The targets whose daemons gpushd supervises, by UUID.
    pub by_uuid: BTreeMap<TargetUuid, Arc<MpsTarget>>,
    /// Records of targets, by UUID.
    pub records: BTreeMap<TargetUuid, MpsTargetRecord>,
    /// For each GPU, by UUID, why its desired targets cannot exist.
    pub findings: BTreeMap<GpuUuid, Vec<Finding>>,
    /// For each GPU, by UUID, why gpushd could not set the compute mode that prevents programs from bypassing MPS.
    pub bypass_reasons: BTreeMap<GpuUuid, String>,
    /// For each running operation, by id, which daemons it keeps stopped and which it starts.
    pub operations: BTreeMap<String, OperationDaemons>,
    /// Whether the MPS control program supports several users.
    pub multi_user: MultiUserSupport,
}

impl MpsTargets {
    /// Returns a target.
    #[must_use]
    pub fn get(&self, uuid: &TargetUuid) -> Option<&Arc<MpsTarget>> {
        self.by_uuid.get(uuid)
    }

    /// Returns all targets, sorted by UUID.
    pub fn all(&self) -> impl Iterator<Item = &Arc<MpsTarget>> {
        self.by_uuid.values()
    }

    /// Returns the targets on a GPU: the GPU itself, and its MIG devices.
    pub fn on_gpu(&self, gpu: &GpuUuid) -> impl Iterator<Item = &Arc<MpsTarget>> {
        self.all().filter(move |target| target.gpu_uuid == *gpu)
    }

    /// Returns the UUIDs of all targets.
    #[must_use]
    pub fn uuids(&self) -> BTreeSet<TargetUuid> {
        self.by_uuid.keys().cloned().collect()
    }

    /// Returns the UUIDs of the targets on a GPU whose daemon is desired or runs.
    #[must_use]
    pub fn daemons_on(&self, gpu: &GpuUuid) -> BTreeSet<TargetUuid> {
        self.on_gpu(gpu).filter(|target| target.report.is_present()).map(|target| target.uuid.clone()).collect()
    }

    /// Stores a report about the daemon of a target. Returns the target. Ignores the report, and returns `None`, if the
    /// target has been removed, or if another supervisor task reports about it now.
    pub fn report(&mut self, uuid: &TargetUuid, supervisor: u64, report: DaemonReport) -> Option<&MpsTarget> {
        let target = self.by_uuid.get_mut(uuid).filter(|target| target.supervisor == supervisor)?;
        let report = report.with_times_of(&target.report);
        if report != target.report {
            Arc::make_mut(target).report = report;
        }
        Some(target)
    }

    /// Stores what the config says about a target.
    pub fn set_desired(&mut self, desired: &SharingTarget) {
        if let Some(target) = self.by_uuid.get_mut(&desired.uuid)
            && target.desired.as_ref() != Some(desired)
        {
            Arc::make_mut(target).desired = Some(desired.clone());
        }
    }

    /// Returns the record of a target.
    #[must_use]
    pub fn record(&self, uuid: &TargetUuid) -> MpsTargetRecord {
        let record = self.records.get(uuid).cloned();
        record.unwrap_or_else(|| MpsTargetRecord { target: uuid.clone(), ..MpsTargetRecord::default() })
    }

    /// Changes the record of a target.
    pub fn change_record(&mut self, uuid: &TargetUuid, change: impl FnOnce(MpsTargetRecord) -> MpsTargetRecord) {
        let record = change(self.record(uuid));
        self.records.insert(uuid.clone(), record);
    }

    /// Returns whether a daemon is in force: an operation has started it for the whole GPU on this boot.
    #[must_use]
    pub fn is_active(&self, uuid: &TargetUuid) -> bool {
        self.records.get(uuid).is_some_and(|record| record.in_force.is_some())
    }

    /// Returns whether an administrator has stopped the daemon of a target.
    #[must_use]
    pub fn is_stopped(&self, uuid: &TargetUuid) -> bool {
        self.records.get(uuid).is_some_and(|record| record.stopped.is_some())
    }

    /// Returns whether a whole GPU is an MPS target, even if the target is about to be removed.
    #[must_use]
    pub fn has(&self, uuid: &TargetUuid) -> bool {
        self.is_active(uuid) || self.by_uuid.contains_key(uuid)
    }

    /// Returns whether a target gets a daemon. A MIG device gets a daemon if the layout of its GPU shares the device. A
    /// whole GPU gets a daemon only if an operation has started it on this boot or is starting it.
    #[must_use]
    pub fn gets_daemon(&self, target: &SharingTarget) -> bool {
        !target.full_gpu || self.is_active(&target.uuid) || self.is_starting(&target.gpu_uuid)
    }

    /// Returns whether an operation keeps the daemon of a target stopped.
    #[must_use]
    pub fn is_kept_stopped(&self, uuid: &TargetUuid) -> bool {
        self.operations.values().any(|daemons| daemons.kept_stopped.contains(uuid))
    }

    /// Returns whether an operation starts daemons on a GPU.
    #[must_use]
    pub fn is_starting(&self, gpu: &GpuUuid) -> bool {
        self.operations.values().any(|daemons| daemons.starting.contains(gpu))
    }

    /// Returns the layout that a GPU has after the running operation that starts daemons on its MIG devices.
    #[must_use]
    pub fn layout_after_operation(&self, gpu: &GpuUuid) -> Option<&Vec<String>> {
        self.operations.values().rev().find_map(|daemons| daemons.layouts.get(gpu))
    }

    /// Returns the daemons of an operation, to change them.
    pub fn operation(&mut self, id: &str) -> &mut OperationDaemons {
        self.operations.entry(id.to_owned()).or_default()
    }

    /// Stores why the desired targets of a GPU cannot exist. Returns the findings that are new.
    pub fn set_findings(&mut self, gpu: &GpuUuid, findings: Vec<Finding>) -> Vec<Finding> {
        let before = self.findings.remove(gpu).unwrap_or_default();
        let new = findings.iter().filter(|finding| !before.contains(finding)).cloned().collect();
        if !findings.is_empty() {
            self.findings.insert(gpu.clone(), findings);
        }
        new
    }

    /// Returns one sentence for each reason why a target on a GPU cannot exist as desired.
    #[must_use]
    pub fn findings_of(&self, target: &MpsTarget) -> Vec<String> {
        let of_gpu = self.findings.get(&target.gpu_uuid).into_iter().flatten();
        of_gpu.filter(|finding| finding.target.as_ref() == Some(&target.uuid)).map(Finding::to_string).collect()
    }

    /// Stores why gpushd could not set the compute mode of a GPU; `None` if programs cannot bypass MPS on it. Returns
    /// whether this has changed.
    pub fn set_bypass_reason(&mut self, gpu: &GpuUuid, why: Option<&str>) -> bool {
        if self.bypass_reasons.get(gpu).map(String::as_str) == why {
            return false;
        }
        match why {
            Some(why) => self.bypass_reasons.insert(gpu.clone(), why.to_owned()),
            None => self.bypass_reasons.remove(gpu),
        };
        true
    }

    /// Returns the error if programs can bypass MPS on a GPU, because its compute mode could not be set. `label` is the
    /// GPU's name in the message.
    #[must_use]
    pub fn bypass_error(&self, gpu: &GpuUuid, label: &str) -> Option<ApiError> {
        let why = self.bypass_reasons.get(gpu)?;
        let message = format!("programs can bypass MPS on {label}: it is not in compute mode EXCLUSIVE_PROCESS");
        let hint = "gpushd tries again; to leave the compute mode unchanged, set `compute_mode = \"keep\"` in the rule";
        Some(ApiError::new(Code::DriverError, message).cause(why.clone()).hint(hint).retryable())
    }

    /// Returns the policy of a target, with the settings of its rule or the recorded settings that override them. The
    /// target serves several users only if the control program supports that.
    #[must_use]
    pub fn policy(&self, target: &SharingTarget) -> MpsPolicy {
        let record = self.records.get(&target.uuid);
        let set = record.and_then(|record| record.set.as_ref()).filter(|set| set.rule == target.policy.settings);
        let settings = set.map_or_else(|| target.policy.settings.clone(), |set| set.settings.clone());
        let users = match self.multi_user {
            MultiUserSupport::Supported => target.policy.users,
            MultiUserSupport::NotProbed | MultiUserSupport::Unsupported(_) => MpsUsers::One,
        };
        MpsPolicy { settings, users, ..target.policy.clone() }
    }

    /// Returns why a target serves only one user at a time although its rule requests several.
    #[must_use]
    pub fn reason_single_user(&self, target: &SharingTarget) -> Option<&str> {
        match &self.multi_user {
            MultiUserSupport::Unsupported(why) if target.policy.users == MpsUsers::Many => Some(why),
            MultiUserSupport::Unsupported(_) | MultiUserSupport::NotProbed | MultiUserSupport::Supported => None,
        }
    }

    /// Returns the supervised daemons, as far as leases need them.
    #[must_use]
    pub fn supervised(&self) -> SupervisedTargets {
        let mut all = SupervisedTargets { targets: self.uuids(), ..SupervisedTargets::default() };
        for target in self.all() {
            if target.report.has_ended() && !self.is_active(&target.uuid) {
                all.ended.insert(target.uuid.clone());
            }
            let user = target.report.user.filter(|_| target.report.client_count() > 0);
            all.users.extend(user.map(|user| (target.uuid.clone(), user)));
        }
        all
    }

    /// For each target whose daemon serves one user at a time, returns that user: the holder of a lease on the target, or
    /// else the user whose clients are connected. `members` are the members of all leases, each with the uid of its
    /// holder.
    #[must_use]
    pub fn single_users(&self, members: &[(u32, &LeaseMember)]) -> BTreeMap<TargetUuid, u32> {
        let connected = self.supervised().users;
        let user = |target: &Arc<MpsTarget>| {
            let serves_one = target.report.policy.as_ref().is_some_and(|policy| policy.users == MpsUsers::One);
            let holder = || members.iter().find(|(_, member)| member.target == target.uuid).map(|(holder, _)| *holder);
            let user = holder().or_else(|| connected.get(&target.uuid).copied()).filter(|_| serves_one)?;
            Some((target.uuid.clone(), user))
        };
        self.all().filter_map(user).collect()
    }

    /// Returns the UUIDs of the GPUs of which [`MpsTargets::is_active`] or [`MpsTargets::daemons_on`] differ between two
    /// states.
    #[must_use]
    pub fn changed_gpus(&self, before: &Self) -> BTreeSet<GpuUuid> {
        let mut gpus = BTreeSet::new();
        for uuid in self.records.keys().chain(before.records.keys()) {
            if self.is_active(uuid) != before.is_active(uuid) {
                gpus.extend(uuid.to_gpu());
            }
        }
        for target in self.all().chain(before.all()) {
            let is_present = |targets: &Self| targets.get(&target.uuid).map(|target| target.report.is_present());
            if is_present(self).unwrap_or_default() != is_present(before).unwrap_or_default() {
                gpus.insert(target.gpu_uuid.clone());
            }
        }
        gpus
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{MemberShare, MpsSettings};

    use super::*;
    use crate::{
        mps::{
            record::MpsSet,
            scene::{READY, gpu_target, report, targets},
        },
        supervisor::SupervisorState,
    };

    fn member(target: &str) -> LeaseMember {
        let (target, gpu) = (target.to_owned(), target.to_owned());
        LeaseMember {
            target: target.into(),
            gpu_uuid: gpu.into(),
            share: MemberShare::Whole,
            memory_mib: 0,
            gpu_memory_mib: 0,
        }
    }

    #[test]
    fn report_about_the_same_facts_changes_nothing() {
        let mut now = targets([gpu_target(0, report(READY))]);
        let before = now.clone();
        assert!(now.report(&"GPU-0".into(), 0, report(READY)).is_some());
        assert_eq!(now.report(&"GPU-1".into(), 0, report(READY)), None);
        assert_eq!(
            now.report(&"GPU-0".into(), 1, report(SupervisorState::Stopped)),
            None,
            "an earlier supervisor task"
        );
        assert!(now == before && Arc::ptr_eq(&now.by_uuid["GPU-0"], &before.by_uuid["GPU-0"]));
        now.report(&"GPU-0".into(), 0, DaemonReport { clients: vec![(1, 2)], ..report(READY) });
        assert!(now != before && now.changed_gpus(&before).is_empty());
    }

    #[test]
    fn gpu_changes_when_its_daemon_ends_or_an_operation_stops_it() {
        let before = targets([gpu_target(0, report(READY)), gpu_target(1, report(READY))]);
        let mut now = before.clone();
        now.report(&"GPU-1".into(), 0, DaemonReport { wanted: false, ..report(SupervisorState::Stopped) });
        assert_eq!(now.changed_gpus(&before), ["GPU-1".into()].into());
        let mut now = before.clone();
        now.change_record(&"GPU-0".into(), |record| MpsTargetRecord { in_force: None, ..record });
        assert_eq!(now.changed_gpus(&before), ["GPU-0".into()].into());
        let mut now = before.clone();
        now.by_uuid.remove("GPU-1");
        assert_eq!(now.changed_gpus(&before), before.changed_gpus(&now));
        assert_eq!(now.changed_gpus(&before), ["GPU-1".into()].into());
    }

    #[test]
    fn only_new_findings_are_returned() {
        let finding = |reason: &str| Finding { target: None, label: "GPU 0".to_owned(), reason: reason.to_owned() };
        let mut all = MpsTargets::default();
        assert_eq!(all.set_findings(&"GPU-0".into(), vec![finding("a")]), [finding("a")]);
        assert_eq!(all.set_findings(&"GPU-0".into(), vec![finding("a"), finding("b")]), [finding("b")]);
        assert!(all.set_findings(&"GPU-0".into(), Vec::new()).is_empty() && all.findings.is_empty());
    }

    #[test]
    fn bypass_is_news_until_its_reason_is_known() {
        let mut all = MpsTargets::default();
        assert!(
            all.set_bypass_reason(&"GPU-0".into(), Some("denied"))
                && !all.set_bypass_reason(&"GPU-0".into(), Some("denied"))
        );
        let error = all.bypass_error(&"GPU-0".into(), "GPU 0").unwrap();
        assert_eq!((error.causes.as_slice(), error.retryable), (["denied".to_owned()].as_slice(), true));
        assert!(all.set_bypass_reason(&"GPU-0".into(), None) && !all.set_bypass_reason(&"GPU-0".into(), None));
        assert_eq!(all.bypass_error(&"GPU-0".into(), "GPU 0"), None);
    }

    #[test]
    fn several_users_are_served_only_where_supported() {
        let mut all = targets([]);
        let mut target = gpu_target(0, report(READY)).desired.unwrap();
        target.policy.users = MpsUsers::Many;
        assert_eq!(all.policy(&target).users, MpsUsers::One);
        all.multi_user = MultiUserSupport::Supported;
        assert_eq!((all.policy(&target).users, all.reason_single_user(&target)), (MpsUsers::Many, None));
        all.multi_user = MultiUserSupport::Unsupported("why".to_owned());
        assert_eq!((all.policy(&target).users, all.reason_single_user(&target)), (MpsUsers::One, Some("why")));
        target.policy.users = MpsUsers::One;
        assert_eq!(all.reason_single_user(&target), None);
    }

    /// Settings that an administrator has set end when the rule changes.
    #[test]
    fn recorded_settings_apply_until_the_rule_changes() {
        let (mut all, mut target) = (targets([]), gpu_target(0, report(READY)).desired.unwrap());
        let rule = target.policy.settings.clone();
        let half = MpsSettings { percentage: "50".parse().unwrap(), ..rule.clone() };
        let set = Some(MpsSet { settings: half.clone(), rule: rule.clone() });
        all.change_record(&"GPU-0".into(), |record| MpsTargetRecord { set, ..record });
        assert_eq!(all.policy(&target).settings, half);
        target.policy.settings.percentage = "80".parse().unwrap();
        assert_eq!(all.policy(&target).settings, target.policy.settings);
    }

    #[test]
    fn user_of_a_target_is_the_holder_or_the_user_with_clients() {
        let used = DaemonReport { user: Some(1001), clients: vec![(1, 2)], ..report(READY) };
        let idle = DaemonReport { user: Some(1001), ..report(READY) };
        let users = |report: DaemonReport, members: &[(u32, &LeaseMember)]| {
            targets([gpu_target(0, report)]).single_users(members).get("GPU-0").copied()
        };
        let (here, elsewhere) = (member("GPU-0"), member("GPU-1"));
        assert_eq!(users(used.clone(), &[(1000, &elsewhere)]), Some(1001));
        assert_eq!(users(used.clone(), &[(1000, &here)]), Some(1000));
        assert_eq!(users(idle, &[]), None);
        let many = MpsPolicy { users: MpsUsers::Many, ..MpsPolicy::default() };
        assert_eq!(users(DaemonReport { policy: Some(many), ..used }, &[(1000, &here)]), None);
    }

    #[test]
    fn daemon_has_ended_only_if_no_operation_has_started_it() {
        let stopped = || report(SupervisorState::Stopped);
        let mut all = targets([gpu_target(0, stopped()), gpu_target(1, stopped())]);
        all.change_record(&"GPU-1".into(), |record| MpsTargetRecord { in_force: None, ..record });
        let supervised = all.supervised();
        assert_eq!((supervised.targets.len(), supervised.ended), (2, ["GPU-1".into()].into()));
    }
}
