//! How a command waits, and the reason and end of a change.

use std::time::Duration;

use clap::Args;
use jiff::Timestamp;

use super::values::{LONGEST_WAIT, duration, expiry, wait};

/// How a command waits for the end of what it started. gpushd finishes it in any case.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Waiting {
    /// Do not show progress
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Stop waiting after DURATION; gpushd continues [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = duration, allow_negative_numbers = true)]
    pub(crate) timeout: Option<Duration>,
    /// Do not wait until the operation ends; print its id
    #[arg(long, conflicts_with_all = ["timeout", "quiet"])]
    pub(crate) detach: bool,
}

/// `--wait`.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Queueing {
    /// Queue until the change can start, at most DURATION [default without =DURATION: 30d]
    #[arg(
        long = "wait",
        value_name = "DURATION",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = LONGEST_WAIT,
        value_parser = wait
    )]
    pub(crate) seconds: Option<u64>,
}

impl Queueing {
    /// Returns how long to wait; `None` means not at all.
    pub(crate) fn limit(self) -> Option<Duration> {
        self.seconds.map(Duration::from_secs)
    }

    /// Returns the duration of `--wait`; `None` if the user gave no duration.
    pub(crate) fn finite(self) -> Option<Duration> {
        self.limit().filter(|limit| wait(LONGEST_WAIT) != Ok(limit.as_secs()))
    }
}

/// Why a change is made and for how long.
#[derive(Debug, Clone, Args)]
pub(crate) struct Lasting {
    /// Do not make an override; a difference from the config then counts as drift
    #[arg(long, conflicts_with = "expires")]
    pub(crate) once: bool,
    /// Reason, shown to all users
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// End of the override: a duration such as 2h, or a time such as 2026-12-01T08:00Z
    #[arg(long, value_name = "TIME", value_parser = expiry, allow_negative_numbers = true)]
    pub(crate) expires: Option<Timestamp>,
}

/// `--reason`.
#[derive(Debug, Clone, Args)]
pub(crate) struct Why {
    /// Reason, shown to all users
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
}
