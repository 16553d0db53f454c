//! Tests of commands that change nothing: `mps list`, `show`, `clients` and `logs`, and `ps`.

use super::{life::agent_with_states, *};
use gpush_api::GpuIndex;

#[test]
fn lists_of_targets_clients_and_processes() {
    let host = Host::new();
    let agent = agent(&host);
    let cases: &[&[&str]] = &[
        &["mps", "list"],
        &["mps", "show", "1:2g.20gb@2"],
        &["mps", "clients"],
        &["mps", "clients", "0"],
        &["mps", "set", "0", "--percentage", "50%"],
        &["mps", "logs", "0", "-n", "2"],
        &["mps", "show", "7"],
        &["ps"],
        &["ps", "--unleased", "--gpu", "0"],
        &["ps", "--unleased", "--gpu", "1"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));
    assert_eq!(agent.bodies("/v1/mps/0/settings"), ["{\"percentage\":50}"]);
    assert!(agent.asked().contains(&"GET /v1/mps/0/logs?lines=2".to_owned()));
}

#[test]
fn nothing_shared_and_no_unleased_processes() {
    let host = Host::new();
    let error = ApiError::new(Code::GpuLost, "GPU 3 (GPU-3): the processes that use the GPU are not known");
    let lost = UnknownProcesses { gpu: GpuIndex(3), gpu_uuid: "GPU-3".into(), error };
    let asked = AtomicUsize::new(0);
    Agent::listen(&host.path("gpushd.sock"), move |request| match request.path.as_str() {
        "/v1/mps" => Answer::ok::<[MpsDaemon]>(&[]),
        "/v1/config" => Answer::error(&ApiError::new(Code::Unavailable, "gpushd stops")),
        _ if asked.fetch_add(1, Ordering::SeqCst) == 0 => Answer::ok(&processes(false)),
        _ => Answer::ok(&GpuProcesses { unknown: vec![lost.clone()], ..processes(false) }),
    });
    let mut text = host.run(&["mps", "list"]);
    text += &host.run(&["mps", "clients"]);
    text += &host.run(&["ps", "--unleased"]);
    text += &host.run(&["ps", "--unleased"]);
    assert_snapshot!(text);
}

#[test]
fn invalid_values_are_refused_without_a_request() {
    let host = Host::new();
    let cases: &[&[&str]] = &[
        &["mps", "set", "0"],
        &["mps", "set", "0", "--percentage", "0"],
        &["mps", "set", "0", "--percentage", "33.37"],
        &["mps", "set", "0", "--memory", "1.5G"],
        &["mps", "set", "0", "--memory", "512"],
        &["mps", "set", "0", "--priority", "high"],
        &["mps", "start", "0", "--timeout", "0s"],
        &["mps", "start", "0", "--timeout", "1s", "--detach"],
        &["mps", "logs", "0", "--lines", "0"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));
}

fn version() -> Version {
    Version { agent: "9.8.7".into(), api: "v1".into(), driver: None }
}

fn health() -> Health {
    Health {
        status: HealthStatus::Ok,
        errors: Vec::new(),
        simulated: true,
        gpu_count: 2,
        maintenance: None,
        config_file_changed: false,
        layouts_at_start: None,
        tasks: Vec::new(),
        pid: 812,
    }
}

/// Starts an agent for tests with two GPUs. The first one has the mode `mode`. `mps` answers requests for the MPS
/// daemons.
fn whole(host: &Host, mode: Mode, mps: fn() -> Answer) -> Agent {
    Agent::listen(&host.path("gpushd.sock"), move |request| match request.path.as_str() {
        "/v1/version" => Answer::ok(&version()),
        "/v1/health" => Answer::ok(&health()),
        "/v1/gpus" | "/v1/gpus?profiles=true" => Answer::ok(&gpus(mode)),
        "/v1/mps" => mps(),
        "/v1/leases" => Answer::ok::<[gpush_api::Lease]>(&[]),
        other => panic!("not asked for: {other}"),
    })
}

