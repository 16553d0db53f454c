//! `cargo xtask demo`: shows gpush on a simulated host. The short tour fits on three screens;
//! `--full` shows every subject.
//!
//! All output is real. `gpush-sim run` creates the host and starts this program a second time on
//! it. The second instance starts the real `gpushd`, runs real `gpushctl` commands, and prints each
//! command with its output. Every command must end with a given exit code, even a command that
//! must fail. So the demo is also a test.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::workspace::{self, Build};
use session::Session;
use tour::Tour;

mod session;
mod tour;

/// What to show.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Simulated host: dgx-a100, dgx-h100, dgx-h200, dgx-b200, a30x4, rtx-pro-6000x2 or mixed
    #[arg(long, default_value = "dgx-a100")]
    preset: String,
    /// Show every preset, one after the other
    #[arg(long, conflicts_with_all = ["preset", "shell"])]
    every_preset: bool,
    /// Show every subject, not the short tour
    #[arg(long, conflicts_with = "shell")]
    full: bool,
    /// Start a shell on the host, with gpushd running, instead of the tour
    #[arg(long)]
    shell: bool,
    /// Use the programs of the last debug build instead of building them
    #[arg(long, hide = true)]
    built: bool,
    /// Folder of the built programs; the demo sets this on the host that it has created
    #[arg(long, hide = true)]
    inside: Option<PathBuf>,
}

/// Runs the demo. Returns true if every command ended with the required exit code.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    if let Some(programs) = &arguments.inside {
        return inside(arguments, &Tour::of(&arguments.preset)?, programs);
    }
    let presets: Vec<&str> = match arguments.every_preset {
        true => gpush_geometry::PRESETS.iter().map(|preset| preset.name).collect(),
        false => vec![&arguments.preset],
    };
    for preset in &presets {
        Tour::of(preset)?;
    }
    let programs = if arguments.built {
        Build::Debug.folder()
    } else {
        println!("building gpushd, gpushctl and the simulator");
        workspace::build_programs(Build::Debug)?
    };
    let mut good = true;
    for preset in presets {
        good &= outside(&programs, preset, arguments)?;
    }
    Ok(good)
}

fn outside(programs: &Path, preset: &str, arguments: &Arguments) -> Result<bool> {
    let own = std::env::current_exe().context("this program has no path")?;
    let mut host = Command::new(programs.join("gpush-sim"));
    host.args(["run", preset, "--"]).arg(own).args(["demo", "--preset", preset, "--inside"]).arg(programs);
    if arguments.shell {
        host.arg("--shell");
    }
    if arguments.full {
        host.arg("--full");
    }
    Ok(host.status().context("gpush-sim cannot be started")?.success())
}

fn inside(arguments: &Arguments, tour: &Tour, programs: &Path) -> Result<bool> {
    say(&format!(
        "A host with {}, simulated below libnvidia-ml.so.1: programs on it, gpushd too, see\n\
         a driver like any other. gpushd starts with a config that claims no GPU.",
        tour.about
    ));
    typed("gpushd --config config.toml --socket gpushd.sock --state-dir state &");
    typed("export GPUSH_SOCKET=gpushd.sock");
    let mut session = Session::start(programs, "")?;
    let good = if arguments.shell {
        session.reload(&tour.config())?;
        say(
            "A shell on that host; config.toml has layouts for it. Try `gpushctl status`, `gpushctl mig apply --dry-run`,\n\
             `gpush-sim --help`; $NVML_SIM_STATE is the host's folder. `exit` takes it all down.",
        );
        session.shell()?
    } else if arguments.full {
        full(tour, &mut session)?
    } else {
        short(tour, &mut session)?
    };
    session.end()?;
    Ok(good)
}

