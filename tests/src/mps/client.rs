//! A CUDA program on a simulated host, and the lines that it prints about its MPS server.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
};

use crate::{
    agent::PATIENCE,
    host::{Host, program},
};

/// A simulated CUDA program that computes nothing. It runs from [`Client::start`] until this value
/// is dropped.
#[derive(Debug)]
pub struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    /// The first line that the program printed, such as `active …`.
    pub first: String,
}

impl Client {
    /// Starts a program, and waits for its first line. The program gets this environment in
    /// addition to the environment of the host.
    ///
    /// # Panics
    /// If the program cannot be started.
    #[must_use]
    pub fn start(host: &Host, environment: &[(String, String)]) -> Self {
        let mut client = Self::begin(host, environment, None);
        client.first = client.says();
        client
    }

    /// Starts a program, and does not wait for its first line, because the program may have to wait
    /// for a server. With `uid`, the program runs as that user.
    ///
    /// # Panics
    /// If the program cannot be started.
    #[must_use]
    pub fn begin(host: &Host, environment: &[(String, String)], uid: Option<u32>) -> Self {
        let mut command = host.command(program("gpush-sim"));
        command.arg("mps-client");
        Self::spawn(command, environment, uid)
    }

    /// Does the same as [`Client::begin`], but the program ignores SIGTERM.
    ///
    /// # Panics
    /// If the program cannot be started.
    #[must_use]
    pub fn begin_ignoring_sigterm(host: &Host, environment: &[(String, String)], uid: Option<u32>) -> Self {
        let mut command = host.command("/bin/sh");
        command.args(["-c", "trap '' TERM; exec \"$0\" mps-client"]).arg(program("gpush-sim"));
        Self::spawn(command, environment, uid)
    }

    fn spawn(mut command: Command, environment: &[(String, String)], uid: Option<u32>) -> Self {
        command.envs(environment.iter().map(|(name, value)| (name, value)));
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

    /// Returns the pid of the program.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Waits for the program's next line, and returns it.
    ///
    /// # Panics
    /// If no line comes in time.
    #[must_use]
    pub fn says(&self) -> String {
        self.lines.recv_timeout(PATIENCE).expect("the client prints a line")
    }

    /// Returns the lines that the program has printed since the last call.
    #[must_use]
    pub fn printed(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }

    /// Returns a value from the program's first line: for the name `server`, the `1234` of
    /// `server=1234`.
    ///
    /// # Panics
    /// If the first line does not have the name.
    #[must_use]
    pub fn word(&self, name: &str) -> String {
        let words: BTreeMap<&str, &str> = self.first.split(' ').filter_map(|word| word.split_once('=')).collect();
        (*words.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.first))).to_owned()
    }

    /// Returns whether the program still runs.
    #[must_use]
    pub fn lives(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Asks the program to end, and waits until it has ended.
    ///
    /// # Panics
    /// If the program cannot be waited for.
    pub fn end(mut self) {
        if let Some(mut stdin) = self.stdin.take() {
            // Ignore an error: the program may have ended already.
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
