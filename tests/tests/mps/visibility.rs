//! What each route of the API shows to a user about the lease, program and MPS server of another
//! user.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Command, Stdio},
};

use gpush_api::{Code, LeaseGrant, MpsState};
use gpush_tests::{
    agent::Agent,
    host::Host,
    mps::{Client, becomes, reaches, request},
};
use nix::unistd::geteuid;
use serde_json::{Value, json as object};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str = "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// Uid of `nobody`. The next constant is the uid of another user.
const OWNER: u32 = 65534;
const OTHER: u32 = 65532;

/// Routes that every user may read.
const ROUTES: &[&str] = &[
    "/v1/health",
    "/v1/gpus",
    "/v1/gpus?profiles=true",
    "/v1/gpus/0",
    "/v1/mps",
    "/v1/mps/0",
    "/v1/leases",
    "/v1/leases/L1",
    "/v1/processes",
    "/v1/operations",
    "/v1/config",
    "/v1/overrides",
];

fn start() -> Option<(Host, Agent)> {
    if !geteuid().is_root() {
        println!("SKIPPED what users see of each other: only root can ask as another user");
        return None;
    }
    let host = Host::up(HOST);
    for (dir, mode) in [(host.dir().parent().expect("a directory"), 0o755), (&host.dir().join("proc"), 0o777)] {
        fs::set_permissions(dir, fs::Permissions::from_mode(mode)).expect("its mode can be changed");
    }
    let agent = Agent::start_public(&host, CONFIG);
    reaches(&agent, "0", MpsState::Ready);
    let _begun = agent.settle();
    Some((host, agent))
}

