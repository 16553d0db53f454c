//! How jobs end: they are cancelled, requeued, late, repeated, or timed out.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use gpush_tests::slurm::{ALICE, BOB, JobId, Setup, Site, script};

use super::{HOST, WHOLE, completed};

/// Sets a Prolog that writes a file when it begins, and then waits while the file `hold` exists.
fn held_prolog(setup: Setup, host: &gpush_tests::host::Host) -> Setup {
    let dir = setup.dir().display().to_string();
    fs::write(setup.dir().join("hold"), "").expect("a file");
    let hook = script(host, setup.dir(), "prolog");
    let body = format!(
        "export PATH=/usr/bin:/bin\ntouch '{dir}/begun'\nwhile [ -e '{dir}/hold' ]; do sleep 0.05; done\n{hook}"
    );
    setup.hook("Prolog", &body)
}

fn let_go(site: &Site) {
    fs::remove_file(site.cluster.dir().join("hold")).expect("the file exists");
}

fn begun(site: &Site) {
    let begun = site.cluster.dir().join("begun");
    site.cluster.until("Prolog", || begun.exists().then_some(()));
}

/// Runs Epilog as slurmd does, for a run of a job.
pub(super) fn epilog(site: &Site, job: JobId, restart: u32) -> Output {
    let mut command = Command::new(site.cluster.dir().join("epilog"));
    command.env_clear().stdin(Stdio::null());
    for (name, value) in [
        ("SLURM_JOB_ID", job.to_string()),
        ("SLURM_JOB_UID", ALICE.uid.to_string()),
        ("SLURM_CLUSTER_NAME", "ci".to_owned()),
        ("SLURMD_NODENAME", "n1".to_owned()),
        ("SLURM_JOB_RESTART_COUNT", restart.to_string()),
    ] {
        command.env(name, value);
    }
    command.output().expect("Epilog can be started")
}

#[test]
fn job_cancelled_in_prolog_leaves_no_lease() {
    let Some(site) = Site::start(HOST, WHOLE, |setup, host, _| held_prolog(setup, host)) else { return };
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1"], "echo ran");
    begun(&site);
    site.cluster.run("scancel", &[&job.to_string()]);
    let_go(&site);
    let ended = site.cluster.ended(job);
    assert_eq!((ended.state.as_str(), ended.output.contains("ran")), ("CANCELLED", false), "{}", ended.output);
    completed(site.cluster.run_job(BOB, &["--gres=gpu:4"], "true"));
    site.assert_clean();
}

#[test]
fn epilog_runs_twice_and_for_unknown_jobs_without_harm() {
    let Some(site) = Site::start(HOST, WHOLE, |setup, _, _| setup) else { return };
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1"], "true");
    completed(site.cluster.ended(job));
    for (job, restart) in [(job, 0), (job, 0), (job, 3), (JobId(4_000_000), 0)] {
        let again = epilog(&site, job, restart);
        assert!(again.status.success() && again.stdout.is_empty() && again.stderr.is_empty(), "{job}: {again:?}");
    }
    site.assert_clean();
}

/// If a job runs, its Epilog needs nothing but the job id: no GPU variables and no user.
#[test]
fn epilog_works_from_the_job_id_alone() {
    let Some(site) = Site::start(HOST, WHOLE, |setup, _, _| setup) else { return };
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1"], "sleep 600");
    site.cluster.until("a lease", || (!site.leases().is_empty()).then_some(()));
    let mut command = Command::new(site.cluster.dir().join("epilog"));
    let id = job.to_string();
    command.env_clear().env("SLURM_JOB_ID", &id).env("SLURM_CLUSTER_NAME", "ci").env("SLURMD_NODENAME", "n1");
    let output = command.output().expect("Epilog can be started");
    assert!(output.status.success(), "{output:?}");
    site.agent.await_that("no lease", || site.leases().is_empty());
    site.cluster.run("scancel", &[&id]);
    assert_eq!(site.cluster.ended(job).state, "CANCELLED");
    site.assert_clean();
}

