//! Time-sliced GPUs: gpushd sets, corrects and restores the time-slice level and the compute mode, also after
//! `nvidia-smi` has failed.

use std::{sync::Arc, time::Duration};

use gpush_api::{ComputeMode, Gpu, Health, Operation, OperationState, TimesliceLevel, TimesliceState, TimesliceView};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::{InProcess, host::ScriptedHost};

/// A config in which the first and the last GPU have long time slices and permit one process at a time.
const LONG: &str = "[[gpu]]\nmatch = [\"0\", \"2\"]\nmode = \"timeslice\"\n\
    timeslice = { replicas = 1, level = \"long\", compute_mode = \"exclusive_process\" }\n";
/// A config without time-sliced GPUs.
const EXCLUSIVE: &str = "[[gpu]]\nmatch = [\"0\", \"2\"]\nmode = \"exclusive\"\n";

const SET: [(TimesliceLevel, ComputeMode); 3] = [
    (TimesliceLevel::Long, ComputeMode::ExclusiveProcess),
    (TimesliceLevel::Default, ComputeMode::Default),
    (TimesliceLevel::Long, ComputeMode::ExclusiveProcess),
];
const NOT_SET: [(TimesliceLevel, ComputeMode); 3] = [(TimesliceLevel::Default, ComputeMode::Default); 3];

/// Returns a host with three GPUs whose MIG mode is off.
fn three() -> Arc<ScriptedHost> {
    let world = ScriptedHost::new("dgx-h100", 3);
    for gpu in 0..3 {
        world.gpus.alter(gpu, |reading| reading.mig.as_mut().expect("MIG").set_mode(false, false));
    }
    world
}

impl ScriptedHost {
    /// Returns the level and the compute mode of each GPU.
    fn sliced(&self) -> [(TimesliceLevel, ComputeMode); 3] {
        [0, 1, 2].map(|gpu| (self.smi.level(gpu), self.gpus.compute_mode(gpu).expect("a mode")))
    }
}

impl InProcess {
    async fn sliced_become(&self, expected: [(TimesliceLevel, ComputeMode); 3]) {
        self.until("the levels and compute modes", async || {
            // A reading shows what another program has changed.
            self.gpus().await;
            (self.host.sliced() == expected).then_some(())
        })
        .await;
    }

    /// Waits until the API shows that the time-sliced GPUs have their desired settings.
    async fn levels_are_kept(&self) {
        let is_kept = |gpu: &Gpu| {
            gpu.drift.is_empty() && gpu.timeslice.as_ref().is_none_or(|turns| turns.level == Some(TimesliceLevel::Long))
        };
        self.until("the desired level on each GPU", async || self.gpus().await.iter().all(is_kept).then_some(())).await;
    }

    async fn sliced(&self, gpu: usize) -> TimesliceView {
        self.gpus().await.remove(gpu).timeslice.expect("the GPU is time-sliced")
    }

    /// Waits until `is` is true for a time-sliced GPU.
    async fn sliced_becomes(&self, gpu: usize, what: &str, is: impl Fn(&TimesliceView) -> bool) -> TimesliceView {
        self.until(what, async || self.gpus().await.remove(gpu).timeslice.filter(&is)).await
    }

    /// Returns what health reports, as one text.
    async fn troubles(&self) -> String {
        let health: Health = self.get("/v1/health").await;
        health.errors.iter().map(|one| format!("{}: {}; ", one.message, one.causes.join("; "))).collect()
    }

    async fn trouble_with(&self, words: &str) {
        self.until(words, async || self.troubles().await.contains(words).then_some(())).await;
    }
}

