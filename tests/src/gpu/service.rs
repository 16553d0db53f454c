//! A separate gpushd for the checks, which shares the first GPU through MPS. The checks control
//! this gpushd with `gpushctl`, as users do.
//!
//! Everything is in a scratch directory: config, sockets, state, MPS daemons. Every process that
//! the service starts, directly or indirectly, has the path of this directory in its environment.
//! So the cleanup finds all processes by this path, even after a failure.

use std::{
    fs,
    io::ErrorKind,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, Instant},
};

use gpush_api::{ApiError, LeaseGrant, MpsDaemon, MpsState, MpsUsers};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::de::DeserializeOwned;
use tokio::{
    net::UnixDatagram,
    process::{Child, Command},
    time::{sleep, timeout},
};

use super::{
    LOOK, PATIENCE,
    client::{Client, Work},
    ground::Ground,
};

/// The index of the first GPU, as an argument of `gpushctl mps`.
pub const TARGET: &str = "0";

/// Time limit within which remaining processes must end. Then they are killed.
const GOING: Duration = Duration::from_secs(20);

/// The separate gpushd, and all processes that the service has started.
#[derive(Debug)]
pub struct Service {
    gpushd: Option<Child>,
    notify: UnixDatagram,
    programs: PathBuf,
    client: Vec<String>,
    uuid: String,
    clients: u32,
    // When the service is dropped, this directory is removed.
    scratch: tempfile::TempDir,
}

impl Service {
    /// Prepares the service, but starts no process. [`Self::start`] needs NVIDIA's programs for MPS. `programs` is the directory of gpush's
    /// programs, `client` is the command of the clients, and `users` is a setting of the MPS
    /// daemon.
    ///
    /// # Errors
    /// If the scratch directory cannot be created.
    pub fn new(ground: &Ground, programs: &Path, client: &[String], users: MpsUsers) -> Result<Self, String> {
        let cannot = |error: std::io::Error| format!("a scratch directory can't be made: {error}");
        let scratch = tempfile::Builder::new().prefix("gpush-gpu-").tempdir().map_err(cannot)?;
        let notify = UnixDatagram::bind(scratch.path().join("notify")).map_err(cannot)?;
        let users = match users {
            MpsUsers::One => "one",
            MpsUsers::Many => "many",
        };
        // Set one health check per second. gpushd finds clients only through its health check, and
        // the checks wait for clients to appear.
        let control = ground.mps.as_ref().map_or_else(String::new, |mps| format!("control = {:?}\n", mps.control));
        let config = format!(
            "[mps]\n{control}health = \"1s\"\n\n[[gpu]]\nmatch = [\"{TARGET}\"]\nmode = \"mps\"\n\
             mps = {{ compute_mode = \"keep\", users = \"{users}\" }}\n"
        );
        fs::write(scratch.path().join("config.toml"), config).map_err(cannot)?;
        let (programs, client, uuid) = (programs.to_owned(), client.to_vec(), ground.uuid.clone());
        Ok(Self { gpushd: None, notify, programs, client, uuid, clients: 0, scratch })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Returns a command for a program that uses this gpushd and no other MPS daemon.
    fn command(&self, program: &Path) -> std::process::Command {
        let mut command = std::process::Command::new(program);
        command.env("GPUSH_SOCKET", self.path("gpushd.sock")).env_remove("GPUSH_CONFIG").env("LANG", "C.UTF-8");
        without_mps(&mut command);
        command
    }

    /// Starts gpushd, and waits for its ready notification.
    ///
    /// # Errors
    /// If gpushd ends instead. The error contains its last log line.
    pub async fn start(&mut self) -> Result<(), String> {
        let cannot = |error: std::io::Error| format!("gpushd can't be started: {error}");
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("gpushd.log")).map_err(cannot)?;
        let mut command = self.command(&self.programs.join("gpushd"));
        command.arg("--config").arg(self.path("config.toml")).arg("--socket").arg(self.path("gpushd.sock"));
        command.arg("--admin-socket").arg(self.path("admin.sock")).arg("--state-dir").arg(self.path("state"));
        command.arg("--mps-dir").arg(self.path("mps"));
        command.env("NOTIFY_SOCKET", self.path("notify")).env_remove("JOURNAL_STREAM");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // Read and ignore the notifications of the previous gpushd.
        while self.notify.try_recv(&mut [0; 4096]).is_ok() {}
        let gpushd = Command::from(command).process_group(0).spawn().map_err(cannot)?;
        // Store the child process now. If this call is cancelled, the cleanup can then end gpushd.
        let gpushd = self.gpushd.insert(gpushd);
        let served = async {
            let mut buffer = [0; 4096];
            loop {
                let length = self.notify.recv(&mut buffer).await.map_err(cannot)?;
                if String::from_utf8_lossy(&buffer[..length]).lines().any(|line| line == "READY=1") {
                    return Ok(());
                }
            }
        };
        let outcome = tokio::select! {
            served = timeout(PATIENCE, served) => served.unwrap_or_else(|_| Err("gpushd does not serve".to_owned())),
            ended = gpushd.wait() => Err(format!("gpushd ended: {}", ended.map_err(cannot)?)),
        };
        outcome.map_err(|why| format!("{why}; its log ends: {}", self.log_end()))
    }

