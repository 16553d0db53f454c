//! The config and the flags of a hook.

use std::{
    fs::OpenOptions,
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use gpush_api::LeaseOwner;
use gpush_client::{Origin, Socket};
use gpush_core::config::{Config, DEFAULT_FILE, SLURM_DIRECTORY, Slurm};
use nix::fcntl::OFlag;

use crate::{directory::Directory, options::Options};

/// Maximum number of bytes that a hook reads from the config.
const LONGEST: u64 = gpush_core::config::MOST_BYTES as u64;

/// The settings that a hook needs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The section `[slurm]` of the config.
    pub(crate) slurm: Slurm,
    /// The socket that the options name.
    socket: Option<PathBuf>,
    /// The setting `api.admin_socket` of the config.
    admin_socket: Option<PathBuf>,
    /// The files of jobs.
    pub directory: Directory,
    /// Whether there is a config of gpushd. If so, this node has a gpushd.
    pub(crate) has_config: bool,
    /// Whether a rule reserves GPUs for Slurm (`owner = "slurm"`).
    pub(crate) has_owner_slurm: bool,
    /// Time limit of the hook.
    pub deadline: Duration,
    /// Time at which the hook must end.
    pub(crate) until: Instant,
}

impl Settings {
    /// Reads the config for a hook that root runs.
    #[must_use]
    pub fn of_root(options: &Options) -> Self {
        let path = options.config.clone().or_else(of_environment);
        let path = path.as_deref().unwrap_or(Path::new(DEFAULT_FILE));
        let config = read(path);
        let deadline = options.deadline.unwrap_or(config.slurm.deadline);
        Self { has_config: path.exists(), ..Self::new(config, options, deadline) }
    }

    /// Reads the config for TaskProlog. The environment of TaskProlog comes from the user, so this function does not
    /// let the environment select the config file.
    pub(crate) fn of_task(options: &Options) -> Self {
        let path = options.config.as_deref().unwrap_or(Path::new(DEFAULT_FILE));
        Self::new(read(path), options, Duration::ZERO)
    }

    /// Returns the socket of gpushd that hooks use.
    pub(crate) fn socket(&self) -> Socket {
        let socket = match &self.socket {
            Some(path) => Socket::given(path, Origin::Option),
            None => Socket::of_environment(),
        };
        socket.for_hooks(self.admin_socket.as_deref())
    }

    fn new(config: Config, options: &Options, deadline: Duration) -> Self {
        let is_slurms =
            |rule: &gpush_core::config::Rule| rule.lease.is_some_and(|terms| terms.owner == LeaseOwner::Slurm);
        let until = Instant::now() + deadline;
        let path = options.dir.as_deref().unwrap_or(Path::new(SLURM_DIRECTORY));
        Self {
            directory: Directory::new(path, until),
            has_config: false,
            socket: options.socket.clone(),
            admin_socket: config.api.admin_socket.map(PathBuf::from),
            has_owner_slurm: config.rules.iter().any(is_slurms),
            slurm: config.slurm,
            deadline,
            until,
        }
    }
}

/// Returns the path in the environment variable `GPUSH_CONFIG`.
fn of_environment() -> Option<PathBuf> {
    std::env::var_os("GPUSH_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// Reads the config. If the file is missing or invalid, returns the defaults: a hook that fails would drain the node,
/// and gpushd has its own copy of the config.
fn read(path: &Path) -> Config {
    let Ok(bytes) = bytes(path) else { return Config::default() };
    Config::from_bytes(&bytes, &path.display().to_string()).unwrap_or_default()
}

/// Reads a file. Opens the file without blocking, because a normal open would block on a pipe without a writer.
fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}
