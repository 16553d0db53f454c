//! Capacity that the queue keeps for waiting requests, and who may use it meanwhile.

use gpush_api::{Code, GpuIndex, Lease, LeaseGrant, LeaseId, LeaseQueueReservation};
use gpush_core::schedule::ReservationLimits;
use serde_json::{Value, json};

use super::{
    InProcess,
    host::ScriptedHost,
    lease_requests::SLOW_READINGS,
    leases::{DYNAMIC, FIXED, devices, waiting},
    requests::PendingAnswer,
    user,
};

/// A request without an end.
fn endless(profile: &str) -> Value {
    json!({ "share": { "kind": "mig_profile", "profile": profile } })
}

fn lasting(profile: &str, seconds: u64) -> Value {
    json!({ "share": { "kind": "mig_profile", "profile": profile }, "duration_s": seconds })
}

impl InProcess {
    /// Waits until a queued request reserves capacity.
    async fn until_reserved(&self, id: LeaseId) -> LeaseQueueReservation {
        let reserves = async || self.get::<Lease>(&format!("/v1/leases/{id}")).await.queue?.reserves;
        self.until("the reservation", reserves).await
    }

    async fn renew(&self, uid: u32, grant: &LeaseGrant, seconds: u64) -> Result<Lease, gpush_api::ApiError> {
        let path = format!("/v1/leases/{}/renew", grant.lease.id);
        self.post_as(user(uid), &path, &json!({ "duration_s": seconds })).await
    }

    /// Grants and ends small leases until a request for one is refused. Returns their number.
    async fn small_leases(&self, most: usize) -> usize {
        for number in 0..most {
            match self.lease(0, &endless("1g.10gb")).await {
                Ok(granted) => {
                    self.release(&granted).await;
                    self.wait_until_ended(&granted).await;
                }
                Err(refused) => {
                    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
                    return number;
                }
            }
        }
        most
    }
}

/// The waiting request gets both devices when L1 ends. Meanwhile, a short lease may use the free device.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_lease_uses_reserved_device_and_cannot_stay() {
    let host = InProcess::start("dgx-h100", 1, &format!("{SLOW_READINGS}{FIXED}at_end = \"end\"\n")).await;
    host.apply(&["0"], &["1g.10gb*2"]).await;
    let first = host.lease(1000, &lasting("1g.10gb", 3600)).await.expect("a device");
    let both = waiting(devices("1g.10gb", 2));
    let client = host.begin_post(user(1001), "/v1/leases", &both);
    let waiting = host.wait_for_queued(1).await.remove(0);
    let reserves = host.until_reserved(waiting.id).await;
    assert_eq!((reserves.gpus, reserves.free_at), (vec![GpuIndex(0)], first.lease.expires_at), "{first:?}");
    assert_eq!((reserves.blocking_leases, reserves.without_end), (vec![first.lease.id], Vec::new()));
    for body in [endless("1g.10gb"), lasting("1g.10gb", 7200)] {
        let refused = host.lease(0, &body).await.unwrap_err();
        assert_eq!(refused.code, Code::Blocked, "{refused:?}");
        assert!(format!("{refused:?}").contains(&waiting.id.to_string()), "{refused:?}");
        let hint = refused.hint.expect("a hint");
        assert!(hint.starts_with("request at most `--for 5") && hint.contains("m`, to use"), "{hint}");
    }
    let short = host.lease(1002, &lasting("1g.10gb", 600)).await.expect("it ends before the first lease");
    host.renew(1002, &short, 1200).await.expect("it still ends before the first lease");
    let refused = host.renew(1002, &short, 7200).await.unwrap_err();
    assert_eq!(refused.code, Code::Blocked, "{refused:?}");
    let hint = refused.hint.expect("a hint");
    assert!(hint.contains(&format!("gpushctl lease renew {} --for ", short.lease.id)), "{hint}");
    // The first lease was granted before the request came, so the request waits longer.
    let renewed = host.renew(1000, &first, 5400).await.expect("the first lease may stay");
    let is_new = async || {
        let reserves = host.until_reserved(waiting.id).await;
        (reserves.free_at == renewed.expires_at).then_some(())
    };
    host.until("the new end", is_new).await;
    host.renew(0, &short, 7200).await.expect("an administrator may renew it");
    host.release(&first).await;
    host.release(&short).await;
    let granted: LeaseGrant = client.await.expect("an answer").document().expect("both devices");
    assert_eq!(granted.lease.id, waiting.id);
}

/// By default, gpushd does not end the processes of an expired lease. So a short lease could stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reserved_device_is_kept_where_leases_may_outlast_their_end() {
    let host = InProcess::start("dgx-h100", 1, &format!("{SLOW_READINGS}{FIXED}")).await;
    host.apply(&["0"], &["1g.10gb*2"]).await;
    let _first = host.lease(1000, &lasting("1g.10gb", 3600)).await.expect("a device");
    let _client = host.begin_post(user(1001), "/v1/leases", &waiting(devices("1g.10gb", 2)));
    let waiting = host.wait_for_queued(1).await.remove(0);
    assert!(host.until_reserved(waiting.id).await.free_at.is_some());
    assert_eq!(host.lease(0, &lasting("1g.10gb", 60)).await.unwrap_err().code, Code::Blocked);
}

/// Three requests wait for whole GPUs, and each GPU has a lease without an end. The number of later grants survives a
/// killed gpushd, as does the order of the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn third_request_reserves_after_it_was_overtaken() {
    const GPUS: usize = 3;
    let most = ReservationLimits::DEFAULT.overtaken_per_gpu as usize * GPUS;
    let host = ScriptedHost::new("dgx-a100", GPUS);
    let config = format!("{SLOW_READINGS}{DYNAMIC}");
    let mut gpushd = host.start(&config).await;
    let mut held = Vec::new();
    for gpu in 0..GPUS {
        let mut body = endless("1g.10gb");
        body["selectors"] = json!([gpu.to_string()]);
        held.push(gpushd.lease(0, &body).await.expect("a device on each GPU"));
    }
    let (keys, body) = (["first", "second", "third"], waiting(endless("7g.80gb")));
    let mut clients: Vec<PendingAnswer> = Vec::new();
    for key in keys {
        clients.push(gpushd.begin_lease(key, &body));
        gpushd.wait_for_queued(clients.len()).await;
    }
    let order = gpushd.order_of_queue(GPUS).await;
    for id in &order[..2] {
        let reserves = gpushd.until_reserved(*id).await;
        assert_eq!((reserves.without_end.len(), reserves.free_at), (1, None), "one lease is in the way");
    }
    assert_eq!(gpushd.small_leases(most / 2).await, most / 2, "the third request reserves nothing");
    gpushd.kill();
    gpushd = host.start(&config).await;
    let _clients = keys.map(|key| gpushd.begin_lease(key, &body));
    assert_eq!(gpushd.order_of_queue(GPUS).await, order);
    for id in &order[..2] {
        gpushd.until_reserved(*id).await;
    }
    assert_eq!(gpushd.small_leases(most).await, most - most / 2, "the third request reserves now");
    gpushd.until_reserved(order[2]).await;
}
