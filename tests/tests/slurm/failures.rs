//! Failures of gpushd and slurmd while jobs start, run and end.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use gpush_api::GpuState;
use gpush_tests::slurm::{ALICE, BOB, JobId, Setup, Site, script};
use nix::sys::signal::Signal;

use super::{HOST, WHOLE, completed};

fn policy(agent_down: &str, deadline_s: u32) -> String {
    format!("[slurm]\nagent_down = \"{agent_down}\"\ndeadline_s = {deadline_s}\n{WHOLE}")
}

/// Starts a job that runs until a file exists. Returns the job and the path of the file.
fn waiting_job(site: &Site) -> (JobId, PathBuf) {
    let go = site.cluster.dir().join("go");
    let wait = format!("echo \"$GPUSH_LEASE\"; while [ ! -e '{}' ]; do sleep 0.1; done", go.display());
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1"], &wait);
    site.cluster.until("running job", || site.cluster.output_of(job).starts_with('L').then_some(()));
    (job, go)
}

fn drain_reason(site: &Site) -> String {
    site.cluster.until("drained node", || site.cluster.drain_reasons().pop())
}

#[test]
fn lease_of_a_job_survives_a_killed_gpushd() {
    let Some(mut site) = Site::start(HOST, WHOLE, |setup, _, _| setup) else { return };
    let (job, go) = waiting_job(&site);
    let before = site.leases();
    site.restart_agent(|_| ());
    assert_eq!(site.leases(), before);
    fs::write(go, "").expect("a file");
    completed(site.cluster.ended(job));
    site.assert_clean();
}

/// If Epilog cannot report the end of a job to gpushd, the next hook must report it.
#[test]
fn missed_job_end_reaches_gpushd_later() {
    let Some(mut site) = Site::start(HOST, &policy("pass", 20), |setup, _, _| setup) else { return };
    let (job, go) = waiting_job(&site);
    site.restart_agent(|site| {
        fs::write(go, "").expect("a file");
        completed(site.cluster.ended(job));
    });
    assert_eq!(site.leases().len(), 1);
    completed(site.cluster.run_job(BOB, &["--gres=gpu:4"], "true"));
    site.assert_clean();
}

#[test]
fn without_gpushd_a_job_runs_or_the_node_is_drained_by_policy() {
    for agent_down in ["pass", "fail"] {
        let Some(mut site) = Site::start(HOST, &policy(agent_down, 20), |setup, _, _| setup) else { return };
        // The hooks of this job record which GPUs belong to Slurm.
        completed(site.cluster.run_job(ALICE, &["--gres=gpu:1"], "true"));
        site.restart_agent(|site| {
            // `agent_down` does not apply to a job without a GPU and without a request.
            completed(site.cluster.run_job(BOB, &[], "true"));
            // A request without a GPU never drains the node.
            let requested = site.cluster.run_job(BOB, &["--comment=mps"], "true");
            let expected = if agent_down == "pass" { "COMPLETED" } else { "FAILED" };
            assert_eq!(requested.state, expected, "{}", requested.output);
            assert!(requested.output.contains("gpush: "), "{}", requested.output);
            site.cluster.assert_never_drained();
            let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1"], "env");
            if agent_down == "pass" {
                let ended = site.cluster.ended(job);
                assert_eq!((ended.state.as_str(), ended.variable("GPUSH_LEASE")), ("COMPLETED", None));
                assert!(ended.output.contains("gpush: "), "{}", ended.output);
                return;
            }
            assert_eq!(drain_reason(site), "Prolog error");
            assert!(site.cluster.log("slurmd-n1").contains("gpush: job"), "{}", site.cluster.logs());
            site.cluster.run("scancel", &[&job.to_string()]);
        });
        if agent_down == "fail" {
            site.cluster.resume("n1");
        }
        site.cluster.wait_until_idle();
        completed(site.cluster.run_job(BOB, &["--gres=gpu:4"], "true"));
        assert_eq!((site.leases(), site.job_files()), (Vec::new(), Vec::new()));
    }
}

#[test]
fn node_that_cannot_serve_is_drained_with_the_reason_in_the_log() {
    let Some(mut site) = Site::start(HOST, WHOLE, |setup, _, _| setup) else { return };
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

/// gpushd is stopped by SIGSTOP: the kernel accepts connections for it, but gpushd does not answer.
/// Prolog must end within its own deadline.
#[test]
fn prolog_ends_while_gpushd_is_stopped() {
    let change = |setup: Setup| setup.line("PrologEpilogTimeout=50");
    let Some(site) = Site::start(HOST, &policy("pass", 3), |setup, _, _| change(setup)) else { return };
    site.agent.signal(Signal::SIGSTOP);
    let began = Instant::now();
    let ended = site.cluster.run_job(ALICE, &["--gres=gpu:1"], "env");
    let took = began.elapsed();
    site.agent.signal(Signal::SIGCONT);
    assert_eq!((ended.state.as_str(), ended.variable("GPUSH_LEASE")), ("COMPLETED", None), "{}", ended.output);
    // Prolog and Epilog take 3 s each. After 50 s, Slurm would end a hook and drain the node.
    assert!(took >= Duration::from_secs(3), "{took:?}");
    // gpushd has granted a lease in the meantime. The next hook ends it.
    completed(site.cluster.run_job(BOB, &["--gres=gpu:4"], "true"));
    site.assert_clean();
}

#[test]
fn slurmd_killed_in_prolog_leaves_no_lease_after_reconcile() {
    let start = |setup: Setup, host: &gpush_tests::host::Host| {
        let dir = setup.dir().display().to_string();
        let hook = script(host, setup.dir(), "prolog").replace("exec ", "");
        // The script waits after the grant. So the test can kill slurmd during Prolog.
        let body = format!(
            "export PATH=/usr/bin:/bin\n{hook}touch '{dir}/granted'\nwhile [ ! -e '{dir}/go' ]; do sleep 0.05; done\n"
        );
        setup.hook("Prolog", &body)
    };
    let Some(mut site) = Site::start(HOST, WHOLE, |setup, host, _| start(setup, host)) else { return };
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1", "--no-requeue"], "true");
    let (granted, go) = (site.cluster.dir().join("granted"), site.cluster.dir().join("go"));
    site.cluster.until("Prolog", || granted.exists().then_some(()));
    assert_eq!(site.leases().len(), 1);
    site.cluster.signal_node(0, Signal::SIGKILL);
    site.cluster.run("scancel", &[&job.to_string()]);
    fs::write(&go, "").expect("a file");
    site.cluster.restart_node(0);
    site.cluster.until("cancelled job", || {
        let state = site.cluster.job_state(job)?;
        matches!(state.as_str(), "CANCELLED" | "COMPLETED" | "NODE_FAIL" | "FAILED").then_some(())
    });
    let mut reconcile = site.cluster.command(&gpush_tests::host::program("gpushctl").display().to_string());
    reconcile.arg("--socket").arg(site.host.scratch("gpushd.admin.sock")).args(["slurm", "reconcile"]);
    reconcile.arg("--dir").arg(site.jobs()).args(["--cluster", "ci"]);
    let output = reconcile.output().expect("gpushctl can be started");
    assert!(output.status.success(), "{output:?}");
    site.agent.await_that("no lease", || site.leases().is_empty());
    assert_eq!(site.job_files(), [""; 0]);
    site.cluster.until("a node that is not down", || {
        site.cluster.node_states().iter().all(|state| state == "idle").then_some(())
    });
    completed(site.cluster.run_job(BOB, &["--gres=gpu:4"], "true"));
}
