//! Processes without a lease: what gpushd shows, warns of and ends, and what it leaves. The processes are real; the
//! driver lists them because a script says so. Each test asks for a round, so none waits for the next one.
//!
//! | file | subject |
//! |---|---|
//! | `allowed` | processes that the config allows |
//! | `changed` | processes that change their user; a lost database |
//! | `tenants` | processes on devices of others |

mod allowed;
mod changed;
mod tenants;

use std::{fs, os::unix::fs::PermissionsExt, process::Command};

use gpush_api::{AuditRecord, Gpu, GpuProcess, GpuProcesses, GpuState, LeaseGrant, MpsDaemon, ProcessKind};
use gpush_nvml::ErrorKind;
use serde_json::{Value, json};

use super::{
    InProcess,
    programs::{UserProgram, skips_other_users},
};
use crate::processes;

/// A user with a lease, and a user without one.
const HOLDER: u32 = 3000;
const OTHER: u32 = 3001;

/// Keeps the compute mode: in EXCLUSIVE_PROCESS, the driver would refuse programs that bypass MPS.
const RULE: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nmps = { compute_mode = \"keep\" }\n";

fn ends(grace_s: u32, allow: &str) -> String {
    format!("[processes]\nunleased = \"end\"\ngrace = \"{grace_s}s\"\nallow = [{allow}]\n{RULE}")
}

impl InProcess {
    async fn listed(&self, job: &UserProgram) -> GpuProcess {
        self.until("the process is listed", async || {
            let all: GpuProcesses = self.get("/v1/processes").await;
            all.processes.into_iter().find(|one| one.process.pid == Some(job.pid()))
        })
        .await
    }

    /// Executes a round of the check.
    async fn check(&self) {
        processes::check_once(&self.unleased).await;
    }

    /// Returns what gpushd did about a process. If it has done nothing yet, because it could not check the process before,
    /// executes another round.
    async fn action(&self, job: &UserProgram) -> String {
        self.until("gpushd does something about the process", async || {
            let action = self.listed(job).await.unleased_action;
            if action.is_none() {
                self.check().await;
            }
            action
        })
        .await
    }

    /// Starts a program that uses a GPU.
    fn job(&self, uid: u32, gpu: usize, kind: ProcessKind) -> UserProgram {
        let job = UserProgram::sleep(uid);
        self.gpus.use_as(gpu, job.pid(), kind);
        job
    }

    /// Starts a program that ignores SIGTERM and computes on GPU 0.
    fn deaf(&self, uid: u32) -> UserProgram {
        let script = "trap '' TERM; while :; do sleep 1; done";
        let job = UserProgram::start(Command::new("/bin/sh").args(["-c", script]), uid);
        self.gpus.use_as(0, job.pid(), ProcessKind::Compute);
        job
    }

    async fn ended_by_gpushd(&self, job: &mut UserProgram) {
        let job = gpush_locked::Locked::new(job);
        self.until("the process has ended", async || (!job.lock().lives()).then_some(())).await;
    }

    /// Returns the steps that the audit trail has about a process.
    async fn steps(&self, job: &UserProgram) -> Vec<String> {
        let trail: Vec<AuditRecord> = self.get("/v1/audit?limit=1000").await;
        let is = |record: &&AuditRecord| record.action == "process.end" && record.detail["pid"] == json!(job.pid());
        trail.iter().filter(is).map(|record| record.result.clone()).collect()
    }
}

/// Starts gpushd with a daemon that is ready, or says what is not tested.
async fn start(what: &str, config: &str) -> Option<InProcess> {
    if skips_other_users(what) {
        return None;
    }
    let host = InProcess::start("dgx-h100", 1, config).await;
    host.apply_rules(&["0"]).await;
    Some(host)
}

/// Starts two clients of one user: one without `GPUSH_LEASE` in its environment, and one with it.
async fn unleased_and_guest(host: &InProcess) -> (UserProgram, UserProgram) {
    let granted = host.share_for(HOLDER, "0", json!({})).await.expect("a lease");
    let bare: Vec<_> = granted.environment.iter().filter(|(name, _)| name != "GPUSH_LEASE").cloned().collect();
    let guest = host.client("0", &granted).await;
    let unleased = UserProgram::with_environment(HOLDER, &bare);
    host.connect("0", &unleased).await;
    (unleased, guest)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_without_a_lease_is_shown_as_unleased_by_default() {
    let Some(host) = start("unleased processes of another user", RULE).await else { return };
    let (mut unleased, mut guest) = unleased_and_guest(&host).await;
    host.check().await;
    let seen = host.listed(&unleased).await;
    assert_eq!(seen.unleased.as_deref(), Some("its environment names no lease of its user"));
    let shown = (seen.process.kind, seen.process.uid, seen.unleased_action);
    assert_eq!(shown, (ProcessKind::MpsClient, Some(HOLDER), None));
    let seen = host.listed(&guest).await;
    assert!(seen.unleased.is_none() && seen.lease.is_some_and(|lease| lease.starts_with('L')));
    assert!(unleased.lives() && guest.lives());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unleased_process_is_warned_about_and_not_ended() {
    let config = format!("[processes]\nunleased = \"warn\"\n{RULE}");
    let Some(host) = start("unleased processes that are warned of", &config).await else { return };
    let mut draws = host.job(HOLDER, 0, ProcessKind::Graphics);
    for _ in 0..2 {
        host.check().await;
        assert_eq!(host.action(&draws).await, "warning in the log");
    }
    let seen = host.listed(&draws).await;
    assert_eq!(seen.unleased.as_deref(), Some("it uses the GPU for graphics without a lease"));
    assert!(draws.lives() && host.steps(&draws).await.is_empty());
}

/// gpushd reports processes of root and processes of users with a lease, but does not end them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unleased_process_is_ended_only_when_its_user_has_no_lease() {
    let Some(host) = start("unleased processes that are ended", &ends(0, "")).await else { return };
    let (mut theirs, mut guest) = unleased_and_guest(&host).await;
    let mut root = host.job(0, 0, ProcessKind::Compute);
    let mut wrong = UserProgram::with_environment(HOLDER, &[("GPUSH_LEASE".to_owned(), "s1".to_owned())]);
    host.gpus.use_as(0, wrong.pid(), ProcessKind::MpsClient);
    // The environment is empty, as if the process had overwritten it, or were in execve.
    let mut bare = UserProgram::start(Command::new("/bin/sleep").arg("1000").env_clear(), HOLDER);
    host.gpus.use_as(0, bare.pid(), ProcessKind::MpsClient);
    let mut other = host.job(OTHER, 0, ProcessKind::Compute);
    host.check().await;
    assert_eq!(host.action(&root).await, "not ended: gpushd never ends processes of root");
    for one in [&theirs, &wrong, &bare] {
        assert_eq!(host.action(one).await, "not ended: its user holds a lease");
    }
    host.ended_by_gpushd(&mut other).await;
    assert!([&mut theirs, &mut guest, &mut root, &mut wrong, &mut bare].into_iter().all(UserProgram::lives));
}

/// The daemon still runs, but its rule does not have mode `mps` any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpu_with_another_desired_mode_has_no_unleased_processes() {
    for mode in ["exclusive", "timeslice"] {
        let Some(host) = start("unleased processes after a change of mode", &ends(0, "")).await else { return };
        let another = format!("mode = \"{mode}\"");
        host.reload(&ends(0, "").replace("mode = \"mps\"\nmps = { compute_mode = \"keep\" }", &another)).await;
        let mut job = host.job(OTHER, 0, ProcessKind::Compute);
        host.check().await;
        assert!(job.lives(), "{mode}");
        assert_eq!(host.listed(&job).await.unleased, None, "{mode}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_that_ignores_sigterm_is_killed_after_its_grace() {
    let Some(host) = start("unleased processes that do not end", &ends(3600, "")).await else { return };
    let mut deaf = host.deaf(HOLDER);
    host.check().await;
    let action = host.action(&deaf).await;
    assert!(action.starts_with("asked to end (SIGTERM), will be killed in "), "{action}");
    host.check().await;
    assert!(deaf.lives() && host.steps(&deaf).await == ["asked to end"], "it has its grace");
    host.reload(&ends(0, "")).await;
    let mut killed = host.deaf(OTHER);
    host.check().await;
    host.check().await;
    host.ended_by_gpushd(&mut killed).await;
    assert_eq!(host.steps(&killed).await, ["asked to end", "killed"]);
    let trail: Vec<AuditRecord> = host.get("/v1/audit?object=0").await;
    let uuid = &host.gpus().await[0].uuid;
    let record = trail.iter().find(|record| record.result == "killed").expect("a record");
    assert!(record.by.is_none() && record.object == *uuid.as_str(), "{record:?}");
    assert_eq!((&record.detail["uid"], &record.detail["reason"]), (&json!(OTHER), &json!("it computes without MPS")));
}

/// In the environment, `GPUSH_LEASE` comes after 300 KiB of other variables. A process that gpushd has seen with the
/// variable keeps its lease when it executes a program without it. A child gets the lease of its parent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_keeps_lease_named_late_in_its_environment() {
    // No other test has this user, because the processes here name their lease without its host.
    const HOLDER: u32 = 3002;
    let Some(host) = start("jobs that hide their lease", &ends(0, "")).await else { return };
    let id = host.share_for(HOLDER, "0", json!({})).await.expect("a lease").lease.id.to_string();
    let on_gpu = |pid: u32| host.gpus.use_as(0, pid, ProcessKind::MpsClient);
    let mut command = Command::new("/bin/sleep");
    command.arg("1000").env("GPUSH_LEASE", &id);
    for name in ["A1", "A2", "A3"] {
        command.env(name, "x".repeat(100 << 10));
    }
    let mut long = UserProgram::start(&mut command, HOLDER);
    on_gpu(long.pid());
    assert_eq!(host.listed(&long).await.lease.as_deref(), Some(id.as_str()));

    let go = host.host.path("go");
    fs::set_permissions(host.host.path(""), fs::Permissions::from_mode(0o755)).expect("an open directory");
    let script = "while [ ! -e \"$0\" ]; do sleep 0.01; done; exec /usr/bin/env -i A=b /bin/sleep 1000";
    let mut command = Command::new("/bin/sh");
    let mut changed = UserProgram::start(command.args(["-c", script]).arg(&go).env("GPUSH_LEASE", &id), HOLDER);
    on_gpu(changed.pid());
    assert_eq!(host.listed(&changed).await.lease.as_deref(), Some(id.as_str()));
    fs::write(&go, "").expect("a file");
    host.until("the process runs the other program", async || {
        fs::read(format!("/proc/{}/environ", changed.pid())).is_ok_and(|now| now == b"A=b\0").then_some(())
    })
    .await;
    assert_eq!(host.listed(&changed).await.lease.as_deref(), Some(id.as_str()));

    let script = "/usr/bin/env -i A=b /bin/sleep 1000 & wait";
    let mut command = Command::new("/bin/sh");
    let mut parent = UserProgram::start(command.args(["-c", script]).env("GPUSH_LEASE", &id), HOLDER);
    let child = host
        .until("the child runs the program", async || {
            let child = gpush_host::proc::children(parent.pid().cast_signed()).into_iter().next()?;
            fs::read(format!("/proc/{child}/environ")).is_ok_and(|now| now == b"A=b\0").then_some(child)
        })
        .await;
    on_gpu(child.cast_unsigned());
    host.check().await;
    let all: GpuProcesses = host.get("/v1/processes").await;
    let shown = all.processes.iter().find(|one| one.process.pid == Some(child.cast_unsigned())).expect("the child");
    assert_eq!(shown.lease.as_deref(), Some(id.as_str()));
    assert!(long.lives() && changed.lives() && parent.lives());
    let _ended = nix::sys::signal::kill(nix::unistd::Pid::from_raw(child), nix::sys::signal::Signal::SIGKILL);
}

/// Fault: `mps show` said that a client runs without a lease, and `ps` named a lease of this client.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mps_daemon_and_process_list_name_the_same_leases() {
    let Some(host) = start("the leases of MPS clients", RULE).await else { return };
    let mut leases: Vec<LeaseGrant> = Vec::new();
    for _ in 0..2 {
        leases.push(host.share_for(HOLDER, "0", json!({ "percentage": 20 })).await.expect("a lease"));
    }
    let mut bare = leases[1].environment.clone();
    bare.retain(|(name, _)| name != "GPUSH_LEASE");
    let unnamed = UserProgram::with_environment(HOLDER, &bare);
    host.connect("0", &unnamed).await;
    let named = host.client("0", &leases[1]).await;
    let daemon: MpsDaemon = host.get("/v1/mps/0").await;
    assert_eq!(daemon.clients.len(), 2);
    for (job, expected) in [(&unnamed, (&leases[0], true)), (&named, (&leases[1], false))] {
        let client = daemon.clients.iter().find(|client| client.pid == Some(job.pid())).expect("a client");
        let process = host.listed(job).await;
        assert_eq!((&client.lease, client.unattributed), (&process.lease, process.unattributed), "{client:?}");
        // A client that names no lease counts for the oldest lease.
        assert_eq!(client.lease, Some(expected.0.lease.id.to_string()));
        assert_eq!(client.unattributed, expected.1);
    }
    assert!(!daemon.findings.iter().any(|finding| finding.contains("without a lease")), "{:?}", daemon.findings);
    assert!(daemon.findings.iter().any(|finding| finding.contains("it is not certain")), "{:?}", daemon.findings);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_unleased_process_is_ended_on_an_unreadable_gpu() {
    if skips_other_users("unleased processes on a GPU that can't be read") {
        return;
    }
    let config = ends(0, "").replace("\"0\"", "\"0-1\"");
    let host = InProcess::start("dgx-h100", 2, &config).await;
    host.apply_rules(&["0-1"]).await;
    host.gpus.fail("reading the GPU", 0, 1_000_000, ErrorKind::Unknown);
    let unknown = async || {
        let gpus: Vec<Gpu> = host.gpus().await;
        (gpus[0].state == GpuState::Unknown).then_some(())
    };
    host.until("the GPU is unknown", unknown).await;
    // The next reading would list the process, but the reading fails.
    let mut job = host.job(OTHER, 0, ProcessKind::Compute);
    let mut seen = host.job(OTHER, 1, ProcessKind::Compute);
    host.check().await;
    host.ended_by_gpushd(&mut seen).await;
    assert!(job.lives());
    host.gpus.clear_faults();
    host.until("the GPU is read again", async || {
        host.check().await;
        (!host.steps(&job).await.is_empty()).then_some(())
    })
    .await;
    host.ended_by_gpushd(&mut job).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_is_unleased_in_maintenance() {
    let Some(host) = start("unleased processes in maintenance", &ends(3600, "")).await else { return };
    let mut deaf = host.deaf(HOLDER);
    host.check().await;
    assert!(host.action(&deaf).await.starts_with("asked to end"));
    host.post::<Value>("/v1/maintenance/enter", &json!({ "reason": "x" })).await.expect("it is entered");
    let seen = host.listed(&deaf).await;
    assert_eq!((seen.unleased, seen.unleased_action), (None, None));
    host.check().await;
    assert!(deaf.lives() && host.steps(&deaf).await.len() == 1);
}

/// Fault: gpushd checked one process after the other. It now checks and records all due processes of a round together,
/// before the first signal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn due_processes_are_all_recorded_in_one_round() {
    let Some(host) = start("many unleased processes of one user", &ends(0, "")).await else { return };
    let mut jobs: Vec<UserProgram> = (0..40).map(|_| host.job(HOLDER, 0, ProcessKind::Compute)).collect();
    jobs.push(host.job(OTHER, 0, ProcessKind::Compute));
    let mut listener = host.listen("?kinds=unleased", None).await;
    let recorded_at_first_event = async {
        listener.event().await.expect("an event");
        let trail: Vec<AuditRecord> = host.get("/v1/audit?limit=1000").await;
        trail.iter().filter(|one| one.action == "process.end" && one.result == "asked to end").count()
    };
    let (recorded, ()) = tokio::join!(recorded_at_first_event, host.check());
    assert_eq!(recorded, jobs.len());
    for job in &mut jobs {
        host.ended_by_gpushd(job).await;
        assert_eq!(host.steps(job).await, ["asked to end"]);
    }
}
