//! Recovery of an operation after its environment has changed: after a reboot, with another config,
//! without a driver, with a lost GPU, or with a new process.

use gpush_api::{GpuState, OperationState};
use gpush_tests::{
    agent::{Agent, gi_at, real_layout},
    driver,
    host::Host,
};
use serde_json::json;

const CONFIG: &str = "[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"2g.20gb\", \"1g.10gb\"]\n";
const BEFORE: &[&str] = &["3g.40gb@4", "2g.20gb@0"];

/// Requests a change of GPU 0. A fault rule kills the agent during the change. Waits until the
/// agent has ended. Returns the id of the operation. The agent may have died before it answered.
fn begin(agent: &mut Agent, entries: &[&str]) -> String {
    let listed = agent.get("/v1/operations?limit=200").json();
    let body = json!({ "selectors": ["0"], "layout_source": { "entries": entries } }).to_string();
    let _reported = agent.try_raw(
        format!(
            "POST /v1/mig/apply HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        )
        .as_bytes(),
    );
    agent.wait();
    format!("op-{}", listed.as_array().expect("a list").len() + 1)
}

/// Starts an agent with this config, and requests a change from `BEFORE` to a 4g.40gb and a 3g.40gb
/// at 4. When the agent has destroyed the 2g.20gb, a fault rule kills the agent. Returns the id of
/// the operation.
fn killed_half_way(host: &Host, config: &str) -> String {
    let mut agent = Agent::start(host, config);
    agent.until("layout at start", || {
        (agent.get("/v1/health").json()["layouts_at_start"]["complete"] == json!(true)).then_some(())
    });
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --kill before --parent");
    let id = begin(&mut agent, &["3g.40gb@4", "4g.40gb@0"]);
    host.clear_faults();
    assert_eq!(real_layout(host, 0), ["3g.40gb@4[3g.40gb@0]"]);
    id
}

#[test]
fn operation_fails_after_reboot_and_boot_layout_is_applied() {
    let host = Host::up("dgx-a100");
    let id = killed_half_way(&host, CONFIG);
    host.sim::<&str>("reboot", &[]);
    let agent = Agent::start(&host, CONFIG);
    let ended = agent.follow(agent.operation(&id));
    assert_eq!(ended.state, OperationState::Failed, "{ended:?}");
    let error = ended.error.expect("a reason");
    assert!(error.message.contains("the host was restarted during the operation"), "{error:?}");
    agent.until("layout of the boot", || (real_layout(&host, 0).len() == 2).then_some(()));
    agent.until("ready GPU", || (agent.gpu(0).state == GpuState::Ready).then_some(()));
    let gpu = agent.gpu(0);
    assert!(gpu.drift.is_empty(), "{:?}", gpu.drift);
}

#[test]
fn operation_resumes_on_same_boot_and_layout_stays() {
    let host = Host::up("dgx-a100");
    let id = killed_half_way(&host, CONFIG);
    let agent = Agent::start_again(&host, CONFIG);
    let ended = agent.follow(agent.operation(&id));
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert!(ended.notes[0].contains("gpushd ended while the operation was running"), "{:?}", ended.notes);
    assert!(agent.settle().is_empty());
    assert_eq!(real_layout(&host, 0).len(), 2);
}

/// If two operations on a GPU start one after the other, the operation that starts later also ends
/// later, even if it was requested first.
#[test]
fn queued_operation_resumes_though_later_one_ended() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb@4"]).state, OperationState::Done);
    let pid = host.process(&format!("--gpu 0 --gi {} --ci 0 --memory 100", gi_at(&host, 0, 4)));
    let body = json!({ "selectors": ["0"], "layout_source": { "entries": ["7g.80gb"] }, "wait_s": 3600 });
    let waiting = agent.begin_with(&body).expect("it waits");
    let waiting = agent.follow_until(waiting, |operation| operation.state == OperationState::Waiting);
    assert_eq!(agent.apply(&["0"], &["3g.40gb@4", "1g.10gb"]).state, OperationState::Done);
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --kill before --parent");
    host.end_process(pid);
    agent.wait();
    host.clear_faults();
    assert_eq!(real_layout(&host, 0), Vec::<String>::new(), "it died half way");
    let agent = Agent::start(&host, "");
    let ended = agent.follow(agent.operation(&waiting.id));
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert_eq!(real_layout(&host, 0), ["7g.80gb@0[7g.80gb@0]"]);
}

