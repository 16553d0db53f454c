//! Slurm 24.11 as services of Debian 13, with the package of gpush, set up with the commands of
//! docs/slurm.md.

use gpush_tests::{
    machine::Machine,
    page::{blocks, document},
};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 4\n";

/// The Slurm config that the page assumes, for one node. `Gres=` and the hooks come from the page.
const SLURM_CONF: &str = "ClusterName=ci
SlurmctldHost=n1(127.0.0.1)
SlurmUser=slurm
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
GresTypes=gpu
";

/// Returns a shell command that runs `line` as a user.
fn as_user(line: &str) -> String {
    format!("cd /tmp && timeout 120 setpriv --reuid=65534 --regid=65534 --clear-groups sh -c '{line}'")
}

/// Runs a command of a user that must fail. Returns its output.
fn refused(machine: &Machine, line: &str) -> String {
    let output = machine.run(&format!("{} 2>&1", as_user(line)));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!output.status.success(), "{line}: {text}");
    text
}

/// Returns whether a line of the page belongs to cgroup.conf, not to slurm.conf.
fn is_of_cgroup_conf(line: &str) -> bool {
    line.contains("# cgroup.conf")
}

/// Writes cgroup.conf with the lines of the page. Returns whether Slurm can use cgroups. Slurm's
/// plugin for cgroup v2 needs controllers that a host with cgroup v1 does not offer there, so this
/// function mounts the controllers of cgroup v1.
fn writes_cgroup_conf(machine: &Machine, constrain: &str) -> bool {
    let mount = |name: &str| {
        let at = format!("/srv/cgroup/{name}");
        machine.run(&format!("mkdir -p {at} && mount -t cgroup -o {name} none {at}")).status.success()
    };
    let has_cgroups = mount("freezer") && mount("devices");
    let text = if has_cgroups {
        let lines = constrain.lines().filter(|line| is_of_cgroup_conf(line));
        lines.fold("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/srv/cgroup\n".to_owned(), |text, line| text + line + "\n")
    } else {
        println!(
            "SKIPPED proctrack/cgroup of Slurm: the freezer and devices controllers of cgroup v1 cannot be mounted"
        );
        "CgroupPlugin=disabled\n".to_owned()
    };
    machine.write("/etc/slurm/cgroup.conf", text);
    has_cgroups
}

fn leases(machine: &Machine) -> usize {
    machine.sh("gpushctl lease list -o name").lines().count()
}

