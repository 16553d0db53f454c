//! `gpushctl` with a real agent on simulated hosts. The tests compare the whole output, the exit
//! code, and the state of the hardware after the command.

use std::{
    io::{BufRead, BufReader, Read},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Child, ChildStderr, Command, Stdio},
    time::Instant,
};

use gpush_api::{Gpu, GpuState, Operation, OperationState, Plans};
use gpush_tests::{
    agent::{Agent, PATIENCE, Setup, gi_at, real_layout},
    host::{Host, program},
};
use insta::assert_snapshot;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::transcript::{self, transcript};

/// Uid of a user who is in no group and owns no files.
const NOBODY: u32 = 65_534;

const CONFIG: &str = r#"
[layouts]
mixed = ["3g.40gb", "2g.20gb", "1g.10gb*2"]

[[gpu]]
name = "training"
match = ["0"]
mode = "mig"
layout = "mixed"
"#;

/// Returns a `gpushctl` command on a terminal with 80 columns.
fn gpushctl(agent: &Agent, args: &[&str]) -> Command {
    transcript::gpushctl(agent, args, 80)
}

/// Runs gpushctl. Returns `$ gpushctl …`, stdout, stderr and the exit code as one text.
fn run(agent: &Agent, args: &[&str]) -> String {
    transcript(args, &gpushctl(agent, args).output().expect("gpushctl can be started"))
}

/// Replaces the parts of a text that differ between runs and builds: ages and the version.
fn steady(text: &str) -> String {
    let words = text.split_inclusive('\n').map(|line| match line.split_once(", ") {
        Some((left, right)) if right.ends_with("s ago\n") => format!("{left}, Ns ago\n"),
        Some(_) | None => line.to_owned(),
    });
    words.collect::<String>().replace(env!("CARGO_PKG_VERSION"), "9.8.7")
}

/// Runs gpushctl. Returns the exit code, and stdout as a type of the API.
fn json<T: serde::de::DeserializeOwned>(agent: &Agent, args: &[&str]) -> (i32, T) {
    let output = gpushctl(agent, args).arg("--json").output().expect("gpushctl can be started");
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stdout)));
    (output.status.code().expect("it ends by itself"), value)
}

/// Waits until the agent has applied the layouts of its config. The agent applies them at its first
/// start on a new host.
fn settled(agent: Agent) -> Agent {
    // The agent may be ready before it lists the operation that applies the layouts. Until it lists
    // this operation, the GPUs show drift.
    let until = Instant::now() + PATIENCE;
    while agent.gpus().iter().any(|gpu| gpu.state == GpuState::Changing || !gpu.drift.is_empty()) {
        assert!(Instant::now() < until, "the config's layouts never stand: {}", agent.log());
        let operations = agent.settle();
        assert!(operations.iter().all(|op| op.state == OperationState::Done), "{operations:?}");
    }
    agent
}

/// Starts an agent, and waits until the agent has applied the config's layouts.
fn started(host: &Host, config: &str) -> Agent {
    settled(Agent::start(host, config))
}

/// Starts a process on the instance of GPU 0 at memory slice 4, and returns its pid. A reading may
/// be a second old, so waits until the agent has seen the process.
fn busy(host: &Host, agent: &Agent, memory: u32) -> String {
    let pid = host.process(&format!("--gpu 0 --gi {} --ci 0 --memory {memory}", gi_at(host, 0, 4)));
    let seen = |gpu: &Gpu| {
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances).flat_map(|instance| &instance.compute);
        instances.flat_map(|compute| &compute.processes).any(|process| process.pid == Some(pid))
    };
    let until = Instant::now() + PATIENCE;
    while !seen(&agent.gpu(0)) {
        assert!(Instant::now() < until, "the process is never seen");
        std::thread::yield_now();
    }
    pid.to_string()
}

