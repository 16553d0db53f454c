//! `cargo xtask demo`: gpush at work on a simulated host, for somebody who has just cloned it.
//!
//! Nothing here is staged. `gpush-sim run` makes the host and runs this program again on it; that
//! one starts the real `gpushd` and types real `gpushctl` commands, each shown as typed and its
//! output left as it is. Every command has an exit status that it must have, refusals too, so
//! the demo is also a test.

use std::{
    fs,
    os::unix::{net::UnixDatagram, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::workspace::{self, Build};
use tour::Tour;

mod tour;

/// What to show.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Simulated host; `gpush-sim presets` names them
    #[arg(long, default_value = "dgx-a100")]
    preset: String,
    /// Leave you in a shell on the host, with gpushd running, instead of typing for you
    #[arg(long)]
    shell: bool,
    /// Set by the demo itself on the host that it made: folder of the built programs
    #[arg(long, hide = true)]
    inside: Option<PathBuf>,
}

/// Runs the demo; true when every command ended as it must.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    match &arguments.inside {
        None => outside(arguments),
        Some(programs) => inside(arguments, programs),
    }
}

fn outside(arguments: &Arguments) -> Result<bool> {
    println!("building gpushd, gpushctl and the simulator");
    let programs = workspace::build_programs(Build::Debug)?;
    let own = std::env::current_exe().context("this program has no path")?;
    let mut host = Command::new(programs.join("gpush-sim"));
    host.args(["run", &arguments.preset, "--"]).arg(own).args(["demo", "--preset", &arguments.preset, "--inside"]);
    host.arg(&programs);
    if arguments.shell {
        host.arg("--shell");
    }
    Ok(host.status().context("gpush-sim cannot be started")?.success())
}

fn inside(arguments: &Arguments, programs: &Path) -> Result<bool> {
    let session = Session::start(arguments, programs)?;
    let good = if arguments.shell { session.shell() } else { session.tour() };
    session.end()?;
    good
}

/// An agent on the simulated host that this process runs on.
struct Session {
    programs: PathBuf,
    folder: tempfile::TempDir,
    /// Directory of the simulated host, as `gpush-sim` wants it.
    host: PathBuf,
    agent: Child,
    tour: Tour,
}

impl Session {
    fn start(arguments: &Arguments, programs: &Path) -> Result<Self> {
        let host = std::env::var_os("NVML_SIM_STATE").context("not on a simulated host: NVML_SIM_STATE is not set")?;
        let tour = Tour::of(&arguments.preset)?;
        let folder = tempfile::Builder::new().prefix("gpush-demo-").tempdir().context("no temporary folder")?;
        fs::write(folder.path().join("config.toml"), tour.config())?;

        say(&format!("A host that has {}, all of it simulated below libnvidia-ml.so.1.", tour.about));
        say("gpushd, the host agent, started on it with this config:");
        print!("{}", indented(&tour.config()));
        typed("gpushd --config config.toml &");
        let ready = folder.path().join("ready");
        let readiness = UnixDatagram::bind(&ready).context("no socket to hear gpushd's readiness on")?;
        let log = fs::File::create(folder.path().join("gpushd.log"))?;
        let mut agent = Command::new(programs.join("gpushd"));
        agent.arg("--config").arg(folder.path().join("config.toml"));
        agent.arg("--socket").arg(folder.path().join("gpushd.sock"));
        agent.arg("--state-dir").arg(folder.path().join("state"));
        agent.env("NOTIFY_SOCKET", &ready).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut agent = agent.spawn().context("gpushd cannot be started")?;
        if let Err(error) = await_ready(&mut agent, &readiness) {
            let log = fs::read_to_string(folder.path().join("gpushd.log")).unwrap_or_default();
            // It may be gone already; then there is nothing to end.
            let _ = agent.kill();
            bail!("{error:#}; its log:\n{log}");
        }
        Ok(Self { programs: programs.to_owned(), folder, host: host.into(), agent, tour })
    }

