//! Operations that wait for the leases of a GPU, and lease requests that arrive after these
//! operations.

use gpush_api::{Code, MpsDaemon, MpsState, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, real_layout},
    host::Host,
    mps::{Client, daemons, lease, reaches, release},
};
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"h100-80-sxm\"\n";
const CONFIG: &str =
    "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb@4:mps\", \"2g.20gb@0:mps\"]\n";

/// Waits until the daemons of both devices are ready. Returns the short names of the larger and of
/// the smaller device.
fn served(agent: &Agent) -> (String, String) {
    agent.wait_for_layouts_at_start();
    agent.await_that("two daemons", || daemons(agent).len() == 2);
    let named = |profile: &str| {
        let all = daemons(agent);
        let is_of = |one: &&MpsDaemon| one.device.as_ref().is_some_and(|device| device.starts_with(profile));
        let name = all.iter().find(is_of).unwrap_or_else(|| panic!("{profile}: {all:#?}")).target.clone();
        reaches(agent, &name, MpsState::Ready);
        name
    };
    (named("3g.40gb"), named("2g.20gb"))
}

fn is_waiting(operation: &Operation) -> bool {
    operation.state == OperationState::Waiting && !operation.waits_for.is_empty()
}

/// An operation waits for a lease on a device that it removes. Fault: meanwhile gpushd granted more
/// leases on this device, and the operation waited until its time limit.
#[test]
fn waiting_operation_blocks_new_leases_on_its_device() {
    let host = Host::up(HOST);
    let mut agent = Agent::start(&host, CONFIG);
    let (large, small) = served(&agent);
    let held = lease(&agent, &large, &json!({ "percentage": 10 })).expect("a lease").lease.id;
    // The operation keeps the smaller device.
    let body = json!({"selectors": ["0"], "layout_source": {"entries": ["2g.20gb@0:mps", "1g.10gb@4"]}, "wait_s": 600});
    let waiting = agent.follow_until(agent.begin_with(&body).expect("the operation is queued"), is_waiting);

    let refused = lease(&agent, &large, &json!({ "percentage": 10 })).expect_err("the operation came first");
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    let says = format!("operation {} is ahead of this request in the queue", waiting.id);
    assert!(refused.causes.iter().any(|cause| cause.contains(&says)), "{refused:?}");
    // gpushd grants a lease on the device that the operation keeps.
    let other = lease(&agent, &small, &json!({ "percentage": 10 })).expect("a lease on the other device").lease.id;

    // After a restart, gpushd keeps the order.
    agent.kill();
    agent = Agent::start(&host, CONFIG);
    reaches(&agent, &large, MpsState::Ready);
    let waiting = agent.follow_until(agent.operation(&waiting.id), is_waiting);
    // At first, gpushd still reads the settings of the daemon, and refuses the request for this
    // reason.
    agent.await_that("a refusal that names the operation", || {
        let refused = lease(&agent, &large, &json!({ "percentage": 10 })).expect_err("the operation came first");
        refused.causes.iter().any(|cause| cause.contains(&says))
    });

    release(&agent, held);
    let done = agent.follow(agent.operation(&waiting.id));
    assert_eq!(done.state, OperationState::Done, "{done:#?}");
    assert!(real_layout(&host, 0).iter().all(|instance| !instance.starts_with("3g")), "{:?}", real_layout(&host, 0));
    release(&agent, other);
}

/// Two operations wait for the leases of a GPU, and then run one after the other. Fault: the second one waited 15 s for
/// the stopped daemon of a device that the first one had destroyed. Meanwhile the log said that it was done, and the API
/// that it was running.
#[test]
fn operations_behind_leases_end_without_waiting_for_removed_daemons() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    let (large, small) = served(&agent);
    let held =
        [&large, &small].map(|name| lease(&agent, name, &json!({ "percentage": 10 })).expect("a lease").lease.id);
    let queued = [json!(["4g.40gb@0:mps"]), json!(["3g.40gb@4:mps", "1g.10gb@0:mps"])].map(|entries| {
        let body = json!({"selectors": ["0"], "layout_source": {"entries": entries}, "wait_s": 600});
        agent.follow_until(agent.begin_with(&body).expect("the operation is queued"), is_waiting)
    });
    for id in held {
        release(&agent, id);
    }
    for one in queued {
        agent.wait_for_log(&format!("operation {} (mig.apply) is done", one.id));
        let done = agent.operation(&one.id);
        assert_eq!(done.state, OperationState::Done, "{}", agent.log());
        let late = done.notes.iter().find(|note| note.contains("not ready"));
        assert_eq!(late, None, "it waited for a daemon that no layout has");
    }
    agent.await_that("the daemons of the last layout", || {
        let all = daemons(&agent);
        all.len() == 2 && all.iter().all(|one| one.state == MpsState::Ready)
    });
}

/// A lease, and a process that the driver lists, block the operation. After the operation is
/// cancelled, it does not block new leases.
#[test]
fn cancelled_operation_no_longer_blocks_leases() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    let (large, small) = served(&agent);
    let taken = lease(&agent, &large, &json!({ "percentage": 10 })).expect("a lease");
    let _client = Client::start(&host, &taken.environment);
    agent.settle_reads();
    let body = json!({"selectors": ["0"], "layout_source": {"entries": ["1g.10gb@4"]}, "wait_s": 600});
    let waiting = agent.follow_until(agent.begin_with(&body).expect("the operation is queued"), is_waiting);
    lease(&agent, &large, &json!({ "percentage": 10 })).expect_err("the operation came first");
    let body = json!({"selectors": ["0"], "layout_source": {"entries": ["2g.20gb@0:mps", "1g.10gb@4"]}, "wait_s": 600});
    let second = agent.follow_until(agent.begin_with(&body).expect("the operation is queued"), is_waiting);
    assert!(
        second.waits_for[0].contains(&format!("operation {} is ahead of this request in the queue", waiting.id)),
        "{:?}",
        second.waits_for
    );
    assert_eq!(agent.cancel(&second.id).status, 202);
    assert_eq!(agent.follow(agent.operation(&second.id)).state, OperationState::NotStarted);
    lease(&agent, &small, &json!({ "percentage": 10 })).expect_err("the first operation takes it away, too");
    assert_eq!(agent.cancel(&waiting.id).status, 202);
    assert_eq!(agent.follow(agent.operation(&waiting.id)).state, OperationState::NotStarted);
    lease(&agent, &large, &json!({ "percentage": 10 })).expect("a lease");
}
