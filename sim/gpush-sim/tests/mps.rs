//! The MPS programs of a simulated host. The tests start them by path and with an empty
//! environment, as gpushd does.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed, in a helper too")]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const SIM: &str = env!("CARGO_BIN_EXE_gpush-sim");

struct Host {
    scratch: tempfile::TempDir,
}

impl Host {
    fn up() -> Self {
        let host = Self { scratch: tempfile::tempdir().unwrap() };
        std::fs::write(host.path("library.so"), "").unwrap();
        std::fs::create_dir(host.path("pipe")).unwrap();
        std::fs::write(host.path("host.toml"), "[[gpu]]\nmodel = \"a100-80\"\ncount = 2\nmig = false\n").unwrap();
        let file = host.path("host.toml");
        let made = host.sim(&["up", file.to_str().unwrap(), host.dir().to_str().unwrap()]);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn dir(&self) -> PathBuf {
        self.path("host")
    }

    fn sim(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(SIM);
        command.args(arguments).env("GPUSH_SIM_LIBRARY", self.path("library.so")).env_remove("NVML_SIM_STATE");
        command.output().unwrap()
    }

    /// Runs `gpush-sim mps DIR fault …`, which must succeed.
    fn fault(&self, arguments: &[&str]) -> String {
        let dir = self.dir();
        let mut all = vec!["mps", dir.to_str().unwrap(), "fault"];
        all.extend(arguments);
        let done = self.sim(&all);
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    fn daemon(&self) -> Child {
        let mut command = Command::new(self.dir().join("bin/nvidia-cuda-mps-control"));
        let out = std::fs::File::create(self.path("out")).unwrap();
        command
            .arg("-f")
            .env_clear()
            .env("PATH", self.dir().join("bin"))
            .env("CUDA_MPS_PIPE_DIRECTORY", self.path("pipe"))
            .env("CUDA_VISIBLE_DEVICES", "1")
            .stdin(Stdio::null())
            .stdout(out);
        let child = command.spawn().unwrap();
        until(|| self.path("pipe/control").exists().then_some(()));
        child
    }

    /// Sends commands through the front-end. Returns its output.
    fn says(&self, lines: &str) -> String {
        let mut command = Command::new(self.dir().join("bin/nvidia-cuda-mps-control"));
        command.env_clear().env("CUDA_MPS_PIPE_DIRECTORY", self.path("pipe"));
        let mut front = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        front.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        String::from_utf8(front.wait_with_output().unwrap().stdout).unwrap()
    }

    /// Returns the pid and the kind of each process on a GPU.
    fn on(&self, gpu: usize) -> Vec<(u64, String)> {
        let listed = self.sim(&["process", self.dir().to_str().unwrap(), "list", "--json"]);
        let listed: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
        let processes = listed["gpus"][gpu]["processes"].as_array().unwrap();
        processes.iter().map(|one| (one["pid"].as_u64().unwrap(), one["kind"].as_str().unwrap().to_owned())).collect()
    }

    fn client(&self) -> (Child, String) {
        let mut command = Command::new(SIM);
        command
            .arg("mps-client")
            .env("NVML_SIM_STATE", self.dir())
            .env("CUDA_MPS_PIPE_DIRECTORY", self.path("pipe"))
            .env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        (child, line.trim().to_owned())
    }
}

fn until<T>(ask: impl Fn() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(started.elapsed() < Duration::from_secs(10), "not in time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn client_and_server_are_on_the_device_and_end_with_host() {
    let host = Host::up();
    let mut daemon = host.daemon();
    let (mut client, printed) = host.client();
    let server: u64 = host.says("get_server_list\n").trim().parse().unwrap();
    assert!(printed.starts_with(&format!("active server={server} percentage=25.0 device=GPU-")), "{printed}");
    let mut on = host.on(1);
    on.sort();
    let mut wanted = [(server, "compute".to_owned()), (u64::from(client.id()), "mps".to_owned())];
    wanted.sort();
    assert_eq!((on, host.on(0)), (wanted.to_vec(), vec![]));
    assert!(host.dir().join(format!("proc/{server}/fd/1")).is_symlink());
    let table = host.says("ps\n");
    assert!(table.lines().nth(1).unwrap().starts_with(&client.id().to_string()), "{table}");
    client.stdin.take().unwrap().write_all(b"end\n").unwrap();
    client.wait().unwrap();
    until(|| (host.on(1) == [(server, "compute".to_owned())]).then_some(()));
    let down = host.sim(&["down", host.dir().to_str().unwrap()]);
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    assert!(!host.dir().exists(), "nothing is left of it");
    assert!(daemon.wait().unwrap().success());
    until(|| (!PathBuf::from(format!("/proc/{server}")).exists()).then_some(()));
}

/// In compute mode EXCLUSIVE_PROCESS, the driver gives contexts to one process only: an MPS server or another program.
#[test]
fn exclusive_gpu_has_one_process_with_contexts() {
    let host = Host::up();
    let dir = host.dir();
    let process = |arguments: &[&str]| {
        let mut all = vec!["process", dir.to_str().unwrap()];
        all.extend(arguments);
        let done = host.sim(&all);
        (done.status.success(), String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).trim().to_owned())
    };
    let smi = |mode: &str| Command::new(dir.join("bin/nvidia-smi")).args(["-i", "1", "-c", mode]).output().unwrap();
    let (added, program) = process(&["add", "--gpu", "1", "--spawn"]);
    assert!(added && smi("EXCLUSIVE_PROCESS").status.success(), "{program}");
    let mut daemon = host.daemon();
    let (mut client, printed) = host.client();
    assert_eq!(printed, "error 805", "the server gets no context");
    client.wait().unwrap();
    assert!(process(&["remove", &program]).0);
    let (mut client, printed) = host.client();
    assert!(printed.starts_with("active "), "{printed}");
    let (added, why) = process(&["add", "--gpu", "1", "--spawn"]);
    assert!(!added && why.contains("compute mode EXCLUSIVE_PROCESS"), "{why}");
    let (added, why) = process(&["add", "--gpu", "1", "--spawn", "--kind", "handle"]);
    assert!(added, "an open handle is no context: {why}");
    client.stdin.take().unwrap().write_all(b"end\n").unwrap();
    client.wait().unwrap();
    host.sim(&["down", dir.to_str().unwrap()]);
    daemon.wait().unwrap();
}

#[test]
fn nvidia_daemon_ends_only_with_its_own_host() {
    let real = PathBuf::from("/usr/bin/nvidia-cuda-mps-control");
    if !real.is_file() {
        println!("SKIPPED NVIDIA's own daemon: {} is not installed", real.display());
        return;
    }
    let host = Host::up();
    let daemon = |pipe: PathBuf| {
        std::fs::create_dir_all(&pipe).unwrap();
        let mut command = Command::new(&real);
        command.arg("-f").env_clear().env("PATH", "/nonexistent").env("CUDA_MPS_PIPE_DIRECTORY", &pipe);
        command.env("CUDA_MPS_LOG_DIRECTORY", &pipe).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().unwrap();
        until(|| pipe.join("control").exists().then_some(()));
        child
    };
    let mut own = daemon(host.dir().join("gpushd/mps/x/1"));
    let mut other = daemon(host.path("elsewhere"));
    let down = host.sim(&["down", host.dir().to_str().unwrap()]);
    assert!(down.status.success(), "{}", String::from_utf8_lossy(&down.stderr));
    assert!(!own.wait().unwrap().success(), "it was ended");
    assert!(other.try_wait().unwrap().is_none(), "it is not the host's");
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(!host.dir().exists(), "nothing is left of it");
}

#[test]
fn programs_of_every_user_can_be_shown_in_a_hosts_proc() {
    let host = Host::up();
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(host.dir().join("proc")).unwrap().permissions());
    assert_eq!(mode & 0o7777, 0o1777);
}

#[test]
fn faults_reach_programs_with_an_empty_environment() {
    let host = Host::up();
    let mut daemon = host.daemon();
    let number = host.fault(&["add", "busy-ui", "--on", "/elsewhere"]);
    assert_eq!(host.says("get_default_active_thread_percentage\n"), "100.0\n");
    host.fault(&["clear", number.trim()]);
    host.fault(&["add", "busy-ui", "--on", "/pipe", "--times", "1"]);
    assert_eq!(host.says("get_default_active_thread_percentage\n"), "");
    assert_eq!(host.says("get_default_active_thread_percentage\n"), "100.0\n");
    assert_eq!(host.fault(&["list"]), "1: busy-ui on=/pipe times=1 [happened 1]\n");
    assert_eq!(host.fault(&["clear"]), "1 removed\n");
    host.fault(&["add", "server-dies"]);
    let (mut client, printed) = host.client();
    assert_eq!(printed, "error 805");
    client.wait().unwrap();
    let refused = host.sim(&["mps", host.dir().to_str().unwrap(), "fault", "add", "buzy"]);
    let printed = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && printed.contains("silent-hello"), "{printed}");
    host.sim(&["down", host.dir().to_str().unwrap()]);
    daemon.wait().unwrap();
}

#[test]
fn host_with_older_driver_has_older_programs() {
    let host = Host::up();
    host.sim(&["down", host.dir().to_str().unwrap()]);
    let file = host.path("host.toml");
    std::fs::write(&file, "driver = \"535.183.01\"\n[[gpu]]\nmodel = \"a100-80\"\nmig = false\n").unwrap();
    assert!(host.sim(&["up", file.to_str().unwrap(), host.dir().to_str().unwrap()]).status.success());
    let mut daemon = host.daemon();
    assert_eq!(host.says("get_server_status 1\nquit\n"), "Unknown command \"get_server_status\"\n");
    assert!(daemon.wait().unwrap().success());
    host.sim(&["down", host.dir().to_str().unwrap()]);
}