/// Runs the commands of the short tour. Returns true if each command ended with the required exit
/// code.
fn short(tour: &Tour, session: &mut Session) -> Result<bool> {
    let mut wrong = Vec::new();
    session.reload(&tour.config_with_mps())?;
    say("The config says how each GPU is shared: some as MIG instances, some through MPS.");
    typed("cat config.toml");
    print!("{}", tour.config_with_mps());
    say("Apply it to GPU 0. Each step is read back from the hardware.");
    types(session, &mut wrong, "gpushctl apply 0", 0)?;
    say(&format!("A program starts on the {} of GPU 0.", tour.used));
    let program = work(tour, session, &mut wrong)?;
    types(session, &mut wrong, "gpushctl status 0", 0)?;
    say("Another layout is built around it: the instance in use stays.");
    types(session, &mut wrong, &format!("gpushctl mig apply {} -g 0", tour.reshaped.join(",")), 0)?;
    say("A layout without room for it is refused, with the process that blocks it.");
    types(session, &mut wrong, &format!("gpushctl mig apply {} -g 0", tour.whole), 4)?;
    say("What is free, for scripts.");
    types(session, &mut wrong, "gpushctl mig list 0 --free -o csv", 0)?;
    drop(program);
    let gpu = tour.shared;
    say("GPUs shared through MPS: a supervised daemon, and a lease for each user.");
    types(session, &mut wrong, &format!("gpushctl apply {gpu}"), 0)?;
    types(
        session,
        &mut wrong,
        &format!("gpushctl run -g {gpu} --mps 25 --memory 4G -- gpush-sim mps-client --compute --seconds 0.2"),
        0,
    )?;
    end(&wrong, "`cargo xtask demo --full` shows more, `--shell` leaves you on such a host.")
}

/// Prints the commands that did not end with the required exit code.
fn end(wrong: &[String], more: &str) -> Result<bool> {
    for line in wrong {
        println!("WRONG: {line}");
    }
    if wrong.is_empty() {
        say(more);
    }
    Ok(wrong.is_empty())
}

/// Runs the commands of the full tour. Returns true if each command ended with the required exit
/// code.
fn full(tour: &Tour, session: &mut Session) -> Result<bool> {
    let mut wrong = Vec::new();
    say("What is there. No GPU is cut, none is claimed.");
    types(session, &mut wrong, "gpushctl gpu list", 0)?;
    say("What the first one can be cut into.");
    types(session, &mut wrong, "gpushctl mig profiles 0", 0)?;

    say("The administrator writes down what is wanted, and has it checked.");
    typed("cat config.toml");
    print!("{}", tour.config());
    session.reload(&tour.config())?;
    types(session, &mut wrong, "gpushctl config check config.toml", 0)?;
    say("gpushd has read it again (systemctl reload gpushd). It shows the difference, and does nothing unasked.");
    types(session, &mut wrong, "gpushctl status 0", 0)?;
    say("What would be done.");
    types(session, &mut wrong, "gpushctl mig apply --dry-run", 0)?;
    say("Do it. Every step is read back from the hardware.");
    types(session, &mut wrong, "gpushctl mig apply", 0)?;
    types(session, &mut wrong, "gpushctl status", 0)?;

    say(&format!("A program goes to work in the {} of GPU 0.", tour.used));
    let program = work(tour, session, &mut wrong)?;
    types(session, &mut wrong, "gpushctl status 0", 0)?;
    say("GPU 0 is reshaped around it: idle instances go, the one in use is not touched.");
    types(session, &mut wrong, &format!("gpushctl mig apply {} -g 0", tour.reshaped.join(",")), 0)?;
    types(session, &mut wrong, "gpushctl mig list 0", 0)?;
    say("A layout that has no room for it is refused, with the name of who is in the way. Exit status 4.");
    types(session, &mut wrong, &format!("gpushctl mig apply {} -g 0", tour.whole), 4)?;
    say("A layout from the command line overrides the config until it is cleared, which changes no GPU.");
    types(session, &mut wrong, "gpushctl config overrides", 0)?;
    types(session, &mut wrong, "gpushctl config overrides clear 0", 0)?;
    say("A script asks whether the host is as the config says. Exit status 3: it is not any more.");
    types(session, &mut wrong, "gpushctl mig apply --check", 3)?;
    say("The program ends; the config's layout goes back on.");
    drop(program);
    types(session, &mut wrong, "gpushctl mig apply", 0)?;
    types(session, &mut wrong, "gpushctl mig apply --check", 0)?;
    share(tour, session, &mut wrong)?;

    end(&wrong, "`cargo xtask demo --shell` leaves you on such a host.")
}

