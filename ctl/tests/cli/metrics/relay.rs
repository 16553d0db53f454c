//! Runs `gpushctl metrics serve`, and sends requests to it.

use std::{
    io::{BufRead as _, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, ChildStderr, Stdio},
};

use crate::support::Host;

/// A running relay. It ends with this value.
pub(super) struct Relay {
    pub(super) child: Child,
    pub(super) address: SocketAddr,
    pub(super) stderr: BufReader<ChildStderr>,
    /// The lines before the relay served, without the line with the address.
    pub(super) first_lines: Vec<String>,
}

impl Relay {
    /// Starts a relay on a free port of 127.0.0.1, and waits until it serves.
    pub(super) fn start(host: &Host, args: &[&str]) -> Self {
        let args = [&["metrics", "serve", "--listen", "127.0.0.1:0"], args].concat();
        let mut child = host.command(&args).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut first_lines = Vec::new();
        loop {
            let mut line = String::new();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "the relay ended: {first_lines:?}");
            let Some((_, rest)) = line.split_once("://") else {
                first_lines.push(line);
                continue;
            };
            let address = rest.trim_end().trim_end_matches("/metrics").parse().unwrap();
            return Self { child, address, stderr, first_lines };
        }
    }

    pub(super) fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).unwrap()
    }

    /// Sends `GET path` over plain HTTP.
    pub(super) fn get(&self, path: &str, headers: &[(&str, &str)]) -> HttpAnswer {
        exchange(&mut self.connect(), &request("GET", path, headers))
    }

    /// Sends SIGHUP, and waits until the relay prints a line that contains this text.
    pub(super) fn reload(&mut self, until: &str) -> String {
        let pid = nix::unistd::Pid::from_raw(self.child.id().try_into().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGHUP).unwrap();
        self.lines_until(until)
    }

    /// Waits until the relay prints a line that contains this text. Returns all lines since the last call.
    pub(super) fn lines_until(&mut self, until: &str) -> String {
        let mut lines = String::new();
        while !lines.contains(until) {
            assert!(self.stderr.read_line(&mut lines).unwrap() > 0, "the relay ended: {lines}");
        }
        lines
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Formats a request. The relay closes the connection after its answer.
pub(super) fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> String {
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("{method} {path} HTTP/1.1\r\nhost: relay\r\nconnection: close\r\n{headers}\r\n")
}

/// Sends a request and reads until the connection ends.
pub(super) fn exchange(stream: &mut (impl Read + Write), request: &str) -> HttpAnswer {
    stream.write_all(request.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    HttpAnswer::parse(&String::from_utf8(bytes).unwrap())
}

/// An answer of the relay.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HttpAnswer {
    pub(super) status: u16,
    pub(super) head: String,
    pub(super) body: String,
}

impl HttpAnswer {
    fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("not an answer: {text}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }
}
