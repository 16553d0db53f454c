//! Cost of MPS daemons for the agent, and the time until the agent notices that a daemon has
//! changed.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gpush_api::MpsState;
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
    mps::{Client, act, base, controls, daemon, daemons, lease, reaches, real_programs, signal},
};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::{
    footprint::{kib, ran, worker},
    report::Report,
};

/// 56 MIG devices and 8 whole GPUs.
const MANY: &str = "[[gpu]]\nmodel = \"a100-80\"\ncount = 8\n[[gpu]]\nmodel = \"l4\"\ncount = 8\n";
const SHARED: &str = "[[gpu]]\nmatch = [\"0-7\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*7:mps\"]\n\
                      [[gpu]]\nmatch = [\"8-15\"]\nmode = \"mps\"\n";
const TARGETS: usize = 64;

/// Number of whole GPUs among the targets. Each whole GPU has a server and a client.
const COMPUTING: usize = 8;

/// Number of measurements for each time in the table.
const TIMES: usize = 20;

/// Idle time, long enough for several health checks of each daemon.
const IDLE: Duration = Duration::from_secs(70);

fn milliseconds(mut times: Vec<Duration>) -> (f64, f64) {
    times.sort_unstable();
    let of = |at: usize| times[at].as_secs_f64() * 1e3;
    (of(times.len() / 2), of(times.len() - 1))
}

/// Returns the time from the start of a control daemon to its first answer, without gpushd.
fn own_first_answer(host: &Host, control: &Path) -> Duration {
    let dir = host.scratch("alone");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).expect("a directory");
    let with = |command: &mut Command| {
        command.env("CUDA_MPS_PIPE_DIRECTORY", &dir).env("CUDA_MPS_LOG_DIRECTORY", &dir);
    };
    let mut alone = host.command(control);
    with(alone.arg("-f").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()));
    let began = Instant::now();
    let mut alone = alone.spawn().expect("a control daemon");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let ear = gpush_mps::protocol::control::Control::of(&dir);
    runtime.block_on(async { while ear.daemon(Duration::from_secs(5)).await.is_err() {} });
    let took = began.elapsed();
    alone.kill().expect("a child");
    alone.wait().expect("a child");
    took
}

/// The measured times of one daemon.
#[derive(Default)]
struct Times {
    own: Vec<Duration>,
    starts: Vec<Duration>,
    noticed: Vec<Duration>,
    again: Vec<Duration>,
}

impl Times {
    /// Measures the simulated daemons of a host. If `programs` is given, measures the daemons from
    /// this directory instead.
    fn of(host: &Host, programs: Option<&Path>) -> Self {
        let setup = Setup::on(host).config("# --constants mps.within=1s\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n");
        let agent = match programs {
            Some(dir) => setup.env("GPUSH_MPS_PROGRAMS", dir.display().to_string()).start(),
            None => setup.start(),
        };
        let dir = programs.map_or_else(|| host.dir().join("bin"), Path::to_owned);
        let control = dir.join("nvidia-cuda-mps-control");
        reaches(&agent, "0", MpsState::Ready);
        let mut times = Self::default();
        for _ in 0..TIMES {
            times.take(host, &agent, &control);
        }
        times
    }

    fn take(&mut self, host: &Host, agent: &Agent, control: &Path) {
        self.own.push(own_first_answer(host, control));
        let stop = || {
            assert_eq!(act(agent, "0", "stop", &json!({})).status, 200);
            reaches(agent, "0", MpsState::Stopped);
        };
        stop();
        let began = Instant::now();
        assert_eq!(act(agent, "0", "start", &json!({})).status, 200);
        until(|| daemon(agent, "0").state == MpsState::Ready);
        self.starts.push(began.elapsed());
        // Wait one second. After that, gpushd no longer counts earlier failures of the daemon.
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(act(agent, "0", "restart", &json!({})).status, 200);
        let pid = reaches(agent, "0", MpsState::Ready).pid.expect("a pid");
        assert!(signal(pid.cast_signed(), Signal::SIGKILL));
        let noticed = until(|| daemons(agent)[0].pid != Some(pid));
        self.noticed.push(noticed);
        self.again.push(noticed + until(|| daemons(agent)[0].state == MpsState::Ready));
        stop();
        assert_eq!(act(agent, "0", "start", &json!({})).status, 200);
        reaches(agent, "0", MpsState::Ready);
    }

