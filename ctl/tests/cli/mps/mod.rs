//! Tests of `gpushctl mps` and `process` with a program that answers instead of gpushd: requests, output and exit
//! statuses.

mod life;
mod looks;

use std::{
    io::{BufRead, BufReader, Read},
    process::Stdio,
    sync::atomic::{AtomicUsize, Ordering},
};

use gpush_api::{
    ApiError, Code, Gpu, GpuIndex, GpuProcess, GpuProcesses, Health, HealthStatus, Lease, Mode, MpsClient, MpsDaemon,
    MpsLog, MpsLogs, MpsPolicy, MpsServer, MpsServerState, MpsSetResponse, MpsSettings, MpsState, Process, ProcessKind,
    UnknownProcesses, UnleasedPolicy, UnleasedStep, Version,
};
use insta::assert_snapshot;

use crate::support::{Agent, Answer, Host, Request};

/// Returns a time in the future, so that the output always shows an age of 0.
fn at(second: i64) -> jiff::Timestamp {
    let start: jiff::Timestamp = "2999-01-01T00:00:00Z".parse().unwrap();
    start.checked_add(jiff::SignedDuration::from_secs(second)).unwrap()
}

fn lease() -> Lease {
    let share = serde_json::json!({"kind": "mps", "percentage": 25});
    let gpu = "GPU-00000000-0000-0000-0000-000000000000";
    serde_json::from_value(serde_json::json!({
        "id": "L12", "holder": {"uid": 1000, "user": "alice"}, "kind": "mps", "enforcement": "mps_ceiling",
        "state": "active", "binding": {"kind": "process", "pid": 4055}, "created_at": at(0), "granted_at": at(0),
        "members": [{"target": gpu, "gpu_uuid": gpu, "granted_share": share, "memory_mib": 81920, "gpu_memory_mib": 81920}],
    }))
    .unwrap()
}

fn client(pid: u32) -> MpsClient {
    MpsClient {
        pid: Some(pid),
        server: Some(4107),
        uid: Some(1000),
        user: Some("alice".into()),
        command: Some("python train.py".into()),
        lease: Some("L12".into()),
        unattributed: false,
        unidentified: false,
    }
}

fn daemon(state: MpsState, second: i64, clients: &[MpsClient]) -> MpsDaemon {
    let server =
        MpsServer { pid: Some(4107), uid: Some(1000), user: Some("alice".into()), state: Some(MpsServerState::Active) };
    let runs = !matches!(state, MpsState::Stopped | MpsState::GivenUp | MpsState::BackingOff);
    MpsDaemon {
        target: "g5d1b03a2".into(),
        uuid: "GPU-00000000-0000-0000-0000-000000000000".into(),
        gpu: Some(GpuIndex(0)),
        device: None,
        state,
        reasons: Vec::new(),
        findings: Vec::new(),
        wanted: MpsPolicy::default(),
        rule: None,
        in_force: runs.then(MpsSettings::default),
        pid: runs.then_some(4100 + u32::try_from(second).unwrap()),
        since: at(second),
        next_start_at: None,
        clients_end_at: None,
        failures: 0,
        ends: None,
        protocol: Some("version 550.163.01, directly".into()),
        pipe_directory: Some("/run/gpush-mps/g5d1b03a2".into()),
        log_directory: Some("/var/log/gpush/mps/g5d1b03a2".into()),
        uid: (!clients.is_empty()).then_some(1000),
        user: (!clients.is_empty()).then(|| "alice".into()),
        servers: if clients.is_empty() { Vec::new() } else { vec![server] },
        clients: clients.to_vec(),
        clients_known: true,
        leases: if clients.is_empty() { Vec::new() } else { vec![lease()] },
        granted_percent: if clients.is_empty() { 0 } else { 25 },
        stays_stopped: false,
    }
}

fn busy() -> MpsDaemon {
    let stranger = MpsClient {
        pid: None,
        server: None,
        uid: None,
        user: None,
        command: None,
        lease: None,
        unattributed: false,
        unidentified: false,
    };
    daemon(MpsState::Ready, 0, &[client(5120), stranger])
}

