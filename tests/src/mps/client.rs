//! A CUDA program of a simulated host, as its daemon and its user see it.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, Stdio},
    sync::mpsc::{Receiver, channel},
};

use crate::{
    agent::PATIENCE,
    host::{Host, program},
};

/// A CUDA program that does nothing, from [`Client::start`] until dropped.
#[derive(Debug)]
pub struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    /// What became of it first.
    pub first: String,
}

impl Client {
    /// One with this environment besides the host's, once it is known what became of it.
    ///
    /// # Panics
    /// When it can't be started.
    #[must_use]
    pub fn start(host: &Host, environment: &[(String, String)]) -> Self {
        let mut client = Self::begin(host, environment, None);
        client.first = client.says();
        client
    }

    /// The same, which may still be waiting for a server; of another user where one is named.
    ///
    /// # Panics
    /// When it can't be started.
    #[must_use]
    pub fn begin(host: &Host, environment: &[(String, String)], uid: Option<u32>) -> Self {
        let mut command = host.command(program("gpush-sim"));
        command.arg("mps-client").envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        if let Some(uid) = uid {
            command.uid(uid).gid(uid).current_dir("/").env("HOME", "/");
        }
        let mut child = command.spawn().expect("gpush-sim can be started");
        let (tell, lines) = channel();
        let out = BufReader::new(child.stdout.take().expect("piped"));
        std::thread::spawn(move || out.lines().map_while(Result::ok).all(|line| tell.send(line).is_ok()));
        Self { stdin: child.stdin.take(), child, lines, first: String::new() }
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// What it says next.
    ///
    /// # Panics
    /// When it says nothing.
    #[must_use]
    pub fn says(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("a client says what becomes of it")
    }

    /// What it has said since.
    #[must_use]
    pub fn said(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }

    /// A word of its first line: `server=1234` for `server`.
    ///
    /// # Panics
    /// When it was not served.
    #[must_use]
    pub fn word(&self, name: &str) -> String {
        let words: BTreeMap<&str, &str> = self.first.split(' ').filter_map(|word| word.split_once('=')).collect();
        (*words.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.first))).to_owned()
    }

    /// Whether it lives.
    #[must_use]
    pub fn lives(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Has it end, and waits until it has.
    ///
    /// # Panics
    /// When it can't be waited for.
    pub fn end(mut self) {
        if let Some(mut stdin) = self.stdin.take() {
            // It may have ended by itself.
            let _ = stdin.write_all(b"end\n");
        }
        self.child.wait().expect("a child can be waited for");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