/// Sends a request as a user. Returns the body of the response.
fn ask(agent: &Agent, uid: u32, method: &str, path: &str, body: &str) -> String {
    let mut curl = Command::new("curl");
    curl.args(["-sS", "--max-time", "20", "--request", method, "--header", "content-type: application/json"]);
    if !body.is_empty() {
        curl.args(["--data", body]);
    }
    curl.arg("--unix-socket").arg(agent.socket()).arg(format!("http://gpush{path}"));
    let output = curl.uid(uid).gid(uid).current_dir("/").stdin(Stdio::null()).output().expect("curl");
    assert!(output.status.success(), "{path}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

fn json(agent: &Agent, uid: u32, path: &str) -> Value {
    serde_json::from_str(&ask(agent, uid, "GET", path, "")).expect("JSON")
}

/// Returns whether a JSON value contains a number, as a number or as a word of a string.
fn names(value: &Value, number: u32) -> bool {
    let word = number.to_string();
    match value {
        Value::Number(found) => found.to_string() == word,
        Value::String(text) => text.split(|letter: char| !letter.is_ascii_digit()).any(|found| found == word),
        Value::Array(list) => list.iter().any(|one| names(one, number)),
        Value::Object(fields) => fields.values().any(|one| names(one, number)),
        Value::Null | Value::Bool(_) => false,
    }
}

#[test]
fn other_users_process_and_server_are_hidden_on_each_route() {
    let Some((host, agent)) = start() else { return };
    let mut holder = Command::new("sleep").arg("600").uid(OWNER).gid(OWNER).spawn().expect("a process");
    let body = object!({ "percentage": 10, "process": holder.id(), "duration_s": 3600 });
    let taken = ask(&agent, OWNER, "POST", "/v1/leases", &request("0", &body).to_string());
    let taken: LeaseGrant = serde_json::from_str(&taken).unwrap_or_else(|error| panic!("{error}: {taken}"));
    let client = Client::begin(&host, &taken.environment, Some(OWNER));
    assert!(client.says().starts_with("active"));
    let seen = becomes(&agent, "0", "with its client", |daemon| daemon.clients.len() == 1);
    let (pid, server) = (client.pid().cast_unsigned(), seen.servers[0].pid.expect("root sees it"));
    assert_eq!(seen.clients[0].server, Some(server));

    let hidden = [("client", pid), ("server", server), ("bound process", holder.id())];
    for route in ROUTES {
        let answer = json(&agent, OTHER, route);
        for (what, pid) in hidden {
            assert!(!names(&answer, pid), "{route} names the {what}, {pid}: {answer}");
        }
        assert!(!answer.to_string().contains("mps-client"), "{route} shows a command: {answer}");
    }
    // Other users see the lease, its holder and its end.
    let other = json(&agent, OTHER, "/v1/mps/0");
    let shown = &other["granted_leases"][0];
    let id = taken.lease.id.to_string();
    assert_eq!((shown["holder"]["uid"].as_u64(), shown["id"].as_str()), (Some(OWNER.into()), Some(&*id)));
    assert!(shown["holder"]["user"] == "nobody" && shown["expires_at"].is_string(), "{other}");
    assert!(shown["request"].is_null() && shown["asked_by"].is_null(), "{other}");
    assert!(other["servers"][0]["uid"].is_null() && other["clients"][0]["uid"].is_null(), "{other}");
    // The owner sees every detail.
    let own = json(&agent, OWNER, "/v1/mps/0");
    assert!(hidden.iter().all(|(_, pid)| names(&own, *pid)), "{own}");
    // A user can see the lease of another user, but cannot use or change it.
    for (method, path, body) in [
        ("POST", "release", "{}"),
        ("POST", "renew", "{\"duration_s\": 60}"),
        ("POST", "revoke", "{\"reason\": \"mine\", \"end\": true}"),
        ("GET", "environment", ""),
    ] {
        let reported = ask(&agent, OTHER, method, &format!("/v1/leases/{id}/{path}"), body);
        assert!(reported.contains("\"denied\""), "{path}: {reported}");
    }
    let for_another = object!({ "percentage": 1, "holder_uid": OWNER });
    let reported = ask(&agent, OTHER, "POST", "/v1/leases", &request("0", &for_another).to_string());
    assert!(reported.contains("\"denied\""), "{reported}");
    assert_eq!(json(&agent, OWNER, &format!("/v1/leases/{id}"))["state"], "active");
    client.end();
    holder.kill().and_then(|()| holder.wait()).expect("the process ends");
}

#[test]
fn binding_to_foreign_process_is_refused_like_missing_one() {
    let Some((_host, agent)) = start() else { return };
    let mut holder = Command::new("sleep").arg("600").uid(OWNER).gid(OWNER).spawn().expect("a process");
    let refused = |pid: u32| {
        let body = request("0", &object!({ "process": pid })).to_string();
        let reported = ask(&agent, OTHER, "POST", "/v1/leases", &body);
        let error: gpush_api::ApiError =
            serde_json::from_str(&reported).unwrap_or_else(|error| panic!("{error}: {reported}"));
        assert_eq!(error.code, Code::BadRequest, "{reported}");
        reported.replace(&pid.to_string(), "PID")
    };
    // The second pid cannot exist, because it is above the kernel's maximum.
    assert_eq!(refused(holder.id()), refused(4_200_000));
    holder.kill().and_then(|()| holder.wait()).expect("the process ends");
}

/// The audit trail shows who made a request that only administrators may make. If one user makes
/// many such requests, only a few are recorded.
#[test]
fn refused_administration_is_in_the_audit_trail() {
    let Some((_host, agent)) = start() else { return };
    // 40 of the 60 attempts are changing requests: `limits.changes_burst` is 50.
    for _ in 0..20 {
        for (method, path, body) in
            [("POST", "/v1/mps/0/stop", "{}"), ("GET", "/v1/audit", ""), ("POST", "/v1/gpus/0/cordon", "{}")]
        {
            let reported = ask(&agent, OTHER, method, path, body);
            assert!(reported.contains("\"denied\""), "{path}: {reported}");
        }
    }
    let trail = || agent.get("/v1/audit?limit=1000").json();
    let denied = |record: &&Value| record["action"] == "access.denied" && record["by"]["uid"] == OTHER;
    let count = || trail().as_array().expect("records").iter().filter(denied).count();
    agent.await_that("a record", || count() > 0);
    let all = trail();
    let first = all.as_array().expect("records").iter().find(denied).expect("a record");
    assert_eq!(first["result"], "refused", "{first}");
    assert_eq!(first["detail"]["attempt"], "start and stop MPS daemons", "{first}");
    assert!(count() <= 20, "60 attempts left {} records", count());
}
