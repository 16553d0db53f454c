//! Lanes without a driver.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{ApiError, Code};
use tokio::time::timeout;

use super::*;

const SOON: Duration = Duration::from_secs(5);

fn lanes() -> Lanes {
    Lanes::new(state::State::empty())
}

fn gpu(index: u32) -> (u32, String) {
    (index, format!("GPU-{index}"))
}

/// The needs of an operation that takes away a target of GPU 0.
fn takes_away(target: &str) -> Needs {
    Needs::from([("GPU-0".to_owned(), Need::Lane(Reserve::Targets(BTreeSet::from([target.to_owned()]))))])
}

/// Polls once.
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
    assert_eq!(lanes.at_rest(1, "GPU-1"), Ok(()), "what is only being planned may be planned by others too");
    first.begin("op-1");
    let error = lanes.claim(&[gpu(1)]).unwrap_err();
    assert_eq!(error.message, "GPU 1 (GPU-1) is being changed by operation op-1");
    assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("`gpushctl operation wait op-1`")), "{error:?}");
    assert_eq!(lanes.at_rest(1, "GPU-1"), Err(error));
    // The refused claim kept nothing.
    let _other = lanes.claim(&[gpu(2)]).unwrap();
    drop(first);
    lanes.claim(&[gpu(0), gpu(1)]).unwrap();
    assert_eq!(lanes.at_rest(0, "GPU-0"), Ok(()));
}

#[test]
fn closed_lanes_are_given_only_to_operations_begun_before() {
    let lanes = lanes();
    let holder = lanes.claim(&[gpu(0)]).unwrap();
    holder.begin("op-1");
    let why = || ApiError::new(Code::Conflict, "in maintenance");
    assert_eq!(lanes.close(why()), Err(("GPU-0".to_owned(), "operation op-1".to_owned())));
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
    let turn = lanes.turn("GPU-0").await.unwrap();
    let mut second = Box::pin(lanes.turn("GPU-0"));
    assert!(is_pending(&mut second).await);
    let _elsewhere = lanes.turn("GPU-1").await.unwrap();
    drop(turn);
    let _second = timeout(SOON, second).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn operation_begins_when_reconcilers_and_grants_of_its_gpus_have_finished() {
    let lanes = lanes();
    let turn = lanes.turn("GPU-0").await.unwrap();
    let grant = lanes.grant("GPU-1", "GPU-1", SOON).await.unwrap();
    let _elsewhere = lanes.turn("GPU-2").await.unwrap();
    let claim = lanes.claim(&[gpu(0), gpu(1)]).unwrap();
    let mut alone = Box::pin(claim.wait_until_alone());
    assert!(is_pending(&mut alone).await);
    // None begins after the claim: while it is planned they wait, and once it has begun they leave.
    let mut late = Box::pin(lanes.turn("GPU-1"));
    assert!(is_pending(&mut late).await);
    drop(turn);
    assert!(is_pending(&mut alone).await);
    drop(grant);
    timeout(SOON, alone).await.unwrap();
    assert!(is_pending(&mut late).await);
    claim.begin("op-1");
    assert!(timeout(SOON, late).await.unwrap().is_none());
    drop(claim);
    assert!(lanes.turn("GPU-1").await.is_some());
}

#[tokio::test(start_paused = true)]
async fn claimed_gpu_grants_nothing() {
    let lanes = lanes();
    let claim = lanes.claim(&[gpu(0)]).unwrap();
    let mut waits = Box::pin(lanes.grant("GPU-0", "GPU-0", SOON));
    assert!(is_pending(&mut waits).await);
    claim.begin("op-1");
    let withheld = lanes.grant("GPU-0", "GPU-0", Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(withheld, Withheld::Claimed(Holder::Operation("op-1".to_owned())));
    drop(claim);
    timeout(SOON, waits).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn waiting_operation_is_not_overtaken_by_later_shares() {
    let lanes = lanes();
    let place = lanes.queue(Waiter::Operation("op-1".to_owned()), takes_away("GPU-0"));
    assert_eq!(place.ahead(), None);
    let withheld = lanes.grant("GPU-0", "GPU-0", SOON).await.unwrap_err();
    assert!(
        matches!(&withheld, Withheld::Reserved(ahead) if ahead.waiter == Waiter::Operation("op-1".to_owned())),
        "{withheld:?}"
    );
    // What it leaves alone may be granted.
    drop(lanes.grant("GPU-0", "MIG-1", SOON).await.unwrap());
    place.set_needs(takes_away("MIG-1"));
    drop(lanes.grant("GPU-0", "GPU-0", SOON).await.unwrap());
    drop(place);
    drop(lanes.grant("GPU-0", "MIG-1", SOON).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn request_that_came_before_the_operation_goes_first() {
    let lanes = lanes();
    let claim = lanes.claim(&[gpu(0)]).unwrap();
    let mut request = Box::pin(lanes.grant("GPU-0", "GPU-0", SOON));
    assert!(is_pending(&mut request).await);
    let place = lanes.queue(Waiter::Operation("op-2".to_owned()), takes_away("GPU-0"));
    assert_eq!(place.ahead().map(|ahead| ahead.waiter), Some(Waiter::Share));
    let mut room = lanes.room();
    drop(claim);
    room.mark_unchanged();
    drop(timeout(SOON, request).await.unwrap().unwrap());
    assert_eq!(place.ahead(), None);
    assert!(room.has_changed().unwrap(), "the operation is notified");
}
