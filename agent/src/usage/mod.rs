//! The use of leases and GPUs: samples of the GPUs, and the sums of each lease.
//!
//! ```text
//! scrape, top, idle policy ──► demand ──► sampler ──► driver (the worker for samples)
//!                                            │ sample
//! open leases, GPUs ──► holds ───────────────┼────────► ledger (crates/usage) ──► figures for the API and metrics
//!                              processes ──► owners ──► lease of each process
//! ledger ──► history ──► store
//! ```
//!
//! gpushd takes samples only while something needs them: see [`Demand`]. Without samples, the time of a lease counts as
//! unknown, so it is not idle. A failed sample does not change the state of a GPU.
//!
//! | file | subject |
//! |---|---|
//! | `demand` | the needs for samples, and their intervals |
//! | `sampler` | the task that takes samples and follows the leases |
//! | `round` | the GPUs to sample next, and the values that each sample reads |
//! | `take` | one sample |
//! | `attempts` | counts of used and dropped samples |
//! | `follow` | the leases that begin, change and end |
//! | `history` | records the sums in the store, and continues from there after a start |
//! | `closing` | closes the bills of months that have ended, folds the hours of ended days, deletes old rows |
//! | `pages` | reads the recorded hours of a period |
//! | `report` | who used how much in a period |
//! | `bill` | the bill of a month |
//! | `lease_history` | the use of each lease of a period, and the refused requests |
//! | `recent` | the final sums of leases that have just ended |
//! | `lease_owners` | the owner that each lease is charged to |
//! | `holds` | the holds of the leases, and the unusable units of the GPUs |
//! | `owners` | the lease of each process in a sample |
//! | `translate` | a sample of the driver as input of the ledger |
//! | `learning` | samples of free GPUs, for their power without work |
//! | `clock` | the present moment, by two clocks |
//! | `show` | the present figures for the API |
//! | `observe` | the observations for the idle policy |
//! | `summary` | the use of each lease in one line, and its recent past |

mod attempts;
mod bill;
mod clock;
mod closing;
mod demand;
mod follow;
mod history;
mod holds;
mod learning;
mod lease_history;
mod lease_owners;
mod observe;
mod owners;
mod pages;
mod recent;
mod report;
mod round;
mod sampler;
mod show;
mod summary;
mod take;
mod translate;

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{GpuUuid, HostUsage, LeaseId};
use gpush_host::process_facts::LeaseNames;
use gpush_locked::Locked;
use gpush_nvml::{SampleError, sample::Sample};
use gpush_usage::{
    input::GpuSample,
    ledger::{LeaseTotals, Ledger, MOST_INTERVALS},
    moment::Moment,
};
use jiff::Timestamp;
use tokio::sync::watch;

pub(crate) use self::{
    attempts::SampleAttempts, bill::BillQuery, demand::Need, observe::ObservedLeases, report::ReportQuery,
};
use self::{
    clock::Clock,
    demand::Demand,
    history::{CountedRequests, RecordedSums},
    recent::RecentlyEnded,
};
use crate::{modes::mps::Mps, requests::caller::Viewer, state::context::HostContext};

/// The use of leases and GPUs. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Usage(Arc<UsageParts>);

#[derive(Debug)]
struct UsageParts {
    context: Arc<HostContext>,
    mps: Mps,
    /// The leases that processes name in their environments.
    lease_names: Arc<LeaseNames>,
    clock: Clock,
    demand: Demand,
    /// Notified after each sample.
    sampled: watch::Sender<()>,
    accounts: Locked<Accounts>,
    /// Held while hours and requests are between memory and the store.
    recording: tokio::sync::Mutex<()>,
    /// The requests since gpushd started that are in the store.
    saved_requests: Locked<CountedRequests>,
}

/// The sums, and the last samples.
#[derive(Debug, Default)]
struct Accounts {
    ledger: Ledger,
    last: BTreeMap<GpuUuid, LastSample>,
    /// The sums of the last transaction.
    recorded: RecordedSums,
    attempts: SampleAttempts,
    /// Leases that have begun. Their requests are not recorded yet.
    begun: Vec<LeaseId>,
    /// Leases that have ended and are not recorded yet.
    ended: Vec<LeaseTotals>,
    /// Leases that have ended a short time ago.
    recent: RecentlyEnded,
    /// Whether a lease has begun, changed or ended since the last checkpoint.
    is_changed: bool,
}

/// The last attempt to sample a GPU. After a failed attempt, there is no sample, so that an old figure is never shown as
/// present.
#[derive(Debug)]
enum LastSample {
    Taken(Box<TakenSample>),
    Failed(SampleError),
}

/// A sample, as the driver gave it and as the ledger got it.
#[derive(Debug)]
struct TakenSample {
    at: Timestamp,
    sample: Sample,
    translated: GpuSample,
}

impl LastSample {
    /// Returns the sample if it is recent. It can be old, because gpushd takes no samples while no client needs them.
    fn recent(&self, now: Moment) -> Option<&TakenSample> {
        match self {
            Self::Taken(taken) => {
                let GpuSample { at, interval_ms, .. } = taken.translated;
                Some(&**taken).filter(|_| is_recent(at, interval_ms, now))
            }
            Self::Failed(_) => None,
        }
    }
}

/// Returns whether a sample is recent, as the ledger decides it.
fn is_recent(at: Moment, interval_ms: u64, now: Moment) -> bool {
    now.ms_since(at) <= interval_ms.saturating_mul(MOST_INTERVALS)
}

impl Usage {
    /// Creates the handle. `boot_id` identifies this boot of the host.
    pub(crate) fn new(context: Arc<HostContext>, mps: Mps, lease_names: Arc<LeaseNames>, boot_id: &str) -> Self {
        Self(Arc::new(UsageParts {
            context,
            mps,
            lease_names,
            clock: Clock::of_boot(boot_id),
            demand: Demand::default(),
            sampled: watch::Sender::new(()),
            accounts: Locked::default(),
            recording: tokio::sync::Mutex::default(),
            saved_requests: Locked::default(),
        }))
    }

    /// Takes samples and accounts leases until gpushd stops.
    pub(crate) async fn run(self) {
        sampler::run(self).await;
    }

    /// Notes that something needs samples from now on, for a while.
    pub(crate) fn need(&self, need: Need) {
        self.0.demand.note(need);
    }

    /// Returns how many samples were used and dropped since gpushd started.
    pub(crate) fn attempts(&self) -> SampleAttempts {
        self.0.accounts.lock().attempts
    }

    /// Returns the figures that a viewer may see: administrators see all leases, users their own.
    pub(crate) fn figures(&self, viewer: Viewer) -> HostUsage {
        show::figures(self, viewer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: after an hour without scrapes, the first scrape showed the power of an hour ago.
    #[test]
    fn sample_is_recent_for_three_intervals() {
        let at = Moment { boot: 1, monotonic_ms: 1_000_000, wall_ms: 0 };
        assert!(is_recent(at, 15_000, at.plus_ms(45_000)));
        assert!(!is_recent(at, 15_000, at.plus_ms(45_001)));
        assert!(!is_recent(at, 1_000, at.plus_ms(3_600_000)));
    }
}
