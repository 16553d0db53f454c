//! Queries and settings of one server and its clients.
//!
//! The daemon does not pass a command to a server that is starting or ending. The daemon only
//! writes a log line, and sends an empty reply. For a command whose valid replies are never empty,
//! an empty reply becomes [`ControlError::ServerBusy`]. For a command whose valid reply can be
//! empty, such as [`Control::clients`], an empty reply may also mean "none". In that case,
//! [`Control::percentage`] shows whether the server is busy.

use std::time::Duration;

use gpush_api::{MemoryLimit, Percentage};

use super::{
    command::{Command, Pid},
    control::{Control, ControlError, as_reported, limit, not_set, strange},
};

/// A row of the client table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Pid of the client.
    pub pid: Pid,
    /// Pid of the client's server.
    pub server: Pid,
    /// The first 22 characters of the device's UUID.
    pub device: String,
    /// The client's program, without arguments.
    pub command: String,
}

impl Control {
    /// Returns the active thread percentage of a server's next clients.
    ///
    /// # Errors
    /// As [`Control::send`]; [`ControlError::ServerBusy`].
    pub async fn percentage(&self, server: Pid, deadline: Duration) -> Result<Percentage, ControlError> {
        let command = Command::Percentage(server);
        let text = self.text(command, deadline).await?;
        match text.trim() {
            "" => Err(ControlError::ServerBusy),
            text => text.parse().map_err(|_| strange(command, text)),
        }
    }

    /// Sets the active thread percentage of a server's next clients, and reads the percentage back.
    ///
    /// # Errors
    /// As [`Control::send`]; [`ControlError::ServerBusy`], [`ControlError::NotSet`].
    pub async fn set_percentage(&self, server: Pid, to: Percentage, deadline: Duration) -> Result<(), ControlError> {
        self.text(Command::SetPercentage(server, to), deadline).await?;
        let has = self.percentage(server, deadline).await?;
        if has == to { Ok(()) } else { Err(not_set(to, has)) }
    }

    /// Returns the pinned memory limit of a server's next clients. From 1 GiB on, the limit is
    /// rounded down to whole GiB. Returns `None` if there is no limit, or if the server is busy.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn memory_limit(&self, server: Pid, deadline: Duration) -> Result<Option<MemoryLimit>, ControlError> {
        let command = Command::MemoryLimit(server);
        limit(command, &self.text(command, deadline).await?)
    }

    /// Sets the pinned memory limit of a server's next clients. Reads the limit back with the precision of the daemon's
    /// report.
    ///
    /// # Errors
    /// As [`Control::send`]; [`ControlError::NotSet`], also from a busy server.
    pub async fn set_memory_limit(&self, server: Pid, to: MemoryLimit, deadline: Duration) -> Result<(), ControlError> {
        self.text(Command::SetMemoryLimit(server, to), deadline).await?;
        let has = self.memory_limit(server, deadline).await?;
        let words = has.map_or_else(|| "no limit".to_owned(), |limit| limit.to_string());
        if has == Some(as_reported(to)) { Ok(()) } else { Err(not_set(to, words)) }
    }

    /// Ends a server when its clients have ended, or at once with SIGINT. `Ok` does not mean that the server has ended:
    /// only the end of the server's process shows this.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn shutdown_server(&self, server: Pid, force: bool, deadline: Duration) -> Result<(), ControlError> {
        self.text(Command::ShutdownServer { server, force }, deadline).await.map(|_| ())
    }

    /// Ends the GPU work of a client. The daemon replies with a status. If the daemon could not
    /// reach the server, a text precedes the status.
    ///
    /// # Errors
    /// As [`Control::send`]; [`ControlError::Refused`] if the status is not 0.
    pub async fn terminate_client(&self, server: Pid, client: Pid, deadline: Duration) -> Result<(), ControlError> {
        let command = Command::TerminateClient { server, client };
        let text = self.text(command, deadline).await?;
        match text.lines().next_back() {
            Some("0") => Ok(()),
            Some(_) => Err(ControlError::Refused { command: command.to_string(), message: text }),
            None => Err(strange(command, "")),
        }
    }

    /// Returns all clients; empty if there is no server, or if the server is busy.
    ///
    /// # Errors
    /// As [`Control::send`].
    pub async fn processes(&self, deadline: Duration) -> Result<Vec<Process>, ControlError> {
        match self.text(Command::Processes, deadline).await {
            Ok(text) => table(&text).ok_or_else(|| strange(Command::Processes, &text)),
            Err(ControlError::NoServer) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}

/// Parses the table by its header. Versions differ in their columns, but the last column is always the command.
fn table(text: &str) -> Option<Vec<Process>> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let Some(head) = lines.next() else { return Some(Vec::new()) };
    let names: Vec<&str> = head.split_whitespace().collect();
    let row = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let of = |name| words.get(names.iter().position(|one| *one == name)?).copied();
        let command = words.get(names.iter().position(|one| *one == "COMMAND")?..)?.join(" ");
        Some(Process {
            pid: of("PID")?.parse().ok()?,
            server: of("SERVER")?.parse().ok()?,
            device: of("DEVICE")?.to_owned(),
            command,
        })
    };
    lines.map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_client_table_is_parsed() {
        let head = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        ";
        let row = "28286     0         28342          GPU-00000000-0000-0000    4026531836     /usr/bin/python3";
        let read = table(&format!("{head}\n{row}")).unwrap();
        let [process] = read.as_slice() else { panic!("{read:?}") };
        assert_eq!((process.pid, process.server, process.command.as_str()), (28286, 28342, "/usr/bin/python3"));
        assert_eq!(process.device, "GPU-00000000-0000-0000");
        assert_eq!(table(""), Some(vec![]));
        assert_eq!(table(&format!("{head}\nnonsense")), None);
        assert_eq!(table("PID\n1"), None);
    }
}