#[test]
fn page_for_administrators_works_with_slurm_24_11() {
    // The page indents the blocks of its numbered steps.
    let page = document("slurm.md");
    let page: String = page.lines().map(|line| line.strip_prefix("   ").unwrap_or(line).to_owned() + "\n").collect();
    let [reload, gres_conf, run, ..] = &blocks(&page, "sh")[..] else { panic!("the page has other commands") };
    let [config] = &blocks(&page, "toml")[..] else { panic!("the page has another config") };
    let [hooks, constrain] = &blocks(&page, "")[..] else { panic!("the page has other lines of slurm.conf") };
    let [unit] = &blocks(&page, "ini")[..] else { panic!("the page has another unit") };

    let Some(machine) = Machine::boot_with_slurm("Slurm 24.11 on Debian 13") else { return };
    if machine.install_package(None).is_none() {
        return;
    }
    let nodes = machine
        .run("mknod -m 666 /dev/nvidia0 c 195 0 && for n in 1 2 3; do mknod -m 666 /dev/nvidia$n c 195 $n; done");
    if !nodes.status.success() {
        return println!("SKIPPED Slurm 24.11 on Debian 13: the machine permits no device files");
    }
    machine.sh("hostname n1 && echo '127.0.0.1 n1' >> /etc/hosts");
    machine.simulated_host(HOST);
    machine.sh("systemctl restart gpushd.service");
    machine.write("/etc/gpush/config.toml", config);
    machine.sh(reload);
    // The page instructs the administrator to copy these lines.
    let lines = machine.sh(gres_conf);
    let of_slurm_conf =
        lines.lines().find_map(|line| line.strip_prefix("# NodeName=n1 ")).expect("the line of the node");
    machine.write("/etc/slurm/gres.conf", &lines);
    let has_cgroups = writes_cgroup_conf(&machine, constrain);
    let mut slurm_conf = format!(
        "{SLURM_CONF}{hooks}NodeName=n1 CPUs=2 RealMemory=100 {of_slurm_conf}\n\
         PartitionName=gpu Nodes=n1 Default=YES State=UP\n"
    );
    if has_cgroups {
        slurm_conf += &constrain
            .lines()
            .filter(|line| !is_of_cgroup_conf(line))
            .fold(String::new(), |text, line| text + line + "\n");
    } else {
        // `Contain` needs proctrack/cgroup, which is not available here.
        slurm_conf = slurm_conf.replace("PrologFlags=Alloc,Contain", "PrologFlags=Alloc");
        slurm_conf += "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n";
    }
    machine.write("/etc/slurm/slurm.conf", slurm_conf);
    machine.write("/etc/systemd/system/slurmd.service.d/override.conf", unit);
    machine.sh("install -d -o slurm -g slurm /var/spool/slurmctld /var/spool/slurmd /var/log/slurm");
    machine.sh("systemctl daemon-reload && systemctl restart munge slurmctld slurmd");
    machine.await_that("an idle node", |machine| machine.sh("sinfo -h -o %T") == "idle");
    assert!(machine.sh("scontrol --version").contains("24.11"), "{}", machine.sh("scontrol --version"));

    // Run `doctor` separately below: on a host without cgroups, this Slurm has no ConstrainDevices,
    // which `doctor` reports.
    let commands: Vec<&str> = run.lines().filter(|line| !line.contains("doctor")).collect();
    let [srun, list] = commands[..] else { panic!("{commands:?}") };
    let doctor = machine.run("gpushctl doctor --only slurm");
    let found = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(found.contains("ConstrainDevices") != has_cgroups && !found.contains("PrologFlags"), "{found}");
    let accepted = machine.sh(&as_user(&srun.replace('\'', "\"")));
    assert!(accepted.contains("GPUSH_LEASE=L") && accepted.contains("CUDA_VISIBLE_DEVICES=GPU-"), "{accepted}");
    machine.sh(list);
    if has_cgroups {
        // The device files have no device behind them, so opening an allowed one gives another
        // error than opening a denied one.
        let open = "for n in 0 1; do cat /dev/nvidia$n 2>&1; done; true";
        let opened = machine.sh(&as_user(&format!("srun --gres=gpu:1 sh -c \"{}\"", open.replace('$', "\\$"))));
        let denied: Vec<&str> = opened.lines().filter(|line| line.contains("Operation not permitted")).collect();
        assert!(matches!(denied[..], [one] if one.contains("/dev/nvidia1")), "{opened}");
    }
    let reason = refused(&machine, "srun --gres=gpu:1 --comment=gpush:mps=250 true");
    assert!(reason.contains("gpush: ") && reason.contains("250"), "{reason}");
    let reason = refused(&machine, "srun --gres=gpu:1 --comment=gpush:mps=25 true");
    assert!(reason.contains("gpush: ") && reason.contains("whole"), "{reason}");
    machine.await_that("no lease", |machine| leases(machine) == 0);

    // gpushd is killed while a job runs. systemd starts gpushd again.
    machine.sh(&as_user(
        "sbatch --gres=gpu:2 --output=/tmp/out --wrap=\"env; while [ ! -e /tmp/go ]; do sleep 0.1; done\"",
    ));
    machine.await_that("a job with a lease", |machine| machine.run("grep -q GPUSH_LEASE /tmp/out").status.success());
    let lease = machine.sh("gpushctl lease list -o name");
    let killed = machine.main_pid("gpushd.service");
    machine.kill(killed);
    machine.await_that("another gpushd", |machine| {
        let pid = machine.property("gpushd.service", "MainPID");
        pid != "0" && pid != killed.to_string() && machine.run("gpushctl version").status.success()
    });
    assert_eq!(machine.sh("gpushctl lease list -o name"), lease);
    machine.sh("touch /tmp/go");
    machine.await_that("the end of the job", |machine| machine.sh("squeue -h").is_empty());
    machine.await_that("no lease of the job", |machine| leases(machine) == 0);

    // slurmd ends without running the job's Epilog. The lines that the page adds to the unit end
    // the lease.
    machine.sh(&as_user("sbatch --gres=gpu:1 --no-requeue --output=/tmp/last --wrap=\"env; sleep 600\""));
    machine.await_that("a job with a lease", |machine| machine.run("grep -q GPUSH_LEASE /tmp/last").status.success());
    assert_eq!(leases(&machine), 1);
    assert_eq!(machine.sh("sinfo -h -R"), "", "{}", machine.sh("cat /var/log/slurm/slurmd.log"));
    machine.sh("systemctl kill --signal=KILL --kill-whom=all slurmd && scancel --full --user=nobody");
    machine.sh("scontrol update nodename=n1 state=down reason=test && systemctl restart slurmd");
    machine.await_that("no lease after the restart of slurmd", |machine| leases(machine) == 0);
}