#[test]
fn layout_is_planned_applied_and_asserted() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n[[gpu]]\nmodel = \"l4\"\n");
    let agent = started(&host, CONFIG);
    let mut text = String::new();
    for args in [
        &["status"][..],
        &["mig", "apply", "--check"],
        &["mig", "apply", "--dry-run", "--gpu", "0", "--layout", "3g.40gb,1g.10gb*3"],
        &["mig", "apply", "--gpu", "0", "--layout", "3g.40gb,1g.10gb*3", "--once"],
        &["mig", "apply", "--check"],
        &["status", "--gpu", "0"],
        &["mig", "apply"],
        &["mig", "apply", "--check"],
        &["mig", "apply"],
        &["mig", "list"],
    ] {
        text += &run(&agent, args);
        text.push('\n');
    }
    assert_snapshot!(steady(&text));
    let expected = ["2g.20gb@0[2g.20gb@0]", "1g.10gb@2[1g.10gb@0]", "1g.10gb@3[1g.10gb@0]", "3g.40gb@4[3g.40gb@0]"];
    assert_eq!(real_layout(&host, 0), expected);
}

#[test]
fn failed_apply_is_rolled_back_and_used_instance_is_kept() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n");
    let agent = started(&host, CONFIG);
    let before = real_layout(&host, 0);
    // The second creation fails only once. So the rollback succeeds.
    host.fault("nvmlDeviceCreateGpuInstanceWithPlacement --after 1 --times 1 --rc INSUFFICIENT_RESOURCES");
    let text = run(&agent, &["mig", "apply", "--gpu", "0", "--layout", "1g.10gb*7"]);
    assert!(text.contains("rolled back") && text.contains("as it was before"), "{text}");
    assert!(text.contains("error: ") && text.contains("hint: "), "{text}");
    assert!(text.ends_with("[exit 1]\n"), "{text}");
    assert_eq!(real_layout(&host, 0), before);
    let (code, operation) = json::<Operation>(&agent, &["operation", "show"]);
    assert_eq!((code, operation.state), (0, OperationState::RolledBack));
    let (code, _) = json::<Plans>(&agent, &["mig", "apply", "--check"]);
    assert_eq!(code, 0, "the config's layout stands again");
    host.clear_faults();

    let pid = busy(&host, &agent, 9000);
    let refused = run(&agent, &["mig", "apply", "--gpu", "0", "--layout", "7g.80gb"]);
    assert!(refused.contains(&format!("pid {pid}")) && refused.contains("3g.40gb@4"), "{refused}");
    assert!(refused.contains("hint:") && refused.ends_with("[exit 4]\n"), "{refused}");
    assert_eq!(real_layout(&host, 0), before, "a refusal touches nothing");

    let status = run(&agent, &["status"]);
    let line = status.lines().find(|line| line.contains("3g.40gb@4")).expect("a line of the instance");
    assert!(line.contains("● 3g.40gb@4") && line.contains(&pid) && line.contains("8.8/ 39.3 GiB"), "{line}");

    // Every instance except the busy one can be replaced.
    let more = run(&agent, &["mig", "apply", "--gpu", "0", "--layout", "3g.40gb,1g.10gb*4"]);
    assert!(more.ends_with("[exit 0]\n"), "{more}");
    assert!(real_layout(&host, 0).contains(&"3g.40gb@4[3g.40gb@0]".to_owned()));
    let (_, gpus) = json::<Vec<Gpu>>(&agent, &["gpu", "show", "0"]);
    let kept = gpus[0].mig.as_ref().expect("MIG").instances.iter().find(|i| i.placement.start == 4).expect("kept");
    assert_eq!(kept.compute[0].processes[0].pid.map(|pid| pid.to_string()), Some(pid));
}

