//! Actions on unleased processes, and the reports of these actions.

use gpush_api::{AuditRecord, GpuProcesses, MpsState, ProcessKind, StrayStep};
use gpush_tests::{host::program, mps::reaches};

use super::{END, FAST, Job, NOBODY, RULE, done, listed, start, start_on, stray_and_guest, told, witness};

#[test]
fn process_without_a_lease_is_shown_as_stray_by_default() {
    let Some((host, agent)) = start("strays of another user", "") else { return };
    let (mut stray, mut guest) = stray_and_guest(&host, &agent);
    let seen = agent
        .until("the stray is seen", || listed(&agent, stray.pid().cast_unsigned()).filter(|one| one.stray.is_some()));
    assert_eq!(seen.stray.as_deref(), Some("it names none of its user's leases"));
    assert_eq!((seen.process.kind, seen.process.uid, seen.stray_action), (ProcessKind::MpsClient, Some(NOBODY), None));
    let seen = listed(&agent, guest.pid().cast_unsigned()).expect("the guest is seen");
    assert!(seen.stray.is_none() && seen.lease.is_some_and(|lease| lease.starts_with('L')));
    // MPS servers are not strays, regardless of their user.
    let all: GpuProcesses = serde_json::from_value(agent.get("/v1/processes").json()).unwrap();
    assert_eq!(all.processes.iter().filter(|one| one.stray.is_some()).count(), 1, "{all:#?}");
    let mut command = host.command(program("gpushctl"));
    command.args(["process", "list", "--stray"]).env("GPUSH_SOCKET", agent.socket());
    let output = command.output().expect("gpushctl");
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(stray.lives() && guest.lives());
}

#[test]
fn stray_is_warned_about_once_and_not_ended() {
    let Some((host, agent)) = start("strays that are warned of", "[processes]\nstray = \"warn\"\n") else { return };
    let sleep = || Job::start(std::process::Command::new("/bin/sleep").arg("1000"), NOBODY);
    let mut draws = sleep().on(&host, "--gpu 0 --kind graphics");
    assert_eq!(done(&agent, draws.pid()), "the log warns of it");
    // A later round warns about the next process, and not about this one again.
    let other = sleep().on(&host, "--gpu 0 --kind compute");
    assert_eq!(done(&agent, other.pid()), "the log warns of it");
    let log = agent.wait_for_log(&format!("stray process {} ", other.pid()));
    let mut warned = log.lines().filter(|line| line.contains("WARN") && line.contains(&draws.pid().to_string()));
    let warning = warned.next().expect("a warning");
    assert!(warning.contains("it draws, and has no lease") && warning.contains("uid=65534"), "{warning}");
    assert_eq!((warned.next(), draws.lives()), (None, true));
}

/// Processes of root, and of users who hold a lease, are reported and not ended.
#[test]
fn stray_is_ended_only_when_its_user_has_no_lease() {
    let Some((host, agent)) = start("strays that are ended", END) else { return };
    let (mut theirs, mut guest) = stray_and_guest(&host, &agent);
    // A process of root that computes without MPS is reported, and not ended.
    let root = host.process("--gpu 0 --kind compute");
    let left = agent.until("the action on root's process is reported", || listed(&agent, root)?.stray_action);
    assert_eq!(left, "left: root's processes are never ended");
    assert_eq!(done(&agent, theirs.pid().cast_unsigned()), "left: its user holds a lease");
    let mut renewed = Job::start(std::process::Command::new("/bin/sleep").arg("1000").env("GPUSH_LEASE", "s1"), NOBODY);
    renewed = renewed.on(&host, "--gpu 0 --kind mps");
    assert_eq!(done(&agent, renewed.pid()), "left: its user holds a lease");
    witness(&host, &agent, "--gpu 0 --kind compute");
    agent.wait_for_log("asked to end");
    assert!(guest.lives() && guest.said().is_empty() && theirs.lives() && renewed.lives());
    assert!(std::path::Path::new(&format!("/proc/{root}")).exists());
}

/// The daemon still runs, but the rule no longer has mode `mps`.
#[test]
fn gpu_with_another_desired_mode_has_no_strays() {
    for mode in ["exclusive", "timeslice"] {
        let keep = "mps = { compute_mode = \"keep\" }\n";
        let config = format!("{END}{FAST}{RULE}{keep}[[gpu]]\nmatch = [\"1\"]\nmode = \"mps\"\n");
        let two = "[[gpu]]\nmodel = \"l4\"\ncount = 2\n";
        let Some((host, agent)) = start_on("strays after a change of mode", two, &config) else { return };
        reaches(&agent, "1", MpsState::Ready);
        agent.reload(config.replacen(
            "mode = \"mps\"\nmps = { compute_mode = \"keep\" }",
            &format!("mode = \"{mode}\""),
            1,
        ));
        let mut job = Job::start(std::process::Command::new("/bin/sleep").arg("1000"), NOBODY);
        job = job.on(&host, "--gpu 0 --kind compute");
        witness(&host, &agent, "--gpu 1 --kind compute");
        assert!(job.lives(), "{mode}");
        assert_eq!(listed(&agent, job.pid()).expect("the process is listed").stray, None, "{mode}");
    }
}

#[test]
fn stray_that_ignores_sigterm_is_killed_and_reported() {
    let Some((host, agent)) = start("strays that do not end", END) else { return };
    let mut listener = agent.listen("?kinds=stray", None);
    let mut deaf = Job::deaf(NOBODY).on(&host, "--gpu 0 --kind compute");
    let asked = told(&mut listener, deaf.pid(), StrayStep::Asked);
    assert_eq!((asked.gpu, asked.uid, asked.why.as_str()), (0, Some(NOBODY), "it computes past MPS"));
    assert!(asked.command.is_some_and(|command| command.contains("trap")));
    told(&mut listener, deaf.pid(), StrayStep::Killed);
    agent.until("the process is killed", || (!deaf.lives()).then_some(()));
    let trail: Vec<AuditRecord> = serde_json::from_value(agent.get("/v1/audit?object=0").json()).expect("a trail");
    let trail: Vec<_> = trail.into_iter().filter(|record| record.action == "process.end").collect();
    assert_eq!(trail.iter().map(|record| record.result.as_str()).collect::<Vec<_>>(), ["asked to end", "killed"]);
    for record in trail {
        assert!(record.by.is_none() && record.object == asked.gpu_uuid);
        let detail = record.detail;
        assert_eq!((&detail["pid"], &detail["uid"]), (&deaf.pid().into(), &NOBODY.into()), "{detail}");
        assert_eq!(detail["reason"], "it computes past MPS");
    }
}

#[test]
fn stray_is_killed_after_the_reported_grace_period() {
    let config = "[processes]\nstray = \"end\"\ngrace_s = 2\n";
    let Some((host, agent)) = start("the grace of strays", config) else { return };
    let mut listener = agent.listen("?kinds=stray", None);
    let deaf = Job::deaf(NOBODY).on(&host, "--gpu 0 --kind compute");
    told(&mut listener, deaf.pid(), StrayStep::Asked);
    let first = done(&agent, deaf.pid());
    let left = first.strip_prefix("asked to end (SIGTERM), killed in ").expect(&first);
    // The time left depends on the speed of the machine. It is rounded up, so it is never 0.
    assert!(["2 s", "1 s"].contains(&left), "{first}");
    told(&mut listener, deaf.pid(), StrayStep::Killed);
}
