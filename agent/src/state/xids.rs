//! Xid errors that the driver has reported since this gpushd started.

use std::collections::BTreeMap;

use gpush_api::GpuUuid;
use jiff::Timestamp;

/// Counts of Xid errors, by GPU and Xid number. The UUID is empty if the driver did not name the GPU.
#[derive(Debug, Clone, Default)]
pub(crate) struct XidErrors(BTreeMap<(GpuUuid, u64), XidCount>);

/// How often the driver reported one Xid error on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct XidCount {
    /// Number of reports.
    pub(crate) reports: u64,
    /// Time of the last report.
    pub(crate) last: Timestamp,
}

impl XidErrors {
    /// Counts a report.
    pub(super) fn count(&mut self, uuid: &GpuUuid, xid: u64, at: Timestamp) {
        let count = self.0.entry((uuid.clone(), xid)).or_insert(XidCount { reports: 0, last: at });
        count.reports += 1;
        count.last = at;
    }

    /// Returns the counts: UUID of the GPU, Xid number, count.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&GpuUuid, u64, XidCount)> {
        self.0.iter().map(|((uuid, xid), count)| (uuid, *xid, *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_counted_by_gpu_and_number() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let mut xids = XidErrors::default();
        for (uuid, xid, second) in [("GPU-0", 79, 1), ("GPU-0", 31, 2), ("GPU-1", 79, 3), ("GPU-0", 79, 4)] {
            xids.count(&uuid.into(), xid, at(second));
        }
        let counts: Vec<_> =
            xids.iter().map(|(uuid, xid, count)| (uuid.as_str(), xid, count.reports, count.last)).collect();
        assert_eq!(counts, [("GPU-0", 31, 1, at(2)), ("GPU-0", 79, 2, at(4)), ("GPU-1", 79, 1, at(3))]);
    }
}
