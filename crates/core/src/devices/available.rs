//! Why a lease request cannot get a free MIG device.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use gpush_api::{Gpu, GpuIndex, LeaseKind, LeaseMember, MemberShare, MigDevice, Mode, MpsDaemon, TargetUuid};

use crate::{
    desired::whole_gpu_obstacles,
    lease::{
        placement::{Closed, Host, nominal_mib},
        quota::{self, Denial, Effective, HeldLease, Size},
    },
};

/// Why a new lease request cannot get a free device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Unavailable {
    /// No rule claims the GPU.
    NoRule,
    /// The rule of the GPU has mode `unmanaged`.
    Unmanaged,
    /// The GPU is not in the mode of its rule. Contains the difference.
    OtherMode(String),
    /// Only Slurm's hooks may lease the GPU.
    OnlySlurm,
    /// The rule of the GPU permits only other users.
    OtherUsers,
    /// The quota of the caller does not allow a lease of the device.
    Quota(Denial),
    /// The quota of the caller is unknown, because the name service did not answer.
    UnknownQuota,
    /// The device is shared through MPS.
    Mps,
    /// An entry of the queue gets the device first: `lease L3`.
    Ahead(String),
    /// An operation has claimed the GPU.
    Claimed,
    /// A new rule changes the whole GPU later, after its leases. Contains the changes.
    Pending(Vec<String>),
    /// The compute mode of the GPU is PROHIBITED, so no program can use it.
    Prohibited,
    /// The reading of the GPU is too old.
    NotRead,
    /// A request is getting the device, or gpushd does not know enough about it.
    Taken,
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRule => f.write_str("no rule of the config claims the GPU"),
            Self::Unmanaged => f.write_str("mode `unmanaged`: gpushd grants no leases"),
            Self::OtherMode(difference) => write!(f, "the GPU is not in its mode: {difference}"),
            Self::OnlySlurm => f.write_str("only Slurm jobs can lease the GPU"),
            Self::OtherUsers => f.write_str("the rule of the GPU permits only other users"),
            Self::Quota(denial) => write!(f, "not allowed by your quota: {denial}"),
            Self::UnknownQuota => f.write_str("your quota is unknown: the name service of the host does not answer"),
            Self::Mps => f.write_str("shared through MPS: request it with --mps"),
            Self::Ahead(waiter) => write!(f, "{waiter} is ahead in the queue"),
            Self::Claimed => f.write_str("an operation is about to change the GPU"),
            Self::Pending(changes) => f.write_str(&changes.join("; ")),
            Self::Prohibited => f.write_str("no program can use the GPU: its compute mode is PROHIBITED"),
            Self::NotRead => f.write_str("gpushd has no recent reading of the GPU"),
            Self::Taken => f.write_str("gpushd cannot grant the device at the moment"),
        }
    }
}

/// What only gpushd knows about its MIG devices.
#[derive(Debug, Clone, Copy)]
pub struct Offers<'a> {
    /// What the GPUs offer now. A free device counts as free here even if an entry of the queue gets it first.
    pub host: &'a Host,
    /// The entries of the queue that get free devices first, by UUID of the device: `lease L3`.
    pub takers: &'a BTreeMap<TargetUuid, String>,
    /// Indexes of the GPUs that the caller may not lease, because only Slurm's hooks may lease them.
    pub slurm: &'a BTreeSet<GpuIndex>,
    /// Indexes of the GPUs whose rules do not permit the caller.
    pub closed: &'a BTreeSet<GpuIndex>,
    /// The quota of the caller; `None` if the name service did not answer about the caller.
    pub quota: Option<CallerQuota<'a>>,
}

/// The quota of a caller, and the leases that count towards it.
#[derive(Debug, Clone, Copy)]
pub struct CallerQuota<'a> {
    /// The quota.
    pub effective: &'a Effective,
    /// The leases of the caller.
    pub held: &'a [HeldLease],
    /// GPUs of the host.
    pub gpus: &'a [Gpu],
}