    fn log_end(&self) -> String {
        let text = fs::read_to_string(self.path("gpushd.log")).unwrap_or_default();
        text.trim().lines().last().unwrap_or("it logged nothing").to_owned()
    }

    /// Sends SIGKILL to gpushd.
    ///
    /// # Errors
    /// If gpushd is not running.
    pub async fn kill(&mut self) -> Result<(), String> {
        let mut gpushd = self.gpushd.take().ok_or("there is no gpushd")?;
        gpushd.kill().await.map_err(|error| format!("gpushd can't be killed: {error}"))
    }

    /// Runs `gpushctl ARGUMENTS --json` and returns its output.
    ///
    /// # Errors
    /// The error message of gpushctl, with cause and hint.
    pub async fn ctl<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T, String> {
        let mut command = self.command(&self.programs.join("gpushctl"));
        command.args(arguments).arg("--json").stdin(Stdio::null());
        let mut command = Command::from(command);
        let output = timeout(PATIENCE, command.kill_on_drop(true).output()).await;
        let typed = || format!("`gpushctl {}`", arguments.join(" "));
        let output = output.map_err(|_| format!("{} does not end", typed()))?;
        let output = output.map_err(|error| format!("gpushctl can't be started: {error}"))?;
        if output.status.success() {
            return serde_json::from_slice(&output.stdout).map_err(|error| format!("{}: {error}", typed()));
        }
        #[derive(serde::Deserialize)]
        struct Refusal {
            error: ApiError,
        }
        match serde_json::from_slice::<Refusal>(&output.stdout) {
            Ok(Refusal { error }) => Err(format!("{}: {} {}", typed(), error.message, error.causes.join("; "))),
            Err(_) => Err(format!("{} ended with {}", typed(), output.status)),
        }
    }

    /// Returns the MPS daemon. gpushd polls the daemon when it receives this request.
    ///
    /// # Errors
    /// If gpushd does not list the daemon.
    pub async fn daemon(&self) -> Result<MpsDaemon, String> {
        self.ctl(&["mps", "show", TARGET]).await
    }

    /// Returns the MPS daemon as gpushd saw it when it last polled the daemon.
    ///
    /// # Errors
    /// If gpushd does not list the daemon.
    pub async fn seen(&self) -> Result<MpsDaemon, String> {
        let all: Vec<MpsDaemon> = self.ctl(&["mps", "list"]).await?;
        all.into_iter().next().ok_or_else(|| "gpushd shares nothing".to_owned())
    }

    /// Waits until gpushd shows the MPS daemon in a state for which `is` returns true.
    ///
    /// # Errors
    /// The state of the daemon, if the daemon failed or does not reach such a state in time.
    pub async fn becomes(&self, what: &str, is: impl Fn(&MpsDaemon) -> bool) -> Result<MpsDaemon, String> {
        let until = Instant::now() + PATIENCE;
        loop {
            let last = match self.seen().await {
                Ok(daemon) if is(&daemon) => return Ok(daemon),
                Ok(daemon) => {
                    let last = format!("{} {}", daemon.state.name(), daemon.reasons.join("; "));
                    if daemon.state == MpsState::GivenUp {
                        return Err(format!("its MPS daemon is not {what}: {last}"));
                    }
                    last
                }
                Err(why) => why,
            };
            if Instant::now() > until {
                return Err(format!("its MPS daemon is not {what} within {} s: {last}", PATIENCE.as_secs()));
            }
            sleep(LOOK).await;
        }
    }

