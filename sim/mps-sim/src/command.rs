//! The command language of the MPS control daemon. The answers are those of the real daemon. An
//! error has no special form: it is ordinary text in the answer, or appears only in the log.

use std::time::Duration;

use crate::{
    place::{Device, Environment, Version},
    servers::{DEVICES, ROW, Server, ask},
    state::DaemonState,
    value,
    wire::Peer,
};

/// What the daemon does after a command.
pub(crate) enum Verdict {
    /// The daemon continues.
    Goes,
    /// The daemon ends.
    Quit {
        /// Time after which the daemon sends SIGINT to the server.
        force_after: Option<Duration>,
    },
}

/// Executes one command. Returns the frames of the answer, and what the daemon does next.
pub(crate) fn obey(daemon: &mut DaemonState, line: &str, peer: Peer) -> (Vec<String>, Verdict) {
    let mut words = line.split_whitespace();
    let name = words.next().unwrap_or_default();
    let words: Vec<&str> = words.collect();
    let word = |at: usize| words.get(at).copied();
    let pid = value::number(word(0));
    let mut verdict = Verdict::Goes;
    let answer = match name {
        "get_server_list" => daemon.servers.now().map(|server| server.pid().to_string()).into_iter().collect(),
        "get_server_status" if daemon.version >= Version::V550 => {
            of_server(daemon, pid, |daemon, server| vec![state(daemon, server).to_owned()])
        }
        "get_client_list" => of_server(daemon, pid, |daemon, server| {
            let pids = server.ask(&daemon.log, |socket| {
                socket.send(&ask::CLIENTS.to_le_bytes())?;
                (0..socket.receive_u32()?).map(|_| socket.receive_u32()).collect::<Result<Vec<_>, _>>()
            });
            pids.unwrap_or_default().iter().map(ToString::to_string).collect()
        }),
        "ps" => processes(daemon),
        "get_default_active_thread_percentage" => vec![value::shown_percentage(daemon.defaults.percentage)],
        "set_default_active_thread_percentage" => may_set(daemon, peer, |daemon| {
            match word(0).and_then(value::percentage) {
                Some(percentage) => daemon.defaults.percentage = percentage,
                None => daemon.log.say(BAD_PERCENTAGE),
            }
            vec![value::shown_percentage(daemon.defaults.percentage)]
        }),
        "get_active_thread_percentage" => of_server(daemon, pid, percentage),
        "set_active_thread_percentage" => may_set(daemon, peer, |daemon| {
            of_server(daemon, pid, |daemon, server| {
                match word(1).and_then(value::percentage) {
                    Some(wanted) => {
                        server.ask(&daemon.log, |socket| {
                            socket.send(&ask::SET_PERCENTAGE.to_le_bytes())?;
                            socket.send(&wanted.to_le_bytes())
                        });
                    }
                    None => daemon.log.say(BAD_PERCENTAGE),
                }
                percentage(daemon, server)
            })
        }),
        "get_default_device_pinned_mem_limit" => default_memory(daemon, value::number(word(0))),
        "set_default_device_pinned_mem_limit" => may_set(daemon, peer, |daemon| {
            let device = word(0).unwrap_or_default();
            // The command expects a device number. For a UUID, use device 0 and the limit 0, as the
            // real daemon does.
            let is_number = device.parse::<i64>().is_ok();
            let limit = word(1).filter(|_| is_number).map_or(0, value::memory);
            match slot(value::number(Some(device))) {
                Some(at) => daemon.defaults.memory[at] = limit,
                None => daemon.log.say(BAD_DEVICE),
            }
            Vec::new()
        }),
        "get_device_pinned_mem_limit" => of_server(daemon, pid, |daemon, server| {
            let limit = device(daemon, word(1)).and_then(|device| {
                server.ask(&daemon.log, |socket| {
                    socket.send(&ask::MEMORY.to_le_bytes())?;
                    socket.send(&device.to_le_bytes())?;
                    Ok(u64::from_le_bytes(socket.receive_array()?))
                })
            });
            limit.and_then(value::shown_memory).into_iter().collect()
        }),
        "set_device_pinned_mem_limit" => may_set(daemon, peer, |daemon| {
            of_server(daemon, pid, |daemon, server| {
                if let Some(device) = device(daemon, word(1)) {
                    server.ask(&daemon.log, |socket| {
                        socket.send(&ask::SET_MEMORY.to_le_bytes())?;
                        socket.send(&device.to_le_bytes())?;
                        socket.send(&word(2).map_or(0, value::memory).to_le_bytes())
                    });
                }
                Vec::new()
            })
        }),
        "get_default_client_priority" => vec![daemon.defaults.priority.to_string()],
        "set_default_client_priority" => may_set(daemon, peer, |daemon| {
            match u32::try_from(value::number(word(0))) {
                Ok(priority @ 0..=1) => daemon.defaults.priority = priority,
                Ok(_) | Err(_) => return vec!["Invalid priority value - must be 0 or 1!".to_owned()],
            }
            Vec::new()
        }),
        "start_server" => start(daemon, &words, peer),
        "shutdown_server" => {
            if !Environment::is_root(peer.uid) {
                return (vec![insufficient(peer)], verdict);
            }
            if daemon.servers.of(pid).is_some() {
                daemon.servers.shutdown(word(1) == Some("-f"));
                Vec::new()
            } else {
                vec![not_found(pid)]
            }
        }
        "terminate_client" => terminate(daemon, pid, value::number(word(1))),
        "quit" if !Environment::is_root(peer.uid) => {
            vec!["Not enough privilege to execute quit command".to_owned()]
        }
        "quit" => {
            let seconds = (word(0) == Some("-t")).then(|| u64::try_from(value::number(word(1))).unwrap_or(0));
            verdict = Verdict::Quit { force_after: seconds.map(Duration::from_secs) };
            Vec::new()
        }
        unknown => vec![format!("Unknown command \"{unknown}\"")],
    };
    (answer, verdict)
}

