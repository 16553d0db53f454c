//! The command line, the environment, and the default paths for root and for other users.

use std::{
    path::{Component, Path, PathBuf},
    sync::LazyLock,
};

use clap::{Parser, Subcommand};

use super::constants::Constants;

/// Notes at the end of the help text. Lines have at most 78 columns.
const NOTES: &str = "\
Socket:
  If systemd passes a socket (gpushd.socket), gpushd uses it and ignores
  --socket. Otherwise gpushd creates a socket at PATH. It creates missing
  parent directories with mode 0755, and does not remove them. It replaces a
  socket on which no process listens. If a process listens, or the file is not
  a socket, gpushd leaves the file unchanged and exits. Every user may connect
  to the socket, unless a directory of PATH prevents it. gpushd removes the
  socket that it created when it exits.

Signals:
  SIGHUP   reload the config; if the file has an error, keep the old config
  SIGTERM  exit when the operation in progress has ended; a second SIGTERM at
           least a tenth of a second later makes gpushd exit at once";

/// Files of gpushd, for the man page gpushd(8).
const FILES: [(&str, &str); 13] = [
    ("/etc/gpush/config.toml", "Config. Without it, gpushd manages no GPU"),
    ("/run/gpush/gpushd.sock", "Socket for all users"),
    ("/run/gpush/admin.sock", "Socket for root and hooks"),
    ("/run/gpush/notices", "One file for each lease, with the notices to its holder"),
    ("/run/gpush-mps", "One subdirectory for each MPS daemon, with its start settings, lock and pipe directory"),
    ("/var/log/gpush-mps", "One subdirectory for each MPS daemon, with its log and the log of its servers"),
    ("/var/lib/gpush/gpush.db", "Database: operations, overrides, states of GPUs, audit trail"),
    (
        "/var/lib/gpush/gpush.db-wal",
        "Write-ahead log of the database. Copy it together with gpush.db, while gpushd is stopped",
    ),
    ("/var/lib/gpush/watermark", "Sequence number of the last recorded commit of the database, to detect lost commits"),
    ("/run/gpush/store-*", "The same number for this boot, to detect an emptied state directory"),
    ("/var/lib/gpush/reserve", "4 MiB of reserved space, to record the end of operations on a full disk"),
    ("/var/lib/gpush/lock", "Locked while gpushd runs; contains its pid"),
    gpush_man::DOCUMENTS,
];

/// Directory of MPS daemons of the system service.
pub(crate) const MPS_DIRECTORY: &str = gpush_mps::SYSTEM_DIRECTORY;

/// The version of gpushd, and the newest version of the database that gpushd can read.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} (database schema {})", env!("CARGO_PKG_VERSION"), gpush_store::SCHEMA));

/// State directory of the system service.
const SYSTEM_STATE: &str = "/var/lib/gpush";

/// The gpush host agent: manages how the GPUs of this host are shared
#[derive(Debug, Parser)]
#[command(name = "gpushd", version = VERSION.as_str(), about, long_about = None, after_help = NOTES, disable_help_subcommand = true, max_term_width = 100)]
pub(crate) struct Arguments {
    /// Config file [default: /etc/gpush/config.toml, or ~/.config/gpush/config.toml if not root]
    #[arg(long, env = "GPUSH_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Socket to listen on [default: /run/gpush/gpushd.sock, or $XDG_RUNTIME_DIR/gpush/gpushd.sock if not root]
    #[arg(long, env = "GPUSH_SOCKET", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// Second socket, for root and the user that gpushd runs as [default: `api.admin_socket` of the config, else
    /// admin.sock next to the first socket]
    #[arg(long, env = "GPUSH_ADMIN_SOCKET", value_name = "PATH")]
    pub(crate) admin_socket: Option<PathBuf>,

    /// Directory for persistent state [default: /var/lib/gpush, or ~/.local/state/gpush if not root]
    #[arg(long, env = "GPUSH_STATE_DIR", value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,

    /// NVML library to load [default: `driver.library` of the config]
    #[arg(long, env = "GPUSH_LIBRARY", value_name = "FILE")]
    pub(crate) library: Option<PathBuf>,

    /// Log level: error, warn, info, debug, trace, or a filter such as info,gpushd::operations=debug
    /// [default: `log.level` of the config]
    #[arg(long, env = "GPUSH_LOG", value_name = "FILTER")]
    pub(crate) log: Option<String>,

    /// File with the id of this boot
    #[arg(long, env = "GPUSH_BOOT_ID_FILE", value_name = "FILE", hide = true)]
    #[arg(default_value = "/proc/sys/kernel/random/boot_id")]
    pub(crate) boot_id_file: PathBuf,

