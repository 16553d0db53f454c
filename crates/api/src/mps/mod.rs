//! MPS: the control daemon of each target, its settings, and its clients.
//!
//! A percentage or a memory limit is a ceiling for clients that cooperate. It reserves nothing and
//! isolates nothing. For a client that clears its environment, only the daemon's own ceiling
//! applies.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    error::ApiError,
    ids::{GpuIndex, TargetUuid},
    lease::Lease,
};

mod value;

pub use value::{BadValue, MemoryLimit, Percentage, Priority};

/// Limits that a daemon sets for each client. A client can set lower limits for itself. The limits
/// can be changed while the daemon serves clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsSettings {
    /// Active thread percentage.
    #[cfg_attr(feature = "openapi", schema(value_type = f64))]
    pub percentage: Percentage,
    /// Maximum device memory that one client process may pin, in MiB; absent for no limit.
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

/// Number of users whose clients a daemon serves at the same time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MpsUsers {
    /// Clients of one user. If a client of another user connects, it waits without a message until all clients of the
    /// first user have ended.
    #[default]
    One,
    /// Clients of several users, if the daemon supports it. They share one server, so a fault
    /// affects all of them.
    Many,
}

/// Compute mode of a GPU while it is shared through MPS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MpsComputeMode {
    /// `EXCLUSIVE_PROCESS`, so that programs cannot bypass MPS. gpushd restores the previous mode
    /// when MPS ends.
    #[default]
    ExclusiveProcess,
    /// gpushd does not change the mode.
    Keep,
}

/// The MPS settings of a config rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsPolicy {
    /// Limits for each client.
    #[serde(flatten)]
    pub settings: MpsSettings,
    /// Maximum number of clients at the same time.
    pub max_clients: u32,
    /// Maximum sum of the percentages of all leases. More than 100 oversubscribes the target.
    pub total_percentage: u32,
    /// Number of users whose clients the daemon serves at the same time.
    pub users: MpsUsers,
    /// Compute mode of a whole GPU. It has no effect on MIG devices.
    pub compute_mode: MpsComputeMode,
}

/// Maximum number of clients on Volta and newer GPUs, according to NVIDIA's documentation. Since
/// CUDA 13.1 the maximum is 60.
pub const MPS_CLIENTS: u32 = 48;

impl Default for MpsPolicy {
    fn default() -> Self {
        Self {
            settings: MpsSettings::default(),
            max_clients: MPS_CLIENTS,
            total_percentage: 100,
            users: MpsUsers::One,
            compute_mode: MpsComputeMode::ExclusiveProcess,
        }
    }
}

/// State of an MPS daemon. New clients are admitted only in the state `ready`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MpsState {
    /// The daemon does not run: an administrator or an operation stopped it, or gpushd is about to start it.
    Stopped,
    /// The daemon was started or found, but has not answered with the desired settings yet.
    Starting,
    /// The daemon serves clients.
    Ready,
    /// A client caused a fatal fault in a server, or servers end right after they start.
    Fault,
    /// The daemon runs, but does not answer.
    Hung,
    /// The daemon ended or hung, or processes of the previous daemon still run. gpushd will restart it.
    BackingOff,
    /// The daemon failed too often. Only an administrator can start it.
    GivenUp,
    /// gpushd no longer needs the daemon. Its clients may run until they finish.
    Draining,
    /// gpushd asked the daemon to end.
    Stopping,
}

impl MpsState {
    /// All states.
    pub const ALL: [Self; 9] = [
        Self::Stopped,
        Self::Starting,
        Self::Ready,
        Self::Fault,
        Self::Hung,
        Self::BackingOff,
        Self::GivenUp,
        Self::Draining,
        Self::Stopping,
    ];

    /// Returns the name in JSON.
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

/// State of an MPS server, as its control daemon reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MpsServerState {
    /// The server is starting.
    Initializing,
    /// The server serves clients.
    Active,
    /// A client caused a fatal fault. The server accepts no new clients until the affected clients
    /// have ended.
    Fault,
}

/// An MPS server: the process that uses the GPU on behalf of its clients. Only administrators and
/// the user that the server runs as see `pid`, `uid` and `user`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsServer {
    /// Process id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// User id that the server runs as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// User name that the server runs as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// State of the server; absent if the daemon does not report it, as before version 550.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<MpsServerState>,
}

/// A client of an MPS daemon. Only the owner of the client and administrators see the fields.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsClient {
    /// Process id in the host's pid namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Process id of the server that serves the client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<u32>,
    /// User id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// User name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Command line, at most 256 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Lease of the client, such as `L17`, as for a process in `GpuProcess`; absent if the client belongs to no lease on
    /// this target.
    #[serde(rename = "lease_id", default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    /// Whether it is not certain that the client belongs to `lease_id`, as for a process in `GpuProcess`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unattributed: bool,
    /// Whether gpushd could not find out the user of the client. Such a client may belong to the caller.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unidentified: bool,
}

