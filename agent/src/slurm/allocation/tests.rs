//! Tests of what Slurm allocated to a job, and of the lease request for it.

use gpush_api::{
    ComputeInstance, GpuInstance, GpuUuid, LeaseHolder, LeaseId, LeaseKind, LeaseMember, LeaseState, MemberShare,
    Placement, TargetUuid,
};
use gpush_core::{lease::request::parse, preset};

use super::*;
use crate::state::tests::host_of;

/// Returns GPUs of the sample host that are ready. They have MIG devices, and no rule.
fn gpus(count: usize) -> Vec<Gpu> {
    let mut gpus = preset::gpus("dgx-h100").unwrap();
    gpus.truncate(count);
    for gpu in &mut gpus {
        (gpu.state, gpu.stale, gpu.processes_known, gpu.mode) = (GpuState::Ready, false, true, Mode::Exclusive);
    }
    gpus
}

/// Returns an allocation of whole GPUs that belong to Slurm.
fn whole(gpus: &[Gpu]) -> Allocation {
    let device = |gpu: &Gpu| Allocated { gpu: gpu.clone(), mig: None, owned: true, dynamic: false, job_default: None };
    Allocation { devices: gpus.iter().map(device).collect(), unknown: Vec::new() }
}

/// Returns an allocation of MIG devices of a GPU that belongs to Slurm.
fn mig(gpu: &Gpu, uuids: &[&str]) -> Allocation {
    let device = |uuid: &&str| Allocated {
        gpu: gpu.clone(),
        mig: Some((*uuid).into()),
        owned: true,
        dynamic: false,
        job_default: None,
    };
    Allocation { devices: uuids.iter().map(device).collect(), unknown: Vec::new() }
}

/// Returns the UUIDs of the GPUs that were found, and the number of unknown devices.
fn found(gpus: &[Gpu], devices: &[SlurmDevice]) -> (Vec<GpuUuid>, usize) {
    let allocation = Allocation::of(&host_of(gpus.to_vec()), gpus, devices);
    assert_eq!(allocation.has_unknown(), !allocation.unknown.is_empty());
    assert!(!allocation.is_owned(), "the GPUs have no rule");
    (allocation.gpus(), allocation.unknown.len())
}

#[test]
fn gpu_is_found_by_its_minor_number_not_its_index() {
    let mut gpus = gpus(3);
    (gpus[0].minor, gpus[1].minor, gpus[2].minor) = (2, 0, 1);
    let by_minor = |minor| found(&gpus, &[SlurmDevice::Minor(minor)]);
    assert_eq!((by_minor(0), by_minor(2)), ((vec![gpus[1].uuid.clone()], 0), (vec![gpus[0].uuid.clone()], 0)));
    assert_eq!(by_minor(3), (Vec::new(), 1));
}

#[test]
fn gpu_is_found_by_its_uuid_in_any_case() {
    let gpus = gpus(2);
    let lower = SlurmDevice::Uuid(gpus[1].uuid.as_str().to_lowercase());
    assert_eq!(found(&gpus, &[lower]), (vec![gpus[1].uuid.clone()], 0));
    assert_eq!(found(&gpus, &[SlurmDevice::Uuid("GPU-0".to_owned())]).1, 1);
}

#[test]
fn detected_index_is_the_index_of_the_driver() {
    let mut gpus = gpus(2);
    gpus.iter_mut().for_each(|gpu| gpu.mig = None);
    let detected = |devices| SlurmDevice::Detected { index: 1, devices, minors: Vec::new() };
    assert_eq!(found(&gpus, &[detected(2)]), (vec![gpus[1].uuid.clone()], 0));
    assert_eq!(found(&gpus, &[detected(3)]).1, 1, "slurmd uses another number of devices");
}

