//! Faults of mig-parted v0.15.0, found on a simulated A100. gpush must not have them.

use gpush_api::{Code, OperationState};
use gpush_tests::{
    agent::{Agent, gi_at, real_layout},
    host::Host,
};

/// Fault 1: if an instance was in use, mig-parted first destroyed the idle instances. Only then did
/// the change fail.
#[test]
fn impossible_layout_destroys_no_idle_instance() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb@4", "2g.20gb", "1g.10gb"]).state, OperationState::Done);
    let gi = gi_at(&host, 0, 4);
    let pid = host.process(&format!("--gpu 0 --gi {gi} --ci 0"));
    let before = real_layout(&host, 0);
    host.start_trace();
    let refused = agent.begin(&["0"], &["7g.80gb"]).unwrap_err();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    assert!(refused.causes.iter().any(|cause| cause.contains(&format!("pid {pid}"))), "{refused:?}");
    assert!(refused.message.contains("3g.40gb@4 is in use"), "{refused:?}");
    assert!(refused.causes[0].starts_with(&format!("3g.40gb@4 (GPU instance {gi}")), "{refused:?}");
    assert_eq!(real_layout(&host, 0), before);
    assert_eq!(host.trace(), [], "no driver call was tried");

    // If a layout fits around the instance in use, gpushd applies the layout and keeps this
    // instance.
    let operation = agent.apply(&["0"], &["4g.40gb", "3g.40gb"]);
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    assert_eq!(operation.plans[0].keeps, [u32::try_from(gi).unwrap()]);
    assert_eq!(gi_at(&host, 0, 4), gi);
    assert!(host.trace().iter().all(|call| call.rc == 0 && !call.arguments.contains(&format!("gi={gi} "))));

    // When the instance is idle, gpushd can destroy it.
    host.end_process(pid);
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
}

/// Fault 1 must not occur with several GPUs either: if gpushd cannot change one GPU of a request,
/// it changes no GPU.
#[test]
fn one_impossible_plan_leaves_all_gpus_untouched() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["all"], &["3g.40gb@0", "1g.10gb@4"]).state, OperationState::Done);
    let gi = gi_at(&host, 6, 0);
    host.process(&format!("--gpu 6 --gi {gi} --ci 0"));
    host.start_trace();
    let refused = agent.begin(&["all"], &["7g.80gb"]).unwrap_err();
    assert_eq!(refused.code, Code::Blocked);
    assert!(refused.message.contains("GPU 6 (GPU-"), "{refused:?}");
    assert_eq!(host.trace(), []);
}

/// Fault 2: a change of GPU 1 cleared GPU 0. Fault 3: a reset affected all GPUs.
#[test]
fn change_on_one_gpu_does_not_affect_others() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 4\nmig = false\n");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb", "2g.20gb"]).state, OperationState::Done);
    let before = real_layout(&host, 0);
    host.start_trace();
    // Check faults 2 and 3 also for a change of MIG mode.
    assert_eq!(agent.apply(&["1"], &["1g.10gb*7"]).state, OperationState::Done);
    assert_eq!(real_layout(&host, 0), before);
    assert_eq!(real_layout(&host, 2), ["MIG off"]);
    let trace = host.trace();
    assert!(!trace.is_empty() && trace.iter().all(|call| call.gpu == Some(1)), "{trace:?}");
}

/// Fault 4: for an unknown profile, mig-parted destroyed everything and reported success.
#[test]
fn unknown_profile_changes_nothing_and_similar_are_named() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb"]).state, OperationState::Done);
    let before = real_layout(&host, 0);
    host.start_trace();
    let refused = agent.begin(&["0"], &["3g.41gb"]).unwrap_err();
    assert_eq!(refused.code, Code::UnknownProfile);
    assert!(refused.message.contains("3g.41gb") && refused.hint.as_ref().unwrap().contains("3g.40gb"), "{refused:?}");
    assert_eq!(real_layout(&host, 0), before);
    assert_eq!(host.trace(), []);
}

