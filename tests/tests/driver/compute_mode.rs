//! Compute mode through the driver layer. gpush reads the mode with every reading, sets the mode,
//! and reads it back. In other tests, the driver refuses a change, executes it late or loses it, or
//! a session does not show the change.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use std::time::Duration;

use gpush_api::{Code, ComputeMode};
use gpush_nvml::{ErrorKind, Hardware, Settled};
use gpush_tests::{
    driver::{hardware, options, uuids},
    host::Host,
};

/// Three GPUs: one with MIG mode off, one with MIG mode on, and one without MIG.
const THREE: &str = "
    [[gpu]]
    model = \"a100-80\"
    mig = false
    [[gpu]]
    model = \"h100-80-sxm\"
    [[gpu]]
    model = \"t4\"
";

async fn mode(hardware: &Hardware, uuid: &str) -> Option<ComputeMode> {
    hardware.read(uuid).await.unwrap().compute_mode
}

fn set_calls(host: &Host) -> Vec<(Option<u32>, String, u32)> {
    let calls = host.trace().into_iter().filter(|call| call.function == "nvmlDeviceSetComputeMode");
    calls.map(|call| (call.gpu, call.arguments, call.rc)).collect()
}

#[tokio::test]
async fn compute_mode_is_read_set_and_read_back() {
    let host = Host::up(THREE);
    let hardware = hardware(&host);
    let list = uuids(&hardware).await;
    host.start_trace();
    for uuid in &list {
        assert_eq!(mode(&hardware, uuid).await, Some(ComputeMode::Default));
    }
    // The driver sets the mode although the GPU is in use.
    host.process("--gpu 0");
    for wanted in [ComputeMode::ExclusiveProcess, ComputeMode::Prohibited, ComputeMode::Default] {
        for uuid in [&list[0], &list[2]] {
            hardware.set_compute_mode(uuid, wanted).await.unwrap();
            assert_eq!(mode(&hardware, uuid).await, Some(wanted));
        }
    }
    let values: Vec<_> = set_calls(&host).into_iter().map(|(gpu, value, rc)| (gpu.unwrap(), value, rc)).collect();
    let expected = [3, 2, 0].map(|value| [0, 2].map(|gpu| (gpu, format!("value={value}"), 0)));
    assert_eq!(values, expected.concat());
    assert_eq!(hardware.status().started, 1);
}

#[tokio::test]
async fn reading_succeeds_without_compute_mode() {
    let host = Host::up("dgx-a100");
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    host.fault("nvmlDeviceGetComputeMode --gpu 0 --rc NOT_SUPPORTED");
    let reading = hardware.read(&uuid).await.unwrap();
    assert_eq!((reading.compute_mode, reading.warnings.as_slice()), (None, [].as_slice()));
    host.clear_faults();
    host.fault("nvmlDeviceGetComputeMode --gpu 0 --rc UNKNOWN");
    let reading = hardware.read(&uuid).await.unwrap();
    assert_eq!(reading.compute_mode, None);
    let [warning] = reading.warnings.as_slice() else { panic!("{:?}", reading.warnings) };
    assert_eq!(warning.part, gpush_nvml::ReadingPart::ComputeMode);
    assert!(warning.error.contains("nvmlDeviceGetComputeMode") && warning.error.contains(&uuid), "{warning:?}");
}

#[tokio::test]
async fn refused_compute_mode_is_reported_and_unchanged() {
    let host = Host::up(THREE);
    let hardware = hardware(&host);
    let list = uuids(&hardware).await;
    let mig = hardware.set_compute_mode(&list[1], ComputeMode::ExclusiveProcess).await.unwrap_err();
    assert_eq!((&mig.kind, mig.gpu.as_deref()), (&ErrorKind::NotSupported, Some(list[1].as_str())));
    assert!(mig.to_string().contains("EXCLUSIVE_PROCESS"), "{mig}");
    assert_eq!(mode(&hardware, &list[1]).await, Some(ComputeMode::Default));
    let old = hardware.set_compute_mode(&list[0], ComputeMode::ExclusiveThread).await.unwrap_err();
    assert_eq!(old.kind, ErrorKind::InvalidArgument);
    for (rc, kind, code) in [
        ("NO_PERMISSION", ErrorKind::NoPermission, Code::Denied),
        ("GPU_IS_LOST", ErrorKind::GpuIsLost, Code::GpuLost),
        ("UNKNOWN", ErrorKind::Unknown, Code::DriverError),
    ] {
        host.fault(&format!("nvmlDeviceSetComputeMode --gpu 0 --rc {rc} --times 1"));
        let error = hardware.set_compute_mode(&list[0], ComputeMode::Prohibited).await.unwrap_err();
        assert_eq!((&error.kind, error.to_api().code), (&kind, code));
    }
    assert_eq!(mode(&hardware, &list[0]).await, Some(ComputeMode::Default));
    let gone = hardware.set_compute_mode("GPU-none", ComputeMode::Default).await.unwrap_err();
    assert_eq!(gone.kind, ErrorKind::GpuNotFound);
}

