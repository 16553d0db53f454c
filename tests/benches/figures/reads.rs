//! Cost of a request for all GPUs: compared with a fixed response, with many clients, and while a
//! GPU hangs.

use std::{
    path::Path,
    sync::Barrier,
    time::{Duration, Instant},
};

use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
};

use crate::{
    bare,
    client::{Client, NOBODY, accounts, users},
    ctl,
    report::{Report, median, percentile},
};

const PATH: &str = "/v1/gpus";
/// Number of concurrent clients, number of users, and number of requests of each client.
const CLIENTS: (usize, usize, usize) = (200, 10, 5);
/// Duration for which the driver call hangs. The agent's deadline is longer.
const HANG: Duration = Duration::from_secs(10);
const CONFIG: &str = "# --constants driver.read=15000ms\n";

/// Alternately requests the list of GPUs from gpushd and the fixed response from the reference
/// server, while `go_on` returns true. Returns the durations of both kinds of requests in seconds.
fn by_turns(ours: &mut Client, bare: &mut Client, go_on: impl Fn(usize) -> bool) -> (Vec<f64>, Vec<f64>) {
    let mut times = (Vec::new(), Vec::new());
    while go_on(times.0.len()) {
        times.0.push(ours.timed("GET", PATH, "", 200));
        times.1.push(bare.timed("GET", "/", "", 200));
    }
    times
}

/// Sends requests from many clients at the same time. Returns the duration of each request in
/// seconds, and the number of failed requests.
fn many(socket: &Path) -> (Vec<f64>, usize) {
    let (clients, number, requests) = CLIENTS;
    let users = users(number);
    // The process has only one effective user, so the clients connect one after the other.
    let clients: Vec<Client> =
        (0..clients).map(|at| Client::connect_as(users[at % users.len()], socket).expect("a connection")).collect();
    let start = Barrier::new(clients.len());
    std::thread::scope(|scope| {
        let asking: Vec<_> = clients
            .into_iter()
            .map(|mut client| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    (0..requests).map(|_| client.ask("GET", PATH, "")).collect::<Vec<_>>()
                })
            })
            .collect();
        let answers = asking.into_iter().flat_map(|one| one.join().expect("a client ends"));
        let (mut times, mut errors) = (Vec::new(), 0);
        for answer in answers {
            match answer {
                Ok((200, _, took)) => times.push(took),
                Ok(_) | Err(_) => errors += 1,
            }
        }
        (times, errors)
    })
}

/// Waits until the reading of GPU 3 has begun to hang.
fn hangs(agent: &Agent) {
    let begun = Instant::now();
    while !agent.gpus()[3].stale {
        assert!(begun.elapsed() < HANG, "GPU 3 does not hang:\n{}", agent.log());
    }
}

/// Measures requests for the list of GPUs, and compares them with requests for a fixed response.
pub(crate) fn run() -> Report {
    let host = Host::up("dgx-a100");
    let agent = Setup::on(&host).config(CONFIG).subuid(&accounts(CLIENTS.1)).start_public();
    ctl::must(&host, &agent, &["mig", "apply", "--gpu", "all", "--layout", "1g.10gb*7"]);
    let mut ours = Client::connect_as(NOBODY, agent.socket()).expect("a connection");
    let (status, body, _) = ours.ask("GET", PATH, "").expect("an answer");
    assert_eq!(status, 200);
    let bare_socket = host.scratch("static.sock");
    let _server = bare::server(&bare_socket, body.len());
    let mut bare = Client::connect(&bare_socket).expect("a connection");
    // Warms up both servers.
    by_turns(&mut ours, &mut bare, |done| done < 50);
    let begun = Instant::now();
    let calm = by_turns(&mut ours, &mut bare, |_| begun.elapsed() < HANG.mul_f64(0.9));
    let (crowd, errors) = many(agent.socket());
    host.fault(&format!("nvmlDeviceGetMigMode --gpu 3 --times 1 --delay-ms {}", HANG.as_millis()));
    let hung_at = Instant::now();
    hangs(&agent);
    let hung = by_turns(&mut ours, &mut bare, |_| hung_at.elapsed() < HANG.mul_f64(0.9));
    assert!(agent.gpus()[3].stale, "it hung all the time");

    let mut report = Report::new(
        "Reading the GPUs",
        &format!(
            "An unprivileged user sends `GET {PATH}` on a connection that stays open. The answer describes 8 GPUs \
             with 56 instances ({} KiB). For comparison, the benchmark also requests a static answer of the same size \
             from the same HTTP stack. The two requests alternate. Times are in ms.",
            body.len() / 1024
        ),
        &["", "requests", "p50", "p99", "slowest"],
    );
    let mut row = |what: &str, times: &[f64]| {
        let ms = |seconds: f64| format!("{:.2}", seconds * 1e3);
        let slowest = times.iter().copied().fold(f64::NAN, f64::max);
        let shown = [median(times.to_vec()), percentile(times.to_vec(), 0.99), slowest].map(ms);
        report.rows.push([&[what.to_owned(), times.len().to_string()], &shown[..]].concat());
        slowest * 1e3
    };
    row("static answer", &calm.1);
    row("all GPUs", &calm.0);
    row(&format!("all GPUs, {} concurrent clients of {} users", CLIENTS.0, CLIENTS.1), &crowd);
    row("static answer, while the reading of a GPU hangs", &hung.1);
    let slowest = row("all GPUs, while the reading of a GPU hangs", &hung.0);
    let ratio = median(calm.0.clone()) / median(calm.1);
    let during = median(hung.0) / median(calm.0);
    report.target("all GPUs, p50", "at most 2 times a static answer", &format!("{ratio:.1} times"), ratio <= 2.0);
    report.target(
        &format!("{} concurrent clients", CLIENTS.0),
        "no error",
        &format!("{errors} of {} requests", CLIENTS.0 * CLIENTS.2),
        errors == 0,
    );
    report.target("p50 while a GPU hangs", "at most 1.3 times", &format!("{during:.2} times"), during <= 1.3);
    report.target("slowest while a GPU hangs", "at most 100 ms", &format!("{slowest:.0} ms"), slowest <= 100.0);
    report
}