#[test]
fn offline_plan_equals_plan_of_agent() {
    let host = Host::up("mixed");
    let agent = started(&host, CONFIG);
    busy(&host, &agent, 100);
    let saved = host.scratch("host.json");
    let list = gpushctl(&agent, &["gpu", "list", "--json"]).output().expect("gpushctl can be started");
    std::fs::write(&saved, list.stdout).expect("a file");
    let config = host.scratch("offline.toml");
    std::fs::write(&config, CONFIG).expect("a file");
    let offline = ["--offline", saved.to_str().expect("a path"), "--config", config.to_str().expect("a path")];

    let mut tried = 0;
    for request in [
        &[][..],
        &["mixed", "--gpu", "0"],
        &["--gpu", "all", "--layout", "1g.10gb*2"],
        &["--gpu", "0-3", "--layout", "none"],
        &["--gpu", "0", "--layout", "7g.80gb"],
        &["--gpu", "*H100*", "--layout", "1c.3g.40gb*3,1g.10gb+me"],
        &["--gpu", "9", "--layout", "1g.10gb"],
    ] {
        for verb in ["--dry-run", "--check"] {
            let online: Vec<&str> = ["mig", "apply", verb].iter().chain(request).copied().collect();
            let off: Vec<&str> = online.iter().chain(&offline).copied().collect();
            let (online, offline) = (json::<serde_json::Value>(&agent, &online), json(&agent, &off));
            // With `--offline`, the commands in hints also have `--offline`.
            let (status, printed): (i32, serde_json::Value) = offline;
            let printed = printed.to_string().replace(&format!(" --offline {}", saved.display()), "");
            // With gpushd, the hint suggests a command that does not work offline.
            let printed = printed.replace(
                "choose GPUs that `gpushctl mig profiles` lists",
                "run `gpushctl gpu list` to see the index, UUID, PCI address and product name of each GPU",
            );
            let offline = (status, serde_json::from_str::<serde_json::Value>(&printed).expect("JSON"));
            assert_eq!(online, offline, "{verb} {request:?}");
            tried += 1;
        }
    }
    println!("{tried} plans compared");
}

#[test]
fn other_user_can_read_and_not_change() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: to ask as another user takes root");
        return;
    }
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n");
    let agent = settled(Agent::start_public(&host, CONFIG));
    let pid = busy(&host, &agent, 9000);

    // Other users may not be able to enter the build directory.
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("an open directory");
    let binary = dir.path().join("gpushctl");
    // Let another process make the copy. If this process wrote the file and another test forked at
    // the same time, executing the file would fail with ETXTBSY.
    assert!(Command::new("cp").arg(program("gpushctl")).arg(&binary).status().expect("cp can be started").success());
    let as_nobody = |args: &[&str]| {
        let mut command = Command::new(&binary);
        command.args(args).env_clear().env("LANG", "C.UTF-8").env("GPUSH_SOCKET", agent.socket());
        command.current_dir(Path::new("/")).uid(NOBODY).gid(NOBODY);
        transcript(args, &command.output().expect("gpushctl can be started"))
    };
    let status = as_nobody(&["status"]);
    assert!(status.contains("used by another user") && !status.contains(&pid), "{status}");
    assert!(status.ends_with("[exit 0]\n"), "{status}");
    let shown = as_nobody(&["gpu", "show", "0", "--json"]);
    assert!(!shown.contains("sleeper") && !shown.contains(&pid), "{shown}");

    let before = real_layout(&host, 0);
    let denied = as_nobody(&["mig", "apply", "--gpu", "0", "--layout", "none"]);
    assert!(denied.contains("uid 65534") && denied.contains("hint:") && denied.ends_with("[exit 5]\n"), "{denied}");
    assert_eq!(real_layout(&host, 0), before);
    let planned = as_nobody(&["mig", "apply", "--dry-run", "--gpu", "0", "--layout", "3g.40gb"]);
    assert!(planned.ends_with("[exit 0]\n"), "to look is free: {planned}");

    let why = ["--reason", "for all to read"];
    let made = run(&agent, &[&["mig", "apply", "--gpu", "0", "--layout", "3g.40gb@4,2g.20gb"][..], &why].concat());
    assert!(made.ends_with("[exit 0]\n"), "{made}");
    let listed = as_nobody(&["config", "overrides", "--json"]);
    assert!(listed.contains("for all to read") && !listed.contains("\"pid\""), "{listed}");
    assert!(!as_nobody(&["gpu", "show", "0", "--json"]).contains("\"pid\""));
    for args in [&["config", "overrides", "clear", "0"][..], &["config", "diff"], &["config", "reload"]] {
        let denied = as_nobody(args);
        assert!(denied.contains("uid 65534") && denied.ends_with("[exit 5]\n"), "{denied}");
    }
    assert!(as_nobody(&["config", "overrides"]).contains("for all to read"));
}

/// Replaces all ages in a text by a fixed text.
fn ageless(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("s ago") {
        let digits = rest[..at].len() - rest[..at].trim_end_matches(|c: char| c.is_ascii_digit()).len();
        out += &format!("{}Ns ago", &rest[..at - digits]);
        rest = &rest[at + "s ago".len()..];
    }
    out + rest
}