#[tokio::test]
async fn late_compute_mode_change_is_found() {
    let host = Host::up(THREE);
    let mut options = options(&host);
    options.deadlines.change = Duration::from_millis(300);
    options.deadlines.grace = Duration::from_secs(60);
    let hardware = Hardware::start(options);
    let uuid = uuids(&hardware).await.remove(0);
    host.fault("nvmlDeviceSetComputeMode --gpu 0 --delay-ms 1200 --times 1");
    let error = hardware.set_compute_mode(&uuid, ComputeMode::ExclusiveProcess).await.unwrap_err();
    assert!(error.may_land(), "{error}");
    assert_eq!(hardware.read(&uuid).await.unwrap_err().kind, ErrorKind::Unsettled);
    assert_eq!(hardware.settle(&uuid).await, Settled::Late(Ok(())));
    assert_eq!(mode(&hardware, &uuid).await, Some(ComputeMode::ExclusiveProcess));
}

#[tokio::test]
async fn hung_compute_mode_change_leaves_other_gpus_served() {
    let host = Host::up(THREE);
    let mut options = options(&host);
    options.deadlines.read = Duration::from_secs(5);
    options.deadlines.change = Duration::from_millis(700);
    options.deadlines.grace = Duration::from_millis(300);
    let hardware = Hardware::start(options);
    let list = uuids(&hardware).await;
    host.fault("nvmlDeviceSetComputeMode --gpu 0 --hang");
    assert!(hardware.set_compute_mode(&list[0], ComputeMode::Prohibited).await.unwrap_err().may_land());
    hardware.set_compute_mode(&list[2], ComputeMode::Prohibited).await.unwrap();
    assert!(matches!(hardware.settle(&list[0]).await, Settled::Gone | Settled::Nothing));
    host.clear_faults();
    assert_eq!(mode(&hardware, &list[0]).await, Some(ComputeMode::Default));
}

#[tokio::test]
async fn worker_death_in_compute_mode_change_is_resolved_by_reading() {
    let host = Host::up(THREE);
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    for (when, landed) in [("before", ComputeMode::Default), ("after", ComputeMode::Prohibited)] {
        host.fault(&format!("nvmlDeviceSetComputeMode --gpu 0 --kill {when} --times 1"));
        let error = hardware.set_compute_mode(&uuid, ComputeMode::Prohibited).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::WorkerDied { may_have_landed: true }, "{when}: {error}");
        assert_eq!(mode(&hardware, &uuid).await, Some(landed), "{when}");
    }
}

#[tokio::test]
async fn compute_mode_shown_only_in_fresh_session_is_success() {
    let host = Host::up(THREE);
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    host.fault("nvmlDeviceGetComputeMode --mutate stale");
    hardware.set_compute_mode(&uuid, ComputeMode::ExclusiveProcess).await.unwrap();
    assert_eq!(hardware.status().started, 2, "the worker was restarted");
    host.clear_faults();
    assert_eq!(mode(&hardware, &uuid).await, Some(ComputeMode::ExclusiveProcess));
}

#[tokio::test]
async fn compute_mode_success_without_effect_is_failure() {
    let host = Host::up(THREE);
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    // With this fault, the call returns success but has no effect.
    host.fault("nvmlDeviceSetComputeMode --rc SUCCESS");
    let error = hardware.set_compute_mode(&uuid, ComputeMode::ExclusiveProcess).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotReflected, "{error}");
    assert!(error.to_string().contains("EXCLUSIVE_PROCESS was set, but the mode is DEFAULT"), "{error}");
}

#[tokio::test]
async fn compute_mode_lost_at_reset_or_reboot_is_read() {
    let host = Host::up(THREE);
    let hardware = hardware(&host);
    let list = uuids(&hardware).await;
    for lose in ["restart", "reset", "reboot"] {
        hardware.set_compute_mode(&list[0], ComputeMode::ExclusiveProcess).await.unwrap();
        hardware.pause().await.unwrap();
        match lose {
            "restart" => {}
            "reset" => drop(host.sim("reset", &["--gpu", "0"])),
            _ => drop(host.sim::<&str>("reboot", &[])),
        }
        hardware.unpause();
        let kept = if lose == "restart" { ComputeMode::ExclusiveProcess } else { ComputeMode::Default };
        assert_eq!(mode(&hardware, &list[0]).await, Some(kept), "{lose}: persistence mode is on");
    }
    hardware.set_compute_mode(&list[0], ComputeMode::ExclusiveProcess).await.unwrap();
    let output = host.command(host.dir().join("bin/nvidia-smi")).args(["-i", "0", "-pm", "0"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(mode(&hardware, &list[0]).await, Some(ComputeMode::ExclusiveProcess), "the worker has it open");
    hardware.restart().await.unwrap();
    assert_eq!(mode(&hardware, &list[0]).await, Some(ComputeMode::Default));
}