#[test]
fn level_is_set_at_start_and_not_again_after_a_restart() {
    let world = three();
    world.run_until(LONG, async |host| {
        host.levels_are_kept().await;
        assert_eq!(host.host.sliced(), SET);
        let calls = host.host.smi.take_calls();
        assert_eq!(calls.iter().filter(|call| call.contains("--set-timeslice 3")).count(), 2, "{calls:?}");
        assert_eq!(calls.last().map(String::as_str), Some("compute-policy -l"), "read back: {calls:?}");
        let view = host.sliced(0).await;
        assert_eq!((view.replicas, view.wanted, view.state), (1, TimesliceLevel::Long, TimesliceState::Known));
        let (since, read_at) = (view.since.expect("a time"), view.read_at.expect("a time"));
        assert!(since <= read_at && view.reason.is_none(), "{view:?}");
        let gpus = host.gpus().await;
        assert_eq!((gpus[0].compute_mode, &gpus[1].timeslice), (Some(ComputeMode::ExclusiveProcess), &None));
        assert_eq!(host.troubles().await, "");
        // A read of the GPUs reads no level. A reload does, and the level keeps its time.
        assert!(host.host.smi.take_calls().is_empty());
        let again = host
            .until("the level is read again", async || {
                host.reload(LONG).await;
                Some(host.sliced(0).await).filter(|view| view.read_at > Some(read_at))
            })
            .await;
        assert_eq!(again.since, Some(since));
        host.host.smi.take_calls();
        host.gpus.take_changes();
    });
    world.run_until(LONG, async |host| {
        host.levels_are_kept().await;
        let calls = host.host.smi.take_calls();
        assert!(calls.iter().all(|call| call == "compute-policy -l"), "nothing differs: {calls:?}");
        assert!(host.gpus.take_changes().is_empty());
    });
}

#[test]
fn forgotten_level_is_set_again() {
    let world = three();
    let forget = |world: &ScriptedHost| {
        for gpu in 0..3 {
            world.smi.set_level(gpu, TimesliceLevel::Default);
            world.gpus.alter(gpu, |reading| reading.compute_mode = Some(ComputeMode::Default));
        }
    };
    world.run_until(LONG, async |host| host.levels_are_kept().await);
    forget(&world);
    world.reboot();
    world.run_until(LONG, async |host| {
        host.sliced_become(SET).await;
        host.levels_are_kept().await;
        // Without persistence mode, the driver loses the settings when the last process closes the GPU.
        host.post::<Value>("/v1/maintenance/enter", &json!({})).await.expect("maintenance");
        forget(&host.host);
        host.post::<Value>("/v1/maintenance/leave", &json!({})).await.expect("it ends");
        host.sliced_become(SET).await;
        host.levels_are_kept().await;
    });
}

/// gpushd notices within a minute that another program has changed a level, and after a reload at once.
#[test]
fn foreign_level_and_compute_mode_are_repaired() {
    three().run_until(LONG, async |host| {
        host.levels_are_kept().await;
        host.host.smi.set_level(0, TimesliceLevel::Default);
        host.gpus.alter(2, |reading| reading.compute_mode = Some(ComputeMode::Default));
        host.host.smi.take_calls();
        host.reload(LONG).await;
        host.sliced_become(SET).await;
        host.levels_are_kept().await;
        let calls = host.host.smi.take_calls();
        assert_eq!(calls.iter().filter(|call| call.contains("--set-timeslice 3")).count(), 1, "{calls:?}");
    });
}

/// While nothing changes, gpushd reads the levels once in each interval, and notices that another program has changed a
/// level.
#[test]
fn levels_are_read_once_in_each_interval() {
    let world = three();
    *world.level_interval.lock() = Duration::from_millis(200);
    world.run_until(LONG, async |host| {
        host.levels_are_kept().await;
        let begun = std::time::Instant::now();
        host.host.smi.take_calls();
        host.host.smi.set_level(0, TimesliceLevel::Default);
        host.until("the level is set again", async || (host.host.sliced() == SET).then_some(())).await;
        host.until("the level is read back", async || {
            // A read of the GPUs reads no level.
            host.gpus().await;
            host.sliced(0).await.level.filter(|level| *level == TimesliceLevel::Long)
        })
        .await;
        let calls = host.host.smi.take_calls();
        let lists = calls.iter().filter(|call| *call == "compute-policy -l").count();
        let intervals = usize::try_from(begun.elapsed().as_millis() / 200).expect("a small number");
        assert!(lists <= intervals + 2, "{intervals} intervals, and read back: {calls:?}");
    });
}

#[test]
fn leaving_timeslice_restores_level_and_compute_mode() {
    let world = three();
    world.run_until(LONG, async |host| {
        host.levels_are_kept().await;
        host.reload(EXCLUSIVE).await;
        host.sliced_become(NOT_SET).await;
        host.until("no GPU is time-sliced", async || {
            host.gpus().await.iter().all(|gpu| gpu.timeslice.is_none()).then_some(())
        })
        .await;
        host.reload(LONG).await;
        host.levels_are_kept().await;
    });
    // The next gpushd must also restore the settings. It need not read them first, because the record shows which settings
    // were applied.
    assert_eq!(world.sliced(), SET);
    world.run_until(EXCLUSIVE, async |host| host.sliced_become(NOT_SET).await);
    // If another program has set a level since then, gpushd keeps this level.
    world.smi.set_level(0, TimesliceLevel::Short);
    world.smi.take_calls();
    world.run_until(EXCLUSIVE, async |host| {
        host.gpus().await;
        host.get::<Value>("/v1/health").await;
    });
    assert!(world.smi.take_calls().iter().all(|call| !call.contains("set")));
    assert_eq!(world.smi.level(0), TimesliceLevel::Short);
}

