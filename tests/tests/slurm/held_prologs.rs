//! Jobs that are cancelled, and slurmd that is killed, while Prolog runs; and Prologs that run at the same time.

use std::fs;

use gpush_tests::{
    host::{Host, program},
    slurm::{ALICE, BOB, JobId, Setup, Site, script},
};
use nix::sys::signal::Signal;

use super::{HOST, TIMESLICE, WHOLE, completed};

/// Sets a Prolog that writes the file `begun`, waits while the file `hold` exists, requests the lease, writes the file
/// `asked`, and waits while the file `pause` exists.
fn held_prolog(setup: Setup, host: &Host) -> Setup {
    let dir = setup.dir().display().to_string();
    fs::write(setup.dir().join("hold"), "").expect("a file");
    let hook = script(host, setup.dir(), "prolog").replace("exec ", "");
    let wait = |file: &str| format!("while [ -e '{dir}/{file}' ]; do sleep 0.05; done\n");
    let (hold, pause) = (wait("hold"), wait("pause"));
    let body = format!(
        "export PATH=/usr/bin:/bin\ntouch '{dir}/begun'\n{hold}{hook}status=$?\ntouch '{dir}/asked'\n{pause}exit $status\n"
    );
    setup.hook("Prolog", &body)
}

fn remove(site: &Site, file: &str) {
    fs::remove_file(site.cluster.dir().join(file)).expect("the file exists");
}

fn wait_for_file(site: &Site, file: &str) {
    let path = site.cluster.dir().join(file);
    site.cluster.until(file, || path.exists().then_some(()));
}

#[test]
fn job_that_ends_during_prolog_leaves_no_lease() {
    let Some(mut site) = Site::start(HOST, WHOLE, |setup, host, _| held_prolog(setup, host)) else { return };
    job_is_cancelled_before_its_request(&site);
    slurmd_is_killed_after_the_grant(&mut site);
}

fn job_is_cancelled_before_its_request(site: &Site) {
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1"], "echo ran");
    wait_for_file(site, "begun");
    site.cluster.run("scancel", &[&job.to_string()]);
    remove(site, "hold");
    let ended = site.cluster.ended(job);
    assert_eq!((ended.state.as_str(), ended.output.contains("ran")), ("CANCELLED", false), "{}", ended.output);
    completed(site.cluster.run_job(BOB, &["--gres=gpu:4"], "true"));
    site.assert_clean();
}

/// `gpushctl slurm reconcile` ends the lease of a job whose Epilog never ran.
fn slurmd_is_killed_after_the_grant(site: &mut Site) {
    remove(site, "asked");
    fs::write(site.cluster.dir().join("pause"), "").expect("a file");
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1", "--no-requeue"], "true");
    wait_for_file(site, "asked");
    assert_eq!(site.leases().len(), 1);
    site.cluster.signal_node(0, Signal::SIGKILL);
    site.cluster.run("scancel", &[&job.to_string()]);
    remove(site, "pause");
    site.cluster.restart_node(0);
    site.cluster.until("cancelled job", || {
        let state = site.cluster.job_state(job)?;
        matches!(state.as_str(), "CANCELLED" | "COMPLETED" | "NODE_FAIL" | "FAILED").then_some(())
    });
    let mut reconcile = site.cluster.command(&program("gpushctl").display().to_string());
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

/// The hooks of different jobs run at the same time, also on one GPU.
#[test]
fn concurrent_prologs_on_one_gpu_share_its_replicas() {
    let gres = |setup: Setup| {
        let conf = format!("Name=gpu File={}/nvidia[0-3]\nName=shard Count=16\n", setup.devices().display());
        setup.gres("gpu,shard", "gpu:4,shard:16", &conf)
    };
    let start = |setup: Setup, host: &Host| held_prolog(gres(setup), host);
    let Some(site) = Site::start(HOST, TIMESLICE, |setup, host, _| start(setup, host)) else { return };
    let go = site.cluster.dir().join("go");
    let wait = format!("echo \"$GPUSH_LEASE\"; while [ ! -e '{}' ]; do sleep 0.1; done", go.display());
    let comment = "--comment=gpush:timeslice";
    let jobs: Vec<JobId> = [ALICE, BOB, ALICE, BOB]
        .iter()
        .map(|user| site.cluster.sbatch(*user, &["--gres=shard:1", comment], &wait))
        .collect();
    for job in &jobs {
        site.cluster.wait_for_state(*job, "RUNNING");
    }
    remove(&site, "hold");
    let decided = |job: &JobId| site.cluster.output_of(*job).contains(['L', 'g']);
    site.cluster.until("tasks of all jobs", || jobs.iter().all(decided).then_some(()));
    fs::write(&go, "").expect("a file");
    let ended: Vec<_> = jobs.iter().map(|job| site.cluster.ended(*job)).collect();
    // GPU 0 has two replicas, and Slurm puts all four jobs on it.
    let leased = ended.iter().filter(|job| job.state == "COMPLETED").count();
    assert_eq!(leased, 2, "{ended:?}");
    assert!(ended.iter().all(|job| job.state == "COMPLETED" || job.output.contains("gpush: ")), "{ended:?}");
    site.assert_clean();
}