#[test]
fn status_requests_mps_only_if_a_gpu_uses_it() {
    let shared = || Answer::ok(&[busy(), idle_device()]);
    let host = Host::new();
    let agent = whole(&host, Mode::Mps, shared);
    let text = host.run(&["status", "--brief", "--gpu", "0"]);
    assert!(text.contains("mps (shared)") && text.contains("2/48 clients  0.0/80.0 GiB"), "{text}");
    assert_eq!(agent.asked(), ["GET /v1/version", "GET /v1/health", "GET /v1/gpus", "GET /v1/mps", "GET /v1/leases"]);
    let document: serde_json::Value =
        serde_json::from_slice(&host.command(&["status", "--json"]).output().unwrap().stdout).unwrap();
    assert_eq!(serde_json::from_value::<Vec<MpsDaemon>>(document["mps"].clone()).unwrap(), [busy(), idle_device()]);
    assert!(host.run(&["gpu", "show", "0"]).contains("more: `gpushctl mps show 0`"));

    let host = Host::new();
    let agent = whole(&host, Mode::Exclusive, shared);
    let text = host.run(&["status", "--json"]);
    assert!(!text.contains("\"mps\":"), "{text}");
    assert_eq!(agent.asked().len(), 4, "{:?}", agent.asked());

    // If the MPS daemons cannot be read, `status` must still show the rest.
    let host = Host::new();
    whole(&host, Mode::Mps, || Answer::error(&ApiError::new(Code::Unavailable, "gpushd is starting")));
    let text = host.run(&["status", "--brief"]);
    assert!(text.contains("mps (shared)") && text.contains("MPS is not shown: gpushd is starting\n"), "{text}");
    assert!(text.ends_with("[exit 0]\n"), "{text}");
}

#[test]
fn json_is_the_types_of_the_api() {
    let host = Host::new();
    agent(&host);
    fn json<T: serde::de::DeserializeOwned>(host: &Host, args: &[&str]) -> (T, Option<i32>) {
        let output = host.command(args).arg("--json").output().unwrap();
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        (serde_json::from_slice(&output.stdout).unwrap(), output.status.code())
    }
    let all = vec![busy(), idle_device()];
    assert_eq!(json(&host, &["mps", "list"]), (all, Some(0)));
    // `mps clients --json` must print an object for each client, with its target.
    for which in [&["mps", "clients"][..], &["mps", "clients", "0"]] {
        let (clients, code) = json::<Vec<serde_json::Value>>(&host, which);
        assert_eq!((clients.len(), code), (busy().clients.len(), Some(0)), "{which:?}");
        assert_eq!((&clients[0]["target"], &clients[0]["uuid"]), (&busy().target.into(), &busy().uuid.as_str().into()));
    }
    assert_eq!(json(&host, &["mps", "show", "0"]), (busy(), Some(0)));
    assert_eq!(json::<MpsSetResponse>(&host, &["mps", "set", "0", "--percentage", "50"]).1, Some(0));
    assert_eq!(json::<MpsLogs>(&host, &["mps", "logs", "0"]).0.files.len(), 1);
    assert_eq!(json(&host, &["ps"]), (processes(true), Some(0)));
    assert_eq!(json::<GpuProcesses>(&host, &["ps", "--unleased"]).1, Some(3));

    let host = Host::new();
    let ready = daemon(MpsState::Ready, 4, &[]);
    let starting = daemon(MpsState::Starting, 2, &[]);
    agent_with_states(&host, daemon(MpsState::Stopped, 1, &[]), Answer::ok(&starting), vec![ready.clone()]);
    assert_eq!(json(&host, &["mps", "start", "0"]), (ready, Some(0)));
}

#[test]
fn followed_logs_print_only_new_lines() {
    let host = Host::new();
    let asked = AtomicUsize::new(0);
    Agent::listen(&host.path("gpushd.sock"), move |request| {
        if !request.path.contains("/logs?") {
            return Answer::ok(&busy());
        }
        let lines = match asked.fetch_add(1, Ordering::SeqCst) {
            0 => vec!["one", "two"],
            1 => vec!["zero", "one", "two", "three"],
            _ => return Answer::error(&ApiError::new(Code::NotFound, "GPU 0 is no longer shared through MPS")),
        };
        let lines = lines.into_iter().map(str::to_owned).collect();
        Answer::ok(&MpsLogs {
            files: vec![MpsLog { path: "/var/log/control.log".into(), lines, left_out: 0, error: None }],
        })
    });
    assert_snapshot!(host.run(&["mps", "logs", "0", "-f", "-n", "2"]), @"
    $ gpushctl mps logs 0 -f -n 2
    one
    two
    three
    [stderr]
    error: GPU 0 is no longer shared through MPS
    [exit 2]
    ");
}
