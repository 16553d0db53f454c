//! Compute mode through the driver layer. gpush reads the mode with every reading, sets the mode,
//! and reads it back. The driver may refuse a change or lose it, or a session does not show the
//! change. `crates/nvml/tests` has changes that are late, and a worker that hangs or dies.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use gpush_api::{Code, ComputeMode};
use gpush_nvml::{ErrorKind, Hardware};
use gpush_tests::{
    driver::{hardware, uuids},
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
    hardware.read(&uuid.into()).await.unwrap().compute_mode
}

fn set_calls(host: &Host) -> Vec<(Option<u32>, String, u32)> {
    let calls = host.trace().into_iter().filter(|call| call.function == "nvmlDeviceSetComputeMode");
    calls.map(|call| (call.gpu, call.arguments, call.rc)).collect()
}

#[tokio::test]
async fn compute_mode_is_set_and_read_back_or_refused() {
    let host = Host::up(THREE);
    let hardware = hardware(&host);
    let list = uuids(&hardware).await;
    host.start_trace();
    for uuid in &list {
        assert_eq!(mode(&hardware, uuid.as_str()).await, Some(ComputeMode::Default));
    }
    // The driver sets the mode although the GPU is in use.
    host.process("--gpu 0");
    for wanted in [ComputeMode::ExclusiveProcess, ComputeMode::Prohibited, ComputeMode::Default] {
        for uuid in [&list[0], &list[2]] {
            hardware.set_compute_mode(uuid, wanted).await.unwrap();
            assert_eq!(mode(&hardware, uuid.as_str()).await, Some(wanted));
        }
    }
    let values: Vec<_> = set_calls(&host).into_iter().map(|(gpu, value, rc)| (gpu.unwrap(), value, rc)).collect();
    let expected = [3, 2, 0].map(|value| [0, 2].map(|gpu| (gpu, format!("value={value}"), 0)));
    assert_eq!(values, expected.concat());
    assert_eq!(hardware.status().started, 1);

    // The driver refuses the change.
    let mig = hardware.set_compute_mode(&list[1], ComputeMode::ExclusiveProcess).await.unwrap_err();
    assert_eq!((&mig.kind, mig.gpu.as_deref()), (&ErrorKind::NotSupported, Some(list[1].as_str())));
    assert!(mig.to_string().contains("EXCLUSIVE_PROCESS"), "{mig}");
    assert_eq!(mode(&hardware, list[1].as_str()).await, Some(ComputeMode::Default));
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
    assert_eq!(mode(&hardware, list[0].as_str()).await, Some(ComputeMode::Default));
    let gone = hardware.set_compute_mode(&"GPU-none".into(), ComputeMode::Default).await.unwrap_err();
    assert_eq!(gone.kind, ErrorKind::GpuNotFound);
    host.clear_faults();

    // With this fault, the call returns success but has no effect.
    host.fault("nvmlDeviceSetComputeMode --rc SUCCESS");
    let error = hardware.set_compute_mode(&list[0], ComputeMode::ExclusiveProcess).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotReflected, "{error}");
    assert!(error.to_string().contains("EXCLUSIVE_PROCESS was set, but the mode is DEFAULT"), "{error}");
    host.clear_faults();

    // Only a fresh session shows the change, so the worker is restarted.
    host.fault("nvmlDeviceGetComputeMode --mutate stale");
    let started = hardware.status().started;
    hardware.set_compute_mode(&list[0], ComputeMode::ExclusiveProcess).await.unwrap();
    assert_eq!(hardware.status().started, started + 1);
    host.clear_faults();
    assert_eq!(mode(&hardware, list[0].as_str()).await, Some(ComputeMode::ExclusiveProcess));

    // A reading succeeds although the mode cannot be read.
    host.fault("nvmlDeviceGetComputeMode --gpu 0 --rc NOT_SUPPORTED");
    let reading = hardware.read(&list[0]).await.unwrap();
    assert_eq!((reading.compute_mode, reading.warnings.as_slice()), (None, [].as_slice()));
    host.clear_faults();
    host.fault("nvmlDeviceGetComputeMode --gpu 0 --rc UNKNOWN");
    let reading = hardware.read(&list[0]).await.unwrap();
    assert_eq!(reading.compute_mode, None);
    let [warning] = reading.warnings.as_slice() else { panic!("{:?}", reading.warnings) };
    assert_eq!(warning.part, gpush_nvml::ReadingPart::ComputeMode);
    assert!(
        warning.error.contains("nvmlDeviceGetComputeMode") && warning.error.contains(list[0].as_str()),
        "{warning:?}"
    );
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
        assert_eq!(mode(&hardware, list[0].as_str()).await, Some(kept), "{lose}: persistence mode is on");
    }
    hardware.set_compute_mode(&list[0], ComputeMode::ExclusiveProcess).await.unwrap();
    let output = host.command(host.dir().join("bin/nvidia-smi")).args(["-i", "0", "-pm", "0"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(mode(&hardware, list[0].as_str()).await, Some(ComputeMode::ExclusiveProcess), "the worker has it open");
    hardware.restart().await.unwrap();
    assert_eq!(mode(&hardware, list[0].as_str()).await, Some(ComputeMode::Default));
}
