//! Denials of requests, with their explanation.

use std::{collections::BTreeSet, fmt, time::Duration};

use gpush_api::{ApiError, Code, GpuIndex, LeaseId, LeaseKind};

use super::{MemoryAmount, Subject, UnknownQuota};
use crate::{duration, quote::Quoted};

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
    /// The user's leases that count towards the limit.
    pub held: Vec<LeaseId>,
    /// The first of these leases that the caller may release.
    pub releasable: Option<LeaseId>,
}

impl fmt::Display for Denial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.subject {
            Some(Subject::User(name)) => write!(f, "user {name} may ")?,
            Some(Subject::Group(name)) => write!(f, "group {name} may ")?,
            Some(Subject::Everybody) | None => f.write_str("each user may ")?,
        }
        match &self.exceeded {
            Exceeded::Kind { kind, .. } => write!(f, "not hold leases of kind {kind}")?,
            Exceeded::Leases { most } => write!(f, "hold {}", leases(*most))?,
            Exceeded::Queued { most: 0 } => f.write_str("not wait for leases")?,
            Exceeded::Queued { most } => write!(f, "wait for {}", leases(*most))?,
            Exceeded::Memory { most, wanted } => {
                let (most, wanted) = in_one_unit(*most, *wanted);
                write!(f, "hold {most}; the request adds {wanted}")?;
            }
            Exceeded::MpsPercentage { most_tenths, wanted_tenths } => {
                let (most, wanted) = (Percent(*most_tenths), Percent(*wanted_tenths));
                write!(f, "hold MPS shares of {most} in total; the request adds {wanted}")?;
            }
            Exceeded::Gpus { allowed } if allowed.is_empty() => f.write_str("hold no lease on GPUs of this host")?,
            Exceeded::Gpus { allowed } => write!(f, "hold leases on {} only", gpus(allowed))?,
            Exceeded::Duration { longest_s, wanted_s } => {
                write!(f, "hold a lease for at most {}; the request ", span(*longest_s))?;
                match wanted_s {
                    Some(wanted_s) => write!(f, "is for {}", span(*wanted_s))?,
                    None => f.write_str("has no end")?,
                }
            }
        }
        // An administrator or a hook of Slurm may request the lease of another user, so do not write "you".
        let verb = if matches!(self.exceeded, Exceeded::Queued { .. }) { "waits for" } else { "holds" };
        match self.held.as_slice() {
            [] => Ok(()),
            held => {
                let ids: Vec<String> = held.iter().take(MOST_NAMED).map(LeaseId::to_string).collect();
                write!(f, "; the user {verb} {}", ids.join(", "))?;
                match held.len().saturating_sub(MOST_NAMED) {
                    0 => Ok(()),
                    more => write!(f, " and {more} more"),
                }
            }
        }
    }
}

impl std::error::Error for Denial {}

/// Maximum number of leases in one message.
const MOST_NAMED: usize = 8;

fn leases(number: u32) -> String {
    match number {
        0 => "no lease".to_owned(),
        1 => "1 lease".to_owned(),
        number => format!("{number} leases"),
    }
}

/// Formats GPU indexes: `GPU 3`, or `GPUs 0, 2`.
fn gpus(indexes: &BTreeSet<GpuIndex>) -> String {
    let names: Vec<String> = indexes.iter().map(GpuIndex::to_string).collect();
    format!("GPU{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}

fn span(seconds: u64) -> String {
    duration::format(Duration::from_secs(seconds))
}

/// A percentage in tenths of a percent, for messages.
struct Percent(u32);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0 / 10, self.0 % 10) {
            (whole, 0) => write!(f, "{whole} %"),
            (whole, tenth) => write!(f, "{whole}.{tenth} %"),
        }
    }
}