#[test]
fn gpu_that_is_not_ready_fails_the_node() {
    for (state, named, passes) in [
        (GpuState::Changing, "being changed", true),
        (GpuState::Cordoned, "cordoned", false),
        (GpuState::Degraded, "degraded", false),
        (GpuState::Held, "held", false),
        (GpuState::Unknown, "in an unknown state", false),
        (GpuState::Lost, "lost", false),
        (GpuState::Maintenance, "in maintenance", false),
    ] {
        let mut gpus = gpus(2);
        (gpus[1].state, gpus[1].reasons) = (state, vec!["why".to_owned()]);
        let error = whole(&gpus).check_node().unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (Code::Unavailable, &*format!("GPU 1 is {named}")));
        assert_eq!((error.retryable, error.causes.as_slice()), (passes, ["why".to_owned()].as_slice()), "{named}");
        assert_eq!(error.hint.as_deref(), Some("see `gpushctl gpu show 1`"));
    }
    assert_eq!(whole(&gpus(2)).check_node(), Ok(()));
}

#[test]
fn ready_gpu_without_a_current_reading_fails_for_now() {
    for is_stale in [true, false] {
        let mut gpus = gpus(1);
        (gpus[0].stale, gpus[0].processes_known) = (is_stale, is_stale);
        let error = whole(&gpus).check_node().unwrap_err();
        assert!(error.retryable && error.message.starts_with("GPU 0 is slow to answer"), "{error:?}");
    }
}

#[test]
fn unknown_device_fails_the_node_and_is_named() {
    let unknown = |device| Allocation { devices: Vec::new(), unknown: vec![device] }.check_node().unwrap_err();
    for (device, named) in [
        (SlurmDevice::Minor(9), "/dev/nvidia9"),
        (SlurmDevice::Uuid("MIG-0".to_owned()), "`MIG-0`"),
        (
            SlurmDevice::Mig { minor: 1, gpu_instance: 2, compute_instance: 3 },
            "compute instance 3 of GPU instance 2 of /dev/nvidia1",
        ),
    ] {
        let error = unknown(device);
        let message = format!("Slurm allocated {named}, which is not a device of this host");
        assert_eq!((error.code, error.message), (Code::ConfigInvalid, message));
    }
}

/// slurmd and the driver count the devices differently. Jobs with other devices can still run, so the error must not
/// drain the node.
#[test]
fn index_without_a_gpu_refuses_the_job_and_not_the_node() {
    let device = SlurmDevice::Detected { index: 4, devices: 5, minors: Vec::new() };
    let error = Allocation { devices: Vec::new(), unknown: vec![device] }.check_node().unwrap_err();
    assert!(gpush_core::slurm::decide::is_refusal(error.code), "{error:?}");
    assert_eq!(error.message, "cannot tell which GPU has Slurm's index 4");
    assert!(error.causes[0].contains("5 GPUs and MIG devices"), "{error:?}");
}

#[test]
fn job_without_a_request_gets_its_whole_gpus_of_slurm() {
    let gpus = gpus(3);
    let mut allocation = whole(&gpus);
    // A GPU of users is part of the job's lease only if the job requests a share.
    allocation.devices[1].owned = false;
    let wanted = allocation.request(None, 1000).unwrap();
    let mut expected = vec![gpus[0].uuid.to_string(), gpus[2].uuid.to_string()];
    expected.sort_unstable();
    assert_eq!((wanted.request.share, wanted.request.gpus), (LeaseShare::Whole {}, expected));
    assert_eq!((wanted.request.count, wanted.request.holder, wanted.targets), (2, Some(1000), None));
    let whole = parse("whole").unwrap();
    assert_eq!(allocation.request(Some(&whole), 1000).unwrap().request.count, 3);
}

#[test]
fn job_with_mig_devices_gets_these_devices() {
    let gpu = gpus(1).remove(0);
    let wanted = mig(&gpu, &["MIG-b", "MIG-a"]).request(None, 1000).unwrap();
    assert_eq!(wanted.request.share, LeaseShare::MigSize { memory_mib: None, slices: None });
    assert_eq!((wanted.request.count, wanted.request.gpus.as_slice()), (2, [gpu.uuid.to_string()].as_slice()));
    assert_eq!(wanted.targets, Some(["MIG-a", "MIG-b"].map(TargetUuid::from).into()));
}

