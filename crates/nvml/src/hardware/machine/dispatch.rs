//! Selects queued calls for the worker: in order, and only for GPUs without a call in flight. While
//! the machine repeats the reads of a dead worker, this module selects only one call at a time.

use gpush_api::GpuUuid;
use std::{
    collections::{BTreeSet, VecDeque},
    time::Instant,
};

use super::{Answered, Ask, Effect, Flight, Machine, Service, WorkerId, target};
use crate::{
    error::{DriverError, ErrorKind},
    proto::Request,
};

impl Machine {
    pub(super) fn dispatch(&mut self, now: Instant) {
        if let Service::Failed { until, .. } = self.service
            && now >= until
            && !self.queue.is_empty()
        {
            self.service = Service::Idle;
        }
        match self.service {
            Service::Idle => self.spawn(now),
            Service::Serving { worker } => self.send(now, worker),
            Service::Starting { .. } | Service::Ending { .. } | Service::Failed { .. } => {}
        }
    }

    fn send(&mut self, now: Instant, worker: WorkerId) {
        let mut busy: BTreeSet<Option<GpuUuid>> = self.flights.values().map(|f| target(&f.request)).collect();
        let mut waiting = VecDeque::new();
        let mut cautious =
            self.queue.iter().any(|p| p.suspect) || self.flights.values().any(|f| f.suspect && f.late.is_none());
        for pending in std::mem::take(&mut self.queue) {
            let Ask::Request(request) = &pending.ask else {
                let result = match &self.driver {
                    Some(driver) => Ok(Answered::Driver(driver.clone())),
                    None => Err(DriverError::new(ErrorKind::WorkerUnavailable, "querying the driver")),
                };
                self.effects.push(Effect::Answer { ticket: pending.ticket, result });
                continue;
            };
            let target_of = target(request);
            let in_flight = self.flights.values().any(|f| f.worker == worker);
            if !busy.insert(target_of) || cautious && in_flight {
                waiting.push_back(pending);
                continue;
            }
            cautious |= pending.suspect;
            let request = self.amended(request.clone());
            let allowed = if request.is_mutation() { self.limits.change } else { self.limits.read };
            self.effects.push(Effect::Send { worker, ticket: pending.ticket, request: request.clone() });
            let deadline = now + allowed;
            let suspect = pending.suspect;
            self.flights.insert(pending.ticket, Flight { request, worker, sent: now, deadline, late: None, suspect });
        }
        self.queue = waiting;
    }

    /// Adds the known index and PCI address of the GPU to a request. For a list request, sets `skip` to the unsettled
    /// GPUs.
    fn amended(&self, mut request: Request) -> Request {
        if let Request::List { skip } = &mut request {
            *skip = self.unsettled().iter().filter_map(|uuid| self.known.get(uuid)).cloned().collect();
        }
        if let Some(gpu) = request.gpu_mut()
            && let Some(known) = self.known.get(&gpu.uuid)
        {
            gpu.clone_from(known);
        }
        request
    }
}
