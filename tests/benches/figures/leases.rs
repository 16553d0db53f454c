//! Cost of leases: a grant, many concurrent grants, a grant that creates a MIG device, a user's
//! first MPS lease, `gpushctl run`, and a grant after many ended leases.

use std::{
    path::Path,
    process::{Command, Stdio},
    sync::Barrier,
    thread,
    time::Instant,
};

use gpush_api::MpsState;
use gpush_tests::{
    agent::{Agent, Setup},
    driver,
    host::Host,
    mps::reaches,
};
use rusqlite::Connection;
use serde_json::Value;

use crate::{
    bare,
    client::{Client, accounts, users},
    ctl,
    report::{Report, grouped, median, percentile},
};

/// GPU 0 has replicas for many leases. GPU 1 is leased as a whole.
const CONFIG: &str = "[limits]\nchanges_burst = 10000\n\
                      [[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 64 }\n\
                      [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\n";

const REPLICA: &str = r#"{"share": {"kind": "timeslice"}}"#;

/// Number of grants of each kind.
const GRANTS: usize = 300;
/// Number of concurrent clients.
pub(crate) const CLIENTS: usize = 32;
/// Number of rounds. Each client gets one lease per round.
const ROUNDS: usize = 20;
/// Number of measured runs of a command. Also the number of measured first MPS leases of a user.
const FEW: usize = 20;
/// Number of rounds of dynamic grants. Each round fills a GPU with seven MIG devices, which takes
/// seconds.
const DYNAMIC_ROUNDS: usize = 3;
/// Number of ended leases in the long history.
pub(crate) const HISTORY: usize = 10_000;

/// The tables that a grant writes. It writes one row each: the lease, the last lease number, a
/// record of the audit trail, and the head of the journal.
const TABLES: [&str; 4] = ["leases", "facts", "audit", "head"];

/// An SQLite database with the tables [`TABLES`] and durable commits.
pub(crate) struct Plain(Connection);

impl Plain {
    /// Creates the database in the host's scratch directory.
    pub(crate) fn open(host: &Host) -> Self {
        let database = Connection::open(host.scratch("plain.db")).expect("a database");
        database.pragma_update(None, "journal_mode", "WAL").expect("a log");
        database.pragma_update(None, "synchronous", "FULL").expect("it is synced");
        for table in TABLES {
            let create = format!("CREATE TABLE {table} (number INTEGER PRIMARY KEY, what TEXT NOT NULL)");
            database.execute(&create, ()).expect("a table");
        }
        Self(database)
    }

    /// Makes one commit. Returns its duration in seconds.
    pub(crate) fn commit(&self) -> f64 {
        let (begun, text) = (Instant::now(), "x".repeat(300));
        let transaction = self.0.unchecked_transaction().expect("a transaction");
        for table in TABLES {
            let insert = format!("INSERT INTO {table} (what) VALUES (?1)");
            transaction.prepare_cached(&insert).and_then(|mut insert| insert.execute([&text])).expect("a row");
        }
        transaction.commit().expect("a commit");
        begun.elapsed().as_secs_f64()
    }
}

/// Requests a lease. Returns the id of the lease, and the duration in seconds.
fn grant(client: &mut Client, body: &str) -> (String, f64) {
    let (status, answer, took) = client.ask("POST", "/v1/leases", body).expect("an answer");
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&answer));
    let answer: Value = serde_json::from_slice(&answer).expect("JSON");
    (answer["lease"]["id"].as_str().expect("an id").to_owned(), took)
}

fn release(client: &mut Client, id: &str) {
    client.timed("POST", &format!("/v1/leases/{id}/release"), "{}", 200);
}

/// Requests a lease and releases it. Returns the duration of the grant in seconds.
fn granted(client: &mut Client) -> f64 {
    let (id, took) = grant(client, REPLICA);
    release(client, &id);
    took
}

