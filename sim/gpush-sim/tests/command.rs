//! Tests of gpush-sim, which run the program as users do.
//!
//! These tests do not load the simulated library, so it is an empty file.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use silicon::Host;
use tempfile::TempDir;

/// A directory for hosts and for the temporary files of `run`.
struct TestHost {
    dir: TempDir,
}

impl TestHost {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("library.so"), "").unwrap();
        std::fs::create_dir(dir.path().join("tmp")).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self) -> Command {
        // Restore the default signal handling. If the tests run under nohup, child processes
        // inherit that SIGHUP is ignored, and a shell cannot trap an ignored signal.
        let mut command = Command::new("env");
        command
            .args(["--default-signal", env!("CARGO_BIN_EXE_gpush-sim")])
            .env("GPUSH_SIM_LIBRARY", self.path("library.so"))
            .env("TMPDIR", self.path("tmp"))
            .env_remove("NVML_SIM_STATE");
        command
    }

    /// Runs a command to its end. Returns exit code, standard output and standard error.
    fn call(&self, arguments: &[&str]) -> (i32, String, String) {
        text(&self.command().args(arguments).output().unwrap())
    }

    /// Runs a command that must succeed. Returns its standard output.
    fn ok(&self, arguments: &[&str]) -> String {
        let (code, out, err) = self.call(arguments);
        assert_eq!(code, 0, "{arguments:?}: {out}{err}");
        out
    }

    /// Runs a command that must fail with an error that contains `expected`.
    fn refused(&self, arguments: &[&str], expected: &str) {
        let (code, out, err) = self.call(arguments);
        assert_eq!(code, 1, "{arguments:?}: {out}{err}");
        assert!(err.contains(expected), "{arguments:?} printed: {err}, expected: {expected}");
        assert_eq!((out.as_str(), err.lines().count()), ("", 1), "{arguments:?}: {err}");
    }

    fn temporary_hosts(&self) -> usize {
        std::fs::read_dir(self.path("tmp")).unwrap().count()
    }

    fn up(&self, source: &str) -> (PathBuf, String) {
        let dir = self.path("host");
        let name = dir.display().to_string();
        self.ok(&["up", source, &name]);
        (dir, name)
    }

    fn smi(&self, dir: &Path, arguments: &[&str]) -> (i32, String, String) {
        // Call nvidia-smi by its absolute path and with an empty environment, as an agent does.
        let mut command = Command::new(dir.join("bin/nvidia-smi"));
        text(&command.env_clear().args(arguments).output().unwrap())
    }
}

fn text(output: &Output) -> (i32, String, String) {
    let read = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap_or(-1), read(&output.stdout), read(&output.stderr))
}

