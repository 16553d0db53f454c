//! Compares readings of the driver layer with the geometry data of the host's models, and with the
//! changes that the test has made.

#![allow(clippy::unwrap_used)] // A test fails by a panic.

use gpush_api::{Architecture, GpuInstance, GpuProfile, GpuUuid, Placement, ProcessKind};
use gpush_geometry::Model;
use gpush_nvml::{ErrorKind, EventKind, Hardware};
use gpush_tests::{
    driver::{self, create, hardware, mig, options, uuids},
    host::Host,
};

fn architecture(model: &Model) -> Architecture {
    match model.architecture {
        gpush_geometry::Architecture::Pascal => Architecture::Legacy,
        gpush_geometry::Architecture::Volta => Architecture::Volta,
        gpush_geometry::Architecture::Turing => Architecture::Turing,
        gpush_geometry::Architecture::Ampere => Architecture::Ampere,
        gpush_geometry::Architecture::Ada => Architecture::Ada,
        gpush_geometry::Architecture::Hopper => Architecture::Hopper,
        gpush_geometry::Architecture::Blackwell => Architecture::Blackwell,
    }
}

fn spans(placements: &[Placement]) -> Vec<(u8, u8)> {
    placements.iter().map(|p| (p.start, p.size)).collect()
}

/// Compares every value of a profile, and the values of its compute instance profiles.
fn assert_same(profile: &GpuProfile, known: &gpush_geometry::GpuProfile, about: &str) {
    let about = format!("{about} {}", known.name);
    assert_eq!(profile.name, known.name, "{about}");
    assert_eq!(
        (profile.id, profile.index, profile.slices, profile.max, profile.memory_mib, profile.sm, profile.gfx),
        (known.id, known.index, known.slices, known.max, known.memory_mib, known.sm, known.gfx),
        "{about}"
    );
    let (e, k) = (profile.engines, known.engines);
    assert_eq!((e.copy, e.decoder, e.encoder, e.jpeg, e.ofa), (k.copy, k.decoder, k.encoder, k.jpeg, k.ofa), "{about}");
    assert_eq!(spans(&profile.placements), known.placements, "{about}");
    let compute: Vec<_> = profile
        .compute
        .iter()
        .map(|c| (c.name.as_str(), c.id, c.index, c.slices, c.max, c.sm, spans(&c.placements)))
        .collect();
    let expected: Vec<_> = known
        .compute
        .iter()
        .map(|c| (c.name.as_str(), c.id, c.index, c.slices, c.max, c.sm, c.placements.clone()))
        .collect();
    assert_eq!(compute, expected, "{about}");
}

/// Tests one GPU of each model. If no preset has a model, starts a host for this model.
#[tokio::test]
async fn reading_of_every_model_matches_its_geometry_data() {
    let (mut gpus, mut profiles, mut reported) = (0, 0, 0);
    for key in gpush_geometry::KEYS {
        let model = gpush_geometry::model(key).unwrap();
        let host = Host::up(&format!("[[gpu]]\nmodel = \"{key}\"\n"));
        let hardware = hardware(&host);
        let uuid = uuids(&hardware).await.remove(0);
        let reading = hardware.read(&uuid).await.unwrap();
        gpus += 1;
        assert!(reading.warnings.is_empty(), "{key}: {:?}", reading.warnings);
        assert_eq!(reading.identity.architecture, architecture(&model), "{key}");
        assert_eq!(reading.memory.total_mib, model.board_memory_mib, "{key}");
        let device = format!("{:04X}", reading.identity.pci_device_id());
        assert!(model.boards.iter().any(|b| b.device_id.eq_ignore_ascii_case(&device)), "{key}: {device}");
        assert_eq!(reading.mig.is_some(), model.has_mig(), "{key}");
        if !model.has_mig() {
            continue;
        }
        let side = mig(&reading);
        assert_eq!((side.memory_slices, side.compute_slices), (model.memory_slices, model.compute_slices), "{key}");
        assert_eq!(side.profiles.len(), model.gi_profiles.len(), "{key}");
        for known in &model.gi_profiles {
            let profile = side.profiles.iter().find(|p| p.id == known.id).unwrap();
            assert_same(profile, known, &format!("{key}, by rule:"));
            profiles += 1;
            assert_eq!(profile.remaining, Some(known.max), "{key} {}", known.name);
            // When a GPU instance exists, the driver itself reports the compute instance profiles.
            let made = create(&hardware, uuid.as_str(), &known.name, known.placements[0].0).await;
            let reading = hardware.read(&uuid).await.unwrap();
            let profile = mig(&reading).profiles.iter().find(|p| p.id == known.id).unwrap();
            assert_same(profile, known, &format!("{key}, reported:"));
            reported += 1;
            assert_eq!(
                mig(&reading).instances,
                std::slice::from_ref(&made),
                "{key}: the read-back of creation is a reading"
            );
            hardware.destroy_gpu_instance(&uuid, made.id).await.unwrap();
        }
    }
    println!("{gpus} models, {profiles} profiles by rule, {reported} reported by the driver");
    assert_eq!(gpus, gpush_geometry::KEYS.len());
    assert!(reported > 100);
}