    /// Root of the file system in which gpushd searches for services of the host and for subordinate uids
    #[arg(long, env = "GPUSH_HOST_ROOT", value_name = "DIR", hide = true, default_value = "/")]
    pub(crate) host_root: PathBuf,

    /// Directory in which gpushd reads processes
    #[arg(long, env = "GPUSH_PROC", value_name = "DIR", hide = true, default_value = "/proc")]
    pub(crate) proc: PathBuf,

    /// Program that resets GPUs, if the config does not set `mode_change.nvidia_smi`
    #[arg(long, env = "GPUSH_NVIDIA_SMI", value_name = "FILE", hide = true)]
    pub(crate) nvidia_smi: Option<PathBuf>,

    /// Directory of MPS daemons [default: /run/gpush-mps, or $XDG_RUNTIME_DIR/gpush-mps if not root]
    #[arg(long, env = "GPUSH_MPS_DIR", value_name = "DIR")]
    pub(crate) mps_dir: Option<PathBuf>,

    /// Directory of NVIDIA's MPS programs, if the config does not set `mps.control`
    #[arg(long, env = "GPUSH_MPS_PROGRAMS", value_name = "DIR", hide = true)]
    pub(crate) mps_programs: Option<PathBuf>,

    /// Time limits and other values of gpushd, for tests
    #[arg(long, value_name = "KEY=VALUE,…", hide = true, default_value = "")]
    pub(crate) constants: Constants,

    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

/// Internal commands, which do not serve the API.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run driver calls for the gpushd that started this process
    #[command(hide = true)]
    DriverWorker,
    /// Run a program for gpushd; the program continues to run if gpushd ends
    #[command(hide = true)]
    Helper {
        /// Directory of the run
        dir: PathBuf,
    },
    /// Become the MPS control daemon of a target
    #[command(hide = true)]
    MpsDaemon {
        /// Directory of the target
        dir: PathBuf,
    },
    /// Try to open a device, and exit with a status that says whether the kernel denies it
    #[command(hide = true)]
    DeviceProbe {
        /// Major number
        major: u32,
        /// Minor number
        minor: u32,
        /// Path of the node; it is created, and removed again, if it does not exist
        path: PathBuf,
    },
    /// Print the man page
    #[command(hide = true)]
    Man,
}

/// Returns the man page gpushd(8).
pub(crate) fn man_page() -> std::io::Result<Vec<u8>> {
    use clap::CommandFactory;
    // The subcommands are internal, so the man page must not show that a subcommand is required.
    let mut command = Arguments::command().subcommand_required(false);
    command.build();
    let see_also = ["gpush-config(5)", "gpushctl(1)", "systemctl(1)", "nvidia-smi(1)"].map(str::to_owned);
    gpush_man::page(&command, "gpushd", "8", &gpush_man::Appendix { files: &FILES, see_also: &see_also })
}

/// Paths, with the defaults filled in.
#[derive(Debug, Clone)]
pub(crate) struct Paths {
    /// Config file.
    pub(crate) config: PathBuf,
    /// Whether the user named the config file. A named file must exist.
    pub(crate) config_named: bool,
    /// Socket.
    pub(crate) socket: PathBuf,
    /// Second socket, if the user named it.
    pub(crate) admin_socket: Option<PathBuf>,
    /// State directory.
    pub(crate) state_dir: PathBuf,
    /// Marker of the database: a file in the directory of the socket. A reboot clears this
    /// directory.
    pub(crate) store_marker: PathBuf,
    /// File with the boot id.
    pub(crate) boot_id_file: PathBuf,
    /// Directory of MPS daemons.
    pub(crate) mps_dir: PathBuf,
    /// Requirements for the config file and the driver library.
    pub(crate) trust: Trust,
}

/// Which config files and driver libraries are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trust {
    /// Accepts only files that no user except root can write. Applies to the system service, which
    /// runs as root with the default state directory.
    Required,
    /// Accepts all files, and logs a file that the system service would refuse. Applies to a gpushd
    /// of another user, or on a simulated host.
    Logged,
}

/// A default that cannot be determined, and the option to use instead.
#[derive(Debug, thiserror::Error)]
#[error("there is no default for {what}, because {variable} is not set; give {option}")]
pub(crate) struct NoDefault {
    what: &'static str,
    variable: &'static str,
    option: &'static str,
}