    /// A command on this host; `gpushctl` finds the agent by itself.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command.env("GPUSH_SOCKET", self.folder.path().join("gpushd.sock"));
        command
    }

    /// Types the commands of the tour; true when each ended as it must.
    fn tour(&self) -> Result<bool> {
        let tour = &self.tour;
        let mut typist = Typist { session: self, wrong: Vec::new() };
        say("What the host has. Nothing is cut yet, and the config's wishes show as drift.");
        typist.types("gpushctl status", 0)?;
        say("What the first GPU can be cut into.");
        typist.types("gpushctl mig profiles --gpu 0", 0)?;
        say("What the config asks for, as a plan. Nothing is touched.");
        typist.types("gpushctl mig plan", 0)?;
        say("Carry it out: every step is read back from the hardware.");
        typist.types("gpushctl mig apply", 0)?;
        typist.types("gpushctl status", 0)?;

        say(&format!("A program goes to work in the {} of GPU 0.", tour.used));
        let program = self.work(&mut typist)?;
        say("GPU 0 is reshaped around it. Only idle instances go; the one in use is kept as it is.");
        typist.types(&format!("gpushctl mig apply --gpu 0 --layout {}", tour.reshaped.join(",")), 0)?;
        typist.types("gpushctl mig show --gpu 0", 0)?;
        say("A layout that has no room for it is refused, and it is said who is in the way. Exit status 4.");
        typist.types(&format!("gpushctl mig apply --gpu 0 --layout {}", tour.whole), 4)?;
        say("A script asks whether the host is as the config says. Exit status 3: it is not.");
        typist.types("gpushctl mig assert", 3)?;
        say("When the program is done, the config's layout goes back on.");
        drop(program);
        typist.types("gpushctl mig apply", 0)?;
        typist.types("gpushctl mig assert", 0)?;

        let wrong = typist.wrong;
        println!();
        for line in &wrong {
            println!("WRONG: {line}");
        }
        if wrong.is_empty() {
            say("That was it. `cargo xtask demo --shell` leaves you on such a host.");
        }
        Ok(wrong.is_empty())
    }

    /// A program that runs until dropped, put into the instance that the tour puts to use.
    fn work(&self, typist: &mut Typist) -> Result<Worker> {
        let shown = self.command("gpushctl").args(["gpu", "show", "0", "--json"]).stdin(Stdio::null()).output()?;
        let gpus: serde_json::Value = serde_json::from_slice(&shown.stdout).context("`gpu show` is no JSON")?;
        let instances = gpus[0]["mig"]["instances"].as_array().context("`gpu show` names no instances")?;
        let used = instances.iter().find(|instance| instance["profile"] == self.tour.used);
        let id = used.and_then(|instance| instance["id"].as_u64());
        let id = id.with_context(|| format!("GPU 0 has no {}", self.tour.used))?;
        let worker = Worker(Command::new("sleep").arg("600").stdin(Stdio::null()).spawn()?);
        let pid = worker.0.id();
        let host = self.host.display();
        typist.types(&format!("gpush-sim process {host} add --gpu 0 --gi {id} --ci 0 --pid {pid} --memory 9216"), 0)?;
        Ok(worker)
    }

    fn shell(&self) -> Result<bool> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(self.programs.clone()).chain(std::env::split_paths(&path)))?;
        let program = std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into());
        say("A shell on that host. Try `gpushctl status`, `gpushctl mig profiles`, `gpush-sim --help`;");
        say("$NVML_SIM_STATE is the host's folder. `exit` takes it all down.");
        let status = Command::new(program)
            .env("PATH", path)
            .env("GPUSH_SOCKET", self.folder.path().join("gpushd.sock"))
            .status()
            .context("the shell cannot be started")?;
        // The exit status of a shell is that of its last command: not ours to judge.
        Ok(status.signal().is_none())
    }

    fn end(mut self) -> Result<()> {
        let pid = i32::try_from(self.agent.id()).context("a pid beyond the kernel's own")?;
        kill(Pid::from_raw(pid), Signal::SIGTERM).context("gpushd is gone before its time")?;
        let status = self.agent.wait()?;
        if !status.success() {
            let log = fs::read_to_string(self.folder.path().join("gpushd.log")).unwrap_or_default();
            bail!("gpushd did not end well ({status}); its log:\n{log}");
        }
        Ok(())
    }
}

/// A program at work on a GPU; ended when dropped.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        // It sleeps; nothing is lost, and there is nobody to tell of a failure.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Types commands and holds each to the exit status that it must have.
struct Typist<'a> {
    session: &'a Session,
    wrong: Vec<String>,
}

impl Typist<'_> {
    fn types(&mut self, line: &str, status: i32) -> Result<()> {
        typed(line);
        let mut words = line.split_whitespace();
        let mut command = self.session.command(words.next().unwrap_or_default());
        let ended =
            command.args(words).stdin(Stdio::null()).status().with_context(|| format!("cannot run `{line}`"))?;
        if ended.code() != Some(status) {
            self.wrong.push(format!("`{line}` ended with {ended}, not with status {status}"));
        }
        Ok(())
    }
}

/// Waits for `READY=1`, as systemd would, or for the agent's end.
fn await_ready(agent: &mut Child, readiness: &UnixDatagram) -> Result<()> {
    readiness.set_read_timeout(Some(Duration::from_millis(50)))?;
    let started = Instant::now();
    let mut buffer = [0; 4096];
    loop {
        match readiness.recv(&mut buffer) {
            Ok(length) if String::from_utf8_lossy(&buffer[..length]).lines().any(|line| line == "READY=1") => {
                return Ok(());
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("readiness cannot be heard"),
        }
        if let Some(status) = agent.try_wait()? {
            bail!("gpushd ended at its start ({status})");
        }
        if started.elapsed() > Duration::from_secs(30) {
            bail!("gpushd is not ready after 30 s");
        }
    }
}

fn say(text: &str) {
    println!("# {text}");
}

fn typed(command: &str) {
    println!("\n$ {command}");
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}
