//! MPS: one supervised control daemon a target, what its clients may take, who they are.
//!
//! A percentage or a memory limit is a ceiling that cooperating clients keep, not a reservation and no
//! wall: a client that clears its environment has the daemon's own ceiling, and no other.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{error::ApiError, lease::Lease};

mod value;

pub use value::{BadValue, MemoryLimit, Percentage, Priority};

/// What a daemon lets each client have that does not take less itself. May be changed while it serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsSettings {
    /// Active thread percentage.
    #[cfg_attr(feature = "openapi", schema(value_type = f64))]
    pub percentage: Percentage,
    /// Device memory that one client process may pin, MiB; without it all there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub memory_limit_mib: Option<MemoryLimit>,
    /// Priority of kernels.
    #[serde(default)]
    pub priority: Priority,
}

impl Default for MpsSettings {
    fn default() -> Self {
        Self { percentage: Percentage::ALL, memory_limit_mib: None, priority: Priority::Normal }
    }
}

/// Whose clients one daemon serves at a time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MpsUsers {
    /// One uid's: another's would only queue, unseen, until the first one's have left.
    #[default]
    One,
    /// Several uids', where the daemon can: they share one server, and its faults.
    Many,
}

/// What becomes of a GPU's compute mode while it is shared through MPS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MpsComputeMode {
    /// Exclusive process, so that nobody slips past MPS; the mode from before is put back afterwards.
    #[default]
    ExclusiveProcess,
    /// Left as it is.
    Keep,
}

/// How a config rule wants a target shared through MPS.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsPolicy {
    /// What each client may have.
    #[serde(flatten)]
    pub settings: MpsSettings,
    /// Most clients at a time.
    pub max_clients: u32,
    /// Most that all shares together may come to, percent: over 100 they oversubscribe the target.
    pub shares_percent: u32,
    /// Whose clients.
    pub users: MpsUsers,
    /// Compute mode of a full GPU; means nothing on MIG devices.
    pub compute_mode: MpsComputeMode,
}

/// Clients that one GPU can have since Volta, as the driver documents it (60 from CUDA 13.1 on).
pub const MPS_CLIENTS: u32 = 48;

impl Default for MpsPolicy {
    fn default() -> Self {
        Self {
            settings: MpsSettings::default(),
            max_clients: MPS_CLIENTS,
            shares_percent: 100,
            users: MpsUsers::One,
            compute_mode: MpsComputeMode::ExclusiveProcess,
        }
    }
}

/// Where an MPS daemon is in its life. Clients are let in while it is `ready`, and only then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MpsState {
    /// There is none, and none is wanted.
    Stopped,
    /// It was started and has not answered with our settings yet.
    Starting,
    /// It serves.
    Ready,
    /// Its server met a fatal fault of a client, or ends as soon as it is started.
    Fault,
    /// It runs and does not answer.
    Hung,
    /// It ended; the next start is due.
    BackingOff,
    /// It ended too often: started by hand only.
    GivenUp,
    /// It is not wanted any more, and its clients may finish.
    Draining,
    /// It was told to end.
    Stopping,
}

impl MpsState {
    /// As it is written in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stopped => "stopped",
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Fault => "fault",
            Self::Hung => "hung",
            Self::BackingOff => "backing_off",
            Self::GivenUp => "given_up",
            Self::Draining => "draining",
            Self::Stopping => "stopping",
        }
    }
}

/// State of a server, by its control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MpsServerState {
    /// It starts.
    Initializing,
    /// It serves.
    Active,
    /// A client's fatal fault; it takes nobody until those concerned have ended.
    Fault,
}

/// A server of a control daemon: the process that holds the GPU on behalf of clients. Pid, uid and user are absent for
/// other users than the one it serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsServer {
    /// Process id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// User it serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Name of the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// What it says of itself; `None` from daemons that do not tell (before version 550).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<MpsServerState>,
}

/// A process that computes through a daemon. For other users than its owner everything is absent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsClient {
    /// Process id in the host's pid namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Process id of its server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<u32>,
    /// User id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// User name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Command line, for its owner and admins; at most 256 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The lease that it runs with, `L17`; `None` when its environment names no lease of its user on this target.
    #[serde(rename = "lease_id", default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
}

