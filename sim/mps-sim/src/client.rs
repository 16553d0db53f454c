//! A simulated CUDA program. It connects to an MPS server as libcuda does, and then idles until a
//! caller asks it to end.
//!
//! The client prints one line with the result, and a line for each later event:
//!
//! ```text
//! active server=1234 percentage=25.0 device=GPU-…     a server serves the client
//! without MPS          no daemon listens: the client runs without MPS, as libcuda does
//! error 805            the daemon has no server for the client, and the client ends
//! error 46             the compute mode of the GPU does not allow a context, and the client ends
//! fault, terminated    the client's context is lost, and the client continues
//! lost                 the client's server has ended, and the client ends
//! ```
//!
//! Outside a simulated host, the line `active` has no `device`. If the server has a memory limit,
//! the line `active` also has the limit in MiB, for example `memory=2048`.
//!
//! The client ends when it reads a line `end` on standard input. If standard input is closed, the
//! client continues. On a simulated host, the client registers on the device of its server, so that
//! NVML lists it as an MPS client. It registers `$MPS_SIM_MEMORY` MiB of memory, or 512 MiB.

use std::{
    io::{self, BufRead},
    path::Path,
    process::ExitCode,
};

use silicon::machine::ProcessKind;

use crate::{
    place::{Environment, NoContext, variable},
    wire::{self, Kind, Socket},
};

/// Runs the client.
#[must_use]
pub fn main() -> ExitCode {
    let place = Environment::of_environment();
    std::thread::spawn(|| {
        for line in io::stdin().lock().lines() {
            if line.is_ok_and(|line| line.trim() == "end") {
                std::process::exit(0);
            }
        }
    });
    match reach(&place.pipe) {
        Err(Unreached::NoDaemon) => {
            outln!("without MPS");
            if !occupy(&place, &place.device_name(), ProcessKind::Compute) {
                return ExitCode::FAILURE;
            }
            loop {
                std::thread::park();
            }
        }
        Err(Unreached::NoServer) => {
            outln!("error 805");
            ExitCode::FAILURE
        }
        Ok((server, first)) => {
            let device = first.split(' ').find_map(|word| word.strip_prefix("device="));
            if !occupy(&place, device.unwrap_or_default(), ProcessKind::Mps) {
                return ExitCode::FAILURE;
            }
            outln!("active {first}");
            while let Ok(message) = server.receive() {
                outln!("{}", String::from_utf8_lossy(&message.bytes));
            }
            outln!("lost");
            ExitCode::FAILURE
        }
    }
}

/// The reason why a client did not get a server.
pub(crate) enum Unreached {
    /// No daemon listens, so the client runs without MPS.
    NoDaemon,
    /// The daemon has no server for the client.
    NoServer,
}

/// Asks the daemon of a pipe directory for a server. Returns the socket to the server, and the
/// server's first message.
pub(crate) fn reach(pipe: &Path) -> Result<(Socket, String), Unreached> {
    let control = Socket::introduced(&pipe.join("control"), Kind::Client).map_err(|_| Unreached::NoDaemon)?;
    let served = || -> io::Result<(Socket, String)> {
        let packet = control.receive()?;
        let server = packet.socket.filter(|_| packet.bytes == wire::SOCKET).ok_or(io::ErrorKind::InvalidData)?;
        // The daemon waits for this message from the client.
        control.send(&0_u32.to_le_bytes())?;
        let server = server.ask_names()?;
        let mut wishes = Vec::new();
        for (name, its) in [
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "percentage"),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "memory"),
            ("CUDA_MPS_CLIENT_PRIORITY", "priority"),
        ] {
            wishes.extend(variable(name).map(|value| format!("{its}={}", value.replace(' ', ""))));
        }
        server.send_named(format!("{} ", wishes.join(" ")).as_bytes())?;
        let first = server.receive()?.bytes;
        Ok((server, String::from_utf8_lossy(&first).into_owned()))
    };
    served().map_err(|_| Unreached::NoServer)
}

/// Creates the context. Returns false, and prints the error as CUDA reports it, if the compute mode of the GPU does not
/// allow a context.
fn occupy(place: &Environment, device: &str, kind: ProcessKind) -> bool {
    let memory = variable("MPS_SIM_MEMORY").and_then(|mib| mib.parse().ok()).unwrap_or(512);
    match place.occupy(device, kind, memory) {
        Ok(()) => true,
        Err(NoContext::Unavailable) => {
            outln!("error 46");
            false
        }
        Err(NoContext::Host(error)) => {
            errln!("mps-sim: {error}");
            true
        }
    }
}
