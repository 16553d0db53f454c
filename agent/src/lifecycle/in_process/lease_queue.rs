//! Requests that wait for a lease: who gets free capacity, what a quota permits, and what a restart keeps.

use gpush_api::{Code, EndReason, Lease, LeaseGrant, LeaseId, LeaseState, OperationState};
use hyper::Method;
use serde_json::{Value, json};

use super::{
    InProcess,
    host::ScriptedHost,
    lease_requests::{SLOW_READINGS, WHOLE, whole, whole_gpus},
    leases::{FIXED, devices, waiting},
    requests::{self, PendingAnswer},
    user,
};

const HOLDER: u32 = 65_534;

impl InProcess {
    /// Begins to request a lease with an idempotency key.
    pub(super) fn begin_lease(&self, key: &str, body: &Value) -> PendingAnswer {
        let headers = [("content-type", "application/json"), ("idempotency-key", key)];
        let body = body.to_string().into_bytes();
        self.begin_request(requests::request(user(0), Method::POST, "/v1/leases", &headers, body))
    }

    async fn lease_now(&self, id: LeaseId) -> Lease {
        self.get(&format!("/v1/leases/{id}")).await
    }

    /// Waits until this number of requests is queued. Returns them in the order of the queue.
    pub(super) async fn order_of_queue(&self, number: usize) -> Vec<LeaseId> {
        let mut queued = self.wait_for_queued(number).await;
        queued.sort_by_key(|lease| lease.queue.as_ref().map(|queue| queue.position));
        queued.into_iter().map(|lease| lease.id).collect()
    }

    /// Waits until a quota denies a queued request, for a reason that contains `says`.
    pub(super) async fn until_denied(&self, id: LeaseId, says: &str) {
        self.until("the quota denies the request", async || {
            let reasons = self.lease_now(id).await.queue.map(|queue| queue.reasons).unwrap_or_default();
            reasons.iter().any(|reason| reason.contains(says)).then_some(())
        })
        .await;
    }
}

fn for_nobody(gpus: &str, count: u32) -> Value {
    let mut body = whole(gpus, count);
    body["holder_uid"] = json!(HOLDER);
    body
}

