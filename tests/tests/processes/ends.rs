//! What gpushd does with unleased processes, and how it reports this.

use gpush_api::{AuditRecord, EventKind, GpuProcesses, MpsState, ProcessKind, UnleasedStep};
use gpush_tests::{agent::Setup, host::program, mps::reaches};

use super::{
    END, FAST, HOST, Job, NOBODY, OTHER, RULE, all, done, host_for_all_users, listed, start, step_event,
    unleased_and_guest,
};

#[test]
fn process_without_a_lease_is_shown_as_unleased_by_default() {
    let Some((host, agent)) = start("unleased processes of another user", "") else { return };
    let (mut unleased, mut guest) = unleased_and_guest(&host, &agent);
    let seen = agent.until("the process is seen", || {
        listed(&agent, unleased.pid().cast_unsigned()).filter(|one| one.unleased.is_some())
    });
    assert_eq!(seen.unleased.as_deref(), Some("its environment names no lease of its user"));
    assert_eq!(
        (seen.process.kind, seen.process.uid, seen.unleased_action),
        (ProcessKind::MpsClient, Some(NOBODY), None)
    );
    let seen = listed(&agent, guest.pid().cast_unsigned()).expect("the guest is seen");
    assert!(seen.unleased.is_none() && seen.lease.is_some_and(|lease| lease.starts_with('L')));
    // An MPS server is never an unleased process, even if its user has no lease.
    let all: GpuProcesses = serde_json::from_value(agent.get("/v1/processes").json()).unwrap();
    assert_eq!(all.processes.iter().filter(|one| one.unleased.is_some()).count(), 1, "{all:#?}");
    let mut command = host.command(program("gpushctl"));
    command.args(["process", "list", "--unleased"]).env("GPUSH_SOCKET", agent.socket());
    let output = command.output().expect("gpushctl");
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(unleased.lives() && guest.lives());
}

#[test]
fn unleased_process_is_warned_about_once_and_not_ended() {
    let Some((host, agent)) = start("unleased processes that are warned of", "[processes]\nunleased = \"warn\"\n")
    else {
        return;
    };
    let sleep = || Job::start(std::process::Command::new("/bin/sleep").arg("1000"), NOBODY);
    let mut draws = sleep().on(&host, "--gpu 0 --kind graphics");
    assert_eq!(done(&agent, draws.pid()), "warning in the log");
    // The next round warns about the other process. It does not repeat the warning about the first
    // process.
    let other = sleep().on(&host, "--gpu 0 --kind compute");
    assert_eq!(done(&agent, other.pid()), "warning in the log");
    let log = agent.wait_for_log(&format!("process {} ", other.pid()));
    let mut warned = log.lines().filter(|line| line.contains("WARN") && line.contains(&draws.pid().to_string()));
    let warning = warned.next().expect("a warning");
    assert!(
        warning.contains("it uses the GPU for graphics without a lease") && warning.contains("uid=65534"),
        "{warning}"
    );
    assert_eq!((warned.next(), draws.lives()), (None, true));
}

#[test]
fn unleased_process_that_ignores_sigterm_is_killed_and_reported() {
    let Some((host, agent)) = start("unleased processes that do not end", END) else { return };
    let mut listener = agent.listen("?kinds=unleased", None);
    let mut deaf = Job::deaf(NOBODY).on(&host, "--gpu 0 --kind compute");
    let asked = step_event(&mut listener, deaf.pid(), UnleasedStep::Asked);
    assert_eq!((asked.gpu, asked.uid, asked.why.as_str()), (0, Some(NOBODY), "it computes without MPS"));
    assert!(asked.command.is_some_and(|command| command.contains("trap")));
    step_event(&mut listener, deaf.pid(), UnleasedStep::Killed);
    agent.until("the process is killed", || (!deaf.lives()).then_some(()));
    let trail: Vec<AuditRecord> = serde_json::from_value(agent.get("/v1/audit?object=0").json()).expect("a trail");
    let trail: Vec<_> = trail.into_iter().filter(|record| record.action == "process.end").collect();
    assert_eq!(trail.iter().map(|record| record.result.as_str()).collect::<Vec<_>>(), ["asked to end", "killed"]);
    for record in trail {
        assert!(record.by.is_none() && record.object == asked.gpu_uuid);
        let detail = record.detail;
        assert_eq!((&detail["pid"], &detail["uid"]), (&deaf.pid().into(), &NOBODY.into()), "{detail}");
        assert_eq!(detail["reason"], "it computes without MPS");
    }
}

