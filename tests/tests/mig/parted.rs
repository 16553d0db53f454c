//! Files of mig-parted with the real `gpushctl` and a real agent, on simulated hosts.
//!
//! gpush must not have these faults of mig-parted:
//! - A change of one GPU resets or clears another GPU.
//! - The error for a missing GPU does not name this GPU.

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

use gpush_api::{Gpu, GpuState, GpuUuid, Operation, OperationState};
use gpush_tests::{
    agent::{Agent, gi_at, real_layout},
    host::{Host, program},
};

const FILE: &str = r#"
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  all-1g.10gb:
    - devices: all
      mig-enabled: true
      mig-devices:
        "1g.10gb": 7
  by-part:
    - device-filter: ["0x20B210DE"]
      devices: all
      mig-enabled: true
      mig-devices:
        "1g.10gb": 2
        "2g.20gb": 1
        "3g.40gb": 1
    - device-filter: "0x20B710DE"
      devices: all
      mig-enabled: true
      mig-devices:
        "1c.2g.12gb": 2
        "1g.6gb+me": 1
    - device-filter: "0x27b810de"
      devices: all
      mig-enabled: false
  second:
    - devices: [0]
      mig-enabled: true
      mig-devices: {"3g.40gb": 1}
    - devices: [1]
      mig-enabled: true
      mig-devices: {"7g.80gb": 1}
  past-the-end:
    - devices: [1, 9]
      mig-enabled: true
      mig-devices: {}
  last:
    - devices: [2]
      mig-enabled: true
      mig-devices: {"1g.10gb": 1}
"#;

const A100S: &str = "[[gpu]]\nmodel = \"a100-80\"\ncount = 3\n";

fn gpushctl(agent: &Agent, args: &[&str], stdin: &str) -> Output {
    let mut command = Command::new(program("gpushctl"));
    command.args(args).env_clear().env("LANG", "C.UTF-8").env("COLUMNS", "100").env("GPUSH_SOCKET", agent.socket());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("gpushctl can be started");
    // Ignore an error: a command that does not read its standard input may end before this write.
    let _ = child.stdin.take().expect("a pipe").write_all(stdin.as_bytes());
    child.wait_with_output().expect("gpushctl ends")
}

/// Runs `mig COMMAND --file - -c LABEL ARGS…` with [`FILE`] as standard input. COMMAND can have several words. Returns the exit
/// code and all output.
fn run(agent: &Agent, command: &str, label: &str, args: &[&str]) -> (i32, String) {
    let command: Vec<&str> = command.split(' ').collect();
    let args = [&["mig"], command.as_slice(), &["--file", "-", "-c", label], args].concat();
    let output = gpushctl(agent, &args, FILE);
    let printed = [output.stdout, output.stderr].concat();
    (output.status.code().expect("it ends by itself"), String::from_utf8_lossy(&printed).into_owned())
}

/// Waits until the agent reports the process: a reading may be a second old.
fn seen(agent: &Agent, gpu: u32, pid: u32) {
    let sees = |gpu: &Gpu| {
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).flat_map(|instance| &instance.compute);
        instances.flat_map(|compute| &compute.processes).any(|process| process.pid == Some(pid))
    };
    let until = std::time::Instant::now() + gpush_tests::agent::PATIENCE;
    while !sees(&agent.gpu(gpu)) {
        assert!(std::time::Instant::now() < until, "the process is never seen");
        std::thread::yield_now();
    }
}

fn resets(host: &Host) -> usize {
    host.trace().iter().filter(|call| call.function.contains("Reset") || call.function.contains("MigMode")).count()
}

