//! One user sends as many requests as possible, through many connections and with subordinate uids. Meanwhile another user,
//! the administrator and Slurm's hooks work. The hostile requests must not delay them, exceed a quota, erase records of
//! others, or fill memory, log or database.
//!
//! All bounds are counts, bytes, or ratios to the time of a hostile request. `cargo xtask soak` sets a larger number of
//! rounds with `GPUSH_TEST_HOSTILE_ROUNDS`.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Lines, Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use gpush_api::{AuditRecord, Lease};
use gpush_tests::{
    agent::{Agent, Answer, Setup, parse},
    host::{Host, program},
    random::number,
};
use nix::unistd::{User, geteuid};
use serde_json::{Value, json};

use crate::{memory::resident, percentile};

/// Name of the hostile user. Every host has this user.
const HOSTILE: &str = "daemon";

/// First subordinate uid of the hostile user. No user of the host has this uid, or one of the next.
const SUBORDINATE: u32 = 4_100_000;

/// Connections of each hostile uid.
const CONNECTIONS: usize = 8;

/// Uid of a user of the host, who has a separate account.
const OTHER: u32 = 65_534;

/// GPUs 0 to 5 are dynamic, so that a request with many devices needs a search. The limit for changing requests does not
/// matter here: the requests must be harmless even without it.
const CONFIG: &str = "[limits]\nchanges_burst = 10000\nchanges_per_second = 1000\n\
    [[quota]]\nusers = [\"daemon\"]\nleases = 1\n\
    [[gpu]]\nmatch = [\"0-5\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n\
    [[gpu]]\nmatch = [\"6\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 64 }\n\
    [[gpu]]\nmatch = [\"7\"]\nmode = \"exclusive\"\n";

/// Number of times that the other callers do their work.
const ROUNDS: u64 = 40;

/// Maximum resident memory of gpushd, in KiB.
const MOST_MEMORY: u64 = 128 << 10;

/// Maximum growth of the log, and of the database with its log, for each request of another caller, in bytes. The hostile
/// requests are many more, and must not add to it.
const MOST_GROWTH: u64 = 64 << 10;

/// Returns the uids of the hostile processes: the user, and subordinate uids of the user.
fn hostile_uids() -> [u32; 4] {
    let user = User::from_name(HOSTILE).expect("an answer").expect("a user").uid.as_raw();
    [user, SUBORDINATE, SUBORDINATE + 1, SUBORDINATE + 65_535]
}

/// Returns the body of a request for leases, with a method and a path.
fn lease(body: &Value) -> [String; 3] {
    ["POST".to_owned(), "/v1/leases".to_owned(), body.to_string()]
}

/// Returns the requests of the hostile account: requests that need a search, requests that wait, long texts, and expensive
/// reads.
fn expensive() -> [[String; 3]; 8] {
    let devices = |count: u32, gpus: &[&str], wait: &str| {
        let share = json!({ "kind": "mig_size", "slices": 1 });
        lease(&json!({ "share": share, "count": count, "selectors": gpus, "wait": wait, "duration_s": 600 }))
    };
    let get = |path: &str| ["GET".to_owned(), path.to_owned(), String::new()];
    let padded = format!("{}0-5", " ".repeat(3000));
    [
        // One of the 42 devices is leased, so none of these requests fits.
        devices(42, &[], "no"),
        devices(42, &["0-2", "3-5"], "no"),
        devices(42, &[&padded], "no"),
        devices(42, &["5", "4", "0-3"], "no"),
        devices(42, &[], "1s"),
        devices(42, &["0-5"], "no"),
        get("/v1/gpus?profiles=true"),
        get("/v1/leases?ended=100"),
    ]
}

/// The processes of the hostile account.
struct Flood(Vec<(Child, Lines<BufReader<ChildStdout>>)>);

impl Flood {
    /// Starts the processes, and waits until each connection has an answer.
    fn start(client: &Path, socket: &Path, requests: &[[String; 3]]) -> Self {
        let mut processes = Vec::new();
        for uid in hostile_uids() {
            let mut command = Command::new(client);
            command.arg("flood").arg(socket).arg(CONNECTIONS.to_string()).args(requests.as_flattened());
            command.uid(uid).gid(uid).current_dir("/").stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().expect("a client");
            let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
            processes.push((child, lines));
        }
        for (_, lines) in &mut processes {
            assert_eq!(lines.next().expect("a line").expect("text"), "begun");
        }
        Self(processes)
    }

