//! What gpushd tells the holder of a lease that uses more memory than its share has.

use gpush_api::LeaseId;
use jiff::Timestamp;

use super::time_left::within;

/// A notice about memory above the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverLimitWarning {
    /// Memory of the processes of the lease, in MiB.
    pub used_mib: u64,
    /// Memory of the share, in MiB.
    pub limit_mib: u64,
    /// When the lease ends; `None` if it does not end.
    pub ends_at: Option<Timestamp>,
    /// Whether the lease belongs to a Slurm job, which is cancelled then.
    pub of_job: bool,
}

/// Why a notice about memory above the limit does not apply any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverLimitEnd {
    /// The lease is within its limit.
    Within,
    /// The memory of the lease is not known any more.
    Unknown,
    /// The job of the lease also runs on other nodes, which gpushd does not see.
    RunsElsewhere,
}

impl OverLimitWarning {
    /// Returns the text of the notice.
    pub(super) fn text(&self, lease: LeaseId, now: Timestamp) -> String {
        let of_job = if self.of_job { " of this job" } else { "" };
        let uses = format!("lease {lease}{of_job} {}", above(self.used_mib, self.limit_mib));
        match (self.ends_at, self.of_job) {
            (None, _) => format!("{uses}; other leases of the GPU may get none"),
            (Some(at), true) => format!("{uses}, so the job is cancelled {} unless it uses less", within(at, now)),
            (Some(at), false) => {
                format!("{uses}, so it ends {}, and its programs are ended, unless they use less", within(at, now))
            }
        }
    }
}

impl OverLimitEnd {
    /// Returns the text of the notice.
    pub(super) fn text(self, lease: LeaseId) -> String {
        match self {
            Self::Within => format!("lease {lease} is within the memory of its share again"),
            Self::Unknown => {
                format!(
                    "gpushd does not know any more how much memory lease {lease} uses, so gpushd does not end the lease"
                )
            }
            Self::RunsElsewhere => {
                format!("lease {lease} does not end: a part of its job runs on other nodes, which gpushd does not see")
            }
        }
    }
}

/// Describes memory above a limit, as in a sentence about the lease: `uses 30.0 GiB of memory, but its share has 20.0 GiB`.
#[must_use]
pub fn above(used_mib: u64, limit_mib: u64) -> String {
    let (used, limit) = (gib(used_mib), gib(limit_mib));
    if used == limit {
        return format!("uses {used_mib} MiB of memory, but its share has {limit_mib} MiB");
    }
    format!("uses {used} GiB of memory, but its share has {limit} GiB")
}

/// Formats MiB as GiB with one decimal.
fn gib(mib: u64) -> String {
    let tenths = mib.saturating_mul(10).saturating_add(512) / 1024;
    format!("{}.{}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    #[test]
    fn notice_says_how_much_is_used_and_what_happens() {
        let text = |ends_at, of_job| {
            OverLimitWarning { used_mib: 30_720, limit_mib: 20_480, ends_at, of_job }.text(LeaseId(21), at(0))
        };
        assert_eq!(
            text(None, false),
            "lease L21 uses 30.0 GiB of memory, but its share has 20.0 GiB; other leases of the GPU may get none"
        );
        assert_eq!(
            text(Some(at(600)), false),
            "lease L21 uses 30.0 GiB of memory, but its share has 20.0 GiB, so it ends in 10m, and its programs are \
             ended, unless they use less"
        );
        assert!(text(Some(at(600)), true).ends_with("so the job is cancelled in 10m unless it uses less"));
    }

    #[test]
    fn amounts_that_look_equal_are_in_mib() {
        assert_eq!(above(20_481, 20_480), "uses 20481 MiB of memory, but its share has 20480 MiB");
    }

    #[test]
    fn withdrawal_says_why() {
        assert!(OverLimitEnd::Within.text(LeaseId(21)).starts_with("lease L21 is within"));
        assert!(OverLimitEnd::Unknown.text(LeaseId(21)).ends_with("so gpushd does not end the lease"));
        assert!(OverLimitEnd::RunsElsewhere.text(LeaseId(21)).contains("other nodes"));
    }
}
