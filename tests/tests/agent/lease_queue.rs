//! Requests wait for a lease while gpushd restarts. They keep their positions in the queue, and
//! their clients reconnect.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use gpush_api::{Code, EndReason, Lease, LeaseGrant, LeaseId, LeaseState};
use gpush_tests::{
    agent::{Agent, PATIENCE, Setup, parse},
    host::{Host, program},
    mps::{lease_becomes, lease_now, release},
};
use serde_json::{Value, json};

use crate::{
    disk::Disk,
    leases::{MIG, WHOLE, leases, request, two_gpus},
};

/// The uid of `nobody`.
const NOBODY: u32 = 65534;

/// A client that repeats its request with the same key while gpushd does not run, as gpushctl does.
struct Waiting(thread::JoinHandle<LeaseGrant>);

impl Waiting {
    fn start(socket: &Path, key: &str, body: &Value) -> Self {
        let (socket, text) = (socket.to_owned(), http(key, body));
        Self(thread::spawn(move || {
            let until = Instant::now() + PATIENCE;
            loop {
                if let Some(answer) = send(&socket, &text).as_deref().and_then(parse) {
                    match answer.status {
                        200 => return serde_json::from_value(answer.json()).expect("a lease"),
                        503 => {}
                        _ => panic!("{:?}", answer.error()),
                    }
                }
                assert!(Instant::now() < until, "no lease came");
                thread::sleep(Duration::from_millis(20));
            }
        }))
    }

    fn granted(self) -> LeaseId {
        self.0.join().expect("a lease").lease.id
    }
}

