//! A real Slurm for tests: munged, slurmctld, and a slurmd for each node, on this host.
//!
//! ```text
//! Setup ──start──► Cluster ──sbatch──► JobId ──ended──► Ended
//!   gres.conf, hooks    │ Drop: cancels jobs, ends the daemons and everything that they started
//! ```
//!
//! Each cluster has a separate directory, separate ports and a separate munge key, so several
//! clusters can run at the same time. A cluster needs no database, no cgroups and no systemd. The
//! daemons run as root. Jobs run as two users that exist on every Debian.

mod cluster;
mod files;
mod jobs;
mod munge;
mod setup;
mod site;

use std::path::Path;

pub use self::{
    cluster::Cluster,
    jobs::{Ended, JobId},
    setup::Setup,
    site::{Site, script},
};
use crate::host::program;

/// A user of jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    /// Name.
    pub name: &'static str,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// The first user.
pub const ALICE: User = User { name: "nobody", uid: 65534, gid: 65534 };

/// The second user.
pub const BOB: User = User { name: "games", uid: 5, gid: 60 };

/// Returns the line of a hook script that runs `gpush-slurm-hook VERB` with these arguments.
#[must_use]
pub fn hook(verb: &str, arguments: &[(&str, &Path)]) -> String {
    let arguments: String = arguments.iter().map(|(flag, path)| format!(" {flag} '{}'", path.display())).collect();
    format!("exec '{}' {verb}{arguments}\n", program("gpush-slurm-hook").display())
}

/// Returns why this machine cannot run the tests' Slurm, or `None` if it can.
fn obstacle() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("only root can run its daemons".to_owned());
    }
    for name in ["slurmctld", "slurmd", "munged", "sbatch", "srun"] {
        if !["/usr/sbin", "/usr/bin"].iter().any(|dir| Path::new(dir).join(name).exists()) {
            return Some(format!("{name} is not installed; `cargo xtask test` installs it"));
        }
    }
    for User { name, uid, .. } in [ALICE, BOB] {
        if !nix::unistd::User::from_uid(uid.into()).is_ok_and(|user| user.is_some_and(|user| user.name == name)) {
            return Some(format!("the user {name} with uid {uid} does not exist"));
        }
    }
    None
}

impl Setup {
    /// Starts the cluster and waits until all nodes are idle.
    ///
    /// # Panics
    /// If the nodes do not become idle in time. The panic shows the logs.
    #[must_use]
    pub fn start(self) -> Cluster {
        files::write(&self);
        let Self { dir, nodes, through, .. } = self;
        Cluster::start(dir, nodes, through)
    }
}