#[test]
fn job_with_whole_gpus_and_mig_devices_is_refused() {
    let gpus = gpus(2);
    let mut allocation = whole(&gpus[..1]);
    allocation.devices.extend(mig(&gpus[1], &["MIG-a"]).devices);
    let error = allocation.request(None, 1000).unwrap_err();
    assert_eq!((error.code, error.message.as_str()), (Code::Unsupported, "the job has whole GPUs and MIG devices"));
}

#[test]
fn job_on_a_gpu_with_dynamic_layout_is_refused() {
    let mut allocation = whole(&gpus(1));
    allocation.devices[0].dynamic = true;
    for explicit in [None, Some(parse("mig=1g.10gb").unwrap())] {
        let error = allocation.request(explicit.as_ref(), 1000).unwrap_err();
        assert_eq!((error.code, error.message.as_str()), (Code::Unsupported, "GPU 0 has a dynamic layout"));
    }
}

#[test]
fn shared_gpu_needs_a_request_for_a_share() {
    for (mode, is, option) in [
        (Mode::Mps, "shared through MPS", "--comment=gpush:mps=25"),
        (Mode::Timeslice, "time-sliced", "--comment=gpush:timeslice"),
        (Mode::Mig, "partitioned with MIG", "--comment=gpush:mig=PROFILE"),
    ] {
        let mut gpus = gpus(2);
        gpus[1].mode = mode;
        let error = whole(&gpus).request(None, 1000).unwrap_err();
        let message = format!("GPU 1 is {is}, but the job requests no share of it");
        assert_eq!((error.code, error.message), (Code::Unsupported, message));
        assert!(error.hint.unwrap().ends_with(option), "{mode:?}");
    }
    for mode in [Mode::NoRule, Mode::Unmanaged] {
        let mut gpus = gpus(1);
        gpus[0].mode = mode;
        assert!(whole(&gpus).request(None, 1000).is_ok(), "{mode:?}");
    }
}

#[test]
fn number_of_members_depends_on_the_share_and_the_devices() {
    let gpus = gpus(2);
    let count = |allocation: &Allocation, spec: &str| {
        allocation.request(Some(&parse(spec).unwrap()), 1000).map(|wanted| wanted.request.count)
    };
    // Slurm allocated whole GPUs, and the job requests a MIG device: it gets one device on these GPUs.
    assert_eq!(count(&whole(&gpus), "mig=1g.10gb"), Ok(1));
    assert_eq!(count(&mig(&gpus[0], &["MIG-a", "MIG-b"]), "mig=1g.10gb"), Ok(2));
    assert_eq!((count(&whole(&gpus), "whole"), count(&Allocation::default(), "whole")), (Ok(2), Ok(1)));
    for spec in ["mps=25", "timeslice"] {
        assert_eq!(count(&whole(&gpus[..1]), spec), Ok(1));
        let error = count(&whole(&gpus), spec).unwrap_err();
        assert_eq!(error.message, "the job requests one share, but Slurm allocated 2 devices");
        assert!(error.hint.unwrap().ends_with("or without a request for a share"), "{spec}");
    }
}

/// Fault: for a job with two GPUs shared through MPS, the hint without a request was to request a share, and the hint with
/// this request was to request none.
#[test]
fn hints_for_several_shared_gpus_do_not_contradict_each_other() {
    let mut gpus = gpus(2);
    gpus.iter_mut().for_each(|gpu| gpu.mode = Mode::Mps);
    for explicit in [None, Some(parse("mps=25").unwrap())] {
        let hint = whole(&gpus).request(explicit.as_ref(), 1000).unwrap_err().hint.unwrap();
        assert!(hint.contains("--gres=gpu:1") && !hint.contains("without a request"), "{hint}");
    }
}

