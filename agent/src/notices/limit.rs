//! Limits the notices of a lease. Without a limit, an administrator's script that cordons and uncordons a GPU would
//! fill the terminals of its users.

use std::time::{Duration, Instant};

use gpush_api::NoticeKind;

/// Maximum number of notices in [`WINDOW`], apart from those about the end of the lease.
const MOST: u32 = 6;

/// The time in which notices are counted.
const WINDOW: Duration = Duration::from_secs(60);

/// The notices that a lease has had recently.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Limit {
    /// When the window began.
    began: Option<Instant>,
    number: u32,
}

impl Limit {
    /// Returns whether the lease gets another notice of this kind now. Counts it.
    pub(super) fn permits(&mut self, kind: NoticeKind, now: Instant) -> bool {
        // Each lease has few of these.
        if kind.is_about_end() {
            return true;
        }
        if self.began.is_none_or(|began| now.saturating_duration_since(began) >= WINDOW) {
            *self = Self { began: Some(now), number: 0 };
        }
        self.number += 1;
        self.number <= MOST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_gets_few_notices_a_minute_but_each_about_its_end() {
        let (mut limit, start) = (Limit::default(), Instant::now());
        let given = |limit: &mut Limit, kind, at| (0..1000).filter(|_| limit.permits(kind, at)).count();
        assert_eq!(given(&mut limit, NoticeKind::Cordoned, start), 6);
        assert_eq!(given(&mut limit, NoticeKind::MpsFault, start + WINDOW - Duration::from_secs(1)), 0);
        assert_eq!(given(&mut limit, NoticeKind::Revoked, start), 1000);
        assert_eq!(given(&mut limit, NoticeKind::EndsSoon, start), 1000);
        assert_eq!(given(&mut limit, NoticeKind::Cordoned, start + WINDOW), 6);
    }
}