    /// Waits until the MPS daemon is ready and has no clients. Every check starts in this state.
    ///
    /// # Errors
    /// If the daemon does not reach this state in time.
    pub async fn idle(&self) -> Result<MpsDaemon, String> {
        let idle = |daemon: &MpsDaemon| daemon.clients.is_empty() && daemon.leases.is_empty();
        self.becomes("ready and idle", |daemon| daemon.state == MpsState::Ready && idle(daemon)).await
    }

    /// Starts a client with a separate lease: `gpushctl run --target 0 REQUEST… -- CLIENT`.
    ///
    /// # Errors
    /// If the client cannot be started. If gpushd refuses the lease, this function returns no
    /// error: the caller notices the refusal when it waits for the client.
    pub fn run(&mut self, request: &[&str], work: Work) -> Result<Client, String> {
        let command = self.run_command(&self.programs.join("gpushctl"), request, work);
        self.begin(command)
    }

    fn run_command(&self, gpushctl: &Path, request: &[&str], work: Work) -> std::process::Command {
        let mut command = self.command(gpushctl);
        command
            .args(["run", "--wait=60s", "--target", TARGET])
            .args(request)
            .arg("--")
            .args(&self.client)
            .args(work.arguments());
        command
    }

    /// Copies gpushctl and the client, so that all users can run the copies.
    ///
    /// # Errors
    /// If a file cannot be copied.
    pub fn open_to_all_users(&mut self) -> Result<(), String> {
        let cannot = |error: std::io::Error| format!("programs for other users can't be copied: {error}");
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(cannot);
        mode(self.scratch.path(), 0o755)?;
        let (public, home) = (self.path("public"), self.path("home"));
        for dir in [&public, &home] {
            fs::create_dir(dir).map_err(cannot)?;
        }
        mode(&public, 0o755)?;
        mode(&home, 0o777)?;
        let copied = |file: &Path| {
            let copy = public.join(file.file_name().unwrap_or_default());
            fs::copy(file, &copy).map_err(cannot)?;
            mode(&copy, 0o755)?;
            Ok::<_, String>(copy)
        };
        copied(&self.programs.join("gpushctl"))?;
        for word in &mut self.client {
            if Path::new(word.as_str()).is_file() {
                *word = copied(Path::new(word.as_str()))?.display().to_string();
            }
        }
        Ok(())
    }

    /// Does the same as [`Self::run`], for a program of another user. Needs
    /// [`Self::open_to_all_users`].
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn run_as(&mut self, uid: u32, request: &[&str], work: Work) -> Result<Client, String> {
        let mut command = self.run_command(&self.path("public/gpushctl"), request, work);
        command.uid(uid).gid(uid).env("HOME", self.path("home"));
        self.begin(command)
    }

    /// Requests a lease for several clients. [`Self::release`] ends it.
    ///
    /// # Errors
    /// If gpushd refuses the request.
    pub async fn lease(&self, request: &[&str]) -> Result<LeaseGrant, String> {
        self.ctl(&[&["lease", "request", "--mps", "--target", TARGET, "--for", "1h"], request].concat()).await
    }

    /// Releases a lease.
    ///
    /// # Errors
    /// If gpushd refuses the request.
    pub async fn release(&self, granted: &LeaseGrant) -> Result<(), String> {
        self.ctl::<serde_json::Value>(&["lease", "end", &granted.lease.id.to_string()]).await.map(|_| ())
    }

    /// Starts a client with the environment of a lease, or without MPS.
    ///
    /// # Errors
    /// If the client cannot be started.
    pub fn with(&mut self, granted: Option<&LeaseGrant>, work: Work) -> Result<Client, String> {
        let (program, arguments) = self.client.split_first().ok_or("the client's command is empty")?;
        let mut command = std::process::Command::new(program);
        command.args(arguments).args(work.arguments());
        without_mps(&mut command);
        match granted {
            Some(granted) => command.envs(granted.environment.iter().map(|(name, value)| (name, value))),
            // The client finds no daemon in this directory. It does not try the default directory.
            None => {
                let nobody = self.path("without-mps");
                command.env("CUDA_MPS_PIPE_DIRECTORY", nobody).env("CUDA_VISIBLE_DEVICES", &self.uuid)
            }
        };
        self.begin(command)
    }