#[test]
fn override_is_created_listed_and_cleared() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\ncount = 2\n");
    let config = CONFIG.replace("[\"0\"]", "[\"0-1\"]");
    let agent = started(&host, &config);
    let mut text = String::new();
    let mut runs = |agent: &Agent, commands: &[&[&str]]| {
        for args in commands {
            text += &run(agent, args);
            text.push('\n');
        }
    };
    let reason = "the big run of this week";
    runs(
        &agent,
        &[
            &["config", "overrides"],
            &["mig", "apply", "--gpu", "0", "-l", "7g.80gb", "--reason", reason, "--expires", "8d12h", "--quiet"],
            &["mig", "apply", "--gpu", "1", "-l", "1g.10gb*2", "--quiet"],
            &["status", "--brief"],
            &["mig", "apply", "--check"],
            &["config", "overrides"],
            &["config", "diff"],
        ],
    );
    agent.write_config(config.replace("[\"0-1\"]", "[\"1\"]"));
    runs(&agent, &[&["config", "diff"], &["config", "reload"]]);
    agent.write_config(format!("[log]\nlevel = \"warn\"\n{config}"));
    runs(
        &agent,
        &[
            &["config", "reload"],
            &["config", "overrides", "clear", "0"],
            &["mig", "apply", "--quiet"],
            // `apply` applies the layout of the override. Only `config overrides clear` ends the
            // override.
            &["config", "overrides", "clear", "1"],
            &["apply", "1", "--quiet"],
            &["config", "overrides", "list", "--json"],
            &["config", "diff"],
            &["mig", "apply", "--once", "--expires", "2h"],
            &["mig", "apply", "--gpu", "0", "-l", "7g.80gb", "--expires", "someday"],
            &["config", "overrides", "clear", "1"],
        ],
    );
    let file = host.scratch("gpushd.toml");
    let text = text.replace(file.to_str().expect("a path"), "config.toml").replace(env!("CARGO_PKG_VERSION"), "9.8.7");
    assert_snapshot!(ageless(&text));
}

/// Begins an apply whose second creation hangs. Returns gpushctl and its standard error, of which the first line has been
/// read.
fn hung_apply(host: &Host, agent: &Agent, id: &str) -> (Child, BufReader<ChildStderr>) {
    host.fault("nvmlDeviceCreateGpuInstanceWithPlacement --after 1 --hang");
    let args = ["mig", "apply", "--gpu", "0", "--layout", "1g.10gb*2"];
    let mut child =
        gpushctl(agent, &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gpushctl can be started");
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    // gpushctl prints that the operation has started. The second creation of the operation hangs
    // now.
    stderr.read_line(&mut line).expect("text");
    assert_eq!(line, format!("{id}: 4 steps on GPU 0\n"));
    (child, stderr)
}

#[test]
fn operation_continues_after_ctrl_c_and_a_killed_agent() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n");
    let agent = Agent::start(&host, "");
    let (mut child, mut stderr) = hung_apply(&host, &agent, "op-1");
    kill(Pid::from_raw(child.id().try_into().expect("a pid")), Signal::SIGINT).expect("it is there");
    let mut rest = String::new();
    stderr.read_to_string(&mut rest).expect("text");
    assert_eq!(child.wait().expect("it ends").code(), Some(130), "{rest}");
    assert!(rest.contains("op-1 continues in gpushd") && rest.contains("gpushctl operation show op-1"), "{rest}");

    let (code, running) = json::<Operation>(&agent, &["operation", "show", "op-1"]);
    assert_eq!((code, running.state), (0, OperationState::Running));
    host.clear_faults();
    let ended = run(&agent, &["operation", "wait", "op-1", "--quiet"]);
    assert!(ended.contains("op-1 done") && ended.ends_with("[exit 0]\n"), "{ended}");
    assert_eq!(real_layout(&host, 0).len(), 2);

    // The next agent resumes an operation of a killed agent, and gpushctl waits for it.
    assert_eq!(agent.apply(&["0"], &["none"]).state, OperationState::Done);
    let (mut child, mut stderr) = hung_apply(&host, &agent, "op-3");
    agent.kill();
    host.clear_faults();
    let again = Agent::start(&host, "");
    let mut text = String::new();
    stderr.read_to_string(&mut text).expect("text");
    assert_eq!(child.wait().expect("it ends").code(), Some(0), "{text}");
    let shown = run(&again, &["operation", "show", "op-3"]);
    assert!(shown.contains("op-3 done") && shown.contains("gpushd ended while the operation was running"), "{shown}");
    assert_eq!(real_layout(&host, 0).len(), 2);
    assert!(run(&again, &["status"]).ends_with("[exit 0]\n"));
}

