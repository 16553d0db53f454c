//! The targets that the config requires on the GPUs of one snapshot, and which targets serve clients.

use std::{borrow::Cow, collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, Code, Gpu, GpuState, GpuUuid, Mode, MpsDaemon, MpsState, TargetUuid};

use super::{
    not_serving::NotServing,
    summary::{in_order, summary},
    target::MpsTarget,
    targets::MpsTargets,
};
use crate::{
    config::Config,
    sharing::{self, Sharing, SharingTarget},
};

/// The targets of a snapshot, and the targets that its config requires.
#[derive(Debug)]
pub struct DesiredTargets<'a> {
    /// The GPUs of the snapshot; empty if gpushd does not know them.
    pub gpus: Cow<'a, [Gpu]>,
    /// The targets of the snapshot.
    pub targets: &'a MpsTargets,
    decided: Sharing,
}

impl<'a> DesiredTargets<'a> {
    /// Determines which targets a config requires on these GPUs.
    #[must_use]
    pub fn new(config: &Config, gpus: impl Into<Cow<'a, [Gpu]>>, targets: &'a MpsTargets) -> Self {
        let gpus = gpus.into();
        let decided = sharing::decide(config, &gpus, &targets.uuids());
        Self { gpus, targets, decided }
    }

    fn gpu(&self, uuid: &GpuUuid) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.uuid == *uuid)
    }

    /// Returns whether a target will soon appear: its GPU was read, and no operation is needed, but the reconciler has
    /// not added the target yet.
    #[must_use]
    pub fn has_pending(&self) -> bool {
        let comes = |target: &SharingTarget| !target.full_gpu || self.targets.is_active(&target.uuid);
        self.decided.targets.iter().any(|target| self.targets.get(&target.uuid).is_none() && comes(target))
    }

    /// Returns why the reconciler will remove a target; `None` if the target stays. The leases and clients of the target
    /// may finish first.
    #[must_use]
    pub fn why_removed(&self, target: &MpsTarget) -> Option<String> {
        let gpu = self.gpu(&target.gpu_uuid)?;
        let is_wanted = self.decided.targets.iter().any(|wanted| wanted.uuid == target.uuid);
        if is_wanted || self.decided.unseen.contains(&gpu.uuid) || !is_reading_conclusive(Some(gpu)) {
            return None;
        }
        let its = self.decided.findings.iter().filter(|finding| finding.target.as_ref() == Some(&target.uuid));
        let reasons: Vec<&str> = its.map(|finding| finding.reason.as_str()).collect();
        Some(match (reasons.is_empty(), target.is_whole_gpu()) {
            (false, _) => reasons.join(", "),
            (true, true) => format!("the config wants GPU {} in mode `{}`", gpu.index, gpu.mode.name()),
            (true, false) => "the desired layout of its GPU no longer shares this MIG device".to_owned(),
        })
    }

    /// Checks that a target has a daemon that admits clients.
    ///
    /// # Errors
    /// If no client can be admitted. The error says why.
    pub fn serves(&self, uuid: &TargetUuid) -> Result<&'a MpsTarget, NotServing> {
        let Some(target) = self.targets.get(uuid) else {
            let error = ApiError::new(Code::Conflict, format!("{uuid} is no longer shared through MPS"));
            return Err(NotServing::lasting(error.hint("list the targets with `gpushctl mps list`")));
        };
        match self.why_removed(target) {
            Some(why) => Err(NotServing::lasting(target.removed_error(why))),
            None if target.report.admits() => Ok(target),
            None => Err(target.not_granting(self.targets.is_stopped(uuid))),
        }
    }

    /// Returns the UUIDs of the targets whose daemons admit new clients.
    #[must_use]
    pub fn serving(&self) -> BTreeSet<TargetUuid> {
        let serves = |target: &&Arc<MpsTarget>| target.report.admits() && self.why_removed(target).is_none();
        self.targets.all().filter(serves).map(|target| target.uuid.clone()).collect()
    }

    /// Returns the reason for each target on these GPUs that serves no clients.
    #[must_use]
    pub fn not_serving(&self, gpus: &[&GpuUuid]) -> Vec<NotServing> {
        let here = self.targets.all().filter(|target| gpus.contains(&&target.gpu_uuid));
        here.filter_map(|target| self.serves(&target.uuid).err()).collect()
    }

    /// Returns whether any daemon is starting, will soon be started, or runs but does not admit clients yet.
    #[must_use]
    pub fn is_starting(&self) -> bool {
        let starts = |target: &MpsTarget| {
            matches!(target.report.shown_state(), MpsState::Starting | MpsState::Ready) && !target.report.admits()
        };
        self.targets.all().any(|target| starts(target)) || self.has_pending()
    }

    /// Returns the target that a text names.
    ///
    /// # Errors
    /// If the text matches no target, or several.
    pub fn find(&self, text: &str) -> Result<&'a Arc<MpsTarget>, ApiError> {
        let named = self.targets.all().map(|target| (target, summary(&self.gpus, target)));
        let mut named: Vec<(&Arc<MpsTarget>, MpsDaemon)> = named.collect();
        named.sort_by(|(_, one), (_, other)| in_order(one, other));
        let (targets, names): (Vec<_>, Vec<_>) = named.into_iter().unzip();
        match sharing::resolve(text, &names) {
            Ok(at) => Ok(targets[at]),
            Err(mut error) => {
                error.causes.extend(self.findings());
                let due = |gpu: &&Gpu| gpu.mode == Mode::Mps && self.targets.get(gpu.uuid.as_target()).is_none();
                let due = self.gpus.iter().filter(due).filter(|gpu| sharing::mps_unsupported_reason(gpu).is_none());
                error.causes.extend(due.map(|gpu| {
                    format!(
                        "the rule of GPU {0} has mode `mps`, but the GPU is not shared yet: `gpushctl apply {0}` \
                        (administrator) shares it",
                        gpu.index
                    )
                }));
                Err(error)
            }
        }
    }

    /// Returns one sentence for each reason why a desired target cannot exist, in the order of the GPUs.
    #[must_use]
    pub fn findings(&self) -> Vec<String> {
        let mut of_gpus: Vec<_> = self.targets.findings.iter().collect();
        of_gpus.sort_by_key(|(uuid, _)| self.gpu(uuid).map(|gpu| gpu.index));
        of_gpus.into_iter().flat_map(|(_, findings)| findings).map(ToString::to_string).collect()
    }
}

