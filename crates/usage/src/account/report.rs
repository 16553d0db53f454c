//! Sums over a period, by user, group, job, account, kind or GPU.

use std::{collections::BTreeMap, fmt, str::FromStr};

use gpush_api::{GpuUuid, LeaseKind};
use serde::{Deserialize, Serialize};

use super::{
    day::{GpuDay, LeaseDay},
    ended::LeaseOwner,
    request::{RequestDay, RequestSums},
};
use crate::ledger::{GpuSums, HoldSums};

/// The key by which a report groups its lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grouping {
    /// User.
    User,
    /// Primary group of the user.
    Group,
    /// Slurm job.
    Job,
    /// Slurm account.
    Account,
    /// Kind of the lease.
    Kind,
    /// GPU.
    Gpu,
}

impl Grouping {
    /// All groupings.
    pub const ALL: [Self; 6] = [Self::User, Self::Group, Self::Job, Self::Account, Self::Kind, Self::Gpu];

    /// Returns the name in requests and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Group => "group",
            Self::Job => "job",
            Self::Account => "account",
            Self::Kind => "kind",
            Self::Gpu => "gpu",
        }
    }

    /// Returns the key of a row. Requests have no GPU.
    pub(crate) fn key(self, owner: &LeaseOwner, kind: Option<LeaseKind>, gpu: Option<&GpuUuid>) -> Option<String> {
        let LeaseOwner { user, group, account, job } = owner;
        match self {
            Self::User => Some(user.clone()),
            Self::Group => group.clone(),
            Self::Job => job.clone(),
            Self::Account => account.clone(),
            Self::Kind => kind.map(|kind| kind.name().to_owned()),
            Self::Gpu => gpu.map(|gpu| gpu.as_str().to_owned()),
        }
    }
}

/// Error: the text is not a grouping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadGrouping;

impl fmt::Display for BadGrouping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("write user, group, job, account, kind or gpu")
    }
}

impl std::error::Error for BadGrouping {}

impl FromStr for Grouping {
    type Err = BadGrouping;

    fn from_str(text: &str) -> Result<Self, BadGrouping> {
        Self::ALL.into_iter().find(|grouping| grouping.name() == text).ok_or(BadGrouping)
    }
}

/// One line of a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportLine {
    /// User, group, job, account, kind or GPU; `None` for leases and requests without one.
    pub key: Option<String>,
    /// Sums of leases.
    pub sums: HoldSums,
    /// Sums of requests.
    pub requests: RequestSums,
}

/// Sums over a period.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageReport {
    /// One line for each key, in the order of the keys.
    pub lines: Vec<ReportLine>,
    /// Sums of the leases of all lines.
    pub all: HoldSums,
    /// Sums of the requests of all lines.
    pub requests: RequestSums,
    /// Sums of the GPUs.
    pub gpus: GpuSums,
}

/// Makes a report over days. The caller leaves out the days outside the period, and the rows that the reader may not
/// see.
pub fn report<'a>(
    leases: impl IntoIterator<Item = &'a LeaseDay>,
    requests: impl IntoIterator<Item = &'a RequestDay>,
    gpus: impl IntoIterator<Item = &'a GpuDay>,
    by: Grouping,
) -> UsageReport {
    let mut lines: BTreeMap<Option<String>, (HoldSums, RequestSums)> = BTreeMap::new();
    let mut all = (HoldSums::default(), RequestSums::default());
    for day in leases {
        let key = by.key(&day.owner, Some(day.kind), Some(&day.gpu));
        lines.entry(key).or_default().0.merge(&day.sums);
        all.0.merge(&day.sums);
    }
    for day in requests {
        lines.entry(by.key(&day.owner, day.kind, None)).or_default().1 += day.sums;
        all.1 += day.sums;
    }
    let mut capacity = GpuSums::default();
    for day in gpus {
        capacity.merge(&day.sums);
    }
    let lines = lines.into_iter().map(|(key, (sums, requests))| ReportLine { key, sums, requests }).collect();
    UsageReport { lines, all: all.0, requests: all.1, gpus: capacity }
}