/// A target that is shared through MPS, and its daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsDaemon {
    /// Short name of the target, such as `g5d1b03a2`. It is part of the names of the daemon's
    /// directory and systemd unit.
    pub target: String,
    /// UUID of the GPU, or of the MIG device.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub uuid: TargetUuid,
    /// Index of the GPU; absent while the driver does not list it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u32>))]
    pub gpu: Option<GpuIndex>,
    /// MIG device, such as `2g.20gb@2`; absent for a whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// State of the daemon.
    pub state: MpsState,
    /// Reasons for the state, and problems of the daemon, one sentence each.
    #[serde(default)]
    pub reasons: Vec<String>,
    /// Problems that gpushd cannot prevent, one sentence each: clients without a lease, too many
    /// clients, clients of a second user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<String>,
    /// Desired policy: the policy of the rule, with the limits that an administrator changed.
    #[serde(rename = "desired_policy")]
    pub wanted: MpsPolicy,
    /// Limits of the rule; present only if an administrator has changed them.
    #[serde(default, rename = "rule_settings", skip_serializing_if = "Option::is_none")]
    pub rule: Option<MpsSettings>,
    /// Limits that the daemon reported last; absent before its first answer. The daemon reports a
    /// memory limit in whole GiB.
    #[serde(default, rename = "effective_settings", skip_serializing_if = "Option::is_none")]
    pub in_force: Option<MpsSettings>,
    /// Process id of the control daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Time at which the daemon entered its state.
    #[serde(with = "crate::timestamp")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub since: Timestamp,
    /// Time of the next start; present in the state `backing_off`.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub next_start_at: Option<Timestamp>,
    /// Time at which gpushd ends the remaining clients; present while the daemon drains with a
    /// deadline.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub clients_end_at: Option<Timestamp>,
    /// Number of failures within the last 10 minutes.
    #[serde(default)]
    pub failures: u32,
    /// Why the target is no longer shared through MPS; absent while it is shared. Leases and
    /// clients may run until they finish.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ends: Option<String>,
    /// Protocol that gpushd uses with the daemon, and the version of the daemon (of the driver, if
    /// the daemon does not report its version).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protocol: Option<String>,
    /// Value of `CUDA_MPS_PIPE_DIRECTORY` for clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipe_directory: Option<String>,
    /// Directory of the daemon's logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_directory: Option<String>,
    /// User id of the only user that the daemon serves now; absent while the daemon has neither leases
    /// nor clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Name of that user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Servers of the daemon.
    #[serde(default)]
    pub servers: Vec<MpsServer>,
    /// Clients of the daemon.
    #[serde(default)]
    pub clients: Vec<MpsClient>,
    /// Whether `clients` is complete. It may be incomplete if the daemon does not answer and the
    /// driver does not report the clients.
    #[serde(default = "yes")]
    pub clients_known: bool,
    /// Leases on the target that have not ended.
    #[serde(rename = "granted_leases", default)]
    pub leases: Vec<Lease>,
    /// Sum of the percentages of the leases in `leases`, rounded up.
    #[serde(default)]
    pub granted_percent: u32,
    /// Whether an administrator has stopped the daemon. The daemon then stays stopped, even after a
    /// reboot, until an administrator starts it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stays_stopped: bool,
}

impl MpsDaemon {
    /// Returns the name of the target for messages: `GPU 0`, `MIG device 0:2g.20gb@2`, or its UUID.
    #[must_use]
    pub fn label(&self) -> String {
        match (self.gpu, &self.device) {
            (Some(gpu), None) => format!("GPU {gpu}"),
            (Some(gpu), Some(device)) => format!("MIG device {gpu}:{device}"),
            (None, _) => self.uuid.to_string(),
        }
    }
}

fn yes() -> bool {
    true
}

/// Body of `POST /v1/mps/{target}/settings`: limits that override the rule's limits until they are
/// cleared or the rule changes. A limit that is absent does not change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsSetRequest {
    /// Active thread percentage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<f64>))]
    pub percentage: Option<Percentage>,
    /// Memory limit in MiB. Running servers keep their previous limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub memory_limit_mib: Option<MemoryLimit>,
    /// Priority of kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<Priority>,
    /// Whether to clear earlier changes first. Limits that are absent then return to the rule's
    /// values.
    #[serde(default, rename = "clear", skip_serializing_if = "std::ops::Not::not")]
    pub reset: bool,
}

/// Answer of `POST /v1/mps/{target}/settings`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsSetResponse {
    /// Daemon after the change.
    pub daemon: MpsDaemon,
    /// Which clients the change applies to, one sentence each.
    pub reaches: Vec<String>,
}

/// Body of `POST /v1/mps/{target}/start`, `/stop`, `/restart` and `/drain`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsActionRequest {
    /// For `stop` and `restart`: whether to proceed although clients or leases use the daemon. If
    /// true, the clients are ended. If false, gpushd refuses such a request.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// For `drain`: seconds after which gpushd ends the remaining clients, at most 2592000 (30
    /// days). If absent, clients may run as long as they like.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_after_s: Option<u64>,
}

/// Answer of `GET /v1/mps/{target}/logs`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsLogs {
    /// Log of the control daemon, then that of its servers.
    pub files: Vec<MpsLog>,
}

/// The last lines of a log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MpsLog {
    /// Path of the log.
    pub path: String,
    /// Last lines of the log.
    pub lines: Vec<String>,
    /// Number of lines that the answer omits, because only gpushd's own probes of the daemon caused them.
    #[serde(default)]
    pub left_out: usize,
    /// Why the log cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}
