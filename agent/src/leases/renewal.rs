//! Whether a lease can be renewed although a request waits for its capacity.
//!
//! ```text
//! L7 waits for GPU 0         ├──────────────────────────────► 17:00: all leases on GPU 0 have ended
//! L1, granted before L7   ├──┼─────────────────────┤          may be renewed past 17:00: L7 then waits longer, or elsewhere
//! L9, granted after L7       │    ├──────────────────┤        may be renewed until 17:00, because L7 came first
//! ```
//!
//! Otherwise a user could get reserved capacity with a short lease, and keep it. Administrators may renew every lease. A
//! running lease never ends earlier than promised.

use std::time::Duration;

use gpush_api::{ApiError, Code, LeaseId, text::local_time};
use gpush_core::duration;
use jiff::Timestamp;

use crate::state::{LeaseTable, OpenLease};

/// An earlier request that counts on the end of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EarlierRequest {
    id: LeaseId,
    /// Time from which the request can have its capacity.
    from: Timestamp,
}

/// Returns the earlier request that counts on the end of this lease first.
fn earlier_request(table: &LeaseTable, lease: &OpenLease) -> Option<EarlierRequest> {
    let granted_at = lease.record.granted_at?;
    let waiting = table.all().filter(|other| other.record.created_at < granted_at);
    let counts_on_it = waiting.filter_map(|other| {
        let reserves = other.queue.as_ref()?.reserves.as_ref()?;
        let from = reserves.free_at.filter(|_| reserves.blocking_leases.contains(&lease.id()))?;
        Some(EarlierRequest { id: other.id(), from })
    });
    counts_on_it.min_by_key(|request| request.from)
}

/// Checks that a new end does not delay a request that waited before the lease was granted.
///
/// # Errors
/// If it does. The error names the request, and the latest possible end.
pub(super) fn check(
    table: &LeaseTable,
    lease: &OpenLease,
    end: Option<Timestamp>,
    now: Timestamp,
) -> Result<(), ApiError> {
    let Some(earlier) = earlier_request(table, lease) else { return Ok(()) };
    let EarlierRequest { id: other, from } = earlier;
    if end.is_some_and(|end| end <= from) {
        return Ok(());
    }
    let id = lease.id();
    let message = format!("cannot renew lease {id} past {}: lease {other} waits for its capacity", local_time(from));
    let error = ApiError::new(Code::Blocked, message)
        .cause(format!("lease {other} was requested before lease {id} was granted, and counts on the end of {id}"));
    let left = Duration::try_from(from.duration_since(now)).unwrap_or_default();
    // Whole minutes, so that the command is still valid when the user types it.
    let minutes = Duration::from_secs(left.as_secs() / 60 * 60);
    let is_later = lease.record.expires_at.is_some_and(|at| now.checked_add(minutes).is_ok_and(|latest| latest > at));
    let time = duration::format(minutes);
    Err(error.hint(if is_later {
        format!("`gpushctl lease renew {id} --for {time}`")
    } else {
        "request another lease before this one ends: `gpushctl lease request --wait`".to_owned()
    }))
}

#[cfg(test)]
mod tests {
    use gpush_api::{GpuIndex, LeaseQueuePosition, LeaseQueueReservation, LeaseState};

    use super::*;
    use crate::state::leases::tests::record;

    fn at(minutes: i64) -> Timestamp {
        Timestamp::from_second(4_000_000_000 + minutes * 60).unwrap()
    }

    /// Returns a table with the lease L9, which ends in the minute 30, and the request L7, which came in the minute 0.
    fn table(free_at: Option<i64>, granted_at: i64) -> LeaseTable {
        let (mut waiting, mut granted) = (record(7, 1000, "GPU-0"), record(9, 1001, "GPU-0"));
        (waiting.state, waiting.created_at, waiting.members) = (LeaseState::Queued, at(0), Vec::new());
        (granted.granted_at, granted.expires_at) = (Some(at(granted_at)), Some(at(30)));
        let mut table = LeaseTable::default();
        table.insert(waiting);
        table.insert(granted);
        let reserves = LeaseQueueReservation {
            gpus: vec![GpuIndex(0)],
            free_at: free_at.map(at),
            blocking_leases: vec![LeaseId(9)],
            without_end: Vec::new(),
        };
        let queue =
            LeaseQueuePosition { position: 1, behind: Vec::new(), reasons: Vec::new(), reserves: Some(reserves) };
        table.get_mut(LeaseId(7)).unwrap().queue = Some(queue);
        table
    }

    fn checked(table: &LeaseTable, end: i64) -> Result<(), ApiError> {
        check(table, table.get(LeaseId(9)).unwrap(), Some(at(end)), at(10))
    }

    #[test]
    fn lease_that_overtook_a_request_ends_before_the_request_needs_its_capacity() {
        let overtook = table(Some(60), 5);
        assert_eq!(checked(&overtook, 60), Ok(()));
        let refused = checked(&overtook, 61).unwrap_err();
        assert_eq!(
            (refused.code, refused.hint.as_deref()),
            (Code::Blocked, Some("`gpushctl lease renew L9 --for 50m`"))
        );
        assert!(refused.message.contains("lease L7 waits for its capacity"), "{}", refused.message);
        let refused = checked(&table(Some(30), 5), 31).unwrap_err();
        assert!(refused.hint.unwrap().contains("`gpushctl lease request --wait`"));
    }

    #[test]
    fn lease_that_came_first_can_be_renewed() {
        assert_eq!(checked(&table(Some(30), -5), 600), Ok(()), "it was granted before the request came");
        assert_eq!(checked(&table(None, 5), 600), Ok(()), "the request counts on no time");
        let mut other = table(Some(30), 5);
        let lease = other.get_mut(LeaseId(7)).unwrap();
        lease.queue.as_mut().unwrap().reserves.as_mut().unwrap().blocking_leases.clear();
        assert_eq!(checked(&other, 600), Ok(()), "the request reserves elsewhere");
    }
}
