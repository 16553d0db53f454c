//! Unmodified programs that read the driver's files, call nvidia-smi, or use rare NVML functions:
//! slurmd's AutoDetect, nvsmi, migedit and codecarbon. They run on a simulated host. If a program
//! is not installed, its test prints `SKIPPED`.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use gpush_tests::host::{Host, program};
use gpush_tests::tools::{client_script, program_on_path, python_program, slurm_nvml_plugin};
use serde_json::Value;

const HOST: &str = "[[gpu]]\nmodel = \"h100-80-sxm\"\n[[gpu]]\nmodel = \"a100-80\"\nmig = false\n";

fn run(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().expect("the program can be started");
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

/// Runs the host's simulated `nvidia-smi`.
fn smi(host: &Host, arguments: &str) -> Output {
    host.command(host.dir().join("bin/nvidia-smi")).args(arguments.split(' ')).output().expect("nvidia-smi starts")
}

fn smi_ok(host: &Host, arguments: &str) -> String {
    let output = smi(host, arguments);
    assert!(output.status.success(), "nvidia-smi {arguments}: {}", text(&output));
    text(&output)
}

/// Returns the GPU instance ids and compute instance ids of a GPU's MIG devices.
fn devices(host: &Host, gpu: usize) -> Vec<(u64, u64)> {
    let shown = host.show();
    let devices = shown["gpus"][gpu]["mig_devices"].as_array().expect("a list");
    let number = |value: &Value| value.as_u64().expect("an id");
    devices.iter().map(|d| (number(&d["gpu_instance"]), number(&d["compute_instance"]))).collect()
}

/// Slurm finds the two capability files of a MIG device through
/// `/proc/driver/nvidia-caps/mig-minors`.
#[test]
fn slurmd_lists_mig_devices_with_their_capability_files() {
    let (Some(slurmd), Some(plugin)) = (program_on_path("slurmd"), slurm_nvml_plugin()) else { return };
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED slurmd: only root can mount the driver's files over /proc/driver");
        return;
    }
    let host = Host::up(HOST);
    smi_ok(&host, "mig -i 0 -cgi 1g.20gb:0,3g.40gb:4 -C");
    smi_ok(&host, "mig -i 0 -cgi 1g.20gb:2");
    let third = smi_ok(&host, "mig -lgi").lines().find(|line| line.contains(" 2:2 ")).expect("it is listed").to_owned();
    let third = third.split_whitespace().nth(5).expect("its id").to_owned();
    smi_ok(&host, &format!("mig -gi {third} -cci 0"));

    let dir = host.scratch("slurm");
    std::fs::create_dir_all(dir.join("spool")).expect("a directory");
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("a host name");
    let name = name.trim().split('.').next().expect("a first part");
    let own = ["/usr/lib/x86_64-linux-gnu/slurm-wlm", "/usr/lib/aarch64-linux-gnu/slurm-wlm"];
    let own = own.into_iter().find(|dir| Path::new(dir).is_dir()).expect("Slurm's own plugins");
    let nvml = plugin.parent().expect("a directory").display();
    let at = dir.display();
    let gres = "gpu:nvidia_h100_80gb_hbm3_1g.20gb:2,gpu:nvidia_h100_80gb_hbm3_3g.40gb:1,gpu:nvidia_a100-sxm4-80gb:1";
    let config = format!(
        "ClusterName=test\nSlurmctldHost={name}\nPluginDir={own}:{nvml}\nGresTypes=gpu\nSlurmUser=root\n\
         SlurmdSpoolDir={at}/spool\nSlurmdLogFile={at}/slurmd.log\nSlurmdPidFile={at}/slurmd.pid\n\
         ProctrackType=proctrack/linuxproc\nAuthType=auth/none\nCredType=cred/none\n\
         NodeName={name} CPUs=1 Gres={gres}\nPartitionName=all Nodes=ALL Default=YES\n"
    );
    std::fs::write(dir.join("slurm.conf"), config).expect("slurm.conf");
    std::fs::write(dir.join("gres.conf"), "AutoDetect=nvml\n").expect("gres.conf");

    let mut command = Command::new(program("gpush-sim"));
    command.arg("exec").arg(host.dir()).arg("--").arg(slurmd).arg("-G").arg("-f").arg(dir.join("slurm.conf"));
    let output = run(&mut command);
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    let listed = |kind: &str, files: &str| {
        let line = |line: &&str| line.contains("Gres Name=gpu") && line.contains(kind) && line.contains(files);
        assert_eq!(printed.lines().filter(line).count(), 1, "{kind} {files}: {printed}");
    };
    let devices = devices(&host, 0);
    assert_eq!(devices.len(), 3);
    for (gi, ci) in devices {
        // On GPU 0, the minor number of a GPU instance is 3 + 9·GI (the driver's formula). The
        // minor numbers of its compute instances follow.
        let (access, compute) = (3 + 9 * gi, 3 + 9 * gi + 1 + ci);
        let caps = "/dev/nvidia-caps/nvidia-cap";
        listed("Type=nvidia_h100_80gb_hbm3_", &format!("File=/dev/nvidia0,{caps}{access},{caps}{compute} "));
    }
    listed("Type=nvidia_a100-sxm4-80gb", "File=/dev/nvidia1 ");
    assert_eq!(printed.matches("Type=nvidia_h100_80gb_hbm3_1g.20gb ").count(), 2, "{printed}");
}