#[tokio::test]
async fn every_preset_is_listed_and_read_completely() {
    let mut gpus = 0;
    for preset in gpush_geometry::PRESETS {
        let host = Host::up(preset.name);
        let hardware = hardware(&host);
        let driver = hardware.driver().await.unwrap();
        assert!(driver.simulated, "{}", preset.name);
        assert_eq!(std::path::Path::new(&driver.library), host.library());
        let keys = preset.gpus.iter().flat_map(|(key, count)| (0..*count).map(move |_| *key));
        let listed = uuids(&hardware).await;
        assert_eq!(listed.len(), keys.clone().count(), "{}", preset.name);
        let real_layout = host.show();
        // `config check --offline` uses the GPUs of the preset.
        let offline = gpush_core::preset::gpus(preset.name).unwrap();
        for (index, (uuid, key)) in listed.iter().zip(keys).enumerate() {
            let reading = hardware.read(uuid).await.unwrap();
            let shown = &real_layout["gpus"][index];
            assert_eq!(reading.identity.uuid, shown["uuid"].as_str().unwrap());
            assert_eq!(reading.identity.pci, shown["pci"].as_str().unwrap());
            assert_eq!(reading.identity.name, shown["name"].as_str().unwrap());
            let known = (&offline[index].pci, &offline[index].name);
            assert_eq!(known, (&reading.identity.pci, &reading.identity.name), "{}", preset.name);
            assert_eq!(u64::from(reading.identity.minor), shown["minor"].as_u64().unwrap());
            let model = gpush_geometry::model(key).unwrap();
            assert_eq!(reading.mig.is_some(), model.has_mig());
            gpus += 1;
        }
    }
    println!("{gpus} GPUs of {} presets", gpush_geometry::PRESETS.len());
}

