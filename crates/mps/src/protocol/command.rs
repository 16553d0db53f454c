//! The commands of the control daemon, with their types. For the replies, see [`super::control`].

use std::fmt;

use gpush_api::{MemoryLimit, Percentage, Priority};

/// A process id in the daemon's protocol.
pub type Pid = i32;

/// The number of the device. Each daemon of gpushd sees only one device, so the number is 0. gpushd
/// does not use the UUID, because with a UUID, some daemons clear the limit instead of setting it.
const DEVICE: u32 = 0;

/// A command. `Display` formats it as the line that the daemon reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Pids of the servers.
    ServerList,
    /// State of a server. Daemons before version 550 do not support this command.
    ServerStatus(Pid),
    /// Pids of a server's clients.
    ClientList(Pid),
    /// A table of all clients.
    Processes,
    /// Active thread percentage of the next server.
    DefaultPercentage,
    /// Sets the active thread percentage of the next server.
    SetDefaultPercentage(Percentage),
    /// Active thread percentage of a server's next clients.
    Percentage(Pid),
    /// Sets the active thread percentage of a server's next clients.
    SetPercentage(Pid, Percentage),
    /// Pinned memory limit of the next server.
    DefaultMemoryLimit,
    /// Sets the pinned memory limit of the next server.
    SetDefaultMemoryLimit(MemoryLimit),
    /// Removes the pinned memory limit of the next server.
    ClearDefaultMemoryLimit,
    /// Pinned memory limit of a server's next clients.
    MemoryLimit(Pid),
    /// Sets the pinned memory limit of a server's next clients.
    SetMemoryLimit(Pid, MemoryLimit),
    /// Priority of the next clients.
    DefaultPriority,
    /// Sets the priority of the next clients.
    SetDefaultPriority(Priority),
    /// Starts a server for a user.
    StartServer {
        /// Uid of the user.
        uid: u32,
    },
    /// Ends a server when its clients have ended.
    ShutdownServer {
        /// Pid of the server.
        server: Pid,
        /// Ends the server at once, with SIGINT.
        force: bool,
    },
    /// Ends the GPU work of a client. This is necessary before a busy client is killed.
    TerminateClient {
        /// Pid of the client's server.
        server: Pid,
        /// Pid of the client.
        client: Pid,
    },
    /// Ends the daemon and its servers.
    Quit {
        /// Seconds until the servers get SIGINT. `None`: the daemon waits for their clients without a limit.
        force_after_s: Option<u32>,
    },
}

impl Command {
    /// Returns whether the daemon may close the connection without a final status, although the
    /// command succeeded.
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
            // The value 0, or a value that the daemon cannot parse, removes the limit.
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
