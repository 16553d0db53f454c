//! Changes through the driver layer. The tests check the order of the driver calls, the state that
//! is read back, the driver's errors and their messages, and wrong results of the driver.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use gpush_api::{Code, Placement};
use gpush_nvml::ErrorKind;
use gpush_tests::{
    driver::{create, hardware, mig, options, place, uuids},
    host::Host,
};

/// Returns the host's trace without pids, one call per line.
fn golden(host: &Host) -> String {
    let lines = host.trace().into_iter().map(|call| {
        let gpu = call.gpu.map_or_else(|| "-".to_owned(), |gpu| gpu.to_string());
        format!("{} {gpu} {} -> {}", call.function, call.arguments, call.rc)
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn change_makes_exactly_these_driver_calls() {
    let host = Host::up("dgx-a100");
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(1);
    host.start_trace();
    let half = create(&hardware, uuid.as_str(), "3g.40gb", 4).await;
    let quarter = create(&hardware, uuid.as_str(), "2g.20gb", 2).await;
    let one = hardware.create_compute_instance(&uuid, half.id, 0, Some(Placement { start: 2, size: 1 })).await.unwrap();
    assert_eq!(one.placement, Some(Placement { start: 2, size: 1 }));
    let whole = hardware.create_compute_instance(&uuid, quarter.id, 1, None).await.unwrap();
    assert_eq!(whole.profile, "2g.20gb");
    assert!(whole.uuid.is_some());
    hardware.destroy_compute_instance(&uuid, half.id, one.id).await.unwrap();
    hardware.destroy_gpu_instance(&uuid, half.id).await.unwrap();
    insta::assert_snapshot!(golden(&host), @r"
    nvmlDeviceCreateGpuInstanceWithPlacement 1 profile=9 placement=4:4 -> 0
    nvmlDeviceCreateGpuInstanceWithPlacement 1 profile=14 placement=2:2 -> 0
    nvmlGpuInstanceCreateComputeInstanceWithPlacement 1 gi=2 profile=0 placement=2:1 -> 0
    nvmlGpuInstanceCreateComputeInstance 1 gi=4 profile=1 -> 0
    nvmlComputeInstanceDestroy 1 gi=2 ci=0 -> 0
    nvmlGpuInstanceDestroy 1 gi=2 -> 0
    ");
    let reading = hardware.read(&uuid).await.unwrap();
    let left: Vec<_> = mig(&reading).instances.iter().map(|gi| (gi.id, gi.compute.len())).collect();
    assert_eq!(left, [(quarter.id, 1)]);
}

#[tokio::test]
async fn refusals_name_driver_code_and_object() {
    let host = Host::up("dgx-a100");
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    let half = create(&hardware, uuid.as_str(), "3g.40gb", 0).await;
    let ci = hardware.create_compute_instance(&uuid, half.id, 2, None).await.unwrap();
    host.process(&format!("--gpu 0 --gi {} --ci {}", half.id, ci.id));
    let (profile_id, placement) = place(&hardware, uuid.as_str(), "4g.40gb", 0).await;
    let cases = [
        (
            hardware.create_gpu_instance(&uuid, profile_id, placement).await.map(|_| ()),
            ErrorKind::InsufficientResources,
        ),
        (hardware.create_gpu_instance(&uuid, 4711, placement).await.map(|_| ()), ErrorKind::InvalidArgument),
        (hardware.destroy_compute_instance(&uuid, half.id, ci.id).await, ErrorKind::InUse),
        (hardware.destroy_gpu_instance(&uuid, half.id).await, ErrorKind::InUse),
        (hardware.destroy_gpu_instance(&uuid, 13).await, ErrorKind::NotFound),
        (hardware.destroy_compute_instance(&uuid, half.id, 5).await, ErrorKind::NotFound),
        (hardware.create_compute_instance(&uuid, 13, 0, None).await.map(|_| ()), ErrorKind::NotFound),
        (hardware.create_compute_instance(&uuid, half.id, 0, None).await.map(|_| ()), ErrorKind::InsufficientResources),
    ];
    for (number, (result, kind)) in cases.into_iter().enumerate() {
        let error = result.unwrap_err();
        assert_eq!(error.kind, kind, "case {number}: {error}");
        assert_eq!(error.gpu.as_deref(), Some(uuid.as_str()), "case {number}: {error}");
        assert!(error.function.starts_with("nvml") && error.detail.is_some(), "case {number}: {error}");
    }
    let list = hardware.read(&uuid).await.unwrap();
    assert_eq!(mig(&list).instances.len(), 1, "nothing has changed");

    // The worker has no permission.
    host.fault("nvmlDeviceCreateGpuInstance* --rc NO_PERMISSION");
    host.fault("nvmlDeviceSetMigMode --rc NO_PERMISSION");
    let (profile_id, placement) = place(&hardware, uuid.as_str(), "1g.10gb", 4).await;
    for error in [
        hardware.create_gpu_instance(&uuid, profile_id, placement).await.unwrap_err(),
        hardware.set_mig_mode(&uuid, false).await.unwrap_err(),
    ] {
        assert_eq!(error.kind, ErrorKind::NoPermission);
        let api = error.to_api();
        assert_eq!(api.code, Code::Denied);
        assert!(api.hint.unwrap().contains("root"));
    }
    assert_eq!(mig(&hardware.read(&uuid).await.unwrap()).instances.len(), 1, "nothing has changed");
}

#[tokio::test]
async fn mig_mode_changes_at_once_on_hopper() {
    let host = Host::up("dgx-h100");
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    let change = hardware.set_mig_mode(&uuid, false).await.unwrap();
    assert!(change.is(false) && change.activation.is_none(), "{change:?}");
    // A GPU with MIG mode off shows its profiles, but no capacity.
    let reading = hardware.read(&uuid).await.unwrap();
    let off = mig(&reading);
    assert!(off.is_off());
    assert_eq!((off.memory_slices, off.compute_slices, off.profiles.len()), (8, 7, 7));
    assert!(off.profiles.iter().all(|p| p.remaining.is_none()));
    assert_eq!(off.instances, []);

    host.fault("nvmlDeviceSetMigMode --activation-status IN_USE --times 1");
    let change = hardware.set_mig_mode(&uuid, true).await.unwrap();
    assert!(!change.is(true), "{change:?}");
    assert!(!change.enabled, "{change:?}");
    let reason = change.activation.unwrap();
    assert_eq!(reason.kind, ErrorKind::InUse);
    assert!(reason.to_string().contains("activation status"), "{reason}");
    for _ in 0..2 {
        let change = hardware.set_mig_mode(&uuid, true).await.unwrap();
        assert!(change.is(true) && change.activation.is_none(), "{change:?}");
        let reading = hardware.read(&uuid).await.unwrap();
        assert_eq!((mig(&reading).enabled, mig(&reading).pending_mode()), (true, true));
    }
    let whole = create(&hardware, uuid.as_str(), "7g.80gb", 0).await;
    // On this GPU, a compute instance with three slices occupies four slots.
    let made =
        hardware.create_compute_instance(&uuid, whole.id, 2, Some(Placement { start: 4, size: 3 })).await.unwrap();
    assert_eq!(made.placement, Some(Placement { start: 4, size: 4 }));
}

#[tokio::test]
async fn mode_is_pending_on_ampere_and_unsupported_without_mig() {
    let host = Host::up("mixed");
    let hardware = hardware(&host);
    let list = uuids(&hardware).await;
    let change = hardware.set_mig_mode(&list[0], false).await.unwrap();
    assert!(!change.is(false), "{change:?}");
    assert!(change.enabled && !change.pending, "{change:?}");
    let reading = hardware.read(&list[0]).await.unwrap();
    assert!(mig(&reading).enabled && !mig(&reading).pending_mode());

    let error = hardware.set_mig_mode(&list[4], true).await.unwrap_err();
    assert_eq!((error.kind.clone(), error.to_api().code), (ErrorKind::NotSupported, Code::Unsupported));
    let error = hardware.create_gpu_instance(&list[4], 0, Placement { start: 0, size: 8 }).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotSupported, "{error}");
}

#[tokio::test]
async fn stale_session_is_replaced_before_a_change_fails() {
    let host = Host::up("dgx-a100");
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    let (profile_id, placement) = place(&hardware, uuid.as_str(), "2g.20gb", 2).await;
    host.fault("nvmlDeviceGetGpuInstance* --gpu 0 --mutate stale");
    let before = hardware.status().started;
    let made = hardware.create_gpu_instance(&uuid, profile_id, placement).await.unwrap();
    assert_eq!(made.placement, placement);
    assert!(hardware.status().started > before, "it was seen by a fresh session only");
    let shown = host.show();
    assert_eq!(shown["gpus"][0]["state"]["instances"].as_array().unwrap().len(), 1);
    // The session must notice that an instance was destroyed.
    hardware.destroy_gpu_instance(&uuid, made.id).await.unwrap();
    assert_eq!(host.show()["gpus"][0]["state"]["instances"].as_array().unwrap().len(), 0);
}

#[tokio::test]
async fn two_workers_see_the_same_instances() {
    let host = Host::up("dgx-h200");
    let (one, two) = (hardware(&host), gpush_nvml::Hardware::start(options(&host)));
    let uuid = uuids(&one).await.remove(7);
    two.read(&uuid).await.unwrap();
    let made = create(&one, uuid.as_str(), "1g.18gb", 3).await;
    let seen = two.read(&uuid).await.unwrap();
    assert_eq!(mig(&seen).instances, std::slice::from_ref(&made));
    two.destroy_gpu_instance(&uuid, made.id).await.unwrap();
    assert_eq!(mig(&one.read(&uuid).await.unwrap()).instances, []);
}
