//! The server. It serves the clients that the daemon passes to it, and answers the daemon's queries
//! about these clients.
//!
//! This server also works with NVIDIA's control daemon, because NVIDIA's daemon and the simulated daemon send the same
//! queries (README.md). The protocol between the server and its clients exists only in this simulation:
//!
//! ```text
//! client ► its credentials and `percentage=25 memory=0=2G`     from its environment
//! server ► `server=PID percentage=25.0 device=GPU-… memory=2048`   its settings; MiB, if there is a limit
//! server ► `fault`                                             its context is lost
//! ```
//!
//! The server ends on SIGINT, or when the daemon has asked it to end and all its clients have ended. It continues if
//! its daemon ends. In a simulated host, it also ends with that host, but not when its pipe directory is removed.
//! Outside a simulated host, it ends when its pipe directory is removed.

use std::{
    io,
    process::ExitCode,
    sync::{Arc, MutexGuard},
    time::Duration,
};

use anyhow::Context;
use gpush_locked::Locked;
use silicon::machine::ProcessKind;

use crate::{
    command,
    fault::Kind as Fault,
    log::{Log, Source},
    place::{Device, Environment},
    servers::{DEVICES, ask},
    value,
    wire::{Kind, Peer, Socket},
};

/// Memory in MiB that the server itself uses.
const OWN_MEMORY: u64 = 30;

#[derive(Debug)]
struct Client {
    peer: Peer,
    number: u32,
    socket: Arc<Socket>,
}

#[derive(Debug, Default)]
struct State {
    clients: Vec<Client>,
    /// Number of sockets with a client, including clients that have not identified themselves yet.
    served: u32,
    numbers: u32,
    percentage: f64,
    memory: Vec<u64>,
    leaving: bool,
    failed: bool,
}

struct Server {
    place: Environment,
    log: Log,
    device: String,
    state: Locked<State>,
}

pub(crate) fn run(place: Environment) -> anyhow::Result<ExitCode> {
    let log = Log::of(&place.pipe, Source::Server);
    if place.faults.fires(Fault::ServerDies).is_some() {
        log.say("Failed to start : the device is unavailable");
        return Ok(ExitCode::FAILURE);
    }
    let device = place.device_name();
    log.say("Creating server context on device 0");
    if let Some(rule) = place.faults.fires(Fault::NeverActive) {
        while place.faults.is_there(&rule) && !place.is_abandoned() {
            std::thread::sleep(crate::fault::LOOK);
        }
    }
    if let Err(error) = place.occupy(&device, ProcessKind::Compute, OWN_MEMORY) {
        log.say(&format!("Failed to start : {error}"));
        return Ok(ExitCode::FAILURE);
    }
    place.stay_idle()?;
    let control = Socket::introduced(&place.pipe.join("control"), Kind::Server).context("no daemon")?;
    control.send(&0_u32.to_le_bytes())?;
    let mut state = State { percentage: f64::from_le_bytes(control.receive_array()?), ..State::default() };
    let devices = u64::from_le_bytes(control.receive_array()?);
    for _ in 0..devices.min(u64::from(DEVICES)) {
        state.memory.push(u64::from_le_bytes(control.receive_array()?));
    }
    control.receive_u32()?;
    let server = Arc::new(Server { place, log, device, state: Locked::new(state) });
    let watched = Arc::clone(&server);
    std::thread::spawn(move || watched.watch());
    // The daemon has asked this server to end, or the daemon itself has ended. In both cases, the server serves its
    // clients until they end.
    let _end = server.answer(&control);
    drop(control);
    loop {
        std::thread::park();
    }
}

