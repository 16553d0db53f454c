//! Tests of `lease request` and `lease env`.

use super::*;

#[test]
fn request_flags_reach_the_agent() {
    let host = Host::new();
    let agent = agent(&host);
    for (words, expected) in [
        (
            &["--mps", "25", "--memory", "8G", "--for", "2h"][..],
            r#"{"kind":"mps","percentage":25,"memory_limit_mib":8192}"#,
        ),
        (&["--mig", "1g.10gb", "--count", "2", "--for", "2h"], r#"{"kind":"mig_profile","profile":"1g.10gb"}"#),
        (&["--request", "memory=10G,slices=2", "--for", "2h"], r#"{"kind":"mig_size","memory_mib":10240,"slices":2}"#),
        (&["--for", "2h"], r#"{"kind":"default"}"#),
    ] {
        let status = host.command(&[&["lease", "request"], words].concat()).output().unwrap().status;
        assert_eq!(status.code(), Some(0), "{words:?}");
        let request = requested(&agent);
        assert_eq!(serde_json::to_string(&request.share).unwrap(), expected);
        assert_eq!((request.duration_s, request.process, request.wait), (Some(7200), None, LeaseWait::No));
    }
    let words = ["lease", "request", "--target", "1:2g.20gb@2", "--with", "4000", "--user", "7", "-i", "0,3"];
    assert_eq!(host.command(&words[..8]).output().unwrap().status.code(), Some(0));
    let request = requested(&agent);
    assert_eq!(request.target.as_deref(), Some("1:2g.20gb@2"));
    assert_eq!((request.process, request.holder), (Some(4000), Some(7)));
    // A request must not have both `-i` and `--target`.
    assert_eq!(host.command(&words).output().unwrap().status.code(), Some(2));
}

#[test]
fn request_prints_the_lease_and_how_to_use_it() {
    let host = Host::new();
    let agent = agent(&host);
    let mut text = host.run(&["lease", "request", "--mps", "25", "--for", "2h"]);
    text += &host.run(&["lease", "request", "--mps", "25", "--for", "2h", "-o", "name"]);
    text += &host.run(&["lease", "env", "L17"]);
    text += &host.run(&["lease", "env", "L17", "-o", "docker"]);
    text += &host.run(&["lease", "env", "--mps", "25", "--with", "4000", "-o", "fish"]);
    text += &host.run(&["lease", "env", "--mps", "25", "--with", "4000", "-o", "tcsh"]);
    text += &host.run(&["lease", "env", "L17", "--json"]);
    assert_snapshot!(text);
    assert_eq!(requested(&agent).process, Some(4000));
}

#[test]
fn evaluated_environment_sets_the_variables() {
    let host = Host::new();
    agent(&host);
    let script = format!("eval \"$({GPUSHCTL} lease env L17)\"; printf %s \"$GPUSH_LEASE $CUDA_MPS_PIPE_DIRECTORY\"");
    assert_eq!(stdout(&shell(&host, &script).output().unwrap()), "L17 /run/gpush-mps/g5d1b03a2/1");
}

/// `eval` ignores the exit status of gpushctl. If gpushctl did not print `false`, the next program would run without
/// the lease.
#[test]
fn failed_lease_env_makes_eval_fail() {
    let host = Host::new();
    agent(&host);
    for words in [
        "lease env L99",
        "lease env x17",
        "lease env --mps 101",
        "lease env --nothing",
        "lease env L17 --mps 25",
        "-o csv lease env L17",
        "--socket nowhere lease env L17",
        "lease env L17 -o docker --socket nowhere",
    ] {
        let script = format!("eval \"$({GPUSHCTL} {words} 2> /dev/null)\" && echo went on");
        let output = shell(&host, &script).output().unwrap();
        assert_eq!((stdout(&output).as_str(), output.status.success()), ("", false), "{words}");
    }
    let text = host.run(&["lease", "env", "L99", "--json"]);
    assert!(!text.contains("false\n[") && text.contains("\"code\": \"not_found\""), "{text}");
}

#[test]
fn environment_with_unknown_variable_is_refused_and_released() {
    let host = Host::new();
    let agent = Agent::listen(&host.path("gpushd.sock"), |request| {
        if request.path == "/v1/leases" {
            let mut wrong = granted(17, me());
            wrong.environment.push(("LD_PRELOAD".to_owned(), "/tmp/x.so".to_owned()));
            return Answer::ok(&wrong);
        }
        answer(request)
    });
    for words in [&["lease", "env", "--for", "1h"][..], &["run", "--", "true"]] {
        let text = host.run(words);
        assert!(text.contains("LD_PRELOAD") && !text.contains("[exit 0]"), "{text}");
        assert_eq!(agent.asked().last().unwrap(), "POST /v1/leases/L17/release");
    }
}

#[test]
fn lease_whose_output_fails_is_released() {
    let host = Host::new();
    let agent = agent(&host);
    for words in [&["lease", "env", "--for", "1h"][..], &["lease", "request", "--for", "1h"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let status = host.command(words).stdout(full).stderr(Stdio::null()).status().unwrap();
        assert_eq!(status.code(), Some(1), "{words:?}");
        assert_eq!(agent.asked().last().unwrap(), "POST /v1/leases/L17/release");
    }
}

/// Returns a command that runs a shell as session leader. Returns `None` if this host has no program `setsid`.
fn session(host: &Host, script: &str) -> Option<Command> {
    let mut command = Command::new("setsid");
    command.args(["--wait", "/bin/sh", "-c", script]);
    command.current_dir(host.dir.path()).env("GPUSH_SOCKET", "gpushd.sock");
    let exists = Command::new("setsid").arg("--version").output().is_ok_and(|output| output.status.success());
    if !exists {
        println!("SKIPPED: there is no setsid");
    }
    exists.then_some(command)
}

#[test]
fn lease_without_another_end_is_bound_to_the_session() {
    let host = Host::new();
    let agent = agent(&host);
    let script = format!("echo $$; eval \"$({GPUSHCTL} lease env --mps 25)\"");
    let Some(mut leader) = session(&host, &script) else { return };
    let leader = stdout(&leader.output().unwrap());
    let request = requested(&agent);
    assert_eq!((request.process, request.duration_s), (leader.trim().parse().ok(), None));
}

/// The script continues in the background after its session leader has ended. The end of stdin shows that the leader
/// has ended.
#[test]
fn lease_env_without_a_session_leader_sends_no_process() {
    let host = Host::new();
    let agent = agent(&host);
    let script = format!("(cat; {GPUSHCTL} lease env --mps 25 > out 2>&1; echo \"exit $?\" >> out) <&3 & exit 0");
    let Some(mut leader) = session(&host, &format!("exec 3<&0; {script}")) else { return };
    let mut leader = leader.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (stdin, mut inherited) = (leader.stdin.take(), leader.stdout.take().unwrap());
    assert!(leader.wait().unwrap().success());
    drop(stdin);
    // The background process has inherited stdout, so stdout ends when this process ends.
    inherited.read_to_end(&mut Vec::new()).unwrap();
    let text = std::fs::read_to_string(host.path("out")).unwrap();
    assert!(text.ends_with("exit 0\n"), "{text}");
    // gpushd decides whether the lease has an end: a quota may set one.
    assert_eq!(requested(&agent).process, None);
}

#[test]
fn waiting_shows_the_place_in_the_queue() {
    let host = Host::new();
    let polls = std::sync::Arc::new(AtomicUsize::new(0));
    let seen = std::sync::Arc::clone(&polls);
    // The agent grants the lease only after gpushctl has read the queue twice.
    Agent::listen(&host.path("gpushd.sock"), move |request: &Request| match request.method.as_str() {
        "POST" => {
            while seen.load(Ordering::SeqCst) < 2 {
                std::thread::sleep(Duration::from_millis(5));
            }
            Answer::ok(&granted(17, me()))
        }
        _ if request.path == "/v1/leases" => {
            seen.fetch_add(1, Ordering::SeqCst);
            let pids = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
                let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
                let line = std::fs::read(entry.path().join("cmdline")).ok()?;
                let dir = std::fs::read_link(entry.path().join("cwd")).ok()?;
                (line.windows(4).any(|part| part == b"wait") && dir.join("gpushd.sock").exists()).then_some(pid)
            });
            let waiting = |pid| {
                let by = Actor { uid: me(), user: None, pid: Some(pid) };
                Lease { asked_by: Some(by), ..queued() }
            };
            Answer::ok(&pids.map(waiting).collect::<Vec<_>>())
        }
        _ => answer(request),
    });
    assert_snapshot!(host.run(&["lease", "env", "--whole", "--count", "2", "--for", "1h", "--wait=1h"]));
}
