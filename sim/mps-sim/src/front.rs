//! The front-end: sends lines from standard input to the daemon, and prints the answers. As with
//! NVIDIA's front-end, the exit code only shows whether a daemon is running.

use std::{
    io::{self, BufRead, Write},
    process::ExitCode,
    sync::Arc,
};

use crate::{
    place,
    wire::{Kind, Socket},
};

pub(crate) fn run() -> anyhow::Result<ExitCode> {
    let pipe = place::pipe();
    let at = |socket: &str| Socket::introduced(&pipe.join(socket), Kind::UserInterface);
    let socket = match at("control_privileged") {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => at("control"),
        other => other,
    };
    let Ok(socket) = socket else {
        errln!("Cannot find MPS control daemon process");
        return Ok(ExitCode::FAILURE);
    };
    let socket = Arc::new(socket);
    let heard = Arc::clone(&socket);
    std::thread::spawn(move || {
        answers(&heard);
        // The daemon has closed the connection or has ended. So exit, even if the standard input is
        // still open.
        std::process::exit(0)
    });
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let body = [line.as_bytes(), b"\n\0"].concat();
        if socket.send(&(body.len() as u64).to_le_bytes()).and_then(|()| socket.send(&body)).is_err() {
            break;
        }
    }
    let _closed = socket.send(&0_u64.to_le_bytes());
    loop {
        std::thread::park();
    }
}

/// Prints answers until the status arrives or the connection closes.
fn answers(socket: &Socket) {
    while let Ok(message) = socket.receive() {
        let Some((kind, text)) = message.bytes.split_first_chunk::<4>() else { break };
        if u32::from_le_bytes(*kind) != 0 {
            break;
        }
        let mut out = io::stdout().lock();
        let _reader_gone = out.write_all(text).and_then(|()| out.write_all(b"\n"));
    }
}
