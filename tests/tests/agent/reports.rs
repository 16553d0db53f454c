//! Reports about GPUs that are unreadable or cordoned, that an operation waits for, or whose mode
//! is `exclusive`. Also: SIGTERM stops gpushd at any moment of its start.

use std::{
    process::Stdio,
    time::{Duration, Instant},
};

use gpush_api::{ConfigDiff, OperationState};
use gpush_tests::{
    agent::{Agent, PATIENCE},
    host::{Host, program},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

fn gpushctl(agent: &Agent, args: &[&str]) -> (Option<i32>, String) {
    let mut command = std::process::Command::new(program("gpushctl"));
    command.args(args).env("GPUSH_SOCKET", agent.socket()).env("COLUMNS", "120").stdin(Stdio::null());
    let output = command.output().expect("gpushctl can be started");
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[test]
fn config_diff_reports_unreadable_gpus() {
    const RULE: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\nlayout = \"none\"\n";
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\ncount = 3\n");
    let agent = Agent::start(&host, RULE);
    agent.wait_for_layouts_at_start();
    let (status, text) = gpushctl(&agent, &["config", "diff"]);
    assert_eq!(status, Some(0), "{text}");
    host.fault("nvmlDeviceGetMemoryInfo* --gpu 1 --mutate lose --times 1");
    agent.until("it is lost", || (agent.gpu(1).state == gpush_api::GpuState::Lost).then_some(()));
    // On a busy machine, the readings of the other GPUs may be late.
    agent.await_that("only the lost GPU is unreadable", || {
        let diff: ConfigDiff = serde_json::from_value(agent.get("/v1/config/diff").json()).expect("a diff");
        diff.unseen.len() == 1
    });
    let (status, text) = gpushctl(&agent, &["config", "diff"]);
    assert!(status != Some(0) && text.contains("GPU 1") && text.contains("GPUs 0, 2 match"), "{status:?} {text}");
    // After a restart, gpushd cannot identify the lost GPU at all.
    agent.stop();
    let agent = Agent::start(&host, RULE);
    let (status, text) = gpushctl(&agent, &["config", "diff"]);
    assert!(status != Some(0) && text.contains("GPU 1 can't be identified"), "{status:?} {text}");
    agent.stop();
    let agent = Agent::start(&host, &format!("[driver]\nlibrary = \"/nonexistent/libnvidia-ml.so\"\n{RULE}"));
    let (status, text) = gpushctl(&agent, &["config", "diff"]);
    assert!(status == Some(1) && !text.contains("as it wants"), "{status:?} {text}");
}

#[test]
fn mig_assert_checks_only_mode_mig_but_also_cordoned_gpus() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\ncount = 3\n");
    let mig = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"7g.80gb\"]\n";
    let agent = Agent::start(&host, mig);
    agent.wait_for_layouts_at_start();
    agent.reload(format!("{mig}[[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\n"));
    // MIG is enabled on GPU 1, but the rule of the GPU says `exclusive`. Without a GPU as argument,
    // `mig apply --check` ignores this difference, and `apply` disables MIG.
    let (status, text) = gpushctl(&agent, &["mig", "apply", "--check"]);
    assert_eq!(status, Some(0), "{text}");
    assert_eq!(gpushctl(&agent, &["config", "diff"]).0, Some(3));
    assert_eq!(gpushctl(&agent, &["apply"]).0, Some(0));
    assert_eq!(gpushctl(&agent, &["config", "diff"]).0, Some(0));
    assert_eq!(gpushctl(&agent, &["gpu", "cordon", "0", "--reason", "fan"]).0, Some(0));
    let (status, text) = gpushctl(&agent, &["mig", "apply", "--check"]);
    assert_eq!(status, Some(0), "{text}");
    // If a second drain has no reason, the first reason stays. This matters because a client that
    // resumes a drain sends no reason.
    assert_eq!(gpushctl(&agent, &["gpu", "drain", "0"]).0, Some(0));
    assert_eq!(agent.gpu(0).cordons[0].reason, "fan");
}

#[test]
fn process_in_gpu_instance_is_named_once_as_blocker() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n");
    let agent = Agent::start(&host, "");
    assert_eq!(agent.apply(&["0"], &["3g.40gb@4"]).state, OperationState::Done);
    let pid = host.process(&format!("--gpu 0 --gi {} --memory 100", gpush_tests::agent::gi_at(&host, 0, 4)));
    let error = agent.until("it is in the way", || agent.begin(&["0"], &["7g.80gb"]).err());
    let reported = error.sentences().join(" ");
    assert_eq!(reported.matches(&pid.to_string()).count(), reported.matches("held by").count(), "{reported}");
    assert!(reported.contains("root") || reported.contains("gpush-sim"), "{reported}");
}

#[test]
fn sigterm_during_start_stops_gpushd() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n");
    let mut tries = 0;
    for quarters in 0..80 {
        let mut child = host
            .command(program("gpushd"))
            .args(["--log", "error"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("gpushd can be started");
        // This sleep waits for no event. Its length is the moment of the signal.
        std::thread::sleep(Duration::from_micros(250 * quarters));
        kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
        let reported = Instant::now();
        while child.try_wait().expect("it can be waited for").is_none() {
            if reported.elapsed() > PATIENCE {
                child.kill().unwrap();
                panic!("did not end {} µs after SIGTERM", 250 * quarters);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        tries += 1;
    }
    println!("gpushd received SIGTERM at {tries} moments of its start, and stopped");
}
