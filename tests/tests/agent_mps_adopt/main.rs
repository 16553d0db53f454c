//! Whom gpushd goes on with as a daemon of its own, whom it does not, and that it starts none beside one that
//! nobody can reach any more.

mod foreign;
mod lost;

use std::path::PathBuf;

use gpush_api::{MpsDaemon, MpsState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
    mps::{Client, base, controls, daemon, reaches, share},
};
use serde_json::json;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str =
    "[mps]\nhealth_s = 1\nstart_s = 2\nstop_s = 2\n[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// An agent whose daemon serves, and an environment that is let in.
struct Served {
    // Goes before its host: it would start anew what that ends.
    agent: Agent,
    host: Host,
    target: String,
    environment: Vec<(String, String)>,
    pid: i32,
}

impl Served {
    fn on(host: Host, target: &str, config: &str) -> Self {
        let agent = start(&host, config);
        let ready = reaches(&agent, target, MpsState::Ready);
        let environment = share(&agent, target, &json!({})).expect("a share").environment;
        Self { host, agent, target: ready.target.clone(), environment, pid: pid_of(&ready) }
    }

    fn up() -> Self {
        Self::on(Host::up(HOST), "0", CONFIG)
    }

    fn client(&self) -> Client {
        let client = Client::start(&self.host, &self.environment);
        assert!(client.first.starts_with("active"), "{}", client.first);
        client
    }

    fn pipe(&self) -> PathBuf {
        daemon(&self.agent, &self.target).pipe_directory.expect("a pipe directory").into()
    }

    /// The target's directory.
    fn place(&self) -> PathBuf {
        base(&self.host).join(&self.target)
    }

    fn controls(&self) -> Vec<i32> {
        controls(&base(&self.host))
    }
}

fn start(host: &Host, config: &str) -> Agent {
    let setup = Setup::on(host).config(config).env("GPUSH_LOG", "info");
    let programs = host.dir().join("own");
    if programs.is_dir() {
        setup.env("GPUSH_MPS_PROGRAMS", programs.display().to_string()).start()
    } else {
        setup.start()
    }
}

fn pid_of(daemon: &MpsDaemon) -> i32 {
    daemon.pid.expect("a pid").cast_signed()
}
