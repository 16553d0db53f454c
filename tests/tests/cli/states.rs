//! `gpushctl gpu cordon|drain|uncordon`, `maintenance` and `recover` with the real agent. The tests
//! compare the whole output and the exit code.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
};

use gpush_tests::{
    agent::{Agent, Setup, gi_at},
    host::Host,
};
use insta::assert_snapshot;

use crate::transcript::{self, transcript};

const CONFIG: &str = "[[gpu]]\nname = \"training\"\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\"]\n";

const HOST: &str = "driver = \"550.163.01\"\nseed = 1\n[[gpu]]\nmodel = \"a100-80\"\ncount = 2\nmig = true\n";

/// Returns a `gpushctl` command on a wide terminal, so that temporary paths of different lengths do
/// not change the line breaks.
fn gpushctl(agent: &Agent, args: &[&str]) -> Command {
    transcript::gpushctl(agent, args, 140)
}

/// Runs a command. Returns its output without the parts that differ between runs.
fn run(agent: &Agent, args: &[&str]) -> String {
    let output = gpushctl(agent, args).output().expect("gpushctl can be started");
    steady(&transcript(args, &output))
}

/// Replaces each time, pid, version and temporary path by the name of its kind.
fn steady(text: &str) -> String {
    let word = |word: &str| {
        let inner = word.trim_start_matches('(');
        let bare = inner.trim_end_matches([':', ',', ')', '.', ';']);
        let (head, tail) = (&word[..word.len() - inner.len()], &inner[bare.len()..]);
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b"-:".contains(&b));
        if bare.len() == 10 && digits(bare) && bare.contains('-') {
            format!("DATE{tail}")
        } else if bare.len() == 8 && digits(bare) && bare.contains(':') {
            format!("TIME{tail}")
        } else if bare.contains("/gpush-host-") {
            let name = bare.rsplit('/').next().unwrap_or_default();
            let name = name.split_once(".lost").map_or(name, |(name, _)| name);
            format!("{head}…/{}{tail}", name.split('-').next().unwrap_or_default())
        } else if bare == env!("CARGO_PKG_VERSION") {
            format!("VERSION{tail}")
        } else {
            word.to_owned()
        }
    };
    let line = |line: &str| line.split(' ').map(word).collect::<Vec<_>>().join(" ");
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn cordon_drain_and_uncordon() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, "");
    let _ = agent.apply(&["0"], &["3g.40gb"]);
    let mut all = run(&agent, &["gpu", "cordon", "0", "--reason", "fan replacement"]);
    all += &run(&agent, &["status", "--brief"]);
    all += &run(&agent, &["gpu", "drain", "0-1", "--reason", "fan replacement"]);
    let pid = host.process(&format!("--gpu 0 --gi {} --ci 0", gi_at(&host, 0, 4)));
    agent.settle_reads();
    let refused = run(&agent, &["gpu", "drain", "0", "--timeout", "0"]);
    assert!(refused.contains(&format!("waiting: used by pid {pid} (")), "{refused}");
    assert!(refused.contains("GPU 0 was not idle within 0s; it stays cordoned."), "{refused}");
    assert!(refused.contains("`gpushctl gpu uncordon 0`") && refused.ends_with("[exit 8]\n"), "{refused}");

    // The drain ends when the process ends.
    let mut drain = gpushctl(&agent, &["gpu", "drain", "0"]);
    let mut drain = drain.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gpushctl can be started");
    let mut printed = BufReader::new(drain.stderr.take().unwrap());
    let mut line = String::new();
    printed.read_line(&mut line).unwrap();
    assert!(line.contains(&format!("pid {pid}")), "{line}");
    host.end_process(pid);
    assert!(drain.wait().unwrap().success());
    let mut text = String::new();
    drain.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "GPU 0  cordoned, and nothing uses it\n");
    all += &run(&agent, &["gpu", "uncordon", "0-1"]);
    all += &run(&agent, &["gpu", "cordon"]);
    assert_snapshot!(all);
}

#[test]
fn maintenance_and_recover() {
    let host = Host::up(HOST);
    let state = Setup::on(&host).state_dir();
    let agent = Agent::start(&host, CONFIG);
    agent.wait_for_layouts_at_start();
    let mut all = run(&agent, &["maintenance", "enter", "--reason", "driver 570"]);
    all += &run(&agent, &["maintenance", "enter"]);
    all += &run(&agent, &["mig", "apply", "--gpu", "1", "--layout", "3g.40gb"]);
    all += &run(&agent, &["mig", "apply", "--dry-run", "--gpu", "1", "--layout", "3g.40gb"]);
    agent.stop();
    let agent = Agent::start(&host, CONFIG);
    all += &run(&agent, &["status"]);
    all += &run(&agent, &["mig", "apply", "--dry-run", "--gpu", "1", "--layout", "3g.40gb"]);
    all += &run(&agent, &["maintenance", "leave"]);
    all += &run(&agent, &["recover"]);
    agent.stop();
    fs::remove_file(state.join("gpush.db")).unwrap();
    let agent = Agent::start(&host, CONFIG);
    agent.settle_reads();
    all += &run(&agent, &["status", "--brief"]);
    all += &run(&agent, &["mig", "apply"]);
    all += &run(&agent, &["recover", "--reason", "no user is left"]);
    assert_snapshot!(all);
}
