//! The place of a lease in the queue, and what the queue reserves for it.

use gpush_api::{Lease, LeaseId, LeaseQueueReservation};

use crate::render::Appearance;

/// Describes the place of a lease in the queue: `position 2, behind L12 and op-7; reserves GPU 3 from 17:00, used by L2`.
pub(crate) fn place(lease: &Lease, look: &Appearance) -> Option<String> {
    let queue = lease.queue.as_ref()?;
    let behind: Vec<String> = queue.behind.iter().map(|one| look.clean(one)).collect();
    let behind = if behind.is_empty() { String::new() } else { format!(", behind {}", all(&behind)) };
    let reserves = queue.reserves.as_ref().map(|reserves| format!("; reserves {}", reserved(reserves, look)));
    Some(format!("position {}{behind}{}", queue.position, reserves.unwrap_or_default()))
}

/// Names the leases that use the reserved capacity, for `lease show`.
pub(super) fn blockers(lease: &Lease) -> Option<String> {
    let reserves = lease.queue.as_ref()?.reserves.as_ref()?;
    let (gpus, names) = (gpus(reserves), names(&reserves.blocking_leases));
    match reserves.blocking_leases.as_slice() {
        [] => None,
        [one] => Some(format!("only {one} keeps {gpus} from this request")),
        [..] => Some(format!("{} keep {gpus} from this request", all(&names))),
    }
}

/// Describes a reservation: `GPU 3 from 17:00, used by L2`, `GPU 3, used by L2 without an end`.
fn reserved(reserves: &LeaseQueueReservation, look: &Appearance) -> String {
    let (gpus, endless) = (gpus(reserves), names(&reserves.without_end));
    match (reserves.free_at, endless.as_slice()) {
        (Some(at), _) => format!("{gpus} from {}{}", look.clock(at), users(&names(&reserves.blocking_leases))),
        (None, []) => gpus,
        (None, [..]) => format!("{gpus}{} without an end", users(&endless)),
    }
}

/// Names the leases that use a place: `, used by L1 and L2`. Gives only the number of many leases.
fn users(names: &[String]) -> String {
    match names.len() {
        0 => String::new(),
        1..=3 => format!(", used by {}", all(names)),
        number => format!(", used by {number} leases"),
    }
}

fn gpus(reserves: &LeaseQueueReservation) -> String {
    let indexes: Vec<String> = reserves.gpus.iter().map(ToString::to_string).collect();
    format!("{} {}", if indexes.len() == 1 { "GPU" } else { "GPUs" }, all(&indexes))
}

fn names(leases: &[LeaseId]) -> Vec<String> {
    leases.iter().map(LeaseId::to_string).collect()
}

/// Joins names: `L1, L2 and L3`.
fn all(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [one] => one.clone(),
        [most @ .., last] => format!("{} and {last}", most.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{GpuIndex, LeaseQueuePosition};
    use jiff::Timestamp;

    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn place_says_when_the_reserved_gpus_are_free() {
        let look = fixtures::look(100, Charset::Ascii);
        let reserves = |free_at, blockers: &[u64], without_end: &[u64]| LeaseQueueReservation {
            gpus: vec![GpuIndex(3)],
            free_at,
            blocking_leases: blockers.iter().copied().map(LeaseId).collect(),
            without_end: without_end.iter().copied().map(LeaseId).collect(),
        };
        let shown = |reserves| {
            let queue = LeaseQueuePosition { position: 1, behind: Vec::new(), reasons: Vec::new(), reserves };
            let lease = Lease { queue: Some(queue), ..fixtures::lease::queued() };
            (place(&lease, &look).unwrap(), blockers(&lease))
        };
        let at = Timestamp::UNIX_EPOCH;
        assert_eq!(shown(None), ("position 1".to_owned(), None));
        let (text, only) = shown(Some(reserves(Some(at), &[2], &[])));
        assert_eq!(text, format!("position 1; reserves GPU 3 from {}, used by L2", look.clock(at)));
        assert_eq!(only.as_deref(), Some("only L2 keeps GPU 3 from this request"));
        let (text, several) = shown(Some(reserves(None, &[2, 4], &[4])));
        assert_eq!(text, "position 1; reserves GPU 3, used by L4 without an end");
        assert_eq!(several.as_deref(), Some("L2 and L4 keep GPU 3 from this request"));
    }
}
