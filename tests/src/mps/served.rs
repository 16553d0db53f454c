//! An agent whose daemon serves, and a share there: what tests of trouble begin with.

use std::path::{Path, PathBuf};

use gpush_api::{MpsDaemon, MpsState};
use serde_json::json;

use super::{Client, base, becomes, controls, daemon, lease, pid_of, reaches};
use crate::{
    agent::{Agent, Setup},
    host::Host,
};

/// An agent whose daemon serves, and an environment that is let in.
pub struct Served {
    // Goes before its host: it would start anew what that ends.
    /// Its agent.
    pub agent: Agent,
    /// The host.
    pub host: Host,
    /// The daemon's target, as its directory is called.
    pub target: String,
    /// What a client of the share is started with.
    pub environment: Vec<(String, String)>,
    /// The daemon that served first.
    pub pid: i32,
    config: String,
    programs: Option<PathBuf>,
}

impl Served {
    /// A host with one GPU.
    pub const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
    /// It shared through MPS, by an agent that soon sees what is wrong.
    pub const CONFIG: &str =
        "[mps]\nhealth_s = 1\nstart_s = 2\nstop_s = 2\n[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n";

    /// The one daemon of [`Self::CONFIG`].
    ///
    /// # Panics
    /// When it does not come to serve.
    #[must_use]
    pub fn up() -> Self {
        Self::on(Host::up(Self::HOST), None)
    }

    /// The same on some host, whose daemon may be of other programs than its own.
    ///
    /// # Panics
    /// When it does not come to serve.
    #[must_use]
    pub fn on(host: Host, programs: Option<&Path>) -> Self {
        Self::of(host, "0", Self::CONFIG, programs)
    }

    /// A target of any config.
    ///
    /// # Panics
    /// When it does not come to serve.
    #[must_use]
    pub fn of(host: Host, target: &str, config: &str, programs: Option<&Path>) -> Self {
        let agent = start(&host, config, programs);
        let ready = reaches(&agent, target, MpsState::Ready);
        let environment = lease(&agent, target, &json!({})).expect("a lease").environment;
        let (config, programs) = (config.to_owned(), programs.map(Path::to_owned));
        Self { agent, pid: pid_of(&ready), target: ready.target, host, environment, config, programs }
    }

    /// Kills the agent, and starts another after something was done while there was none.
    pub fn restart(&mut self, meanwhile: impl FnOnce(&Self)) {
        self.agent.signal(nix::sys::signal::Signal::SIGKILL);
        self.agent.wait();
        meanwhile(self);
        self.agent = start(&self.host, &self.config, self.programs.as_deref());
    }

    /// A client of the share that computes, and that the agent knows of.
    ///
    /// # Panics
    /// When it is not let in.
    #[must_use]
    pub fn client(&self) -> Client {
        let client = Client::start(&self.host, &self.environment);
        assert!(client.first.starts_with("active"), "{}", client.first);
        becomes(&self.agent, &self.target, "with its client", |daemon| {
            daemon.clients.iter().any(|one| one.pid.map(u32::cast_signed) == Some(client.pid()))
        });
        client
    }

    /// Waits until another daemon than the first serves, as the only one.
    ///
    /// # Panics
    /// When none does.
    pub fn another(&self) -> MpsDaemon {
        let next = becomes(&self.agent, &self.target, "ready with another", |daemon| {
            daemon.state == MpsState::Ready && pid_of(daemon) != self.pid
        });
        assert_eq!(self.controls(), [pid_of(&next)]);
        next
    }

    /// Its pipe directory.
    ///
    /// # Panics
    /// When it has none.
    #[must_use]
    pub fn pipe(&self) -> PathBuf {
        daemon(&self.agent, &self.target).pipe_directory.expect("a pipe directory").into()
    }

    /// The target's directory.
    #[must_use]
    pub fn place(&self) -> PathBuf {
        base(&self.host).join(&self.target)
    }

    /// Control daemons that live.
    #[must_use]
    pub fn controls(&self) -> Vec<i32> {
        controls(&base(&self.host))
    }
}

fn start(host: &Host, config: &str, programs: Option<&Path>) -> Agent {
    let setup = Setup::on(host).config(config).env("GPUSH_LOG", "info");
    match programs {
        Some(dir) => setup.env("GPUSH_MPS_PROGRAMS", dir.display().to_string()).start(),
        None => setup.start(),
    }
}