async fn granted(client: PendingAnswer) -> LeaseGrant {
    client.await.expect("an answer").document().expect("a lease")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_request_is_granted_after_a_release_or_times_out() {
    let host = whole_gpus(2).start(WHOLE).await;
    let both = host.lease(0, &whole("all", 2)).await.expect("both");
    let client = host.begin_post(user(0), "/v1/leases", &waiting(whole("all", 2)));
    let first = host.wait_for_queued(1).await.remove(0);
    assert_eq!(first.queue.as_ref().map(|queue| queue.position), Some(1), "{first:?}");
    host.release(&both).await;
    let granted = granted(client).await;
    assert_eq!((granted.lease.id, granted.lease.state), (first.id, LeaseState::Active));
    assert_eq!(granted.lease.members.len(), 2);
    let mut soon = whole("all", 1);
    soon["wait"] = json!("1s");
    let late = host.lease(0, &soon).await.unwrap_err();
    assert_eq!((late.code, late.retryable), (Code::TimedOut, true), "{late:?}");
    assert_eq!(host.leases().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_whose_client_disconnects_leaves_the_queue() {
    let host = whole_gpus(2).start(WHOLE).await;
    let both = host.lease(0, &whole("all", 2)).await.expect("both");
    let client = host.begin_post(user(0), "/v1/leases", &waiting(whole("all", 1)));
    let queued = host.wait_for_queued(1).await[0].id;
    drop(client);
    let is_ended = async || Some(host.lease_now(queued).await).filter(|lease| lease.state == LeaseState::Ended);
    assert_eq!(host.until("the end", is_ended).await.reason, Some(EndReason::Cancelled));
    host.release(&both).await;
    host.wait_until_ended(&both).await;
    host.lease(0, &whole("all", 2)).await.expect("both are free");
}

/// Until the client of a queued request reconnects, gpushd keeps the GPU for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn free_capacity_is_kept_for_a_disconnected_queued_client() {
    let host = whole_gpus(1);
    let gpushd = host.start(WHOLE).await;
    let holder = gpushd.lease(0, &whole("0", 1)).await.expect("a lease");
    let body = waiting(whole("0", 1));
    let _client = gpushd.begin_lease("away", &body);
    let queued = gpushd.wait_for_queued(1).await[0].id;
    gpushd.kill();
    let gpushd = host.start(WHOLE).await;
    gpushd.release(&holder).await;
    gpushd.wait_until_ended(&holder).await;
    gpushd.lease(0, &whole("0", 1)).await.expect_err("the GPU is kept");
    let granted = granted(gpushd.begin_lease("away", &body)).await;
    assert_eq!((granted.lease.id, gpushd.lease_now(queued).await.state), (queued, LeaseState::Active));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_of_leases_and_operations_survives_a_restart() {
    let host = ScriptedHost::new("dgx-h100", 1);
    let gpushd = host.start(FIXED).await;
    gpushd.apply(&["0"], &["1g.10gb*2"]).await;
    let both = gpushd.lease(0, &devices("1g.10gb", 2)).await.expect("both devices");
    let body = waiting(devices("1g.10gb", 1));
    let _first = gpushd.begin_lease("first", &body);
    let before = gpushd.wait_for_queued(1).await[0].id;
    let operation = gpushd.begin_waiting(&["0"], &["7g.80gb"]).await;
    gpushd.ended_or(&operation, |now| now.state == OperationState::Waiting).await;
    let _second = gpushd.begin_lease("second", &body);
    gpushd.wait_for_queued(2).await;
    gpushd.kill();
    let gpushd = host.start(FIXED).await;
    let first = gpushd.begin_lease("first", &body);
    let _second = gpushd.begin_lease("second", &body);
    gpushd
        .until("the order of before", async || {
            let mut queued = gpushd.leases().await;
            queued.retain(|lease| lease.state == LeaseState::Queued);
            queued.sort_by_key(|lease| lease.id);
            let position = |lease: &Lease| lease.queue.as_ref().map(|queue| queue.position);
            let positions: Vec<_> = queued.iter().map(position).collect();
            (positions == [Some(1), Some(3)] && queued[0].id == before).then_some(())
        })
        .await;
    gpushd.release(&both).await;
    assert_eq!(granted(first).await.lease.id, before, "it came before the operation");
    gpushd.cancel(&operation.id).await.expect("it is cancelled");
}

/// gpushd is stopped and killed several times. A request that comes afterwards takes the last place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_keeps_its_order_over_restarts_and_a_newcomer_is_last() {
    let host = whole_gpus(1);
    let mut gpushd = host.start(WHOLE).await;
    let mut holder = gpushd.lease(0, &whole("0", 1)).await.expect("a lease");
    let (body, keys) = (waiting(whole("0", 1)), ["first", "second", "third"]);
    let mut clients = Vec::new();
    for key in keys {
        clients.push(gpushd.begin_lease(key, &body));
        gpushd.wait_for_queued(clients.len()).await;
    }
    let order = gpushd.order_of_queue(3).await;
    for is_killed in [true, false, true, false] {
        if is_killed {
            gpushd.kill();
        } else {
            gpushd.stop().await;
        }
        gpushd = host.start(WHOLE).await;
        // The clients reconnect in another order.
        clients = keys.into_iter().rev().map(|key| gpushd.begin_lease(key, &body)).collect();
        assert_eq!(gpushd.order_of_queue(3).await, order, "after a kill: {is_killed}");
    }
    clients.reverse();
    clients.push(gpushd.begin_lease("newcomer", &body));
    let last = gpushd.order_of_queue(4).await;
    assert_eq!(last[..3], order, "the newcomer is last");
    for (client, id) in clients.into_iter().zip(last) {
        gpushd.release(&holder).await;
        holder = granted(client).await;
        assert_eq!(holder.lease.id, id);
    }
    assert_eq!(gpushd.leases().await.len(), 1, "no request was executed twice");
}

/// Fault: a queued request that exceeded a quota still kept its GPU from others, although its holder could not get it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_request_beyond_its_quota_keeps_no_gpu() {
    let quota = format!("[[quota]]\nusers = [\"user{HOLDER}\"]\nleases = 1\n");
    let host = whole_gpus(2).start(&format!("{quota}{WHOLE}")).await;
    let taken = host.lease(0, &whole("0", 1)).await.expect("a lease");
    let client = host.begin_lease("beyond", &waiting(for_nobody("0", 1)));
    let queued = host.wait_for_queued(1).await[0].id;
    let other = host.lease(0, &for_nobody("1", 1)).await.expect("the only lease of the quota");
    host.release(&taken).await;
    host.wait_until_ended(&taken).await;
    host.until_denied(queued, "may hold 1 lease").await;
    let free = host.lease(0, &whole("0", 1)).await.expect("the queued request keeps nothing");
    host.release(&free).await;
    host.release(&other).await;
    assert_eq!(granted(client).await.lease.id, queued, "its holder has room in the quota again");
}

/// Some limits of a quota depend on what the request gets, so gpushd can check them only when there is room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_request_over_memory_quota_does_not_block_queue() {
    let quota = format!("[[quota]]\nusers = [\"user{HOLDER}\"]\nmemory = \"8G\"\n");
    let host = whole_gpus(2).start(&format!("{quota}{WHOLE}")).await;
    let taken = host.lease(0, &whole("0", 1)).await.expect("a lease");
    let _client = host.begin_lease("much", &waiting(for_nobody("0", 1)));
    let queued = host.wait_for_queued(1).await[0].id;
    host.release(&taken).await;
    host.wait_until_ended(&taken).await;
    host.until_denied(queued, "8 GiB").await;
    host.lease(0, &whole("1", 1)).await.expect("the queue still serves others");
}