#[test]
fn file_for_several_parts_applies_at_once_and_round_trips() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n[[gpu]]\nmodel = \"a30-24\"\n[[gpu]]\nmodel = \"l4\"\n");
    let agent = Agent::start(&host, "");
    assert_eq!(run(&agent, "apply --check", "by-part", &[]).0, 3);
    let (status, printed) = run(&agent, "apply", "by-part", &["--json"]);
    assert_eq!(status, 0, "{printed}");
    let operation: Operation = serde_json::from_str(&printed).expect("an operation");
    assert_eq!((operation.state, operation.plans.len()), (OperationState::Done, 3));
    let a100 = ["2g.20gb@0[2g.20gb@0]", "1g.10gb@2[1g.10gb@0]", "1g.10gb@3[1g.10gb@0]", "3g.40gb@4[3g.40gb@0]"];
    assert_eq!(real_layout(&host, 0), a100);
    assert_eq!(real_layout(&host, 1), ["2g.12gb@0[1c.2g.12gb@0 1c.2g.12gb@1]", "1g.6gb+me@2[1g.6gb+me@0]"]);
    assert_eq!(run(&agent, "apply --check", "by-part", &[]), (0, String::new()));
    assert_eq!(run(&agent, "apply --check", "by-part", &["--gpu", "1"]), (0, String::new()));

    let exported = gpushctl(&agent, &["mig", "export", "--label", "now"], "");
    let text = String::from_utf8(exported.stdout).expect("text");
    insta::assert_snapshot!(text);
    assert_eq!((exported.status.code(), exported.stderr.as_slice()), (Some(0), &b""[..]));
    let asserted = gpushctl(&agent, &["mig", "apply", "--check", "--file", "-"], &text);
    assert_eq!(asserted.status.code(), Some(0), "{asserted:?}");
    let path = host.scratch("now.yaml");
    let path = path.to_str().expect("a path");
    let written = gpushctl(&agent, &["mig", "export", "--label", "now", "--file", path], "");
    assert!(written.status.success() && written.stdout.is_empty(), "{written:?}");
    assert_eq!(std::fs::read_to_string(path).expect("it was written"), text);
    let again = gpushctl(&agent, &["mig", "apply", "--file", path, "--json"], "");
    let again: Operation = serde_json::from_slice(&again.stdout).expect("an operation");
    assert!(again.plans.iter().all(|plan| plan.steps.is_empty()), "{again:?}");
}

/// Faults of mig-parted: if it resets or clears one GPU, it resets all GPUs. If the mode of one GPU changes, it clears the
/// other GPUs.
#[test]
fn file_changes_only_the_gpus_of_its_label() {
    let host = Host::up(A100S);
    let agent = Agent::start(&host, "");
    assert_eq!(run(&agent, "apply", "second", &[]).0, 0);
    let pid = host.process(&format!("--gpu 0 --gi {} --ci 0 --memory 900", gi_at(&host, 0, 4)));
    seen(&agent, 0, pid);
    let before = [real_layout(&host, 0), real_layout(&host, 2)];
    host.start_trace();
    // The file changes GPU 1. GPU 0 already has its layout, so gpushd must not change GPU 0.
    let other = FILE.replace("\"7g.80gb\": 1", "\"1g.10gb\": 7");
    let output = gpushctl(&agent, &["mig", "apply", "--file", "-", "-c", "second"], &other);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(real_layout(&host, 1).len(), 7);
    assert_eq!([real_layout(&host, 0), real_layout(&host, 2)], before);
    let calls = host.trace();
    assert!(!calls.is_empty() && calls.iter().all(|call| call.gpu == Some(1) && call.rc == 0), "{calls:?}");
    assert_eq!(resets(&host), 0, "{calls:?}");

    // If the change would destroy instances in use, gpushd changes no GPU, and the error names
    // these instances. A label that matches no GPU changes nothing either.
    let from = host.trace().len();
    let (status, printed) = run(&agent, "apply", "all-1g.10gb", &[]);
    assert_eq!(status, 4, "{printed}");
    assert!(printed.contains(&format!("pid {pid}")) && printed.contains("no GPU was changed"), "{printed}");
    for command in ["apply --dry-run", "apply", "apply --check"] {
        let (status, printed) = run(&agent, command, "past-the-end", &[]);
        assert_eq!(status, 2, "{command}: {printed}");
        assert!(printed.contains("stdin:37: there is no GPU 9 on this host"), "{command}: {printed}");
    }
    assert_eq!(host.trace().len(), from, "{:?}", host.trace());
    let incomplete = "version: v1\nmig-configs:\n  x:\n    - devices: all\n";
    let wrong = gpushctl(&agent, &["mig", "apply", "--file", "-"], incomplete);
    assert_eq!(wrong.status.code(), Some(2));
    let printed = String::from_utf8_lossy(&wrong.stderr);
    assert!(printed.contains("stdin:4:7: this group has no `mig-enabled`"), "{printed}");

    // The label disables MIG mode, but `--gpu` limits it to GPU 0.
    host.end_process(pid);
    assert_eq!(run(&agent, "apply --check", "all-disabled", &[]).0, 3);
    let before = real_layout(&host, 1);
    host.start_trace();
    let (status, printed) = run(&agent, "apply", "all-disabled", &["--gpu", "0"]);
    assert_eq!(status, 0, "{printed}");
    assert_eq!((real_layout(&host, 0), real_layout(&host, 1)), (vec!["MIG off".to_owned()], before));
    let resets: Vec<_> = host.trace().into_iter().filter(|call| call.function == "gpu-reset").collect();
    assert_eq!(resets.iter().map(|call| call.gpu).collect::<Vec<_>>(), [Some(0)]);
    assert_eq!(run(&agent, "apply", "all-disabled", &[]).0, 0);
    assert_eq!(run(&agent, "apply --check", "all-disabled", &[]).0, 0);
    let (status, printed) = run(&agent, "apply", "second", &[]);
    assert_eq!(status, 0, "and on again: {printed}");
}

