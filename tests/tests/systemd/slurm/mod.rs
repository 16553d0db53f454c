//! Slurm 24.11 as services of Debian 13, with the package of gpush. The tests run the commands of docs/slurm.md.

mod cgroup_v2;

use std::net::{Ipv4Addr, TcpListener};

use gpush_tests::{
    machine::{Debian, Machine},
    page::{blocks, document},
};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 4\n";

/// The config of Slurm that the page assumes, for one node. `Gres=` and the hooks come from the page.
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

/// Creates the device nodes of the driver. There are no devices behind them.
const DEVICE_NODES: &str = "for n in 0 1 2 3; do mknod -m 666 /dev/nvidia$n c 195 $n || exit; done; mkdir /dev/nvidia-caps
                            for n in $(seq 3 137); do mknod -m 444 /dev/nvidia-caps/nvidia-cap$n c 240 $n || exit; done";

/// Returns a shell command that runs `line` as a user.
fn as_user(line: &str) -> String {
    format!("cd /tmp && timeout 120 setpriv --reuid=65534 --regid=65534 --clear-groups sh -c '{line}'")
}

/// Runs a command of a user, which must fail. Returns its output.
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

/// Writes cgroup.conf with the lines of docs/slurm.md. Returns whether Slurm can use cgroups. In a container, mounts
/// controllers of cgroup v1, because Slurm's plugin for cgroup v2 lacks controllers on a host with cgroup v1.
fn writes_cgroup_conf(machine: &Machine, constrain: &str) -> bool {
    let lines = constrain.lines().filter(|line| is_of_cgroup_conf(line));
    let lines = lines.fold(String::new(), |text, line| text + line + "\n");
    if machine.is_vm() {
        machine.write("/etc/slurm/cgroup.conf", lines);
        return true;
    }
    let mount = |name: &str| {
        let at = format!("/srv/cgroup/{name}");
        machine.run(&format!("mkdir -p {at} && mount -t cgroup -o {name} none {at}")).status.success()
    };
    let has_cgroups = mount("freezer") && mount("devices");
    let text = if has_cgroups {
        format!("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/srv/cgroup\n{lines}")
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

/// Machines share the network of the host. Returns ports that are free on it at present.
fn free_ports() -> [u16; 2] {
    // Bind both ports at the same time, so that they are different.
    let listeners = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port"));
    listeners.map(|listener| listener.local_addr().expect("an address").port())
}

/// The commands and settings of the first steps in the page.
struct Steps {
    config: String,
    reload: String,
    gres_conf: String,
    run: String,
    hooks: String,
    constrain: String,
    unit: String,
}

impl Steps {
    fn of_page() -> Self {
        // The page indents the blocks of its numbered steps.
        let page = document("slurm.md");
        let page: String =
            page.lines().map(|line| line.strip_prefix("   ").unwrap_or(line).to_owned() + "\n").collect();
        let [reload, gres_conf, run, ..] = &blocks(&page, "sh")[..] else { panic!("the page has other commands") };
        let [config] = &blocks(&page, "toml")[..] else { panic!("the page has another config") };
        let [hooks, constrain] = &blocks(&page, "")[..] else { panic!("the page has other lines of slurm.conf") };
        let [unit] = &blocks(&page, "ini")[..] else { panic!("the page has another unit") };
        Self {
            config: config.clone(),
            reload: reload.clone(),
            gres_conf: gres_conf.clone(),
            run: run.clone(),
            hooks: hooks.clone(),
            constrain: constrain.clone(),
            unit: unit.clone(),
        }
    }

    /// Boots a machine with gpush and with Slurm on one node, as the page says. `change` changes gres.conf. Returns the
    /// machine, and whether Slurm uses cgroups. If this host cannot run such a machine, prints that the test is
    /// skipped, and returns `None`.
    fn follow(&self, what: &str, host: &str, change: impl FnOnce(String) -> String) -> Option<(Machine, bool)> {
        let machine = Machine::boot_with_slurm(what)?;
        machine.install_package(None)?;
        self.follow_in(machine, what, host, change)
    }

    /// Does the same as [`Steps::follow`] in a machine with gpush.
    fn follow_in(
        &self,
        machine: Machine,
        what: &str,
        host: &str,
        change: impl FnOnce(String) -> String,
    ) -> Option<(Machine, bool)> {
        if !machine.run(DEVICE_NODES).status.success() {
            println!("SKIPPED {what}: the machine permits no device files");
            return None;
        }
        machine.sh("hostname n1 && echo '127.0.0.1 n1' >> /etc/hosts");
        machine.simulated_host(host);
        machine.sh("systemctl restart gpushd.service");
        machine.write("/etc/gpush/config.toml", &self.config);
        machine.sh(&self.reload);
        machine.sh("gpushctl apply");
        // The page tells the reader to copy these lines.
        let lines = machine.sh(&self.gres_conf);
        let of_slurm_conf = of_slurm_conf(&lines);
        machine.write("/etc/slurm/gres.conf", change(lines.clone()));
        let has_cgroups = writes_cgroup_conf(&machine, &self.constrain);
        let [controller, node] = free_ports();
        let mut slurm_conf = format!(
            "{SLURM_CONF}SlurmctldPort={controller}\nSlurmdPort={node}\n{}NodeName=n1 CPUs=2 RealMemory=100 {of_slurm_conf}\n\
             PartitionName=gpu Nodes=n1 Default=YES State=UP\n",
            self.hooks
        );
        if has_cgroups {
            slurm_conf += &self
                .constrain
                .lines()
                .filter(|line| !is_of_cgroup_conf(line))
                .fold(String::new(), |text, line| text + line + "\n");
        } else {
            // Contain needs proctrack/cgroup.
            slurm_conf = slurm_conf.replace("PrologFlags=Alloc,Contain", "PrologFlags=Alloc");
            slurm_conf += "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n";
        }
        machine.write("/etc/slurm/slurm.conf", slurm_conf);
        machine.write("/etc/systemd/system/slurmd.service.d/override.conf", &self.unit);
        machine.sh("install -d -o slurm -g slurm /var/spool/slurmctld /var/spool/slurmd /var/log/slurm");
        machine.sh("systemctl daemon-reload && systemctl restart munge slurmctld slurmd");
        machine.await_that("an idle node", |machine| machine.sh("sinfo -h -o %T") == "idle");
        Some((machine, has_cgroups))
    }
}

/// Returns the `Gres=` in the printed line for slurm.conf.
fn of_slurm_conf(lines: &str) -> &str {
    lines.lines().find_map(|line| line.strip_prefix("# NodeName=n1 ")).expect("the line of the node")
}

#[test]
fn page_for_administrators_works_with_slurm_24_11() {
    let steps = Steps::of_page();
    let followed = steps.follow("Slurm 24.11 on Debian 13", HOST, |lines| lines);
    let Some((machine, has_cgroups)) = followed else { return };
    assert!(machine.sh("scontrol --version").contains("24.11"), "{}", machine.sh("scontrol --version"));

    // On a host without cgroups, Slurm cannot use ConstrainDevices, and the doctor would report that.
    let commands: Vec<&str> = steps.run.lines().filter(|line| !line.contains("doctor")).collect();
    let [srun, list] = commands[..] else { panic!("{commands:?}") };
    let doctor = machine.run("gpushctl doctor --only slurm");
    let found = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(found.contains("ConstrainDevices") != has_cgroups && !found.contains("PrologFlags"), "{found}");
    let accepted = machine.sh(&as_user(&srun.replace('\'', "\"")));
    assert!(accepted.contains("GPUSH_LEASE=L") && accepted.contains("CUDA_VISIBLE_DEVICES=GPU-"), "{accepted}");
    machine.sh(list);
    if has_cgroups {
        // No device is behind the device files. So opening a permitted file gives another error than opening a denied
        // file.
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

    // gpushd is killed while a job runs, and systemd starts it again.
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

    unused_task_of_an_array_is_cancelled_alone(&machine);

    // slurmd is killed before the Epilog of the job runs. The `ExecStartPost=` that docs/slurm.md adds to slurmd's unit
    // ends the lease.
    machine.sh(&as_user("sbatch --gres=gpu:1 --no-requeue --output=/tmp/last --wrap=\"env; sleep 600\""));
    machine.await_that("a job with a lease", |machine| machine.run("grep -q GPUSH_LEASE /tmp/last").status.success());
    assert_eq!(leases(&machine), 1);
    assert_eq!(machine.sh("sinfo -h -R"), "", "{}", machine.sh("cat /var/log/slurm/slurmd.log"));
    machine.sh("systemctl kill --signal=KILL --kill-whom=all slurmd && scancel --full --user=nobody");
    machine.sh("scontrol update nodename=n1 state=down reason=test && systemctl restart slurmd");
    machine.await_that("no lease after the restart of slurmd", |machine| leases(machine) == 0);

    // slurmd is not an ancestor of this Prolog. Nevertheless, Prolog detects that slurmd has no NVML, and uses the
    // lines of gres.conf. Their order differs from the order of NVML.
    if has_cgroups {
        machine.sh("sed -i 's/^PrologFlags=.*/PrologFlags=RunInJob/' /etc/slurm/slurm.conf");
        let lines: String = (0..4).rev().map(|minor| format!("Name=gpu Type=l4 File=/dev/nvidia{minor}\n")).collect();
        machine.write("/etc/slurm/gres.conf", format!("AutoDetect=nvml\n{lines}"));
        machine.sh("systemctl restart slurmctld slurmd");
        machine.await_that("an idle node", |machine| machine.sh("sinfo -h -o %T") == "idle");
        assert!(machine.sh("scontrol show config").contains("RunInJob"));
        let accepted = machine.sh(&as_user("srun --gres=gpu:1 env"));
        let last = machine.sh("gpushctl gpu list 3 -o uuid");
        assert!(accepted.contains(&format!("CUDA_VISIBLE_DEVICES={last}")), "{accepted}");
    }
}

/// The last task of an array has the number of the array, and `scancel` with this number ends all tasks.
fn unused_task_of_an_array_is_cancelled_alone(machine: &Machine) {
    const IDLE: &str = "[idle]\naction = \"end\"\nslurm_jobs = \"scancel\"\nstart_grace = \"0s\"\nempty_after = \"10s\"\n\
                        warn_before = \"5s\"\n";
    let config = machine.sh("cat /etc/gpush/config.toml");
    let array = machine
        .sh(&as_user("sbatch --parsable --array=1-2 --mem=10 --gres=gpu:1 --output=/dev/null --wrap=\"sleep 600\""));
    machine.await_that("two jobs with leases", |machine| leases(machine) == 2);
    let list = machine.sh("gpushctl lease list --json");
    let list: serde_json::Value = serde_json::from_str(&list).expect("JSON");
    let others = list.as_array().into_iter().flatten();
    let mut others = others.filter(|lease| lease["binding"]["job"].as_u64() != array.parse().ok());
    let (Some(other), None) = (others.next(), others.next()) else { panic!("{array}: {list}") };
    let (id, job) = (other["id"].as_str().expect("an id"), other["binding"]["job"].to_string());
    machine.write("/etc/gpush/config.toml", format!("{config}\n{IDLE}"));
    machine.sh(&format!("gpushctl config reload && gpushctl lease keep {id} --for 1h --reason test"));
    machine.await_that("the end of one task", |machine| machine.sh("squeue -h --array -o %A") == job);
    let ended = machine.sh(&format!("scontrol --oneliner show job {array}_2"));
    assert!(ended.contains("JobState=CANCELLED") && ended.contains("AdminComment=gpush: lease "), "{ended}");
    assert_eq!(machine.sh("gpushctl lease list -o name"), id);
    machine.write("/etc/gpush/config.toml", config);
    machine.sh(&format!("gpushctl config reload && scancel {job}"));
    machine.await_that("no lease of the array", |machine| leases(machine) == 0);
}

/// Follows the section "Change the MIG layout" of the page. Debian's slurmd has no NVML, so
/// gres.conf has `AutoDetect=off`.
#[test]
fn page_about_mig_layouts_works_with_slurm_24_11() {
    let page = document("slurm.md");
    let section = page.split("\n## ").find(|part| part.starts_with("Change the MIG layout")).expect("the section");
    let [change, resume] = &blocks(section, "sh")[..] else { panic!("the section has other commands") };
    assert!(section.contains("| 24.11 | `scontrol reconfigure` |"), "{section}");
    let without_nvml = |lines: String| lines.replace("AutoDetect=nvml", "AutoDetect=off");
    let mut steps = Steps::of_page();
    steps.config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"7g.80gb\"]\nowner = \"slurm\"\n\
                    [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n"
        .to_owned();
    let host = "[[gpu]]\nmodel = \"h100-80-sxm\"\n[[gpu]]\nmodel = \"l4\"\n";
    let followed = steps.follow("MIG layouts under Slurm 24.11 on Debian 13", host, without_nvml);
    let Some((machine, _)) = followed else { return };
    let job = |gres: &str| machine.sh(&as_user(&format!("srun --gres=gpu:{gres} env")));
    let value = |text: &str, key: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=').map(str::to_owned));
        found.unwrap_or_else(|| panic!("no {key}: {text}"))
    };
    let before = value(&job("7g.80gb:1"), "CUDA_VISIBLE_DEVICES");
    assert!(before.starts_with("MIG-"), "{before}");

    machine.sh(&change.replace("-g 0-3", "-g 0").replace("n1 0-3", "n1 0-1"));
    let lines = machine.sh("cat /etc/slurm/gres.conf");
    machine.write("/etc/slurm/gres.conf", without_nvml(lines.clone()));
    let gres = of_slurm_conf(&lines);
    machine.sh(&format!("sed -i 's/ Gres=.*/ {gres}/' /etc/slurm/slurm.conf && scontrol reconfigure"));
    machine.await_that("the new devices", |machine| {
        let node = machine.run("scontrol show node n1");
        let node = String::from_utf8_lossy(&node.stdout).into_owned();
        node.contains("2g.20gb:2") && node.contains("State=IDLE+DRAIN ")
    });
    machine.sh(resume);
    let text = job("2g.20gb:2");
    let devices = value(&text, "CUDA_VISIBLE_DEVICES");
    let now = machine.sh("gpushctl mig list 0 --profile 2g.20gb -o uuid");
    let (mut devices, mut now): (Vec<&str>, Vec<&str>) = (devices.split(',').collect(), now.lines().collect());
    devices.sort_unstable();
    now.sort_unstable();
    assert_eq!(devices, now, "{text}");
    assert!(value(&job("l4:1"), "CUDA_VISIBLE_DEVICES").starts_with("GPU-"));
    machine.await_that("no lease", |machine| leases(machine) == 0);
    assert_eq!(machine.sh("sinfo -h -R"), "", "{}", machine.sh("cat /var/log/slurm/slurmd.log"));
}

/// After a reboot, slurmd starts when the layouts are applied and the MPS daemons serve. Driver calls take as long as
/// on hardware.
#[test]
fn slurmd_registers_after_layouts_and_mps_of_a_reboot() {
    let what = "a reboot with Slurm 24.11";
    let Some(machine) = Machine::boot_lasting(what, Debian::Trixie) else { return };
    if machine.install_package(None).is_none() {
        return;
    }
    if !machine.run(DEVICE_NODES).status.success() {
        return println!("SKIPPED {what}: the machine permits no device files");
    }
    machine.simulated_host("latencies = true\n[[gpu]]\nmodel = \"a100-80\"\nmig = true\n[[gpu]]\nmodel = \"l4\"\n");
    machine.write(
        "/etc/gpush/config.toml",
        "[mps]\ncontrol = \"/var/lib/gpush-sim/bin/nvidia-cuda-mps-control\"\n\
             [[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"2g.20gb\"]\nowner = \"slurm\"\n\
             [[gpu]]\nmatch = [\"1\"]\nmode = \"mps\"\n",
    );
    machine.sh("systemctl restart gpushd.service && gpushctl ready --timeout 90s && gpushctl apply 0");
    let lines = machine.sh("gpushctl slurm gres-conf --node n1 0").replace("AutoDetect=nvml", "AutoDetect=off");
    machine.write("/etc/slurm/gres.conf", &lines);
    let [controller, node] = free_ports();
    machine.write(
        "/etc/slurm/slurm.conf",
        format!(
            "{SLURM_CONF}SlurmctldPort={controller}\nSlurmdPort={node}\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             NodeName=n1 CPUs=2 RealMemory=100 {}\nPartitionName=gpu Nodes=n1 Default=YES State=UP\n",
            of_slurm_conf(&lines)
        ),
    );
    machine.write("/etc/slurm/cgroup.conf", "CgroupPlugin=disabled\n");
    // This simulates what the firmware and the driver do at boot.
    machine.write(
        "/srv/boot.sh",
        format!("set -e\n{DEVICE_NODES}\nhostname n1\n/opt/built/gpush-sim reboot /var/lib/gpush-sim\n"),
    );
    machine.write(
        "/etc/systemd/system/hardware.service",
        "[Unit]\nBefore=gpushd.service gpushd.socket munge.service slurmctld.service slurmd.service\nDefaultDependencies=no\n\
         [Service]\nType=oneshot\nExecStart=sh /srv/boot.sh\n[Install]\nWantedBy=sysinit.target\n",
    );
    machine.write(
        "/etc/systemd/system/slurmd.service.d/found.conf",
        "[Service]\nExecStartPre=sh -c 'gpushctl mig apply --check -g 0 && gpushctl mps list > /srv/found'\n",
    );
    machine.sh("echo '127.0.0.1 n1' >> /etc/hosts; install -d -o slurm -g slurm /var/spool/slurmctld /var/spool/slurmd /var/log/slurm");
    machine.sh("systemctl daemon-reload && systemctl enable --quiet hardware munge slurmctld slurmd");

    let machine = machine.reboot();
    machine.await_that("an idle node", |machine| machine.run("sinfo -h -o %T").stdout == b"idle\n");
    let found = machine.sh("cat /srv/found");
    assert!(found.contains("ready"), "{found}");
    let at = |unit: &str, when: &str| machine.property(unit, when).parse::<u64>().expect("microseconds");
    let ready = at("gpush-ready.service", "ActiveEnterTimestampMonotonic");
    let registered = at("slurmd.service", "ExecMainStartTimestampMonotonic");
    assert!(ready > 0 && ready <= registered, "{ready} {registered}");
    let layout = machine.sh("gpushctl operation list");
    assert!(layout.contains("op-2"), "this boot applied the layout: {layout}");
    println!(
        "slurmd started {} ms after gpushd",
        (registered - at("gpushd.service", "ExecMainStartTimestampMonotonic")) / 1000
    );
}