#[tokio::test]
async fn instances_list_their_processes_and_memory() {
    let host = Host::up("dgx-a100");
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    let bare = create(&hardware, uuid.as_str(), "1g.10gb", 6).await;
    let full = create(&hardware, uuid.as_str(), "3g.40gb", 0).await;
    let small = hardware.create_compute_instance(&uuid, full.id, 0, None).await.unwrap();
    let (small_pid, owner_pid, client_pid) = (
        host.process(&format!("--gpu 0 --gi {} --ci {} --memory 1024", full.id, small.id)),
        host.process(&format!("--gpu 0 --gi {} --memory 64", bare.id)),
        host.process(&format!("--gpu 0 --gi {} --ci {} --kind mps --memory 200", full.id, small.id)),
    );
    let reading = hardware.read(&uuid).await.unwrap();
    assert!(reading.warnings.is_empty(), "{:?}", reading.warnings);
    let side = mig(&reading);
    let names: Vec<_> = side.instances.iter().map(|gi| (gi.profile.as_str(), gi.placement.start)).collect();
    assert_eq!(names, [("3g.40gb", 0), ("1g.10gb", 6)], "by placement");
    let (first, second) = (&side.instances[0], &side.instances[1]);
    assert_eq!(first.id, full.id);
    assert!(first.memory.unwrap().total_mib > 39_000 && first.memory.unwrap().used_mib >= 1224, "{:?}", first.memory);
    assert_eq!(first.compute[0].profile, "1c.3g.40gb");
    assert!(first.compute[0].uuid.as_ref().unwrap().as_str().starts_with("MIG-"));
    let mut processes: Vec<_> =
        first.compute[0].processes.iter().map(|p| (p.pid.unwrap(), p.kind, p.memory_mib)).collect();
    processes.sort_unstable();
    let mut expected =
        vec![(small_pid, ProcessKind::Compute, Some(1024)), (client_pid, ProcessKind::MpsClient, Some(200))];
    expected.sort_unstable();
    assert_eq!(processes, expected);
    // The reading also has the GPU instance without a compute instance, with the processes that use
    // this GPU instance.
    assert_eq!((second.id, second.compute.len(), second.memory), (bare.id, 0, None));
    assert_eq!(second.processes.iter().map(|p| p.pid.unwrap()).collect::<Vec<_>>(), [owner_pid]);
    assert_eq!(reading.processes, []);
}

#[tokio::test]
async fn processes_of_a_gpu_without_mig_are_listed() {
    let host = Host::up("mixed");
    let hardware = hardware(&host);
    let list = uuids(&hardware).await;
    let (compute, graphics) =
        (host.process("--gpu 4 --memory 300"), host.process("--gpu 4 --kind graphics --memory 5"));
    let reading = hardware.read(&list[4]).await.unwrap();
    assert_eq!(reading.identity.architecture, Architecture::Ada);
    let mut seen: Vec<_> = reading.processes.iter().map(|p| (p.kind, p.pid.unwrap(), p.memory_mib.unwrap())).collect();
    seen.sort_unstable();
    assert_eq!(seen, [(ProcessKind::Compute, compute, 300), (ProcessKind::Graphics, graphics, 5)]);
    assert_eq!(hardware.read(&list[5]).await.unwrap().processes, []);
    // An MPS server is a compute process. The driver lists the clients of the server twice: as
    // compute processes and as MPS clients. gpush lists them once, as MPS clients.
    let (server, client) =
        (host.process("--gpu 5 --kind mps-server --memory 30"), host.process("--gpu 5 --kind mps --memory 400"));
    let reading = hardware.read(&list[5]).await.unwrap();
    let mut seen: Vec<_> = reading.processes.iter().map(|p| (p.kind, p.pid.unwrap(), p.memory_mib.unwrap())).collect();
    seen.sort_unstable();
    assert_eq!(seen, [(ProcessKind::Compute, server, 30), (ProcessKind::MpsClient, client, 400)]);
}

#[tokio::test]
async fn instance_of_unknown_profile_is_shown() {
    let host = Host::up("dgx-a100");
    let first = hardware(&host);
    let uuid = uuids(&first).await.remove(0);
    let made = create(&first, uuid.as_str(), "1g.10gb", 4).await;
    first.create_compute_instance(&uuid, made.id, 0, None).await.unwrap();
    // In the next session, the driver does not know the index of the profile 1g.10gb: the fault
    // rule makes all three versions of the query fail.
    host.fault("nvmlDeviceGetGpuInstanceProfileInfo* --gpu 0 --rc INVALID_ARGUMENT --times 3");
    let second = hardware(&host);
    let reading = second.read(&uuid).await.unwrap();
    let side = mig(&reading);
    assert!(side.profiles.iter().all(|p| p.id != made.profile_id), "the fault hit another call");
    assert_eq!(side.profiles.len(), 6);
    let instance = &side.instances[0];
    assert_eq!((instance.profile.as_str(), instance.id), ("profile 19", made.id));
    assert_eq!(instance.placement, made.placement);
    assert_eq!(instance.compute[0].profile, "profile 0");
    assert!(instance.compute[0].uuid.is_some());
}