    /// Ends the processes. For each status, returns the number of answers, and the largest of the median times of the
    /// processes.
    fn end(self) -> BTreeMap<u16, (u64, Duration)> {
        let mut all = BTreeMap::<u16, (u64, Duration)>::new();
        for (mut child, lines) in self.0 {
            drop(child.stdin.take());
            for line in lines.map_while(Result::ok) {
                let words: Vec<u64> = line.split(' ').map(|word| word.parse().expect("a number")).collect();
                let entry = all.entry(u16::try_from(words[0]).expect("a status")).or_default();
                *entry = (entry.0 + words[1], entry.1.max(Duration::from_micros(words[2])));
            }
            child.wait().expect("the end of a client");
        }
        all
    }
}

/// The callers that the hostile account must not disturb.
struct Others<'a> {
    agent: &'a Agent,
    client: &'a Path,
    admin: PathBuf,
    jobs: u64,
}

/// What the callers did: times, and ids of leases.
#[derive(Default)]
struct Work {
    versions: Vec<Duration>,
    prologs: Vec<Duration>,
    grants: Vec<Duration>,
    leases: Vec<String>,
}

impl Others<'_> {
    fn to_admin(&self, method: &str, path: &str, body: &str) -> (Duration, Answer) {
        let length = body.len();
        let head =
            format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json");
        let text = format!("{head}\r\ncontent-length: {length}\r\n\r\n{body}");
        let begun = Instant::now();
        let mut stream = UnixStream::connect(&self.admin).expect("a connection");
        stream.write_all(text.as_bytes()).expect("a request");
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).expect("an answer");
        let answer = parse(&bytes).expect("an answer");
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        (begun.elapsed(), answer)
    }

    /// Begins and ends a job on GPU 7, as the hooks do. Returns the time of the Prolog.
    fn job(&mut self, gpu: &str) -> Duration {
        self.jobs += 1;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time").as_millis();
        let mut body = json!({ "cluster": "c", "job": self.jobs, "node": "n", "until_ms": now as u64 + 60_000 });
        let end = body.to_string();
        let fields = body.as_object_mut().expect("an object");
        fields.insert("uid".to_owned(), OTHER.into());
        fields.insert("request".to_owned(), json!({ "share": { "kind": "whole" } }));
        fields.insert("slurm_devices".to_owned(), json!([{ "uuid": gpu }]));
        let (time, answer) = self.to_admin("POST", "/v1/slurm/jobs", &body.to_string());
        assert_eq!(answer.json()["outcome"], "granted", "{}", answer.json());
        let _ended = self.to_admin("POST", "/v1/slurm/jobs/end", &end);
        time
    }

    fn work(&mut self, rounds: u64, gpu: &str) -> Work {
        let mut work = Work::default();
        for _ in 0..rounds {
            work.versions.extend((0..5).map(|_| self.to_admin("GET", "/v1/version", "").0));
            work.prologs.push(self.job(gpu));
        }
        let mut command = Command::new(self.client);
        command.arg("grants").arg(self.agent.socket()).arg(rounds.to_string());
        command.arg(json!({ "share": { "kind": "timeslice" }, "duration_s": 600 }).to_string());
        let output =
            command.uid(OTHER).gid(OTHER).current_dir("/").stderr(Stdio::inherit()).output().expect("a client");
        assert!(output.status.success(), "another user gets every lease");
        for line in String::from_utf8(output.stdout).expect("text").lines() {
            let (time, id) = line.split_once(' ').expect("a time and an id");
            work.grants.push(Duration::from_micros(time.parse().expect("a number")));
            work.leases.push(id.to_owned());
        }
        work
    }
}

/// Returns the size of the log, and of the files in the state directory.
fn sizes(host: &Host) -> (u64, u64) {
    let size = |path: &Path| fs::metadata(path).map_or(0, |file| file.len());
    let files = fs::read_dir(Setup::on(host).state_dir()).expect("the state directory").flatten();
    (size(&host.scratch("gpushd.log")), files.map(|file| size(&file.path())).sum())
}

