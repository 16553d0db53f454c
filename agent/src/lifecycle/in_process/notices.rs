//! What gpushd tells the holder of a lease: on the terminals of the lease's processes, in the file of the lease, in events
//! and in the lease itself.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read as _},
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    path::PathBuf,
    process::Command,
};

use gpush_api::{Lease, LeaseGrant, LeaseNotice, NoticeKind};
use serde_json::{Value, json};

use super::{
    InProcess,
    leases::{FIXED, devices},
    programs::{UserProgram, own_uid},
    user,
};

/// A pseudo terminal that is open to messages.
struct Screen {
    output: OwnedFd,
    path: PathBuf,
}

impl Screen {
    fn open() -> Self {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let output = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
        grantpt(&output).and_then(|()| unlockpt(&output)).expect("it can be opened");
        let path = ptsname(&output, Vec::new()).expect("a name").into_string().expect("a path");
        let screen = Self { output, path: path.into() };
        screen.set_mode(0o620);
        screen
    }

    fn set_mode(&self, mode: u32) {
        std::fs::set_permissions(&self.path, PermissionsExt::from_mode(mode)).expect("a mode");
    }

    /// Starts a program that waits, in its own session with this terminal, and with the environment of a lease.
    fn start(&self, granted: &LeaseGrant) -> UserProgram {
        let terminal = File::options().read(true).write(true).open(&self.path).expect("the terminal");
        let mut command = Command::new("setsid");
        command.args(["--ctty", "/bin/sleep", "1000"]).envs(granted.environment.iter().cloned()).stdout(terminal);
        // The program gets the terminal from its standard input.
        let input = File::options().read(true).write(true).open(&self.path).expect("the terminal");
        UserProgram::start_with_input(&mut command, granted.lease.holder.uid, input)
    }

    /// Returns the next line with text.
    fn line(&self) -> String {
        let lines = BufReader::new(File::from(self.output.try_clone().expect("a descriptor"))).lines();
        let mut texts = lines.map(|line| line.expect("a line").trim().to_owned());
        texts.find(|line| !line.is_empty()).expect("a line")
    }
}

impl InProcess {
    /// Starts gpushd with two MIG devices.
    async fn with_devices(more: &str) -> Self {
        let host = Self::start("dgx-h100", 1, &format!("{more}{FIXED}")).await;
        host.apply(&["0"], &["1g.10gb*2"]).await;
        host
    }

    async fn revoke(&self, granted: &LeaseGrant, reason: &str) {
        let path = format!("/v1/leases/{}/revoke", granted.lease.id);
        self.post::<Value>(&path, &json!({ "reason": reason, "end": true, "notice_s": 3600 })).await.expect("revoked");
    }

    /// Waits for a notice of this kind.
    async fn notice(&self, granted: &LeaseGrant, kind: NoticeKind) -> LeaseNotice {
        let path = format!("/v1/leases/{}", granted.lease.id);
        self.until("the notice", async || {
            let lease: Lease = self.get(&path).await;
            lease.notice.filter(|notice| notice.kind == kind)
        })
        .await
    }
}

/// Returns the notices in the file of a lease.
pub(super) fn in_file(granted: &LeaseGrant) -> Vec<Value> {
    let path = granted.environment.iter().find(|(name, _)| name == "GPUSH_NOTICE").expect("a file").1.clone();
    let mut text = String::new();
    File::open(path).and_then(|mut file| file.read_to_string(&mut text)).expect("the file");
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect()
}

/// One test, because the leases of two tests have the same number: each would find the terminal of the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn notice_is_shown_on_terminals_of_the_holder_only() {
    shown_on_the_terminal_and_in_the_file().await;
    closed_or_foreign_terminal_shows_nothing().await;
}

