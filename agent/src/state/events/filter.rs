//! Selects the events that a listener receives.

use gpush_api::{Event, EventKind, GpuUuid};

/// Which events a listener wants.
#[derive(Debug, Clone, Default)]
pub(crate) struct Filter {
    /// Kinds of events; `None` selects all kinds.
    pub(crate) kinds: Option<Vec<EventKind>>,
    /// UUIDs of GPUs; `None` selects the events of all GPUs and of the host.
    pub(crate) gpus: Option<Vec<GpuUuid>>,
}

impl Filter {
    /// Returns whether the listener receives this event.
    pub(crate) fn wants(&self, event: &Event) -> bool {
        let kind = event.what.kind();
        self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&kind))
            && self.gpus.as_ref().is_none_or(|gpus| event.what.gpu_uuids().iter().any(|uuid| gpus.contains(uuid)))
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{ConfigChange, EventPayload, Xid};

    use super::*;

    #[test]
    fn filter_applies_kinds_and_gpus() {
        let event = |what| Event { id: String::new(), at: jiff::Timestamp::UNIX_EPOCH, what };
        let xid = event(EventPayload::Xid(Xid {
            gpu: None,
            gpu_uuid: "GPU-1".into(),
            xid: 31,
            gi: None,
            ci: None,
            process: None,
        }));
        let config =
            event(EventPayload::Config(ConfigChange { taken: true, error: None, pending_restart: Vec::new() }));
        let wanted = |kinds: Option<Vec<EventKind>>, gpus: Option<&str>| {
            let filter = Filter { kinds, gpus: gpus.map(|gpu| vec![gpu.into()]) };
            (filter.wants(&xid), filter.wants(&config))
        };
        assert_eq!(wanted(None, None), (true, true));
        assert_eq!(wanted(Some(vec![EventKind::Config]), None), (false, true));
        assert_eq!(wanted(None, Some("GPU-1")), (true, false));
        assert_eq!(wanted(None, Some("GPU-2")), (false, false));
        assert_eq!(wanted(Some(vec![EventKind::Gpu]), Some("GPU-1")), (false, false));
    }
}
