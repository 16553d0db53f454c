//! A Slurm cluster with the hooks of gpush, on a simulated host with gpushd.

use std::path::{Path, PathBuf};

use gpush_api::{Lease, LeaseState};
use nix::sys::signal::Signal;

use super::{Cluster, Setup, hook};
use crate::{agent::Agent, host::Host};

/// A cluster of one node, the simulated host, and the host's gpushd.
#[derive(Debug)]
pub struct Site {
    // The fields are dropped in this order: jobs end before gpushd, and gpushd ends before its
    // host.
    /// The cluster.
    pub cluster: Cluster,
    /// The running gpushd.
    pub agent: Agent,
    /// The simulated host.
    pub host: Host,
    config: String,
}

impl Site {
    /// Starts gpushd with this config on a host, and a cluster with gpush's hooks. `change` may
    /// change the settings of the cluster. If `change` adds a hook, this hook replaces gpush's hook
    /// of the same kind. If this machine cannot run a cluster, reports a skipped test and returns
    /// `None`.
    #[must_use]
    pub fn start(host: &str, config: &str, change: impl FnOnce(Setup, &Host, &Agent) -> Setup) -> Option<Self> {
        Self::start_with(host, config, Agent::start, change)
    }

    /// Does the same as [`Site::start`], but other users can also connect to gpushd's socket.
    #[must_use]
    pub fn start_public(host: &str, config: &str, change: impl FnOnce(Setup, &Host, &Agent) -> Setup) -> Option<Self> {
        Self::start_with(host, config, Agent::start_public, change)
    }

    fn start_with(
        host: &str,
        config: &str,
        start: impl FnOnce(&Host, &str) -> Agent,
        change: impl FnOnce(Setup, &Host, &Agent) -> Setup,
    ) -> Option<Self> {
        let setup = Setup::new()?;
        let host = Host::up(host);
        let agent = start(&host, config);
        agent.wait_for_layouts_at_start();
        let mut setup = change(setup, &host, &agent);
        for (key, verb) in [("Prolog", "prolog"), ("Epilog", "epilog"), ("TaskProlog", "task-prolog")] {
            if !setup.has_hook(key) {
                let script = script(&host, setup.dir(), verb);
                setup = setup.hook(key, &script);
            }
        }
        Some(Self { cluster: setup.start(), agent, host, config: config.to_owned() })
    }

    /// Kills gpushd, calls `meanwhile`, and starts gpushd again.
    pub fn restart_agent(&mut self, meanwhile: impl FnOnce(&Self)) {
        self.agent.signal(Signal::SIGKILL);
        self.agent.wait();
        meanwhile(self);
        self.agent = Agent::start_again(&self.host, &self.config);
    }

    /// Returns the leases that have not ended.
    ///
    /// # Panics
    /// If gpushd does not answer.
    #[must_use]
    pub fn leases(&self) -> Vec<Lease> {
        let leases: Vec<Lease> = serde_json::from_value(self.agent.get("/v1/leases").json()).expect("leases");
        let open = leases.into_iter().filter(|lease| lease.state != LeaseState::Ended);
        // The use of a lease changes with each sample.
        open.map(|lease| Lease { usage: None, idle: None, over_limit: None, ..lease }).collect()
    }

    /// Returns the directory of the files of jobs.
    #[must_use]
    pub fn jobs(&self) -> PathBuf {
        self.cluster.dir().join("jobs")
    }

    /// Returns the names of the files of jobs. Leaves out the files in this directory that do not
    /// belong to a single job.
    #[must_use]
    pub fn job_files(&self) -> Vec<String> {
        let mut names = crate::mps::names(&self.jobs());
        names.retain(|name| !matches!(name.as_str(), "owned" | "places" | "lock"));
        names
    }

    /// Checks that no node was drained, and that no leases and no files of jobs are left.
    ///
    /// # Panics
    /// If a node was drained, or a lease or file is left.
    pub fn assert_clean(&self) {
        self.cluster.assert_never_drained();
        assert_eq!(self.leases(), [], "{}", self.agent.log());
        assert_eq!(self.job_files(), [""; 0]);
    }
}

/// Returns the body of a hook script: it runs `gpush-slurm-hook VERB` with the gpushd of a host.
/// `dir` is the directory of the cluster.
#[must_use]
pub fn script(host: &Host, dir: &Path, verb: &str) -> String {
    let jobs = dir.join("jobs");
    if verb == "task-prolog" {
        return hook(verb, &[("--dir", &jobs)]);
    }
    let (socket, config) = (host.scratch("gpushd.admin.sock"), host.scratch("gpushd.toml"));
    hook(verb, &[("--socket", &socket), ("--config", &config), ("--dir", &jobs)])
}