/// The parts of the environment that determine the defaults.
#[derive(Debug, Default)]
pub(crate) struct ProcessEnvironment {
    /// Whether gpushd runs as root and uses the system directories.
    pub(crate) root: bool,
    /// `HOME`.
    pub(crate) home: Option<PathBuf>,
    /// `XDG_CONFIG_HOME`.
    pub(crate) config_home: Option<PathBuf>,
    /// `XDG_STATE_HOME`.
    pub(crate) state_home: Option<PathBuf>,
    /// `XDG_RUNTIME_DIR`.
    pub(crate) runtime_dir: Option<PathBuf>,
}

impl ProcessEnvironment {
    /// Reads the environment of this process. Ignores relative directories, as the XDG
    /// specification requires.
    pub(crate) fn of_this_process() -> Self {
        let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        Self {
            root: nix::unistd::geteuid().is_root(),
            home: absolute("HOME"),
            config_home: absolute("XDG_CONFIG_HOME"),
            state_home: absolute("XDG_STATE_HOME"),
            runtime_dir: absolute("XDG_RUNTIME_DIR"),
        }
    }
}

impl Paths {
    /// Returns the directory of the files with notices to the holders of leases, next to the socket.
    pub(crate) fn notice_dir(&self) -> PathBuf {
        self.next_to_socket("notices")
    }

    /// Returns the directory of the files with the jobs on each GPU, next to the socket.
    pub(crate) fn job_dir(&self) -> PathBuf {
        self.next_to_socket("jobs")
    }

    fn next_to_socket(&self, name: &str) -> PathBuf {
        let socket = std::path::absolute(&self.socket).unwrap_or_else(|_| self.socket.clone());
        socket.parent().unwrap_or(Path::new("/")).join(name)
    }

    /// Fills in the defaults.
    pub(crate) fn resolve(arguments: &Arguments, here: &ProcessEnvironment) -> Result<Self, NoDefault> {
        let below_home = |set: &Option<PathBuf>, usual: &str, what, variable, option| {
            let base = set.clone().or_else(|| here.home.as_ref().map(|home| home.join(usual)));
            base.map(|base| base.join("gpush")).ok_or(NoDefault { what, variable, option })
        };
        let config = match &arguments.config {
            // The path is absolute, because hints contain the path and users may type the hints in
            // other directories.
            Some(path) => std::path::absolute(path).unwrap_or_else(|_| path.clone()),
            None if here.root => "/etc/gpush/config.toml".into(),
            None => below_home(&here.config_home, ".config", "the config file", "HOME", "--config FILE")?
                .join("config.toml"),
        };
        let state_dir = match &arguments.state_dir {
            // The path is canonical, so that all paths of one directory lead to the same marker and the same trust
            // rule.
            Some(path) => canonical(path),
            None if here.root => SYSTEM_STATE.into(),
            None => below_home(&here.state_home, ".local/state", "the state directory", "HOME", "--state-dir DIR")?,
        };
        let socket = match &arguments.socket {
            Some(path) => path.clone(),
            None if here.root => "/run/gpush/gpushd.sock".into(),
            None => match &here.runtime_dir {
                Some(dir) => dir.join("gpush/gpushd.sock"),
                None => {
                    return Err(NoDefault { what: "the socket", variable: "XDG_RUNTIME_DIR", option: "--socket PATH" });
                }
            },
        };
        let mps_dir = match &arguments.mps_dir {
            Some(path) => std::path::absolute(path).unwrap_or_else(|_| path.clone()),
            None if here.root => MPS_DIRECTORY.into(),
            // Use the runtime directory, like the socket. Without a runtime directory, use the state directory.
            None => here.runtime_dir.as_ref().map_or_else(|| state_dir.join("mps"), |dir| dir.join("gpush-mps")),
        };
        let store_marker = store_marker(&socket, &state_dir);
        let is_system = here.root && state_dir == Path::new(SYSTEM_STATE);
        let trust = if is_system { Trust::Required } else { Trust::Logged };
        Ok(Self {
            config,
            config_named: arguments.config.is_some(),
            socket,
            admin_socket: arguments.admin_socket.clone(),
            state_dir,
            store_marker,
            boot_id_file: arguments.boot_id_file.clone(),
            mps_dir,
            trust,
        })
    }
}

/// Resolves symbolic links and `..` in the part of the path that exists.
fn canonical(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    for existing in path.ancestors() {
        if let Ok(real) = std::fs::canonicalize(existing)
            && let Ok(rest) = path.strip_prefix(existing)
            && rest.components().all(|component| matches!(component, Component::Normal(_)))
        {
            return if rest.as_os_str().is_empty() { real } else { real.join(rest) };
        }
    }
    path
}