/// Starts `run a30x4 -- sh -c SCRIPT` and waits for the first line that it prints.
fn started(place: &TestHost, script: &str) -> (Child, String) {
    let mut child = place
        .command()
        .args(["run", "a30x4", "--", "sh", "-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim().to_owned())
}

#[test]
fn run_gives_the_environment_passes_the_exit_code_and_cleans_up() {
    let place = TestHost::new();
    let script = r#"echo "$NVML_SIM_STATE" "$(command -v nvidia-smi)" "$LD_LIBRARY_PATH" "$(cat "$GPUSH_BOOT_ID_FILE")"
        test -e "$NVML_SIM_STATE/lib/libnvidia-ml.so" && test -e "$NVML_SIM_STATE/lib/libnvidia-ml.so.1" && exit 7"#;
    let (code, out, err) = place.call(&["run", "a30x4", "--", "sh", "-c", script]);
    assert_eq!((code, err.as_str()), (7, ""));
    let words: Vec<&str> = out.split_whitespace().collect();
    let dir = words[0];
    assert_eq!(words[1], format!("{dir}/bin/nvidia-smi"));
    assert!(words[2].starts_with(&format!("{dir}/lib")));
    assert_eq!(words[3].len(), 36, "a boot id");
    assert_eq!(place.temporary_hosts(), 0);
    assert_eq!(place.call(&["run", "a30x4", "--", "sh", "-c", "kill -9 $$"]).0, 128 + 9);
    place.refused(&["run", "a30x4", "--", "/no/such/program"], "cannot run /no/such/program: No such file");
    place.refused(&["run", "a30x5", "--", "true"], "there is no preset `a30x5`; did you mean `a30x4`?");
    assert_eq!(place.temporary_hosts(), 0, "also after a failure");
}

/// An agent and its clients on one host find each other without options, and leave no files.
#[test]
fn agent_of_a_host_uses_the_hosts_directory() {
    let place = TestHost::new();
    let script = r#"echo "$GPUSH_SOCKET" "$GPUSH_STATE_DIR" "$NVML_SIM_STATE"
        mkdir -p "$GPUSH_STATE_DIR" && touch "$GPUSH_SOCKET""#;
    let (code, out, err) = place.call(&["run", "a30x4", "--", "sh", "-c", script]);
    assert_eq!((code, err.as_str()), (0, ""));
    let words: Vec<&str> = out.split_whitespace().collect();
    assert_eq!(words[..2], [format!("{}/gpushd/gpushd.sock", words[2]), format!("{}/gpushd/state", words[2])]);
    assert_eq!(place.temporary_hosts(), 0);
}

#[test]
fn simulated_nvidia_smi_sets_mig_mode_by_model() {
    let place = TestHost::new();
    let models = ["a30-24", "h100-80-sxm", "t4"];
    let hosts: String = models.iter().map(|model| format!("[[gpu]]\nmodel = \"{model}\"\n")).collect();
    let hosts = hosts.replace("a30-24\"\n", "a30-24\"\nmig = false\n").replace("sxm\"\n", "sxm\"\nmig = false\n");
    let file = place.path("hosts.toml");
    std::fs::write(&file, hosts).unwrap();
    let (dir, name) = place.up(&file.display().to_string());
    let (code, out, _) = place.smi(&dir, &["-i", "0", "-mig", "1"]);
    assert_eq!(code, 0);
    assert!(out.contains("pending enable state") && out.contains("--gpu-reset -i 0"), "{out}");
    assert_eq!(place.smi(&dir, &["--gpu-reset", "-i", "0"]).0, 0);
    assert!(place.smi(&dir, &["-mig", "1", "-i", "0,1"]).1.contains("Enabled MIG Mode for GPU"));
    let (code, _, err) = place.smi(&dir, &["-i", "2", "-mig", "1"]);
    assert_eq!(code, 3);
    assert!(err.contains("Unable to enable MIG Mode"), "{err}");
    assert_eq!(place.smi(&dir, &["-i", "0", "-mig", "2"]).0, 2);
    place.ok(&["down", &name]);
}

#[test]
fn signals_reach_the_program() {
    let place = TestHost::new();
    let mut tried = 0;
    for (signal, name) in [(Signal::SIGTERM, "TERM"), (Signal::SIGHUP, "HUP"), (Signal::SIGINT, "INT")] {
        // Use `wait`, because a shell runs a trap immediately only while it waits in `wait`.
        let script = format!("trap 'kill $!; exit 42' {name}; sleep 60 & echo ready; wait");
        let (mut child, line) = started(&place, &script);
        assert_eq!(line, "ready");
        kill(nix::unistd::Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(42), "{name}");
        tried += 1;
    }
    println!("{tried} signals passed on");
    assert_eq!(place.temporary_hosts(), 0);
}

#[test]
fn remaining_processes_keep_the_host() {
    let place = TestHost::new();
    let (mut child, dir) = started(&place, r#"echo "$NVML_SIM_STATE"; read x"#);
    let host = Host::open(Path::new(&dir)).unwrap();
    host.connect().unwrap();
    drop(child.stdin.take());
    let output = child.wait_with_output().unwrap();
    let printed = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "read's");
    assert!(
        printed.contains(&format!("pid {}", std::process::id())) && printed.contains("gpush-sim down"),
        "{printed}"
    );
    place.refused(&["down", &dir], "end them first, or say --force");
    host.disconnect().unwrap();
    place.ok(&["down", &dir]);
    assert_eq!(place.temporary_hosts(), 0);
}

#[test]
fn kept_host_is_used_by_environment_and_removed() {
    let place = TestHost::new();
    let (dir, name) = place.up("mixed");
    let script = place.ok(&["env", &name]);
    let shell =
        Command::new("sh").arg("-c").arg(format!("{script} nvidia-smi -L; echo $NVML_SIM_STATE")).output().unwrap();
    let (code, out, _) = text(&shell);
    assert_eq!(code, 0);
    assert_eq!(out.lines().filter(|line| line.starts_with("GPU ")).count(), 6, "{out}");
    assert!(out.ends_with(&format!("{name}\n")));
    let boot = std::fs::read_to_string(dir.join("boot_id")).unwrap();
    place.ok(&["reboot", &name]);
    assert_ne!(std::fs::read_to_string(dir.join("boot_id")).unwrap(), boot);
    assert!(place.ok(&["show", &name]).contains("boot 2"));
    place.refused(&["up", "mixed", &name], "is a simulated host already");
    std::fs::write(dir.join("mine"), "").unwrap();
    let (code, _, err) = place.call(&["down", &name]);
    assert!(code == 0 && err.contains("is kept, something else is in it"), "{err}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "only what is the host's is removed");
    place.refused(&["down", &name], "is not a simulated host: nothing is removed");
    for verb in ["show", "env", "reboot"] {
        place.refused(&[verb, &name], "is not a simulated host");
    }
}

#[test]
fn processes_are_added_block_and_are_removed() {
    let place = TestHost::new();
    let (dir, name) = place.up("a30x4");
    place.refused(&["process", &name, "add", "--gpu", "0", "--spawn"], "give --gi and --ci, or --mig UUID");
    place.refused(&["process", &name, "add", "--gpu", "4", "--spawn"], "the host has GPUs 0 to 3");
    place.refused(&["process", &name, "add", "--gpu", "0", "--gi", "3", "--spawn"], "no such instance");
    place.refused(&["process", &name, "add", "--gpu", "0", "--pid", "4194305"], "no living process 4194305");
    place.refused(&["process", &name, "add", "--mig", "MIG-x", "--spawn"], "there is no MIG device MIG-x");
    let host = Host::open(&dir).unwrap();
    let gi = host.update(|machine| machine.create_gpu_instance(0, 14, None)).unwrap();
    let ci = host.update(|machine| machine.create_compute_instance(gi, 0, None)).unwrap();
    let uuid = host.read().unwrap().mig_uuid(ci).unwrap();
    place.refused(&["process", &name, "add", "--mig", &uuid, "--spawn", "--memory", "99999"], "has no 99999 MiB left");
    let add = |more: &[&str]| -> u32 {
        let all = [&["process", &name, "add", "--spawn"], more].concat();
        place.ok(&all).trim().parse().unwrap()
    };
    let first = add(&["--mig", &uuid, "--memory", "100"]);
    let second = add(&["--gpu", "0", "--gi", "3", "--ci", "0", "--kind", "handle"]);
    let status = std::fs::read_to_string(dir.join("proc").join(second.to_string()).join("status")).unwrap();
    assert!(status.contains("\nUid:"), "the files of a process name its user: {status}");
    let list = place.ok(&["process", &name, "list"]);
    assert!(list.contains(&format!("GPU 0 GI 3 CI 0: gpush-sim (pid {first}) compute 100 MiB")), "{list}");
    assert!(host.update(|machine| machine.destroy_compute_instance(ci)).is_err());
    let (code, _, err) = place.smi(&dir, &["--gpu-reset", "-i", "0"]);
    assert!(code == 255 && err.contains(&format!("in use by gpush-sim (pid {first})")), "{err}");
    place.refused(&["reset", &name, "--gpu", "0"], &format!("(pid {second})"));
    let removed = silicon::machine::Pid::find(first).unwrap();
    place.ok(&["process", &name, "remove", &first.to_string()]);
    place.refused(&["process", &name, "remove", &first.to_string()], "is on no GPU there");
    // `remove` has killed the process, but the kernel may need a moment to end it.
    while removed.is_alive() {
        std::thread::yield_now();
    }
    // The second process ends only when the host is removed.
    let found = silicon::machine::Pid::find(second).unwrap();
    place.ok(&["down", &name]);
    while found.is_alive() {
        std::thread::yield_now();
    }
}

#[test]
fn simulated_nvidia_smi_resets_only_idle_gpus() {
    let place = TestHost::new();
    let (dir, name) = place.up("a30x4");
    let host = Host::open(&dir).unwrap();
    host.update(|machine| machine.create_gpu_instance(1, 14, None)).unwrap();
    std::fs::write(dir.join("trace"), "").unwrap();
    let (code, out, err) = place.smi(&dir, &["--gpu-reset", "-i", "1"]);
    assert_eq!(
        (code, out.as_str(), err.as_str()),
        (0, "GPU 00000000:0a:00.0 was successfully reset.\nAll done.\n", "")
    );
    assert!(host.read().unwrap().gpus()[1].instances.is_empty());
    let trace = std::fs::read_to_string(dir.join("trace")).unwrap();
    assert!(trace.ends_with("gpu-reset 1  -> SUCCESS (0)\n"), "{trace}");
    let (code, _, err) = place.smi(&dir, &["-r", "--id=9"]);
    assert!(code == 6 && err.contains("there is no GPU 9"), "{err}");
    let (code, _, err) = place.smi(&dir, &["topo"]);
    assert!(code == 2 && err.contains("stand-in"), "{err}");
    place.ok(&["fault", &name, "add", "gpu-reset", "--gpu", "2", "--rc", "UNKNOWN", "--times", "1"]);
    assert_eq!(place.smi(&dir, &["-r", "-i", "0,2"]).0, 255);
    assert_eq!(place.smi(&dir, &["-r", "-i", "0,2"]).0, 0, "the fault was for once");
    host.connect().unwrap();
    let (code, _, err) = place.smi(&dir, &["-r", "-i", "0"]);
    assert!(code == 255 && err.contains(&format!("(pid {})", std::process::id())), "a client blocks: {err}");
    host.disconnect().unwrap();
}

/// The files of a killed process stayed in the host's `proc`, and gpushd took the process for a user of the GPU.
#[test]
fn killed_process_leaves_no_files_in_proc() {
    let place = TestHost::new();
    let (dir, name) = place.up("mixed");
    let spawned = || place.ok(&["process", &name, "add", "--gpu", "4", "--spawn"]).trim().parse::<u32>().unwrap();
    let (first, second) = (spawned(), spawned());
    let shown = |pid: u32| dir.join(format!("proc/{pid}/fd/4")).is_symlink();
    assert!(shown(first) && shown(second));
    let killed = silicon::machine::Pid::find(first).unwrap();
    kill(nix::unistd::Pid::from_raw(first.cast_signed()), Signal::SIGKILL).unwrap();
    while killed.is_alive() {
        std::thread::yield_now();
    }
    // The next driver call of any program notices the end.
    assert!(!place.ok(&["process", &name, "list"]).contains(&format!("pid {first})")));
    assert!(!dir.join(format!("proc/{first}")).exists() && shown(second));
    place.ok(&["process", &name, "remove", &second.to_string()]);
    assert!(!dir.join(format!("proc/{second}")).exists());
}

#[test]
fn command_does_not_panic_if_reader_closes_pipe() {
    let place = TestHost::new();
    let (dir, name) = place.up("a30x4");
    let smi = dir.join("bin/nvidia-smi").display().to_string();
    for (program, arguments) in [
        (smi.as_str(), vec!["-L"]),
        (&smi, vec!["-q"]),
        (&smi, vec!["mig", "-lgip"]),
        (&smi, vec!["compute-policy", "-h"]),
        (&smi, vec!["--query-gpu=index", "--format=csv"]),
        (&smi, vec!["--no-such-option"]),
        (env!("CARGO_BIN_EXE_gpush-sim"), vec!["show", &name]),
        (env!("CARGO_BIN_EXE_gpush-sim"), vec!["process", &name, "list"]),
    ] {
        // Both outputs are pipes whose reading ends are closed before the program starts.
        let closed = || std::io::pipe().unwrap().1;
        let mut command = Command::new(program);
        let ended = command.args(&arguments).stdin(Stdio::null()).stdout(closed()).stderr(closed()).status().unwrap();
        assert!(matches!(ended.code(), Some(0 | 2)), "{program} {arguments:?}: {ended}");
    }
}

#[test]
fn simulated_nvidia_smi_sets_and_reports_compute_modes() {
    let place = TestHost::new();
    let (dir, _) = place.up("mixed");
    let host = Host::open(&dir).unwrap();
    let set = |arguments: &[&str]| place.smi(&dir, arguments);
    assert_eq!(
        set(&["-i", "4", "-c", "EXCLUSIVE_PROCESS"]),
        (0, "Set compute mode to EXCLUSIVE_PROCESS for GPU 00000000:13:00.0.\nAll done.\n".to_owned(), String::new())
    );
    let modes = || host.read().unwrap().gpus().iter().map(|gpu| gpu.compute_mode).collect::<Vec<_>>();
    assert_eq!(modes()[4], 3);
    let (code, report, _) = set(&["-q", "-i", "4"]);
    let has = |line: &str| report.lines().any(|one| one == line);
    assert_eq!(code, 0);
    assert!(
        has("GPU 00000000:13:00.0") && has("    Compute Mode                          : Exclusive_Process"),
        "{report}"
    );
    assert!(has("    Processes                             : None"), "{report}");
    let identity = &host.hardware().slots[4].identity;
    assert!(
        has(&format!("        Sub System Id                     : 0x{:08X}", identity.pci_subsystem_id)),
        "{report}"
    );
    assert_ne!(identity.pci_subsystem_id, identity.pci_device_id);
    let (_, only, _) = set(&["-q", "-d", "COMPUTE", "-i", "4"]);
    assert!(only.contains("Compute Mode") && !only.contains("Product Name"), "{only}");
    assert_eq!(set(&["--compute-mode=0", "-i", "4"]).0, 0);
    assert_eq!(modes()[4], 0);
    assert_eq!(set(&["-c", "1"]).0, 2, "EXCLUSIVE_THREAD");
    assert_eq!(set(&["-c", "3", "-i", "0"]).0, 3, "MIG is on");
}

#[test]
fn faults_and_xids_from_the_command_line() {
    let place = TestHost::new();
    let (dir, name) = place.up("a30x4");
    place.ok(&["fault", &name, "add", "nvmlGpuInstanceDestroy", "--gpu", "1", "--rc", "in_use", "--after", "1"]);
    place.ok(&["fault", &name, "add", "nvmlDeviceSetMigMode", "--activation-status", "19"]);
    let list = place.ok(&["fault", &name, "list"]);
    assert!(list.starts_with("0: nvmlGpuInstanceDestroy after=1 gpu=1 rc=IN_USE [matched 0, fired 0]"), "{list}");
    let json: serde_json::Value = serde_json::from_str(&place.ok(&["fault", &name, "list", "--json"])).unwrap();
    assert_eq!(json[1]["rule"]["activation_status"], "IN_USE");
    place.refused(&["fault", &name, "add", "nvmlInit"], "does nothing");
    place.refused(&["fault", &name, "add", "nvmlInit", "--rc", "9", "--gpu", "7"], "there is no GPU 7");
    place.refused(&["fault", &name, "clear", "5"], "there is no rule 5; there are 2");
    let (code, _, err) = place.call(&["fault", &name, "add", "nvmlInit", "--rc", "BUSY"]);
    assert!(code == 2 && err.contains("`BUSY` is no NVML return code"), "{err}");
    assert_eq!(place.ok(&["fault", &name, "clear"]), "2 removed\n");
    place.ok(&["xid", &name, "79", "--gpu", "3"]);
    place.refused(&["xid", &name, "79", "--gpu", "4"], "there is no GPU 4");
    place.refused(&["xid", &name, "79", "--gpu", "3", "--gi", "1"], "GPU 3 has no such instance");
    let machine = Host::open(&dir).unwrap().read().unwrap();
    assert_eq!(machine.events().iter().map(|event| (event.gpu, event.data)).collect::<Vec<_>>(), [(3, 79)]);
}

#[test]
fn show_prints_drawing_and_json() {
    let place = TestHost::new();
    let (dir, name) = place.up("mixed");
    let host = Host::open(&dir).unwrap();
    let gi = host.update(|machine| machine.create_gpu_instance(0, 9, None)).unwrap();
    host.update(|machine| machine.create_compute_instance(gi, 2, None)).unwrap();
    let drawn = place.ok(&["show", &name]);
    let bar = "  |   ·    |   ·    |   ·    |   ·    |              3g.40gb              |";
    assert!(drawn.contains(bar), "{drawn}");
    assert!(drawn.contains("  GI 2  3g.40gb at 4:4\n    CI 0 3g.40gb MIG-"), "{drawn}");
    let json: serde_json::Value = serde_json::from_str(&place.ok(&["show", &name, "--json"])).unwrap();
    assert_eq!(json["gpus"][0]["state"]["instances"][0]["id"], 2);
    assert_eq!(json["gpus"][0]["mig_devices"][0]["index"], 0);
    assert_eq!(json["gpus"].as_array().unwrap().len(), 6);
    let presets = place.ok(&["presets"]);
    assert!(presets.contains("dgx-a100") && presets.contains("rtxpro6000-96"));
    // If the reader of gpush-sim's output closes the pipe early, gpush-sim must not panic.
    let piped = Command::new("sh")
        .arg("-c")
        .arg(format!(
            "{} presets | true; {} show {name} | head -1",
            env!("CARGO_BIN_EXE_gpush-sim"),
            env!("CARGO_BIN_EXE_gpush-sim")
        ))
        .output()
        .unwrap();
    assert_eq!(text(&piped).2, "");
}

#[test]
fn wrong_sources_are_explained() {
    let place = TestHost::new();
    let dir = place.path("host").display().to_string();
    let file = place.path("host.toml");
    let name = file.display().to_string();
    place.refused(&["up", &name, &dir], "host.toml: No such file");
    std::fs::write(&file, b"driver = \"\xff\"").unwrap();
    place.refused(&["up", &name, &dir], "host.toml: byte 10 is not UTF-8");
    std::fs::write(&file, "[[gpu]]\nmodel = \"a100-88\"\n").unwrap();
    place.refused(&["up", &name, &dir], "host.toml: line 2, column 9: there is no GPU model `a100-88`; did you mean");
    assert!(!Path::new(&dir).exists(), "bad input makes nothing");
    let missing = place.command().env("GPUSH_SIM_LIBRARY", "/no/such.so").args(["up", "mixed", &dir]).output().unwrap();
    assert!(text(&missing).2.contains("$GPUSH_SIM_LIBRARY names /no/such.so, which is no file"));
    assert!(!Path::new(&dir).exists());
    let blocked = place.path("library.so").join("x").display().to_string();
    place.refused(&["up", "mixed", &blocked], "cannot make");
}

#[test]
fn load_and_memory_of_a_process_change_while_it_lives() {
    let test = TestHost::new();
    let (dir, host) = test.up("a30x4");
    test.ok(&["clock", &host, "stop"]);
    test.smi(&dir, &["-i", "0", "-mig", "0"]);
    test.ok(&["reset", &host, "--gpu", "0"]);
    let pid = test.ok(&["process", &host, "add", "--gpu", "0", "--spawn", "--sm", "50", "--power", "60"]);
    let pid = pid.trim();
    let open = || Host::open(&dir).unwrap().read().unwrap();
    let reading = open().reading(0).unwrap();
    assert_eq!((reading.gpu_percent, reading.memory_percent), (50, 0));
    let before = open().energy_uj(0, Host::open(&dir).unwrap().now_ms(&open())).unwrap();
    test.ok(&["clock", &host, "advance", "10s"]);
    let after = open().energy_uj(0, Host::open(&dir).unwrap().now_ms(&open())).unwrap();
    assert_eq!(after - before, u64::from(reading.power_mw) * 10_000);
    test.ok(&["process", &host, "set", pid, "--sm", "20", "--dram", "12.5", "--memory", "900"]);
    assert!(test.ok(&["process", &host, "list"]).contains("compute 900 MiB SM 20 %"));
    assert_eq!(open().reading(0).unwrap().gpu_percent, 20);
    test.ok(&["board", &host, "--gpu", "0", "--power-limit", "20"]);
    assert_eq!(open().reading(0).unwrap().power_mw, 20_000);
    test.refused(&["board", &host, "--gpu", "0", "--power-limit", "9000"], "at most that of the model");
    test.refused(&["process", &host, "set", pid], "nothing to change");
    test.refused(&["process", &host, "set", "1", "--sm", "5"], "is on no GPU");
    test.refused(&["process", &host, "set", pid, "--memory", "999999"], "has no 999999 MiB left");
    let (code, _, err) = test.call(&["process", &host, "set", pid, "--sm", "101"]);
    assert!(code == 2 && err.contains("not a percentage from 0 to 100"), "{code} {err}");
    let now: u64 = test.ok(&["clock", &host, "show"]).trim().parse().unwrap();
    test.ok(&["clock", &host, "set", "1000"]);
    assert_eq!(test.ok(&["clock", &host, "show"]).trim(), "1000");
    test.ok(&["clock", &host, "start"]);
    assert!(now > 1_700_000_000_000);
    test.refused(
        &["fault", &host, "add", "nvmlDeviceGetPowerUsage", "--sensor", "nan"],
        "has no values that can be wrong in this way",
    );
    test.ok(&["fault", &host, "add", "nvmlGpmMetricsGet", "--sensor", "nan"]);
    assert!(test.ok(&["fault", &host, "list"]).contains("nvmlGpmMetricsGet sensor=nan"));
    test.ok(&["process", &host, "remove", pid]);
    test.ok(&["down", &host]);
}
