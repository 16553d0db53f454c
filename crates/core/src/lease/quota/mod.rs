//! Quotas: limits for the leases of a user.
//!
//! Quotas are a list. Only one quota applies to a user: the first quota that names the user, one of
//! the user's groups, or everybody. If there is no such quota, the [`Limits::standard`] apply, so
//! that one user cannot lease a whole host. Root has no quota.
//!
//! Limits apply to the leases of one user. A quota for a group limits each member separately, not
//! all members together.
//!
//! A request is checked twice: before placement ([`check_request`]), and with the size of its
//! assignment ([`check_size`]). The size of a request for "at least" some memory is known only
//! after placement.

use std::collections::BTreeSet;

use gpush_api::{GpuIndex, LeaseAccess, LeaseId, LeaseKind, LeaseMember, MemberShare};

use super::request::DefaultRequest;

mod allowance;
mod denial;
mod denial_text;
mod standing;

pub use allowance::Allowance;
pub use denial::{Denial, Exceeded};
pub use denial_text::{DeniedRequest, use_or_release};
pub use standing::standing;

/// The users that a quota applies to, or that a rule permits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// A user, by name.
    User(String),
    /// Each member of a group, by name.
    Group(String),
    /// Each user.
    Everybody,
}

impl Subject {
    /// Returns the users and groups that a rule permits.
    pub fn permitted(access: &LeaseAccess) -> impl Iterator<Item = Self> {
        let users = access.users.iter().cloned().map(Self::User);
        users.chain(access.groups.iter().cloned().map(Self::Group))
    }
}

/// An amount of GPU memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryAmount {
    /// Parts of GPUs of any size, in thousandths of a GPU: 1500 is one and a half GPUs.
    Gpus(u32),
    /// An amount in MiB.
    Mib(u64),
}

/// A quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quota {
    /// The users that the quota applies to.
    pub subject: Subject,
    /// The limits.
    pub limits: Limits,
    /// What a request without a share means.
    pub default: Option<DefaultRequest>,
}

/// Limits for the leases of a user; `None` means no limit.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Limits {
    /// Allowed kinds of leases.
    pub kinds: Option<BTreeSet<LeaseKind>>,
    /// Maximum number of leases that hold capacity.
    pub leases: Option<u32>,
    /// Maximum number of queued leases.
    pub queued: Option<u32>,
    /// Maximum memory of all leases together.
    ///
    /// A limit in [`MemoryAmount::Gpus`] does not apply to a lease with one member if the user has
    /// no other lease. Without this exception, no user could lease the GPU of a host with one GPU.
    pub memory: Option<MemoryAmount>,
    /// Maximum MPS percentage of all leases together, in tenths of a percent.
    pub mps_tenths: Option<u32>,
    /// Maximum duration of a lease, in seconds. A lease without an end time exceeds any limit.
    pub longest_s: Option<u64>,
    /// Indexes of the allowed GPUs.
    pub gpus: Option<BTreeSet<GpuIndex>>,
}

impl Limits {
    /// Returns the limits for a user without a quota: three quarters of the memory of the host's
    /// `gpus` GPUs, 32 leases, and 16 queued requests.
    #[must_use]
    pub fn standard(gpus: usize) -> Self {
        let gpus = u32::try_from(gpus).unwrap_or(u32::MAX);
        let memory = Some(MemoryAmount::Gpus(gpus.saturating_mul(750)));
        Self { leases: Some(32), queued: Some(16), memory, ..Self::default() }
    }
}

/// The data about a user that determines the quota.
#[derive(Debug, Clone, Copy)]
pub enum User<'a> {
    /// Root of the host, who has no quota.
    Root,
    /// Another user.
    Account {
        /// User id; `None` for uids that belong to no user of the host.
        uid: Option<u32>,
        /// Ids of the groups of the user.
        gids: &'a [u32],
        /// Whether `gids` has all groups of the user. If not, the name service did not answer.
        has_all_groups: bool,
    },
}

/// The id of a user or group that a quota names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedId {
    /// The uid or gid.
    Known(u32),
    /// The host has no user or group with this name.
    Absent,
    /// The name service did not answer.
    Unanswered,
}

/// The quota of a user is unknown, because the name service did not answer about this user or group of the config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownQuota(pub Subject);

/// A current lease of the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeldLease {
    /// Id.
    pub id: LeaseId,
    /// Whether the lease is queued.
    pub queued: bool,
    /// Size of the lease; zero while the lease is queued.
    pub size: Size,
    /// Whether the caller may release the lease.
    pub releasable: bool,
}

/// The amount of each limited resource that a lease uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Size {
    /// Number of members.
    pub members: usize,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Thousandths of a GPU, rounded up for each member.
    pub gpu_thousandths: u32,
    /// MPS percentage in tenths of a percent.
    pub mps_tenths: u32,
}

