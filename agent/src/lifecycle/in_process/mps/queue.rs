//! Operations that wait for the leases of MIG devices with daemons, and lease requests that arrive after these
//! operations.

use gpush_api::{Code, MpsDaemon, MpsState, Operation, OperationState};
use serde_json::{Value, json};

use super::INTERVALS;
use crate::lifecycle::in_process::{InProcess, host::ScriptedHost};

const LARGE: &str = "0:3g.40gb@4";
const SMALL: &str = "0:2g.20gb@0";

fn config() -> String {
    let layout = "layout = [\"3g.40gb@4:mps\", \"2g.20gb@0:mps\"]";
    format!("{INTERVALS}[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\n{layout}\n")
}

async fn served() -> InProcess {
    let host = InProcess::start("dgx-h100", 1, &config()).await;
    host.apply_rules(&["0"]).await;
    assert!(host.daemons().await.iter().all(|daemon| daemon.state == MpsState::Ready));
    host
}

impl InProcess {
    /// Begins to apply a layout when the GPU is no longer in use, and waits until the operation waits.
    async fn queued(&self, entries: &[&str]) -> Operation {
        let begun = self.begin(&["0"], entries, &json!({ "wait_s": 600 })).await.expect("it waits");
        self.waiting(&begun.id).await
    }

    async fn waiting(&self, id: &str) -> Operation {
        self.until("the operation waits", async || {
            let now: Operation = self.get(&format!("/v1/operations/{id}")).await;
            Some(now).filter(|now| now.state == OperationState::Waiting && !now.waits_for.is_empty())
        })
        .await
    }
}

/// An operation waits for a lease on a device that it removes. Fault: meanwhile gpushd granted more leases on this device,
/// and the operation waited until its time limit.
#[test]
fn waiting_operation_blocks_new_leases_on_its_device() {
    let world = ScriptedHost::new("dgx-h100", 1);
    let mut kept = None;
    let blocked = async |host: &InProcess, id: &str| {
        let says = format!("operation {id} is ahead of this request in the queue");
        host.until("a refusal that names the operation", async || {
            // After a restart, gpushd first reads the settings of the daemon, and refuses the request for this reason.
            let refused = host.share(LARGE, json!({ "percentage": 10 })).await.expect_err("the operation came first");
            assert!(refused.retryable, "{refused:?}");
            Some(refused).filter(|refused| refused.causes.iter().any(|cause| cause.contains(&says)))
        })
        .await
    };
    world.run_until(&config(), async |host| {
        host.apply_rules(&["0"]).await;
        let held = host.share(LARGE, json!({ "percentage": 10 })).await.expect("a lease");
        // The operation keeps the smaller device.
        let waiting = host.queued(&["2g.20gb@0:mps", "1g.10gb@4"]).await;
        assert_eq!(blocked(host, &waiting.id).await.code, Code::Blocked);
        let other = host.share(SMALL, json!({ "percentage": 10 })).await.expect("a lease on the other device");
        kept = Some((held, other, waiting.id));
    });
    // After a restart, gpushd keeps the order.
    let (held, other, id) = kept.expect("the first part has run");
    world.run_until(&config(), async |host| {
        host.daemon_reaches(LARGE, MpsState::Ready).await;
        let waiting = host.waiting(&id).await;
        blocked(host, &id).await;
        host.release(&held).await;
        let done = host.ended(&waiting).await;
        assert_eq!(done.state, OperationState::Done, "{done:#?}");
        assert!(host.gpus.instances(0).iter().all(|instance| !instance.starts_with("3g")));
        host.release(&other).await;
    });
}

/// Two operations wait for the leases of a GPU, and then run one after the other. Fault: the second one waited 15 s for
/// the stopped daemon of a device that the first one had destroyed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operation_does_not_wait_for_removed_daemon() {
    let host = served().await;
    let mut held = Vec::new();
    for name in [LARGE, SMALL] {
        held.push(host.share(name, json!({ "percentage": 10 })).await.expect("a lease"));
    }
    let first = host.queued(&["4g.40gb@0:mps"]).await;
    let second = host.queued(&["3g.40gb@4:mps", "1g.10gb@0:mps"]).await;
    for granted in &held {
        host.release(granted).await;
    }
    for one in [first, second] {
        let done = host.ended(&one).await;
        assert_eq!(done.state, OperationState::Done, "{done:#?}");
        let late = done.notes.iter().find(|note| note.contains("not ready"));
        assert_eq!(late, None, "it waited for a daemon that no layout has");
    }
    host.until("the daemons of the last layout", async || {
        let all: Vec<MpsDaemon> = host.daemons().await;
        (all.len() == 2 && all.iter().all(|one| one.state == MpsState::Ready)).then_some(())
    })
    .await;
}

/// A lease and a process block the operation. After the operation is cancelled, it does not block new leases.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_operation_no_longer_blocks_leases() {
    let host = served().await;
    let granted = host.share(LARGE, json!({ "percentage": 10 })).await.expect("a lease");
    let _client = host.client(LARGE, &granted).await;
    let waiting = host.queued(&["1g.10gb@4"]).await;
    host.share(LARGE, json!({ "percentage": 10 })).await.expect_err("the operation came first");
    let second = host.queued(&["2g.20gb@0:mps", "1g.10gb@4"]).await;
    let says = format!("operation {} is ahead of this request in the queue", waiting.id);
    assert!(second.waits_for[0].contains(&says), "{:?}", second.waits_for);
    let cancel = async |operation: &Operation| {
        let path = format!("/v1/operations/{}/cancel", operation.id);
        let cancelled: Operation = host.post(&path, &json!({})).await.expect("it is cancelled");
        assert_eq!(host.ended(&cancelled).await.state, OperationState::NotStarted);
    };
    cancel(&second).await;
    host.share(SMALL, json!({ "percentage": 10 })).await.expect_err("the first operation takes it away, too");
    cancel(&waiting).await;
    host.share(LARGE, json!({ "percentage": 10 })).await.expect("a lease");
    assert_ne!(host.get::<Value>("/v1/leases").await, json!([]));
}
