//! Slurm 24.11 on cgroup v2, in a virtual machine: Slurm chooses its plugin itself, and limits devices, memory and cores
//! of jobs.
//!
//! A boot takes longer than most steps, so the steps use one machine, in this order.

use std::time::Instant;

use gpush_tests::machine::Machine;

use super::{HOST, Steps, as_user, leases};

/// Lines of cgroup.conf in addition to those of the page.
const LIMITS: &str = "ConstrainRAMSpace=yes\nConstrainCores=yes\n";

/// A batch script whose last process ignores SIGTERM, and has left its session and its parent.
const LEFTOVER: &str = "#!/bin/sh
#SBATCH --gres=gpu:1 --output=/tmp/left.out
setsid sh -c 'sh -c \"trap : TERM; echo \\$\\$ > /tmp/left.pid; while :; do sleep 1; done\" & exit' >/dev/null 2>&1 </dev/null
while [ ! -e /tmp/left.go ]; do sleep 0.2; done
";

/// A rule for the GPUs that are not in gres.conf.
const FOR_USERS: &str = "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\nlease = \"enforced\"\n";

/// The scope of all jobs of the node.
const SCOPE: &str = "n1_slurmstepd.scope";

/// Boots the machine with Slurm on GPUs 2 and 3.
fn machine() -> Option<Machine> {
    let what = "Slurm 24.11 on cgroup v2";
    let machine = Machine::resume_vm(what)?;
    println!("resumed in {:.1} s", machine.boot.as_secs_f64());
    machine.install();
    let mut steps = Steps::of_page();
    steps.config = steps.config.replace("\"0-3\"", "\"2-3\"") + FOR_USERS;
    steps.gres_conf = steps.gres_conf.trim_end().to_owned() + " 2-3";
    steps.constrain = format!("{}{}", LIMITS.replace("yes", "yes # cgroup.conf"), steps.constrain);
    let (machine, _) = steps.follow_in(machine, what, HOST, |lines| lines)?;
    Some(machine)
}

/// Starts a batch job of a user that runs until it is cancelled or `/tmp/NAME.go` exists. Waits for its lease.
fn start_job(machine: &Machine, name: &str) {
    let wait = format!("echo \\$GPUSH_LEASE; while [ ! -e /tmp/{name}.go ]; do sleep 0.2; done");
    machine.sh(&as_user(&format!("sbatch --gres=gpu:1 --output=/tmp/{name}.out --wrap=\"{wait}\"")));
    machine.await_that("the job runs", |machine| machine.run(&format!("grep -q L /tmp/{name}.out")).status.success());
    assert_eq!(leases(machine), 1);
}

/// Waits until Slurm and gpushd have nothing left of the jobs, and the node is idle.
fn await_no_job(machine: &Machine) {
    machine.await_that("no job", |machine| machine.sh("squeue -h").is_empty());
    machine.await_that("no lease", |machine| leases(machine) == 0);
    machine.await_that("an idle node", |machine| machine.sh("sinfo -h -o %T") == "idle");
    assert_eq!(machine.sh("sinfo -h -R"), "", "{}", machine.sh("cat /var/log/slurm/slurmd.log"));
}

#[test]
fn jobs_on_cgroup_v2_have_leases_and_limits() {
    let begun = Instant::now();
    let Some(machine) = machine() else { return };
    let step = |name: &str| println!("{name}: {:.1} s", begun.elapsed().as_secs_f64());
    step("idle node");
    let doctor = machine.run("gpushctl doctor --only slurm");
    let found = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(!found.contains("ConstrainDevices") && !found.contains("PrologFlags"), "{found}");
    assert!(machine.sh("cat /proc/mounts").contains("/sys/fs/cgroup cgroup2"));
    job_is_limited_by_the_kernel(&machine);
    step("limits of a job");
    leftover_of_a_job_is_ended(&machine);
    step("leftover");
    start_job(&machine, "cancelled");
    machine.sh("scancel --full --user=nobody");
    await_no_job(&machine);
    step("scancel");
    daemons_restart_during_a_job(&machine);
    step("restarts");
    enforced_gpus_do_not_open_in_jobs(&machine);
    step("device access");
}

/// Returns what a job gets when it opens GPU 0, which is not Slurm's, and GPU 2, which is the job's.
fn opened_in_job(machine: &Machine) -> Vec<String> {
    machine.write("/tmp/open.sh", "for n in 0 2; do cat /dev/nvidia$n; done 2>&1; true");
    let found = machine.sh(&as_user("srun --gres=gpu:1 sh /tmp/open.sh"));
    await_no_job(machine);
    found.lines().filter_map(|line| line.rsplit(": ").next()).map(str::to_owned).collect()
}

