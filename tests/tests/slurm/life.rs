//! Jobs with whole GPUs on one cluster: their tasks, their ends, and gpushd that is killed or stopped meanwhile.

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gpush_tests::slurm::{ALICE, BOB, JobId, Setup, Site};
use nix::sys::signal::Signal;

use super::{HOST, WHOLE, completed, refused};

/// Several times as long as gpushd waits between two checks of the processes of a lease.
const SEVERAL_CHECKS: Duration = Duration::from_secs(5);

fn config(deadline: &str) -> String {
    format!("[slurm]\nagent_down = \"pass\"\ndeadline = \"{deadline}\"\n{WHOLE}")
}

#[test]
fn lease_lasts_from_prolog_to_epilog_whatever_happens_to_gpushd() {
    let change = |setup: Setup| setup.line("PrologEpilogTimeout=50");
    let Some(mut site) = Site::start(HOST, &config("20s"), |setup, _, _| change(setup)) else { return };
    tasks_get_the_gpus_that_slurm_allocated(&site);
    environment_of_the_user_does_not_skip_a_refusal(&site);
    epilog_is_harmless_for_jobs_without_a_lease(&site);
    epilog_works_from_the_job_id_alone(&site);
    timed_out_job_leaves_no_lease(&site);
    allocation_without_a_process_keeps_its_lease(&mut site);
    jobs_run_while_gpushd_is_down(&mut site);
    prolog_ends_while_gpushd_is_stopped(&site);
}

fn tasks_get_the_gpus_that_slurm_allocated(site: &Site) {
    let ended = completed(site.cluster.run_job(ALICE, &["--gres=gpu:2"], "env"));
    let visible = format!("{},{}", site.agent.gpu(0).uuid, site.agent.gpu(1).uuid);
    assert_eq!(ended.variable("CUDA_VISIBLE_DEVICES"), Some(visible.as_str()), "{}", ended.output);
    assert!(ended.variable("GPUSH_LEASE").is_some_and(|lease| lease.starts_with('L')), "{}", ended.output);
    // A job without a GPU gets no lease.
    let ended = completed(site.cluster.run_job(BOB, &[], "env"));
    assert_eq!(ended.variable("GPUSH_LEASE"), None, "{}", ended.output);
    site.assert_clean();
}

/// Slurm passes the user's environment to the tasks.
fn environment_of_the_user_does_not_skip_a_refusal(site: &Site) {
    let arguments = ["--gres=gpu:1", "--export=ALL,SLURM_CLUSTER_NAME=nonsense,SLURMD_NODENAME=nonsense"];
    let script = "export SLURM_CLUSTER_NAME=nonsense SLURMD_NODENAME=nonsense\nsrun env";
    let ended = completed(site.cluster.run_job(ALICE, &arguments, script));
    assert!(ended.variable("GPUSH_LEASE").is_some(), "{}", ended.output);
    let [gres, export] = arguments;
    refused(&site.cluster.run_job(ALICE, &[gres, export, "--comment=gpush:mps=250"], "echo ran"), "250");
    site.assert_clean();
}

/// Returns a command that runs Epilog as slurmd does. `restart` is the restart count, if Slurm sets it.
fn epilog(site: &Site, job: JobId, restart: Option<u32>) -> Command {
    let mut command = Command::new(site.cluster.dir().join("epilog"));
    command.env_clear().stdin(Stdio::null());
    command.env("SLURM_JOB_ID", job.to_string()).env("SLURM_CLUSTER_NAME", "ci").env("SLURMD_NODENAME", "n1");
    if let Some(restart) = restart {
        command.env("SLURM_JOB_UID", ALICE.uid.to_string()).env("SLURM_JOB_RESTART_COUNT", restart.to_string());
    }
    command
}

fn epilog_is_harmless_for_jobs_without_a_lease(site: &Site) {
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1"], "true");
    completed(site.cluster.ended(job));
    for (job, restart) in [(job, 0), (job, 0), (job, 3), (JobId(4_000_000), 0)] {
        let again = epilog(site, job, Some(restart)).output().expect("Epilog can be started");
        assert!(again.status.success() && again.stdout.is_empty() && again.stderr.is_empty(), "{job}: {again:?}");
    }
    site.assert_clean();
}

