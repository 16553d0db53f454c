//! The config and the flags of a hook.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use gpush_api::LeaseOwner;
use gpush_client::Socket;
use gpush_core::config::{Config, SLURM_DIRECTORY, Slurm};

use crate::{
    args::{Global, HookFiles, HookLimits},
    offline, socket,
};

use super::directory::Directory;

/// Maximum number of bytes that a hook reads from the config.
const LONGEST: u64 = gpush_core::config::MOST_BYTES as u64;

/// The settings that a hook needs.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    /// The section `[slurm]` of the config.
    pub(super) slurm: Slurm,
    /// The setting `api.admin_socket` of the config.
    admin_socket: Option<PathBuf>,
    /// The files of jobs.
    pub(super) directory: Directory,
    /// Whether there is a config of gpushd. If so, this node has a gpushd.
    pub(super) has_config: bool,
    /// Whether a rule reserves GPUs for Slurm (`owner = "slurm"`).
    pub(super) has_owner_slurm: bool,
    /// Time limit of the hook.
    pub(super) deadline: Duration,
    /// Time at which the hook must end.
    pub(super) until: Instant,
}

impl Settings {
    /// Reads the config for a hook that root runs.
    pub(super) fn of_root(files: &HookFiles, limits: &HookLimits) -> Self {
        let path = files.config.clone().or_else(offline::environment);
        let path = path.as_deref().unwrap_or(Path::new(offline::DEFAULT_CONFIG));
        let config = read(path);
        let deadline = limits.deadline.unwrap_or(config.slurm.deadline);
        Self { has_config: path.exists(), ..Self::new(config, files, deadline) }
    }

    /// Reads the config for TaskProlog. The environment of TaskProlog comes from the user, so this function does not
    /// let the environment select the config file.
    pub(super) fn of_task(files: &HookFiles) -> Self {
        let path = files.config.as_deref().unwrap_or(Path::new(offline::DEFAULT_CONFIG));
        Self::new(read(path), files, Duration::ZERO)
    }

    /// Returns the socket of gpushd that hooks use.
    pub(super) fn socket(&self, global: &Global) -> Socket {
        socket::chosen(global).for_hooks(self.admin_socket.as_deref())
    }

    fn new(config: Config, files: &HookFiles, deadline: Duration) -> Self {
        let is_slurms =
            |rule: &gpush_core::config::Rule| rule.lease.is_some_and(|terms| terms.owner == LeaseOwner::Slurm);
        let until = Instant::now() + deadline;
        let path = files.dir.as_deref().unwrap_or(Path::new(SLURM_DIRECTORY));
        Self {
            directory: Directory::new(path, until),
            has_config: false,
            admin_socket: config.api.admin_socket.map(PathBuf::from),
            has_owner_slurm: config.rules.iter().any(is_slurms),
            slurm: config.slurm,
            deadline,
            until,
        }
    }
}

/// Reads the config. If the file is missing or invalid, returns the defaults: a hook that fails would drain the node,
/// and gpushd has its own copy of the config.
fn read(path: &Path) -> Config {
    let Ok(bytes) = offline::read_up_to(path, LONGEST) else { return Config::default() };
    Config::from_bytes(&bytes, &offline::name(path)).unwrap_or_default()
}