/// Another program sets a level while gpushd does not run. The next gpushd has no rule for the GPU, so it keeps the level.
#[test]
fn level_of_another_program_is_kept_when_time_slicing_ends() {
    let world = three();
    let levels = |world: &ScriptedHost| world.sliced().map(|(level, _)| level);
    let (long, short, default) = (TimesliceLevel::Long, TimesliceLevel::Short, TimesliceLevel::Default);
    world.run_until(&LONG.replace("exclusive_process", "keep"), async |host| host.levels_are_kept().await);
    world.smi.set_level(0, short);
    // gpushd handles the GPUs in their order.
    let restored = async |host: &InProcess| {
        host.until("GPU 2 is restored", async || (host.host.smi.level(2) == default).then_some(())).await;
    };
    world.run_until(EXCLUSIVE, async |host| restored(host).await);
    assert_eq!(levels(&world), [short, default, default]);
    // gpushd has forgotten its level, so it also keeps the same level if another program sets it.
    world.smi.set_level(0, long);
    world.run_until(EXCLUSIVE, async |host| {
        host.reload(EXCLUSIVE).await;
        assert_eq!(host.troubles().await, "");
    });
    assert_eq!(levels(&world), [long, default, default]);
}

/// While another task changes a GPU, gpushd sets no level on it. It does so as soon as that task has ended.
#[test]
fn level_of_a_busy_gpu_is_set_afterwards() {
    let world = three();
    *world.level_interval.lock() = Duration::from_secs(3600);
    world.gpus.hold("setting the compute mode", 0);
    world.smi.hold();
    world.run_until(LONG, async |host| {
        // gpushd reads the levels only when the other task has begun.
        host.until_held().await;
        host.host.smi.release();
        host.sliced_becomes(2, "the level of the other GPU", |view| view.level == Some(TimesliceLevel::Long)).await;
        assert_eq!(host.host.smi.level(0), TimesliceLevel::Default);
        host.gpus.release();
        host.sliced_become(SET).await;
    });
}

#[test]
fn rule_that_keeps_the_compute_mode_restores_the_previous_one() {
    three().run_until(LONG, async |host| {
        host.levels_are_kept().await;
        host.reload(&LONG.replace("exclusive_process", "keep")).await;
        let long = (TimesliceLevel::Long, ComputeMode::Default);
        host.sliced_become([long, NOT_SET[1], long]).await;
        // The mode that an administrator sets from now on stays.
        host.gpus.alter(0, |reading| reading.compute_mode = Some(ComputeMode::Prohibited));
        host.reload(&LONG.replace("exclusive_process", "keep").replace("long", "short")).await;
        let short = TimesliceLevel::Short;
        let expected = [(short, ComputeMode::Prohibited), NOT_SET[1], (short, ComputeMode::Default)];
        host.sliced_become(expected).await;
    });
}

