//! Requests of jobs for a share through MPS, with each kind of GRES, and the environment of their tasks.

use gpush_api::{GpuUuid, MpsState};
use gpush_tests::{
    mps::reaches,
    slurm::{ALICE, BOB, Setup, Site},
};

use super::{HOST, MPS, completed, refused, wait_for_output};

const ENV: &str = "env | sort";

#[test]
fn share_of_an_mps_gpu_comes_from_the_comment_or_from_gres_mps() {
    let gres = |setup: Setup| {
        let conf = format!("Name=gpu File={}/nvidia[0-3]\nName=mps Count=400\n", setup.devices().display());
        setup.gres("gpu,mps", "gpu:4,mps:400", &conf)
    };
    let Some(site) = Site::start(HOST, MPS, |setup, _, _| gres(setup)) else { return };
    (0..4).for_each(|gpu| drop(reaches(&site.agent, &gpu.to_string(), MpsState::Ready)));
    comment_requests_a_share(&site);
    gres_mps_gives_its_percentage(&site);
    second_user_is_refused(&site);
    second_user_waits(&site);
    site.assert_clean();
}

fn comment_requests_a_share(site: &Site) {
    let gres = "--gres=gpu:1";
    let ended = completed(site.cluster.run_job(ALICE, &[gres, "--comment=gpush:mps=25,memory=2G"], ENV));
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
}

fn gres_mps_gives_its_percentage(site: &Site) {
    let ended = completed(site.cluster.run_job(ALICE, &["--gres=mps:50"], ENV));
    assert_eq!(ended.variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), Some("50"), "{}", ended.output);
    assert!(ended.variable("CUDA_MPS_PIPE_DIRECTORY").is_some(), "{}", ended.output);
}

/// Slurm gives both users the same GPU. gpush refuses the second user, because an MPS daemon serves one user at a time.
fn second_user_is_refused(site: &Site) {
    let end = site.cluster.dir().join("end");
    let wait = format!("echo began; while [ ! -e '{}' ]; do sleep 0.1; done", end.display());
    let first = site.cluster.sbatch(ALICE, &["--gres=mps:30"], &wait);
    wait_for_output(site, first, "began");
    let shared: Vec<GpuUuid> =
        site.leases().iter().flat_map(|lease| &lease.members).map(|m| m.gpu_uuid.clone()).collect();
    assert_eq!(shared, [site.agent.gpu(0).uuid]);
    refused(&site.cluster.run_job(BOB, &["--gres=mps:30"], ENV), "GPU 0");
    std::fs::write(&end, "").expect("a file");
    completed(site.cluster.ended(first));
    completed(site.cluster.run_job(BOB, &["--gres=mps:30"], ENV));
}

/// Fault: an array of 20 jobs failed within 6 s, because another user's MPS daemon served one GPU.
fn second_user_waits(site: &Site) {
    site.agent.reload(MPS.replace("busy = \"fail\"", "busy = \"wait\""));
    let end = site.cluster.dir().join("end-of-first");
    let wait = format!("echo began; while [ ! -e '{}' ]; do sleep 0.1; done", end.display());
    let first = site.cluster.sbatch(ALICE, &["--gres=mps:30"], &wait);
    wait_for_output(site, first, "began");
    let second: Vec<_> = (0..3).map(|_| site.cluster.sbatch(BOB, &["--gres=mps:30"], ENV)).collect();
    let waits = || site.agent.log().contains(" waits: ").then_some(());
    site.cluster.until("a job that waits", waits);
    std::fs::write(&end, "").expect("a file");
    completed(site.cluster.ended(first));
    second.into_iter().for_each(|job| drop(completed(site.cluster.ended(job))));
}
