//! Durations of commands for other GPUs while the reading of one GPU hangs.

use std::{
    ops::Range,
    process::Stdio,
    time::{Duration, Instant},
};

use gpush_api::{MpsState, OperationState};
use serde_json::json;

use crate::{
    agent::{Agent, real_layout},
    host::{Host, program},
    mps::{act, reaches},
};

/// A host with four GPUs. GPUs 0 and 1 are shared through MPS, GPU 2 has MIG, and GPU 3 is
/// time-sliced.
const HOST: &str = "[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\ncount = 4\n";
const CONFIG: &str = r#"
[mps]
health = "1s"
[[gpu]]
match = ["0-1"]
mode = "mps"
[[gpu]]
match = ["2"]
mode = "mig"
layout = ["7g.80gb"]
[[gpu]]
match = ["3"]
mode = "timeslice"
timeslice = { replicas = 1, level = "LEVEL", compute_mode = "exclusive_process" }
"#;

fn config(level: &str) -> String {
    CONFIG.replace("LEVEL", level)
}

/// A command that concerns only GPU 0, 2 or 3, with its name.
type Command<'a> = (&'static str, Box<dyn Fn(usize) + 'a>);

fn commands<'a>(host: &'a Host, agent: &'a Agent) -> Vec<Command<'a>> {
    let ctl = |args: &[&str]| {
        let mut command = host.command(program("gpushctl"));
        command.args(args).env("GPUSH_SOCKET", agent.socket()).stdin(Stdio::null());
        let output = command.output().expect("gpushctl");
        assert!(output.status.success(), "{args:?}: {output:?}\n{}", agent.log());
    };
    let level = |level: &str| host.show()["gpus"][3]["state"]["timeslice"].as_str() == Some(level);
    vec![
        ("status", Box::new(move |_| ctl(&["status"]))),
        ("mps set 0", Box::new(move |round| ctl(&["mps", "set", "0", "--percentage", &(50 + round).to_string()]))),
        ("lease request", Box::new(move |_| ctl(&["lease", "request", "--mps", "1", "-g", "0", "--for", "1h"]))),
        ("mps show 0", Box::new(move |_| ctl(&["mps", "show", "0"]))),
        (
            "mps stop and start 0",
            Box::new(move |_| {
                assert_eq!(act(agent, "0", "stop", &json!({ "force": true })).status, 200);
                assert_eq!(act(agent, "0", "start", &json!({})).status, 200);
                reaches(agent, "0", MpsState::Ready);
            }),
        ),
        (
            "mig apply -g 2",
            Box::new(move |round| {
                let layout = if round % 2 == 0 { "1g.10gb" } else { "7g.80gb" };
                assert_eq!(agent.apply(&["2"], &[layout]).state, OperationState::Done);
                assert_eq!(real_layout(host, 2).len(), 1);
            }),
        ),
        (
            "a time-slice level of GPU 3",
            Box::new(move |round| {
                let wanted = ["short", "medium", "long"][round % 3];
                agent.reload(config(wanted));
                agent.await_that("its level", || level(wanted));
            }),
        ),
    ]
}

/// Runs each command `rounds` times. Returns the median duration of each command.
fn medians(commands: &[Command<'_>], rounds: Range<usize>) -> Vec<Duration> {
    let mut times = vec![Vec::new(); commands.len()];
    for round in rounds {
        for ((_, run), times) in commands.iter().zip(&mut times) {
            let begun = Instant::now();
            run(round);
            times.push(begun.elapsed());
        }
    }
    let median = |mut times: Vec<Duration>| {
        times.sort();
        times[times.len() / 2]
    };
    times.into_iter().map(median).collect()
}

/// Median durations of one command.
#[derive(Debug, Clone, Copy)]
pub struct Compared {
    /// The command.
    pub name: &'static str,
    /// Median while every GPU answers.
    pub usual: Duration,
    /// Median while the reading of GPU 1 hangs.
    pub hung: Duration,
}

/// Measures each command `rounds` times while every GPU answers, and again while the reading of GPU
/// 1 hangs.
///
/// # Panics
/// If a command fails.
#[must_use]
pub fn compare(rounds: usize) -> Vec<Compared> {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, &config("default"));
    for gpu in ["0", "1"] {
        reaches(&agent, gpu, MpsState::Ready);
    }
    agent.wait_for_layouts_at_start();
    let _begun = agent.settle();
    let commands = commands(&host, &agent);
    let usual = medians(&commands, 0..rounds);
    host.fault("nvmlDeviceGetMemoryInfo* --gpu 1 --hang");
    agent.until("a reading that hangs", || agent.gpu(1).stale.then_some(()));
    let hung = medians(&commands, rounds..2 * rounds);
    host.clear_faults();
    let names = commands.iter().map(|(name, _)| *name);
    names.zip(usual.into_iter().zip(hung)).map(|(name, (usual, hung))| Compared { name, usual, hung }).collect()
}