/// Waits until systemd has a list of devices for the jobs.
fn await_limited_scope(machine: &Machine) {
    machine.await_that("the scope is limited", |machine| machine.property(SCOPE, "DeviceAllow").contains("char-511 "));
}

/// `ConstrainDevices` denies only GPUs of gres.conf. If the host enforces leases, gpushd denies the others.
fn enforced_gpus_do_not_open_in_jobs(machine: &Machine) {
    const NO_DEVICE: &str = "No such device or address";
    const DENIED: &str = "Operation not permitted";
    let plan = machine.sh("gpushctl enforce plan | tr -s '\\n ' ' '");
    assert!(plan.contains("jobs cannot open GPUs 0, 1"), "{plan}");
    machine.sh("gpushctl enforce on");
    assert_eq!(opened_in_job(machine), [DENIED, NO_DEVICE]);
    let status = machine.sh("gpushctl enforce status");
    assert!(status.lines().any(|line| line.starts_with(SCOPE) && line.ends_with("gpush")), "{status}");
    // A new scope, as after a boot.
    machine.sh(&format!("systemctl stop slurmd.service {SCOPE}; systemctl start slurmd.service"));
    await_limited_scope(machine);
    machine.await_that("an idle node", |machine| machine.sh("sinfo -h -o %T") == "idle");
    assert_eq!(opened_in_job(machine), [DENIED, NO_DEVICE]);
    // Another rule for the GPUs.
    machine.sh("sed -i '/^lease = /d' /etc/gpush/config.toml; gpushctl config reload");
    machine.await_that("the scope is open", |machine| machine.property(SCOPE, "DeviceAllow").is_empty());
    machine.sh("echo 'lease = \"enforced\"' >> /etc/gpush/config.toml; gpushctl config reload");
    await_limited_scope(machine);
    machine.sh("gpushctl enforce off");
    assert_eq!(opened_in_job(machine), [NO_DEVICE, NO_DEVICE]);
    // What the removal of the package runs.
    machine.sh("gpushctl enforce on");
    await_limited_scope(machine);
    machine.sh("systemctl stop gpushd.service gpushd.socket gpushd-admin.socket; sh -e /opt/gpush/packaging/scripts/open-gpus.sh");
    assert_eq!(machine.property(SCOPE, "DeviceAllow"), "");
}

fn job_is_limited_by_the_kernel(machine: &Machine) {
    let line = "cat /proc/self/cgroup; for n in 0 2 3; do cat /dev/nvidia$n; done 2>&1; gpushctl lease show $GPUSH_LEASE; \
                d=/sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup); \
                while [ $d != /sys/fs/cgroup ]; do cat $d/memory.max $d/cpuset.cpus; d=${d%/*}; done 2>&1";
    machine.write("/tmp/limited.sh", line);
    let found = machine.sh(&as_user("srun --gres=gpu:1 --mem=30M --cpus-per-task=1 sh /tmp/limited.sh"));
    assert!(found.contains("_slurmstepd.scope/job_1/step_0/"), "{found}");
    assert!(
        found.contains("/dev/nvidia2: No such device") && found.contains("/dev/nvidia3: Operation not permitted"),
        "{found}"
    );
    // Slurm denies only the GPUs of gres.conf.
    assert!(found.contains("/dev/nvidia0: No such device"), "{found}");
    assert!(found.contains(&(30 << 20).to_string()), "memory: {found}");
    assert!(found.lines().any(|line| matches!(line, "0" | "1")), "one core: {found}");
    assert!(found.contains("with job 1"), "the lease: {found}");
    await_no_job(machine);
}

fn leftover_of_a_job_is_ended(machine: &Machine) {
    machine.write("/tmp/left.sh", LEFTOVER);
    machine.sh(&as_user("sbatch /tmp/left.sh"));
    machine.await_that("the leftover runs", |machine| machine.run("test -s /tmp/left.pid").status.success());
    let pid = machine.sh("cat /tmp/left.pid");
    machine.sh(&format!("gpushctl lease list; grep -q slurmstepd.scope/job_2 /proc/{pid}/cgroup; touch /tmp/left.go"));
    await_no_job(machine);
    assert!(!machine.run(&format!("kill -0 {pid}")).status.success(), "pid {pid} still runs");
}

/// On cgroup v2, jobs are not in the cgroup of slurmd, so they outlive it.
fn daemons_restart_during_a_job(machine: &Machine) {
    start_job(machine, "restarts");
    let lease = machine.sh("gpushctl lease list -o name");
    machine.sh("systemctl kill --signal=KILL --kill-whom=all slurmd.service");
    machine.sh("systemctl restart slurmd.service gpushd.service");
    assert_eq!(machine.sh("gpushctl lease list -o name"), lease);
    machine.sh("touch /tmp/restarts.go");
    await_no_job(machine);
}
