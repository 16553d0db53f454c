//! Tests of `gpushctl` with a program that answers instead of gpushd: requests, output and exit
//! statuses.

use std::{
    io::{BufRead, BufReader, Read},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use gpush_api::{
    Actor, ApiError, ApplyRequest, Code, ComputeInstance, Driver, Gpu, GpuIndex, GpuInstance, GpuPlan, Health,
    HealthStatus, InstanceStep, Operation, OperationState, OperationSummary, Placement, Plans, Refusal, Step,
    StepState, Version,
};
use insta::assert_snapshot;

use crate::support::{Agent, Answer, Host, Request};

fn driver() -> Driver {
    Driver {
        version: "550.163.01".into(),
        nvml: "12.550.163.01".into(),
        cuda: "12.4".into(),
        library: "libnvidia-ml.so.1".into(),
        simulated: true,
        memory_limits: false,
    }
}

fn version() -> Version {
    Version { agent: "9.8.7".into(), api: "v1".into(), driver: Some(driver()) }
}

fn health(causes: Vec<ApiError>) -> Health {
    let status = if causes.is_empty() { HealthStatus::Ok } else { HealthStatus::Degraded };
    Health {
        status,
        errors: causes,
        simulated: true,
        gpu_count: 2,
        maintenance: None,
        config_file_changed: false,
        layouts_at_start: None,
        tasks: Vec::new(),
        pid: 812,
    }
}

/// Returns two A100 GPUs. `made` contains the instances of the first one: (id, profile, start,
/// size).
fn gpus(made: &[(u32, &str, u8, u8)]) -> Vec<Gpu> {
    let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
    gpus.truncate(2);
    let mig = gpus[0].mig.as_mut().unwrap();
    mig.instances = made
        .iter()
        .map(|(id, profile, start, size)| GpuInstance {
            id: *id,
            profile_id: 0,
            profile: (*profile).into(),
            placement: Placement { start: *start, size: *size },
            memory: None,
            compute: vec![ComputeInstance {
                id: 0,
                profile_id: 0,
                profile: (*profile).into(),
                placement: None,
                uuid: Some(format!("MIG-0000000{id}-0000-0000-0000-000000000000").into()),
                processes: Vec::new(),
            }],
            processes: Vec::new(),
        })
        .collect();
    gpus
}

const BEFORE: &[(u32, &str, u8, u8)] = &[(5, "2g.20gb", 0, 2), (2, "3g.40gb", 4, 4)];
const AFTER: &[(u32, &str, u8, u8)] = &[(9, "1g.10gb", 0, 1), (2, "3g.40gb", 4, 4)];

fn plan() -> GpuPlan {
    let at = |start, size| Placement { start, size };
    let gpu = &gpus(BEFORE)[0];
    GpuPlan {
        gpu: GpuIndex(0),
        gpu_uuid: gpu.uuid.clone(),
        name: gpu.name.clone(),
        layout: vec!["3g.40gb".into(), "1g.10gb".into()],
        steps: [
            InstanceStep::DestroyCompute { gi: 5, ci: 0, profile: "2g.20gb".into(), uuid: None },
            InstanceStep::DestroyGpuInstance { gi: 5, profile: "2g.20gb".into(), placement: at(0, 2) },
            InstanceStep::CreateGpuInstance { profile: "1g.10gb".into(), profile_id: 19, placement: at(0, 1) },
            InstanceStep::CreateCompute {
                gi_placement: at(0, 1),
                profile: "1g.10gb".into(),
                profile_id: 0,
                placement: None,
            },
        ]
        .map(Step::Instance)
        .into(),
        keeps: vec![2],
        ..GpuPlan::default()
    }
}

fn as_wanted() -> GpuPlan {
    let gpu = &gpus(BEFORE)[1];
    GpuPlan { gpu: GpuIndex(1), gpu_uuid: gpu.uuid.clone(), steps: Vec::new(), keeps: Vec::new(), ..plan() }
}

fn operation(revision: u64, state: OperationState, done: u32) -> Operation {
    let progress = |gpu, done, total| StepState {
        gpu,
        done,
        total,
        doing: None,
        rolling_back: false,
        restored: false,
        error: None,
    };
    // Use the same time in all answers. It is in the future, so that the output always shows an age
    // of 0.
    let now: jiff::Timestamp = "2999-01-01T00:00:00.123456789Z".parse().unwrap();
    Operation {
        begun: true,
        layouts_before: Vec::new(),
        id: "op-1".into(),
        revision,
        kind: "mig.apply".into(),
        state,
        by: Actor { uid: 0, user: Some("root".into()), pid: Some(1) },
        created_at: now,
        ended_at: state.is_final().then_some(now),
        reason: None,
        waits_for: Vec::new(),
        notes: Vec::new(),
        plans: vec![plan(), as_wanted()],
        progress: vec![progress(GpuIndex(0), done, 4), progress(GpuIndex(1), 0, 0)],
        error: None,
    }
}

/// Starts an agent for tests. After `polls` requests about the operation, the first GPU of the
/// operation has the new layout. `other` answers all requests that do not read the GPUs.
fn agent(host: &Host, polls: usize, other: impl Fn(&Request, usize) -> Answer + Send + Sync + 'static) -> Agent {
    let polled = Arc::new(AtomicUsize::new(0));
    Agent::listen(&host.path("gpushd.sock"), move |request| match request.path.as_str() {
        "/v1/version" => Answer::ok(&version()),
        "/v1/health" => Answer::ok(&health(Vec::new())),
        "/v1/mig/devices" => Answer::ok(&gpush_core::devices::list(&gpus(BEFORE), &[], &[])),
        "/v1/gpus" => Answer::ok(&gpus(if polled.load(Ordering::SeqCst) < polls { BEFORE } else { AFTER })),
        path if path.starts_with("/v1/operations/op-1?") => other(request, polled.fetch_add(1, Ordering::SeqCst)),
        _ => other(request, polled.load(Ordering::SeqCst)),
    })
}

#[test]
fn status_and_lists() {
    let host = Host::new();
    let agent = agent(&host, usize::MAX, |request, _| match request.path.as_str() {
        "/v1/gpus?profiles=true" => Answer::ok(&gpus(BEFORE)),
        path if path.starts_with("/v1/operations?limit=") => Answer::ok::<[OperationSummary]>(&[]),
        "/v1/gpus/7" => Answer::error(&ApiError::new(Code::NotFound, "no GPU 7")),
        other => panic!("not asked for: {other}"),
    });
    let mut text = host.run(&["status"]);
    text += &host.run(&["status", "--gpu", "1", "--brief", "--ascii"]);
    text += &host.run(&["status", "--gpu", "7"]);
    text += &host.run(&["gpu", "list", "--gpu", "0-1"]);
    text += &host.run(&["mig", "list"]);
    text += &host.run(&["mig", "profiles", "--gpu", "1"]);
    text += &host.run(&["operation", "list"]);
    text += &host.run(&["operation", "show"]);
    text += &host.run(&["version"]);
    assert_snapshot!(text);
    // `status` must send only one request of each kind. The version contains the driver, so there
    // is no request for it.
    assert_eq!(agent.asked()[..3], ["GET /v1/version", "GET /v1/health", "GET /v1/gpus"]);
}

#[test]
fn json_is_the_types_of_the_api() {
    let host = Host::new();
    agent(&host, usize::MAX, |request, _| match request.path.as_str() {
        "/v1/gpus?profiles=true" => Answer::ok(&gpus(BEFORE)),
        "/v1/mig/plan" => Answer::ok(&Plans { plans: vec![plan(), as_wanted()] }),
        "/v1/gpus/9" => Answer::error(&ApiError::new(Code::NotFound, "no GPU 9")),
        other => panic!("not asked for: {other}"),
    });
    let json = |args: &[&str]| {
        let output = host.command(args).arg("--json").output().unwrap();
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        (serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap(), output.status.code())
    };
    let (list, code) = json(&["gpu", "list"]);
    assert_eq!((serde_json::from_value::<Vec<Gpu>>(list.clone()).unwrap(), code), (gpus(BEFORE), Some(0)));
    // `mig apply --dry-run --offline` must be able to read the output of `gpu list --json`.
    host.write("host.json", list.to_string());
    let offline =
        host.run(&["mig", "apply", "--dry-run", "--offline", "host.json", "--gpu", "0", "--layout", "3g.40gb,1g.10gb"]);
    assert!(offline.contains("- GPU instance 2g.20gb@0 (GI 5)"), "{offline}");

    let (status, code) = json(&["status"]);
    assert_eq!(code, Some(0));
    assert_eq!(serde_json::from_value::<Version>(status["gpushd"].clone()).unwrap(), version());
    assert_eq!(serde_json::from_value::<Health>(status["health"].clone()).unwrap(), health(Vec::new()));
    assert_eq!(serde_json::from_value::<Vec<Gpu>>(status["gpus"].clone()).unwrap().len(), 2);

    let (plans, code) = json(&["mig", "apply", "--check"]);
    assert_eq!(serde_json::from_value::<Plans>(plans).unwrap().plans.len(), 2);
    assert_eq!(code, Some(3));

    let (version_of_all, _) = json(&["version"]);
    assert_eq!(version_of_all["gpushd"]["agent"], "9.8.7");

    let (error, code) = json(&["gpu", "list", "--gpu", "9"]);
    let error: ApiError = serde_json::from_value(error["error"].clone()).unwrap();
    assert_eq!((error.code, code), (Code::NotFound, Some(2)));
}

#[test]
fn colours_only_on_a_terminal_or_on_request() {
    let host = Host::new();
    agent(&host, usize::MAX, |_, _| Answer::HangUp);
    let coloured = |args: &[&str], env: &[(&str, &str)]| {
        let output = host.command(args).envs(env.iter().copied()).output().unwrap();
        assert!(output.status.success());
        output.stdout.contains(&0x1b)
    };
    assert!(!coloured(&["status"], &[]), "stdout is a pipe");
    assert!(coloured(&["status", "--color", "always"], &[]));
    assert!(coloured(&["status", "--color", "always"], &[("NO_COLOR", "1")]), "what is asked for wins");
    assert!(!coloured(&["status", "--color", "never"], &[("CLICOLOR_FORCE", "1")]));
    assert!(!coloured(&["status"], &[("NO_COLOR", "1"), ("CLICOLOR_FORCE", "1")]));
}

#[test]
fn agent_without_a_driver_shows_the_reason() {
    let host = Host::new();
    let cause = ApiError::new(Code::DriverUnavailable, "the NVIDIA driver is not loaded").hint("`modprobe nvidia`");
    let reported = cause.clone();
    Agent::listen(&host.path("gpushd.sock"), move |request| match request.path.as_str() {
        "/v1/version" => Answer::ok(&Version { driver: None, ..version() }),
        "/v1/health" => Answer::ok(&Health { simulated: false, gpu_count: 0, ..health(vec![reported.clone()]) }),
        _ => Answer::error(&reported),
    });
    assert_snapshot!(host.run(&["status"]) + &host.run(&["gpu", "list"]));
}

#[test]
fn apply_shows_progress_and_the_new_reading() {
    let host = Host::new();
    let agent = agent(&host, 3, |request, polls| match (request.path.as_str(), polls) {
        ("/v1/mig/apply", _) => {
            Answer::Json(202, serde_json::to_string(&operation(1, OperationState::Queued, 0)).unwrap())
        }
        (_, 0) => Answer::ok(&operation(2, OperationState::Running, 1)),
        (_, 1) => Answer::ok(&operation(4, OperationState::Running, 3)),
        (_, _) => Answer::ok(&operation(5, OperationState::Done, 4)),
    });
    let args = ["mig", "apply", "--gpu", "0,1", "--layout", "3g.40gb,1g.10gb"];
    assert_snapshot!(host.run(&args));
    assert_eq!(
        agent.asked(),
        [
            "GET /v1/health",
            "GET /v1/gpus",
            "GET /v1/gpus",
            "POST /v1/mig/apply",
            "GET /v1/operations/op-1?after=1&wait_ms=20000",
            "GET /v1/operations/op-1?after=2&wait_ms=20000",
            "GET /v1/operations/op-1?after=4&wait_ms=20000",
            "GET /v1/gpus",
        ]
    );
    let request: ApplyRequest = serde_json::from_str(&agent.bodies("/v1/mig/apply")[0]).unwrap();
    assert_eq!(request.gpus, ["0", "1"]);
    assert_eq!(request.layout, gpush_api::LayoutSource::Entries(vec!["3g.40gb".into(), "1g.10gb".into()]));
}

#[test]
fn request_contains_the_arguments_as_typed() {
    use gpush_api::LayoutSource::{Entries, Named, Wanted};
    let host = Host::new();
    let agent = agent(&host, usize::MAX, |_, _| Answer::ok(&Plans { plans: vec![as_wanted()] }));
    let cases: &[(&[&str], gpush_api::LayoutSource, &[&str])] = &[
        (&["mig", "apply", "--dry-run"], Wanted, &[]),
        (&["mig", "apply", "--dry-run", "mixed"], Named("mixed".into()), &[]),
        (&["mig", "apply", "--dry-run", "--layout", "none", "-g", "3"], Named("none".into()), &["3"]),
        (
            &["mig", "apply", "--dry-run", "-l", "1c.3g.40gb*2, 1g.10gb@6"],
            Entries(vec!["1c.3g.40gb*2".into(), "1g.10gb@6".into()]),
            &[],
        ),
        (&["mig", "apply", "--dry-run", "-g", "0-3", "-g", "GPU-5e8c,*A30*"], Wanted, &["0-3", "GPU-5e8c", "*A30*"]),
    ];
    for (args, layout, gpus) in cases {
        let output = host.command(args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let body = agent.bodies("/v1/mig/plan").pop().unwrap();
        let request: gpush_api::PlanRequest = serde_json::from_str(&body).unwrap();
        assert_eq!(
            (&request.layout, &request.gpus[..]),
            (layout, &gpus.iter().map(|g| (*g).to_owned()).collect::<Vec<_>>()[..])
        );
    }
    assert!(agent.bodies("/v1/mig/apply").is_empty(), "a dry run applies nothing");
}

#[test]
fn refused_apply() {
    let host = Host::new();
    let blocked = ApiError::new(Code::Blocked, "GPU 0 (GPU-00000000): 3g.40gb@4 is in use and in the way of 7g.80gb")
        .cause("held by pid 4123 of alice (python train.py)")
        .hint("wait for it to end, or leave the GPU out: `gpushctl mig apply --gpu 1`");
    let denied = ApiError::new(Code::Denied, "user bob (uid 1001) may not change MIG layouts")
        .hint("ask an administrator, or have `bob` put into one of the admin groups");
    let plan =
        GpuPlan { error: Some(blocked.clone()), refusal: Some(Refusal::Blocked { blockers: vec![] }), ..as_wanted() };
    agent(&host, usize::MAX, move |request, _| match request.path.as_str() {
        "/v1/mig/apply" if request.body.contains("7g") => Answer::error(&blocked),
        "/v1/mig/apply" => Answer::error(&denied),
        _ => Answer::ok(&Plans { plans: vec![plan.clone()] }),
    });
    let mut text = host.run(&["mig", "apply", "--gpu", "0", "--layout", "7g.80gb"]);
    text += &host.run(&["mig", "apply", "--gpu", "0", "--layout", "7g.80gb", "--json"]);
    text += &host.run(&["mig", "apply", "--gpu", "0", "--layout", "7g.80gb", "--dry-run"]);
    text += &host.run(&["mig", "apply"]);
    assert_snapshot!(text);
}

#[test]
fn rolled_back_apply() {
    let host = Host::new();
    let error = ApiError::new(Code::DriverError, "the driver refused to create 1g.10gb@0 on GPU 0")
        .cause("NVML: insufficient resources (23)")
        .hint("`gpushctl mig apply --dry-run --gpu 0` shows what is free now");
    agent(&host, usize::MAX, move |request, polls| {
        let mut back = operation(2, OperationState::Running, 2);
        back.progress[0].rolling_back = polls > 0;
        back.progress[0].error = (polls > 0).then(|| error.clone());
        match (request.path.as_str(), polls) {
            ("/v1/mig/apply", _) => Answer::ok(&operation(1, OperationState::Running, 0)),
            (_, 0) => Answer::ok(&back),
            (_, 1) => Answer::ok(&Operation { revision: 3, ..back }),
            (_, _) => Answer::ok(&Operation { revision: 4, state: OperationState::RolledBack, ..back }),
        }
    });
    assert_snapshot!(host.run(&["mig", "apply"]));
}

#[test]
fn detach_and_timeout_leave_the_operation_running() {
    let host = Host::new();
    agent(&host, usize::MAX, |request, _| match request.path.as_str() {
        "/v1/mig/apply" | "/v1/operations/op-1" => Answer::ok(&operation(1, OperationState::Running, 0)),
        _ => Answer::Silence,
    });
    let mut text = host.run(&["mig", "apply", "--detach"]);
    text += &host.run(&["mig", "apply", "--timeout", "0.05s", "--quiet"]);
    text += &host.run(&["operation", "wait", "op-1", "--timeout", "0.05s"]);
    assert_snapshot!(text);
}

#[test]
fn ctrl_c_leaves_the_operation_to_the_agent() {
    let host = Host::new();
    let agent = agent(&host, usize::MAX, |request, polls| match request.path.as_str() {
        "/v1/mig/apply" => Answer::ok(&operation(1, OperationState::Running, 0)),
        _ if polls == 0 => Answer::ok(&operation(2, OperationState::Running, 1)),
        _ => Answer::Silence,
    });
    let mut child = host.command(&["mig", "apply"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    // gpushctl prints this line when the operation has begun. From then on, gpushctl handles
    // Ctrl-C.
    stderr.read_line(&mut line).unwrap();
    assert_eq!(line, "op-1: 4 steps on GPU 0\n");
    let pid = nix::unistd::Pid::from_raw(child.id().try_into().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_snapshot!(rest);
    assert_eq!(agent.asked().iter().filter(|r| r.starts_with("POST")).count(), 1);
}

#[test]
fn agent_restarts_during_an_apply() {
    let host = Host::new();
    agent(&host, usize::MAX, |request, polls| match (request.path.as_str(), polls) {
        ("/v1/mig/apply", _) => Answer::ok(&operation(1, OperationState::Running, 0)),
        (_, 0) => Answer::ok(&operation(2, OperationState::Running, 1)),
        // The agent cannot be reached for a while. Then it has restarted, and no longer knows the
        // operation.
        (_, 1..5) => Answer::HangUp,
        (_, _) => Answer::error(&ApiError::new(Code::NotFound, "no operation is called op-1")),
    });
    assert_snapshot!(host.run(&["mig", "apply"]));
}

/// The agent has restarted, and its operation ids begin at 1 again. So op-1 is another operation
/// now.
#[test]
fn reused_operation_id_is_not_mistaken_for_the_old_operation() {
    let hour = jiff::Span::new().hours(1);
    let done = operation(9, OperationState::Done, 4);
    let others = [
        ("started later", Operation { created_at: done.created_at.checked_add(hour).unwrap(), ..done.clone() }),
        ("of another kind", Operation { kind: "mig.start".into(), ..done }),
    ];
    let mut printed = Vec::new();
    for (what, other) in others {
        let host = Host::new();
        agent(&host, 3, move |request, polls| match (request.path.as_str(), polls) {
            ("/v1/mig/apply", _) => Answer::ok(&operation(1, OperationState::Running, 0)),
            (_, 0) => Answer::ok(&operation(2, OperationState::Running, 1)),
            (_, 1) => Answer::HangUp,
            (_, _) => Answer::ok(&other),
        });
        let text = host.run(&["mig", "apply"]);
        assert!(text.contains("the result of op-1") && !text.contains("op-1 done"), "{what}: {text}");
        assert!(text.ends_with("[exit 6]\n"), "{what}: {text}");
        printed.push(text);
    }
    assert_snapshot!(printed.join("\n"));
}

#[test]
fn short_absence_of_the_agent_is_bridged() {
    let host = Host::new();
    agent(&host, 4, |request, polls| match (request.path.as_str(), polls) {
        ("/v1/mig/apply", _) => Answer::ok(&operation(1, OperationState::Running, 0)),
        (_, 0..3) => Answer::HangUp,
        (_, _) => Answer::ok(&operation(2, OperationState::Done, 4)),
    });
    let text = host.run(&["mig", "apply", "--quiet"]);
    assert!(text.contains("op-1 done") && text.ends_with("[exit 0]\n"), "{text}");
}