/// Returns the number of grants per second while all clients request one lease each at the same
/// time.
fn rate(mut clients: Vec<Client>, rounds: usize) -> f64 {
    // The first request of each user waits for the name service.
    for client in &mut clients {
        granted(client);
    }
    let (barrier, number) = (&Barrier::new(clients.len()), clients.len());
    let took: Vec<f64> = thread::scope(|scope| {
        let run = |mut client: Client| {
            let mut sum = 0.0;
            for _ in 0..rounds {
                barrier.wait();
                let (id, _) = grant_at(barrier, &mut client, &mut sum);
                release(&mut client, &id);
            }
            sum
        };
        let clients: Vec<_> = clients.into_iter().map(|client| scope.spawn(move || run(client))).collect();
        clients.into_iter().map(|one| one.join().expect("a client")).collect()
    });
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let (grants, slowest) = ((number * rounds) as f64, took.into_iter().fold(0.0, f64::max));
    grants / slowest
}

/// Requests a lease, and waits until all clients have a lease. Adds the seconds until then to
/// `sum`.
fn grant_at(barrier: &Barrier, client: &mut Client, sum: &mut f64) -> (String, f64) {
    let begun = Instant::now();
    let granted = grant(client, REPLICA);
    barrier.wait();
    *sum += begun.elapsed().as_secs_f64();
    granted
}

/// Delays of the two driver calls of a dynamic grant, as on hardware. The delay of a call does not
/// vary, so that the time of gpushd can be separated from the time of the driver.
const DELAYS: [&str; 2] =
    ["nvmlDeviceCreateGpuInstance* --delay-ms 250", "nvmlGpuInstanceCreateComputeInstance* --delay-ms 75"];