/// Fault: gpushd could not identify a process whose first thread had ended, and did not end it.
#[test]
fn unleased_process_without_its_first_thread_is_ended() {
    const SCRIPT: &str = "import ctypes, threading, time\n\
        threading.Thread(target=time.sleep, args=(600,)).start()\n\
        ctypes.CDLL(None).pthread_exit(None)";
    let Some((host, agent)) = start("a process without its first thread", END) else { return };
    let mut listener = agent.listen("?kinds=unleased", None);
    let mut job = Job::start(std::process::Command::new("python3").args(["-c", SCRIPT]), NOBODY);
    let stat = format!("/proc/{}/stat", job.pid());
    agent.until("the first thread has ended", || std::fs::read_to_string(&stat).ok()?.contains(") Z ").then_some(()));
    job = job.on(&host, "--gpu 0 --kind compute");
    step_event(&mut listener, job.pid(), UnleasedStep::Asked);
    agent.until("the process has ended", || (!job.lives()).then_some(()));
}

#[test]
fn unleased_process_is_killed_after_the_reported_grace_period() {
    let config = "[processes]\nunleased = \"end\"\ngrace_s = 2\n";
    let Some((host, agent)) = start("the grace of unleased processes", config) else { return };
    let mut listener = agent.listen("?kinds=unleased", None);
    let deaf = Job::deaf(NOBODY).on(&host, "--gpu 0 --kind compute");
    step_event(&mut listener, deaf.pid(), UnleasedStep::Asked);
    let first = done(&agent, deaf.pid());
    let left = first.strip_prefix("asked to end (SIGTERM), will be killed in ").expect(&first);
    // The time that is left depends on the speed of the machine. It is rounded up, so it is never
    // 0.
    assert!(["2s", "1s"].contains(&left), "{first}");
    step_event(&mut listener, deaf.pid(), UnleasedStep::Killed);
}

/// Fault: gpushd did not end a process whose effective uid was never the same in two readings. A user with subordinate uids
/// can change the uids of a process among three of them, without any privilege.
#[test]
fn unleased_process_that_changes_between_subordinate_uids_is_ended() {
    const SCRIPT: &str = "import os, signal\n\
        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n\
        os.setresgid(4200000, 4200000, 4200000)\n\
        uids = [4200000, 4200001, 4200002]\n\
        while True:\n    os.setresuid(*uids)\n    uids = uids[1:] + uids[:1]";
    let Some(host) = host_for_all_users("a process that changes its user", HOST) else { return };
    let config = format!("{END}{FAST}{RULE}");
    let agent = Setup::on(&host).config(config).subuid(&format!("{OTHER}:4200000:100\n")).start_public();
    reaches(&agent, "0", MpsState::Ready);
    let mut listener = agent.listen("?kinds=unleased", None);
    let mut job = Job::start(std::process::Command::new("python3").args(["-c", SCRIPT]), 0);
    let status = format!("/proc/{}/status", job.pid());
    let has_changed = || std::fs::read_to_string(&status).ok()?.contains("Uid:\t4200000").then_some(());
    agent.until("the process has no uid 0", has_changed);
    job = job.on(&host, "--gpu 0 --kind compute");
    step_event(&mut listener, job.pid(), UnleasedStep::Asked);
    step_event(&mut listener, job.pid(), UnleasedStep::Killed);
    agent.until("the process has ended", || (!job.lives()).then_some(()));
}

/// Fault: gpushd checked one process after the other, and read the GPUs twice for each. So with 300 unleased processes of
/// one user, it did not end the process of another user within 80 s. It now checks and records all due processes of a
/// round together, before the first signal.
#[test]
fn due_processes_are_all_recorded_before_the_first_signal() {
    const MANY: usize = 100;
    let report = END.replace("\"end\"", "\"report\"");
    let Some((host, agent)) = start("many unleased processes of one user", &report) else { return };
    let sleep = |uid| Job::start(std::process::Command::new("/bin/sleep").arg("1000"), uid);
    let mut jobs: Vec<Job> = (0..MANY).map(|_| sleep(NOBODY).on(&host, "--gpu 0 --kind compute --memory 16")).collect();
    jobs.push(sleep(OTHER).on(&host, "--gpu 0 --kind compute --memory 16"));
    let unleased = || all(&agent).processes.into_iter().filter(|one| one.unleased.is_some()).count();
    agent.until("all processes are listed", || (unleased() == jobs.len()).then_some(()));
    let mut listener = agent.listen("?kinds=unleased", None);
    agent.reload(format!("{END}\n{FAST}{RULE}"));
    let first = listener.next_of(EventKind::Unleased);
    let trail: Vec<AuditRecord> = serde_json::from_value(agent.get("/v1/audit?limit=1000").json()).expect("a trail");
    let recorded = trail.iter().filter(|one| one.action == "process.end" && one.result == "asked to end").count();
    assert_eq!(recorded, jobs.len(), "{first:?}");
    agent.until("all processes have ended", || jobs.iter_mut().all(|job| !job.lives()).then_some(()));
}
