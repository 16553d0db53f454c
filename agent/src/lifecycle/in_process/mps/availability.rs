//! Targets without a driver, and targets that grant no lease because their GPU is lost or cordoned.

use gpush_api::{ApiError, Code, MpsDaemon, MpsState};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::shared;
use crate::lifecycle::in_process::{InProcess, host::ScriptedHost, user};

/// gpushd finds the daemon of a lost GPU through the directory of the daemon. If a request names the target by the index
/// of the GPU, the response is the error of the lost GPU.
#[test]
fn target_on_a_lost_gpu_is_refused_with_gpu_lost() {
    let world = ScriptedHost::new("dgx-h100", 2);
    let config = shared("\"0-1\"", "");
    world.run_until(&config, async |host| {
        host.apply_rules(&["0-1"]).await;
    });
    world.gpus.lose(1);
    world.run_until(&config, async |host| {
        host.daemon_reaches("0", MpsState::Ready).await;
        let refused = host
            .until("the error of the GPU", async || {
                let refused = host.get_as::<Value>(user(0), "/v1/mps/1").await.expect_err("its GPU is lost");
                Some(refused).filter(|error| error.code != Code::Unavailable)
            })
            .await;
        assert_eq!(refused.code, Code::GpuLost, "{refused:?}");
        assert!(refused.message.contains("GPU 1"), "{refused:?}");
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cordoned_gpu_grants_no_lease_and_keeps_its_client() {
    let host = InProcess::with_daemon("").await;
    let granted = host.share("0", json!({ "percentage": 20 })).await.expect("a lease");
    let _client = host.client("0", &granted).await;
    let pid = host.daemon("0").await.pid;
    let reason = json!({ "reason": "fan replacement" });
    host.post::<Value>("/v1/gpus/0/cordon", &reason).await.expect("it is cordoned");
    let refused = host.share("0", json!({ "percentage": 20 })).await.expect_err("no new lease is granted");
    assert_eq!((refused.code, refused.retryable), (Code::Blocked, true), "{refused:?}");
    assert!(refused.message.ends_with("GPU 0 is cordoned"), "{refused:?}");
    assert!(refused.causes.iter().any(|cause| cause.contains("fan replacement")), "{refused:?}");
    let reported = host.daemon("0").await;
    assert_eq!((reported.state, reported.pid, reported.clients.len()), (MpsState::Ready, pid, 1));
    assert!(reported.findings.iter().any(|finding| finding.contains("GPU 0 is cordoned")), "{:?}", reported.findings);
    host.post::<Value>("/v1/gpus/0/uncordon", &json!({})).await.expect("the cordon ends");
    host.share("0", json!({ "percentage": 20 })).await.expect("a lease");
}

/// An empty list would mean that no GPU is shared.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_without_a_driver_are_an_error_until_it_is_loaded() {
    let world = ScriptedHost::new("dgx-h100", 1);
    world.gpus.unload(Some(ErrorKind::DriverNotLoaded));
    let host = world.start(&shared("\"0\"", "")).await;
    // This request makes gpushd load the driver.
    let gpus = async || host.get_as::<Value>(user(0), "/v1/gpus").await;
    gpus().await.expect_err("there is no driver");
    let listed = async || host.get_as::<Vec<MpsDaemon>>(user(0), "/v1/mps").await;
    let refused: [ApiError; 5] = [
        listed().await.expect_err("there is no driver"),
        host.get_as::<Value>(user(0), "/v1/mps/0").await.expect_err("there is no driver"),
        host.share("0", json!({ "percentage": 10 })).await.expect_err("there is no driver"),
        host.act("0", "stop", json!({})).await.expect_err("there is no driver"),
        host.act("0", "settings", json!({ "percentage": 10 })).await.expect_err("there is no driver"),
    ];
    for error in refused {
        assert_eq!(error.code, Code::DriverUnavailable, "{error:?}");
        assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("modprobe nvidia")), "{error:?}");
    }
    world.gpus.unload(None);
    host.until("the driver", async || gpus().await.ok()).await;
    host.apply_rules(&["0"]).await;
    assert_eq!(listed().await.expect("the targets").len(), 1);
}