    /// Adds a row for each measured time to the report, and checks the times against their targets.
    fn report(self, whose: &str, report: &mut Report) {
        let [own, starts, noticed, again] = [self.own, self.starts, self.noticed, self.again].map(milliseconds);
        let rows = [
            ("first answer, without gpushd", own),
            ("start to ready", starts),
            ("death noticed", noticed),
            ("ready again", again),
        ];
        for (what, (median, slowest)) in rows {
            report.rows.push(vec![format!("{whose}: {what}"), format!("{median:.1}"), format!("{slowest:.1}")]);
        }
        let beyond = starts.1 - own.0;
        report.target(
            &format!("start of {whose}"),
            "ready within 50 ms of the daemon's first answer",
            &format!("{beyond:.1} ms at most"),
            beyond < 50.0,
        );
        report.target(
            &format!("death of {whose}"),
            "noticed within 100 ms",
            &format!("{:.1} ms at most", noticed.1),
            noticed.1 < 100.0,
        );
        report.target(
            &format!("{whose}, ready again"),
            "under 1 s",
            &format!("{:.1} ms at most", again.1),
            again.1 < 1000.0,
        );
    }
}

/// Polls about every millisecond until `is` returns true. Returns the elapsed time.
fn until(is: impl Fn() -> bool) -> Duration {
    let began = Instant::now();
    while !is() {
        std::thread::sleep(Duration::from_micros(500));
    }
    began.elapsed()
}

/// Measures the times of one daemon, and the memory and CPU time of many daemons.
pub(crate) fn run() -> Report {
    let mut report = Report::new(
        "MPS daemons",
        &format!(
            "Times are in ms, from {TIMES} measurements. The table shows the simulated control daemon, and also \
             NVIDIA's daemon if it is installed. `first answer` is the time from the start of the daemon to its first \
             answer, without gpushd. `start to ready` begins with the request to start the daemon, and ends when \
             gpushd reports `ready`. `death noticed` begins with SIGKILL, and ends when gpushd reports the end of the \
             daemon. `ready again` begins with SIGKILL, and ends when the next daemon serves. For memory and processor \
             time, gpushd has {TARGETS} MPS targets, {COMPUTING} of them with a server and a client, and gets no \
             requests for {} s.",
            IDLE.as_secs()
        ),
        &["", "median", "slowest"],
    );
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\n");
    Times::of(&host, None).report("the simulated daemon", &mut report);
    if let Some(programs) = real_programs(&host, "times of NVIDIA's own control daemon") {
        Times::of(&host, Some(&programs)).report("NVIDIA's daemon", &mut report);
    }
    drop(host);

    let host = Host::up(MANY);
    let agent = Agent::start(&host, SHARED);
    let all_serve = || {
        let all = daemons(&agent);
        all.len() == TARGETS && all.iter().all(|one| one.state == MpsState::Ready)
    };
    until(all_serve);
    let _begun = agent.settle();
    let clients: Vec<Client> = (0..COMPUTING)
        .map(|nth| {
            let taken = lease(&agent, &(8 + nth).to_string(), &json!({})).expect("a lease");
            Client::start(&host, &taken.environment)
        })
        .collect();
    assert!(clients.iter().all(|client| client.first.starts_with("active")));
    let pids = [agent.pid(), worker(&agent)];
    let before: f64 = pids.iter().map(|pid| ran(*pid)).sum();
    std::thread::sleep(IDLE);
    let used = (pids.iter().map(|pid| ran(*pid)).sum::<f64>() - before) / IDLE.as_secs_f64() * 100.0;
    let [agents, workers] = pids.map(|pid| kib(pid, "Rss:") / 1024.0);
    assert_eq!(controls(&base(&host)).len(), TARGETS);
    report.target(
        "gpushd with 64 MPS targets",
        "resident under 40 MiB",
        &format!("{:.1} MiB, {workers:.1} of them its driver worker", agents + workers),
        agents + workers < 40.0,
    );
    report.target("idle with 64 MPS targets", "under 0.5 % of a core", &format!("{used:.3} %"), used < 0.5);
    report
}