/// Fault 5: mig-parted did not find a GPU instance without a compute instance, so it never removed
/// this GPU instance.
#[test]
fn gpu_instance_without_ci_is_completed_or_removed() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    // The first step succeeds. The second step fails, and so does the rollback of the first step.
    let leave_one = || {
        host.fault("nvmlGpuInstanceCreateComputeInstance* --gpu 0 --rc UNKNOWN");
        host.fault("nvmlGpuInstanceDestroy --gpu 0 --rc UNKNOWN");
        assert_eq!(agent.apply(&["0"], &["3g.40gb@4"]).state, OperationState::Failed);
        host.clear_faults();
        assert_eq!(real_layout(&host, 0), ["3g.40gb@4[]"]);
        let shown = agent.gpu(0).mig.unwrap().instances;
        assert!(shown.len() == 1 && shown[0].compute.is_empty(), "{shown:?}");
    };
    // The layout has this GPU instance. So gpushd keeps it and adds only the compute instance.
    leave_one();
    host.start_trace();
    assert_eq!(agent.apply(&["0"], &["3g.40gb"]).state, OperationState::Done);
    assert_eq!(real_layout(&host, 0), ["3g.40gb@4[3g.40gb@0]"]);
    assert_eq!(host.trace().len(), 1, "{:?}", host.trace());
    // The layout does not have this GPU instance. So gpushd destroys it.
    assert_eq!(agent.apply(&["0"], &["none"]).state, OperationState::Done);
    leave_one();
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
}

/// Fault 6: mig-parted ignored `devices: [9]` and invalid filters, and reported success.
#[test]
fn unknown_gpus_and_invalid_filters_are_refused() {
    let host = Host::up("a30x4");
    let agent = Agent::start(&host, "");
    host.start_trace();
    let mut tried = 0;
    for (gpu, code) in [
        ("9", Code::NotFound),
        ("0-9", Code::NotFound),
        ("*H100*", Code::NotFound),
        ("GPU-00000000", Code::NotFound),
        ("0000:ff:00.0", Code::NotFound),
        ("-1", Code::BadRequest),
        ("3-0", Code::BadRequest),
        ("", Code::BadRequest),
        ("\u{0}", Code::BadRequest),
        ("GPU-zz", Code::BadRequest),
    ] {
        let refused = agent.begin(&[gpu], &["1g.6gb"]).unwrap_err();
        assert_eq!(refused.code, code, "{gpu:?}: {refused:?}");
        assert!(refused.hint.is_some(), "{refused:?}");
        tried += 1;
    }
    // If one name of a request is valid and another is unknown, gpushd refuses the request.
    assert_eq!(agent.begin(&["0", "9"], &["1g.6gb"]).unwrap_err().code, Code::NotFound);
    assert_eq!(host.trace(), []);
    println!("{tried} selectors refused");
}

/// Fault 7: mig-parted ended with an error if it did not know a profile index.
#[test]
fn profile_index_unknown_to_gpush_is_skipped() {
    let host = Host::up("dgx-a100");
    // Queries for some profiles fail. A driver with more or fewer profiles than gpush knows also
    // gives such errors.
    host.fault("nvmlDeviceGetGpuInstanceProfileInfo* --gpu 0 --times 6 --rc INVALID_ARGUMENT");
    let agent = Agent::start(&host, "");
    let profiles = |gpu| agent.gpu(gpu).mig.unwrap().profiles;
    let (fewer, all) = (profiles(0), profiles(1));
    println!("{} of {} profiles known", fewer.len(), all.len());
    assert!(fewer.len() < all.len(), "the rule hit nothing: {fewer:?}");
    assert_eq!(agent.apply(&["0"], &["3g.40gb*2"]).state, OperationState::Done);
    assert_eq!(real_layout(&host, 0).len(), 2);
}
