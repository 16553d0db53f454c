//! Events that nobody publishes: found by comparing what is known with what was last told.
//!
//! It looks at what the agent has read already, and reads nothing itself.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{DriverChange, Gpu, GpuAspect, GpuChange, Happening, InstanceSeen, Xid};
use gpush_nvml::{EventKind, Status};
use tokio::sync::broadcast::error::RecvError;

use crate::{agent::Shared, auth::Asker, view};

/// Between a sign that GPUs may be different and the look at them: readings of several GPUs land
/// together.
const GATHER: Duration = Duration::from_millis(20);

/// Watches until the agent drops it.
pub(crate) async fn run(agent: Shared) {
    let mut gpus = Gpus::default();
    let mut driver = DriverSeen::default();
    let mut status = agent.hardware.watch();
    let mut xids = agent.hardware.events();
    let bell = agent.events.bell();
    loop {
        tokio::select! {
            () = bell.notified() => {
                tokio::time::sleep(GATHER).await;
                // Without a driver there is nothing to compare: that is an event of its own.
                if let Ok(host) = agent.observer.known() {
                    let seen = view::compose(&agent, &Asker::agent(), host);
                    let changes = gpus.differences(&seen);
                    if !changes.is_empty() {
                        agent.mps.settle();
                        agent.timeslice.settle();
                    }
                    changes.into_iter().for_each(|change| agent.events.publish(change));
                }
            }
            Ok(()) = status.changed() => {
                let change = driver.difference(&status.borrow_and_update());
                if let Some(change) = change {
                    agent.events.publish(Happening::Driver(change));
                }
            }
            event = xids.recv() => match event {
                Ok(event) => {
                    if let EventKind::Xid(xid) = event.kind {
                        tracing::warn!(gpu = event.uuid, "the driver reports Xid {xid}");
                        let gpu = agent.observer.index_of(&event.uuid);
                        let (gi, ci) = (event.gi, event.ci);
                        agent.events.publish(Happening::Xid(Xid { gpu, uuid: event.uuid, xid, gi, ci }));
                    }
                }
                Err(RecvError::Lagged(missed)) => tracing::warn!("{missed} events of the driver were missed"),
                Err(RecvError::Closed) => return,
            },
        }
    }
}

/// GPUs as they were last told of.
#[derive(Debug, Default)]
struct Gpus(BTreeMap<String, GpuChange>);

impl Gpus {
    fn differences(&mut self, gpus: &[Gpu]) -> Vec<Happening> {
        let mut changes = Vec::new();
        for gpu in gpus {
            let mut now = seen(gpu);
            now.changed = match self.0.get(&gpu.uuid) {
                None => vec![GpuAspect::Appeared],
                Some(before) => aspects(before, &now),
            };
            if now.changed.is_empty() {
                continue;
            }
            self.0.insert(gpu.uuid.clone(), now.clone());
            changes.push(Happening::Gpu(Box::new(now)));
        }
        changes
    }
}

fn aspects(before: &GpuChange, now: &GpuChange) -> Vec<GpuAspect> {
    let different = [
        (GpuAspect::State, (before.state, &before.reasons) != (now.state, &now.reasons)),
        (GpuAspect::Drift, before.drift != now.drift),
        (GpuAspect::Mig, before.mig != now.mig),
        (GpuAspect::Instances, before.instances != now.instances),
        (GpuAspect::ComputeMode, before.compute_mode != now.compute_mode),
        (GpuAspect::Timeslice, before.timeslice != now.timeslice),
    ];
    different.into_iter().filter(|(_, different)| *different).map(|(aspect, _)| aspect).collect()
}

fn seen(gpu: &Gpu) -> GpuChange {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).map(|instance| InstanceSeen {
        id: instance.id,
        profile: instance.profile.clone(),
        placement: instance.placement,
        compute: instance.compute.iter().map(|compute| compute.id).collect(),
    });
    GpuChange {
        gpu: gpu.index,
        uuid: gpu.uuid.clone(),
        changed: Vec::new(),
        state: gpu.state,
        reasons: gpu.reasons.clone(),
        drift: gpu.drift.clone(),
        mig: gpu.mig.as_ref().map(|mig| mig.enabled),
        instances: instances.collect(),
        compute_mode: gpu.compute_mode,
        // That it was read once more is no news.
        timeslice: gpu.timeslice.clone().map(|turns| gpush_api::TimesliceView { read_at: None, ..turns }),
    }
}

/// The driver as it was last told of.
#[derive(Debug, Default)]
struct DriverSeen {
    /// Version of the last one that served.
    version: Option<String>,
    /// Whether it serves; `None` before anything was heard.
    serves: Option<bool>,
}

impl DriverSeen {
    fn difference(&mut self, status: &Status) -> Option<DriverChange> {
        let failure = status.failure.as_ref().filter(|error| error.is_driver_unavailable());
        if let Some(error) = failure {
            let vanished = self.serves.replace(false) != Some(false);
            let before = self.version.clone();
            return vanished.then(|| DriverChange { driver: None, before, error: Some(error.to_api()) });
        }
        // A worker that is being started has nothing to say yet.
        let driver = status.driver.as_ref().filter(|_| status.worker.is_some() && status.failure.is_none())?;
        let before = self.version.replace(driver.version.clone());
        let is_new = self.serves.replace(true) != Some(true) || before.as_ref() != Some(&driver.version);
        is_new.then(|| DriverChange { driver: Some(driver.clone()), before, error: None })
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::Driver;
    use gpush_nvml::{DriverError, ErrorKind};

    use super::*;

    fn serving(version: &str) -> Status {
        let driver = Driver {
            version: version.to_owned(),
            nvml: String::new(),
            cuda: String::new(),
            library: String::new(),
            simulated: true,
        };
        Status { worker: Some(1), driver: Some(driver), ..Status::default() }
    }

    #[test]
    fn a_driver_that_appears_vanishes_or_is_another_is_told_once() {
        let mut seen = DriverSeen::default();
        let gone =
            Status { worker: None, failure: Some(DriverError::new(ErrorKind::LibraryNotFound, "x")), ..serving("1") };
        let mut told = Vec::new();
        for status in [
            Status::default(),
            serving("1"),
            serving("1"),
            // A worker that was ended and is started anew.
            Status { worker: None, ..serving("1") },
            serving("1"),
            gone.clone(),
            gone,
            serving("1"),
            serving("2"),
        ] {
            told.push(seen.difference(&status).map_or_else(String::new, |change| {
                format!("{:?} > {:?}", change.before, change.driver.map(|driver| driver.version))
            }));
        }
        assert_eq!(
            told,
            [
                "",
                "None > Some(\"1\")",
                "",
                "",
                "",
                "Some(\"1\") > None",
                "",
                "Some(\"1\") > Some(\"1\")",
                "Some(\"1\") > Some(\"2\")"
            ]
        );
    }
}