/// Fault: a user without leases sent one request for all GPUs, while another lease had one of them. The request exceeded
/// the quota, but it reserved all other GPUs for as long as it waited.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_requests_reserve_no_more_than_the_quota() {
    let quota = format!("[[quota]]\nusers = [\"user{HOLDER}\"]\nleases = 3\nmemory = \"2 GPUs\"\n");
    let host = whole_gpus(6).start(&format!("{quota}{WHOLE}")).await;
    for gpu in ["0", "2", "4"] {
        host.lease(0, &whole(gpu, 1)).await.expect("a lease");
    }
    // Each of the first two requests has 2 GPUs, and the last one has 3.
    let mut clients = Vec::new();
    for (gpus, count) in [("0-1", 2), ("2-3", 2), ("3-5", 3)] {
        clients.push(host.begin_post(user(0), "/v1/leases", &waiting(for_nobody(gpus, count))));
        host.wait_for_queued(clients.len()).await;
    }
    let mut order: Vec<LeaseId> = host.wait_for_queued(3).await.iter().map(|lease| lease.id).collect();
    order.sort_unstable();
    for id in &order[1..] {
        host.until_denied(*id, "may hold the memory of 2 GPUs").await;
    }
    let refused = host.lease(0, &whole("1", 1)).await.unwrap_err();
    assert_eq!(refused.code, Code::Blocked, "the first request reserves it");
    host.lease(0, &whole("3", 1)).await.expect("the second request reserves nothing");
    host.lease(0, &whole("5", 1)).await.expect("the third request reserves nothing");
}

/// While a reading of a GPU hangs, gpushd does not know whether the GPU is free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_for_a_gpu_with_a_late_reading_is_granted_afterwards() {
    let host = whole_gpus(2).start(&format!("{SLOW_READINGS}{WHOLE}")).await;
    host.reading_hangs(1).await;
    let client = host.begin_post(user(0), "/v1/leases", &waiting(whole("1", 1)));
    let queued = host.wait_for_queued(1).await[0].id;
    host.lease(0, &whole("0", 1)).await.expect("the other GPU does not wait");
    host.gpus.release();
    assert_eq!(granted(client).await.lease.id, queued);
}