#[test]
fn timed_out_job_leaves_no_lease() {
    let Some(site) = Site::start(HOST, WHOLE, |setup, _, _| setup) else { return };
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1", "--time=1"], "sleep 600");
    site.cluster.until("a lease", || (!site.leases().is_empty()).then_some(()));
    // The shortest time limit of Slurm is one minute. So set the end of the job to now.
    site.cluster.run("scontrol", &["update", &format!("jobid={job}"), "EndTime=now"]);
    assert_eq!(site.cluster.ended(job).state, "TIMEOUT");
    site.assert_clean();
}

/// The hooks of different jobs run at the same time, also on one GPU.
#[test]
fn concurrent_prologs_on_one_gpu_share_its_replicas() {
    let gres = |setup: Setup| {
        let conf = format!("Name=gpu File={}/nvidia[0-3]\nName=shard Count=16\n", setup.devices().display());
        setup.gres("gpu,shard", "gpu:4,shard:16", &conf)
    };
    let start = |setup: Setup, host: &gpush_tests::host::Host| held_prolog(gres(setup), host);
    let Some(site) = Site::start(HOST, super::TIMESLICE, |setup, host, _| start(setup, host)) else { return };
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
    let_go(&site);
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

/// On one host, users of `gpushctl run` and jobs use different GPUs.
#[test]
fn users_of_run_and_jobs_have_different_gpus() {
    let config = "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n\
                  [[gpu]]\nmatch = [\"2-3\"]\nmode = \"exclusive\"\n";
    let gres = |setup: Setup| {
        let conf = format!("Name=gpu File={}/nvidia[0-1]\n", setup.devices().display());
        setup.gres("gpu", "gpu:2", &conf)
    };
    let Some(site) = Site::start(HOST, config, |setup, _, _| gres(setup)) else { return };
    let ready: PathBuf = site.cluster.dir().join("out/run-ready");
    let mut run = site.host.command(gpush_tests::host::program("gpushctl"));
    run.arg("--socket").arg(site.agent.socket()).args(["run", "--whole", "--", "sh", "-c"]);
    run.arg(format!("echo $CUDA_VISIBLE_DEVICES > '{0}.new'; mv '{0}.new' '{0}'; read end", ready.display()));
    let mut run = run.stdin(Stdio::piped()).spawn().expect("gpushctl can be started");
    site.cluster.until("program with a lease", || ready.exists().then_some(()));
    let of_run = fs::read_to_string(&ready).expect("devices");
    let ended = site.cluster.run_job(ALICE, &["--gres=gpu:2"], "env");
    let of_job = ended.variable("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let gpus = site.agent.gpus();
    assert_eq!(of_job, format!("{},{}", gpus[0].uuid, gpus[1].uuid), "{}", ended.output);
    assert!(gpus[2].uuid == of_run.trim() || gpus[3].uuid == of_run.trim(), "{of_run}");
    drop(run.stdin.take());
    run.wait().expect("the program ends");
    site.agent.await_that("no lease", || site.leases().is_empty());
    site.assert_clean();
}

/// Between Prolog and the first task, the job has no process. The lease must stay active, even if
/// gpushd restarts.
#[test]
fn lease_lasts_for_30_s_without_a_process_of_the_job() {
    let Some(mut site) = Site::start(HOST, WHOLE, |setup, _, _| setup) else { return };
    let go = site.cluster.dir().join("go");
    let task = format!("while [ ! -e '{}' ]; do sleep 0.2; done; exec srun env", go.display());
    let mut salloc = site.cluster.command_of(ALICE, "salloc");
    // salloc runs its command on the submit host. So the allocation has no process on the node.
    let salloc = salloc.args(["--gres=gpu:1", "sh", "-c", &task]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let salloc = salloc.expect("salloc can be started");
    site.cluster.until("a lease", || (site.leases().len() == 1).then_some(()));
    let before = site.leases();
    site.restart_agent(|_| ());
    let begun = Instant::now();
    // gpushd looks for processes of leases again and again. So the test must wait for the full
    // time.
    while begun.elapsed() < Duration::from_secs(30) {
        assert_eq!(site.leases(), before, "after {:?}", begun.elapsed());
        std::thread::sleep(Duration::from_millis(500));
    }
    fs::write(&go, "").expect("a file");
    let output = salloc.wait_with_output().expect("salloc ends");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains(&format!("GPUSH_LEASE={}\n", before[0].id)), "{output:?}");
    site.cluster.wait_until_idle();
    site.assert_clean();
}
