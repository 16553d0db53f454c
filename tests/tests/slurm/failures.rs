//! Nodes that cannot serve jobs: Prolog fails, and Slurm drains the node.

use std::fs;

use gpush_api::GpuState;
use gpush_tests::slurm::{ALICE, BOB, Site};

use super::{HOST, WHOLE, completed};

fn drain_reason(site: &Site) -> String {
    site.cluster.until("drained node", || site.cluster.drain_reasons().pop())
}

#[test]
fn node_that_cannot_serve_is_drained_with_the_reason_in_the_log() {
    let Some(mut site) = Site::start(HOST, WHOLE, |setup, _, _| setup) else { return };
    node_without_gpushd_is_drained_by_its_policy(&mut site);
    let drains = |site: &Site, why: &str| {
        let job = site.cluster.sbatch(ALICE, &["--gres=gpu:4"], "true");
        assert_eq!(drain_reason(site), "Prolog error");
        let is_logged =
            || site.cluster.log("slurmd-n1").lines().any(|line| line.contains("gpush: job") && line.contains(why));
        site.cluster.until(why, || is_logged().then_some(()));
        site.cluster.run("scancel", &[&job.to_string()]);
        site.cluster.until("no files of jobs", || site.job_files().is_empty().then_some(()));
        assert_eq!(site.leases(), []);
    };
    let database = gpush_tests::agent::Setup::on(&site.host).state_dir().join("gpush.db");
    fs::remove_file(database).expect("the database exists");
    drains(&site, "gpush.db was deleted or replaced");
    site.restart_agent(|_| ());
    site.agent.await_that("held GPUs", || site.agent.gpus().iter().all(|gpu| gpu.state == GpuState::Held));
    site.cluster.resume("n1");
    site.cluster.wait_until_idle();
    drains(&site, "is held");
    let answer = site.agent.post("/v1/recover", &serde_json::json!({ "reason": "no process uses a GPU" }));
    assert_eq!(answer.status, 200, "{}", answer.json());
    site.cluster.resume("n1");
    site.cluster.wait_until_idle();
    completed(site.cluster.run_job(BOB, &["--gres=gpu:4"], "true"));
    site.host.fault("nvmlDeviceGetMemoryInfo* --gpu 2 --mutate lose --times 1");
    site.agent.await_that("lost GPU", || site.agent.gpu(2).state == GpuState::Lost);
    drains(&site, "GPU 2 is lost");
}

/// The default is `agent_down = "fail"`. It does not apply to jobs without a GPU.
fn node_without_gpushd_is_drained_by_its_policy(site: &mut Site) {
    // The hooks of this job record which GPUs belong to Slurm.
    completed(site.cluster.run_job(ALICE, &["--gres=gpu:1"], "true"));
    site.restart_agent(|site| {
        completed(site.cluster.run_job(BOB, &[], "true"));
        // A request without a GPU never drains the node.
        let requested = site.cluster.run_job(BOB, &["--comment=mps"], "true");
        assert_eq!(requested.state, "FAILED", "{}", requested.output);
        assert!(requested.output.contains("gpush: "), "{}", requested.output);
        site.cluster.assert_never_drained();
        let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1"], "env");
        assert_eq!(drain_reason(site), "Prolog error");
        assert!(site.cluster.log("slurmd-n1").contains("gpush: job"), "{}", site.cluster.logs());
        site.cluster.run("scancel", &[&job.to_string()]);
    });
    site.cluster.resume("n1");
    site.cluster.wait_until_idle();
    completed(site.cluster.run_job(BOB, &["--gres=gpu:4"], "true"));
    assert_eq!((site.leases(), site.job_files()), (Vec::new(), Vec::new()));
}
