//! Answers of the driver that are incomplete or outdated: unknown profiles, and sessions that still list destroyed
//! instances.

use gpush_api::{GpuState, OperationState};
use gpush_tests::{
    agent::{Agent, Setup, real_layout},
    host::Host,
};

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

#[test]
fn apply_succeeds_although_session_lists_deleted_instances() {
    for function in ["nvmlDeviceGetGpuInstances", "nvmlDeviceGetGpuInstance*"] {
        let host = Host::up("dgx-a100");
        let agent = Agent::start(&host, "");
        assert_eq!(agent.apply(&["0"], &["3g.40gb@0", "1g.10gb@4"]).state, OperationState::Done);
        agent.stop();
        // The driver session of this agent begins while these instances exist, and continues to
        // list them.
        let agent = Setup::on(&host).named("second").start();
        assert_eq!(agent.gpu(0).mig.expect("MIG").instances.len(), 2);
        host.fault(&format!("{function} --gpu 0 --mutate stale"));
        for layout in [&["2g.20gb@0", "2g.20gb@2"][..], &["7g.80gb"], &["none"]] {
            let operation = agent.apply(&["0"], layout);
            assert_eq!(operation.state, OperationState::Done, "{function} {layout:?}: {operation:?}");
            agent.settle_reads();
            let gpu = agent.gpu(0);
            assert_eq!((gpu.state, gpu.reasons), (GpuState::Ready, Vec::new()), "{function} {layout:?}");
            let seen = gpu.mig.expect("MIG").instances.len();
            assert_eq!(seen, real_layout(&host, 0).len(), "{function} {layout:?}");
        }
    }
}