fn idle_device() -> MpsDaemon {
    MpsDaemon {
        target: "m00000001".into(),
        uuid: "MIG-00000001-aaaa-5bbb-8ccc-0123456789ab".into(),
        gpu: Some(GpuIndex(1)),
        device: Some("2g.20gb@2".into()),
        findings: vec!["pid 7001 of mallory computes without a lease".into()],
        ..daemon(MpsState::Ready, 1, &[])
    }
}

fn processes(with_unleased: bool) -> GpuProcesses {
    let one = |pid: u32, user: &str, command: &str| GpuProcess {
        gpu: GpuIndex(0),
        gpu_uuid: "GPU-00000000-0000-0000-0000-000000000000".into(),
        device: None,
        process: Process {
            pid: Some(pid),
            uid: Some(1000),
            user: Some(user.into()),
            command: Some(command.into()),
            kind: ProcessKind::MpsClient,
            memory_mib: Some(2048),
            unidentified: false,
        },
        account: None,
        cgroup: None,
        unit: Some("session-4.scope".into()),
        slurm_job: None,
        serves: None,
        lease: None,
        unattributed: false,
        allowed: false,
        unleased: None,
        unleased_step: None,
        unleased_action: None,
    };
    let owner = GpuProcess { lease: Some("L12".into()), ..one(5120, "alice", "python train.py") };
    let mut unleased = one(7001, "mallory", "./miner");
    unleased.process.kind = ProcessKind::Compute;
    unleased.unleased = Some("its user has no lease on GPU 0".into());
    unleased.unleased_step = Some(UnleasedStep::Warned);
    unleased.unleased_action = Some("warning in the log".into());
    let mut all = GpuProcesses { policy: UnleasedPolicy::Warn, processes: vec![owner], unknown: Vec::new() };
    if with_unleased {
        all.processes.push(unleased);
    }
    all
}

fn gpus(mode: Mode) -> Vec<Gpu> {
    let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
    gpus.truncate(2);
    gpus[0].mig = None;
    gpus[0].mode = mode;
    gpus[0].rule = Some("shared".into());
    gpus
}

fn not_shared(target: &str) -> Answer {
    let error = ApiError::new(Code::NotFound, format!("{target} is not shared through MPS"));
    Answer::error(&error.hint("`gpushctl mps list` shows what is"))
}

/// Starts an agent for tests. It has two MPS targets: a GPU with two clients, and an idle MIG device.
fn agent(host: &Host) -> Agent {
    Agent::listen(&host.path("gpushd.sock"), |request| match (request.method.as_str(), request.path.as_str()) {
        (_, "/v1/mps") => Answer::ok(&[busy(), idle_device()]),
        (_, "/v1/mps/0" | "/v1/mps/g5d1b03a2") => Answer::ok(&busy()),
        (_, "/v1/mps/1:2g.20gb%402") => Answer::ok(&idle_device()),
        (_, "/v1/mps/0/settings") => {
            let reaches = vec!["pid 5120 of alice keeps 100 %: the next clients of its server get 50 %".into()];
            let mut daemon = busy();
            daemon.in_force = Some(MpsSettings { percentage: "50".parse().unwrap(), ..MpsSettings::default() });
            Answer::ok(&MpsSetResponse { daemon, reaches })
        }
        (_, path) if path.starts_with("/v1/mps/0/logs?lines=") => {
            let lines = vec!["[04:00:00.001 Control  4100] Start".into(), "[04:00:01.002 Control  4100] ok".into()];
            Answer::ok(&MpsLogs {
                files: vec![MpsLog {
                    path: "/var/log/gpush/mps/g5d1b03a2/control.log".into(),
                    lines,
                    left_out: 0,
                    error: None,
                }],
            })
        }
        (_, "/v1/processes") => Answer::ok(&processes(true)),
        (_, "/v1/gpus") => Answer::ok(&gpus(Mode::Mps)),
        (_, path) => not_shared(path.rsplit('/').next().unwrap_or_default()),
    })
}

fn signal(pid: u32, signal: nix::sys::signal::Signal) {
    let pid = nix::unistd::Pid::from_raw(pid.try_into().unwrap());
    nix::sys::signal::kill(pid, signal).unwrap();
}