/// Tests the exit codes of docs/exit-codes.md that need an agent. `ctl/tests` has the tests of the
/// codes 2, 6 and 8.
#[test]
fn exit_codes_match_the_document() {
    let host = Host::up("mixed");
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n[[gpu]]\nmatch = [\"1\"]\nmode = \"unmanaged\"\n";
    // The rule turns MIG mode of GPU 0 off. During the reset, gpushd refuses requests that read GPUs.
    let agent = started(&host, config);
    host.fault("nvmlDeviceCreateGpuInstanceWithPlacement --gpu 2 --rc INSUFFICIENT_RESOURCES");
    let cases: [(i32, &[&str]); 15] = [
        (0, &["status"]),
        (0, &["mig", "apply", "--dry-run", "--gpu", "2", "--layout", "3g.40gb"]),
        (0, &["mig", "apply", "--check", "--gpu", "2", "--layout", "none"]),
        (0, &["mig", "apply", "--check", "--gpu", "1"]),
        (1, &["mig", "apply", "--gpu", "2", "--layout", "3g.40gb"]),
        (2, &["mig", "apply", "--dry-run", "--gpu", "2", "--layout", "9g.90gb"]),
        (2, &["mig", "apply", "--dry-run", "--gpu", "77", "--layout", "none"]),
        (2, &["operation", "show", "op-99"]),
        (3, &["mig", "apply", "--check", "--gpu", "2", "--layout", "3g.40gb"]),
        (4, &["mig", "apply", "--dry-run", "--gpu", "0", "--layout", "3g.40gb"]),
        (4, &["mig", "apply", "--gpu", "1", "--layout", "2g.12gb"]),
        (3, &["mig", "apply", "--check", "--gpu", "0", "--layout", "3g.40gb"]),
        (7, &["mig", "apply", "--dry-run", "--gpu", "4", "--layout", "3g.40gb"]),
        (7, &["mig", "apply", "--gpu", "5", "--layout", "3g.40gb"]),
        (7, &["mig", "apply", "--check", "--gpu", "4", "--layout", "none"]),
    ];
    for (status, args) in cases {
        let text = run(&agent, args);
        assert!(text.ends_with(&format!("[exit {status}]\n")), "{status} is documented: {text}");
        let (with_json, _) = json::<serde_json::Value>(&agent, args);
        assert_eq!(with_json, status, "{args:?} --json");
    }
    for args in [["operation", "show", "op-99"], ["operation", "wait", "nonsense"]] {
        let text = run(&agent, &args);
        assert!(text.contains("hint: `gpushctl operation list`") && text.ends_with("[exit 2]\n"), "{text}");
    }
}

#[test]
fn lost_gpu_is_an_error_and_others_work() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\ncount = 2\n");
    let agent = Agent::start(&host, "");
    host.fault("nvmlDeviceCreateGpuInstanceWithPlacement --gpu 0 --mutate lose");
    let text = run(&agent, &["mig", "apply", "--gpu", "0", "--layout", "1g.10gb"]);
    assert!(text.ends_with("[exit 1]\n") && text.contains("lost"), "{text}");
    // Check only the text before the hint, because the command in the hint contains the UUID.
    let printed = text.split("hint:").next().expect("text");
    assert_eq!(printed.matches("GPU-").count(), 1, "its UUID is printed once: {text}");
    let status = run(&agent, &["status"]);
    let heading = status.lines().find(|line| line.starts_with("GPU 0")).expect("the lost GPU is shown");
    assert!(heading.contains("lost"), "{status}");
    assert!(status.ends_with("[exit 0]\n"), "{status}");
    // The other GPU still works.
    let other = run(&agent, &["mig", "apply", "--gpu", "1", "--layout", "1g.10gb", "--quiet"]);
    assert!(other.ends_with("[exit 0]\n"), "{other}");
    // An agent that has never read the lost GPU knows only the index of this GPU in the driver's
    // list. Requests can use this index.
    drop(agent);
    let agent = Agent::start(&host, "");
    assert!(run(&agent, &["status"]).contains("! GPU 0 can't be identified"));
    for args in [
        &["status", "--gpu", "0"][..],
        &["gpu", "show", "0"],
        &["mig", "list", "--gpu", "0-1"],
        &["mig", "apply", "--dry-run", "--gpu", "0", "--layout", "1g.10gb"],
        &["mig", "apply", "--gpu", "1,0", "--layout", "1g.10gb"],
        &["gpu", "cordon", "0"],
        &["events", "--gpu", "0"],
    ] {
        let text = run(&agent, args);
        assert!(text.contains("error: GPU 0 can't be identified") && text.contains("the GPU has fallen off"), "{text}");
        assert!(text.ends_with("[exit 1]\n"), "{text}");
    }
    // The other GPU is shown.
    let both = run(&agent, &["status", "--gpu", "0,1"]);
    assert!(both.contains("! GPU 0 can't be identified") && both.contains("\nGPU 1  "), "{both}");
    assert!(both.ends_with("[exit 1]\n"), "{both}");
    assert!(run(&agent, &["status", "--gpu", "7"]).contains("error: there is no GPU 7"));
}

