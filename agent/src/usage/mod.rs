//! What leases and GPUs are used for: samples of the GPUs, and the sums of each lease.
//!
//! ```text
//! scrape, top, idle policy ──► demand ──► sampler ──► driver (the worker for samples)
//!                                            │ sample
//! open leases, GPUs ──► holds ───────────────┼────────► ledger (crates/usage) ──► figures for the API and metrics
//!                              processes ──► owners ──► lease of each process
//! ```
//!
//! gpushd takes samples only while something needs them: see [`Demand`]. Without samples, the time of a lease counts as
//! unknown, and no lease is called idle. A failed sample changes no state of a GPU.
//!
//! | file | subject |
//! |---|---|
//! | `demand` | who needs samples, and how often |
//! | `sampler` | the task that takes samples |
//! | `holds` | what each lease holds, and what of a GPU no lease can have |
//! | `owners` | the lease of each process in a sample |
//! | `translate` | a sample of the driver as input of the ledger |
//! | `clock` | the present moment, by two clocks |
//! | `show` | the figures for the API |

mod clock;
mod demand;
mod holds;
mod owners;
mod sampler;
mod show;
mod translate;

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{GpuUuid, HostUsage};
use gpush_host::process_facts::LeaseNames;
use gpush_locked::Locked;
use gpush_nvml::{SampleError, sample::Sample};
use gpush_usage::{input::GpuSample, ledger::Ledger};
use jiff::Timestamp;

pub(crate) use self::demand::Need;
use self::{clock::Clock, demand::Demand};
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
    accounts: Locked<Accounts>,
}

/// The sums, and the last samples.
#[derive(Debug, Default)]
struct Accounts {
    ledger: Ledger,
    last: BTreeMap<GpuUuid, LastSample>,
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
    fn taken(&self) -> Option<&TakenSample> {
        match self {
            Self::Taken(taken) => Some(taken),
            Self::Failed(_) => None,
        }
    }
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
            accounts: Locked::default(),
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

    /// Returns the figures that a viewer may see: administrators see all leases, users their own.
    pub(crate) fn figures(&self, viewer: Viewer) -> HostUsage {
        show::figures(self, viewer)
    }
}