/// Returns two durations in seconds: one grant that creates a MIG device with two driver calls, and
/// two such driver calls without gpushd. In both cases, [`DELAYS`] determines how long each driver
/// call takes.
fn dynamic() -> (f64, f64) {
    let toml = "[[gpu]]\nmodel = \"h100-80-sxm\"\n";
    let (host, direct) = (Host::up(toml), Host::up(toml));
    for host in [&host, &direct] {
        DELAYS.iter().for_each(|delay| host.fault(delay));
    }
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";
    let agent = Agent::start(&host, config);
    agent.wait_for_layouts_at_start();
    let mut client = Client::connect(agent.socket()).expect("a connection");
    let mut ours = Vec::new();
    for _ in 0..DYNAMIC_ROUNDS {
        let body = r#"{"share": {"kind": "mig_profile", "profile": "1g.10gb"}}"#;
        let mut ids = Vec::new();
        for _ in 0..7 {
            let (id, took) = grant(&mut client, body);
            ours.push(took);
            ids.push(id);
        }
        ids.iter().for_each(|id| release(&mut client, id));
        // Destroy the MIG devices, so that the next round creates them again.
        let whole = grant(&mut client, r#"{"share": {"kind": "mig_profile", "profile": "7g.80gb"}}"#).0;
        release(&mut client, &whole);
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let alone = runtime.block_on(async {
        let hardware = driver::hardware(&direct);
        let uuid = driver::uuids(&hardware).await.remove(0);
        hardware.set_mig_mode(&uuid, true).await.expect("MIG mode");
        let mut took = Vec::new();
        for start in 0..7 {
            let (profile, placement) = driver::place(&hardware, uuid.as_str(), "1g.10gb", start).await;
            let begun = Instant::now();
            let made = hardware.create_gpu_instance(&uuid, profile, placement).await.expect("an instance");
            hardware.create_compute_instance(&uuid, made.id, 0, None).await.expect("a compute instance");
            took.push(begun.elapsed().as_secs_f64());
        }
        hardware.stop().await.expect("the worker ends");
        median(took)
    });
    (median(ours), alone)
}

/// Returns the durations of two grants in seconds: a user's first lease on an MPS target, and the
/// same user's next lease. For the first lease, gpushd restarts the daemon. Returns `None` without
/// root, because only root can request leases for other users.
fn first_mps() -> Option<(f64, f64)> {
    if !nix::unistd::geteuid().is_root() {
        return None;
    }
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\n");
    let agent = Agent::start(&host, "[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n");
    reaches(&agent, "0", MpsState::Ready);
    let mut client = Client::connect(agent.socket()).expect("a connection");
    let (mut first, mut next) = (Vec::new(), Vec::new());
    for round in 0..FEW {
        // Two users alternate.
        let uid = 65532 + round % 2;
        let body = format!(r#"{{"share": {{"kind": "mps", "percentage": 10}}, "holder_uid": {uid}}}"#);
        let leases = [&mut first, &mut next].map(|seconds| {
            let (id, took) = grant(&mut client, &body);
            seconds.push(took);
            id
        });
        leases.iter().for_each(|id| release(&mut client, id));
    }
    Some((median(first), median(next)))
}

/// Returns three durations in seconds: of `true`, of `gpushctl run -- true`, and from the end of
/// the second command to the next grant of the same capacity.
fn runs(host: &Host, agent: &Agent) -> (f64, f64, Vec<f64>) {
    let mut client = Client::connect(agent.socket()).expect("a connection");
    let (mut bare, mut run, mut free) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..FEW {
        let begun = Instant::now();
        assert!(Command::new("true").stdin(Stdio::null()).status().expect("true").success());
        bare.push(begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        ctl::must(host, agent, &["run", "--whole", "--", "true"]);
        run.push(begun.elapsed().as_secs_f64());
        // This request has no `wait`. gpushd lets it wait only because the process of the current
        // lease has ended.
        let begun = Instant::now();
        let (id, _) = grant(&mut client, r#"{"share": {"kind": "whole"}}"#);
        free.push(begun.elapsed().as_secs_f64());
        release(&mut client, &id);
    }
    (median(bare), median(run), free)
}

/// Requests and ends [`HISTORY`] leases of a time-sliced GPU. gpushd keeps at most 1,000 ended leases of each user, so
/// many users request the leases.
pub(crate) fn make_history(agent: &Agent) {
    // The process has only one effective user, so the clients connect one after the other.
    let clients = users(CLIENTS).into_iter().map(|uid| Client::connect_as(uid, agent.socket()).expect("a connection"));
    rate(clients.collect(), HISTORY.div_ceil(CLIENTS));
}

/// Returns the number of ended leases in the database of an agent that has stopped.
pub(crate) fn ended_leases(state_dir: &Path) -> usize {
    let database = Connection::open(state_dir.join("gpush.db")).expect("a database");
    let ended = "SELECT count(*) FROM leases WHERE state = 'ended'";
    let count: u32 = database.query_row(ended, (), |row| row.get(0)).expect("a number");
    usize::try_from(count).expect("a number of leases")
}

/// Measures grants of two agents alternately. Returns the median duration in seconds for each
/// agent. The first agent has no history. The second agent has at least [`HISTORY`] ended leases.
fn histories() -> (f64, f64) {
    let hosts = [(); 2].map(|()| Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 2\n"));
    let agents = hosts.each_ref().map(|host| {
        let agent = Setup::on(host).config(CONFIG).subuid(&accounts(CLIENTS)).start_public();
        agent.wait_for_layouts_at_start();
        agent
    });
    make_history(&agents[1]);
    let mut clients = agents.each_ref().map(|agent| Client::connect(agent.socket()).expect("a connection"));
    let mut seconds = [Vec::new(), Vec::new()];
    for _ in 0..GRANTS {
        for (client, seconds) in clients.iter_mut().zip(&mut seconds) {
            seconds.push(granted(client));
        }
    }
    let [_, long_agent] = agents;
    long_agent.stop();
    assert!(ended_leases(&Setup::on(&hosts[1]).state_dir()) >= HISTORY);
    let [short, long] = seconds.map(median);
    (short, long)
}

/// Measures the cost of leases.
pub(crate) fn run() -> Report {
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 2\n");
    let agent = Agent::start_public(&host, CONFIG);
    agent.wait_for_layouts_at_start();
    let mut ours = Client::connect(agent.socket()).expect("a connection");
    let socket = host.scratch("static.sock");
    let _server = bare::server(&socket, 700);
    let mut static_client = Client::connect(&socket).expect("a connection");
    let plain = Plain::open(&host);
    let (mut commits, mut trips, mut first) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..GRANTS {
        commits.push(plain.commit());
        trips.push(static_client.timed("POST", "/", REPLICA, 200));
        first.push(granted(&mut ours));
    }
    let (commit, trip, one) = (median(commits), median(trips), median(first));
    let ratio = one / (commit + trip);
    let clients = (0..CLIENTS).map(|_| Client::connect(agent.socket()).expect("a connection"));
    let crowd = rate(clients.collect(), ROUNDS);
    let crowd_ratio = crowd * commit;
    let (created, driver) = dynamic();
    let (bare, command, free) = runs(&host, &agent);
    let slowest = percentile(free.clone(), 0.95);
    let beyond_commit = (command - bare - commit) * 1e3;
    let mps = first_mps();
    let (short, long) = histories();
    let slower = long / short;

    let mut report = Report::new(
        "Leases",
        &format!(
            "The table shows medians of {GRANTS} runs. A `grant` grants a free share, and gpushd commits it before it \
             answers. A `plain commit` is a synced commit of the same number of rows to a plain SQLite database on the \
             same file system. A `plain request` changes nothing. These three alternate.\n\
             - **{CLIENTS} at once:** {CLIENTS} clients request a lease at the same time, {ROUNDS} times.\n\
             - **Dynamic grant:** gpushd creates a MIG device on a simulated H100. The two driver calls take 250 and \
             75 ms. The benchmark also measures these two calls without gpushd.\n\
             - **`gpushctl run`:** gpushctl connects to gpushd, makes one request with one durable commit, and then \
             becomes the command. The time beyond `true` and this commit is the start of gpushctl and the request.\n\
             - **MPS:** A user's first MPS lease restarts the MPS daemon, which is simulated.\n\
             - **History:** The last two rows compare two agents. In the second agent, {} leases have ended. The \
             measurements of the two agents alternate.",
            grouped(HISTORY)
        ),
        &["", "ms", "ratio"],
    );
    let ms = |seconds: f64| format!("{:.2}", seconds * 1e3);
    let mut rows: Vec<(&str, f64, String)> = vec![
        ("plain commit and plain request", commit + trip, "1".to_owned()),
        ("grant", one, format!("{ratio:.1}")),
        ("grant, of 32 at once: time for each", 1.0 / crowd, String::new()),
        ("driver calls of a dynamic grant", driver, "1".to_owned()),
        ("dynamic grant", created, format!("{:.1}", created / driver)),
        ("`true`", bare, String::new()),
        ("`gpushctl run -- true`", command, String::new()),
        ("from its end to the next grant, median", median(free), String::new()),
    ];
    if let Some((first, next)) = mps {
        rows.push(("a user's first MPS lease", first, format!("{:.1}", first / next)));
        rows.push(("the user's next MPS lease", next, "1".to_owned()));
    }
    rows.push(("grant without a history", short, "1".to_owned()));
    rows.push(("grant after 10,000 ended leases", long, format!("{slower:.2}")));
    report.rows.extend(rows.into_iter().map(|(what, seconds, ratio)| vec![what.to_owned(), ms(seconds), ratio]));
    report.target("a grant, p50", "at most 2 times both", &format!("{ratio:.1} times"), ratio <= 2.0);
    let measured = format!("{crowd_ratio:.1} times");
    report.target("grants of 32 clients", "at least 2 times plain commits", &measured, crowd_ratio >= 2.0);
    let beyond = (created - driver) * 1e3;
    report.target("a dynamic grant beyond the driver", "at most 15 ms", &format!("{beyond:.1} ms"), beyond <= 15.0);
    let measured = format!("{beyond_commit:.1} ms");
    report.target("`gpushctl run` beyond `true` and one commit", "at most 15 ms", &measured, beyond_commit <= 15.0);
    let to_free = format!("{} ms", ms(slowest));
    report.target("from the last exit to the next grant, p95", "at most 50 ms", &to_free, slowest <= 0.05);
    let measured = format!("{slower:.2} times");
    report.target("a grant after 10,000 ended leases", "at most 1.25 times", &measured, slower <= 1.25);
    report
}