fn http(key: &str, body: &Value) -> String {
    let body = body.to_string();
    let key = if key.is_empty() { String::new() } else { format!("idempotency-key: {key}\r\n") };
    format!(
        "POST /v1/leases HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\ncontent-type: application/json\r\n{key}\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Sends a request and returns the response, or `None` if no response arrives.
fn send(socket: &PathBuf, text: &str) -> Option<Vec<u8>> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.write_all(text.as_bytes()).ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    Some(answer)
}

/// Returns the queued requests, in order.
fn queue(agent: &Agent) -> Vec<Lease> {
    let mut queued: Vec<Lease> = leases(agent).into_iter().filter(|lease| lease.state == LeaseState::Queued).collect();
    queued.sort_by_key(|lease| lease.queue.as_ref().map(|queue| queue.position));
    queued
}

fn await_queued(agent: &Agent, count: usize) -> Vec<LeaseId> {
    agent.await_that("they wait", || queue(agent).iter().filter(|lease| lease.queue.is_some()).count() == count);
    queue(agent).iter().map(|lease| lease.id).collect()
}

fn whole_gpu_0() -> Value {
    json!({ "share": { "kind": "whole" }, "selectors": ["0"], "wait": "unlimited" })
}

#[test]
fn queued_requests_keep_their_order_after_kill_and_stop() {
    let (host, mut agent) = two_gpus(WHOLE);
    let body = json!({ "share": { "kind": "whole" }, "selectors": ["0"] });
    let mut holder = request(&agent, &body).expect("a lease").lease.id;
    let socket = agent.socket().to_owned();
    let mut clients = Vec::new();
    for number in 0..3 {
        clients.push(Waiting::start(&socket, &format!("waits-{number}"), &whole_gpu_0()));
        await_queued(&agent, number + 1);
    }
    let order = await_queued(&agent, 3);
    for round in 0..4 {
        if round % 2 == 0 {
            agent.kill();
        } else {
            agent.stop();
        }
        agent = Agent::start(&host, WHOLE);
        assert_eq!(await_queued(&agent, 3), order, "round {round}");
    }
    // A new request takes the last position in the queue.
    clients.push(Waiting::start(&socket, "newcomer", &whole_gpu_0()));
    let order = await_queued(&agent, 4);
    for (client, id) in clients.into_iter().zip(order) {
        release(&agent, holder);
        assert_eq!(client.granted(), id);
        holder = id;
    }
    let all: Vec<LeaseId> = leases(&agent).iter().map(|lease| lease.id).collect();
    assert_eq!(all, [holder], "no request was executed twice");
}

#[test]
fn free_capacity_is_kept_for_a_disconnected_queued_client() {
    let (host, agent) = two_gpus(WHOLE);
    let body = json!({ "share": { "kind": "whole" }, "selectors": ["0"] });
    let holder = request(&agent, &body).expect("a lease").lease.id;
    let socket = agent.socket().to_owned();
    let text = http("away", &json!({ "share": { "kind": "whole" }, "selectors": ["0"], "wait": "unlimited" }));
    let (first, asks) = (socket.clone(), text.clone());
    let client = thread::spawn(move || send(&first, &asks));
    let waits = await_queued(&agent, 1)[0];
    agent.kill();
    client.join().expect("an end");
    let agent = Agent::start(&host, WHOLE);
    release(&agent, holder);
    lease_becomes(&agent, holder, LeaseState::Ended);
    // The client of the queued request has not reconnected yet. Nevertheless, gpushd keeps the GPU
    // for the queued request, and refuses another request for this GPU.
    request(&agent, &body).expect_err("the GPU is kept");
    let answer = parse(&send(&socket, &text).expect("an answer")).expect("HTTP");
    assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    let granted: LeaseGrant = serde_json::from_value(answer.json()).expect("a lease");
    assert_eq!((granted.lease.id, lease_now(&agent, waits).state), (waits, LeaseState::Active));
}

#[test]
fn queue_of_leases_and_operations_survives_a_restart() {
    let (host, agent) = two_gpus(MIG);
    let share = json!({ "kind": "mig_profile", "profile": "1g.10gb" });
    let both = request(&agent, &json!({ "share": share, "count": 2 })).expect("both devices").lease.id;
    let socket = agent.socket().to_owned();
    let body = json!({ "share": share, "wait": "unlimited" });
    let first = Waiting::start(&socket, "first", &body);
    let before = await_queued(&agent, 1)[0];
    let layout = json!({ "selectors": ["0"], "layout_source": { "entries": ["7g.80gb"] }, "wait_s": 600 });
    let operation = agent.begin_with(&layout).expect("it waits");
    agent.await_that("the operation waits", || agent.operation(&operation.id).state.name() == "waiting");
    let _second = Waiting::start(&socket, "second", &body);
    await_queued(&agent, 2);
    agent.kill();
    let agent = Agent::start(&host, MIG);
    agent.await_that("the order of before", || {
        let waiting = queue(&agent);
        let [one, other] = waiting.as_slice() else { return false };
        let position = |lease: &Lease| lease.queue.as_ref().map(|queue| queue.position);
        one.id == before && (position(one), position(other)) == (Some(1), Some(3))
    });
    release(&agent, both);
    assert_eq!(first.granted(), before, "it came before the operation");
    assert_eq!(agent.cancel(&operation.id).status, 202);
}

/// Fault: a queued request that exceeded a quota still kept its GPU from others, although its holder could not get it.
#[test]
fn queued_request_beyond_its_quota_keeps_no_gpu() {
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIPPED a quota of another user: only root can request leases for others");
    }
    let (_host, agent) = two_gpus(&format!("[[quota]]\nusers = [\"nobody\"]\nleases = 1\n{WHOLE}"));
    let whole =
        |gpu: &str, holder: u32| json!({ "share": { "kind": "whole" }, "selectors": [gpu], "holder_uid": holder });
    let taken = request(&agent, &whole("0", 0)).expect("a lease").lease.id;
    let mut body = whole("0", NOBODY);
    body["wait"] = json!("unlimited");
    let waiting = Waiting::start(agent.socket(), "beyond", &body);
    let queued = await_queued(&agent, 1)[0];
    let other = request(&agent, &whole("1", NOBODY)).expect("the only lease of the quota").lease.id;
    release(&agent, taken);
    lease_becomes(&agent, taken, LeaseState::Ended);
    agent.await_that("the quota denies the queued request", || {
        let reasons = lease_now(&agent, queued).queue.map(|queue| queue.reasons).unwrap_or_default();
        reasons.iter().any(|reason| reason.contains("may hold 1 lease"))
    });
    let free = request(&agent, &whole("0", 0)).expect("the queued request keeps nothing").lease.id;
    release(&agent, free);
    release(&agent, other);
    assert_eq!(waiting.granted(), queued, "its holder has room in the quota again");
}

