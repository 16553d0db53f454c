//! Tests of the checks in `tests/gpu`: all checks on a simulated host, when they fail, and when
//! they print SKIPPED. The checks must leave no processes and no files.
//!
//! A model (`sim/mps-sim/src/work.rs`) determines the speed and the load of the simulated client. So
//! the figures do not measure a GPU. They only show that the checks measure, compare and print.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use gpush_tests::{
    driver::{hardware, uuids},
    host::{Host, program},
    mps::{parts, real_programs, signal},
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// A host whose GPU has performance monitoring (GPM).
const WITH_GPM: &str = "driver = \"555.58.02\"\n[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n";

/// A host whose driver supports several users on one control daemon.
const HOST: &str = "driver = \"555.58.02\"\n[[gpu]]\nmodel = \"l4\"\n";

/// Names of the checks, in order.
const CHECKS: [&str; 8] = [
    "throughput",
    "memory limit",
    "client killed",
    "daemon killed",
    "agent killed",
    "small clients",
    "several users",
    "GPU left as it was",
];

fn tests_gpu() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu")
}

/// Returns the command of the simulated client.
fn stand_in() -> String {
    format!("{} mps-client --compute", program("gpush-sim").display())
}

/// Returns the directory in which the checks create their scratch directory. A file that a check
/// leaves stays in this directory.
fn scratch(host: &Host) -> PathBuf {
    let dir = host.scratch("tmp");
    fs::create_dir_all(&dir).expect("a directory");
    dir
}

fn out(host: &Host) -> PathBuf {
    host.scratch("out")
}

/// Returns a command that runs a program of the checks on a host, with short measurements. Without
/// a real GPU, short measurements are enough.
fn on(host: &Host, command: &str) -> Command {
    let mut command = host.command(command);
    let programs = program("gpu_mps").parent().expect("a directory").to_owned();
    command.env("GPU_PROGRAMS", programs).env("GPU_SECONDS", "0.2").env("TMPDIR", scratch(host));
    command.env_remove("GPU_CLIENT").stdin(Stdio::null());
    command
}

/// Runs these parts of `tests/gpu/run` with `client`, or with the default client. `mps_programs` is a
/// directory with MPS programs. If `mps_programs` is `None`, the programs come from the host's `bin`.
fn run(host: &Host, parts: &[&str], client: Option<&str>, mps_programs: Option<&Path>) -> Output {
    let mut command = on(host, tests_gpu().join("run").to_str().expect("a path"));
    command.args(parts.iter().flat_map(|part| ["--only", part])).arg(out(host));
    if let Some(client) = client {
        command.env("GPU_CLIENT", client);
    }
    if let Some(dir) = mps_programs {
        command.env("PATH", format!("{}:{}", dir.display(), host.env()["PATH"]));
    }
    command.output().expect("sh can be started")
}

fn printed(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asserts that no process and no file is left, and that the GPU is unchanged.
fn assert_nothing_stays(host: &Host) {
    let scratch = scratch(host);
    let left: Vec<_> = fs::read_dir(&scratch).expect("a directory").flatten().map(|entry| entry.path()).collect();
    assert_eq!((parts(&scratch), left), (Vec::new(), Vec::new()));
    assert_eq!(host.show()["gpus"][0]["state"]["compute_mode"], json!(0));
}

fn results(host: &Host, file: &str) -> Value {
    serde_json::from_slice(&fs::read(out(host).join(file)).expect("results")).expect("JSON")
}

/// Returns the figures of a check.
fn figures(results: &Value, name: &str) -> Value {
    let checks = results["checks"].as_array().expect("checks");
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name}"))["figures"].clone()
}

#[test]
fn all_checks_run_and_print_results() {
    let host = Host::up(HOST).opened();
    carried_out_and_written_down(&host, None);
}

#[test]
fn checks_run_with_nvidia_control_daemon() {
    let host = Host::up(HOST).opened();
    if let Some(programs) = real_programs(&host, "tests/gpu with NVIDIA's own control daemon") {
        carried_out_and_written_down(&host, Some(&programs));
    }
}

