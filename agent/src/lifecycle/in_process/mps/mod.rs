//! GPUs that are shared through MPS: who gets a lease, what actions on a daemon do, what gpushd does about a daemon that
//! does not serve, and changes of mode. Only real programs show that a client computes through its daemon.
//!
//! | file | subject |
//! |---|---|
//! | `admission` | leases: grants, refusals, ends |
//! | `actions` | stop, restart, settings, maintenance |
//! | `availability` | a missing driver, a lost GPU, a cordon |
//! | `drains` | drains, and servers that a killed daemon left |
//! | `mode_changes` | operations to and from mode `mps` |
//! | `compute_modes` | compute modes that cannot be set or restored |
//! | `faults` | daemons that do not start, do not answer, or lose their servers |
//! | `queue` | operations that wait for leases |
//! | `visibility` | what users see of each other |

mod actions;
mod admission;
mod availability;
mod compute_modes;
mod drains;
mod faults;
mod mode_changes;
mod queue;
mod visibility;

use std::{os::unix::fs::PermissionsExt, path::Path};

use gpush_api::{ApiError, ComputeMode, LeaseGrant, MpsDaemon, MpsState, Operation, OperationState, ProcessKind};
use serde_json::{Value, json};

use super::{
    InProcess,
    programs::{UserProgram, own_uid},
    user,
};

/// Intervals that no test waits for. Tests probe a daemon with a request.
const INTERVALS: &str = "[mps]\nhealth = \"3600s\"\n# --constants mps.stop=2s,mps.pause=1s,mps.longest_pause=1s\n";

/// Returns a config in which these GPUs have mode `mps`.
fn shared(gpus: &str, more: &str) -> String {
    format!("{INTERVALS}[[gpu]]\nname = \"lab\"\nmatch = [{gpus}]\nmode = \"mps\"\n{more}")
}

/// Returns the config with this rule for GPU 0.
fn rule(how: &str) -> String {
    format!("{INTERVALS}[[gpu]]\nmatch = [\"0\"]\n{how}\n")
}

/// Returns whether users have access to the pipe directory of a daemon.
fn is_open(daemon: &MpsDaemon) -> bool {
    is_open_at(daemon.pipe_directory.as_deref().expect("a directory"))
}

fn is_open_at(path: &str) -> bool {
    std::fs::metadata(Path::new(path)).is_ok_and(|meta| meta.permissions().mode() & 0o070 != 0)
}

/// Kills a process.
fn kill(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it runs");
}

impl InProcess {
    /// Starts gpushd on a host with one GPU that is shared through MPS, with a daemon that is ready.
    async fn with_daemon(more: &str) -> Self {
        let host = Self::start("dgx-h100", 1, &shared("\"0\"", more)).await;
        host.apply_rules(&["0"]).await;
        host
    }

    /// Begins to apply the rules of GPUs.
    async fn begin_rules(&self, gpus: &[&str], wait_s: Option<u32>) -> Result<Operation, ApiError> {
        let mut body = json!({ "selectors": gpus, "layout_source": "wanted" });
        if let Some(wait_s) = wait_s {
            body["wait_s"] = json!(wait_s);
        }
        self.post("/v1/mig/apply", &body).await
    }

    /// Applies the rules of GPUs.
    pub(super) async fn apply_rules(&self, gpus: &[&str]) -> Operation {
        let begun = self.begin_rules(gpus, None).await.expect("the operation begins");
        let ended = self.ended(&begun).await;
        assert_eq!(ended.state, OperationState::Done, "{ended:#?}");
        assert!(ended.progress.iter().all(|one| one.done == one.total), "{ended:#?}");
        ended
    }

    /// Probes a daemon.
    async fn daemon(&self, target: &str) -> MpsDaemon {
        self.get(&format!("/v1/mps/{target}")).await
    }

    /// Probes all daemons.
    async fn daemons(&self) -> Vec<MpsDaemon> {
        self.get("/v1/mps").await
    }

    /// Waits until `is` is true for a daemon.
    async fn daemon_becomes(&self, target: &str, what: &str, is: impl Fn(&MpsDaemon) -> bool) -> MpsDaemon {
        self.until(&format!("{target} {what}"), async || {
            let path = format!("/v1/mps/{target}");
            self.get_as::<MpsDaemon>(user(0), &path).await.ok().filter(&is)
        })
        .await
    }

    async fn daemon_reaches(&self, target: &str, state: MpsState) -> MpsDaemon {
        self.daemon_becomes(target, state.name(), |daemon| daemon.state == state).await
    }

    /// Waits until no GPU or MIG device is shared.
    async fn no_daemon_is_left(&self) {
        self.until("no daemon", async || {
            let daemons: Vec<MpsDaemon> = self.get_as(user(0), "/v1/mps").await.ok()?;
            daemons.is_empty().then_some(())
        })
        .await;
        assert_eq!(self.host.daemons.running(), 0);
    }

    /// Sends `start`, `stop`, `restart`, `drain` or `settings` as an administrator.
    async fn act(&self, target: &str, verb: &str, body: Value) -> Result<Value, ApiError> {
        self.post(&format!("/v1/mps/{target}/{verb}"), &body).await
    }

    /// Requests a lease of an MPS target for the user of this test.
    pub(super) async fn share(&self, target: &str, body: Value) -> Result<LeaseGrant, ApiError> {
        self.share_for(own_uid(), target, body).await
    }

    /// Requests a lease of an MPS target.
    pub(super) async fn share_for(&self, uid: u32, target: &str, body: Value) -> Result<LeaseGrant, ApiError> {
        self.post_as(user(uid), "/v1/leases", &share(target, &body)).await
    }

    /// Starts a program with a lease, and connects it to the daemon.
    pub(super) async fn client(&self, target: &str, granted: &LeaseGrant) -> UserProgram {
        let client = UserProgram::with_environment(granted.lease.holder.uid, &granted.environment);
        self.connect(target, &client).await;
        client
    }

    /// Connects a program to a daemon.
    pub(super) async fn connect(&self, target: &str, client: &UserProgram) {
        let daemon = self.daemon(target).await;
        self.host.daemons.connect(daemon.pid.expect("a daemon"), client);
        let gpu = usize::try_from(daemon.gpu.expect("a GPU").0).expect("an index");
        self.gpus.use_as(gpu, client.pid(), ProcessKind::MpsClient);
    }

    /// Ends a program that was connected to a daemon on a GPU.
    async fn end_client(&self, gpu: usize, client: UserProgram) {
        self.host.daemons.disconnect(&client);
        self.gpus.end_process(gpu, client.pid());
        drop(client);
    }

    /// Waits until the compute mode of a GPU is as expected.
    async fn compute_mode_becomes(&self, gpu: usize, mode: ComputeMode) {
        self.until("the compute mode", async || (self.gpus.compute_mode(gpu) == Some(mode)).then_some(())).await;
    }
}

/// Returns the body of a request for a lease of an MPS target.
fn share(target: &str, body: &Value) -> Value {
    let mut request = body.as_object().expect("an object").clone();
    let mut share = serde_json::Map::from_iter([("kind".to_owned(), "mps".into())]);
    for name in ["percentage", "memory_limit_mib", "priority"] {
        share.extend(request.remove(name).map(|value| (name.to_owned(), value)));
    }
    request.insert("share".to_owned(), share.into());
    request.insert("target".to_owned(), target.into());
    if !request.contains_key("duration_s") && !request.contains_key("process") {
        request.insert("duration_s".to_owned(), 3600.into());
    }
    request.into()
}
