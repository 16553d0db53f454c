//! Counts the samples that were used and dropped since gpushd started.

use gpush_nvml::SampleError;

/// Why a sample was not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DropReason {
    /// The driver did not answer in time.
    Late,
    /// The last samples of the GPU were late, so gpushd did not ask the driver.
    Waiting,
    /// gpushd had no driver handle, because of a reset, maintenance or a change of MIG mode.
    Suspended,
    /// The driver or the worker reported an error.
    Failed,
    /// The leases of the GPU had changed after the sample.
    Outdated,
}

impl DropReason {
    /// All reasons.
    pub(crate) const ALL: [Self; 5] = [Self::Late, Self::Waiting, Self::Suspended, Self::Failed, Self::Outdated];

    /// Returns the name in labels.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Waiting => "waiting",
            Self::Suspended => "suspended",
            Self::Failed => "failed",
            Self::Outdated => "outdated",
        }
    }
}

impl From<&SampleError> for DropReason {
    fn from(error: &SampleError) -> Self {
        match error {
            SampleError::Late => Self::Late,
            SampleError::Waiting(_) => Self::Waiting,
            SampleError::Suspended => Self::Suspended,
            SampleError::Driver(_) => Self::Failed,
        }
    }
}

/// Numbers of samples since gpushd started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SampleAttempts {
    /// Samples that were used.
    pub(crate) taken: u64,
    dropped: [u64; DropReason::ALL.len()],
}

impl SampleAttempts {
    /// Counts a sample that is used.
    pub(super) fn note_taken(&mut self) {
        self.taken += 1;
    }

    /// Counts a sample that is not used.
    pub(super) fn note_dropped(&mut self, reason: DropReason) {
        self.dropped[reason as usize] += 1;
    }

    /// Returns the number of samples that were not used, by reason.
    pub(crate) fn dropped(&self) -> impl Iterator<Item = (DropReason, u64)> {
        DropReason::ALL.into_iter().zip(self.dropped)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_reason_is_counted_apart() {
        let mut attempts = SampleAttempts::default();
        let errors = [SampleError::Late, SampleError::Waiting(Duration::from_secs(5)), SampleError::Suspended];
        for error in &errors {
            attempts.note_dropped(error.into());
        }
        attempts.note_dropped(DropReason::Outdated);
        attempts.note_dropped(DropReason::Outdated);
        attempts.note_taken();
        let dropped: Vec<(&str, u64)> = attempts.dropped().map(|(reason, count)| (reason.name(), count)).collect();
        assert_eq!(dropped, [("late", 1), ("waiting", 1), ("suspended", 1), ("failed", 0), ("outdated", 2)]);
        assert_eq!(attempts.taken, 1);
    }
}
