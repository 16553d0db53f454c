//! Daemons that cannot be started, and GPUs without MPS.

use std::{fs, os::unix::fs::PermissionsExt};

use gpush_api::{Code, MpsState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::{Host, program},
    mps::{Served, act, base, daemons, parts, reaches},
};
use serde_json::json;

/// gpushd reports the exit status, and the command that starts the daemon again.
#[test]
fn failing_daemon_is_given_up_and_can_be_started_manually() {
    let host = Host::up(Served::HOST);
    let broken = host.scratch("broken");
    fs::create_dir(&broken).expect("a directory");
    for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
        fs::write(broken.join(name), "#!/bin/sh\nexit 3\n").expect("a program");
        fs::set_permissions(broken.join(name), fs::Permissions::from_mode(0o755)).expect("a program");
    }
    let config = Served::CONFIG.replace("health_s = 1", "health_s = 1\nfailures = 2\npause_s = 1");
    let agent = Setup::on(&host).config(&config).env("GPUSH_MPS_PROGRAMS", broken.display().to_string()).start();
    let given_up = reaches(&agent, "0", MpsState::GivenUp);
    assert!(given_up.reasons.iter().any(|reason| reason.contains("ended with status 3")), "{given_up:#?}");
    assert!(given_up.reasons.iter().any(|reason| reason.contains("gpushctl mps start 0")), "{given_up:#?}");
    // Repair the programs. Then start the daemon with a request.
    for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
        fs::remove_file(broken.join(name)).expect("the program can be removed");
        std::os::unix::fs::symlink(program("gpush-sim"), broken.join(name)).expect("a link");
    }
    // gpushd's operation at its start may still change the target. So retry.
    agent.await_that("a start", || act(&agent, "0", "start", &json!({})).status == 200);
    reaches(&agent, "0", MpsState::Ready);
    // The simulated host ends only daemons that run its own programs. This daemon runs other programs, so stop it.
    assert_eq!(act(&agent, "0", "stop", &json!({})).status, 200);
    reaches(&agent, "0", MpsState::Stopped);
}

#[test]
fn gpu_without_mps_is_reported_and_gets_no_daemon() {
    for (gpu, why) in [
        ("model = \"a100-40\"\nmig = true", "MIG mode is on"),
        ("model = \"p100-16\"", "is older than Volta, so MPS cannot limit its clients"),
    ] {
        let host = Host::up(&format!("[[gpu]]\n{gpu}\n"));
        let agent = Agent::start(&host, Served::CONFIG);
        agent.await_that("a finding", || {
            let error = agent.get("/v1/mps/0").error();
            error.code == Code::NotFound && error.causes.iter().any(|cause| cause.contains(why))
        });
        assert_eq!((daemons(&agent).len(), parts(&base(&host)).len()), (0, 0), "{gpu}");
        if why.contains("older") {
            let refused = agent.begin_with(&json!({ "selectors": ["0"] })).expect_err("the GPU does not support MPS");
            assert_eq!(refused.code, Code::Unsupported, "{refused:?}");
            assert_eq!(agent.settle().len(), 0, "no operation is tried");
            let reported =
                |agent: &Agent| agent.get("/v1/health").json()["errors"].to_string().contains("can't be shared");
            assert!(reported(&agent));
            agent.stop();
            let agent = Agent::start(&host, Served::CONFIG);
            agent.await_that("the next gpushd reports it too", || reported(&agent));
            assert!(agent.gpu(0).drift[0].contains(why), "{:?}", agent.gpu(0).drift);
        }
    }
    // A Volta GPU supports MPS.
    let host = Host::up("[[gpu]]\nmodel = \"v100-32\"\n");
    reaches(&Agent::start(&host, Served::CONFIG), "0", MpsState::Ready);
}
