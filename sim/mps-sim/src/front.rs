//! The front-end: sends lines from standard input, and prints answers to standard output. As with the real one, its
//! exit code says only whether there is a daemon.

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
    let at = |door: &str| Socket::introduced(&pipe.join(door), Kind::UserInterface);
    let door = match at("control_privileged") {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => at("control"),
        other => other,
    };
    let Ok(door) = door else {
        eprintln!("Cannot find MPS control daemon process");
        return Ok(ExitCode::FAILURE);
    };
    let door = Arc::new(door);
    let heard = Arc::clone(&door);
    std::thread::spawn(move || {
        answers(&heard);
        // Ends even if standard input continues: another process holds the control connection, or the daemon has
        // ended.
        std::process::exit(0)
    });
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let body = [line.as_bytes(), b"\n\0"].concat();
        if door.send(&(body.len() as u64).to_le_bytes()).and_then(|()| door.send(&body)).is_err() {
            break;
        }
    }
    let _closed = door.send(&0_u64.to_le_bytes());
    loop {
        std::thread::park();
    }
}

/// Prints answers until the status arrives or the connection closes.
fn answers(door: &Socket) {
    while let Ok(said) = door.receive() {
        let Some((kind, text)) = said.bytes.split_first_chunk::<4>() else { break };
        if u32::from_le_bytes(*kind) != 0 {
            break;
        }
        let mut out = io::stdout().lock();
        let _reader_gone = out.write_all(text).and_then(|()| out.write_all(b"\n"));
    }
}