async fn shown_on_the_terminal_and_in_the_file() {
    let host = InProcess::with_devices("").await;
    let (uid, screen) = (own_uid(), Screen::open());
    let granted = host.lease(uid, &devices("1g.10gb", 1)).await.expect("a device");
    assert_eq!(in_file(&granted), [] as [Value; 0], "there is an empty file to watch");
    let mut program = screen.start(&granted);
    host.until("its terminal", async || {
        gpush_host::proc::terminal(program.pid()).filter(|_| program_runs(program.pid())).map(drop)
    })
    .await;
    host.revoke(&granted, "exam\u{1b}[2J starts").await;
    let notice = host.notice(&granted, NoticeKind::Revoked).await;
    assert!(notice.text.starts_with("lease L1 ends in 1h: exam?[2J starts ("), "{notice:?}");
    assert_eq!((notice.terminals, notice.ends_at.is_some()), (Some(1), true), "{notice:?}");
    assert_eq!(screen.line(), format!("gpush: {}", notice.text));
    let lines = in_file(&granted);
    assert_eq!((lines.len(), &lines[0]["text"]), (1, &Value::from(notice.text)));
    assert_eq!(lines[0]["lease_id"], "L1");
    assert!(program.lives(), "it may run for an hour");
    let other: Lease = host.get_as(user(uid + 1), "/v1/leases/L1").await.expect("a lease");
    assert_eq!(other.notice, None, "the notice is for the holder");
}

/// Returns whether the process executes the program of the lease, not `setsid` any more.
fn program_runs(pid: u32) -> bool {
    gpush_host::proc::name(pid) == "sleep"
}

