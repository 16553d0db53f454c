//! Partial rollback. If a process has entered an instance, or the driver does not destroy it,
//! gpushd keeps this instance. It restores the rest of the previous layout around this instance.

use gpush_api::{GpuState, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, gi_at, real_layout},
    host::Host,
};

const BEFORE: &[&str] = &["2g.20gb@0", "1g.10gb@2", "1g.10gb@3", "3g.40gb@4"];
/// A layout that has no instance of BEFORE. So an apply destroys all instances of BEFORE.
const AFTER: &[&str] = &["3g.40gb@0", "2g.20gb@4"];
/// A fault rule that delays the creation of the second GPU instance and then lets it fail. The test
/// acts during the delay.
const FAILS: &str = "nvmlDeviceCreateGpuInstance* --gpu 0 --after 1 --times 1 --delay-ms 1500 --rc UNKNOWN";

/// Starts an apply from BEFORE to AFTER, calls `meanwhile`, and waits until the apply has failed.
fn fail_after(host: &Host, agent: &Agent, meanwhile: impl FnOnce()) -> Operation {
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    host.fault(FAILS);
    let mut operation = agent.begin(&["0"], AFTER).expect("an operation");
    let doing = "creating GPU instance 2g.20gb@4";
    while operation.progress[0].doing.as_deref() != Some(doing) {
        assert!(!operation.state.is_final(), "{operation:?}");
        let path = format!("/v1/operations/{}?after={}&wait_ms=10000", operation.id, operation.revision);
        operation = serde_json::from_value(agent.get(&path).json()).expect("an operation");
    }
    meanwhile();
    agent.follow(operation)
}

#[test]
fn entered_instance_stays_and_rest_is_restored() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    let mut pid = 0;
    let operation = fail_after(&host, &agent, || {
        pid = host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 0)));
    });
    assert_eq!(operation.state, OperationState::Failed, "{operation:?}");
    assert_eq!(real_layout(&host, 0), ["3g.40gb@0[3g.40gb@0]", "3g.40gb@4[3g.40gb@0]"]);
    let gpu = agent.gpu(0);
    assert_eq!(gpu.state, GpuState::Degraded);
    let error = operation.error.as_ref().unwrap();
    for says in [
        "the previous layout was restored without 2g.20gb@0, 1g.10gb@2 and 1g.10gb@3",
        "3g.40gb@0 (GPU instance",
        "is in use by a process (`gpushctl gpu show 0` shows this process",
        "2g.20gb@0 was not restored: 3g.40gb@0 is",
        "1g.10gb@3 was not restored: 3g.40gb@0 is",
    ] {
        let says_so = |all: &[String]| all.iter().any(|cause| cause.contains(says));
        assert!(says_so(&error.causes) && says_so(&gpu.reasons), "{says}: {error:?} {:?}", gpu.reasons);
    }
    // Every user can read operations, conditions and health, but only root can read the log.
    let public = format!("{:?} {:?} {:?}", operation.error, operation.progress, gpu.reasons);
    assert!(!public.contains(&format!("pid {pid}")) && !public.contains("sleep"), "{public}");
    assert!(!agent.get("/v1/health").json()["errors"].to_string().contains(&format!("pid {pid}")));
    let text = "the previous layout was restored without";
    let log = agent.wait_for_log(text);
    let line = log.lines().find(|line| line.contains(text)).unwrap();
    assert!(line.contains("ERROR") && line.contains(&format!("is in use by pid {pid} (")), "{line}");
    assert!(!log.contains("is in use by a process ("), "{log}");
    // When the process has ended, gpushd can change the GPU again.
    host.end_process(pid);
    host.clear_faults();
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    assert_eq!(agent.gpu(0).state, GpuState::Ready);
}
