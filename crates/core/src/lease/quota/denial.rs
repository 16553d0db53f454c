//! Denials of requests by a quota.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, GpuIndex, LeaseId, LeaseKind};

use super::{HeldLease, MemoryAmount, Size, Subject, UnknownQuota};
use crate::quote::Quoted;

/// The limit that a request exceeds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exceeded {
    /// The requested kind is not allowed.
    Kind {
        /// The requested kind.
        kind: LeaseKind,
        /// Allowed kinds.
        allowed: BTreeSet<LeaseKind>,
    },
    /// The user has too many leases.
    Leases {
        /// The limit.
        most: u32,
    },
    /// The user has too many queued requests.
    Queued {
        /// The limit.
        most: u32,
    },
    /// The leases would use too much memory.
    Memory {
        /// The limit.
        most: MemoryAmount,
        /// The amount that the request adds, in the unit of `most`.
        wanted: MemoryAmount,
    },
    /// The MPS percentage of all leases together would be too high.
    MpsPercentage {
        /// The limit, in tenths of a percent.
        most_tenths: u32,
        /// The amount that the request adds, in tenths of a percent.
        wanted_tenths: u32,
    },
    /// None of the requested GPUs is allowed.
    Gpus {
        /// Indexes of the allowed GPUs.
        allowed: BTreeSet<GpuIndex>,
    },
    /// The requested duration is too long.
    Duration {
        /// The limit, in seconds.
        longest_s: u64,
        /// The requested duration, in seconds; `None` for a lease without an end time.
        wanted_s: Option<u64>,
    },
}

impl From<&UnknownQuota> for ApiError {
    fn from(unknown: &UnknownQuota) -> Self {
        let (what, database, name) = match &unknown.0 {
            Subject::User(name) => ("user", "passwd", name.as_str()),
            Subject::Group(name) => ("group", "group", name.as_str()),
            Subject::Everybody => ("user", "passwd", ""),
        };
        let message = "cannot determine your quota: the name service of the host does not answer".to_owned();
        Self::new(Code::Unavailable, message)
            .cause(format!("the config has a quota for {what} {}", Quoted(name)))
            .hint(format!("try again; if the error remains, check the name service: `getent {database} {name}`"))
            .retryable()
    }
}

/// A denial of a request by a quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// The users that the quota applies to; `None` for the standard limits.
    pub subject: Option<Subject>,
    /// The exceeded limit.
    pub exceeded: Exceeded,
    /// The user's leases that count towards the limit, in the order of their ids.
    pub held: Vec<HeldLease>,
}

/// A limit on a sum over leases, in units of the limit.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sum {
    /// The limit.
    pub(super) most: u64,
    /// The amount that the request adds.
    pub(super) wanted: u64,
    /// Returns the amount of a lease.
    pub(super) of: fn(Size) -> u64,
}

impl Denial {
    /// Returns the exceeded sum; `None` if the limit is not about a sum of amounts.
    pub(super) fn sum(&self) -> Option<Sum> {
        match self.exceeded {
            Exceeded::Memory { most: MemoryAmount::Mib(most), wanted: MemoryAmount::Mib(wanted) } => {
                Some(Sum { most, wanted, of: |size| size.memory_mib })
            }
            Exceeded::Memory { most: MemoryAmount::Gpus(most), wanted: MemoryAmount::Gpus(wanted) } => {
                Some(Sum { most: most.into(), wanted: wanted.into(), of: |size| size.gpu_thousandths.into() })
            }
            Exceeded::MpsPercentage { most_tenths, wanted_tenths } => {
                Some(Sum { most: most_tenths.into(), wanted: wanted_tenths.into(), of: |size| size.mps_tenths.into() })
            }
            Exceeded::Memory { .. }
            | Exceeded::Kind { .. }
            | Exceeded::Leases { .. }
            | Exceeded::Queued { .. }
            | Exceeded::Gpus { .. }
            | Exceeded::Duration { .. } => None,
        }
    }

    /// Returns the amount that the leases hold.
    pub(super) fn held_amount(&self, sum: Sum) -> u64 {
        self.held.iter().map(|held| (sum.of)(held.size)).fold(0, u64::saturating_add)
    }

    /// Returns the leases that the caller can release so that the request fits: one lease if that is enough, else as few
    /// as possible. Returns no lease if the request does not fit even then.
    pub(super) fn to_release(&self) -> Vec<LeaseId> {
        let releasable = || self.held.iter().filter(|held| held.releasable);
        let Some(sum) = self.sum() else { return releasable().take(1).map(|held| held.id).collect() };
        let excess = self.held_amount(sum).saturating_add(sum.wanted).saturating_sub(sum.most);
        let amount = |held: &HeldLease| (sum.of)(held.size);
        if let Some(one) = releasable().filter(|held| amount(held) >= excess).min_by_key(|held| (amount(held), held.id))
        {
            return vec![one.id];
        }
        let mut largest_first: Vec<&HeldLease> = releasable().collect();
        largest_first.sort_by_key(|held| (std::cmp::Reverse(amount(held)), held.id));
        let (mut freed, mut ids) = (0_u64, Vec::new());
        for held in largest_first {
            if freed >= excess {
                break;
            }
            freed = freed.saturating_add(amount(held));
            ids.push(held.id);
        }
        if freed >= excess { ids } else { Vec::new() }
    }
}