#[test]
fn reason_of_rollback_survives_restart() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    let before = real_layout(&host, 0);
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --rc UNKNOWN");
    // The apply creates no compute instance before the rollback. So the fault rule kills gpushd
    // when the rollback creates its first compute instance.
    host.fault("nvmlGpuInstanceCreateComputeInstance* --gpu 0 --times 1 --kill before --parent");
    let id = begin(&mut agent, &["7g.80gb"]);
    host.clear_faults();
    assert_ne!(real_layout(&host, 0), before);
    let agent = Agent::start(&host, "");
    let ended = agent.follow(agent.operation(&id));
    assert_eq!(ended.state, OperationState::RolledBack, "{ended:?}");
    assert_eq!(real_layout(&host, 0), before);
    let error = ended.error.expect("a reason");
    assert!(error.message.contains("creating GPU instance 7g.80gb@0 failed"), "{error:?}");
    assert!(error.causes.iter().any(|cause| cause.contains("gpushd ended")), "{error:?}");
}

/// Creates a GPU instance on GPU 0 without gpushd, as an administrator does with nvidia-smi.
pub(crate) fn make_by_hand(host: &Host, profile: &str, start: u8) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let hardware = driver::hardware(host);
        let uuid = driver::uuids(&hardware).await.remove(0);
        let made = driver::create(&hardware, &uuid, profile, start).await;
        let reading = hardware.read(&uuid).await.expect("the GPU can be read");
        let profile = driver::mig(&reading).profiles.iter().find(|p| p.id == made.profile_id).expect("the profile");
        let whole = profile.compute.iter().find(|c| c.slices == profile.slices).expect("one that takes all of it");
        hardware.create_compute_instance(&uuid, made.id, whole.id, None).await.expect("a compute instance");
        hardware.stop().await.expect("the worker ends");
    });
}

#[test]
fn foreign_instances_are_kept_by_recovery() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb@0", "3g.40gb@4"]).state, OperationState::Done);
    // When gpushd has destroyed both instances, the fault rule kills gpushd.
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --times 1 --kill before --parent");
    let id = begin(&mut agent, &["7g.80gb"]);
    host.clear_faults();
    assert_eq!(real_layout(&host, 0), Vec::<String>::new());
    make_by_hand(&host, "2g.20gb", 0);
    let theirs = gi_at(&host, 0, 0);
    host.start_trace();
    let agent = Agent::start(&host, "");
    let ended = agent.follow(agent.operation(&id));
    assert_eq!(ended.state, OperationState::Failed, "{ended:?}\n{}", agent.log());
    // Another program has created an instance. gpushd restores the part of the previous layout that
    // does not overlap with this instance.
    assert_eq!(real_layout(&host, 0), ["2g.20gb@0[2g.20gb@0]", "3g.40gb@4[3g.40gb@0]"]);
    assert_eq!(gi_at(&host, 0, 0), theirs);
    assert!(host.trace().iter().all(|call| !call.function.contains("Destroy")), "{:?}", host.trace());
    let error = ended.error.expect("a reason");
    assert!(error.message.contains("was changed by another program"), "{error:?}");
    for says in [
        "2g.20gb@0 (GPU instance",
        "did not exist before the operation, and the operation did not create it",
        "remains: another program created it in the meantime",
        "3g.40gb@0 was not restored: 2g.20gb@0",
    ] {
        assert!(error.causes.iter().any(|cause| cause.contains(says)), "{says}: {error:?}");
    }
    assert_eq!(agent.gpu(0).state, GpuState::Degraded);
    // gpushd accepts a new request. Its plan takes the instance of the other program into account.
    assert_eq!(agent.apply(&["0"], &["7g.80gb"]).state, OperationState::Done);
}