fn carried_out_and_written_down(host: &Host, mps_programs: Option<&Path>) {
    let output = run(host, &["readings", "mps"], Some(&stand_in()), mps_programs);
    let text = printed(&output);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("SKIPPED readings: the driver found is gpush's simulator"), "{text}");
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("ok ")).collect();
    assert_eq!(lines.len(), CHECKS.len(), "{text}");
    for (line, name) in lines.iter().zip(CHECKS) {
        // The results begin in the same column of each line.
        assert!(line.starts_with(&format!("ok      {name:<22} ")) && !line[31..].starts_with(' '), "{line}");
    }
    assert!(text.contains("8 checks, 0 failed"), "{text}");
    assert_nothing_stays(host);

    let results = results(host, "mps.json");
    assert_eq!((&results["gpu"]["name"], &results["gpu"]["simulated"]), (&json!("NVIDIA L4"), &json!(true)));
    let bin = mps_programs.map_or_else(|| host.dir().join("bin"), Path::to_owned);
    assert_eq!(results["gpu"]["control"], json!(bin.join("nvidia-cuda-mps-control")));
    let check = |name: &str| figures(&results, name);
    let throughput = check("throughput");
    assert_eq!(throughput["rows"], json!([[25, 25, 250.0, 0.25], [50, 50, 500.0, 0.5], [100, 100, 1000.0, 1.0]]));
    assert_eq!(throughput["each"][0].as_array().map(Vec::len), Some(3), "the middle one of three");
    assert_eq!(check("memory limit")["above"], "out of memory");
    assert!(check("client killed")["other"]["iterations"].as_u64().is_some_and(|number| number > 0));
    assert_eq!(check("daemon killed")["its_client"], "computed on");
    assert!(check("daemon killed")["noticed_ms"].is_f64());
    assert_eq!(check("agent killed")["same_daemon"], true);
    let small = check("small clients");
    assert_eq!(small["rows"][0], json!([1, 100.0, 100.0, 1.0]));
    assert_eq!(small["rows"][3], json!([8, 800.0, 100.0, 8.0]));

    let page = fs::read_to_string(out(host).join("mps.md")).expect("a page");
    assert!(page.starts_with("## On a real GPU: MPS\n") && page.contains("the figures mean nothing"), "{page}");
    assert!(page.contains("| daemon killed | ok | noticed after "), "{page}");
    assert!(page.contains("| small clients | MPS, iterations/s |") && page.contains("| 8 | 800.00 |"), "{page}");
    assert!(out(host).join("mps-logs/gpushd.log").is_file());
}

#[test]
fn client_that_bypasses_mps_fails_every_check() {
    let host = Host::up(HOST).opened();
    let client = host.scratch("client");
    let script = format!("#!/bin/sh\nexport CUDA_MPS_PIPE_DIRECTORY=/nowhere\nexec {} \"$@\"\n", stand_in());
    fs::write(&client, script).expect("a script");
    fs::set_permissions(&client, fs::Permissions::from_mode(0o755)).expect("a program");
    let output = run(&host, &["mps"], client.to_str(), None);
    let text = printed(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("FAILED ")).count(), 7, "{text}");
    assert_eq!(text.matches("computes without MPS").count(), 6, "{text}");
    assert!(text.contains("3072 MiB: went through") && text.contains("8 checks, 7 failed"), "{text}");
    assert_eq!(results(&host, "mps.json")["checks"][0]["ok"], false);
    assert_nothing_stays(&host);
}

/// The simulated GPU reports exactly the load of the clients, so the errors are small.
#[test]
fn figures_about_use_are_compared_with_known_duties() {
    let host = Host::up(WITH_GPM).opened();
    let mut command = on(&host, tests_gpu().join("run").to_str().expect("a path"));
    command.args(["--only", "use"]).arg(out(&host)).env("GPU_CLIENT", stand_in()).env("GPU_SECONDS", "0.5");
    let output = command.output().expect("sh can be started");
    let text = printed(&output);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("6 checks, 0 failed") && !text.contains("not done: nvidia-cuda-mps"), "{text}");
    assert_nothing_stays(&host);
    let results = results(&host, "use.json");
    let signals = &figures(&results, "signals")["signals"];
    for name in ["GPM engine", "GPM SM"] {
        let errors = signals[name].as_array().expect("errors");
        let largest: Vec<f64> = errors.iter().filter_map(|error| error["largest"].as_f64()).collect();
        assert!(largest.len() == 5 && largest.iter().all(|largest| *largest < 8.0), "{name}: {signals}");
    }
    let calls = figures(&results, "driver calls");
    assert!(calls["rows"].as_array().is_some_and(|rows| rows.len() > 10), "{calls}");
    let energy = figures(&results, "energy of two clients");
    assert_eq!(energy["rows"][0][0], "one works, one is idle", "{energy}");
    let page = fs::read_to_string(out(&host).join("use.md")).expect("a page");
    assert!(
        page.starts_with("## On a real GPU: figures about use\n") && page.contains("| another sampler |"),
        "{page}"
    );
}

