//! Start time of the agent, and cost of a command.

use std::{
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
    time::Instant,
};

use gpush_api::OperationState;
use gpush_tests::{agent::Setup, host::Host};

use crate::{
    client::accounts,
    ctl::{self, ctl, must},
    leases,
    report::{Report, grouped, median},
};

/// Number of starts of the agent.
const STARTS: usize = 15;
/// Number of measured boots with a full history. The next constant is the number of operations in this history.
const BOOTS: usize = 7;
const OPERATIONS: usize = 1000;
/// Seven GPUs with layouts, and one for leases.
const RULES: &str = "[limits]\nchanges_burst = 10000\n\
                     [[gpu]]\nmatch = [\"0-6\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"2g.20gb\", \"1g.10gb\"]\n\
                     [[gpu]]\nmatch = [\"7\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 64 }\n";
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
    let (booted, history) = boots();
    let slowest = |times: &[f64]| times.iter().copied().fold(f64::NAN, f64::max);
    let row = |what: &str, times: &[f64]| {
        vec![what.into(), format!("{:.0}", median(times.to_vec())), format!("{:.0}", slowest(times))]
    };
    let mut report = Report::new(
        "Start of the agent",
        &format!(
            "All times begin with the start of `gpushd`. `READY=1` is the message of gpushd to systemd. `8 GPUs \
             listed` is the first answer that lists all 8 simulated GPUs. These two rows show the results of {STARTS} \
             starts. The last row shows {BOOTS} starts after a boot. Before these starts, gpushd granted {} leases and \
             ran {} operations. The time of this row ends when gpushd has applied the layouts of 7 GPUs. The simulated \
             driver answers at once.",
            grouped(leases::HISTORY),
            grouped(OPERATIONS)
        ),
        &["", "median ms", "slowest ms"],
    );
    report.rows.push(row("`READY=1`", &ready));
    report.rows.push(row("8 GPUs listed", &answered));
    report.rows.push(row(&format!("layouts of the boot applied, with {history}"), &booted));
    let (ready, answered, booted) = (median(ready), median(answered), median(booted));
    report.target("agent ready after start", "within 100 ms", &format!("{ready:.0} ms"), ready < 100.0);
    report.target("first answer about 8 GPUs", "within 100 ms", &format!("{answered:.0} ms"), answered < 100.0);
    report.target("from boot to ready, with full history", "within 300 ms", &format!("{booted:.0} ms"), booted < 300.0);
    report
}

/// Returns the milliseconds from the start of gpushd after a boot until the layouts are applied, and the size of the
/// history.
fn boots() -> (Vec<f64>, String) {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\ncount = 7\nmig = true\n[[gpu]]\nmodel = \"l4\"\n");
    // All users can connect to a socket in this directory.
    let public = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(public.path(), std::fs::Permissions::from_mode(0o755)).expect("an open directory");
    let setup = || Setup::on(&host).config(RULES).subuid(&accounts(leases::CLIENTS));
    let start = || setup().socket(public.path().join("gpushd.sock")).start();
    let mut agent = start();
    agent.wait_for_layouts_at_start();
    leases::make_history(&agent);
    for turn in 0..OPERATIONS {
        let layout: &[&str] = if turn % 2 == 0 { &["7g.80gb"] } else { &["3g.40gb"] };
        assert_eq!(agent.apply_once(&["0"], layout).state, OperationState::Done);
    }
    let mut times = Vec::new();
    for _ in 0..BOOTS {
        agent.stop();
        host.sim::<&str>("reboot", &[]);
        let started = Instant::now();
        agent = start();
        agent.wait_for_layouts_at_start();
        times.push(started.elapsed().as_secs_f64() * 1e3);
        assert_eq!(agent.gpu(0).mig.expect("MIG").instances.len(), 3);
    }
    agent.stop();
    let state_dir = Setup::on(&host).state_dir();
    assert!(leases::ended_leases(&state_dir) >= leases::HISTORY);
    let database = std::fs::metadata(state_dir.join("gpush.db")).map_or(0, |meta| meta.len());
    (times, format!("a database of {} KiB", database >> 10))
}

/// Measures runs of `gpushctl status` and of `/bin/true`, alternately.
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
            "The host has 8 GPUs with 4 instances each. Runs of `gpushctl status` and of `/bin/true` alternate. The \
             table shows the medians of {RUNS} runs."
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