impl Server {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Answers the daemon until the connection closes.
    fn answer(self: &Arc<Self>, control: &Socket) -> io::Result<()> {
        loop {
            match control.receive_u32()? {
                ask::CLIENT => {
                    if let Some(socket) = control.receive()?.socket {
                        // Count the client now, because the next message of the daemon may be the request to end.
                        self.state().served += 1;
                        let server = Arc::clone(self);
                        std::thread::spawn(move || server.serve(socket));
                    }
                }
                ask::LEAVE => {
                    control.receive_u32()?;
                    self.state().leaving = true;
                    self.end_if_done();
                }
                ask::CLIENTS => {
                    let pids: Vec<u32> = self.state().clients.iter().map(|one| one.peer.pid.cast_unsigned()).collect();
                    send_all(control, pids.into_iter().map(u32::to_le_bytes))?;
                }
                ask::PERCENTAGE => {
                    let percentage = self.state().percentage;
                    control.send(&percentage.to_le_bytes())?;
                }
                ask::SET_PERCENTAGE => self.state().percentage = f64::from_le_bytes(control.receive_array()?),
                ask::MEMORY => {
                    let device = control.receive_u32()? as usize;
                    let limit = self.state().memory.get(device).copied().unwrap_or(0);
                    control.send(&limit.to_le_bytes())?;
                }
                ask::SET_MEMORY => {
                    let device = control.receive_u32()? as usize;
                    let limit = u64::from_le_bytes(control.receive_array()?);
                    if let Some(slot) = self.state().memory.get_mut(device) {
                        *slot = limit;
                    }
                }
                ask::TERMINATE => {
                    let pid = control.receive_u32()?;
                    control.send(&u32::from(!self.terminate(pid)).to_le_bytes())?;
                }
                ask::PROCESSES => {
                    let device = Device::of_uuid(&self.device);
                    let row = |one: &Client| command::encoded(one.peer.pid.cast_unsigned(), device, one.number);
                    let rows: Vec<_> = self.state().clients.iter().map(row).collect();
                    send_all(control, rows.into_iter())?;
                    control.receive_u32()?;
                }
                ask::STATUS => {
                    let works = !self.state().failed;
                    control.send(&u32::from(works).to_le_bytes())?;
                }
                unknown => self.log.say(&format!("the daemon asks {unknown}, which is not known here")),
            }
        }
    }

    /// Serves a client until it disconnects.
    fn serve(&self, socket: Socket) {
        let served = || -> io::Result<()> {
            let socket = Arc::new(socket.ask_names()?);
            let hello = socket.receive()?;
            let peer = hello.from.ok_or(io::ErrorKind::InvalidData)?;
            let message = String::from_utf8_lossy(&hello.bytes).into_owned();
            let own = message.split(' ').find_map(|word| word.strip_prefix("percentage=")).and_then(value::percentage);
            let own_memory = message.split(' ').find_map(|word| word.strip_prefix("memory=0=")).map(value::memory);
            let (percentage, memory) = {
                let mut state = self.state();
                let number = state.numbers;
                state.numbers += 1;
                state.clients.push(Client { peer, number, socket: Arc::clone(&socket) });
                let limits = own_memory.into_iter().chain(state.memory.first().copied());
                let memory = limits.filter(|bytes| *bytes > 0).min();
                (own.map_or(state.percentage, |own| own.min(state.percentage)), memory)
            };
            self.log.say(&format!("Client {} from user {}: {message}", peer.pid, peer.uid));
            let answer = format!(
                "server={} percentage={} device={}{}",
                std::process::id(),
                value::shown_percentage(percentage),
                self.device,
                memory.map_or_else(String::new, |bytes| format!(" memory={}", bytes >> 20))
            );
            let greeted = socket.send(answer.as_bytes());
            // The client sends nothing more, so the loop only waits until the connection ends.
            while greeted.is_ok() && socket.receive().is_ok() {}
            self.state().clients.retain(|one| !Arc::ptr_eq(&one.socket, &socket));
            self.log.say(&format!("Client {} disconnected", peer.pid));
            Ok(())
        };
        if served().is_err() {
            self.log.say("a client left before it was served");
        }
        self.state().served -= 1;
        self.end_if_done();
    }

    /// Ends the work of a client. Returns whether the client existed.
    fn terminate(&self, pid: u32) -> bool {
        let clients = &self.state().clients;
        let found = clients.iter().find(|one| one.peer.pid.cast_unsigned() == pid);
        found.is_some_and(|one| one.socket.send(b"terminated").is_ok())
    }

    fn end_if_done(&self) {
        let state = self.state();
        if state.leaving && state.served == 0 {
            self.log.say("Exiting");
            std::process::exit(0);
        }
    }

    /// Checks in a loop for faults, and for the end of the simulated host or of the pipe directory.
    fn watch(&self) {
        loop {
            if self.place.is_abandoned() {
                std::process::exit(0);
            }
            let failed = self.state().failed;
            if !failed && self.place.faults.fires(Fault::Fault).is_some() {
                self.fail();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Simulates a fatal exception: all clients lose their contexts, and the server notifies the
    /// daemon.
    fn fail(&self) {
        self.log.say("Fatal GPU exception");
        {
            let mut state = self.state();
            state.failed = true;
            for client in &state.clients {
                let _gone = client.socket.send(b"fault");
            }
        }
        let reported = Socket::introduced(&self.place.pipe.join("control"), Kind::FatalException);
        let _no_daemon = reported.and_then(|reported| reported.receive_u32());
    }
}

fn send_all<const N: usize>(to: &Socket, all: impl ExactSizeIterator<Item = [u8; N]>) -> io::Result<()> {
    to.send(&u32::try_from(all.len()).unwrap_or(u32::MAX).to_le_bytes())?;
    all.into_iter().try_for_each(|one| to.send(&one))
}
