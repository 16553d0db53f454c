//! What the user can do with a lease: renew, release, revoke. Each change needs a confirmation.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{ApiError, Lease, LeaseId, LeaseRenewRequest, LeaseRevokeRequest, LeaseState};
use gpush_client::Client;
use gpush_core::duration;
use jiff::Timestamp;

use crate::render::{Appearance, lease};

/// Duration that the question for a renewal proposes, if the lease ends earlier.
const USUAL_DURATION: Duration = Duration::from_secs(2 * 3600);

/// A question to the user, with the text that the user has typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Question {
    /// How long the lease lasts from now on. `before` is its present end.
    Renew { lease: LeaseId, duration: String, before: Option<Timestamp> },
    /// Whether to release a lease of the caller.
    Release { lease: LeaseId },
    /// Why an administrator revokes the lease of another user.
    Revoke { lease: LeaseId, user: String, reason: String },
}

/// A change that the user has confirmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LeaseChange {
    Renew { lease: LeaseId, seconds: u64, before: Option<Timestamp> },
    Release { lease: LeaseId },
    Revoke { lease: LeaseId, reason: String },
}

/// What the caller may do with a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Permission {
    /// The caller holds the lease.
    Holder,
    /// The caller is an administrator.
    Administrator,
    None,
}

fn permission(lease: &Lease, own: &BTreeSet<LeaseId>) -> Permission {
    if own.contains(&lease.id) {
        Permission::Holder
    } else if lease.asked_by.is_some() {
        // Only the holder and administrators see the caller who requested a lease.
        Permission::Administrator
    } else {
        Permission::None
    }
}

fn denied(lease: &Lease, what: &str) -> String {
    format!("you may not {what} {}: only its holder and administrators may", lease.id)
}

/// Returns the question before a renewal. The proposed duration never ends the lease earlier than now: for a lease without
/// an end time, the user must type the duration.
///
/// # Errors
/// If the caller may not renew the lease, or it has not been granted.
pub(super) fn renew(lease: &Lease, own: &BTreeSet<LeaseId>, now: Timestamp) -> Result<Question, String> {
    if permission(lease, own) == Permission::None {
        return Err(denied(lease, "renew"));
    }
    if lease.state != LeaseState::Active {
        return Err(format!("cannot renew {}: its state is {}", lease.id, lease.state));
    }
    let minutes_left = |end: Timestamp| u64::try_from(end.as_second() - now.as_second()).unwrap_or(0).div_ceil(60);
    let proposed = |end| duration::format(USUAL_DURATION.max(Duration::from_secs(60 * minutes_left(end))));
    let duration = lease.expires_at.map_or_else(String::new, proposed);
    Ok(Question::Renew { lease: lease.id, duration, before: lease.expires_at })
}

/// Returns the question before a lease ends.
///
/// # Errors
/// If the caller may not end the lease.
pub(super) fn end(lease: &Lease, own: &BTreeSet<LeaseId>, look: &Appearance) -> Result<Question, String> {
    match permission(lease, own) {
        Permission::Holder => Ok(Question::Release { lease: lease.id }),
        Permission::Administrator => {
            Ok(Question::Revoke { lease: lease.id, user: lease::user(lease, look), reason: String::new() })
        }
        Permission::None => Err(denied(lease, "end")),
    }
}

impl Question {
    /// Returns the text that the user types; `None` for a question that `y` answers.
    pub(super) fn input(&mut self) -> Option<&mut String> {
        match self {
            Self::Renew { duration, .. } => Some(duration),
            Self::Revoke { reason, .. } => Some(reason),
            Self::Release { .. } => None,
        }
    }

    /// Returns the lines of the question. The last line is the input.
    pub(super) fn lines(&self, look: &Appearance) -> Vec<String> {
        match self {
            Self::Renew { lease, duration, before } => vec![
                match before {
                    Some(end) => format!("Renew {lease}, which ends {}.", look.ahead(*end)),
                    None => format!("Renew {lease}, which has no end time."),
                },
                "How long from now?".to_owned(),
                "Enter renews, Esc cancels.".to_owned(),
                format!("Duration: {duration}_"),
            ],
            Self::Release { lease } => vec![
                format!("Release {lease}? Its processes may finish."),
                "y releases, any other key cancels.".to_owned(),
            ],
            Self::Revoke { lease, user, reason } => vec![
                format!("Revoke {lease} of {user}? Its processes may finish."),
                "Enter revokes, Esc cancels. The holder sees the reason.".to_owned(),
                format!("Reason: {reason}_"),
            ],
        }
    }

    /// Returns the confirmed change.
    ///
    /// # Errors
    /// If the typed text is not valid.
    pub(super) fn accept(&self) -> Result<LeaseChange, String> {
        match self {
            Self::Renew { duration, .. } if duration.trim().is_empty() => Err("type a duration, such as 2h".to_owned()),
            Self::Renew { lease, duration, before } => match duration::parse_positive(duration.trim()) {
                Ok(duration) if duration.as_secs() > 0 => {
                    Ok(LeaseChange::Renew { lease: *lease, seconds: duration.as_secs(), before: *before })
                }
                Ok(_) => Err("the duration must be 1s or longer".to_owned()),
                Err(error) => Err(error.to_string()),
            },
            Self::Release { lease } => Ok(LeaseChange::Release { lease: *lease }),
            Self::Revoke { lease, reason, .. } if !reason.trim().is_empty() => {
                Ok(LeaseChange::Revoke { lease: *lease, reason: reason.trim().to_owned() })
            }
            Self::Revoke { .. } => Err("type the reason, which the holder sees".to_owned()),
        }
    }
}

