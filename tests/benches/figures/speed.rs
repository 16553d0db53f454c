//! Start time of the agent, and cost of a command.

use std::{
    process::{Command, Stdio},
    time::Instant,
};

use gpush_tests::host::Host;

use crate::{
    ctl::{self, ctl, must},
    report::{Report, median},
};

/// Number of starts of the agent.
const STARTS: usize = 15;
/// Number of runs of each command.
const RUNS: usize = 101;

/// Measures the time from start to ready, on a host with eight GPUs.
pub(crate) fn start() -> Report {
    let host = Host::up("dgx-a100");
    let (mut ready, mut answered) = (Vec::new(), Vec::new());
    for _ in 0..STARTS {
        let started = Instant::now();
        let agent = ctl::agent(&host);
        ready.push(started.elapsed().as_secs_f64() * 1e3);
        assert_eq!(agent.gpus().len(), 8);
        answered.push(started.elapsed().as_secs_f64() * 1e3);
        agent.stop();
    }
    let slowest = |times: &[f64]| times.iter().copied().fold(f64::NAN, f64::max);
    let row = |what: &str, times: &[f64]| {
        vec![what.into(), format!("{:.0}", median(times.to_vec())), format!("{:.0}", slowest(times))]
    };
    let mut report = Report::new(
        "Start of the agent",
        &format!(
            "The times begin with the start of `gpushd`. The first row ends with `READY=1`. The second row ends with \
             the first answer that lists all 8 simulated GPUs. The table shows the results of {STARTS} starts."
        ),
        &["", "median ms", "slowest ms"],
    );
    report.rows.push(row("`READY=1`", &ready));
    report.rows.push(row("8 GPUs listed", &answered));
    let (ready, answered) = (median(ready), median(answered));
    report.target("agent ready after start", "within 100 ms", &format!("{ready:.0} ms"), ready < 100.0);
    report.target("first answer about 8 GPUs", "within 100 ms", &format!("{answered:.0} ms"), answered < 100.0);
    report
}

/// Measures `gpushctl status` and `/bin/true`, alternately.
pub(crate) fn status() -> Report {
    let host = Host::up("dgx-a100");
    let agent = ctl::agent(&host);
    must(&host, &agent, &["mig", "apply", "--gpu", "all", "--layout", "3g.40gb,2g.20gb,1g.10gb*2"]);
    let (mut ours, mut nothing) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        ours.push(timed(&mut ctl(&host, &agent, &["status"])));
        nothing.push(timed(Command::new("/bin/true").stdin(Stdio::null())));
    }
    let (ours, nothing) = (median(ours), median(nothing));
    let ratio = ours / nothing;
    let mut report = Report::new(
        "`gpushctl status`",
        &format!(
            "The host has 8 GPUs with 4 instances each. The runs of `gpushctl status` alternate with runs of \
             `/bin/true`. The table shows the medians of {RUNS} runs."
        ),
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