/// Fault of mig-parted: if a GPU is missing, it panics on restore.
#[test]
fn missing_gpu_is_named_and_not_confused_with_others() {
    let host = Host::up(A100S);
    let agent = Agent::start(&host, "");
    assert_eq!(run(&agent, "apply", "second", &[]).0, 0);
    let exported = gpushctl(&agent, &["mig", "export"], "");
    let saved = String::from_utf8(exported.stdout).expect("text");
    let before = [real_layout(&host, 1), real_layout(&host, 2)];
    host.fault("nvmlDeviceGetMigMode --gpu 0 --times 1 --mutate lose");
    let until = std::time::Instant::now() + gpush_tests::agent::PATIENCE;
    while agent.gpus().iter().all(|gpu| gpu.state != GpuState::Lost) {
        assert!(std::time::Instant::now() < until, "{:?}", agent.gpus());
        std::thread::yield_now();
    }
    host.start_trace();
    // The saved file names the missing GPU, so the restore fails. A label for `all` also fails,
    // because `all` includes the missing GPU. A label with indexes fails, because the indexes are
    // ambiguous while the GPU is missing.
    let restored = gpushctl(&agent, &["mig", "apply", "--file", "-"], &saved);
    let printed = String::from_utf8_lossy(&restored.stderr).into_owned();
    assert!(restored.status.code().is_some_and(|status| status != 0), "{printed}");
    assert!(printed.contains("lost") && !printed.contains("panicked"), "{printed}");
    let (status, printed) = run(&agent, "apply", "all-1g.10gb", &[]);
    assert!(status != 0 && printed.contains("GPU 0") && printed.contains("fallen off the bus"), "{printed}");
    let (status, printed) = run(&agent, "apply --dry-run", "last", &[]);
    assert!(status != 0 && printed.contains("index 2 is ambiguous while GPU 0 is lost"), "{printed}");
    assert_eq!(host.trace(), []);
    assert_eq!([real_layout(&host, 1), real_layout(&host, 2)], before);
    // The export has the other GPUs, and names the missing GPU.
    let exported = gpushctl(&agent, &["mig", "export"], "");
    assert!(String::from_utf8_lossy(&exported.stderr).contains("GPU 0 is left out"), "{exported:?}");
    // A request that names only the other GPUs changes them.
    let rest: Vec<GpuUuid> =
        agent.gpus().into_iter().filter(|gpu| gpu.state == GpuState::Ready).map(|gpu| gpu.uuid).collect();
    let (status, printed) = run(&agent, "apply", "all-1g.10gb", &["--gpu", &rest.join(",")]);
    assert_eq!(status, 0, "{printed}");
    assert_eq!((real_layout(&host, 1).len(), real_layout(&host, 2).len()), (7, 7));

    // A new agent has never seen the missing GPU, so it lists two GPUs. Neither of them is the
    // first GPU of the file.
    agent.stop();
    let agent = Agent::start(&host, "");
    assert_eq!(agent.gpus().len(), 2);
    let (status, printed) = run(&agent, "apply", "second", &[]);
    assert!(status == 2 && printed.contains("there is no GPU 0 on this host"), "{printed}");
}