#[tokio::test]
async fn driver_without_profile_names_gets_computed_names() {
    let host = Host::up("mixed");
    host.fault("nvmlDeviceGetGpuInstanceProfileInfoV --rc ARGUMENT_VERSION_MISMATCH");
    host.fault("nvmlGpuInstanceGetComputeInstanceProfileInfoV --rc FUNCTION_NOT_FOUND");
    let hardware = hardware(&host);
    let list = uuids(&hardware).await;
    let mut names = 0;
    for (uuid, key) in list.iter().zip(["a100-80", "a30-24", "h100-80-sxm", "h200-141"]) {
        let model = gpush_geometry::model(key).unwrap();
        for known in &model.gi_profiles {
            let made = create(&hardware, uuid.as_str(), &known.name, known.placements[0].0).await;
            let reading = hardware.read(uuid).await.unwrap();
            let profile = mig(&reading).profiles.iter().find(|p| p.id == known.id).unwrap();
            assert_same(profile, known, key);
            names += 1;
            hardware.destroy_gpu_instance(uuid, made.id).await.unwrap();
        }
    }
    println!("{names} names");
}

#[tokio::test]
async fn lost_gpu_does_not_hide_others() {
    let host = Host::up("dgx-h100");
    let hardware = hardware(&host);
    let list = uuids(&hardware).await;
    host.fault("nvmlDeviceGetMemoryInfo* --gpu 3 --mutate lose --times 1");
    let error = hardware.read(&list[3]).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::GpuIsLost, "{error}");
    assert!(error.hint().unwrap().contains("reset"), "{error}");
    for (index, listed) in hardware.list().await.unwrap().iter().enumerate() {
        match &listed.identity {
            Ok(identity) => assert_eq!(identity.uuid, list[index]),
            Err(error) => {
                assert_eq!((index, &error.kind), (3, &ErrorKind::GpuIsLost));
            }
        }
    }
    for (index, uuid) in list.iter().enumerate() {
        let reading = hardware.read(uuid).await;
        assert_eq!(reading.is_err(), index == 3, "{index}: {reading:?}");
    }
    // A GPU that never existed gives a different error.
    let error = hardware.read(&"GPU-00000000-0000-0000-0000-000000000000".into()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::GpuNotFound);
    // After a reboot, the lost GPU works again. A new session finds it.
    host.sim("reboot", &[] as &[&str]);
    hardware.restart().await.unwrap();
    assert_eq!(uuids(&hardware).await, list);
    hardware.read(&list[3]).await.unwrap();
}

/// Returns a session that began while a 3g.40gb existed. Another client has replaced this instance
/// with a 2g.20gb since then.
async fn overtaken(host: &Host) -> (Hardware, GpuUuid, GpuInstance) {
    let (other, ours) = (hardware(host), hardware(host));
    let uuid = uuids(&other).await.remove(0);
    let old = driver::create(&other, uuid.as_str(), "3g.40gb", 0).await;
    assert_eq!(mig(&ours.read(&uuid).await.unwrap()).instances, std::slice::from_ref(&old));
    other.destroy_gpu_instance(&uuid, old.id).await.unwrap();
    let new = driver::create(&other, uuid.as_str(), "2g.20gb", 4).await;
    (ours, uuid, new)
}