/// Some limits of a quota depend on what the request gets, so gpushd can check them only when there is room.
#[test]
fn queued_request_that_gets_too_much_memory_waits_and_does_not_stop_the_queue() {
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIPPED a quota of another user: only root can request leases for others");
    }
    let (_host, agent) = two_gpus(&format!("[[quota]]\nusers = [\"nobody\"]\nmemory = \"8G\"\n{WHOLE}"));
    let whole =
        |gpu: &str, holder: u32| json!({ "share": { "kind": "whole" }, "selectors": [gpu], "holder_uid": holder });
    let taken = request(&agent, &whole("0", 0)).expect("a lease").lease.id;
    let mut body = whole("0", NOBODY);
    body["wait"] = json!("unlimited");
    let socket = agent.socket().to_owned();
    let _waiting = thread::spawn(move || send(&socket, &http("much", &body)));
    let queued = await_queued(&agent, 1)[0];
    release(&agent, taken);
    lease_becomes(&agent, taken, LeaseState::Ended);
    agent.await_that("the quota denies the queued request", || {
        let reasons = lease_now(&agent, queued).queue.map(|queue| queue.reasons).unwrap_or_default();
        reasons.iter().any(|reason| reason.contains("8 GiB"))
    });
    let other = request(&agent, &whole("1", 0)).expect("the queue still serves others").lease.id;
    release(&agent, other);
}

/// Fault: a user without leases sent one request for all GPUs, while another lease had one of them. The request exceeded
/// the quota, but it reserved all other GPUs for as long as it waited.
#[test]
fn queued_requests_reserve_no_more_than_the_quota() {
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIPPED a quota of another user: only root can request leases for others");
    }
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 6\n");
    let rules = "[[gpu]]\nmatch = [\"0-5\"]\nmode = \"exclusive\"\n";
    let quota = "[[quota]]\nusers = [\"nobody\"]\nleases = 3\nmemory = \"2 GPUs\"\n";
    let agent = Agent::start(&host, &format!("{quota}{rules}"));
    let whole = |gpus: &str, count: u32, holder: u32| json!({ "share": { "kind": "whole" }, "selectors": [gpus], "count": count, "holder_uid": holder });
    for gpu in ["0", "2", "4"] {
        request(&agent, &whole(gpu, 1, 0)).expect("a lease");
    }
    // Each of the first two requests has 2 GPUs, and the last one has 3.
    let mut order = Vec::new();
    for (gpus, count) in [("0-1", 2), ("2-3", 2), ("3-5", 3)] {
        let (socket, mut body) = (agent.socket().to_owned(), whole(gpus, count, NOBODY));
        body["wait"] = json!("unlimited");
        thread::spawn(move || send(&socket, &http("", &body)));
        order = await_queued(&agent, order.len() + 1);
    }
    for id in &order[1..] {
        agent.await_that("the quota denies the request", || {
            let reasons = lease_now(&agent, *id).queue.map(|queue| queue.reasons).unwrap_or_default();
            reasons.iter().any(|reason| reason.contains("may hold the memory of 2 GPUs"))
        });
    }
    assert_eq!(request(&agent, &whole("1", 1, 0)).unwrap_err().code, Code::Blocked, "the first request reserves it");
    request(&agent, &whole("3", 1, 0)).expect("the second request reserves nothing");
    request(&agent, &whole("5", 1, 0)).expect("the third request reserves nothing");
}

#[test]
fn queued_request_without_its_client_is_cancelled() {
    let (host, agent) = two_gpus(WHOLE);
    request(&agent, &json!({ "share": { "kind": "whole" }, "selectors": ["0"] })).expect("a lease");
    let socket = agent.socket().to_owned();
    let mut clients = Vec::new();
    for (number, key) in ["", "gone"].into_iter().enumerate() {
        let (socket, text) = (socket.clone(), http(key, &whole_gpu_0()));
        clients.push(thread::spawn(move || send(&socket, &text)));
        await_queued(&agent, number + 1);
    }
    let order = await_queued(&agent, 2);
    agent.kill();
    for client in clients {
        client.join().expect("an end");
    }
    let agent = Agent::start(&host, WHOLE);
    // A client without a key cannot name its request again, so the request ends when the client
    // disconnects.
    assert_eq!(lease_becomes(&agent, order[0], LeaseState::Ended).reason, Some(EndReason::Cancelled));
    assert_eq!(lease_becomes(&agent, order[1], LeaseState::Ended).reason, Some(EndReason::Cancelled));
}

