//! MPS on a simulated host: its daemons as gpushd tells of them and as the kernel does, and clients.
//!
//! Which daemons there are is never asked of gpushd alone: every process has an environment, and that
//! of a control daemon and all that it started names the pipe directory.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::{fs::symlink, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Stdio},
    sync::mpsc::{Receiver, channel},
    time::Instant,
};

use gpush_api::{ApiError, MpsDaemon, MpsShareTaken, MpsState};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::{
    agent::{Agent, Answer, PATIENCE},
    host::{Host, program},
};

/// File names of NVIDIA's programs.
const CONTROL: &str = "nvidia-cuda-mps-control";
const SERVER: &str = "nvidia-cuda-mps-server";

/// A daemon by any of its names, looked at now.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn daemon(agent: &Agent, target: &str) -> MpsDaemon {
    let answer = agent.get(&format!("/v1/mps/{target}"));
    assert_eq!(answer.status, 200, "{target}: {}", String::from_utf8_lossy(&answer.body));
    serde_json::from_value(answer.json()).expect("a daemon")
}

/// All daemons, as they were seen last.
///
/// # Panics
/// When they can't be had.
#[must_use]
pub fn daemons(agent: &Agent) -> Vec<MpsDaemon> {
    serde_json::from_value(agent.get("/v1/mps").json()).expect("daemons")
}

/// Waits until a daemon is in a state.
///
/// # Panics
/// When it does not come to it.
pub fn reaches(agent: &Agent, target: &str, state: MpsState) -> MpsDaemon {
    becomes(agent, target, state.name(), |daemon| daemon.state == state)
}

/// Waits until a daemon is as `is` says.
///
/// # Panics
/// When it does not become so.
pub fn becomes(agent: &Agent, target: &str, what: &str, is: impl Fn(&MpsDaemon) -> bool) -> MpsDaemon {
    let until = Instant::now() + PATIENCE;
    let mut last = None;
    loop {
        let answer = agent.get(&format!("/v1/mps/{target}"));
        let now: Option<MpsDaemon> =
            (answer.status == 200).then(|| serde_json::from_value(answer.json()).ok()).flatten();
        match now {
            Some(daemon) if is(&daemon) => return daemon,
            other => last = other.or(last),
        }
        assert!(Instant::now() < until, "{target} is not {what}: {last:#?}\n{}", agent.log());
        // To ask all the time would take the agent's processor.
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// `start`, `stop`, `restart` or `drain`, with what the body says.
#[must_use]
pub fn act(agent: &Agent, target: &str, verb: &str, body: &Value) -> Answer {
    agent.post(&format!("/v1/mps/{target}/{verb}"), body)
}

/// Takes a share.
///
/// # Errors
/// The refusal.
///
/// # Panics
/// When the answer is neither.
pub fn share(agent: &Agent, target: &str, body: &Value) -> Result<MpsShareTaken, ApiError> {
    let answer = agent.post(&format!("/v1/mps/{target}/shares"), body);
    if answer.status >= 400 {
        return Err(answer.error());
    }
    Ok(serde_json::from_value(answer.json()).expect("a share"))
}

/// Where a host's daemons have their directories.
///
/// # Panics
/// When the host names none.
#[must_use]
pub fn base(host: &Host) -> PathBuf {
    PathBuf::from(host.env().get("GPUSH_MPS_DIR").expect("a host has a directory for MPS daemons"))
}

/// A fault of the stand-ins: the words after `gpush-sim mps DIR fault add`; its number.
///
/// # Panics
/// When it is refused.
pub fn fault(host: &Host, rule: &str) -> String {
    let words: Vec<&str> = ["fault", "add"].into_iter().chain(rule.split_whitespace()).collect();
    host.sim("mps", &words).trim().to_owned()
}

/// Ends all faults of the stand-ins; what they held up goes on.
///
/// # Panics
/// When they can't be ended.
pub fn clear_faults(host: &Host) {
    host.sim("mps", &["fault", "clear"]);
}

/// A directory with NVIDIA's own control daemon and the stand-in of its server, which needs no GPU;
/// `None`, said, where it is not installed.
///
/// # Panics
/// When it can't be made.
#[must_use]
pub fn real_programs(host: &Host, what: &str) -> Option<PathBuf> {
    let real = Path::new("/usr/bin").join(CONTROL);
    if !real.is_file() {
        println!("SKIPPED {what}: {CONTROL} is not installed (Debian's package nvidia-cuda-mps)");
        return None;
    }
    // Beside the host's own `bin`: the stand-in of the server knows its host by where it lies.
    let dir = host.dir().join("real");
    fs::create_dir_all(&dir).expect("a directory");
    symlink(real, dir.join(CONTROL)).expect("a link");
    symlink(program("gpush-sim"), dir.join(SERVER)).expect("a link");
    Some(dir)
}

/// A process that belongs to a pipe directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Part {
    /// Its pid.
    pub pid: i32,
    /// What it is.
    pub role: Role,
    /// Its pipe directory.
    pub pipe: PathBuf,
}

/// What a process that names a pipe directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The control daemon.
    Control,
    /// A server of one.
    Server,
    /// Anything else, such as a client.
    Other,
}

/// Processes that live and name a pipe directory below `base`, by the kernel's word.
///
/// # Panics
/// When there is no `/proc`.
#[must_use]
pub fn parts(base: &Path) -> Vec<Part> {
    let mut parts = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // Empty of a zombie, which is no process any more.
        let Ok(environment) = fs::read(entry.path().join("environ")) else { continue };
        let named =
            environment.split(|byte| *byte == 0).find_map(|word| word.strip_prefix(b"CUDA_MPS_PIPE_DIRECTORY="));
        let Some(pipe) = named.map(|path| PathBuf::from(String::from_utf8_lossy(path).into_owned())) else { continue };
        if !pipe.starts_with(base) {
            continue;
        }
        let called = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let called = called.split(|byte| *byte == 0).next().map(String::from_utf8_lossy).unwrap_or_default();
        let role = match Path::new(called.as_ref()).file_name().and_then(|name| name.to_str()) {
            Some(CONTROL) => Role::Control,
            Some(SERVER) => Role::Server,
            Some(_) | None => Role::Other,
        };
        parts.push(Part { pid, role, pipe });
    }
    parts.sort();
    parts
}

/// Pids of the control daemons that live below `base`.
#[must_use]
pub fn controls(base: &Path) -> Vec<i32> {
    let all = parts(base);
    all.into_iter().filter(|part| part.role == Role::Control).map(|part| part.pid).collect()
}

/// Names in a directory, sorted; none where it is not there.
#[must_use]
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Sends a process a signal; whether it was there.
#[must_use]
pub fn signal(pid: i32, signal: Signal) -> bool {
    kill(Pid::from_raw(pid), signal).is_ok()
}

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