const BAD_PERCENTAGE: &str = "Invalid percentage, expected between (0.0, 100.0]";
const BAD_DEVICE: &str = "Invalid device ordinal!";

fn not_found(pid: i64) -> String {
    format!("Server {pid} not found")
}

fn insufficient(peer: Peer) -> String {
    format!("Insufficient privileges for UID {}", peer.uid)
}

/// Returns the state of a server. Like NVIDIA's daemon, asks a server that is ready.
fn state(daemon: &DaemonState, server: &Server) -> &'static str {
    if server.failed {
        return "FAULT";
    }
    if !server.is_active() {
        return "INITIALIZING";
    }
    let works = server.ask(&daemon.log, |socket| {
        socket.send(&ask::STATUS.to_le_bytes())?;
        socket.receive_u32()
    });
    if works == Some(0) { "FAULT" } else { "ACTIVE" }
}

fn of_server(daemon: &DaemonState, pid: i64, answer: impl FnOnce(&DaemonState, &Server) -> Vec<String>) -> Vec<String> {
    match daemon.servers.of(pid) {
        Some(server) => answer(daemon, server),
        None => vec![not_found(pid)],
    }
}

/// Applies a setting if this peer is allowed to change it. In version 535, every user who can
/// connect is allowed.
fn may_set(daemon: &mut DaemonState, peer: Peer, set: impl FnOnce(&mut DaemonState) -> Vec<String>) -> Vec<String> {
    match daemon.version {
        Version::V550 | Version::V555 if !Environment::is_root(peer.uid) => vec![insufficient(peer)],
        Version::V535 | Version::V550 | Version::V555 => set(daemon),
    }
}

fn percentage(daemon: &DaemonState, server: &Server) -> Vec<String> {
    let has = server.ask(&daemon.log, |socket| {
        socket.send(&ask::PERCENTAGE.to_le_bytes())?;
        Ok(f64::from_le_bytes(socket.receive_array()?))
    });
    has.map(value::shown_percentage).into_iter().collect()
}

fn slot(device: i64) -> Option<usize> {
    usize::try_from(device).ok().filter(|&at| at < DEVICES as usize)
}

fn device(daemon: &DaemonState, word: Option<&str>) -> Option<u32> {
    let device = slot(value::number(word)).and_then(|at| u32::try_from(at).ok());
    if device.is_none() {
        daemon.log.say(BAD_DEVICE);
    }
    device
}

fn default_memory(daemon: &DaemonState, device: i64) -> Vec<String> {
    let Some(at) = slot(device) else {
        daemon.log.say(BAD_DEVICE);
        return Vec::new();
    };
    let shown = value::shown_memory(daemon.defaults.memory[at]);
    if shown.is_none() {
        daemon.log.say("No default pinned memory limit set for the device!");
    }
    shown.into_iter().collect()
}

