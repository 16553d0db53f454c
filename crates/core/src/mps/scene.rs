//! Targets and reports for tests.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{Gpu, GpuIndex, MpsPolicy};
use jiff::Timestamp;

use super::{report::DaemonReport, target::MpsTarget, targets::MpsTargets};
use crate::{config::Config, preset, sharing::SharingTarget, supervisor::SupervisorState};

pub(super) const READY: SupervisorState = SupervisorState::Ready { pid: 1, silences: 0 };

/// Returns a report about a desired daemon without clients.
pub(super) fn report(state: SupervisorState) -> DaemonReport {
    DaemonReport {
        state,
        since: Timestamp::UNIX_EPOCH,
        wanted: true,
        multi_user: false,
        policy: Some(MpsPolicy::default()),
        pid: Some(1),
        in_force: None,
        servers: Vec::new(),
        clients: Vec::new(),
        clients_known: true,
        waiting: Vec::new(),
        serves_leases: false,
        behind: false,
        until: None,
        failures: 0,
        next_start: None,
        trouble: Vec::new(),
        ear: BTreeSet::new(),
        protocol: None,
        findings: Vec::new(),
        pipe: None,
        logs: None,
        user: None,
    }
}

/// Returns the target that is the whole GPU with this index.
pub(super) fn gpu_target(index: u32, report: DaemonReport) -> MpsTarget {
    let uuid = format!("GPU-{index}");
    let desired = SharingTarget {
        uuid: uuid.clone().into(),
        gpu: GpuIndex(index),
        gpu_uuid: uuid.clone().into(),
        device: None,
        memory_mib: Some(81_920),
        policy: MpsPolicy::default(),
        full_gpu: true,
    };
    MpsTarget {
        uuid: uuid.clone().into(),
        short: format!("g{index}"),
        gpu_uuid: uuid.into(),
        desired: Some(desired),
        supervisor: 0,
        report,
    }
}

/// Returns two GPUs with the UUIDs `GPU-0` and `GPU-1`, without MIG.
pub(super) fn gpus() -> Vec<Gpu> {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    gpus.truncate(2);
    for (gpu, uuid) in gpus.iter_mut().zip(["GPU-0", "GPU-1"]) {
        gpu.uuid = uuid.into();
        gpu.mig.iter_mut().for_each(|mig| mig.set_mode(false, false));
    }
    gpus
}

/// Returns a config that shares GPU 0 through MPS. `settings` are keys of its `[gpu.mps]`.
pub(super) fn config(settings: &str) -> Config {
    let text = format!("[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n[gpu.mps]\n{settings}\n");
    Config::parse(&text, "gpushd.toml").unwrap()
}

/// Returns the targets, of which each is in force.
pub(super) fn targets(all: impl IntoIterator<Item = MpsTarget>) -> MpsTargets {
    let mut targets = MpsTargets::default();
    for target in all {
        targets
            .change_record(&target.uuid, |record| super::MpsTargetRecord { in_force: Some(String::new()), ..record });
        targets.by_uuid.insert(target.uuid.clone(), Arc::new(target));
    }
    targets
}