#[test]
fn failed_change_still_restores_earlier_settings() {
    let world = three();
    world.run_until(LONG, async |host| {
        host.levels_are_kept().await;
        for gpu in [0, 2] {
            host.host.smi.fail_set(gpu, "Unknown Error");
            host.gpus.fail("setting the compute mode", u32::try_from(gpu).unwrap(), 1000, ErrorKind::Unknown);
        }
        host.reload(&LONG.replace("long", "short").replace("exclusive_process", "prohibited")).await;
        host.trouble_with("time-slice level `short`").await;
        host.trouble_with("compute mode").await;
    });
    // gpushd records which level it is going to set. So the next gpushd restores the settings.
    world.run_until(EXCLUSIVE, async |host| {
        host.until("neither GPU is restored", async || (!host.troubles().await.is_empty()).then_some(())).await;
        assert_eq!(host.host.sliced(), SET);
        host.gpus.clear_faults();
        host.host.smi.clear_faults();
        // At the next reload, gpushd retries immediately.
        host.reload(EXCLUSIVE).await;
        host.sliced_become(NOT_SET).await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpu_in_mig_mode_is_drift_and_untouched() {
    let rule = "[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\n\
        timeslice = { level = \"long\", compute_mode = \"exclusive_process\" }\n";
    let host = InProcess::start("dgx-h100", 1, rule).await;
    host.sliced_becomes(0, "a reason", |view| view.reason.is_some()).await;
    let gpu = host.gpus().await.remove(0);
    assert_eq!(gpu.drift, ["MIG mode is on, but mode `timeslice` needs the whole GPU"]);
    let view = gpu.timeslice.expect("a view");
    assert_eq!((view.state, view.level), (TimesliceState::Unknown, None));
    assert!(view.reason.expect("a reason").contains("MIG mode is on"));
    assert!(host.host.smi.take_calls().is_empty() && host.gpus.take_changes().is_empty());
}

/// The driver reports that the GPU has no levels, as for a Volta or a P4.
#[test]
fn gpu_without_levels_is_reported_and_polled_once() {
    let world = three();
    world.smi.fail_list("Not Supported");
    world.run_until(LONG, async |host| {
        host.sliced_becomes(0, "unsupported", |view| view.state == TimesliceState::Unsupported).await;
        let gpu = host.gpus().await.remove(0);
        assert_eq!(gpu.drift, ["the GPU has no time-slice levels, but the config has level `long`"]);
        assert!(gpu.timeslice.expect("a view").reason.expect("a reason").contains("Turing"));
        assert_eq!(host.host.smi.take_calls().len(), 1);
        assert_eq!(host.troubles().await, "", "it is no fault");
        host.compute_mode_is_exclusive(0).await;
        // For this GPU, the driver reports only at a change that the GPU has no levels.
        host.host.smi.clear_faults();
        host.host.smi.fail_set(0, "Not Supported");
        host.reload(LONG).await;
        host.sliced_becomes(2, "the other GPU", |view| view.level == Some(TimesliceLevel::Long)).await;
        assert_eq!(host.sliced(0).await.state, TimesliceState::Unsupported);
    });
}

impl InProcess {
    async fn compute_mode_is_exclusive(&self, gpu: usize) {
        let is = || self.gpus.compute_mode(gpu) == Some(ComputeMode::ExclusiveProcess);
        self.until("the compute mode is set", async || is().then_some(())).await;
    }
}

#[test]
fn nvidia_smi_failures_are_reported_until_fixed() {
    let world = three();
    world.smi.fail_set(0, "Unknown Error");
    world.run_until(LONG, async |host| {
        host.sliced_becomes(2, "the other GPU", |view| view.level == Some(TimesliceLevel::Long)).await;
        let view = host.sliced_becomes(0, "why not", |view| view.reason.is_some()).await;
        assert_eq!((view.state, view.level), (TimesliceState::Known, Some(TimesliceLevel::Default)));
        assert!(view.reason.as_ref().expect("a reason").contains("Unknown Error"), "{view:?}");
        let drift = host.gpus().await.remove(0).drift;
        assert_eq!(drift, ["the time-slice level is `default`, but the config says `long`"]);
        host.trouble_with("does not have the time-slice level `long`").await;
        // nvidia-smi reports success, but the level does not change.
        host.host.smi.fail_set(0, "");
        host.reload(LONG).await;
        host.trouble_with("reported that the level `long` was set, but the level is `default`").await;
        // nvidia-smi cannot read levels.
        host.host.smi.clear_faults();
        host.host.smi.fail_list("Unknown Error");
        host.reload(LONG).await;
        host.sliced_becomes(2, "unknown", |view| view.state == TimesliceState::Unknown).await;
        host.trouble_with("Unknown Error").await;
        // nvidia-smi is missing, or gpushd does not trust it.
        host.reload(&format!("[mode_change]\nnvidia_smi = \"/no/such/nvidia-smi\"\n{LONG}")).await;
        host.trouble_with("gpushd does not run /no/such/nvidia-smi").await;
        assert!(host.sliced(0).await.reason.expect("a reason").contains("/no/such/nvidia-smi"));
        // nvidia-smi works again.
        host.host.smi.clear_faults();
        host.reload(LONG).await;
        host.levels_are_kept().await;
        assert_eq!((host.host.sliced(), host.troubles().await), (SET, String::new()));
    });
}

/// A call that hangs delays neither the compute modes nor requests.
#[test]
fn late_nvidia_smi_is_reported_and_delays_nothing() {
    let world = three();
    world.smi.hold();
    world.run_until(LONG, async |host| {
        host.compute_mode_is_exclusive(0).await;
        assert_eq!(host.gpus().await.len(), 3);
        host.host.smi.clear_faults();
        host.levels_are_kept().await;
        host.host.smi.time_out();
        host.reload(LONG).await;
        host.trouble_with("did not end in time").await;
        host.sliced_becomes(0, "unknown", |view| view.state == TimesliceState::Unknown).await;
        host.host.smi.clear_faults();
        host.reload(LONG).await;
        host.levels_are_kept().await;
    });
}

#[test]
fn gpu_with_recorded_level_is_not_unsupported() {
    let world = three();
    world.run_until(LONG, async |host| {
        host.levels_are_kept().await;
        host.host.smi.fail_list("Not Supported");
        host.reload(LONG).await;
        let view = host.sliced_becomes(0, "unknown", |view| view.state == TimesliceState::Unknown).await;
        assert!(view.reason.as_ref().expect("a reason").contains("had one before"), "{view:?}");
        host.trouble_with("does not have the time-slice level `long`").await;
        host.host.smi.clear_faults();
        host.reload(LONG).await;
        host.levels_are_kept().await;
    });
    // gpushd has recorded the level that it applied. So even after a restart, gpushd knows that the GPU has levels, although
    // nvidia-smi reports that it has none.
    world.smi.fail_list("Not Supported");
    world.run_until(EXCLUSIVE, async |host| {
        host.trouble_with("time-slice level `default`").await;
        assert_eq!(host.host.smi.level(0), TimesliceLevel::Long);
        host.host.smi.clear_faults();
        host.reload(EXCLUSIVE).await;
        host.sliced_become(NOT_SET).await;
        host.until("no problem", async || host.troubles().await.is_empty().then_some(())).await;
    });
}

const MIG: &str = "mode = \"mig\"\nlayout = [\"3g.40gb*2\"]";
const MPS: &str = "mode = \"mps\"";
const SLICED: &str =
    "mode = \"timeslice\"\ntimeslice = { replicas = 1, level = \"long\", compute_mode = \"exclusive_process\" }";

fn rule(how: &str) -> String {
    format!("[[gpu]]\nmatch = [\"0\"]\n{how}\n")
}

impl ScriptedHost {
    /// Returns whether the GPU has what its rule wants: level, compute mode, layout, and number of MPS daemons.
    fn has(&self, how: &str) -> bool {
        let state =
            (self.smi.level(0), self.gpus.compute_mode(0), self.gpus.instances(0).len(), self.daemons.running());
        let (default, exclusive) = (Some(ComputeMode::Default), Some(ComputeMode::ExclusiveProcess));
        state
            == match how {
                SLICED => (TimesliceLevel::Long, exclusive, 0, 0),
                MPS => (TimesliceLevel::Default, exclusive, 0, 1),
                _ => (TimesliceLevel::Default, default, 2, 0),
            }
    }
}

/// An operation starts when gpushd has removed earlier settings, and ends when gpushd has read back the new ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operation_ends_when_level_and_compute_mode_are_set() {
    let host = InProcess::start("dgx-h100", 1, &rule(SLICED)).await;
    host.apply_rules(&["0"]).await;
    for how in [MPS, SLICED, MIG, SLICED, MPS, MIG, MPS, SLICED] {
        host.reload(&rule(how)).await;
        let operation = host.apply_rules(&["0"]).await;
        // Check immediately: after the end of the operation, nothing may change.
        assert!(host.host.has(how), "{how}: {:?} {:?}", host.host.smi.level(0), host.gpus.instances(0));
        assert_eq!(operation.plans[0].sets_timeslice(), how == SLICED, "{how}");
        assert_eq!(operation.notes, [] as [String; 0], "{how}");
        assert_eq!(host.gpus().await[0].drift, [] as [String; 0], "{how}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_level_is_reported_and_rolls_nothing_back() {
    let host = InProcess::start("dgx-h100", 1, &rule(MIG)).await;
    host.apply_rules(&["0"]).await;
    host.host.smi.fail_set(0, "Unknown Error");
    host.reload(&rule(SLICED)).await;
    let operation: Operation = host.apply_rules(&["0"]).await;
    assert_eq!(operation.state, OperationState::Done);
    assert!(operation.notes.iter().any(|note| note.contains("level")), "{operation:#?}");
    assert_eq!(host.host.smi.level(0), TimesliceLevel::Default);
    assert_eq!(host.gpus.compute_mode(0), Some(ComputeMode::ExclusiveProcess));
    assert_eq!(host.gpus().await[0].mig.as_ref().map(|mig| mig.enabled), Some(false));
}
