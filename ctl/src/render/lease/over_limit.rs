//! Leases that use more memory than their share has.

use gpush_api::{Lease, LeaseKind, LeaseOverLimit, OverLimitAction, text::local_time};
use gpush_core::lease::over_limit::above;

use crate::render::{Appearance, appearance::gib};

/// Says that the driver could limit the memory of a lease.
pub(super) const DRIVER_CAN_LIMIT: &str = "the driver can limit the memory of a cgroup; gpushd does not use this limit";

/// Returns whether programs of a lease can use more memory than the lease has.
pub(super) fn has_soft_limit(lease: &Lease) -> bool {
    match lease.kind {
        LeaseKind::Mps | LeaseKind::Timeslice => true,
        LeaseKind::Mig | LeaseKind::Whole => false,
    }
}

/// Describes what happens to a lease above its limit, for `lease show`.
pub(super) fn outlook(memory: &LeaseOverLimit, look: &Appearance) -> String {
    let uses = format!("{}, since {}", above(memory.used_mib, memory.limit_mib), local_time(memory.since));
    match (memory.action, memory.ends_at) {
        (OverLimitAction::Report, _) => format!("{uses}; the rule only reports it"),
        (OverLimitAction::End, Some(at)) => {
            format!("{uses}; ends {} ({}), with its processes", look.ahead(at), local_time(at))
        }
        (OverLimitAction::End, None) if memory.warned => format!("{uses}; gpushd ends it"),
        (OverLimitAction::End, None) => format!("{uses}; ends after a notice to the holder"),
    }
}

/// Marks a lease above its limit in a list: `, above its 20.0 GiB`. Empty for other leases.
pub(super) fn brief(lease: &Lease, look: &Appearance) -> String {
    let Some(memory) = &lease.over_limit else { return String::new() };
    let end = memory.ends_at.map_or_else(String::new, |at| format!(", ends {}", look.ahead(at)));
    format!(", above its {} GiB{end}", gib(memory.limit_mib))
}

/// Marks the memory of a lease above its limit in a table: `, above 20.0`. Empty for other leases.
pub(super) fn mark(lease: &Lease) -> String {
    lease.over_limit.as_ref().map_or_else(String::new, |memory| format!(", above {}", gib(memory.limit_mib)))
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn lease_above_its_limit_says_what_happens() {
        let look = fixtures::look(100, Charset::Ascii);
        let memory = |action, ends_at, warned| LeaseOverLimit {
            action,
            used_mib: 30_720,
            limit_mib: 20_480,
            since: look.now,
            ends_at,
            warned,
        };
        let ends = memory(OverLimitAction::End, Some(look.now + SignedDuration::from_mins(10)), true);
        let text = outlook(&ends, &look);
        assert!(text.starts_with("uses 30.0 GiB of memory, but its share has 20.0 GiB, since "), "{text}");
        assert!(text.contains("; ends in 10m (") && text.ends_with(", with its processes"), "{text}");
        assert!(outlook(&memory(OverLimitAction::Report, None, true), &look).ends_with("only reports it"));
        assert!(outlook(&memory(OverLimitAction::End, None, true), &look).ends_with("gpushd ends it"));
        assert!(outlook(&memory(OverLimitAction::End, None, false), &look).ends_with("a notice to the holder"));
        let lease = Lease { over_limit: Some(ends), ..fixtures::lease::mps() };
        assert_eq!(brief(&lease, &look), ", above its 20.0 GiB, ends in 10m");
        assert_eq!(mark(&lease), ", above 20.0");
        assert_eq!(brief(&fixtures::lease::mps(), &look), "");
        assert!(has_soft_limit(&lease) && !has_soft_limit(&fixtures::lease::mig()));
    }
}
