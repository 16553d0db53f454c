//! Independent clients of the driver on a simulated host: nvidia-ml-py, nvitop, gpustat and nvtop,
//! unmodified.
//!
//! The tests show that the simulated library behaves like a driver for programs other than gpush.
//! If a client is not installed, its test prints `SKIPPED`. `cargo xtask test` installs all four
//! clients.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};

use gpush_tests::host::Host;
use serde_json::Value;

/// The command that installs the Python clients.
const PYTHON_CLIENTS: &str =
    "python3 -m venv target/venv && target/venv/bin/pip install -r tests/clients/requirements.txt";

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ lies in the workspace").to_owned()
}

/// Returns the path of a program in the private Python environment. If the program is not
/// installed, prints a message and returns `None`.
fn python_client(program: &str) -> Option<PathBuf> {
    let venv = std::env::var_os("GPUSH_TEST_VENV").map_or_else(|| workspace().join("target/venv"), PathBuf::from);
    let path = venv.join("bin").join(program);
    if path.exists() {
        return Some(path);
    }
    let name = if program == "python" { "nvidia-ml-py" } else { program };
    println!("SKIPPED {name}: not installed in {}; mend with `{PYTHON_CLIENTS}`", venv.display());
    None
}

/// Returns the path of a program in `PATH`, `/usr/sbin` or `/sbin`. If the program is not
/// installed, prints a message and returns `None`.
fn installed(program: &str, mend: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = [PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")];
    let found = std::env::split_paths(&path).chain(sbin).map(|dir| dir.join(program)).find(|file| file.exists());
    if found.is_none() {
        println!("SKIPPED {program}: not installed; mend with `{mend}`");
    }
    found
}

/// Runs one of `tests/clients/*.py` and returns the JSON that it prints.
fn script(host: &Host, python: &Path, name: &str) -> Value {
    let output = run(host.command(python).arg(workspace().join("tests/clients").join(name)));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{name} printed no JSON: {e}"))
}

fn run(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().expect("the client can be started");
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Instances of another client. That client keeps running, and destroys the instances when it ends.
struct Held {
    child: Child,
    stdin: Option<ChildStdin>,
    /// UUID, GPU instance id and compute instance id of each MIG device.
    devices: Vec<(String, u64, u64)>,
}

impl Held {
    fn make(host: &Host, python: &Path, gpu: u32, entries: &[&str]) -> Self {
        let mut child = host
            .command(python)
            .arg(workspace().join("tests/clients/hold.py"))
            .arg(gpu.to_string())
            .args(entries)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the client can be started");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("the client prints a line");
        let made: Value = serde_json::from_str(&line).expect("hold.py prints JSON");
        let devices = made.as_array().expect("a list").iter().map(device).collect();
        Self { stdin: child.stdin.take(), child, devices }
    }

    fn end(mut self) {
        drop(self.stdin.take());
        assert!(self.child.wait().expect("our own child").success(), "hold.py removes what it made");
    }
}

fn device(json: &Value) -> (String, u64, u64) {
    (
        json["uuid"].as_str().expect("a UUID").to_owned(),
        json["gi"].as_u64().expect("a GPU instance id"),
        json["ci"].as_u64().expect("a compute instance id"),
    )
}

#[test]
fn nvidia_ml_py_creates_reads_and_destroys_instances() {
    let Some(python) = python_client("python") else { return };
    let mut lives = 0;
    let recent = "driver = \"580.65.06\"\n[[gpu]]\nmodel = \"a100-40\"\n";
    for what in ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "mixed", recent] {
        let host = Host::up(what);
        host.start_trace();
        let seen = script(&host, &python, "mig_lifecycle.py");
        let real_layout = host.show();
        assert_eq!(seen["driver"], real_layout["driver"]);
        assert_eq!(seen["gpu"], real_layout["gpus"][0]["uuid"]);
        assert_eq!(seen["devices"].as_array().expect("a list").len(), 4);
        assert_eq!(real_layout["gpus"][0]["state"]["instances"], serde_json::json!([]), "all was removed");
        let calls = host.trace();
        let done = |name: &str| calls.iter().filter(|c| c.rc == 0 && c.function.starts_with(name)).count();
        assert_eq!((done("nvmlDeviceCreateGpuInstance"), done("nvmlGpuInstanceDestroy")), (3, 3));
        assert_eq!((done("nvmlGpuInstanceCreateComputeInstance"), done("nvmlComputeInstanceDestroy")), (4, 4));
        lives += 1;
    }
    println!("{lives} hosts, 3 GPU instances and 4 compute instances through their life on each");
}

#[test]
fn concurrent_clients_see_the_same_instances() {
    let Some(python) = python_client("python") else { return };
    let host = Host::up("mixed");
    let first = Held::make(&host, &python, 0, &["3g.40gb@4", "2g.20gb@0", "1g.10gb@2"]);
    let second = Held::make(&host, &python, 2, &["4g.40gb@0", "3g.40gb@4"]);
    let pid = host.process(&format!("--mig {} --memory 3000", first.devices[0].0));

    let survey = script(&host, &python, "survey.py");
    let of = |gpu: usize| -> Vec<_> {
        survey[gpu]["devices"].as_array().expect("a list").iter().map(device).collect::<Vec<_>>()
    };
    assert_eq!(of(0), first.devices);
    assert_eq!(of(2), second.devices);
    assert!(of(1).is_empty() && of(4).is_empty());

    let real_layout = host.show();
    let mut count = 0;
    for (gpu, seen) in survey.as_array().expect("a list").iter().zip(real_layout["gpus"].as_array().expect("a list")) {
        for key in ["uuid", "name", "minor"] {
            assert_eq!(gpu[key], seen[key]);
        }
        let uuids = |value: &Value| -> Vec<String> {
            let list = value.as_array().expect("a list").iter();
            list.map(|d| d["uuid"].as_str().expect("a UUID").to_owned()).collect()
        };
        assert_eq!(uuids(&gpu["devices"]), uuids(&seen["mig_devices"]));
        count += uuids(&gpu["devices"]).len();
    }
    println!("{count} MIG devices seen alike by the one who made them, another client and the simulator");

    // The driver lists the process with its instances, for the MIG device and for the whole GPU.
    let (_, gi, ci) = first.devices[0].clone();
    let wanted = serde_json::json!([["compute", pid, 3000_u64 << 20, gi, ci]]);
    assert_eq!(survey[0]["devices"][0]["processes"], wanted);
    assert_eq!(survey[0]["processes"], wanted);
    assert_eq!(survey[0]["devices"][1]["processes"], serde_json::json!([]));
    assert_eq!(survey[0]["utilization"], Value::Null, "not known with MIG on");
    assert!(survey[4]["utilization"].is_u64(), "known without");

    host.end_process(pid);
    first.end();
    let survey = script(&host, &python, "survey.py");
    assert_eq!(survey[0]["devices"], serde_json::json!([]));
    assert_eq!(survey[2]["devices"].as_array().expect("a list").len(), 2, "the other client's stay");
    second.end();
}

#[test]
fn nvitop_draws_gpus_mig_devices_and_processes() {
    let (Some(python), Some(nvitop)) = (python_client("python"), python_client("nvitop")) else { return };
    let host = Host::up("mixed");
    let held = Held::make(&host, &python, 0, &["3g.40gb@4", "1g.10gb@2"]);
    let pid = host.process(&format!("--mig {} --memory 3000", held.devices[0].0));
    let drawn = text(&run(host.command(nvitop).args(["-1", "--ascii", "--colorful"]).env("COLUMNS", "120")));
    for wanted in ["A100-SXM4-80GB", "A30", "H100 80GB HBM3", "H200", "L4", "Tesla T4", "Driver Version: 550.163.01"] {
        assert!(drawn.contains(wanted), "nvitop does not draw {wanted}:\n{drawn}");
    }
    for (_, gi, ci) in &held.devices {
        assert!(drawn.contains(&format!("GI/CI: {gi}/{ci}")), "nvitop does not draw GI {gi} CI {ci}:\n{drawn}");
    }
    assert!(drawn.contains(&pid.to_string()) && drawn.contains("3000MiB"), "nvitop does not draw pid {pid}:\n{drawn}");
    host.end_process(pid);
    held.end();
}

#[test]
fn gpustat_lists_gpus_and_processes() {
    let Some(gpustat) = python_client("gpustat") else { return };
    let host = Host::up("mixed");
    let pid = host.process("--gpu 5 --memory 700");
    let json: Value = serde_json::from_slice(&run(host.command(gpustat).arg("--json")).stdout).expect("JSON");
    let listed = json["gpus"].as_array().expect("a list");
    let real_layout = host.show();
    assert_eq!(listed.len(), 6);
    for (gpu, seen) in listed.iter().zip(real_layout["gpus"].as_array().expect("a list")) {
        assert_eq!((&gpu["uuid"], &gpu["name"]), (&seen["uuid"], &seen["name"]));
        assert!(gpu["temperature.gpu"].is_u64() && gpu["power.draw"].is_u64(), "{gpu}");
    }
    let on_t4 = &listed[5]["processes"];
    assert_eq!((&on_t4[0]["pid"], &on_t4[0]["gpu_memory_usage"]), (&pid.into(), &700.into()));
    assert!(listed[5]["utilization.gpu"].as_u64().expect("known without MIG") > 0);
    assert_eq!(listed[0]["utilization.gpu"], Value::Null);
}

#[test]
fn nvtop_draws_every_gpu_and_a_process() {
    let mend = "apt-get install nvtop (Debian 12: component contrib)";
    let (Some(nvtop), Some(script)) = (installed("nvtop", mend), installed("script", "apt-get install bsdutils"))
    else {
        return;
    };
    let host = Host::up("mixed");
    let pid = host.process("--gpu 4 --memory 700");
    // nvtop draws only on a terminal, and ends when it reads `q`. `script` provides the terminal.
    let draw = format!("stty rows 60 cols 160; exec timeout --foreground 60 '{}' -d 1", nvtop.display());
    let mut child = host
        .command(script)
        .args(["-qec", &draw, "/dev/null"])
        .env("TERM", "xterm")
        .env("HOME", host.scratch(""))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script can be started");
    let mut wanted: BTreeSet<String> =
        ["A100-SXM4-80GB", "NVIDIA A30", "H100 80GB HBM3", "NVIDIA H200", "NVIDIA L4", "Tesla T4"]
            .map(str::to_owned)
            .into();
    wanted.insert(format!(" {pid} "));
    let (mut drawn, mut piece) = (String::new(), [0; 4096]);
    let mut screen = child.stdout.take().expect("piped");
    // The loop ends when nvtop has drawn everything, or has ended. If nvtop finds no GPU, nvtop
    // ends immediately. Otherwise, it ends after a minute.
    while wanted.iter().any(|name| !drawn.contains(name.as_str())) && drawn.len() < 1 << 20 {
        match screen.read(&mut piece) {
            Ok(0) | Err(_) => break,
            Ok(read) => drawn.push_str(&String::from_utf8_lossy(&piece[..read])),
        }
    }
    let _gone = child.stdin.take().expect("piped").write_all(b"q");
    let _rest = std::io::copy(&mut screen, &mut std::io::sink());
    let status = child.wait().expect("our own child");
    let missing: Vec<_> = wanted.iter().filter(|name| !drawn.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "nvtop draws no {missing:?} in {} bytes", drawn.len());
    assert!(status.success(), "nvtop ends well: {status}");
}
