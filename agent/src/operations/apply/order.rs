//! A requested change, and what the journal records about it.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{Gpu, GpuPlan, GpuUuid, PlanRequest};
use gpush_core::config::Config;
use gpush_store::{GpuIntent, Intent};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::part::Part;
use crate::{
    operations::overrides::{self, OverrideChange},
    requests::idempotency::Key,
};

/// A requested change.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Order {
    /// Kind of the operation, such as `mig.apply`.
    pub(crate) kind: String,
    /// The GPUs and their desired layouts.
    pub(crate) request: PlanRequest,
    pub(crate) reason: Option<String>,
    /// How long the operation may wait in the queue. With `None`, the operation is refused unless
    /// it can begin at once.
    pub(crate) wait: Option<Duration>,
    /// Whether the operation leaves overrides unchanged.
    #[serde(default)]
    pub(crate) once: bool,
    /// Time at which the override of this operation expires.
    #[serde(default)]
    pub(crate) expires_at: Option<Timestamp>,
    /// The generation of the desired state that the caller has seen. The request is refused if the
    /// generation has changed since.
    #[serde(skip)]
    pub(crate) expected: Option<u64>,
    #[serde(skip)]
    pub(crate) key: Option<Key>,
}

impl Order {
    /// Creates an order that has no reason and does not wait.
    pub(crate) fn new(kind: &str, request: PlanRequest) -> Self {
        Self {
            kind: kind.to_owned(),
            request,
            reason: None,
            wait: None,
            once: false,
            expires_at: None,
            expected: None,
            key: None,
        }
    }

    /// Returns the change of each GPU's override, in the order of the plans.
    pub(super) fn override_changes(
        &self,
        config: &Config,
        gpus: &[Gpu],
        plans: &[GpuPlan],
    ) -> Vec<Option<OverrideChange>> {
        if self.once {
            return plans.iter().map(|_| None).collect();
        }
        overrides::override_changes(&self.request, self.expires_at, config, gpus, plans)
    }
}

/// Data that the journal stores in addition to the plans. After a restart, gpushd reads `order` to queue the operation
/// again, and `lasting` to recover an operation that has begun.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RecordedRequest {
    #[serde(flatten)]
    pub(super) order: Order,
    /// Changes of overrides, by UUID of the GPU.
    #[serde(default)]
    pub(super) lasting: BTreeMap<GpuUuid, OverrideChange>,
}

/// Returns what the journal records about an operation: each GPU's plan and MIG state, and the request.
pub(super) fn intent(order: &Order, parts: &[Part]) -> Intent {
    let gpus = parts.iter().map(|part| GpuIntent { before: part.before.clone(), plan: part.plan.clone() });
    let lasting = parts.iter().filter_map(|part| Some((part.plan.gpu_uuid.clone(), part.lasting.clone()?)));
    let more = RecordedRequest { order: order.clone(), lasting: lasting.collect() };
    Intent { gpus: gpus.collect(), more: serde_json::to_value(more).unwrap_or_default(), ..Intent::default() }
}

#[cfg(test)]
mod tests {
    use gpush_api::LayoutSource;

    use super::*;

    fn order() -> Order {
        let request = PlanRequest { gpus: vec!["0".to_owned()], layout: LayoutSource::Named("mixed".to_owned()) };
        Order {
            wait: Some(Duration::from_secs(60)),
            expires_at: Some(Timestamp::UNIX_EPOCH),
            ..Order::new("mig.apply", request)
        }
    }

    fn part(uuid: &str, lasting: Option<OverrideChange>) -> Part {
        Part { lasting, ..Part::unseen(0, GpuPlan { gpu_uuid: uuid.into(), ..GpuPlan::default() }) }
    }

    #[test]
    fn queued_request_is_read_back_from_the_journal() {
        let recorded = intent(&order(), &[part("GPU-0", Some(OverrideChange::End)), part("GPU-1", None)]);
        assert_eq!(recorded.gpus.iter().map(|gpu| gpu.plan.gpu_uuid.as_str()).collect::<Vec<_>>(), ["GPU-0", "GPU-1"]);
        let read: RecordedRequest = serde_json::from_value(recorded.more).unwrap();
        let wait = (read.order.wait, read.order.expires_at);
        assert_eq!((read.order.request, wait), (order().request, (order().wait, order().expires_at)));
        assert_eq!(read.lasting.keys().collect::<Vec<_>>(), ["GPU-0"]);
        assert!(matches!(read.lasting["GPU-0"], OverrideChange::End));
    }

    /// After an upgrade, gpushd queues the operations of the previous version again.
    #[test]
    fn journal_of_an_earlier_version_is_read() {
        let earlier = serde_json::json!({
            "kind": "mig.apply",
            "request": { "selectors": ["0"], "layout_source": "config" },
            "reason": null,
            "wait": { "secs": 60, "nanos": 0 },
        });
        let RecordedRequest { order, lasting } = serde_json::from_value(earlier).unwrap();
        assert_eq!((order.wait, order.once, order.expires_at), (Some(Duration::from_secs(60)), false, None));
        assert!(lasting.is_empty());
    }

    /// The generation that the caller expected is not valid after a restart of gpushd.
    #[test]
    fn expected_generation_is_not_recorded() {
        let recorded = intent(&Order { expected: Some(7), ..order() }, &[]);
        let read: RecordedRequest = serde_json::from_value(recorded.more).unwrap();
        assert_eq!(read.order.expected, None);
    }

    #[test]
    fn request_that_applies_once_changes_no_override() {
        let once = Order { once: true, ..order() };
        let plans = [GpuPlan::default(), GpuPlan::default()];
        let changes = once.override_changes(&Config::default(), &[], &plans);
        assert!(changes.len() == 2 && changes.iter().all(Option::is_none), "{changes:?}");
    }
}
