//! How much of a quota a user has used.

use gpush_api::{QuotaLimit, QuotaResource};

use super::{HeldLease, Limits, MemoryAmount, Size, Subject, with_state};

/// Returns the limits of a user, and how much of each limit the user's leases use. Leaves out the MPS percentage if it has
/// no limit and no use.
#[must_use]
pub fn standing(limits: &Limits, held: &[HeldLease]) -> Vec<QuotaLimit> {
    let granted = with_state(held, false);
    let sum = |of: fn(Size) -> u64| granted.iter().map(|held| of(held.size)).fold(0, u64::saturating_add);
    let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
    let memory = match limits.memory {
        Some(MemoryAmount::Gpus(most)) => {
            limit(QuotaResource::Gpus, sum(|size| size.gpu_thousandths.into()), Some(most.into()), 1000)
        }
        Some(MemoryAmount::Mib(most)) => limit(QuotaResource::MemoryMib, sum(|size| size.memory_mib), Some(most), 1),
        None => limit(QuotaResource::MemoryMib, sum(|size| size.memory_mib), None, 1),
    };
    let mps =
        limit(QuotaResource::MpsPercent, sum(|size| size.mps_tenths.into()), limits.mps_tenths.map(u64::from), 10);
    let shows_mps = mps.maximum.is_some() || mps.used > 0.0;
    let mut all = vec![
        limit(QuotaResource::Leases, count(granted.len()), limits.leases.map(u64::from), 1),
        limit(QuotaResource::Waiting, count(with_state(held, true).len()), limits.queued.map(u64::from), 1),
        memory,
    ];
    all.extend(shows_mps.then_some(mps));
    all
}

/// Creates a limit from amounts in units of one `parts`-th.
#[expect(clippy::cast_precision_loss, reason = "amounts are far below 2^52")]
fn limit(resource: QuotaResource, used: u64, maximum: Option<u64>, parts: u32) -> QuotaLimit {
    let amount = |parts_used: u64| parts_used as f64 / f64::from(parts);
    QuotaLimit {
        resource,
        used: amount(used),
        maximum: maximum.map(amount),
        amount_left: maximum.map(|maximum| amount(maximum.saturating_sub(used))),
    }
}

impl Subject {
    /// Returns the users that a quota names, for users: `user anna`, `group students`, `everybody`.
    #[must_use]
    pub fn label(&self) -> String {
        match self {
            Self::User(name) => format!("user {name}"),
            Self::Group(name) => format!("group {name}"),
            Self::Everybody => "everybody".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::LeaseId;

    use super::*;

    fn held(id: u64, queued: bool, size: Size) -> HeldLease {
        HeldLease { id: LeaseId(id), queued, size, releasable: true }
    }

    fn rows(limits: &Limits, held: &[HeldLease]) -> Vec<(QuotaResource, f64, Option<f64>, Option<f64>)> {
        standing(limits, held).into_iter().map(|one| (one.resource, one.used, one.maximum, one.amount_left)).collect()
    }

    #[test]
    fn use_is_summed_over_granted_leases() {
        let size = Size { members: 1, memory_mib: 10_240, gpu_thousandths: 125, mps_tenths: 250 };
        let leases = [held(1, false, size), held(2, false, size), held(3, true, Size::default())];
        let limits = Limits { mps_tenths: Some(400), ..Limits::standard(4) };
        assert_eq!(
            rows(&limits, &leases),
            [
                (QuotaResource::Leases, 2.0, Some(32.0), Some(30.0)),
                (QuotaResource::Waiting, 1.0, Some(16.0), Some(15.0)),
                (QuotaResource::Gpus, 0.25, Some(3.0), Some(2.75)),
                // A changed config may have lowered the limit below the use.
                (QuotaResource::MpsPercent, 50.0, Some(40.0), Some(0.0)),
            ]
        );
    }

    #[test]
    fn user_without_limits_sees_the_use() {
        let size = Size { members: 1, memory_mib: 40_960, gpu_thousandths: 500, mps_tenths: 0 };
        assert_eq!(
            rows(&Limits::default(), &[held(1, false, size)]),
            [
                (QuotaResource::Leases, 1.0, None, None),
                (QuotaResource::Waiting, 0.0, None, None),
                (QuotaResource::MemoryMib, 40_960.0, None, None),
            ]
        );
    }
}