impl CallerQuota<'_> {
    /// Checks a request for one MIG device, with a duration that the quota allows.
    ///
    /// # Errors
    /// The first limit that the request exceeds.
    fn check(&self, device: &MigDevice) -> Result<(), Denial> {
        quota::allowed_gpus(self.effective, Some(&BTreeSet::from([device.gpu])))?;
        let duration = self.effective.limits.longest_s.or(Some(0));
        quota::check_request(self.effective, self.held, LeaseKind::Mig, duration)?;
        let gpu = self.gpus.iter().find(|gpu| gpu.uuid == device.gpu_uuid);
        let profile = device.instance.split('@').next().unwrap_or_default();
        let memory_mib = device.memory_mib.filter(|mib| *mib > 0).or(nominal_mib(profile)).unwrap_or_default();
        let member = LeaseMember {
            target: device.uuid.clone().unwrap_or_default(),
            gpu_uuid: device.gpu_uuid.clone(),
            share: MemberShare::Mig { profile: device.profile.clone() },
            memory_mib,
            gpu_memory_mib: gpu.map_or(0, |gpu| gpu.memory.total_mib),
        };
        quota::check_size(self.effective, self.held, Size::of(&[member]))
    }
}

impl Offers<'_> {
    /// Returns why a new lease request of the caller cannot get a free device; `None` if it can.
    pub(super) fn unavailable(&self, device: &MigDevice) -> Option<Unavailable> {
        if self.slurm.contains(&device.gpu) {
            return Some(Unavailable::OnlySlurm);
        }
        if self.closed.contains(&device.gpu) {
            return Some(Unavailable::OtherUsers);
        }
        let Some(quota) = self.quota else { return Some(Unavailable::UnknownQuota) };
        if let Err(denial) = quota.check(device) {
            return Some(Unavailable::Quota(denial));
        }
        let uuid = device.uuid.as_ref();
        if let Some(waiter) = uuid.and_then(|uuid| self.takers.get(uuid)) {
            return Some(Unavailable::Ahead(waiter.clone()));
        }
        if self.host.free_devices().any(|free| Some(free) == device.uuid.as_ref()) {
            return None;
        }
        let gpu = self.host.gpus.iter().find(|gpu| gpu.uuid == device.gpu_uuid);
        let mut offered =
            gpu.iter().flat_map(|gpu| &gpu.mig).flat_map(|mig| &mig.instances).flat_map(|one| &one.devices);
        let whole_gpu_changes = || {
            let changes = gpu.iter().flat_map(|gpu| &gpu.pending).filter(|change| change.aim.device().is_none());
            changes.map(|change| change.describe(device.gpu)).collect()
        };
        Some(match gpu.and_then(|gpu| gpu.closed) {
            Some(Closed::Claimed) => Unavailable::Claimed,
            Some(Closed::NotReady | Closed::Cordoned) => Unavailable::NotRead,
            Some(Closed::Prohibited) => Unavailable::Prohibited,
            Some(Closed::Pending) => Unavailable::Pending(whole_gpu_changes()),
            Some(Closed::StillShared | Closed::NotShared) => Unavailable::Mps,
            None if offered.any(|one| Some(&one.uuid) == uuid && one.shared) => Unavailable::Mps,
            None => Unavailable::Taken,
        })
    }
}

/// Returns why no lease request gets the devices of a GPU, or this device, even if nothing uses it.
pub(super) fn unavailable(gpu: &Gpu, daemon: Option<&MpsDaemon>) -> Option<Unavailable> {
    match gpu.mode {
        Mode::NoRule => Some(Unavailable::NoRule),
        Mode::Unmanaged => Some(Unavailable::Unmanaged),
        Mode::Mps | Mode::Timeslice | Mode::Exclusive => {
            Some(Unavailable::OtherMode(whole_gpu_obstacles(gpu.mode, gpu).join("; ")))
        }
        Mode::Mig => daemon.map(|_| Unavailable::Mps),
    }
}
