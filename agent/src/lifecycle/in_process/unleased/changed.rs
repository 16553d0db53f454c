//! Processes whose user changes, and processes of leases that a lost database had.

use std::{fs, process::Command};

use gpush_api::{ComputeMode, GpuState, MpsDaemon, ProcessKind};
use serde_json::{Value, json};

use super::{HOLDER, OTHER, RULE, ends};
use crate::lifecycle::in_process::{
    InProcess,
    host::ScriptedHost,
    programs::{UserProgram, own_uid, skips_other_users},
};

/// Fault: gpushd did not end a process whose effective uid was never the same in two readings. A user with subordinate
/// uids can change the uids of a process among three of them, without any privilege.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_that_changes_between_subordinate_uids_is_ended() {
    const SCRIPT: &str = "import os, signal\n\
        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n\
        os.setresgid(4200000, 4200000, 4200000)\n\
        uids = [4200000, 4200001, 4200002]\n\
        while True:\n    os.setresuid(*uids)\n    uids = uids[1:] + uids[:1]";
    if skips_other_users("a process that changes its user") {
        return;
    }
    let world = ScriptedHost::new("dgx-h100", 1);
    fs::create_dir(world.path("etc")).expect("a directory");
    fs::write(world.path("etc/subuid"), format!("{OTHER}:4200000:100\n")).expect("a file");
    let host = world.start(&ends(0, "")).await;
    host.apply_rules(&["0"]).await;
    let mut job = UserProgram::start(Command::new("python3").args(["-c", SCRIPT]), own_uid());
    let status = format!("/proc/{}/status", job.pid());
    let has_changed = async || fs::read_to_string(&status).ok()?.contains("Uid:\t4200000").then_some(());
    host.until("the process has no uid 0", has_changed).await;
    host.gpus.use_as(0, job.pid(), ProcessKind::Compute);
    host.check().await;
    assert_eq!(host.steps(&job).await, ["asked to end"]);
    host.check().await;
    host.ended_by_gpushd(&mut job).await;
    assert_eq!(host.steps(&job).await, ["asked to end", "killed"]);
}

impl InProcess {
    /// Checks that gpushd does not end this process, because it may belong to a lost lease.
    async fn may_have_a_lost_lease(&self, job: &UserProgram) {
        self.check().await;
        let action = self.action(job).await;
        assert!(action.contains("before the database was lost"), "{action}");
    }
}

/// If the database is lost, gpushd does not know which leases it granted before the loss.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_process_is_unleased_until_database_loss_is_accepted() {
    if skips_other_users("unleased processes with the database lost") {
        return;
    }
    let world = ScriptedHost::new("dgx-h100", 1);
    let config = ends(0, "");
    let host = world.start(&config).await;
    host.apply_rules(&["0"]).await;
    let before: MpsDaemon = host.get("/v1/mps/0").await;
    let granted = host.share_for(HOLDER, "0", json!({})).await.expect("a lease");
    let mut client = host.client("0", &granted).await;
    host.kill();
    for entry in fs::read_dir(world.state_directory()).expect("a directory").flatten() {
        if entry.file_name().to_string_lossy().starts_with("gpush.db") {
            fs::remove_file(entry.path()).expect("a file of the database");
        }
    }
    let host = world.start(&config).await;
    host.until("the GPU is held", async || (host.gpu(0).await.state == GpuState::Held).then_some(())).await;
    host.check().await;
    let seen = host.listed(&client).await;
    assert_eq!((seen.process.kind, seen.unleased, seen.unleased_action), (ProcessKind::MpsClient, None, None));
    // The lease is lost with the database, but the client may have started with this lease. So gpushd must not end the
    // client, even after a restart.
    host.post::<Value>("/v1/recover", &json!({})).await.expect("it is accepted");
    host.may_have_a_lost_lease(&client).await;
    host.kill();
    let host = world.start(&config).await;
    host.listed(&client).await;
    host.may_have_a_lost_lease(&client).await;
    // A process that starts now cannot belong to a lost lease. So gpushd asks it to end.
    let mut other = host.job(OTHER, 0, ProcessKind::Compute);
    host.check().await;
    host.ended_by_gpushd(&mut other).await;
    assert_eq!(host.steps(&other).await, ["asked to end"]);
    assert!(client.lives());
    // gpushd keeps the daemon that runs.
    let now: MpsDaemon = host.get("/v1/mps/0").await;
    assert_eq!((now.pid, host.gpu(0).await.drift), (before.pid, Vec::new()));
    // Until the rule changes, gpushd also keeps the compute mode.
    host.host.daemons.disconnect(&client);
    host.gpus.end_process(0, client.pid());
    host.reload(&RULE.replace("mode = \"mps\"\nmps = { compute_mode = \"keep\" }", "mode = \"exclusive\"")).await;
    host.apply_rules(&["0"]).await;
    assert_eq!(host.gpus.compute_mode(0), Some(ComputeMode::Default));
}
