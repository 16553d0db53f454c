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
    mps::{lease_becomes, release},
};
use serde_json::{Value, json};

use crate::{
    disk::Disk,
    leases::{WHOLE, leases, request, two_gpus},
};

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