/// Returns the number of audit records about the grants of these leases.
fn grants_in_audit(agent: &Agent, ids: &[String]) -> usize {
    let path = format!("/v1/audit?limit=1000&object={}", ids.join(","));
    let records: Vec<AuditRecord> = serde_json::from_value(agent.get(&path).json()).expect("records");
    records.iter().filter(|record| record.action == "lease.grant").count()
}

#[test]
fn hostile_account_neither_delays_others_nor_exceeds_limits() {
    if !geteuid().is_root() {
        return println!("SKIPPED a hostile account: only root can be several users");
    }
    let rounds = number("GPUSH_TEST_HOSTILE_ROUNDS", ROUNDS);
    let host = Host::up("[[gpu]]\nmodel = \"h100-80-sxm\"\ncount = 8\nmig = true\n");
    let agent = Setup::on(&host).config(CONFIG).subuid(&format!("{HOSTILE}:{SUBORDINATE}:65536\n")).start_public();
    agent.wait_for_layouts_at_start();
    let client = agent.socket().with_file_name("socket_client");
    fs::copy(program("socket_client"), &client).expect("the client can be copied");
    fs::set_permissions(&client, fs::Permissions::from_mode(0o755)).expect("a program");
    let gpu = agent.gpu(7).uuid;
    let held = agent.post("/v1/leases", &json!({ "share": { "kind": "mig_size", "slices": 1 }, "duration_s": 3600 }));
    assert_eq!(held.status, 200, "{}", String::from_utf8_lossy(&held.body));
    let mut others = Others { agent: &agent, client: &client, admin: host.scratch("gpushd.admin.sock"), jobs: 0 };
    let mut calm = others.work(rounds, gpu.as_str());
    let before = sizes(&host);
    let flood = Flood::start(&client, agent.socket(), &expensive());
    let mut work = others.work(rounds, gpu.as_str());
    let memory = resident(&agent);
    let answers = flood.end();
    let after = sizes(&host);
    let share = json!({ "share": { "kind": "timeslice" }, "duration_s": 600 });
    let leases = Flood::start(&client, agent.socket(), &[lease(&share)]);
    let holding = || {
        let all: Vec<Lease> = serde_json::from_value(agent.get("/v1/leases").json()).expect("leases");
        all.iter().filter(|lease| hostile_uids().contains(&lease.holder.uid)).count()
    };
    agent.until("the account has the lease of its quota", || (holding() > 0).then_some(()));
    let refused = leases.end();
    let holding = holding();

    println!("answers to the hostile account: {answers:?}");
    let usual = answers[&409].1;
    let mut medians = Vec::new();
    for (what, calm, now) in [
        ("/v1/version on the admin socket", &mut calm.versions, &mut work.versions),
        ("Prolog", &mut calm.prologs, &mut work.prologs),
        ("a grant of another user", &mut calm.grants, &mut work.grants),
    ] {
        let [p50, p99] = [50, 99].map(|part| percentile(now, part));
        println!("{what}: p50 {p50:?}, p99 {p99:?}, in calm {:?}; a refused request: {usual:?}", percentile(calm, 50));
        medians.push(p50);
    }
    println!("{memory} KiB; log and state grew by {} and {} bytes", after.0 - before.0, after.1 - before.1);
    // If these callers waited in one queue with the hostile requests, their requests would take as long.
    assert!(medians.iter().all(|median| *median * 2 < usual), "{medians:?}, a refused request: {usual:?}");
    assert!(!answers.contains_key(&500) && answers[&409].0 > rounds, "{answers:?}");
    assert_eq!(holding, 1, "requests beyond the quota: {refused:?}");
    assert!(refused[&403].0 > 1, "{refused:?}");
    assert!(memory < MOST_MEMORY, "{memory} KiB");
    let growth = MOST_GROWTH * rounds;
    assert!(after.0 - before.0 < growth && after.1 - before.1 < growth, "{before:?}, then {after:?}");
    let granted: usize = work.leases.chunks(100).map(|ids| grants_in_audit(&agent, ids)).sum();
    assert_eq!(granted, work.leases.len(), "audit records of another user are not lost");
}
