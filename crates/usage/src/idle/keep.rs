//! `gpushctl lease keep`: the holder keeps an unused lease for a time.

use std::fmt;

use super::policy::IdlePolicy;
use crate::moment::Moment;

/// Longest reason, in bytes.
const LONGEST_REASON: usize = 200;

/// A time for which a lease is kept although it is unused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keep {
    /// End.
    pub until: Moment,
    /// Why.
    pub reason: String,
}

/// Why a lease cannot be kept as requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepError {
    /// The time is longer than the config allows.
    TooLong {
        /// The longest time, in ms.
        most_ms: u64,
    },
    /// The reason is empty.
    NoReason,
    /// The reason is too long.
    LongReason,
}

impl fmt::Display for KeepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { most_ms } => {
                let most = gpush_core::duration::format(std::time::Duration::from_millis(*most_ms));
                write!(f, "an unused lease can be kept for {most} at most")
            }
            Self::NoReason => f.write_str("the reason is empty"),
            Self::LongReason => write!(f, "the reason is longer than {LONGEST_REASON} bytes"),
        }
    }
}

impl std::error::Error for KeepError {}

impl Keep {
    /// Checks a request to keep a lease from now on. Holders can ask again, each time for `max_keep` at most.
    ///
    /// # Errors
    /// The time is longer than `max_keep`, or the reason is empty or too long.
    pub fn new(policy: &IdlePolicy, now: Moment, for_ms: u64, reason: &str) -> Result<Self, KeepError> {
        let reason = reason.trim();
        if for_ms > policy.max_keep_ms {
            return Err(KeepError::TooLong { most_ms: policy.max_keep_ms });
        }
        if reason.is_empty() {
            return Err(KeepError::NoReason);
        }
        if reason.len() > LONGEST_REASON {
            return Err(KeepError::LongReason);
        }
        Ok(Self { until: now.plus_ms(for_ms), reason: reason.to_owned() })
    }
}