/// Runs the second part of the tour: GPUs that are shared through MPS instead of MIG.
fn share(tour: &Tour, session: &mut Session, wrong: &mut Vec<String>) -> Result<()> {
    let gpu = tour.shared;
    say("The second rule is to share its GPUs through MPS in place of cutting them.");
    typed("grep -A9999 teaching config.toml");
    println!("name = \"teaching\"\n{}", tour::MPS);
    session.reload(&tour.config_with_mps())?;
    say("A GPU moves by one operation: instances go, MIG mode goes off, an MPS daemon comes up and serves.");
    types(session, wrong, &format!("gpushctl apply {}", tour.gpus[1]), 0)?;
    say("A program with a quarter of it, in a lease that ends with the program.");
    types(
        session,
        wrong,
        &format!("gpushctl run -g {gpu} --mps 25 --memory 4G -- gpush-sim mps-client --compute --seconds 0.2"),
        0,
    )?;
    say("Leases are counted: two for the next hour, and one that is more than is left, which ends with status 4.");
    types(session, wrong, &format!("gpushctl lease env -g {gpu} --mps 50 --for 1h"), 0)?;
    types(session, wrong, &format!("gpushctl lease env -g {gpu} --mps 50 --for 1h"), 0)?;
    types(session, wrong, &format!("gpushctl lease env -g {gpu} --mps 10 --for 1h"), 4)?;
    types(session, wrong, &format!("gpushctl mps show {gpu}"), 0)?;
    types(session, wrong, "gpushctl mps list", 0)
}

/// A program that uses a GPU. Dropping this value ends the program.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        // Ignore an error. The program only sleeps, so killing it loses nothing.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program in the instance that the tour uses.
fn work(tour: &Tour, session: &Session, wrong: &mut Vec<String>) -> Result<Worker> {
    let id = used(tour, session)?["gi"].as_u64().with_context(|| format!("GPU 0 has no {}", tour.used))?;
    typed("sleep 600 &");
    let worker = Worker(Command::new("sleep").arg("600").stdin(Stdio::null()).spawn()?);
    let pid = worker.0.id();
    let line = format!("gpush-sim process $NVML_SIM_STATE add --gpu 0 --gi {id} --ci 0 --memory 9216 --pid {pid}");
    types(session, wrong, &line, 0)?;
    // A reading of gpushd can be a second old. So wait until gpushd shows the program.
    let started = Instant::now();
    while used(tour, session)?["compute_instances"][0]["processes"][0].is_null() {
        if started.elapsed() > Duration::from_secs(30) {
            bail!("gpushd does not see pid {pid} at work");
        }
    }
    Ok(worker)
}

/// Returns the instance on GPU 0 that the tour uses, as gpushd shows it. If it does not exist,
/// returns null.
fn used(tour: &Tour, session: &Session) -> Result<Value> {
    let shown = session.command("gpushctl").args(["gpu", "show", "0", "--json"]).stdin(Stdio::null()).output()?;
    let gpus: Value = serde_json::from_slice(&shown.stdout).context("`gpu show` is no JSON")?;
    let instances = gpus[0]["mig"]["instances"].as_array().map(Vec::as_slice).unwrap_or_default();
    Ok(instances.iter().find(|instance| instance["profile"] == tour.used).cloned().unwrap_or_default())
}

/// Runs a command, and compares its exit code with the required exit code.
fn types(session: &Session, wrong: &mut Vec<String>, line: &str, status: i32) -> Result<()> {
    typed(line);
    let mut words = line.split_whitespace();
    let mut command = session.command(words.next().unwrap_or_default());
    for word in words {
        match word.strip_prefix('$') {
            Some(variable) => command.arg(std::env::var_os(variable).with_context(|| format!("{word} is not set"))?),
            None => command.arg(word),
        };
    }
    let ended = command.stdin(Stdio::null()).status().with_context(|| format!("cannot run `{line}`"))?;
    if ended.code() != Some(status) {
        wrong.push(format!("`{line}` ended with {ended}, not with status {status}"));
    }
    Ok(())
}

fn say(text: &str) {
    println!("\n# {}", text.replace('\n', "\n# "));
}

fn typed(command: &str) {
    println!("\n$ {command}");
}