#[test]
fn recovery_keeps_plan_after_config_change() {
    let host = Host::up("dgx-a100");
    let id = killed_half_way(&host, "");
    let agent = Agent::start(&host, "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n");
    let ended = agent.follow(agent.operation(&id));
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
    assert_eq!(real_layout(&host, 0), ["4g.40gb@0[4g.40gb@0]", "3g.40gb@4[3g.40gb@0]"]);
    // After the recovery, the GPU is managed according to the new config.
    assert!(agent.begin(&["0"], &["none"]).is_err());
}

#[test]
fn recovery_without_driver_waits_and_is_reported() {
    let host = Host::up("dgx-a100");
    let id = killed_half_way(&host, "");
    host.fault("nvmlInit* --rc DRIVER_NOT_LOADED");
    let agent = Agent::start(&host, "");
    let shown = agent.until("interrupted operation", || {
        Some(agent.operation(&id)).filter(|operation| operation.state == OperationState::Interrupted)
    });
    assert!(shown.ended_at.is_none());
    // The operation cannot continue. So gpushd stops without waiting for the operation, and keeps
    // its record.
    agent.stop();
    let agent = Agent::start(&host, "");
    host.clear_faults();
    let ended = agent.follow(agent.operation(&id));
    assert_eq!(ended.state, OperationState::Done, "{ended:?}");
}

#[test]
fn gpu_missing_at_recovery_is_named() {
    let host = Host::up("dgx-a100");
    let id = killed_half_way(&host, "");
    host.fault("nvmlDeviceGetMigMode --gpu 0 --mutate lose --times 1");
    let agent = Agent::start(&host, "");
    let ended = agent.follow(agent.operation(&id));
    assert_eq!(ended.state, OperationState::Failed, "{ended:?}");
    let error = ended.error.expect("a reason");
    assert!(error.causes.iter().any(|cause| cause.contains("GPU 0 (GPU-") && cause.contains("is lost")), "{error:?}");
    // gpushd can still change the other GPUs.
    assert_eq!(agent.apply(&["1"], &["7g.80gb"]).state, OperationState::Done);
}

#[test]
fn recovery_keeps_instance_entered_by_process() {
    let host = Host::up("dgx-a100");
    let mut agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], BEFORE).state, OperationState::Done);
    // The fault rule kills gpushd when it has destroyed one of the two GPU instances, and not yet
    // the other.
    host.fault("nvmlGpuInstanceDestroy --gpu 0 --times 1 --kill after --parent");
    let id = begin(&mut agent, &["7g.80gb"]);
    host.clear_faults();
    let left = real_layout(&host, 0);
    assert_eq!(left.len(), 1, "{left:?}");
    let start: u64 = if left[0].starts_with("3g") { 4 } else { 0 };
    let gi = gi_at(&host, 0, start);
    // gpushd may already have destroyed the compute instance of the GPU instance that is left.
    if left[0].contains("[]") {
        println!("the other instance had lost its compute instance: no process can enter it");
        return;
    }
    let pid = host.process(&format!("--gpu 0 --gi {gi} --ci 0"));
    let agent = Agent::start(&host, "");
    let ended = agent.follow(agent.operation(&id));
    assert_eq!(ended.state, OperationState::RolledBack, "{ended:?}");
    assert_eq!(real_layout(&host, 0), ["2g.20gb@0[2g.20gb@0]", "3g.40gb@4[3g.40gb@0]"]);
    assert_eq!(gi_at(&host, 0, start), gi, "the instance in use is another");
    let public = format!("{:?} {:?}", ended.error, ended.notes);
    assert!(!public.contains(&format!("pid {pid}")), "{public}");
}