/// A target that is shared through MPS, and its daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsDaemon {
    /// Short name of the target, of its directory and its systemd unit: `g5d1b03a2`.
    pub target: String,
    /// UUID of the GPU, or of the MIG device.
    pub uuid: String,
    /// Index of the GPU; `None` while the driver does not show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    /// The MIG device in words, `2g.20gb@2`; `None` for a full GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Where it is in its life.
    pub state: MpsState,
    /// Why, and what is not as it should be, one sentence each.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// What goes on there that the daemon does not keep anybody from: clients without share, too many
    /// of them, a second user. One sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<String>,
    /// The desired policy: the rule's, with the settings that an administrator changed.
    #[serde(rename = "desired_policy")]
    pub wanted: MpsPolicy,
    /// Settings of its rule, when an administrator changed them.
    #[serde(default, rename = "rule_settings", skip_serializing_if = "Option::is_none")]
    pub rule: Option<MpsSettings>,
    /// Settings that the daemon reported last; absent before its first answer. It reports a memory limit in whole GiB.
    #[serde(default, rename = "effective_settings", skip_serializing_if = "Option::is_none")]
    pub in_force: Option<MpsSettings>,
    /// Process id of the control daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Since when it is in this state.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub since: Timestamp,
    /// When it is started again, while it backs off.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub next_start_at: Option<Timestamp>,
    /// When clients that are still there are ended, while it drains and was told so.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub clients_end_at: Option<Timestamp>,
    /// How often it failed within the time that counts.
    #[serde(default)]
    pub failures: u32,
    /// Why it is not to be there any more, where that is so: who has something of it may finish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends: Option<String>,
    /// Its version, or that of the driver, and how it is spoken to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// `CUDA_MPS_PIPE_DIRECTORY` of its clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipe_directory: Option<String>,
    /// Where its logs are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_directory: Option<String>,
    /// User whose it is now; `None` while nobody has a share, and nobody computes there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The user's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Its servers.
    #[serde(default)]
    pub servers: Vec<MpsServer>,
    /// Its clients.
    #[serde(default)]
    pub clients: Vec<MpsClient>,
    /// Whether these are all: of a daemon that does not answer, the driver alone may know them, and not tell.
    #[serde(default = "yes")]
    pub clients_known: bool,
    /// Leases on the target that have not ended.
    #[serde(rename = "granted_leases", default)]
    pub leases: Vec<Lease>,
    /// Sum of their percentages, rounded up.
    #[serde(default)]
    pub granted_percent: u32,
}

impl MpsDaemon {
    /// The target in messages: `GPU 0`, `GPU 0, 2g.20gb@2`, or its UUID.
    #[must_use]
    pub fn label(&self) -> String {
        match (self.gpu, &self.device) {
            (Some(gpu), None) => format!("GPU {gpu}"),
            (Some(gpu), Some(device)) => format!("GPU {gpu}, {device}"),
            (None, _) => self.uuid.clone(),
        }
    }
}

fn yes() -> bool {
    true
}

/// `POST /v1/mps/{target}/settings`: what shall be in force from now on, above the config's rule, until
/// the rule says something else. What is left out stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsSetRequest {
    /// Active thread percentage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>))]
    pub percentage: Option<Percentage>,
    /// Memory limit in MiB. A running server keeps the one that it has: none can be taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub memory_limit_mib: Option<MemoryLimit>,
    /// Priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    /// Whether what was set before is taken back first, so that what is left out is the rule's again.
    #[serde(default, rename = "clear", skip_serializing_if = "std::ops::Not::not")]
    pub reset: bool,
}

/// What a change of settings came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsSet {
    /// The daemon, the change read back.
    pub daemon: MpsDaemon,
    /// Which clients it reaches, one sentence each.
    pub reaches: Vec<String>,
}

/// `POST /v1/mps/{target}/stop`, `/restart`, `/drain`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsEndRequest {
    /// Whether clients that are there are ended. Without it a stop or restart under clients is refused.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// Of a drain: after how many seconds those who are still there are ended. Without it they may take as long
    /// as they need.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_after_s: Option<u64>,
}

/// `GET /v1/mps/{target}/logs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsLogs {
    /// Of the control daemon, then of its servers.
    pub files: Vec<MpsLog>,
}

/// The end of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsLog {
    /// Its path.
    pub path: String,
    /// Its last lines.
    pub lines: Vec<String>,
    /// How many lines were left out there: gpushd's own questions.
    #[serde(default)]
    pub left_out: usize,
    /// Why it can't be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}
