//! Tests of `run`.

use super::*;

#[test]
fn run_becomes_the_command_and_keeps_its_status() {
    let host = Host::new();
    let agent = agent(&host);
    host.write("plain", "no program");
    let print = "printf '%s\\n' \"$GPUSH_LEASE $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PIPE_DIRECTORY\"; exit 7";
    let cases: &[&[&str]] = &[
        &["run", "--mps", "25", "--", "sh", "-c", print],
        &["run", "--", "sh", "-c", "kill -9 $$"],
        &["run", "--", "no-such-program", "--flag"],
        &["run", "--", "./plain"],
        &["run", "--lease", "L99", "--", "true"],
        &["run", "--lease", "L99", "--json", "--", "true"],
        &["run", "--mps", "0", "--", "true"],
        &["run", "--mps", "25"],
        &["run", "-o", "csv", "--", "true"],
        &["run", "--lease", "L17", "--mps", "25", "--", "true"],
    ];
    let run = |args: &[&str]| {
        // `host.command` clears the environment of gpushctl. The command that `run` starts inherits this environment
        // and needs a PATH.
        let output = host.command(args).env("PATH", "/usr/bin:/bin").output().unwrap();
        Host::transcript(args, &output)
    };
    let text: Vec<_> = cases.iter().map(|args| run(args)).collect();
    assert_snapshot!(text.concat());
    // gpushctl releases a lease only if it could not start the command. Otherwise the lease ends with the command.
    let asked = agent.asked();
    let count = |what: &str| asked.iter().filter(|one| one.as_str() == what).count();
    assert_eq!((count("POST /v1/leases"), count("POST /v1/leases/L17/release")), (4, 2), "{asked:?}");
}

#[test]
fn run_removes_variables_of_other_shares() {
    let host = Host::new();
    agent(&host);
    let output = host
        .command(&["run", "--", "/bin/sh", "-c", "echo \"<$CUDA_MPS_LOG_DIRECTORY>\""])
        .env("CUDA_MPS_LOG_DIRECTORY", "/old")
        .output()
        .unwrap();
    assert_eq!(stdout(&output), "<>\n");
}

#[test]
fn lease_is_bound_to_the_command_itself() {
    use nix::sys::signal::Signal;
    let host = Host::new();
    let agent = agent(&host);
    let waits = "trap 'echo term; exit 9' TERM; trap 'echo int; exit 8' INT; echo $$; while :; do sleep 0.01; done";
    for (sent, printed, status) in [(Signal::SIGTERM, "term\n", 9), (Signal::SIGINT, "int\n", 8)] {
        // A shell may start a background process with SIGINT ignored, and child processes inherit this. So start
        // gpushctl through `env`, which restores the default.
        let mut child = Command::new("env");
        child.args(["--default-signal=INT,TERM", "setsid", "--wait", GPUSHCTL, "run", "--", "/bin/sh", "-c", waits]);
        child.current_dir(host.dir.path()).env("GPUSH_SOCKET", "gpushd.sock").env_remove("GPUSH_LEASE");
        let Ok(mut child) = child.stdout(Stdio::piped()).spawn() else {
            println!("SKIPPED: there is no setsid");
            return;
        };
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let pid = requested(&agent).process.unwrap();
        assert_eq!(line, format!("{pid}\n"), "no process in between");
        let target = nix::unistd::Pid::from_raw(pid.try_into().unwrap());
        nix::sys::signal::kill(target, sent).unwrap();
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        assert_eq!((rest.as_str(), child.wait().unwrap().code()), (printed, Some(status)));
    }
}

#[test]
fn ignored_signals_stay_ignored_for_the_command() {
    let host = Host::new();
    agent(&host);
    for (words, signals) in [("run", "HUP"), ("run --wait=1h", "HUP INT")] {
        let script =
            format!("trap '' {signals}; exec {GPUSHCTL} {words} -- /bin/sh -c 'grep SigIgn /proc/self/status'");
        let printed = stdout(&shell(&host, &script).output().unwrap());
        let mask = u64::from_str_radix(printed.trim_start_matches("SigIgn:").trim(), 16).unwrap();
        let expected = if signals.contains("INT") { 0b11 } else { 0b1 };
        assert_eq!(mask & expected, expected, "{words}: {printed}");
    }
}

