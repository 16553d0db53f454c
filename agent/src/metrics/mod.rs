//! `/metrics`: the figures of gpushd as metrics. A scrape causes no driver call: it shows the last samples.
//!
//! ```text
//! snapshot of the host ──┬─► GPUs, MIG devices, MPS ──► every caller
//! figures of use ────────┘
//! open leases, queue, gpushd itself ──────────────────► administrators, and the users in `metrics.readers`
//! ```
//!
//! A caller who may see everything can request the series of every caller (`?labels=public`).
//!
//! Only live objects have series. The identity of a lease is in `gpush_lease_info`, so that the other series of the lease
//! keep few labels. Values have base units. A figure that is not known has no series: it is never 0.
//!
//! | file | subject |
//! |---|---|
//! | `gpus` | GPUs, MIG devices and MPS targets |
//! | `faults` | Xid errors, cordons, memory rows, unleased processes, the driver |
//! | `leases` | leases and the queue |
//! | `host` | gpushd itself |
//! | `job_files` | files with the Slurm jobs on each GPU, for other exporters |
//! | `cache` | answers to scrapes that follow each other closely |

mod cache;
mod faults;
mod gpus;
mod host;
pub(crate) mod job_files;
mod leases;

use std::sync::Arc;

use axum::body::Bytes;
use gpush_openmetrics::{Family, Format, render};

use self::cache::Cache;
use crate::{
    requests::caller::{Caller, Viewer},
    state::context::HostContext,
    usage::{Need, Usage},
};

/// Composes metrics. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Metrics(Arc<MetricsParts>);

#[derive(Debug)]
struct MetricsParts {
    context: Arc<HostContext>,
    usage: Usage,
    cache: Cache,
}

/// The series of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    /// GPUs, MIG devices and MPS targets, without users.
    Devices,
    /// Everything.
    All,
}

impl Metrics {
    /// Creates the handle.
    pub(crate) fn new(context: Arc<HostContext>, usage: Usage) -> Self {
        Self(Arc::new(MetricsParts { context, usage, cache: Cache::default() }))
    }

    /// Returns the series that a caller may see. `name` is the name of the caller's user, if it has one.
    pub(crate) fn scope(&self, caller: &Caller, name: Option<&str>) -> Scope {
        let readers = &self.0.context.state.config().metrics.readers;
        let is_reader = name.is_some_and(|name| readers.iter().any(|reader| reader == name));
        if caller.viewer.is_admin() || is_reader { Scope::All } else { Scope::Devices }
    }

    /// Returns the metrics as text.
    pub(crate) fn text(&self, scope: Scope, format: Format) -> Bytes {
        self.0.usage.need(Need::Scrape);
        self.0.cache.text(scope, format, || render(&self.families(scope), format))
    }

    fn families(&self, scope: Scope) -> Vec<Family> {
        let host = self.0.context.state.now();
        let usage = self.0.usage.figures(Viewer::Admin);
        let mut families = gpus::families(&host, &usage);
        families.extend(faults::families(&host));
        if scope == Scope::All {
            families.extend(leases::families(&host, &self.0.usage.summaries()));
            families.extend(host::families(&self.0.context, &host, self.0.usage.attempts()));
        }
        families
    }
}
