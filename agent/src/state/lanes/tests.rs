//! Tests of the lanes without a driver.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{ApiError, Code, GpuIndex, GpuUuid};
use tokio::time::timeout;

use super::*;

const SOON: Duration = Duration::from_secs(5);

fn lanes() -> Lanes {
    Lanes::new(state::State::empty())
}

fn gpu(index: u32) -> (GpuIndex, GpuUuid) {
    (GpuIndex(index), format!("GPU-{index}").into())
}

fn gpus(uuids: &[&str]) -> BTreeSet<GpuUuid> {
    uuids.iter().map(|uuid| GpuUuid::from(*uuid)).collect()
}

/// Polls a future once. Returns whether it is pending.
async fn is_pending<F: Future + Unpin>(future: &mut F) -> bool {
    timeout(Duration::ZERO, future).await.is_err()
}

#[test]
fn claimed_gpu_is_refused_and_the_holder_is_named() {
    let lanes = lanes();
    let first = lanes.claim(&[gpu(0), gpu(1)]).unwrap();
    let error = lanes.claim(&[gpu(2), gpu(1)]).unwrap_err();
    assert_eq!(error.message, "GPU 1 (GPU-1) is being changed by an operation that is being planned");
    assert_eq!((error.code, error.retryable), (Code::Conflict, true));
    assert_eq!(
        lanes.check_not_changing(GpuIndex(1), &"GPU-1".into()),
        Ok(()),
        "what is only being planned may be planned by others too"
    );
    first.begin("op-1");
    let error = lanes.claim(&[gpu(1)]).unwrap_err();
    assert_eq!(error.message, "GPU 1 (GPU-1) is being changed by operation op-1");
    assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("`gpushctl operation wait op-1`")), "{error:?}");
    assert_eq!(lanes.check_not_changing(GpuIndex(1), &"GPU-1".into()), Err(error));
    // The refused claim must not have claimed GPU 2 either.
    let _other = lanes.claim(&[gpu(2)]).unwrap();
    drop(first);
    lanes.claim(&[gpu(0), gpu(1)]).unwrap();
    assert_eq!(lanes.check_not_changing(GpuIndex(0), &"GPU-0".into()), Ok(()));
}

/// Fault: right after a restart, `apply` was refused because gpushd itself was planning the layouts of the boot.
#[tokio::test(start_paused = true)]
async fn claim_waits_for_a_plan_but_not_for_a_change() {
    let lanes = lanes();
    let planning = lanes.claim(&[gpu(0)]).unwrap();
    let wanted = [gpu(0), gpu(1)];
    let mut waiting = Box::pin(lanes.claim_after_planning(&wanted));
    assert!(is_pending(&mut waiting).await);
    drop(planning);
    let claim = timeout(SOON, waiting).await.unwrap().unwrap();
    // When the planned operation begins, the error names it.
    let mut waiting = Box::pin(lanes.claim_after_planning(&wanted));
    assert!(is_pending(&mut waiting).await);
    claim.begin("op-1");
    let error = timeout(SOON, waiting).await.unwrap().unwrap_err();
    assert_eq!(error.message, "GPU 0 (GPU-0) is being changed by operation op-1");
    drop(claim);
    // The wait for a plan ends, even if the driver hangs and the plan never becomes complete.
    let _planning = lanes.claim(&[gpu(0)]).unwrap();
    let error = timeout(SOON * 2, lanes.claim_after_planning(&wanted)).await.unwrap().unwrap_err();
    assert!(error.message.contains("being planned"), "{error:?}");
}

#[test]
fn closed_lanes_accept_only_earlier_operations() {
    let lanes = lanes();
    let holder = lanes.claim(&[gpu(0)]).unwrap();
    holder.begin("op-1");
    let why = || ApiError::new(Code::Conflict, "in maintenance");
    assert_eq!(lanes.close(why()), Err(("GPU-0".into(), Holder::Operation("op-1".to_owned()))));
    assert_eq!(lanes.closed(), None);
    drop(holder);
    lanes.close(why()).unwrap();
    assert_eq!(lanes.claim(&[gpu(0)]).unwrap_err(), why());
    drop(lanes.claim_again(&[gpu(0)]).unwrap());
    lanes.open();
    drop(lanes.claim(&[gpu(0)]).unwrap());
}