/// If another client creates or destroys instances, the files of these instances appear or
/// disappear.
#[test]
fn capability_files_follow_instances() {
    let host = Host::up(HOST);
    let root = host.dir().join("proc/driver/nvidia/capabilities");
    let files = || {
        let mut found: Vec<String> = Vec::new();
        let mut open = vec![root.clone()];
        while let Some(dir) = open.pop() {
            for entry in std::fs::read_dir(&dir).expect("a directory").flatten() {
                match entry.path() {
                    path if path.is_dir() => open.push(path),
                    path => found.push(path.strip_prefix(&root).expect("below it").display().to_string()),
                }
            }
        }
        found.sort();
        found
    };
    assert_eq!(files(), ["mig/config", "mig/monitor"]);
    smi_ok(&host, "mig -cgi 3g.40gb -C");
    let (gi, ci) = devices(&host, 0)[0];
    let instance = format!("gpu0/mig/gi{gi}");
    let compute = format!("{instance}/ci{ci}/access");
    assert_eq!(files(), [format!("{instance}/access"), compute.clone(), "mig/config".into(), "mig/monitor".into()]);
    let minor = 3 + 9 * gi + 1 + ci;
    let printed = std::fs::read_to_string(root.join(&compute)).expect("it can be read");
    assert_eq!(printed, format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"));
    smi_ok(&host, "mig -dci");
    assert_eq!(files(), [format!("{instance}/access"), "mig/config".into(), "mig/monitor".into()]);
    smi_ok(&host, "mig -dgi");
    assert_eq!(files(), ["mig/config", "mig/monitor"]);
}

#[test]
fn nvidia_smi_manages_instances_and_answers_queries() {
    let host = Host::up(HOST);
    host.start_trace();
    let made = smi_ok(&host, "mig -i 0 -cgi 9,2g.20gb -C");
    assert_eq!(made.matches("Successfully created GPU instance").count(), 2, "{made}");
    assert_eq!(made.matches("Successfully created compute instance").count(), 2, "{made}");
    let full = smi(&host, "mig -cgi 7g.80gb");
    assert!(!full.status.success() && text(&full).contains("Insufficient Resources"), "{}", text(&full));
    let listed = smi_ok(&host, "-L");
    assert!(listed.contains("MIG 3g.40gb") && listed.contains("MIG 2g.20gb"), "{listed}");
    let in_the_way = smi(&host, "mig -dgi");
    assert!(text(&in_the_way).contains("In use by another client"), "{}", text(&in_the_way));
    let profiles = smi_ok(&host, "mig -lgip");
    let row = |name: &str| profiles.lines().find(|line| line.contains(name)).expect("a row").to_owned();
    assert!(row("MIG 3g.40gb ").contains(" 0/2 ") && row("MIG 1g.20gb ").contains(" 1/4 "), "{profiles}");
    let unknown = smi(&host, "mig -cgi 3g.20gb");
    assert_eq!((unknown.status.code(), text(&unknown).contains("Invalid Argument")), (Some(2), true));
    assert_eq!(smi(&host, "mig -i 1 -lgi").status.code(), Some(3), "MIG is off there");
    smi_ok(&host, "mig -dci");
    smi_ok(&host, "mig -dgi");
    assert_eq!(smi(&host, "mig -lgi").status.code(), Some(6));
    let calls: Vec<String> = host.trace().into_iter().map(|call| call.function).collect();
    assert_eq!(calls.iter().filter(|name| name.as_str() == "nvmlDeviceCreateGpuInstance").count(), 3, "{calls:?}");

    // Queries are answered as CSV.
    let pid = host.process("--gpu 1 --memory 700");
    let query = "index,name,memory.used,mig.mode.current,utilization.gpu";
    let with_units = smi_ok(&host, &format!("--query-gpu={query} --format=csv"));
    let lines: Vec<&str> = with_units.lines().collect();
    assert_eq!(lines[0], "index, name, memory.used [MiB], mig.mode.current, utilization.gpu [%]");
    assert_eq!(lines[1], "0, NVIDIA H100 80GB HBM3, 0 MiB, Enabled, [N/A]");
    assert!(lines[2].starts_with("1, NVIDIA A100-SXM4-80GB, 700 MiB, Disabled, "), "{with_units}");
    let bare = smi_ok(&host, "--query-gpu=memory.total --format=csv,noheader,nounits -i 1");
    assert_eq!(bare, "81920\n");
    let apps = smi_ok(&host, "--query-compute-apps=pid,used_memory --format=csv,noheader,nounits");
    assert_eq!(apps, format!("{pid}, 700\n"));
    let wrong = smi(&host, "--query-gpu=index,colour --format=csv");
    assert_eq!((wrong.status.code(), text(&wrong).contains("\"colour\" is not a valid field")), (Some(2), true));
    host.end_process(pid);

    // Fault rules apply to nvidia-smi as well as to programs that call the library.
    host.fault("nvmlDeviceCreateGpuInstance --gpu 0 --rc IN_USE --times 1");
    let refused = smi(&host, "mig -cgi 9");
    assert!(!refused.status.success() && text(&refused).contains("In use by another client"), "{}", text(&refused));
}

#[test]
fn nvsmi_migedit_and_codecarbon_read_the_host() {
    let host = Host::up(HOST);
    if let Some(nvsmi) = python_program("nvsmi") {
        let pid = host.process("--gpu 1 --memory 700");
        // nvsmi prints one JSON object per line. It leaves out GPUs in MIG mode, because the driver
        // does not report their load.
        let listed = text(&run(host.command(&nvsmi).args(["ls", "--json"])));
        let gpus: Vec<Value> = listed.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(gpus.len(), 1, "{listed}");
        assert_eq!((&gpus[0]["uuid"], &gpus[0]["mem_used"]), (&host.show()["gpus"][1]["uuid"], &700.0.into()));
        let processes = text(&run(host.command(&nvsmi).args(["ps"])));
        assert!(processes.contains(&pid.to_string()), "{processes}");
        host.end_process(pid);
    }
    let python = python_program("python");
    if let Some(python) = python.as_ref().filter(|_| python_program("migedit").is_some()) {
        let print = "import json, migedit; print(json.dumps(migedit.get_mig_profiles()))";
        let printed = run(host.command(python).args(["-c", print])).stdout;
        let profiles: Value = serde_json::from_slice(&printed).expect("JSON");
        assert_eq!(profiles[0]["1"], "1g.10gb");
        assert_eq!(profiles[0]["1.2"], "1g.20gb");
        assert_eq!(profiles[0]["7"], "7g.80gb");
    }
    if let Some(python) = python.as_ref().filter(|_| python_program("codecarbon").is_some()) {
        let read = || -> Value {
            let output = run(host.command(python).arg(client_script("energy.py")));
            serde_json::from_slice(&output.stdout).expect("JSON")
        };
        let (first, second) = (read(), read());
        let gpus = host.show()["gpus"].clone();
        for gpu in 0..2 {
            assert_eq!(first[gpu]["uuid"], gpus[gpu]["uuid"]);
            // The energy counters rise.
            let energy = |value: &Value| value.as_f64().expect("a figure");
            let readings = [&first[gpu]["first"], &first[gpu]["then"], &second[gpu]["then"]].map(energy);
            assert!(readings[0] > 0.0 && readings[0] <= readings[1] && readings[1] < readings[2], "{readings:?}");
        }
    }
}
