//! What the agent takes while nobody asks it anything.

use std::{fs, time::Duration};

use gpush_tests::{agent::Agent, host::Host};

use crate::{bare, ctl, report::Report};

/// How long it is left alone: longer than its slow poll.
const IDLE: Duration = Duration::from_secs(70);

/// KiB of a line of /proc/PID/smaps_rollup.
fn kib(pid: u32, line: &str) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("a process");
    let found = text.lines().find_map(|candidate| candidate.strip_prefix(line));
    let number = found.and_then(|rest| rest.split_whitespace().nth(1)).expect("the line");
    number.parse().expect("a number")
}

/// Seconds on a processor of all threads of a process.
fn ran(pid: u32) -> f64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let nanoseconds = tasks.flatten().filter_map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

/// Its driver worker.
fn worker(agent: &Agent) -> u32 {
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", agent.pid())).expect("its children");
    children.split_whitespace().next().and_then(|pid| pid.parse().ok()).expect("a worker")
}

/// Memory and processor time.
pub(crate) fn run() -> Report {
    let host = Host::up("dgx-a100");
    let bare = bare::initialised(&host);
    let agent = ctl::agent(&host);
    ctl::must(&host, &agent, &["mig", "apply", "--gpu", "all", "--layout", "1g.10gb*7"]);
    // As after a while of work.
    for _ in 0..100 {
        assert_eq!(agent.gpus().len(), 8);
    }
    let pids = [agent.pid(), worker(&agent)];
    let before: f64 = pids.iter().map(|pid| ran(*pid)).sum();
    std::thread::sleep(IDLE);
    let share = (pids.iter().map(|pid| ran(*pid)).sum::<f64>() - before) / IDLE.as_secs_f64() * 100.0;
    assert_eq!(pids[1], worker(&agent), "the same worker all the time");
    let mib = |pid: u32, line: &str| kib(pid, line) / 1024.0;
    let mut report = Report::new(
        "Footprint",
        &format!(
            "8 GPUs with 56 instances, after 100 reads of all of them. Resident memory in MiB, and what of it is \
             shared out (`Pss`); beside it a program that has initialised the same NVML and does nothing. Then left \
             alone for {} s with one slow poll in between.",
            IDLE.as_secs()
        ),
        &["", "resident", "proportional"],
    );
    let mut sums = Vec::new();
    for (what, pids) in
        [("bare program", &[bare.0.id()][..]), ("gpushd", &pids[..1]), ("its worker", &pids[1..]), ("both", &pids[..])]
    {
        let sum = |line: &str| pids.iter().map(|pid| mib(*pid, line)).sum::<f64>();
        let (resident, proportional) = (sum("Rss:"), sum("Pss:"));
        report.rows.push(vec![what.into(), format!("{resident:.1}"), format!("{proportional:.1}")]);
        sums.push(resident);
    }
    let above = sums[3] - sums[0];
    report.target("resident memory above a bare program", "at most 20 MiB", &format!("{above:.1} MiB"), above <= 20.0);
    report.target("idle", "under 0.2 % of a core", &format!("{share:.3} %"), share < 0.2);
    report
}