#[tokio::test]
async fn session_without_present_instances_is_replaced_once() {
    let host = Host::up("dgx-a100");
    let (hardware, uuid, new) = overtaken(&host).await;
    let started = hardware.status().started;
    // The list is stale, but the id of each instance gives the present one. So the session stays.
    host.fault("nvmlDeviceGetGpuInstances --gpu 0 --mutate stale");
    assert_eq!(mig(&hardware.read(&uuid).await.unwrap()).instances, std::slice::from_ref(&new));
    assert_eq!(hardware.status().started, started);
    host.fault("nvmlDeviceGetGpuInstanceById --gpu 0 --mutate stale");
    for _ in 0..3 {
        let reading = hardware.read(&uuid).await.unwrap();
        assert_eq!(mig(&reading).instances, std::slice::from_ref(&new));
        assert_eq!(hardware.status().started, started + 1);
    }
    // If a new session does not help, gpush does not start a new session for every reading.
    host.clear_faults();
    host.fault("nvmlGpuInstanceGetInfo --gpu 0 --rc INVALID_ARGUMENT");
    for _ in 0..3 {
        let error = hardware.read(&uuid).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains(&format!("GPU instance {}", new.id)), "{error}");
        assert_eq!(hardware.status().started, started + 2);
    }
    host.clear_faults();
    assert_eq!(mig(&hardware.read(&uuid).await.unwrap()).instances, [new]);
    assert_eq!(hardware.status().started, started + 2);
}

#[tokio::test]
async fn events_name_their_instances() {
    let host = Host::up("dgx-h100");
    let mut options = options(&host);
    options.events = true;
    let hardware = gpush_nvml::Hardware::start(options);
    let mut events = hardware.events();
    let list = uuids(&hardware).await;
    let made = driver::create(&hardware, list[2].as_str(), "1g.10gb", 0).await;
    host.sim("xid", &["79", "--gpu", "2", "--gi", &made.id.to_string()]);
    let event = loop {
        let event = events.recv().await.unwrap();
        if event.kind != EventKind::MigConfigChanged {
            break event;
        }
    };
    assert_eq!((event.uuid.as_str(), event.kind, event.gi), (list[2].as_str(), EventKind::Xid(79), Some(made.id)));
}

/// A GPU in MIG mode reports no utilization. If one sensor fails, only the value of this sensor is
/// absent. If other data cannot be read, the reading names them.
#[tokio::test]
async fn partial_reading_names_missing_parts_but_no_sensors() {
    let host = Host::up("dgx-a100");
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    let in_mig = hardware.read(&uuid).await.unwrap().sensors;
    assert_eq!((in_mig.utilization_percent, in_mig.memory_utilization_percent), (None, None), "{in_mig:?}");
    assert!(in_mig.temperature_c.is_some_and(|celsius| (20..100).contains(&celsius)), "{in_mig:?}");
    assert!(in_mig.power_mw < in_mig.power_limit_mw && in_mig.power_mw > Some(0), "{in_mig:?}");
    assert_eq!((in_mig.ecc_corrected, in_mig.ecc_uncorrected), (Some(0), Some(0)));
    for function in ["nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors"] {
        host.fault(&format!("{function} --gpu 0 --rc NOT_SUPPORTED"));
    }
    let reading = hardware.read(&uuid).await.unwrap();
    let left = reading.sensors;
    assert_eq!((left.temperature_c, left.power_mw, left.ecc_corrected, left.ecc_uncorrected), (None, None, None, None));
    assert_eq!((left.power_limit_mw, reading.warnings.len()), (in_mig.power_limit_mw, 0), "{reading:?}");
    host.clear_faults();

    host.fault("nvmlDeviceGetComputeRunningProcesses* --gpu 0 --rc UNKNOWN");
    let reading = hardware.read(&uuid).await.unwrap();
    assert_eq!(reading.warnings.len(), 1, "{:?}", reading.warnings);
    assert!(reading.warnings[0].error.contains("RunningProcesses"), "{:?}", reading.warnings);
    // If gpush cannot read data that a plan needs, the whole reading of the GPU fails.
    host.fault("nvmlDeviceGetGpuInstances --gpu 0 --rc UNKNOWN");
    assert_eq!(hardware.read(&uuid).await.unwrap_err().kind, ErrorKind::Unknown);
    let other = uuids(&hardware).await.remove(1);
    hardware.read(&other).await.unwrap();
}
