//! A gpushd with a ready MPS daemon and a lease. Tests of faults start in this state.

use std::path::{Path, PathBuf};

use gpush_api::{MpsDaemon, MpsState};
use serde_json::json;

use super::{Client, base, becomes, controls, daemon, lease, pid_of, reaches};
use crate::{
    agent::{Agent, Setup},
    host::Host,
};

/// A gpushd whose daemon is ready, and the environment of a lease on that daemon.
pub struct Served {
    // This must be the first field, so that it is dropped before the host. Otherwise gpushd would
    // restart the daemons that the host ends.
    /// The running gpushd.
    pub agent: Agent,
    /// The host.
    pub host: Host,
    /// The target of the daemon. The target's directory has the same name.
    pub target: String,
    /// The environment variables of the lease, for clients.
    pub environment: Vec<(String, String)>,
    /// The pid of the first daemon.
    pub pid: i32,
    config: String,
    programs: Option<PathBuf>,
}

impl Served {
    /// A host with one GPU.
    pub const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
    /// A config that shares the GPU through MPS, with short intervals.
    pub const CONFIG: &str = "[mps]\nhealth = \"1s\"\n# --constants mps.start=2s,mps.stop=2s\n[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n";

    /// Starts [`Self::HOST`] with [`Self::CONFIG`].
    ///
    /// # Panics
    /// If the daemon is not ready in time.
    #[must_use]
    pub fn up() -> Self {
        Self::on(Host::up(Self::HOST), None)
    }

    /// Starts gpushd with [`Self::CONFIG`] on a host. `programs` is a directory with the MPS
    /// programs. If `programs` is `None`, gpushd uses the programs of the host.
    ///
    /// # Panics
    /// If the daemon is not ready in time.
    #[must_use]
    pub fn on(host: Host, programs: Option<&Path>) -> Self {
        Self::of(host, "0", Self::CONFIG, programs)
    }

    /// Starts gpushd with any config, and requests a lease on a target.
    ///
    /// # Panics
    /// If the target's daemon is not ready in time.
    #[must_use]
    pub fn of(host: Host, target: &str, config: &str, programs: Option<&Path>) -> Self {
        let agent = start(&host, config, programs);
        let ready = reaches(&agent, target, MpsState::Ready);
        let environment = lease(&agent, target, &json!({})).expect("a lease").environment;
        let (config, programs) = (config.to_owned(), programs.map(Path::to_owned));
        Self { agent, pid: pid_of(&ready), target: ready.target, host, environment, config, programs }
    }

    /// Kills gpushd, calls `meanwhile`, and starts gpushd again.
    pub fn restart(&mut self, meanwhile: impl FnOnce(&Self)) {
        self.agent.signal(nix::sys::signal::Signal::SIGKILL);
        self.agent.wait();
        meanwhile(self);
        self.agent = start(&self.host, &self.config, self.programs.as_deref());
    }

    /// Starts a client of the lease. Waits until a server serves the client and gpushd lists the
    /// client.
    ///
    /// # Panics
    /// If the client is not served.
    #[must_use]
    pub fn client(&self) -> Client {
        let client = Client::start(&self.host, &self.environment);
        assert!(client.first.starts_with("active"), "{}", client.first);
        becomes(&self.agent, &self.target, "with its client", |daemon| {
            daemon.clients.iter().any(|one| one.pid.map(u32::cast_signed) == Some(client.pid()))
        });
        client
    }

    /// Waits until a daemon other than the first one is ready, and no other daemon runs.
    ///
    /// # Panics
    /// If no other daemon is ready in time.
    pub fn another(&self) -> MpsDaemon {
        let next = becomes(&self.agent, &self.target, "ready with another pid", |daemon| {
            daemon.state == MpsState::Ready && pid_of(daemon) != self.pid
        });
        assert_eq!(self.controls(), [pid_of(&next)]);
        next
    }

    /// Returns the daemon's pipe directory.
    ///
    /// # Panics
    /// If the daemon has no pipe directory.
    #[must_use]
    pub fn pipe(&self) -> PathBuf {
        daemon(&self.agent, &self.target).pipe_directory.expect("a pipe directory").into()
    }

    /// Returns the target's directory.
    #[must_use]
    pub fn place(&self) -> PathBuf {
        base(&self.host).join(&self.target)
    }

    /// Returns the pids of the running control daemons.
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