#[test]
fn job_without_a_request_gets_the_default_share_of_the_rule() {
    let mut gpus = gpus(2);
    gpus.iter_mut().for_each(|gpu| gpu.mode = Mode::Mps);
    let share = parse("mps=25").unwrap().share;
    let mut one = whole(&gpus[..1]);
    one.devices[0].job_default = Some(share.clone());
    assert_eq!(one.request(None, 1000).unwrap().request.share, share);
    let explicit = parse("mps=50").unwrap();
    assert_eq!(one.request(Some(&explicit), 1000).unwrap().request.share, explicit.share);
    let mut both = whole(&gpus);
    both.devices.iter_mut().for_each(|device| device.job_default = Some(share.clone()));
    assert!(both.request(None, 1000).is_err(), "a share is on one GPU");
}

/// Fault: the hint was to request a 3g.40gb or a 1g.10gb, which Slurm had not allocated.
#[test]
fn profile_that_slurm_did_not_allocate_is_refused_by_name() {
    let mut gpu = gpus(1).remove(0);
    let device = ComputeInstance {
        uuid: Some("MIG-a".into()),
        id: 0,
        profile_id: 2,
        profile: "3g.40gb".to_owned(),
        placement: None,
        processes: Vec::new(),
    };
    let instance = GpuInstance {
        id: 1,
        profile_id: 9,
        profile: "3g.40gb".to_owned(),
        placement: Placement { start: 0, size: 4 },
        memory: None,
        compute: vec![device],
        processes: Vec::new(),
    };
    gpu.mig.as_mut().unwrap().instances = vec![instance];
    let request = |spec: &str| mig(&gpu, &["MIG-a"]).request(Some(&parse(spec).unwrap()), 1000);
    let error = request("mig=2g.20gb").unwrap_err();
    assert_eq!(error.message, "Slurm gave this job a 3g.40gb, but the job requests 2g.20gb");
    assert_eq!(error.code, Code::Unsupported);
    assert_eq!(request("mig=3g.40gb").map(|wanted| wanted.request.count), Ok(1));
}

/// Requests of two Prologs of the same run are compared, so the order of Slurm's devices must not matter.
#[test]
fn order_of_the_devices_does_not_change_the_request() {
    let mut gpus = gpus(3);
    let one = whole(&gpus).request(None, 1000).unwrap();
    gpus.reverse();
    assert_eq!(whole(&gpus).request(None, 1000).unwrap(), one);
}

/// Returns the record of a lease on these targets.
fn record(request: &LeaseRequest, targets: &[&str]) -> LeaseRecord {
    let member = |target: &&str| LeaseMember {
        target: (*target).into(),
        gpu_uuid: "GPU-0".into(),
        share: MemberShare::Mig { profile: "1g.10gb".to_owned() },
        memory_mib: 10_240,
        gpu_memory_mib: 81_920,
    };
    LeaseRecord {
        id: LeaseId(1),
        sequence: 1,
        holder: LeaseHolder { uid: 1000, user: None },
        asked_by: gpush_api::Actor { uid: 0, user: None, pid: None },
        kind: LeaseKind::Mig,
        state: LeaseState::Active,
        reason: None,
        request: request.clone(),
        members: targets.iter().map(member).collect(),
        binding: gpush_api::LeaseBinding::Time,
        operation: None,
        created_at: jiff::Timestamp::UNIX_EPOCH,
        granted_at: None,
        expires_at: None,
        ended_at: None,
        revocation: None,
        boot_id: "boot-0".to_owned(),
    }
}

#[test]
fn lease_meets_a_request_only_on_the_allocated_devices() {
    let gpu = gpus(1).remove(0);
    let wanted = mig(&gpu, &["MIG-a"]).request(None, 1000).unwrap();
    assert!(wanted.is_met_by(&record(&wanted.request, &["MIG-a"])));
    assert!(!wanted.is_met_by(&record(&wanted.request, &["MIG-b"])), "another device of the same GPU");
    let other = LeaseRequest { count: 2, ..wanted.request.clone() };
    assert!(!wanted.is_met_by(&record(&other, &["MIG-a"])), "another request");
    let whole = whole(&[gpu]).request(None, 1000).unwrap();
    assert!(whole.is_met_by(&record(&whole.request, &["GPU-0"])), "a request for whole GPUs names no targets");
}