impl Size {
    /// Returns the size of a lease with one member that has this memory, on a GPU with `gpu_mib` MiB.
    #[must_use]
    pub fn of_one(memory_mib: u64, gpu_mib: u64, mps_tenths: u32) -> Self {
        let gpu_thousandths = memory_mib.saturating_mul(1000).div_ceil(gpu_mib.max(1));
        let gpu_thousandths = u32::try_from(gpu_thousandths).unwrap_or(u32::MAX);
        Self { members: 1, memory_mib, gpu_thousandths, mps_tenths }
    }

    /// Returns the size of a lease with this number of equal members.
    #[must_use]
    pub fn times(self, count: usize) -> Self {
        let number = u64::try_from(count).unwrap_or(u64::MAX);
        let factor = u32::try_from(count).unwrap_or(u32::MAX);
        Self {
            members: self.members.saturating_mul(count),
            memory_mib: self.memory_mib.saturating_mul(number),
            gpu_thousandths: self.gpu_thousandths.saturating_mul(factor),
            mps_tenths: self.mps_tenths.saturating_mul(factor),
        }
    }

    /// Returns the total size of a lease's members.
    #[must_use]
    pub fn of(members: &[LeaseMember]) -> Self {
        let mut size = Self { members: members.len(), ..Self::default() };
        for member in members {
            let whole = member.gpu_memory_mib.max(1);
            let thousandths = member.memory_mib.saturating_mul(1000).div_ceil(whole);
            let thousandths = u32::try_from(thousandths).unwrap_or(u32::MAX);
            size.memory_mib = size.memory_mib.saturating_add(member.memory_mib);
            size.gpu_thousandths = size.gpu_thousandths.saturating_add(thousandths);
            size.mps_tenths = size.mps_tenths.saturating_add(match &member.share {
                MemberShare::Mps { percentage, .. } => u32::from(percentage.tenths()),
                MemberShare::Mig { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => 0,
            });
        }
        size
    }
}

/// The quota of one user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effective {
    /// The users that the quota applies to; `None` for the standard limits.
    pub subject: Option<Subject>,
    /// The limits.
    pub limits: Limits,
    /// What a request without a share means; `None` if the request must name its share, or the GPUs offer only one kind.
    pub default: Option<DefaultRequest>,
}

/// Finds the quota of a user on a host with `gpus` GPUs. `id_of` returns the id of a user or group that a quota names.
///
/// # Errors
/// The first quota that may apply to the user names a user or group whose id or members are unknown.
pub fn effective(
    quotas: &[Quota],
    user: User<'_>,
    id_of: impl Fn(&Subject) -> NamedId,
    gpus: usize,
) -> Result<Effective, UnknownQuota> {
    if matches!(user, User::Root) {
        return Ok(Effective::without_quota(Limits::default()));
    }
    for quota in quotas {
        if applies(&quota.subject, user, id_of(&quota.subject))? {
            let Quota { subject, limits, default } = quota.clone();
            return Ok(Effective { subject: Some(subject), limits, default });
        }
    }
    Ok(Effective::without_quota(Limits::standard(gpus)))
}

/// Returns the quotas that name a user but have no effect, because an earlier quota names the user too. Leaves out quotas
/// of which this is unknown.
pub fn ignored(quotas: &[Quota], user: User<'_>, id_of: impl Fn(&Subject) -> NamedId) -> Vec<Subject> {
    let naming = quotas.iter().map(|quota| &quota.subject);
    let naming = naming.filter(|subject| applies(subject, user, id_of(subject)).unwrap_or(false));
    naming.skip(1).cloned().collect()
}

/// Returns whether `subject`, whose id is `named`, is the user or a group of the user. `everybody` is each user except root.
///
/// # Errors
/// The id of `subject`, or the groups of the user, are unknown.
pub fn applies(subject: &Subject, user: User<'_>, named: NamedId) -> Result<bool, UnknownQuota> {
    let User::Account { uid, gids, has_all_groups } = user else { return Ok(false) };
    match (subject, named) {
        (Subject::Everybody, _) => Ok(true),
        // A uid that belongs to no user cannot be the user that the quota names.
        (Subject::User(_), NamedId::Unanswered) if uid.is_none() => Ok(false),
        (Subject::User(_) | Subject::Group(_), NamedId::Unanswered) => Err(UnknownQuota(subject.clone())),
        (Subject::User(_) | Subject::Group(_), NamedId::Absent) => Ok(false),
        (Subject::User(_), NamedId::Known(named)) => Ok(uid == Some(named)),
        (Subject::Group(_), NamedId::Known(gid)) if gids.contains(&gid) => Ok(true),
        (Subject::Group(_), NamedId::Known(_)) if !has_all_groups => Err(UnknownQuota(subject.clone())),
        (Subject::Group(_), NamedId::Known(_)) => Ok(false),
    }
}

