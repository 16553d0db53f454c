//! How soon the agent is there, and what asking it costs.

use std::{
    process::{Command, Stdio},
    time::Instant,
};

use gpush_tests::host::Host;

use crate::{
    bench_agent::Agent,
    report::{Report, median},
};

/// Starts of the agent.
const STARTS: usize = 15;
/// Runs of each command.
const RUNS: usize = 101;

/// Time from start to ready, on a host with eight GPUs.
pub(crate) fn start() -> Report {
    let host = Host::up("dgx-a100");
    let mut times: Vec<f64> = (0..STARTS).map(|_| Agent::start(&host).ready_after.as_secs_f64() * 1e3).collect();
    times.sort_by(f64::total_cmp);
    let (middle, worst) = (median(times.clone()), times.last().copied().unwrap_or(f64::NAN));
    let mut report = Report::new(
        "Start of the agent",
        &format!("From the start of `gpushd` to its `READY=1`, on 8 simulated GPUs, {STARTS} starts."),
        &["", "ms"],
    );
    report.rows.push(vec!["median".into(), format!("{middle:.0}")]);
    report.rows.push(vec!["slowest".into(), format!("{worst:.0}")]);
    report.target("agent ready after start", "median under 100 ms", &format!("{middle:.0} ms"), middle < 100.0);
    report
}

/// `gpushctl status` beside `/bin/true`, by turns.
pub(crate) fn status() -> Report {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host);
    agent.must(&["mig", "apply", "--gpu", "all", "--layout", "3g.40gb,2g.20gb,1g.10gb*2"]);
    let (mut ours, mut nothing) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        ours.push(timed(&mut agent.ctl(&["status"])));
        nothing.push(timed(Command::new("/bin/true").stdin(Stdio::null())));
    }
    let (ours, nothing) = (median(ours), median(nothing));
    let ratio = ours / nothing;
    let mut report = Report::new(
        "`gpushctl status`",
        &format!("8 GPUs with 4 instances each, beside `/bin/true`, {RUNS} runs by turns, medians."),
        &["command", "ms", "ratio"],
    );
    report.rows.push(vec!["`/bin/true`".into(), format!("{:.2}", nothing * 1e3), "1".into()]);
    report.rows.push(vec!["`gpushctl status`".into(), format!("{:.2}", ours * 1e3), format!("{ratio:.1}")]);
    report.target("`gpushctl status`", "under 5 times `/bin/true`", &format!("{ratio:.1} times"), ratio < 5.0);
    report
}

fn timed(command: &mut Command) -> f64 {
    let started = Instant::now();
    let ended = command.stdout(Stdio::null()).stderr(Stdio::null()).status().expect("the command can be started");
    let took = started.elapsed();
    assert!(ended.success(), "{command:?}: {ended}");
    took.as_secs_f64()
}