    /// Checks that a client can compute on this host, without MPS.
    ///
    /// # Errors
    /// Why it cannot.
    pub async fn can_compute(&mut self) -> Result<(), String> {
        let ended = match self.with(None, Work::NONE) {
            Ok(mut client) => client.ended().await.map(|_| ()),
            Err(why) => Err(why),
        };
        ended.map_err(|why| format!("`{}` can't compute here: {why}", self.client.join(" ")))
    }

    fn begin(&mut self, command: std::process::Command) -> Result<Client, String> {
        self.clients += 1;
        Client::start(command, self.path(&format!("client-{}.stderr", self.clients)))
    }

    /// Checks that a client computes through the MPS daemon. This is necessary because a client
    /// that cannot connect to the daemon computes without MPS and reports no error.
    ///
    /// # Errors
    /// If the client does not use the daemon.
    pub async fn serves(&self, pid: u32) -> Result<(), String> {
        let daemon = self.daemon().await?;
        match daemon.clients.iter().find(|client| client.pid == Some(pid)) {
            Some(client) if client.lease.is_some() => Ok(()),
            Some(_) => Err(format!("pid {pid} computes through MPS without a share")),
            None => Err(format!("pid {pid} computes without MPS: its daemon has {} clients", daemon.clients.len())),
        }
    }

    /// Ends all processes in order, and copies the logs to a directory.
    pub async fn end(&mut self, logs: &Path) {
        if self.gpushd.is_some() {
            // `mps stop` first ends the work of the clients on the GPU. A signal to the clients
            // would not end that work.
            let _swept_below = self.ctl::<serde_json::Value>(&["mps", "stop", TARGET, "--force"]).await;
        }
        if let Some(mut gpushd) = self.gpushd.take() {
            let pid: Vec<i32> = gpushd.id().map(u32::cast_signed).into_iter().collect();
            signal(&pid, Signal::SIGTERM);
            if timeout(GOING, gpushd.wait()).await.is_err() {
                let _gone_already = gpushd.kill().await;
            }
        }
        let scratch = self.scratch.path();
        let until = Instant::now() + GOING;
        signal(&started(scratch), Signal::SIGTERM);
        while !started(scratch).is_empty() && Instant::now() < until {
            sleep(LOOK).await;
        }
        signal(&started(scratch), Signal::SIGKILL);
        if let Err(error) = self.keep_logs(logs) {
            println!("the logs can't be kept in {}: {error}", logs.display());
        }
    }

    /// Copies the logs of gpushd, of the MPS daemon and of its servers, and the standard error of
    /// clients.
    fn keep_logs(&self, to: &Path) -> std::io::Result<()> {
        let mut from = vec![self.scratch.path().to_owned()];
        match fs::read_dir(self.path("mps/logs")) {
            Ok(entries) => from.extend(entries.flatten().map(|entry| entry.path())),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        for entry in from.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten() {
            let path = entry.path();
            let is_log = path.extension().is_some_and(|extension| extension == "log" || extension == "stderr");
            if is_log && entry.metadata()?.len() > 0 {
                fs::create_dir_all(to)?;
                fs::copy(&path, to.join(entry.file_name()))?;
            }
        }
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // If `end` has run, `gpushd` is `None`. End gpushd before its daemons, because gpushd would
        // restart them.
        if let Some(gpushd) = &mut self.gpushd {
            let _gone_already = gpushd.start_kill();
        }
        signal(&started(self.scratch.path()), Signal::SIGKILL);
    }
}

/// Removes the environment variables with which a program would use another MPS daemon or another
/// lease.
fn without_mps(command: &mut std::process::Command) {
    for (name, _) in std::env::vars_os() {
        let ours = name.to_string_lossy();
        if ours.starts_with("CUDA_MPS_") || ours == "GPUSH_LEASE" || ours == "CUDA_VISIBLE_DEVICES" {
            command.env_remove(&name);
        }
    }
}

/// Returns the processes whose environment contains the path of the scratch directory.
fn started(scratch: &Path) -> Vec<i32> {
    let scratch = scratch.as_os_str().as_encoded_bytes();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let named = |pid: &i32| {
        // A zombie has no environment, so it is not found.
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(scratch.len()).any(|part| part == scratch)
    };
    pids.filter(named).collect()
}

fn signal(pids: &[i32], signal: Signal) {
    for pid in pids {
        let _gone_already = kill(Pid::from_raw(*pid), signal);
    }
}