/// Formats a limit and the amount that a request adds, both in the unit of the limit. Rounds the
/// amount up, so that it never looks smaller than it is.
fn in_one_unit(most: MemoryAmount, wanted: MemoryAmount) -> (String, String) {
    let gib = |mib: u64| {
        let tenths = mib.saturating_mul(10).div_ceil(1024);
        match tenths % 10 {
            0 => format!("{} GiB of GPU memory", tenths / 10),
            rest => format!("{}.{rest} GiB of GPU memory", tenths / 10),
        }
    };
    let is_gib = matches!(most, MemoryAmount::Mib(most) if most.is_multiple_of(1024));
    let text = |amount: MemoryAmount| match amount {
        MemoryAmount::Gpus(1000) => "the memory of 1 GPU".to_owned(),
        MemoryAmount::Gpus(thousandths) => {
            let fraction = format!("{:03}", thousandths % 1000);
            let fraction = fraction.trim_end_matches('0');
            let point = if fraction.is_empty() { "" } else { "." };
            format!("the memory of {}{point}{fraction} GPUs", thousandths / 1000)
        }
        MemoryAmount::Mib(mib) if is_gib => gib(mib),
        MemoryAmount::Mib(mib) => format!("{mib} MiB of GPU memory"),
    };
    (text(most), text(wanted))
}

impl Denial {
    /// Returns a hint: what the user can do next.
    #[must_use]
    pub fn hint(&self) -> String {
        let release = || match self.releasable {
            Some(id) => format!("release a lease: `gpushctl lease end {id}`"),
            None if self.held.is_empty() => "request less".to_owned(),
            None => {
                "try again when one of these leases has ended; the holder or an administrator can end it".to_owned()
            }
        };
        match &self.exceeded {
            Exceeded::Kind { allowed, .. } if allowed.is_empty() => {
                "ask an administrator to change the quota".to_owned()
            }
            Exceeded::Kind { allowed, .. } => {
                let names: Vec<&str> = allowed.iter().map(|kind| kind.name()).collect();
                format!("request {}", names.join(" or "))
            }
            Exceeded::Gpus { allowed } if allowed.is_empty() => "ask an administrator to change the quota".to_owned(),
            Exceeded::Gpus { allowed } => {
                let indexes: Vec<String> = allowed.iter().map(GpuIndex::to_string).collect();
                format!("add `-g {}`", indexes.join(","))
            }
            Exceeded::Leases { most: 0 } | Exceeded::Queued { most: 0 } => {
                "ask an administrator to change the quota".to_owned()
            }
            Exceeded::Leases { .. } | Exceeded::Queued { .. } => release(),
            Exceeded::Memory { .. } | Exceeded::MpsPercentage { .. } => release(),
            Exceeded::Duration { longest_s, .. } => format!("use `--for {}` or a shorter duration", span(*longest_s)),
        }
    }
}

impl Denial {
    /// Returns the hint for the user of a Slurm job, who cannot release leases of jobs.
    #[must_use]
    pub fn hint_for_job(&self) -> String {
        match &self.exceeded {
            Exceeded::Kind { .. } => self.hint(),
            Exceeded::Leases { .. }
            | Exceeded::Queued { .. }
            | Exceeded::Memory { .. }
            | Exceeded::MpsPercentage { .. }
                if !self.held.is_empty() =>
            {
                "submit the job again when another job or lease of the user has ended".to_owned()
            }
            Exceeded::Memory { .. } | Exceeded::MpsPercentage { .. } => {
                "request less, or ask an administrator to change the quota".to_owned()
            }
            Exceeded::Leases { .. } | Exceeded::Queued { .. } | Exceeded::Duration { .. } | Exceeded::Gpus { .. } => {
                "ask an administrator to change the quota".to_owned()
            }
        }
    }
}

impl Denial {
    /// Returns the error for a denied renewal of a lease.
    #[must_use]
    pub fn of_renewal(&self, lease: LeaseId) -> ApiError {
        ApiError::new(Code::Denied, format!("cannot renew lease {lease}: {self}")).hint(self.hint())
    }
}

impl From<&Denial> for ApiError {
    fn from(denial: &Denial) -> Self {
        // The request can succeed only after the user has released a lease, so the error is not
        // retryable.
        Self::new(Code::Denied, format!("cannot grant a lease: {denial}")).hint(denial.hint())
    }
}