/// Returns whether the reading of a GPU permits gpushd to remove the GPU's daemons. If the driver does not list the GPU
/// at the moment, returns `false`: the GPU may return, and its daemons may be in use.
#[must_use]
pub fn is_reading_conclusive(gpu: Option<&Gpu>) -> bool {
    gpu.is_some_and(|gpu| match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => !gpu.stale,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        mps::{
            report::DaemonReport,
            scene::{READY, config, gpu_target, gpus, report, targets},
        },
        supervisor::SupervisorState,
    };

    fn why_not(targets: &MpsTargets, gpus: &[Gpu], config: &Config) -> NotServing {
        DesiredTargets::new(config, gpus, targets).serves(&"GPU-0".into()).unwrap_err()
    }

    #[test]
    fn ready_daemon_of_the_config_serves() {
        let (all, gpus) = (targets([gpu_target(0, report(READY))]), gpus());
        let config = config("");
        let outlook = DesiredTargets::new(&config, &gpus, &all);
        assert_eq!(outlook.serves(&"GPU-0".into()).unwrap().uuid, "GPU-0");
        assert_eq!(outlook.serving(), ["GPU-0".into()].into());
        assert!(outlook.not_serving(&[&"GPU-0".into(), &"GPU-1".into()]).is_empty() && !outlook.is_starting());
        let unknown = outlook.serves(&"GPU-1".into()).unwrap_err();
        assert_eq!(unknown.error().message, "GPU-1 is no longer shared through MPS");
    }

    #[test]
    fn removed_rule_closes_the_target_before_its_daemon_ends() {
        let (all, gpus) = (targets([gpu_target(0, report(READY))]), gpus());
        let none = Config::default();
        let refused = why_not(&all, &gpus, &none);
        assert_eq!(refused.error().message, "the config no longer shares GPU 0 through MPS");
        let outlook = DesiredTargets::new(&none, &gpus, &all);
        assert!(outlook.serving().is_empty());
        assert_eq!(outlook.not_serving(&[&"GPU-0".into()]), [refused]);
    }

    /// A GPU that cannot be read may be unchanged, so its target stays.
    #[test]
    fn target_stays_while_its_gpu_cannot_be_read() {
        let all = targets([gpu_target(0, report(READY))]);
        for change in [
            |gpu: &mut Gpu| gpu.stale = true,
            |gpu: &mut Gpu| gpu.state = GpuState::Unknown,
            |gpu: &mut Gpu| gpu.uuid = "GPU-other".into(),
        ] {
            let mut gpus = gpus();
            change(&mut gpus[0]);
            let none = Config::default();
            let outlook = DesiredTargets::new(&none, &gpus, &all);
            assert_eq!(outlook.why_removed(&all.by_uuid["GPU-0"]), None);
        }
    }

    #[test]
    fn daemon_that_does_not_admit_clients_is_named_with_its_state() {
        let (gpus, config) = (gpus(), config(""));
        let backing_off = SupervisorState::BackingOff { until: std::time::Duration::ZERO };
        let all = targets([gpu_target(0, report(backing_off))]);
        let why = why_not(&all, &gpus, &config);
        assert_eq!(why.error().message, "cannot grant a lease on GPU 0: its MPS daemon is backing off");
        let found = targets([gpu_target(0, DaemonReport { wanted: false, ..report(READY) })]);
        let why = why_not(&found, &gpus, &config);
        assert!(matches!(why, NotServing::ForNow(_)), "gpushd has not adopted the daemon yet");
        assert!(DesiredTargets::new(&config, &gpus, &found).is_starting());
    }

    #[test]
    fn target_started_by_operation_is_pending() {
        let (gpus, config) = (gpus(), config(""));
        let mut all = targets([]);
        assert!(!DesiredTargets::new(&config, &gpus, &all).has_pending(), "only an operation starts the daemon");
        all.change_record(&"GPU-0".into(), |record| crate::mps::MpsTargetRecord {
            in_force: Some(String::new()),
            ..record
        });
        let outlook = DesiredTargets::new(&config, &gpus, &all);
        assert!(outlook.has_pending() && outlook.is_starting());
    }

    #[test]
    fn error_for_an_unknown_target_names_what_is_not_shared_yet() {
        let (mut gpus, config) = (gpus(), config(""));
        gpus[0].mode = Mode::Mps;
        let mut all = targets([]);
        let finding =
            |label: &str| vec![sharing::Finding { target: None, label: label.to_owned(), reason: "no".to_owned() }];
        all.set_findings(&"GPU-1".into(), finding("GPU 1"));
        all.set_findings(&"GPU-0".into(), finding("GPU 0"));
        let outlook = DesiredTargets::new(&config, &gpus, &all);
        let error = outlook.find("0").unwrap_err();
        assert_eq!(error.causes[1..3], ["GPU 0: no", "GPU 1: no"]);
        assert!(error.causes[3].starts_with("the rule of GPU 0 has mode `mps`, but the GPU is not shared yet"));
        let all = targets([gpu_target(0, report(READY))]);
        let outlook = DesiredTargets::new(&config, &gpus, &all);
        assert!(["0", "g0", "GPU-0"].iter().all(|text| outlook.find(text).unwrap().uuid == "GPU-0"));
    }
}