async fn closed_or_foreign_terminal_shows_nothing() {
    let host = InProcess::with_devices("").await;
    let closed = |screen: &Screen| screen.set_mode(0o600);
    let foreign =
        |screen: &Screen| std::os::unix::fs::chown(&screen.path, Some(own_uid() + 1), None).expect("an owner");
    let cases: [&dyn Fn(&Screen); 2] = [&closed, &foreign];
    for case in cases.iter().take(if own_uid() == 0 { 2 } else { 1 }) {
        let screen = Screen::open();
        let granted = host.lease(own_uid(), &devices("1g.10gb", 1)).await.expect("a device");
        let program = screen.start(&granted);
        host.until("its terminal", async || {
            gpush_host::proc::terminal(program.pid()).filter(|_| program_runs(program.pid())).map(drop)
        })
        .await;
        case(&screen);
        host.revoke(&granted, "exam").await;
        assert_eq!(host.notice(&granted, NoticeKind::Revoked).await.terminals, Some(0));
        assert_eq!(in_file(&granted).len(), 1);
        drop(program);
        host.wait_until_ended(&granted).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holder_is_warned_before_the_lease_expires_and_again_when_it_has() {
    let host = InProcess::with_devices("[notify]\nbefore = \"1s\"\n").await;
    let mut body = devices("1g.10gb", 1);
    body["duration_s"] = json!(3);
    let granted = host.lease(own_uid(), &body).await.expect("a device");
    // Without a process, the lease ends at once.
    let program = UserProgram::with_environment(own_uid(), &granted.environment);
    let soon = host.notice(&granted, NoticeKind::EndsSoon).await;
    assert!(soon.text.contains("gpushctl lease renew L1"), "{soon:?}");
    let expired = host.notice(&granted, NoticeKind::Expired).await;
    assert!(expired.text.contains("its programs may finish"), "{expired:?}");
    let kinds: Vec<Value> = in_file(&granted).iter().map(|line| line["notice_kind"].clone()).collect();
    assert_eq!(kinds, ["ends_soon", "expired"]);
    drop(program);
    host.wait_until_ended(&granted).await;
    assert_eq!(in_file(&granted).len(), 2, "the file stays for a while");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_on_a_gpu_get_a_notice_when_it_is_cordoned() {
    let host = InProcess::with_devices("").await;
    let granted = host.lease(own_uid(), &devices("1g.10gb", 1)).await.expect("a device");
    let quiet = host.lease(own_uid(), &devices("1g.10gb", 1)).await.expect("a device");
    host.release(&quiet).await;
    host.wait_until_ended(&quiet).await;
    assert!(!PathBuf::from(file_of(&quiet)).exists(), "a lease without notices leaves no file");
    host.change("/v1/gpus/0/cordon", "new cable").await;
    let notice = host.notice(&granted, NoticeKind::Cordoned).await;
    assert!(notice.text.starts_with("GPU 0 takes no new leases: new cable ("), "{notice:?}");
    assert!(notice.text.ends_with("lease L1 continues"), "{notice:?}");
}

fn file_of(granted: &LeaseGrant) -> &str {
    &granted.environment.iter().find(|(name, _)| name == "GPUSH_NOTICE").expect("a file").1
}

/// The holder has ended the lease, so a notice would be noise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn release_by_the_holder_causes_no_notice() {
    let host = InProcess::with_devices("").await;
    let granted = host.lease(own_uid(), &devices("1g.10gb", 1)).await.expect("a device");
    let program = UserProgram::with_environment(own_uid(), &granted.environment);
    host.release(&granted).await;
    drop(program);
    assert_eq!(host.wait_until_ended(&granted).await.notice, None);
    assert!(!PathBuf::from(file_of(&granted)).exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hook_gets_the_notice_as_json() {
    let host = InProcess::with_devices("[notify]\ncommand = \"/bin/true\"\n").await;
    let granted = host.lease(own_uid(), &devices("1g.10gb", 1)).await.expect("a device");
    host.revoke(&granted, "exam").await;
    let input = host.until("the hook", async || host.host.services.inputs().pop()).await;
    let notice: Value = serde_json::from_str(&input).expect("a JSON object");
    assert_eq!((&notice["lease_id"], &notice["notice_kind"]), (&"L1".into(), &"revoked".into()));
    assert_eq!(notice["holder"]["uid"], json!(own_uid()));
    assert!(notice["text"].as_str().is_some_and(|text| text.contains("exam")), "{notice}");
    host.wait_until_ended(&granted).await;
    assert_eq!(host.host.services.inputs().len(), 1, "one run for one notice");
}

/// Returns a user whose programs have no terminal, so that notices do not disturb the test of terminals. Only root can start
/// programs of other users.
fn other_uid() -> u32 {
    if own_uid() == 0 { 1008 } else { own_uid() }
}

/// A program without a handler would be ended by the signal, so it does not get it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signal_reaches_only_programs_of_the_lease_with_a_handler() {
    let host = InProcess::with_devices("").await;
    let mut body = devices("1g.10gb", 1);
    body["notice_signal"] = json!("USR1");
    let granted = host.lease(other_uid(), &body).await.expect("a device");
    assert_eq!(
        granted.lease.request.as_ref().and_then(|request| request.notice_signal).map(gpush_api::NoticeSignal::name),
        Some("USR1")
    );
    let directory = tempfile::tempdir().expect("a directory");
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o777)).expect("a mode");
    let file = |name: &str| directory.path().join(name);
    let start = |name: &str, environment: &[(String, String)]| {
        let (ready, signalled) = (file(&format!("{name}-ready")), file(name));
        let script = format!(
            "trap 'echo signalled > {}' USR1; echo ready > {}; while :; do sleep 0.1; done",
            signalled.display(),
            ready.display()
        );
        UserProgram::start(Command::new("/bin/sh").args(["-c", &script]).envs(environment.iter().cloned()), other_uid())
    };
    let mut without_handler = UserProgram::with_environment(other_uid(), &granted.environment);
    let (mut own, mut foreign) = (start("own", &granted.environment), start("foreign", &[]));
    for name in ["own-ready", "foreign-ready"] {
        host.until(name, async || file(name).exists().then_some(())).await;
    }
    host.revoke(&granted, "exam").await;
    host.until("the signal", async || file("own").exists().then_some(())).await;
    host.notice(&granted, NoticeKind::Revoked).await;
    assert!(without_handler.lives() && own.lives() && foreign.lives());
    assert!(!file("foreign").exists(), "it does not belong to the lease");
    for wrong in ["KILL", "usr1", "10"] {
        body["notice_signal"] = json!(wrong);
        let error = host.lease(other_uid(), &body).await.expect_err(wrong);
        assert!(error.message.contains("notice_signal") || error.message.contains(wrong), "{error:?}");
    }
}

/// Notices beyond the limit are left out, and those about the end of the lease are not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_notices_a_minute_are_limited() {
    let host = InProcess::with_devices("").await;
    let granted = host.lease(other_uid(), &devices("1g.10gb", 1)).await.expect("a device");
    let _program = UserProgram::with_environment(other_uid(), &granted.environment);
    for _ in 0..50 {
        host.change("/v1/gpus/0/cordon", "new cable").await;
        host.change("/v1/gpus/0/uncordon", "done").await;
    }
    host.revoke(&granted, "exam").await;
    host.notice(&granted, NoticeKind::Revoked).await;
    let kinds: Vec<Value> = in_file(&granted).iter().map(|line| line["notice_kind"].clone()).collect();
    assert_eq!((kinds.last(), kinds.len() <= 7), (Some(&json!("revoked")), true), "{kinds:?}");
}
