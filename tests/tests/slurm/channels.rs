//! Requests of jobs, with each kind of GRES, and the environment of their tasks.

use gpush_api::{Gpu, MpsState};
use gpush_tests::{
    mps::reaches,
    slurm::{ALICE, BOB, Ended, Setup, Site},
};

use super::{HOST, MPS, TIMESLICE, WHOLE, completed, wait_for_output};

const ENV: &str = "env | sort";

/// Checks that gpush has refused a request: the tasks of the job fail, and the user sees the
/// reason.
fn refused(ended: &Ended, why: &str) {
    assert_eq!(ended.state, "FAILED", "{}", ended.output);
    assert!(ended.output.contains("gpush: ") && ended.output.contains(why), "{}", ended.output);
}

fn uuid_of(site: &Site, index: u32) -> String {
    site.agent.gpu(index).uuid
}

#[test]
fn whole_gpus_of_slurm_are_leased_without_a_request() {
    let Some(site) = Site::start(HOST, WHOLE, |setup, _, _| setup) else { return };
    let ended = completed(site.cluster.run_job(ALICE, &["--gres=gpu:2"], ENV));
    let visible = format!("{},{}", uuid_of(&site, 0), uuid_of(&site, 1));
    assert_eq!(ended.variable("CUDA_VISIBLE_DEVICES"), Some(visible.as_str()), "{}", ended.output);
    assert!(ended.variable("GPUSH_LEASE").is_some_and(|lease| lease.starts_with('L')), "{}", ended.output);
    // A job without a GPU gets no lease.
    let ended = completed(site.cluster.run_job(BOB, &[], ENV));
    assert_eq!(ended.variable("GPUSH_LEASE"), None, "{}", ended.output);
    // A user cannot lease a GPU of Slurm directly.
    let direct = site.agent.post("/v1/leases", &serde_json::json!({ "share": { "kind": "whole" }, "holder_uid": 5 }));
    assert!(direct.status >= 400, "{}", direct.json());
    site.assert_clean();
}

/// Slurm passes the user's environment to the tasks.
#[test]
fn users_environment_does_not_decide_whether_a_task_runs() {
    let Some(site) = Site::start(HOST, WHOLE, |setup, _, _| setup) else { return };
    let arguments = ["--gres=gpu:1", "--export=ALL,SLURM_CLUSTER_NAME=nonsense,SLURMD_NODENAME=nonsense"];
    let script = "export SLURM_CLUSTER_NAME=nonsense SLURMD_NODENAME=nonsense\nsrun env";
    let ended = completed(site.cluster.run_job(ALICE, &arguments, script));
    assert!(ended.variable("GPUSH_LEASE").is_some(), "{}", ended.output);
    let [gres, export] = arguments;
    refused(&site.cluster.run_job(ALICE, &[gres, export, "--comment=gpush:mps=250"], "echo ran"), "250");
    site.assert_clean();
}

#[test]
fn comment_requests_a_share_of_an_mps_gpu() {
    let Some(site) = Site::start(HOST, MPS, |setup, _, _| setup) else { return };
    for gpu in 0..4 {
        reaches(&site.agent, &gpu.to_string(), MpsState::Ready);
    }
    let gres = "--gres=gpu:1";
    let ended = completed(site.cluster.run_job(ALICE, &[gres, "--comment=gpush:mps=25,mem=2G"], ENV));
    assert_eq!(ended.variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), Some("25"), "{}", ended.output);
    assert!(ended.variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").is_some_and(|limit| limit.contains("2048M")));
    assert!(ended.variable("CUDA_MPS_PIPE_DIRECTORY").is_some_and(|pipe| pipe.starts_with('/')), "{}", ended.output);
    // Comments that sites use, and a request within other text.
    for comment in ["mps", "mps-per-gpu", "project 7, gpush:mps=10 please"] {
        let ended = completed(site.cluster.run_job(ALICE, &[gres, &format!("--comment={comment}")], ENV));
        assert!(ended.variable("CUDA_MPS_PIPE_DIRECTORY").is_some(), "{comment}: {}", ended.output);
    }
    refused(&site.cluster.run_job(ALICE, &[gres, "--comment=gpush:mps=250"], ENV), "250");
    refused(&site.cluster.run_job(ALICE, &[gres], ENV), "requests no share");
    site.assert_clean();
}

#[test]
fn gres_mps_gives_its_percentage_and_a_second_user_is_refused() {
    let gres = |setup: Setup| {
        let conf = format!("Name=gpu File={}/nvidia[0-3]\nName=mps Count=400\n", setup.devices().display());
        setup.gres("gpu,mps", "gpu:4,mps:400", &conf)
    };
    let Some(site) = Site::start(HOST, MPS, |setup, _, _| gres(setup)) else { return };
    reaches(&site.agent, "0", MpsState::Ready);
    let ended = completed(site.cluster.run_job(ALICE, &["--gres=mps:50"], ENV));
    assert_eq!(ended.variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), Some("50"), "{}", ended.output);
    assert!(ended.variable("CUDA_MPS_PIPE_DIRECTORY").is_some(), "{}", ended.output);
    let end = site.cluster.dir().join("end");
    let wait = format!("echo began; while [ ! -e '{}' ]; do sleep 0.1; done", end.display());
    let first = site.cluster.sbatch(ALICE, &["--gres=mps:30"], &wait);
    wait_for_output(&site, first, "began");
    let gpus: Vec<Gpu> = site.agent.gpus();
    let shared: Vec<String> = site.leases().iter().flat_map(|lease| &lease.members).map(|m| m.gpu.clone()).collect();
    assert_eq!(shared, [gpus[0].uuid.clone()]);
    // Slurm gives both users the same GPU. gpush refuses the second user, because an MPS daemon
    // serves one user at a time.
    refused(&site.cluster.run_job(BOB, &["--gres=mps:30"], ENV), "GPU 0");
    std::fs::write(&end, "").expect("a file");
    completed(site.cluster.ended(first));
    completed(site.cluster.run_job(BOB, &["--gres=mps:30"], ENV));
    site.assert_clean();
}

/// Prolog cannot distinguish a shard from a whole GPU. So the job needs a request.
#[test]
fn shard_needs_a_request() {
    let gres = |setup: Setup| {
        let conf = format!("Name=gpu File={}/nvidia[0-3]\nName=shard Count=8\n", setup.devices().display());
        setup.gres("gpu,shard", "gpu:4,shard:8", &conf)
    };
    let Some(site) = Site::start(HOST, TIMESLICE, |setup, _, _| gres(setup)) else { return };
    refused(&site.cluster.run_job(ALICE, &["--gres=shard:1"], ENV), "gres/shard");
    let comment = "--comment=gpush:timeslice";
    let ended = completed(site.cluster.run_job(ALICE, &["--gres=shard:1", comment], ENV));
    assert_eq!(ended.variable("CUDA_VISIBLE_DEVICES"), Some(uuid_of(&site, 0).as_str()), "{}", ended.output);
    site.assert_clean();
}