#[tokio::test(start_paused = true)]
async fn reconcilers_take_turns_on_one_gpu_and_not_across_gpus() {
    let lanes = lanes();
    let gpu_0 = "GPU-0".into();
    let turn = lanes.lock(&gpu_0).await.unwrap();
    let mut second = Box::pin(lanes.lock(&gpu_0));
    assert!(is_pending(&mut second).await);
    let _elsewhere = lanes.lock(&"GPU-1".into()).await.unwrap();
    drop(turn);
    let _second = timeout(SOON, second).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn operation_begins_after_reconcilers_and_grants_of_its_gpus() {
    let lanes = lanes();
    let gpu_0 = "GPU-0".into();
    let turn = lanes.lock(&gpu_0).await.unwrap();
    let grant = lanes.begin_grant(&gpus(&["GPU-1"])).unwrap();
    let _elsewhere = lanes.lock(&"GPU-2".into()).await.unwrap();
    let claim = lanes.claim(&[gpu(0), gpu(1)]).unwrap();
    let mut alone = Box::pin(claim.wait_until_alone());
    assert!(is_pending(&mut alone).await);
    // A reconciler that arrives after the claim waits while the operation is being planned. When the operation has
    // begun, the reconciler returns.
    let gpu_1 = "GPU-1".into();
    let mut late = Box::pin(lanes.lock(&gpu_1));
    assert!(is_pending(&mut late).await);
    drop(turn);
    assert!(is_pending(&mut alone).await);
    drop(grant);
    timeout(SOON, alone).await.unwrap();
    assert!(is_pending(&mut late).await);
    claim.begin("op-1");
    assert!(timeout(SOON, late).await.unwrap().is_none());
    drop(claim);
    assert!(lanes.lock(&"GPU-1".into()).await.is_some());
}

#[test]
fn grant_on_a_claimed_gpu_is_refused() {
    let lanes = lanes();
    let claim = lanes.claim(&[gpu(0)]).unwrap();
    assert_eq!(lanes.0.host.now().claimed, gpus(&["GPU-0"]));
    claim.begin("op-1");
    let (uuid, holder) = lanes.begin_grant(&gpus(&["GPU-0", "GPU-1"])).unwrap_err();
    assert_eq!((uuid.as_str(), holder), ("GPU-0", Holder::Operation("op-1".to_owned())));
    // The refused grant must not be registered on any GPU.
    assert!(lanes.states().is_idle(&"GPU-1".into()));
    drop(claim);
    let grants = lanes.begin_grant(&gpus(&["GPU-0", "GPU-1"])).unwrap();
    assert!(!lanes.states().is_idle(&"GPU-1".into()));
    drop(grants);
    assert!(lanes.states().is_idle(&"GPU-0".into()) && lanes.states().is_idle(&"GPU-1".into()));
}

/// Fault: a lease was granted on a MIG device that an operation had destroyed between the reading and the grant.
#[test]
fn operation_since_the_readings_is_noticed() {
    let lanes = lanes();
    let has_changed = |before: &LaneChanges| lanes.has_changed(gpus(&["GPU-0", "GPU-1"]).iter(), before);
    let before = lanes.changes();
    let claim = lanes.claim(&[gpu(0)]).unwrap();
    assert!(!has_changed(&before), "nothing is changed while the operation is being planned");
    claim.begin("op-1");
    let begun = lanes.changes();
    assert!(has_changed(&before));
    drop(claim);
    assert!(has_changed(&before) && has_changed(&begun), "readings during an operation are old when it has ended");
    let after = lanes.changes();
    lanes.claim(&[gpu(2)]).unwrap().begin("op-2");
    assert!(!has_changed(&after), "an operation on another GPU");
}