fn start(daemon: &mut DaemonState, words: &[&str], peer: Peer) -> Vec<String> {
    let uid = match words {
        ["-uid", uid, ..] => uid.parse::<u32>().ok(),
        _ => None,
    };
    match uid {
        None => vec!["A user id (UID) is required to start a new server".to_owned()],
        Some(uid) if uid != peer.uid && !Environment::is_root(peer.uid) => vec![insufficient(peer)],
        Some(uid) => {
            daemon.servers.start(uid, &daemon.log);
            Vec::new()
        }
    }
}

/// Ends the work of a client. Returns the status. If the status is 1, also returns the reason.
fn terminate(daemon: &DaemonState, server: i64, client: i64) -> Vec<String> {
    let one = || "1".to_owned();
    let Some(found) = daemon.servers.of(server) else {
        return vec![not_found(server), format!("Server {server} not found!"), one()];
    };
    if !std::path::Path::new(&format!("/proc/{client}")).exists() {
        return vec![format!("Invalid process {client}!"), one()];
    }
    let client = u32::try_from(client).unwrap_or_default();
    let status = found.ask(&daemon.log, |socket| {
        socket.send(&ask::TERMINATE.to_le_bytes())?;
        socket.send(&client.to_le_bytes())?;
        socket.receive_u32()
    });
    match status {
        Some(status) => vec![status.to_string()],
        None => vec![format!("Server {server} not found!"), one()],
    }
}

fn processes(daemon: &DaemonState) -> Vec<String> {
    let rows = daemon.servers.now().and_then(|server| {
        let rows = server.ask(&daemon.log, |socket| {
            socket.send(&ask::PROCESSES.to_le_bytes())?;
            let count = socket.receive_u32()?;
            let rows = (0..count).map(|_| socket.receive_array::<ROW>()).collect::<Result<Vec<_>, _>>()?;
            socket.send(&0_u32.to_le_bytes())?;
            Ok(rows)
        });
        rows.map(|rows| (server.pid(), rows))
    });
    match rows {
        None => vec!["Server not found".to_owned()],
        Some((_, rows)) if rows.is_empty() => Vec::new(),
        Some((server, rows)) => {
            let head = ["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"].map(str::to_owned);
            std::iter::once(line(&head)).chain(rows.iter().map(|bytes| row(server, bytes))).collect()
        }
    }
}

fn line([pid, id, server, device, namespace, command]: &[String; 6]) -> String {
    format!("{pid:<10}{id:<10}{server:<15}{device:<26}{namespace:<15}{command:<15}")
}

/// Formats a row of `ps`: the pid, an empty column, whether the device is a MIG device, the
/// device's UUID, and the number of the client.
fn row(server: i32, bytes: &[u8; ROW]) -> String {
    let word = |at: usize| bytes[at..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
    let pid = word(0);
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&bytes[16..32]);
    let device = Device { mig: word(8) != 0, uuid };
    let namespace =
        std::fs::metadata(format!("/proc/{pid}/ns/pid")).map_or(0, |found| std::os::unix::fs::MetadataExt::ino(&found));
    let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let command = command.split('\0').next().unwrap_or_default().to_owned();
    let texts =
        [pid.to_string(), word(32).to_string(), server.to_string(), shown(device), namespace.to_string(), command];
    line(&texts)
}

/// Returns a UUID, truncated to the width of the table.
fn shown(device: Device) -> String {
    let hex: String = device.uuid[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}", if device.mig { "MIG" } else { "GPU" }, &hex[..8], &hex[8..12], &hex[12..16])
}

/// Encodes the row of `ps` that a server sends for a client. [`row`] decodes it.
pub(crate) fn encoded(pid: u32, device: Device, number: u32) -> [u8; ROW] {
    let mut bytes = [0; ROW];
    bytes[0..4].copy_from_slice(&pid.to_le_bytes());
    bytes[8..12].copy_from_slice(&u32::from(device.mig).to_le_bytes());
    bytes[16..32].copy_from_slice(&device.uuid);
    bytes[32..36].copy_from_slice(&number.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_row_is_as_recorded() {
        let uuid = std::array::from_fn(|at| u8::try_from(at).map_or(0, |at| at + 17));
        let row = row(29156, &encoded(4_194_300, Device { mig: true, uuid }, 7));
        assert_eq!(row, "4194300   7         29156          MIG-11121314-1516-1718    0                             ");
    }
}