/// Returns the marker of the database in `state_dir`. The name depends on the state directory, because several gpushd
/// may share the directory of their sockets.
fn store_marker(socket: &Path, state_dir: &Path) -> PathBuf {
    let state_dir = std::path::absolute(state_dir).unwrap_or_else(|_| state_dir.to_owned());
    let name = uuid::Uuid::new_v5(&uuid::Uuid::NAMESPACE_URL, state_dir.as_os_str().as_encoded_bytes());
    socket.with_file_name(format!("store-{}", name.simple()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(given: &[&str]) -> Arguments {
        Arguments::try_parse_from(std::iter::once("gpushd").chain(given.iter().copied())).unwrap()
    }

    #[test]
    fn command_line_is_well_formed() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }

    #[test]
    fn help_notes_fit_a_narrow_terminal() {
        for line in NOTES.lines() {
            assert!(line.chars().count() <= 78, "{line}");
        }
    }

    #[test]
    fn root_uses_system_directories() {
        let here = ProcessEnvironment { root: true, ..ProcessEnvironment::default() };
        let paths = Paths::resolve(&arguments(&[]), &here).unwrap();
        assert_eq!(paths.config, PathBuf::from("/etc/gpush/config.toml"));
        assert_eq!(paths.socket, PathBuf::from("/run/gpush/gpushd.sock"));
        assert_eq!(paths.state_dir, PathBuf::from("/var/lib/gpush"));
        assert!(!paths.config_named);
        assert_eq!(paths.trust, Trust::Required);
        let simulated = Paths::resolve(&arguments(&["--state-dir", "/tmp/s"]), &here).unwrap();
        assert_eq!(simulated.trust, Trust::Logged);
        // This directory must not change, because the tmpfiles.d file and the unit name it.
        assert_eq!(paths.store_marker.parent(), Some(Path::new("/run/gpush")));
    }

    #[test]
    fn store_marker_differs_between_state_directories() {
        let here = ProcessEnvironment { root: true, ..ProcessEnvironment::default() };
        let marker = |state: &str| Paths::resolve(&arguments(&["--state-dir", state]), &here).unwrap().store_marker;
        assert_eq!(marker("/a"), marker("/a"));
        assert_ne!(marker("/a"), marker("/b"));
    }

    #[test]
    fn state_directory_path_is_normalized() {
        let scratch = tempfile::tempdir().unwrap();
        let real = std::fs::canonicalize(scratch.path()).unwrap();
        std::fs::create_dir(real.join("state")).unwrap();
        std::os::unix::fs::symlink("state", real.join("link")).unwrap();
        for (written, expected) in
            [("state", "state"), ("link", "state"), ("state/../link", "state"), ("link/new", "state/new")]
        {
            assert_eq!(canonical(&real.join(written)), real.join(expected), "{written}");
        }
        let here = ProcessEnvironment { root: true, ..ProcessEnvironment::default() };
        let system = Paths::resolve(&arguments(&["--state-dir", "/var/lib/../lib/gpush"]), &here).unwrap();
        assert_eq!(system.trust, Trust::Required);
    }

    #[test]
    fn user_has_xdg_directories_and_options_override() {
        let here = ProcessEnvironment {
            home: Some("/home/u".into()),
            state_home: Some("/data/state".into()),
            runtime_dir: Some("/run/user/7".into()),
            ..ProcessEnvironment::default()
        };
        let paths = Paths::resolve(&arguments(&[]), &here).unwrap();
        assert_eq!(paths.config, PathBuf::from("/home/u/.config/gpush/config.toml"));
        assert_eq!(paths.socket, PathBuf::from("/run/user/7/gpush/gpushd.sock"));
        assert_eq!(paths.state_dir, PathBuf::from("/data/state/gpush"));

        let paths = Paths::resolve(&arguments(&["--socket", "s", "--config", "c"]), &here).unwrap();
        // The path is absolute, because hints contain the path and users may type the hints in
        // other directories.
        let config = std::path::absolute("c").unwrap();
        assert_eq!((paths.socket, paths.config), (PathBuf::from("s"), config));
        assert!(paths.config_named);
    }

    #[test]
    fn missing_directory_is_reported_with_its_option() {
        let here = ProcessEnvironment { home: Some("/home/u".into()), ..ProcessEnvironment::default() };
        let error = Paths::resolve(&arguments(&[]), &here).unwrap_err().to_string();
        assert_eq!(error, "there is no default for the socket, because XDG_RUNTIME_DIR is not set; give --socket PATH");
    }
}
