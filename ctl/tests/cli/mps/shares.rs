//! Shares: for a shell, for a command.

use super::*;

fn asked_for(agent: &Agent) -> MpsShareRequest {
    serde_json::from_str(&agent.bodies("/v1/mps/0/shares").pop().unwrap()).unwrap()
}

#[test]
fn an_environment_is_fit_for_eval() {
    let host = Host::new();
    let agent = agent(&host);
    let mut text = host.run(&["mps", "env", "0", "--for", "2h", "--percentage", "25", "--memory", "8G"]);
    let request = asked_for(&agent);
    assert_eq!((request.for_s, request.with_pid), (Some(7200), None));
    assert_eq!(request.memory_limit_mib, "8G".parse().ok());
    text += &host.run(&["mps", "env", "0", "--with", "4000", "--shell", "fish"]);
    assert_eq!(asked_for(&agent).with_pid, Some(4000));
    let around = host
        .command(&["mps", "env", "0", "--for", "2h", "--shell", "csh"])
        .env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1M")
        .output()
        .unwrap();
    text += &Host::transcript(&["mps", "env", "0", "--shell", "csh"], &around);
    assert_snapshot!(text);
    let script = format!("eval \"$({GPUSHCTL} mps env 0 --for 2h)\"; printf %s \"$CUDA_MPS_PIPE_DIRECTORY\"");
    let said = shell(&host, &script).output().unwrap();
    assert_eq!(String::from_utf8(said.stdout).unwrap(), "/run/it's here/g5d1b03a2");
}

/// A shell in the host, with its agent.
fn shell(host: &Host, script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]).current_dir(host.dir.path()).env("GPUSH_SOCKET", "gpushd.sock");
    command
}

/// A shell that leads a session of its own; `None` where there is no program that makes one.
fn session(host: &Host, script: &str) -> Option<Command> {
    let mut command = Command::new("setsid");
    command.args(["--wait", "/bin/sh", "-c", script]);
    command.current_dir(host.dir.path()).env("GPUSH_SOCKET", "gpushd.sock");
    let there = Command::new("setsid").arg("--version").output().is_ok_and(|output| output.status.success());
    if !there {
        println!("skipped: there is no setsid");
    }
    there.then_some(command)
}

#[test]
fn a_share_without_another_end_ends_with_the_session() {
    let host = Host::new();
    let agent = agent(&host);
    let script = format!("echo $$; eval \"$({GPUSHCTL} mps env 0)\"");
    let Some(mut leader) = session(&host, &script) else { return };
    let said = String::from_utf8(leader.output().unwrap().stdout).unwrap();
    let request = asked_for(&agent);
    assert_eq!((request.with_pid, request.for_s), (said.trim().parse().ok(), None));

    // One whose leader has gone has no end.
    let script = format!("(sleep 0.2; {GPUSHCTL} mps env 0 > said 2>&1; echo \"exit $?\" >> said; mv said done) &");
    let Some(mut leader) = session(&host, &script) else { return };
    assert!(leader.stdout(Stdio::null()).status().unwrap().success());
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !host.path("done").exists() && std::time::Instant::now() < until {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let said = std::fs::read_to_string(host.path("done")).unwrap();
    assert!(said.contains("the share needs an end") && said.contains("--for 2h"), "{said}");
    assert!(said.ends_with("exit 2\n"), "{said}");
    assert_eq!(agent.bodies("/v1/mps/0/shares").len(), 1, "nobody was asked");
}

#[test]
fn a_share_that_nobody_got_is_given_back() {
    let host = Host::new();
    let agent = agent(&host);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let status = host.command(&["mps", "env", "0", "--for", "1h"]).stdout(full).stderr(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(1));
    assert_eq!(agent.asked(), ["POST /v1/mps/0/shares", "DELETE /v1/mps/shares/s12"]);
}

#[test]
fn a_command_runs_with_a_share() {
    let host = Host::new();
    let agent = agent(&host);
    host.write("plain", "no program");
    let print = "printf '%s\\n' \"$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PIPE_DIRECTORY\"; exit 7";
    let cases: &[&[&str]] = &[
        &["mps", "run", "0", "--percentage", "25", "--", "sh", "-c", print],
        &["mps", "run", "0", "--", "sh", "-c", "kill -9 $$"],
        &["mps", "run", "0", "--", "no-such-program", "--flag"],
        &["mps", "run", "0", "--", "./plain"],
        &["mps", "run", "7", "--", "true"],
        &["mps", "run", "7", "--json", "--", "true"],
    ];
    let run = |args: &[&str]| {
        // Its own environment is clean, and that of the command is made from it.
        let output = host.command(args).env("PATH", "/usr/bin:/bin").output().unwrap();
        Host::transcript(args, &output)
    };
    let text: Vec<_> = cases.iter().map(|args| run(args)).collect();
    assert_snapshot!(text.concat());
    // Given back is what no command came to: that of one ends with it.
    let asked = agent.asked();
    let count = |what: &str| asked.iter().filter(|one| one.as_str() == what).count();
    assert_eq!((count("POST /v1/mps/0/shares"), count("DELETE /v1/mps/shares/s12")), (4, 2), "{asked:?}");
    // What was left of another share is not the command's.
    let output = host
        .command(&["mps", "run", "0", "--", "/bin/sh", "-c", "echo \"<$CUDA_MPS_LOG_DIRECTORY>\""])
        .env("CUDA_MPS_LOG_DIRECTORY", "/old")
        .output()
        .unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "<>\n");
}

#[test]
fn a_share_is_bound_to_the_command_itself() {
    use nix::sys::signal::Signal;
    let host = Host::new();
    let agent = agent(&host);
    let waits = "trap 'echo term; exit 9' TERM; trap 'echo int; exit 8' INT; echo $$; while :; do sleep 0.01; done";
    for (sent, says, status) in [(Signal::SIGTERM, "term\n", 9), (Signal::SIGINT, "int\n", 8)] {
        // What ran in the background was started to ignore SIGINT, and what it starts would be.
        let mut child = Command::new("env");
        child
            .args(["--default-signal=INT,TERM", "setsid", "--wait", GPUSHCTL])
            .args(["mps", "run", "0", "--", "/bin/sh", "-c", waits]);
        let child =
            child.current_dir(host.dir.path()).env("GPUSH_SOCKET", "gpushd.sock").stdout(Stdio::piped()).spawn();
        let Ok(mut child) = child else {
            println!("skipped: there is no setsid");
            return;
        };
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let pid = asked_for(&agent).with_pid.unwrap();
        assert_eq!(line, format!("{pid}\n"), "nobody stands in between");
        signal(pid, sent);
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        assert_eq!((rest.as_str(), child.wait().unwrap().code()), (says, Some(status)));
    }
}

#[test]
fn what_was_ignored_stays_so_for_the_command() {
    let host = Host::new();
    agent(&host);
    // As nohup does it.
    let script = format!("trap '' HUP; exec {GPUSHCTL} mps run 0 -- /bin/sh -c 'grep SigIgn /proc/self/status'");
    let said = String::from_utf8(shell(&host, &script).output().unwrap().stdout).unwrap();
    let mask = u64::from_str_radix(said.trim_start_matches("SigIgn:").trim(), 16).unwrap();
    assert_eq!(mask & 1, 1, "{said}");
}