#[test]
fn run_enters_only_a_lease_of_its_user() {
    let host = Host::new();
    let agent = agent(&host);
    let text = host.run(&["run", "--lease", "L17", "--", "/bin/sh", "-c", "echo $GPUSH_LEASE"]);
    assert!(text.contains("L17\n[exit 0]"), "{text}");
    assert_eq!(agent.asked(), ["GET /v1/leases/L17/environment", "POST /v1/leases/L17/enter"]);
    assert_snapshot!(host.run(&["run", "--lease", "L18", "--", "true"]));
    assert!(agent.bodies("/v1/leases").is_empty());
}

#[test]
fn lease_of_a_slurm_job_is_entered_through_slurm() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), |request| {
        if request.path.ends_with("/environment") {
            let mut of_job = granted(17, me());
            of_job.lease.binding = LeaseBinding::Job {
                cluster: "hpc".to_owned(),
                job: 123_456,
                node: "n1".to_owned(),
                restart: 0,
                leader: None,
                cgroup: None,
                name: None,
                account: None,
            };
            return Answer::ok(&of_job);
        }
        answer(request)
    });
    assert_snapshot!(host.run(&["run", "--lease", "L17", "--", "true"]));
}

#[test]
fn lease_of_a_container_is_entered_in_the_container() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), |request| {
        let mut of_container = granted(17, me());
        let cgroup = Some(format!("/system.slice/docker-{}.scope", "0".repeat(64)));
        of_container.lease.binding = LeaseBinding::Cgroup { cgroup, pid: None, start: None };
        of_container.lease.state = gpush_api::LeaseState::Active;
        match request.path.as_str() {
            path if path.ends_with("/environment") => Answer::ok(&of_container),
            "/v1/leases/L17" => Answer::ok(&of_container.lease),
            _ => answer(request),
        }
    });
    assert_snapshot!(host.run(&["run", "--lease", "L17", "--", "true"]));
    // A process in the container already has the lease in its environment, so it needs no `--lease`.
    let args = ["run", "--", "/bin/sh", "-c", "echo $GPUSH_LEASE"];
    let output = host.command(&args).env("GPUSH_LEASE", "L17").output().unwrap();
    assert_eq!(stdout(&output), "L17\n");
}

#[test]
fn nested_run_uses_the_outer_lease_or_refuses() {
    let host = Host::new();
    let agent = agent(&host);
    let run = |args: &[&str], lease: &str| {
        let output = host.command(args).env("GPUSH_LEASE", lease).output().unwrap();
        Host::transcript(args, &output)
    };
    assert_snapshot!(run(&["run", "--mps", "25", "--", "true"], "L17"));
    assert!(agent.bodies("/v1/leases").is_empty());
    let text = run(&["run", "--", "/bin/sh", "-c", "echo $GPUSH_LEASE"], "L17");
    assert!(text.contains("L17\n[exit 0]"), "{text}");
    assert!(agent.bodies("/v1/leases").is_empty(), "it runs in the lease around it");
    // gpushctl must ignore `GPUSH_LEASE` if the lease has ended, belongs to another user, or is not a lease id.
    for around in ["L99", "L18", "17", ""] {
        let text = run(&["run", "--mps", "25", "--", "/bin/true"], around);
        assert!(text.ends_with("[exit 0]\n"), "{around}: {text}");
    }
    assert_eq!(agent.bodies("/v1/leases").len(), 4);
}

#[test]
fn warnings_of_a_grant_are_printed() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), |request| {
        let mut two = granted(17, me());
        two.warnings = vec!["with driver 550 a process uses only one of its 2 MIG devices".to_owned()];
        if request.path == "/v1/leases" { Answer::ok(&two) } else { answer(request) }
    });
    assert_snapshot!(host.run(&["run", "--mig", "1g.10gb", "--count", "2", "--", "/bin/true"]));
}