/// If a job runs, its Epilog needs nothing but the job id: no GPU variables and no user.
fn epilog_works_from_the_job_id_alone(site: &Site) {
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1"], "sleep 600");
    site.cluster.until("a lease", || (!site.leases().is_empty()).then_some(()));
    let output = epilog(site, job, None).output().expect("Epilog can be started");
    assert!(output.status.success(), "{output:?}");
    site.agent.await_that("no lease", || site.leases().is_empty());
    site.cluster.run("scancel", &[&job.to_string()]);
    assert_eq!(site.cluster.ended(job).state, "CANCELLED");
    site.assert_clean();
}

fn timed_out_job_leaves_no_lease(site: &Site) {
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1", "--time=1"], "sleep 600");
    site.cluster.until("a lease", || (!site.leases().is_empty()).then_some(()));
    // The shortest time limit of Slurm is one minute. So set the end of the job to now.
    site.cluster.run("scontrol", &["update", &format!("jobid={job}"), "EndTime=now"]);
    assert_eq!(site.cluster.ended(job).state, "TIMEOUT");
    site.assert_clean();
}

/// Between Prolog and the first task, the job has no process. The lease must stay active, even if gpushd restarts.
fn allocation_without_a_process_keeps_its_lease(site: &mut Site) {
    let go = site.cluster.dir().join("go-on");
    let task = format!("while [ ! -e '{}' ]; do sleep 0.2; done; exec srun env", go.display());
    let mut salloc = site.cluster.command_of(ALICE, "salloc");
    // salloc runs its command on the submit host. So the allocation has no process on the node.
    let salloc = salloc.args(["--gres=gpu:1", "sh", "-c", &task]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let salloc = salloc.expect("salloc can be started");
    site.cluster.until("a lease", || (site.leases().len() == 1).then_some(()));
    let before = site.leases();
    site.restart_agent(|_| ());
    let begun = Instant::now();
    // No event reports a check that ends nothing, so the test must wait.
    while begun.elapsed() < SEVERAL_CHECKS {
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

/// TaskProlog does not need gpushd. If Epilog cannot report the end of a job to gpushd, the next hook must report it.
fn jobs_run_while_gpushd_is_down(site: &mut Site) {
    let go = site.cluster.dir().join("go");
    let script = format!(
        "echo \"$GPUSH_LEASE\"; while [ ! -e '{}' ]; do sleep 0.1; done; srun -n 8 sh -c 'echo task $GPUSH_LEASE'",
        go.display()
    );
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1", "-n8"], &script);
    site.cluster.until("running job", || site.cluster.output_of(job).starts_with('L').then_some(()));
    let leases = site.leases();
    let tasks = format!("task {}\n", leases[0].id);
    site.restart_agent(|site| {
        fs::write(&go, "").expect("a file");
        let ended = completed(site.cluster.ended(job));
        assert_eq!(ended.output.matches(&tasks).count(), 8, "{}", ended.output);
        completed(site.cluster.run_job(BOB, &[], "true"));
        let requested = completed(site.cluster.run_job(BOB, &["--comment=mps"], "true"));
        assert!(requested.output.contains("gpush: "), "{}", requested.output);
        let ended = completed(site.cluster.run_job(ALICE, &["--gres=gpu:1"], "env"));
        assert_eq!(ended.variable("GPUSH_LEASE"), None, "{}", ended.output);
        assert!(ended.output.contains("gpush: "), "{}", ended.output);
    });
    assert_eq!(site.leases(), leases, "the lease survives gpushd, and its end is not reported yet");
    completed(site.cluster.run_job(BOB, &["--gres=gpu:4"], "true"));
    site.assert_clean();
}

/// gpushd is stopped by SIGSTOP: the kernel accepts connections for it, but gpushd does not answer. Prolog must end within
/// its own deadline.
fn prolog_ends_while_gpushd_is_stopped(site: &Site) {
    site.agent.write_config(config("3s"));
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
