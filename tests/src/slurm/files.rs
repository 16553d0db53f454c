//! The files of a cluster: slurm.conf, gres.conf, cgroup.conf.

use std::{
    fmt::Write as _,
    fs,
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use super::{Setup, munge::Munge};

/// Writes all files and creates the directories that the daemons need.
pub(super) fn write(setup: &Setup) {
    let dir = setup.dir();
    for name in ["state", "spool", "log", "run"] {
        fs::create_dir(dir.join(name)).expect("a directory");
    }
    // The directory for the output of jobs. Every user may write files there.
    let out = dir.join("out");
    fs::create_dir(&out).expect("a directory");
    fs::set_permissions(&out, fs::Permissions::from_mode(0o1777)).expect("a directory for all");
    put(dir, "slurm.conf", &slurm_conf(setup));
    put(dir, "gres.conf", &setup.gres_conf);
    put(dir, "cgroup.conf", "CgroupPlugin=cgroup/v1\n");
    if setup.gres_by_default {
        put(dir, "ci-nodes.conf", &format!("NodeName=DEFAULT Gres={} CPUs=160\n", setup.node_gres));
    }
}

fn put(dir: &Path, name: &str, text: &str) {
    fs::write(dir.join(name), text).expect("a file can be written");
}

/// Returns the name of this host without its domain. slurmctld compares this name with slurm.conf.
fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").expect("the host has a name");
    name.trim().split('.').next().unwrap_or_default().to_owned()
}

/// Returns ports that are free at present.
fn free_ports(count: u16) -> Vec<u16> {
    // Bind all ports at the same time, so that they are different.
    let listeners: Vec<_> =
        (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port")).collect();
    listeners.iter().map(|listener| listener.local_addr().expect("an address").port()).collect()
}

fn slurm_conf(setup: &Setup) -> String {
    let (dir, host) = (setup.dir().display(), host());
    let socket = Munge::socket(&setup.dir().join("munge"));
    let ports = free_ports(setup.nodes + 1);
    let mut text = format!(
        "ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/slurmd-%n.pid
SlurmctldLogFile={dir}/log/slurmctld
SlurmdLogFile={dir}/log/slurmd-%n
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MailProg=/bin/true
GresTypes={gres_types}
KillWait=5
PrologFlags=Alloc
JobRequeue=1
",
        socket = socket.display(),
        port = ports[0],
        gres_types = setup.gres_types,
    );
    let mut lines = setup.lines.clone();
    if !lines.iter().any(|line| line.starts_with("PrologEpilogTimeout")) {
        lines.push("PrologEpilogTimeout=60".to_owned());
    }
    for (key, path) in &setup.hooks {
        lines.push(format!("{key}={}", path.display()));
    }
    for line in lines {
        let _ = writeln!(text, "{line}");
    }
    let gres = if setup.gres_by_default {
        text += "Include %c-nodes.conf\n";
        String::new()
    } else {
        format!(" Gres={}", setup.node_gres)
    };
    for (number, port) in (1..).zip(&ports[1..]) {
        let _ = writeln!(
            text,
            "NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=160 Boards=1 SocketsPerBoard=1 \
             CoresPerSocket=160 ThreadsPerCore=1 RealMemory=1000{gres} State=UNKNOWN"
        );
    }
    let _ = writeln!(
        text,
        "PartitionName=gpu Nodes=n[1-{}] Default=YES MaxTime=60 State=UP OverSubscribe=YES",
        setup.nodes
    );
    text
}
