//! The commands of the control daemon, with their types. For the replies, see [`super::control`].

use std::fmt;

use gpush_api::{MemoryLimit, Percentage, Priority};

/// A process id in the daemon's protocol.
pub type Pid = i32;

/// The number of the device. Each daemon of gpushd sees one device, so it is 0. Given its UUID, some daemons clear the
/// limit instead of setting it.
const DEVICE: u32 = 0;

/// A command. Its `Display` is the line that the daemon reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Pids of the servers.
    ServerList,
    /// State of a server. Daemons before 550 do not know it.
    ServerStatus(Pid),
    /// Pids of a server's clients.
    ClientList(Pid),
    /// A table of all clients.
    Processes,
    /// Active thread percentage of the next server.
    DefaultPercentage,
    /// Sets that.
    SetDefaultPercentage(Percentage),
    /// Active thread percentage of a server's next clients.
    Percentage(Pid),
    /// Sets that.
    SetPercentage(Pid, Percentage),
    /// Pinned memory limit of the next server.
    DefaultMemoryLimit,
    /// Sets that.
    SetDefaultMemoryLimit(MemoryLimit),
    /// Takes it away.
    ClearDefaultMemoryLimit,
    /// Pinned memory limit of a server's next clients.
    MemoryLimit(Pid),
    /// Sets that.
    SetMemoryLimit(Pid, MemoryLimit),
    /// Priority of the next clients.
    DefaultPriority,
    /// Sets that.
    SetDefaultPriority(Priority),
    /// Starts a server for a user.
    StartServer {
        /// Its uid.
        uid: u32,
    },
    /// Ends a server once its clients are gone.
    ShutdownServer {
        /// Its pid.
        server: Pid,
        /// At once, by SIGINT.
        force: bool,
    },
    /// Ends the GPU work of a client, which must be done before a busy one is killed.
    TerminateClient {
        /// Pid of its server.
        server: Pid,
        /// Its own pid.
        client: Pid,
    },
    /// Ends the daemon and its servers.
    Quit {
        /// Seconds after which servers get SIGINT; without a value, the daemon waits for their clients without a limit.
        force_after_s: Option<u32>,
    },
}

impl Command {
    /// Whether the daemon may close without the final status although it did what was asked.
    #[must_use]
    pub fn ends_the_daemon(&self) -> bool {
        matches!(self, Self::Quit { .. })
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ServerList => write!(f, "get_server_list"),
            Self::ServerStatus(server) => write!(f, "get_server_status {server}"),
            Self::ClientList(server) => write!(f, "get_client_list {server}"),
            Self::Processes => write!(f, "ps"),
            Self::DefaultPercentage => write!(f, "get_default_active_thread_percentage"),
            Self::SetDefaultPercentage(to) => write!(f, "set_default_active_thread_percentage {to}"),
            Self::Percentage(server) => write!(f, "get_active_thread_percentage {server}"),
            Self::SetPercentage(server, to) => write!(f, "set_active_thread_percentage {server} {to}"),
            Self::DefaultMemoryLimit => write!(f, "get_default_device_pinned_mem_limit {DEVICE}"),
            Self::SetDefaultMemoryLimit(to) => write!(f, "set_default_device_pinned_mem_limit {DEVICE} {to}"),
            // A value that it cannot parse, or 0, removes the limit.
            Self::ClearDefaultMemoryLimit => write!(f, "set_default_device_pinned_mem_limit {DEVICE} 0"),
            Self::MemoryLimit(server) => write!(f, "get_device_pinned_mem_limit {server} {DEVICE}"),
            Self::SetMemoryLimit(server, to) => write!(f, "set_device_pinned_mem_limit {server} {DEVICE} {to}"),
            Self::DefaultPriority => write!(f, "get_default_client_priority"),
            Self::SetDefaultPriority(to) => write!(f, "set_default_client_priority {}", to.number()),
            Self::StartServer { uid } => write!(f, "start_server -uid {uid}"),
            Self::ShutdownServer { server, force: false } => write!(f, "shutdown_server {server}"),
            Self::ShutdownServer { server, force: true } => write!(f, "shutdown_server {server} -f"),
            Self::TerminateClient { server, client } => write!(f, "terminate_client {server} {client}"),
            Self::Quit { force_after_s: None } => write!(f, "quit"),
            Self::Quit { force_after_s: Some(seconds) } => write!(f, "quit -t {seconds}"),
        }
    }
}
