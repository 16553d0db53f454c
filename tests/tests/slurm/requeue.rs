//! A requeued job, and a late Epilog of its earlier run.

use std::fs;

use gpush_api::LeaseBinding;
use gpush_tests::{
    host::Host,
    slurm::{ALICE, JobId, Setup, Site, script},
};
use nix::sys::signal::Signal;

use super::{HOST, WHOLE, completed, wait_for_output};

/// A script of a site. The first Epilog writes a file when it begins, and waits while the file `hold` exists. Then it
/// runs gpushctl, and writes the exit status to `status`.
fn held_first_epilog(setup: Setup, host: &Host) -> Setup {
    let dir = setup.dir().display().to_string();
    fs::write(setup.dir().join("hold"), "").expect("a file");
    let hook = script(host, setup.dir(), "epilog");
    let waiting = hook.replace("exec ", "");
    let body = format!(
        "export PATH=/usr/bin:/bin\n\
         mkdir '{dir}/first' 2>/dev/null || {hook}\
         echo \"$SLURM_JOB_RESTART_COUNT\" > '{dir}/count.new'; mv '{dir}/count.new' '{dir}/count'\n\
         while [ -e '{dir}/hold' ]; do sleep 0.05; done\n\
         {waiting}\
         echo $? > '{dir}/status.new'; mv '{dir}/status.new' '{dir}/status'\n"
    );
    setup.hook("Epilog", &body)
}

/// Lets Slurm start a requeued job again.
fn release(site: &Site, job: JobId) {
    let cluster = &site.cluster;
    cluster.until("requeued job", || {
        let is = |field, value: &str| cluster.job_field(job, field).as_deref() == Some(value);
        (is("JobState", "PENDING") && is("Restarts", "1")).then_some(())
    });
    // slurmd refuses a run if the credential of this run was created in the second in which the previous run ended. So
    // wait for a later second.
    let ended = jiff::Timestamp::now().as_second();
    cluster.until("another second", || (jiff::Timestamp::now().as_second() > ended + 1).then_some(()));
    cluster.run("scontrol", &["release", &job.to_string()]);
    // Slurm delays the start of a requeued job by two minutes.
    cluster.run("scontrol", &["update", &format!("jobid={job}"), "StartTime=now"]);
}

/// Slurm 22.05 gives the Epilog of a requeued run the restart count of the next run. If a script delays this Epilog and
/// slurmd restarts, Slurm can start the next run before the Epilog ends. Fault: the Epilog then ended the lease of the
/// next run.
#[test]
fn delayed_epilog_of_a_requeued_job_spares_its_next_run() {
    let Some(mut site) = Site::start(HOST, WHOLE, |setup, host, _| held_first_epilog(setup, host)) else { return };
    let [go, hold, count, status] = ["go", "hold", "count", "status"].map(|name| site.cluster.dir().join(name));
    let run =
        format!("echo run $SLURM_RESTART_COUNT $GPUSH_LEASE; while [ ! -e '{}' ]; do sleep 0.1; done", go.display());
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1", "--requeue", "--open-mode=append"], &run);
    site.cluster.until("first run", || site.cluster.output_of(job).contains("run").then_some(()));
    site.cluster.run("scontrol", &["requeuehold", &job.to_string()]);
    site.cluster.until("Epilog", || count.exists().then_some(()));
    site.cluster.signal_node(0, Signal::SIGKILL);
    // After this command, Slurm does not wait for the end of the first run. The node is up again when slurmd registers
    // (ReturnToService=2).
    site.cluster.run("scontrol", &["update", "nodename=n1", "state=down", "reason=test"]);
    site.cluster.restart_node(0);
    release(&site, job);
    wait_for_output(&site, job, "run 1");
    let second = site.leases();
    assert!(matches!(second[..], [ref lease] if matches!(lease.binding, LeaseBinding::Job { restart: 1, .. })));
    fs::remove_file(hold).expect("the file exists");
    site.cluster.until("the end of the first Epilog", || status.exists().then_some(()));
    let read = |path| fs::read_to_string(path).expect("a file");
    assert_eq!(
        (read(&count).as_str(), read(&status).as_str()),
        ("1\n", "0\n"),
        "Slurm gives it the count of the next run"
    );
    assert_eq!(site.leases(), second, "{}", site.cluster.logs());
    assert_eq!(site.cluster.job_state(job).as_deref(), Some("RUNNING"));
    fs::write(&go, "").expect("a file");
    completed(site.cluster.ended(job));
    site.assert_clean();
}
