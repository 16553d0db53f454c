//! Tests of `proctrack/cgroup`. They run only if this host has the hierarchies of cgroup v1 that
//! Slurm needs.

use std::{
    fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use gpush_tests::slurm::{ALICE, JobId, Setup, Site};

use super::{HOST, WHOLE, completed, wait_for_output};

/// The cgroup hierarchy in which Slurm tracks processes.
const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// Makes Slurm track processes by cgroups, and gives each test different job ids. The path of a
/// job's cgroup does not contain the name of the cluster, so jobs with the same id would share a
/// cgroup.
fn tracked(setup: Setup) -> Setup {
    setup.line("ProctrackType=proctrack/cgroup").line(&format!("FirstJobId={}", std::process::id()))
}

/// Returns whether Slurm can create cgroups on this host. If not, prints that the test is skipped.
fn is_possible() -> bool {
    let probe = Path::new(FREEZER).join(format!("gpush-probe-{}", std::process::id()));
    let created = fs::create_dir(&probe).is_ok();
    let _absent = fs::remove_dir(&probe);
    if !created {
        println!("SKIPPED proctrack/cgroup of Slurm: no cgroup can be created in {FREEZER}");
    }
    created
}

/// Returns the cgroup that slurmstepd has created for a job.
fn cgroup_of(job: JobId) -> Option<PathBuf> {
    let slurm = fs::read_dir(FREEZER).ok()?.flatten().map(|entry| entry.path());
    let slurm = slurm.filter(|dir| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("slurm")));
    slurm.map(|dir| dir.join(format!("uid_{}/job_{job}", ALICE.uid))).find(|dir| dir.is_dir())
}

/// If a process is in the cgroup of the job, but in no step of the job, Slurm does not end it.
#[test]
fn process_that_slurm_leaves_in_the_cgroup_of_the_job_is_ended_by_epilog() {
    if !is_possible() {
        return;
    }
    let Some(site) = Site::start(HOST, WHOLE, |setup, _, _| tracked(setup)) else { return };
    let go = site.cluster.dir().join("go");
    let script = format!("echo begun; while [ ! -e '{}' ]; do sleep 0.1; done", go.display());
    let job = site.cluster.sbatch(ALICE, &["--gres=gpu:1"], &script);
    wait_for_output(&site, job, "begun");
    let cgroup = cgroup_of(job).unwrap_or_else(|| panic!("no cgroup of job {job}\n{}", site.cluster.logs()));
    let mut left = Command::new("/bin/sh");
    left.args(["-c", "trap '' TERM; while :; do sleep 1; done"]).uid(ALICE.uid).gid(ALICE.gid).current_dir("/");
    let mut left = left.spawn().expect("a program");
    fs::write(cgroup.join("cgroup.procs"), left.id().to_string()).expect("a process can be moved");
    let leases = site.leases();
    let [lease] = &leases[..] else { panic!("{leases:?}") };
    let gpu = site.agent.gpus().into_iter().find(|gpu| gpu.uuid == lease.members[0].target).expect("a GPU").index;
    let (gpu, pid) = (gpu.to_string(), left.id().to_string());
    site.host.sim("process", &["add", "--gpu", &gpu, "--kind", "compute", "--pid", &pid]);
    fs::write(&go, "").expect("a file");
    // Epilog ends the process. This test is the parent of the process, so the test must reap it.
    site.cluster.until("end of the process", || left.try_wait().ok().flatten());
    completed(site.cluster.ended(job));
    site.assert_clean();
    for dir in cgroup.ancestors().take(3) {
        let _in_use = fs::remove_dir(dir);
    }
}
