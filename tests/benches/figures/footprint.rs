//! Resources of an idle agent.

use std::{fs, time::Duration};

use gpush_tests::{agent::Agent, host::Host};

use crate::{bare, ctl, report::Report};

/// Idle time, longer than the interval of the slow poll.
const IDLE: Duration = Duration::from_secs(70);

/// Idle time of an agent without the slow poll.
const SILENT: Duration = Duration::from_secs(20);

/// Returns two numbers of driver calls of an agent without the slow poll: the calls while the agent
/// is idle, and the calls during one request for all GPUs.
fn calls() -> (u64, u64) {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "[health]\npoll = \"0s\"\n");
    assert_eq!(agent.gpus().len(), 8);
    // When no reading is stale, the agent has finished the work of its start.
    agent.settle_reads();
    // This fault rule never takes effect. Its only purpose is to count driver calls.
    host.fault("nvml* --after 1000000000 --rc UNKNOWN");
    std::thread::sleep(SILENT);
    let counted = || {
        let list = host.sim("fault", &["list"]);
        let matched = list.split("[matched ").nth(1).and_then(|rest| rest.split(',').next());
        matched.and_then(|number| number.parse::<u64>().ok()).expect("a count")
    };
    let silent = counted();
    // All readings are old, so this request makes gpushd read each GPU once.
    assert!(agent.gpus().iter().all(|gpu| !gpu.stale));
    (silent, counted() - silent)
}

/// Returns the number of KiB in a line of /proc/PID/smaps_rollup.
pub(crate) fn kib(pid: u32, line: &str) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("a process");
    let found = text.lines().find_map(|candidate| candidate.strip_prefix(line));
    let number = found.and_then(|rest| rest.split_whitespace().next()).expect("the line");
    number.parse().expect("a number")
}

/// Returns the CPU seconds of all threads of a process.
pub(crate) fn ran(pid: u32) -> f64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
    let nanoseconds = tasks.flatten().filter_map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

/// Returns the pids of the driver workers that a process has started, the oldest first.
pub(crate) fn workers(parent: u32) -> Vec<u32> {
    let parent = format!("PPid:\t{parent}");
    let is_worker = |pid: &u32| {
        let is_its = |status: String| status.lines().any(|line| line == parent);
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = command.split(|byte| *byte == 0);
        let works = words.any(|word| word == b"driver-worker" || word.ends_with(b"/driver_worker"));
        works && fs::read_to_string(format!("/proc/{pid}/status")).is_ok_and(is_its)
    };
    let all = fs::read_dir("/proc").expect("processes").flatten();
    let mut found: Vec<u32> =
        all.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_worker).collect();
    found.sort_unstable();
    found
}

/// Returns the pid of the agent's driver worker.
pub(crate) fn worker(agent: &Agent) -> u32 {
    *workers(agent.pid()).first().expect("a worker")
}

/// Measures memory and CPU time.
pub(crate) fn run() -> Report {
    let host = Host::up("dgx-a100");
    let bare = bare::initialised(&host);
    let agent = ctl::agent(&host);
    ctl::must(&host, &agent, &["mig", "apply", "--gpu", "all", "--layout", "1g.10gb*7"]);
    // Let the agent answer some requests before the measurement.
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
            "The host has 8 GPUs with 56 instances. Memory is resident, proportional and private memory (`Rss`, \
             `Pss`, `Private_Dirty`) in MiB, after 100 reads of all GPUs. Most of the resident memory consists of \
             pages of the program file, which the kernel can drop and read again. The bare program only initialises \
             the same NVML. Processor time is measured during {} s without requests, with one slow poll.",
            IDLE.as_secs()
        ),
        &["", "resident", "proportional", "private"],
    );
    let mut sums = Vec::new();
    for (what, pids) in
        [("bare program", &[bare.0.id()][..]), ("gpushd", &pids[..1]), ("its worker", &pids[1..]), ("both", &pids[..])]
    {
        let sum = |line: &str| pids.iter().map(|pid| mib(*pid, line)).sum::<f64>();
        let memory = ["Rss:", "Pss:", "Private_Dirty:"].map(sum);
        report.rows.push([vec![what.into()], memory.map(|mib| format!("{mib:.1}")).to_vec()].concat());
        sums.push(memory[0]);
    }
    let above = sums[3] - sums[0];
    report.target("resident memory above a bare program", "at most 22 MiB", &format!("{above:.1} MiB"), above <= 22.0);
    report.target("idle", "under 0.2 % of a core", &format!("{share:.3} %"), share < 0.2);
    let (silent, look) = calls();
    report.target(
        "driver calls without requests and without the slow poll",
        "only the wait for events, once a minute",
        &format!("{silent} in {} s; reading all GPUs takes {look}", SILENT.as_secs()),
        silent <= 1 && look > 8,
    );
    report
}
