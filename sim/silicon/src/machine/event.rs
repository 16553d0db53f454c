//! Driver events: Xid errors and MIG configuration changes.
//!
//! Each host has one queue of events. Each event set of each client has a separate position in the
//! queue. So every listener gets each event once, and gets no event from before its registration.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::Machine;
use crate::returns::Return;

/// NVML's bit for a critical Xid error.
pub const XID_CRITICAL_ERROR: u64 = 0x8;
/// NVML's bit for a changed MIG configuration.
pub const MIG_CONFIG_CHANGE: u64 = 0x100;

/// Number of stored events. Older events are dropped.
const KEPT: usize = 256;

/// An event. A client registers for the events of a whole GPU. An event has the ids of the
/// instances that it concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Position in the queue, counted from 1.
    pub sequence: u64,
    /// Index of the GPU.
    pub gpu: u32,
    /// NVML's bit for the type of the event.
    pub kind: u64,
    /// Xid number, if the event is an Xid error.
    pub data: u64,
    /// Id of the GPU instance that the event concerns.
    pub gpu_instance: Option<u32>,
    /// Id of the compute instance that the event concerns.
    pub compute_instance: Option<u32>,
}

/// The queue of events.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Events {
    last: u64,
    kept: VecDeque<Event>,
}

impl Events {
    /// Returns the cursor with which a new listener starts.
    #[must_use]
    pub fn cursor(&self) -> u64 {
        self.last
    }

    /// Returns the first event after `cursor` for which `wants` returns true. Its `sequence` is the
    /// new cursor.
    pub fn next(&self, cursor: u64, wants: impl Fn(&Event) -> bool) -> Option<&Event> {
        self.kept.iter().find(|event| event.sequence > cursor && wants(event))
    }

    /// Returns the stored events, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Event> {
        self.kept.iter()
    }

    fn push(&mut self, event: Event) {
        self.last += 1;
        self.kept.push_back(Event { sequence: self.last, ..event });
        while self.kept.len() > KEPT {
            self.kept.pop_front();
        }
    }
}

impl Machine {
    /// Reports an Xid error. The GPU may be lost, because Xid 79 announces the loss.
    ///
    /// # Errors
    /// `InvalidArgument` if the GPU does not exist, `NotFound` if the instance does not exist.
    pub fn xid(&mut self, gpu: u32, xid: u64, gi: Option<u32>, ci: Option<u32>) -> Result<(), Return> {
        let at = self.state.gpus.get(gpu as usize).ok_or(Return::InvalidArgument)?;
        match (gi, ci) {
            (None, None) => {}
            (None, Some(_)) => return Err(Return::InvalidArgument),
            (Some(gi), None) => _ = at.instance(gi).ok_or(Return::NotFound)?,
            (Some(gi), Some(ci)) => _ = at.instance(gi).and_then(|i| i.compute(ci)).ok_or(Return::NotFound)?,
        }
        self.push_event(gpu, XID_CRITICAL_ERROR, xid, gi, ci);
        Ok(())
    }

    /// Reports that the MIG configuration of a GPU changed.
    pub(super) fn mig_changed(&mut self, gpu: u32, gi: Option<u32>, ci: Option<u32>) {
        self.push_event(gpu, MIG_CONFIG_CHANGE, 0, gi, ci);
    }

    fn push_event(&mut self, gpu: u32, kind: u64, data: u64, gpu_instance: Option<u32>, compute_instance: Option<u32>) {
        self.state.events.push(Event { sequence: 0, gpu, kind, data, gpu_instance, compute_instance });
    }
}