/// Checks a request before placement.
///
/// # Errors
/// The first limit that the request exceeds.
pub fn check_request(
    quota: &Effective,
    held: &[HeldLease],
    kind: LeaseKind,
    duration_s: Option<u64>,
) -> Result<(), Denial> {
    let limits = &quota.limits;
    if let Some(kinds) = limits.kinds.as_ref().filter(|kinds| !kinds.contains(&kind)) {
        return Err(quota.denial(Exceeded::Kind { kind, allowed: kinds.clone() }, Vec::new()));
    }
    if let Some(longest_s) = limits.longest_s.filter(|longest| duration_s.is_none_or(|wanted| wanted > *longest)) {
        return Err(quota.denial(Exceeded::Duration { longest_s, wanted_s: duration_s }, Vec::new()));
    }
    check_count(quota, held)
}

/// Checks whether the user may hold one more lease.
///
/// # Errors
/// The user holds as many leases as the quota allows.
pub fn check_count(quota: &Effective, held: &[HeldLease]) -> Result<(), Denial> {
    let granted = with_state(held, false);
    match quota.limits.leases.filter(|most| granted.len() >= *most as usize) {
        Some(most) => Err(quota.denial(Exceeded::Leases { most }, granted)),
        None => Ok(()),
    }
}

/// Checks whether a request may wait in the queue.
///
/// # Errors
/// The user has as many waiting requests as the quota allows.
pub fn check_queue(quota: &Effective, held: &[HeldLease]) -> Result<(), Denial> {
    let queued = with_state(held, true);
    match quota.limits.queued.filter(|most| queued.len() >= *most as usize) {
        Some(most) => Err(quota.denial(Exceeded::Queued { most }, queued)),
        None => Ok(()),
    }
}

/// Checks the size of an assignment, together with the leases that the user already holds.
///
/// # Errors
/// The first limit that the assignment exceeds.
pub fn check_size(quota: &Effective, held: &[HeldLease], size: Size) -> Result<(), Denial> {
    let granted = with_state(held, false);
    let sum = |of: fn(Size) -> u64| granted.iter().map(|held| of(held.size)).fold(of(size), u64::saturating_add);
    let holders = |of: fn(Size) -> u64| granted.iter().copied().filter(|held| of(held.size) > 0).collect();
    match quota.limits.memory {
        Some(MemoryAmount::Mib(most)) if sum(|size| size.memory_mib) > most => {
            let exceeded =
                Exceeded::Memory { most: MemoryAmount::Mib(most), wanted: MemoryAmount::Mib(size.memory_mib) };
            return Err(quota.denial(exceeded, holders(|size| size.memory_mib)));
        }
        Some(MemoryAmount::Gpus(most))
            if sum(|size| size.gpu_thousandths.into()) > u64::from(most)
                && !(granted.is_empty() && size.members == 1) =>
        {
            let (most, wanted) = (MemoryAmount::Gpus(most), MemoryAmount::Gpus(size.gpu_thousandths));
            return Err(quota.denial(Exceeded::Memory { most, wanted }, holders(|size| size.gpu_thousandths.into())));
        }
        Some(MemoryAmount::Mib(_) | MemoryAmount::Gpus(_)) | None => {}
    }
    match quota.limits.mps_tenths {
        Some(most) if size.mps_tenths > 0 && sum(|size| size.mps_tenths.into()) > u64::from(most) => {
            let exceeded = Exceeded::MpsPercentage { most_tenths: most, wanted_tenths: size.mps_tenths };
            Err(quota.denial(exceeded, holders(|size| size.mps_tenths.into())))
        }
        Some(_) | None => Ok(()),
    }
}

/// Returns the GPUs that a request may use: the GPUs that the request names and that the quota also
/// allows. `None` means all GPUs.
///
/// # Errors
/// The quota allows none of the GPUs that the request names.
pub fn allowed_gpus(
    quota: &Effective,
    named: Option<&BTreeSet<GpuIndex>>,
) -> Result<Option<BTreeSet<GpuIndex>>, Denial> {
    let Some(allowed) = &quota.limits.gpus else { return Ok(named.cloned()) };
    let usable: BTreeSet<GpuIndex> = match named {
        Some(named) => named.intersection(allowed).copied().collect(),
        None => allowed.clone(),
    };
    if usable.is_empty() {
        return Err(quota.denial(Exceeded::Gpus { allowed: allowed.clone() }, Vec::new()));
    }
    Ok(Some(usable))
}

fn with_state(held: &[HeldLease], queued: bool) -> Vec<&HeldLease> {
    held.iter().filter(|held| held.queued == queued).collect()
}

impl Effective {
    /// Returns the limits of a user that no quota names.
    #[must_use]
    pub fn without_quota(limits: Limits) -> Self {
        Self { subject: None, limits, default: None }
    }

    fn denial(&self, exceeded: Exceeded, mut held: Vec<&HeldLease>) -> Denial {
        held.sort_unstable_by_key(|held| held.id);
        Denial { subject: self.subject.clone(), exceeded, held: held.into_iter().copied().collect() }
    }
}

#[cfg(test)]
mod tests;