impl LeaseChange {
    /// Makes the change. Returns the lease after it.
    pub(super) async fn execute(&self, client: &mut Client) -> Result<Lease, ApiError> {
        let changed = match self {
            Self::Renew { lease, seconds, .. } => {
                client.lease_renew(*lease, LeaseRenewRequest { duration_s: *seconds }).await
            }
            Self::Release { lease } => client.lease_release(*lease).await,
            Self::Revoke { lease, reason } => {
                let reason = reason.clone();
                let request = LeaseRevokeRequest { reason, end: false, notice_s: None, grace_s: None };
                client.lease_revoke(*lease, &request).await
            }
        };
        changed.map_err(ApiError::from)
    }

    /// Says what the change has done.
    pub(super) fn done(&self, lease: &Lease, look: &Appearance) -> String {
        match (self, lease.state) {
            (Self::Renew { before, .. }, _) => {
                let ends = format!("{} ends {}", lease.id, lease::end(lease, look));
                match before {
                    Some(before) if lease.expires_at.is_some_and(|end| end < *before) => {
                        format!("{ends}, earlier than before, which was {}", look.ahead(*before))
                    }
                    Some(_) => ends,
                    None => format!("{ends}; it had no end time before"),
                }
            }
            (Self::Release { .. } | Self::Revoke { .. }, LeaseState::Releasing) => {
                format!("{} is releasing: its processes still run", lease.id)
            }
            (Self::Release { .. } | Self::Revoke { .. }, _) => format!("{} has ended", lease.id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn caller_may_end_only_visible_leases() {
        let look = fixtures::look(80, Charset::Ascii);
        let lease = fixtures::lease::mps();
        let own = BTreeSet::from([lease.id]);
        assert_eq!(end(&lease, &own, &look), Ok(Question::Release { lease: lease.id }));
        // An administrator sees leases of other users completely.
        let revoked = end(&lease, &BTreeSet::new(), &look);
        assert!(matches!(revoked, Ok(Question::Revoke { .. })), "{revoked:?}");
        let foreign = fixtures::lease::foreign();
        assert!(end(&foreign, &own, &look).is_err());
        assert!(renew(&foreign, &own, look.now).is_err());
        assert!(
            renew(&fixtures::lease::revoked(), &BTreeSet::from([fixtures::lease::revoked().id]), look.now).is_err()
        );
    }

    #[test]
    fn invalid_input_is_refused() {
        let lease = LeaseId(7);
        let renew = |text: &str| Question::Renew { lease, duration: text.to_owned(), before: None }.accept();
        assert_eq!(renew(" 1h30m "), Ok(LeaseChange::Renew { lease, seconds: 5400, before: None }));
        assert!(renew("soon").is_err() && renew("").is_err() && renew("0.1s").is_err());
        let revoke = |text: &str| Question::Revoke { lease, user: "bob".to_owned(), reason: text.to_owned() }.accept();
        assert!(revoke("  ").is_err());
        assert_eq!(revoke("new fan"), Ok(LeaseChange::Revoke { lease, reason: "new fan".to_owned() }));
    }

    /// Fault: `r` and Enter shortened a lease of 8 hours to 2 hours, without a word.
    #[test]
    fn proposed_renewal_does_not_shorten_a_lease() {
        let look = fixtures::look(80, Charset::Ascii);
        let proposed = |left_s: Option<i64>| {
            let end = left_s.map(|left_s| Timestamp::from_second(look.now.as_second() + left_s).unwrap());
            let lease = Lease { expires_at: end, ..fixtures::lease::mps() };
            match renew(&lease, &BTreeSet::from([lease.id]), look.now).unwrap() {
                Question::Renew { duration, .. } => duration,
                other => panic!("{other:?}"),
            }
        };
        for (left_s, expected) in
            [(Some(60), "2h"), (Some(7200), "2h"), (Some(7201), "2h1m"), (Some(28_800), "8h"), (None, "")]
        {
            assert_eq!(proposed(left_s), expected, "{left_s:?}");
        }
    }

    #[test]
    fn renewal_that_shortens_a_lease_says_so() {
        let look = fixtures::look(80, Charset::Ascii);
        let lease = fixtures::lease::mig();
        let end = lease.expires_at.unwrap();
        let later = Timestamp::from_second(end.as_second() + 3600).unwrap();
        let done = |before| LeaseChange::Renew { lease: lease.id, seconds: 60, before }.done(&lease, &look);
        assert!(done(Some(later)).contains("earlier than before"), "{}", done(Some(later)));
        assert!(!done(Some(end)).contains("earlier"), "{}", done(Some(end)));
        assert!(done(None).contains("no end time before"), "{}", done(None));
    }
}
