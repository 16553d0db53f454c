//! Checks time-sliced GPUs after a change of the config, the driver or a GPU, and every minute while there are such
//! GPUs.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{GpuUuid, Mode};
use tokio::time::sleep_until;

use super::{
    Timeslice,
    levels::{self, Setter},
    modes::ModeTasks,
    schedule::Schedule,
    smi,
    target::{TimeslicedGpu, targets},
};
use crate::{requests::caller::Viewer, system::tasks::TaskName};

/// Keeps the settings of time-sliced GPUs until gpushd stops. `has_daemon` returns whether a GPU has an MPS daemon.
pub(crate) async fn run(timeslice: Timeslice, has_daemon: impl Fn(&GpuUuid) -> bool + Send + Sync + 'static) {
    let timeslice = &timeslice;
    let tend = async {
        smi::adopt(timeslice).await;
        let mut status = timeslice.context.hardware.watch();
        let mut tending = Reconciler::new(timeslice.context.host_services.level_interval);
        let mut snapshots = timeslice.context.state.watch();
        let mut wake = timeslice.wake.subscribe();
        loop {
            let changes = snapshots.borrow_and_update().changes;
            wake.mark_unchanged();
            tending.reconcile(timeslice, &has_daemon).await;
            let next = tending.pace.next();
            let wait = async {
                match next {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = wake.changed() => {}
                _ = snapshots.wait_for(|host| host.changes != changes) => {}
                changed = status.changed() => if changed.is_err() { break },
                () = wait => {}
                // Wait here and not in a separate task, because `mode_ended` needs exclusive access to `tending`.
                () = tending.mode_ended(timeslice) => {}
            }
        }
        // The driver supervisor has failed. This failure ends gpushd.
        timeslice.context.stopping.cancelled().await;
    };
    // The loop may be stopped at any point: every setting is recorded, so the next gpushd can continue.
    tokio::select! {
        () = timeslice.context.stopping.cancelled() => {}
        () = tend => {}
    }
}

/// What gpushd found at its last check. If a GPU or the driver is new, gpushd reads the levels at once.
#[derive(Debug, Default, PartialEq, Eq)]
struct LastCheck {
    /// The UUID of each GPU, with the number of its desired level.
    aims: BTreeSet<(GpuUuid, u8)>,
    /// How many driver workers were started so far. A new worker may have another driver.
    workers: u64,
    program: String,
}

impl LastCheck {
    fn is_new_after(&self, last: &Self) -> bool {
        (self.workers, &self.program) != (last.workers, &last.program) || !self.aims.is_subset(&last.aims)
    }
}

#[derive(Debug)]
struct Reconciler {
    pace: Schedule,
    last: LastCheck,
    modes: ModeTasks,
}

impl Reconciler {
    fn new(interval: Duration) -> Self {
        Self { pace: Schedule::new(interval), last: LastCheck::default(), modes: ModeTasks::default() }
    }

    /// Waits until gpushd must check the compute mode of a GPU again.
    async fn mode_ended(&mut self, timeslice: &Timeslice) {
        while !self.modes.ended(timeslice, &mut self.pace).await {}
    }

    /// Forgets the results of past attempts. Running attempts continue.
    fn reset(&mut self, interval: Duration) {
        (self.pace, self.last) = (Schedule::new(interval), LastCheck::default());
        self.modes.outdate();
    }

    /// Sets or removes the settings of all GPUs that are or were time-sliced.
    async fn reconcile(&mut self, timeslice: &Timeslice, has_daemon: &impl Fn(&GpuUuid) -> bool) {
        let config = timeslice.context.state.config();
        let wanted = config.rules.iter().any(|rule| rule.mode == Mode::Timeslice);
        if !wanted && !timeslice.shared_gpus.has_timeslice_settings() {
            let mut round = timeslice.context.state.begin_level_round();
            round.retain(|_| false);
            timeslice.context.state.report_levels(round);
            timeslice.forget_troubles();
            self.reset(timeslice.context.host_services.level_interval);
            return;
        }
        if timeslice.take_restart_request() {
            // Read the levels of all GPUs again, even if the driver reported no levels for a GPU.
            self.reset(timeslice.context.host_services.level_interval);
        }
        self.pace.set_periodic(true);
        if timeslice.context.state.maintenance().is_some() {
            return;
        }
        let Ok(observed) = timeslice.context.readings.host().await else { return };
        let gpus = observed.gpus(Viewer::Agent);
        let mut round = timeslice.context.state.begin_level_round();
        let aims = targets(timeslice, &mut round, &config, &gpus, has_daemon);
        self.modes.start(timeslice, &self.pace, &aims);
        let (kept, let_go): (Vec<TimeslicedGpu>, Vec<TimeslicedGpu>) =
            aims.into_iter().partition(|aim| aim.policy.is_some());
        // Leave out GPUs on which gpushd has set no level, because there is nothing to remove.
        let let_go = let_go.into_iter().filter(|aim| timeslice.shared_gpus.level(&aim.gpu.uuid).is_some());
        let aims: Vec<TimeslicedGpu> = kept.into_iter().chain(let_go).collect();
        let sight = LastCheck {
            aims: aims.iter().map(|aim| (aim.gpu.uuid.clone(), aim.level().number())).collect(),
            workers: timeslice.context.hardware.status().started,
            program: timeslice.context.host_services.nvidia_smi(&config.mode_change),
        };
        let new = sight.is_new_after(&self.last) && !aims.is_empty();
        self.last = sight;
        let some = aims.iter().any(|aim| !round.is_unsupported(&aim.gpu.uuid));
        if self.pace.is_due(new, some) {
            let busy = levels::reconcile(timeslice, &mut self.pace, &mut round, &aims, Setter::Reconciler).await;
            for uuid in busy {
                // Forget that this GPU was checked, so that gpushd checks it again when its lane is free.
                self.last.aims.retain(|(of, _)| *of != uuid);
                let timeslice = timeslice.clone();
                let tasks = timeslice.context.tasks.clone();
                tasks.once(TaskName::ReconcilerWakeup, async move {
                    drop(timeslice.context.lanes.lock(&uuid).await);
                    timeslice.wake();
                });
            }
        }
        timeslice.context.state.report_levels(round);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each reading starts a program, so gpushd must not read the levels after every change of the host.
    #[test]
    fn levels_are_read_at_once_only_for_new_gpus_levels_or_programs() {
        let check = |aims: &[(&str, u8)], workers, program: &str| LastCheck {
            aims: aims.iter().map(|(uuid, level)| ((*uuid).into(), *level)).collect(),
            workers,
            program: program.to_owned(),
        };
        let last = check(&[("GPU-0", 3), ("GPU-1", 3)], 1, "nvidia-smi");
        for (now, is_new) in [
            (check(&[("GPU-0", 3), ("GPU-1", 3)], 1, "nvidia-smi"), false),
            (check(&[("GPU-0", 3)], 1, "nvidia-smi"), false),
            (check(&[], 1, "nvidia-smi"), false),
            (check(&[("GPU-0", 1), ("GPU-1", 3)], 1, "nvidia-smi"), true),
            (check(&[("GPU-0", 3), ("GPU-2", 3)], 1, "nvidia-smi"), true),
            (check(&[("GPU-0", 3), ("GPU-1", 3)], 2, "nvidia-smi"), true),
            (check(&[("GPU-0", 3), ("GPU-1", 3)], 1, "/opt/nvidia-smi"), true),
        ] {
            assert_eq!(now.is_new_after(&last), is_new, "{now:?}");
        }
        assert!(last.is_new_after(&LastCheck::default()));
    }
}
