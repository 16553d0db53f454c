//! The supervisor task with injected sources. The process launcher runs this test program, which ends at once instead
//! of becoming a daemon.

use std::{
    collections::BTreeSet,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::*;

/// The values that the sources of a test return.
#[derive(Clone)]
struct Answers {
    clients: Arc<Mutex<Option<Vec<i32>>>>,
    blocked: Arc<Mutex<Option<String>>>,
}

impl Answers {
    fn new(clients: Option<Vec<i32>>) -> Self {
        Self { clients: Arc::new(Mutex::new(clients)), blocked: Arc::default() }
    }

    fn sources(&self) -> Sources {
        let (clients, blocked) = (Arc::clone(&self.clients), Arc::clone(&self.blocked));
        Sources {
            driver_clients: Arc::new(move || {
                let clients = clients.lock().unwrap().clone();
                Box::pin(async move { clients })
            }),
            recorded_users: Arc::new(BTreeSet::new),
            start_blocked: Arc::new(move || blocked.lock().unwrap().clone()),
        }
    }
}

fn daemon(base: &Path, sources: Sources) -> Daemon {
    let (daemon, task) =
        Daemon::with_task("g1", &"GPU-1".into(), TargetDir::of(base, "g1"), Launcher::of(base), sources, |_, _| {});
    let task = Arc::new(task);
    // Run the task again after a panic, as gpushd does.
    tokio::spawn(async move { while tokio::spawn(Arc::clone(&task).run()).await.is_err() {} });
    daemon
}

/// Returns a desired state with a limit of two failures.
fn desired(base: &Path) -> Option<Box<Desired>> {
    let supervision = SupervisorPolicy { pause: Duration::from_millis(5), failures: 2, ..SupervisorPolicy::default() };
    Some(Box::new(Desired {
        policy: MpsPolicy::default(),
        gpu_uuid: "GPU-1".into(),
        supervision,
        health: Duration::from_secs(15),
        control: "/bin/true".into(),
        server: "/bin/true".into(),
        driver: None,
        logs: base.join("logs"),
        log_bytes: 1 << 20,
    }))
}

async fn until(daemon: &Daemon, is: impl Fn(&DaemonReport) -> bool) -> DaemonReport {
    let mut reports = daemon.seen.clone();
    let waits = reports.wait_for(|report| is(&report.daemon));
    let found = tokio::time::timeout(Duration::from_secs(20), waits).await;
    found.unwrap_or_else(|_| panic!("not in time: {:#?}", daemon.last_report())).unwrap().daemon.clone()
}

#[tokio::test(start_paused = true)]
async fn task_that_panics_runs_again() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = TargetDir::of(scratch.path(), "g1");
    std::fs::create_dir(dir.dir()).unwrap();
    // The held lock stands for leftovers. The task asks the driver for their clients.
    let _lock = dir.lock().unwrap().unwrap();
    let panics = Arc::new(AtomicBool::new(true));
    let once = Arc::clone(&panics);
    let driver_clients: DriverClients = Arc::new(move || {
        assert!(!once.swap(false, Ordering::SeqCst), "on purpose");
        Box::pin(async { None })
    });
    let daemon = daemon(scratch.path(), Sources { driver_clients, ..Answers::new(None).sources() });
    daemon.send(DaemonRequest::SetDesired(None)).await.unwrap();
    let error = daemon.send(DaemonRequest::SetDesired(None)).await.unwrap_err();
    assert!(!panics.load(Ordering::SeqCst) && error.to_string().contains("panicked"), "{error:?}");
    // The next task handles requests as usual.
    daemon.send(DaemonRequest::SetDesired(None)).await.unwrap();
    daemon.send(DaemonRequest::SetDesired(None)).await.unwrap();
    assert!(daemon.last_report().daemon.trouble[0].contains("may have clients"), "{:?}", daemon.last_report());
}

#[tokio::test]
async fn program_that_ends_at_once_is_given_up_after_its_failures() {
    let scratch = tempfile::tempdir().unwrap();
    let daemon = daemon(scratch.path(), Answers::new(Some(Vec::new())).sources());
    daemon.send(DaemonRequest::SetDesired(desired(scratch.path()))).await.unwrap();
    let report = until(&daemon, |report| report.state == SupervisorState::GivenUp).await;
    assert_eq!((report.failures, report.pid), (2, None), "{report:#?}");
    assert!(report.wanted && !report.trouble.is_empty(), "{report:#?}");
    daemon.send(DaemonRequest::SetDesired(None)).await.unwrap();
    assert_eq!(daemon.last_report().daemon.state, SupervisorState::Stopped);
}

#[tokio::test]
async fn start_waits_while_the_host_forbids_it() {
    let scratch = tempfile::tempdir().unwrap();
    let answers = Answers::new(Some(Vec::new()));
    *answers.blocked.lock().unwrap() = Some("the host is in maintenance".to_owned());
    let daemon = daemon(scratch.path(), answers.sources());
    daemon.send(DaemonRequest::SetDesired(desired(scratch.path()))).await.unwrap();
    let report = until(&daemon, |report| matches!(report.state, SupervisorState::BackingOff { .. })).await;
    assert_eq!((report.failures, report.trouble.as_slice()), (0, ["the host is in maintenance".to_owned()].as_slice()));
    assert!(!scratch.path().join("g1").exists(), "gpushd prepares no directory");
    *answers.blocked.lock().unwrap() = None;
    until(&daemon, |report| report.failures > 0).await;
    assert!(scratch.path().join("g1/spec.json").exists());
}

#[tokio::test]
async fn leftovers_with_a_client_delay_the_start_without_a_failure() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = TargetDir::of(scratch.path(), "g1");
    std::fs::create_dir(dir.dir()).unwrap();
    let lock = dir.lock().unwrap().unwrap();
    let client = std::process::id().cast_signed();
    let daemon = daemon(scratch.path(), Answers::new(Some(vec![client])).sources());
    daemon.send(DaemonRequest::SetDesired(desired(scratch.path()))).await.unwrap();
    let report = until(&daemon, |report| !report.trouble.is_empty()).await;
    assert!(report.trouble[0].contains("still serves 1 client"), "{report:#?}");
    assert_eq!((report.failures, report.pid), (0, None));
    drop(lock);
    until(&daemon, |report| report.failures > 0).await;
}

#[tokio::test]
async fn stop_of_leftovers_with_a_client_kills_them() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = TargetDir::of(scratch.path(), "g1");
    std::fs::create_dir(dir.dir()).unwrap();
    // The child stands for a server whose daemon has ended: its standard input is the lock.
    let lock = dir.lock().unwrap().unwrap();
    let mut server = std::process::Command::new("/bin/sleep").arg("600").stdin(lock).spawn().unwrap();
    let client = std::process::id().cast_signed();
    let daemon = daemon(scratch.path(), Answers::new(Some(vec![client])).sources());
    daemon.send(DaemonRequest::SetDesired(None)).await.unwrap();
    daemon.send(DaemonRequest::SetDesired(None)).await.unwrap();
    let report = until(&daemon, |report| report.behind).await;
    assert!(report.trouble[0].contains("still serves 1 client"), "{report:#?}");
    daemon.send(DaemonRequest::Drain(None)).await.unwrap();
    assert!(server.try_wait().unwrap().is_none(), "a drain leaves clients their time");
    daemon.send(DaemonRequest::Stop { unless_used: false }).await.unwrap();
    assert!(!server.wait().unwrap().success());
    until(&daemon, |report| !report.behind).await;
}