#[test]
fn waiting_gpushctl_gets_its_lease_after_restarts() {
    let (host, mut agent): (Host, Agent) = two_gpus(WHOLE);
    let holder = request(&agent, &json!({ "share": { "kind": "whole" }, "selectors": ["0"] })).expect("a lease");
    let mut command = Command::new(program("gpushctl"));
    command.args(["run", "--whole", "-g", "0", "--wait", "--", "/bin/sh", "-c", "echo granted $GPUSH_LEASE"]);
    command.env("GPUSH_SOCKET", agent.socket()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let client = command.spawn().expect("gpushctl");
    let waits = await_queued(&agent, 1)[0];
    for round in 0..2 {
        if round == 0 {
            agent.stop();
        } else {
            agent.kill();
        }
        agent = Agent::start(&host, WHOLE);
        assert_eq!(await_queued(&agent, 1), [waits]);
    }
    release(&agent, holder.lease.id);
    let output = client.wait_with_output().expect("an end");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text, format!("granted {waits}\n"), "{}", String::from_utf8_lossy(&output.stderr));
    lease_becomes(&agent, waits, LeaseState::Ended);
}

/// Faults: if a grant failed temporarily, gpushd granted a later request first. If gpushd stopped just after such a
/// failure, the request lost its place.
#[test]
fn request_keeps_its_place_while_its_grant_fails() {
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 2\n");
    let Some(disk) = Disk::mount(Setup::on(&host).state_dir()) else { return };
    let agent = Agent::start(&host, WHOLE);
    agent.wait_for_layouts_at_start();
    let body = |gpu: &str| json!({ "share": { "kind": "whole" }, "selectors": [gpu] });
    let holder = request(&agent, &body("0")).expect("a lease").lease.id;
    let socket = agent.socket().to_owned();
    let mut clients = Vec::new();
    for number in 0..2 {
        clients.push(Waiting::start(&socket, &format!("waits-{number}"), &whole_gpu_0()));
        await_queued(&agent, number + 1);
    }
    let order = await_queued(&agent, 2);
    disk.fill();
    agent.await_that("gpushd cannot record a grant", || match request(&agent, &body("1")) {
        Ok(granted) => {
            release(&agent, granted.lease.id);
            false
        }
        Err(error) => error.code != Code::Blocked,
    });
    release(&agent, holder);
    let again = |id: LeaseId| agent.log().matches(&format!("lease {id} is queued again")).count();
    agent.await_that("two attempts", || again(order[0]) >= 2);
    assert_eq!(again(order[1]), 0, "the first request keeps its reservation");
    agent.stop();
    disk.free();
    let agent = Agent::start(&host, WHOLE);
    let [first, second] = clients.try_into().ok().expect("two clients");
    assert_eq!(first.granted(), order[0]);
    assert_eq!(await_queued(&agent, 1), [order[1]]);
    release(&agent, order[0]);
    assert_eq!(second.granted(), order[1]);
}

/// Fault: if a client with an idempotency key disconnected while gpushd created the devices of its queued lease, the lease
/// ended as soon as the devices existed.
#[test]
fn lease_is_kept_for_a_client_that_disconnects_in_creation() {
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\n");
    let dynamic = "[driver]\nchange_s = 60\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";
    let agent = Agent::start(&host, dynamic);
    agent.wait_for_layouts_at_start();
    let device = |profile: &str| json!({ "share": { "kind": "mig_profile", "profile": profile }, "wait": "unlimited" });
    let holder = request(&agent, &device("7g.80gb")).expect("a lease").lease.id;
    let text = http("disconnects", &device("3g.40gb"));
    let mut connection = agent.connect();
    connection.write_all(text.as_bytes()).expect("sent");
    let queued = await_queued(&agent, 1)[0];
    host.fault("nvmlDeviceCreateGpuInstance* --gpu 0 --hang");
    release(&agent, holder);
    agent.await_that("the device is created", || lease_now(&agent, queued).state == LeaseState::Granting);
    drop(connection);
    // gpushd reads the end of the connection while it answers other requests.
    for _ in 0..20 {
        assert_eq!(lease_now(&agent, queued).state, LeaseState::Granting);
    }
    host.clear_faults();
    lease_becomes(&agent, queued, LeaseState::Active);
    let answer = parse(&send(&agent.socket().to_owned(), &text).expect("an answer")).expect("HTTP");
    assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    let granted: LeaseGrant = serde_json::from_value(answer.json()).expect("a lease");
    assert_eq!((granted.lease.id, granted.lease.state), (queued, LeaseState::Active));
}