#[test]
fn commands_without_a_driver_report_it() {
    let host = Host::up("a30x4");
    let agent = Setup::on(&host).config(CONFIG).arg("--library").arg("/nonexistent/libnvidia-ml.so.1").start();
    let status = run(&agent, &["status"]);
    assert!(status.contains("no driver") && status.contains("hint:"), "{status}");
    assert!(status.ends_with("[exit 1]\n"), "{status}");
    let apply = run(&agent, &["mig", "apply"]);
    assert!(apply.contains("error:") && apply.ends_with("[exit 1]\n"), "{apply}");
    let config = run(&agent, &["config", "show"]);
    assert!(config.contains("training") && config.contains("no GPU") && config.ends_with("[exit 0]\n"), "{config}");
}

#[test]
fn effective_config_passes_check_and_bad_reload_is_shown() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n");
    let agent = started(&host, CONFIG);
    let shown = gpushctl(&agent, &["config", "show", "--effective"]).output().expect("gpushctl can be started");
    let file = host.scratch("effective.toml");
    std::fs::write(&file, &shown.stdout).expect("a file");
    let check = run(&agent, &["config", "check", file.to_str().expect("a path"), "--offline", "dgx-a100"]);
    assert!(check.contains("no errors, 1 rule, 1 layout") && check.contains("GPU 0: the layout fits"), "{check}");
    assert!(check.ends_with("[exit 0]\n"));
    agent.write_config("libary = 1\n");
    assert!(run(&agent, &["config", "reload"]).ends_with("[exit 2]\n"));
    let (after, effective) = (run(&agent, &["config", "show"]), run(&agent, &["config", "show", "--effective"]));
    for text in [after, effective] {
        assert!(text.contains("config not loaded: ") && text.contains("libary") && text.contains("training"), "{text}");
        assert!(text.ends_with("[exit 0]\n"), "{text}");
    }
}

/// Without `--offline`, `config check` uses the GPUs of the host.
#[test]
fn config_check_uses_the_gpus_of_the_running_host() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\nmig = true\n");
    let agent = started(&host, CONFIG);
    let check = |text: &str| {
        let file = host.scratch("new.toml");
        std::fs::write(&file, text).expect("a file");
        run(&agent, &["config", "check", file.to_str().expect("a path")])
    };
    let rule =
        |gpus: &str, layout: &str| format!("[[gpu]]\nmatch = \"{gpus}\"\nmode = \"mig\"\nlayout = [\"{layout}\"]\n");
    let other = check(&rule("0", "1g.10gb*7"));
    assert!(other.contains("GPU 0: the layout fits") && other.ends_with("[exit 0]\n"), "{other}");
    let misfit = check(&rule("0", "4g.40gb*2"));
    assert!(misfit.contains("refused") && misfit.ends_with("[exit 2]\n"), "{misfit}");
    let absent = check(&rule("5", "7g.80gb"));
    assert!(absent.contains("! rule 1: `5` matches no GPU of this host") && absent.ends_with("[exit 0]\n"), "{absent}");
}