#[test]
fn unknown_part_of_the_checks_is_refused_with_the_list() {
    for wrong in [&["--only", "energy"][..], &["--only"], &["--part", "use"]] {
        let output = Command::new(tests_gpu().join("run")).args(wrong).output().expect("sh can be started");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{text}");
        assert!(text.contains("PART is readings, mps or use"), "{text}");
    }
}

#[test]
fn interrupted_checks_end_all_their_processes() {
    let host = Host::up(HOST);
    for number in [Signal::SIGINT, Signal::SIGTERM] {
        let mut command = on(&host, program("gpu_mps").to_str().expect("a path"));
        command.arg(out(&host)).arg("client.py").env("GPU_CLIENT", stand_in()).stdout(Stdio::piped());
        let mut checks = command.spawn().expect("gpu_mps can be started");
        let mut lines = BufReader::new(checks.stdout.take().expect("piped")).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.starts_with("ok      throughput ")), "it ended before");
        assert!(signal(checks.id().cast_signed(), number));
        assert_eq!(lines.last().as_deref(), Some("interrupted: what was started has been ended"));
        assert_eq!(checks.wait().expect("a child").code(), Some(130));
        assert_nothing_stays(&host);
    }
}

#[tokio::test]
async fn missing_or_conflicting_program_is_named_and_nothing_changes() {
    let skipped = |host: &Host, client: Option<&str>, why: &str| {
        host.start_trace();
        let output = run(host, &["mps"], client, None);
        let text = printed(&output);
        let says_so = text.lines().any(|line| line.starts_with("SKIPPED MPS: ") && line.contains(why));
        assert!(output.status.success() && says_so, "{why}\n{text}");
        assert_eq!(host.trace(), [], "{why}");
        assert!(!out(host).join("mps.json").exists());
    };
    let stand_in = stand_in();
    let host = Host::up(HOST);
    skipped(&host, None, "the driver found is gpush's simulator");
    skipped(&host, Some("false"), "`false` can't compute here: a client ended with status 1");
    skipped(&host, Some("/nowhere/python3"), "can't compute here: /nowhere/python3 can't be started: No such file");
    let pid = host.process("--gpu 0");
    skipped(&host, Some(&stand_in), &format!("it is in use, by pid {pid}"));
    host.end_process(pid);
    let hardware = hardware(&host);
    let uuid = uuids(&hardware).await.remove(0);
    hardware.set_compute_mode(&uuid, gpush_api::ComputeMode::ExclusiveProcess).await.expect("a mode");
    skipped(&host, Some(&stand_in), &format!("GPU 0, {uuid}: its compute mode is EXCLUSIVE_PROCESS"));
    hardware.stop().await.expect("a worker");
    let mig = Host::up("[[gpu]]\nmodel = \"a100-40\"\nmig = true\n");
    skipped(&mig, Some(&stand_in), "its MIG mode is on, and is not switched off for this");
}

#[test]
fn checks_without_gpu_are_skipped() {
    let host_has_one = Path::new("/dev/nvidiactl").exists() || Path::new("/usr/bin/nvidia-smi").exists();
    if host_has_one {
        println!("SKIPPED tests/gpu without a GPU: this host has one");
        return;
    }
    let scratch = tempfile::tempdir().expect("a directory");
    let mut command = Command::new(tests_gpu().join("run"));
    let output = command.arg(scratch.path()).env("PATH", "/usr/bin:/bin").output().expect("sh can be started");
    assert!(output.status.success());
    assert_eq!(printed(&output), "SKIPPED: no NVIDIA GPU on this host (no /dev/nvidiactl, no nvidia-smi)\n");
    // Run gpu_mps directly. `tests/gpu/run` runs gpu_mps only if this host has a GPU, or a program
    // with the name nvidia-smi.
    let mut command = Command::new(program("gpu_mps"));
    command.arg(scratch.path()).arg(tests_gpu().join("client.py")).env_remove("LD_LIBRARY_PATH");
    let output = command.env_remove("GPU_CLIENT").output().expect("gpu_mps can be started");
    assert!(output.status.success(), "{output:?}");
    assert!(printed(&output).starts_with("SKIPPED MPS: no driver: "), "{output:?}");
    assert_eq!(fs::read_dir(scratch.path()).expect("a directory").count(), 0);
}
