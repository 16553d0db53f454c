//! The listening sockets: passed by systemd, or created by gpushd.
//!
//! gpushd binds a new socket under a temporary name, sets its mode, and then renames it. So no client can
//! connect before the permissions are right. gpushd replaces a socket file only if no process listens on it. It never
//! replaces a file that is not a socket.
//!
//! Before gpushd creates the socket, it locks the path. It holds the lock as long as the socket exists: see
//! [`gpush_host::path_lock`].

use std::{
    ffi::OsString,
    fs,
    io::{self, ErrorKind},
    os::unix::{
        fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
};

use gpush_host::path_lock::{LockError, PathLock};

/// Who may connect to a socket that gpushd creates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketUsers {
    /// Every user that can enter the directory of the socket. The socket peer credentials determine what a user may see
    /// and do.
    All,
    /// Root and the user that gpushd runs as.
    Own,
}

impl SocketUsers {
    /// Returns the permission bits of the socket file.
    fn mode(self) -> u32 {
        match self {
            Self::All => 0o666,
            Self::Own => 0o600,
        }
    }
}

/// The sockets that systemd passed.
#[derive(Debug)]
pub(crate) struct PassedSockets {
    /// The first socket.
    pub(crate) public: Listening,
    /// The second socket, if systemd passed it.
    pub(crate) admin: Option<Listening>,
}

/// Name of the second socket in systemd, set by `FileDescriptorName=` in its unit.
const ADMIN: &str = "admin";

/// Why a socket cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SocketError {
    /// The directory of the socket cannot be created.
    #[error("cannot create the directory of the socket {}; give another path with {option}", path.display())]
    Directory {
        path: PathBuf,
        source: io::Error,
        /// The option that sets another path.
        option: &'static str,
    },
    /// Another gpushd has locked the path.
    #[error("another gpushd {}has the socket {}; stop it with `systemctl stop gpushd`{}, or give another path with \
             {option}", by(*.holder, "(pid ", ") "), path.display(), by(*.holder, " or `kill ", "`"))]
    Held {
        path: PathBuf,
        /// The pid of the other gpushd; `None` if it could not be read.
        holder: Option<u32>,
        /// The option that sets another path.
        option: &'static str,
    },
    /// gpushd cannot lock the path.
    #[error("cannot use the lock file {} of the socket; remove it, or give another path with \
        {option}", path.display())]
    Lock {
        path: PathBuf,
        source: io::Error,
        /// The option that sets another path.
        option: &'static str,
    },
    /// Another program listens on the path.
    #[error("another program listens on {}; stop it, or give another path with {option}", path.display())]
    Live {
        path: PathBuf,
        /// The option that sets another path.
        option: &'static str,
    },
    /// The path is not a socket.
    #[error("{} exists and is not a socket; remove it, or give another path with {option}", path.display())]
    NotASocket {
        path: PathBuf,
        /// The option that sets another path.
        option: &'static str,
    },
    /// The path is longer than the kernel permits.
    #[error("the socket path {} has more than 100 bytes; give a shorter one with {option}", path.display())]
    TooLong {
        path: PathBuf,
        /// The option that sets another path.
        option: &'static str,
    },
    /// Another error.
    #[error("cannot create the socket {}", path.display())]
    Bind {
        /// Path of the socket.
        path: PathBuf,
        source: io::Error,
    },
    /// A socket that systemd passed cannot be used.
    #[error("cannot use the socket that systemd passed to gpushd; check gpushd.socket and gpushd-admin.socket")]
    HandedOver {
        /// The error of the system call.
        source: io::Error,
    },
}

fn by(pid: Option<u32>, before: &str, after: &str) -> String {
    pid.map_or_else(String::new, |pid| format!("{before}{pid}{after}"))
}

/// A socket that accepts connections.
#[derive(Debug)]
pub(crate) struct Listening {
    /// The listener, in non-blocking mode.
    pub(crate) listener: UnixListener,
    /// Name of the socket in logs.
    pub(crate) name: String,
    /// The socket file. gpushd removes the file on exit. `None` if systemd owns the file.
    ours: Option<OwnedFile>,
}

/// A socket file of gpushd and the lock of its path. Dropping this value removes the file, unless another process has
/// replaced the file. In both cases, the drop finally releases the lock.
#[derive(Debug)]
struct OwnedFile {
    path: PathBuf,
    inode: u64,
    _lock: PathLock,
}

impl Listening {
    /// Returns the sockets that systemd passed, if any. Call this function before any thread starts, because the
    /// function removes environment variables.
    pub(crate) fn take_passed() -> Result<Option<PassedSockets>, SocketError> {
        let broken = |source| SocketError::HandedOver { source };
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let names: Vec<&str> = names.split(':').collect();
        let mut handed = listenfd::ListenFd::from_env();
        let (mut public, mut admin) = (Vec::new(), Vec::new());
        for position in 0..handed.len() {
            let Some(listener) = handed.take_unix_listener(position).map_err(broken)? else { continue };
            listener.set_nonblocking(true).map_err(broken)?;
            let name = match listener.local_addr().map_err(broken)?.as_pathname() {
                Some(path) => path.display().to_string(),
                None => "an unnamed socket".to_owned(),
            };
            let listening = Self { listener, name, ours: None };
            if names.get(position) == Some(&ADMIN) { admin.push(listening) } else { public.push(listening) }
        }
        let wrong = |what: &str| Err(broken(io::Error::new(ErrorKind::InvalidInput, what)));
        match (public.len(), admin.len()) {
            (0, 0) => Ok(None),
            (1, 0 | 1) => Ok(public.pop().map(|public| PassedSockets { public, admin: admin.pop() })),
            (0, _) => wrong("systemd passed only the socket named `admin`"),
            _ => wrong("systemd passed more than one socket of the same kind"),
        }
    }

    /// Creates the socket at `path`. `option` is the command-line option that sets this path; errors name the option.
    pub(crate) fn bind(path: &Path, users: SocketUsers, option: &'static str) -> Result<Self, SocketError> {
        let here = || path.to_owned();
        let failed = |source| SocketError::Bind { path: here(), source };
        if path.as_os_str().len() > 100 {
            return Err(SocketError::TooLong { path: here(), option });
        }
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(|source| SocketError::Directory {
                path: here(),
                source,
                option,
            })?;
        }
        let lock = PathLock::take(path).map_err(|error| match error {
            LockError::Held { holder } => SocketError::Held { path: here(), holder, option },
            LockError::Unusable { path, source } => SocketError::Lock { path, source, option },
        })?;
        refuse_unless_free(path, option)?;
        let mut draft = OsString::from(path);
        draft.push(".new");
        let draft = PathBuf::from(draft);
        match fs::remove_file(&draft) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        // The permissions of the socket are set under the temporary name, before any client can connect.
        let listener = UnixListener::bind(&draft).map_err(failed)?;
        let finish = || -> io::Result<u64> {
            fs::set_permissions(&draft, fs::Permissions::from_mode(users.mode()))?;
            listener.set_nonblocking(true)?;
            let inode = fs::metadata(&draft)?.ino();
            fs::rename(&draft, path)?;
            Ok(inode)
        };
        match finish() {
            Ok(inode) => {
                let ours = OwnedFile { path: here(), inode, _lock: lock };
                Ok(Self { listener, name: path.display().to_string(), ours: Some(ours) })
            }
            Err(error) => {
                let _ = fs::remove_file(&draft);
                Err(failed(error))
            }
        }
    }

    /// Splits the socket into its listener and its file. Dropping the [`SocketFile`] removes the file.
    pub(crate) fn split(self) -> (UnixListener, SocketFile) {
        (self.listener, SocketFile(self.ours))
    }
}

/// The file of the socket, if gpushd owns it.
#[derive(Debug)]
pub(crate) struct SocketFile(#[expect(dead_code, reason = "its drop removes the file")] Option<OwnedFile>);

impl Drop for OwnedFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn refuse_unless_free(path: &Path, option: &'static str) -> Result<(), SocketError> {
    let failed = |source| SocketError::Bind { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(SocketError::NotASocket { path: path.to_owned(), option });
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        // The file is stale: no process listens on it, so gpushd may replace it.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Err(failed(error)),
        // A process listens on the socket, even if it is too busy to answer.
        Ok(_) | Err(_) => Err(SocketError::Live { path: path.to_owned(), option }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_socket_file_is_replaced_and_live_one_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("run/gpushd.sock");
        let first = Listening::bind(&path, SocketUsers::All, "--socket").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        let error = Listening::bind(&path, SocketUsers::All, "--socket").unwrap_err().to_string();
        let pid = std::process::id();
        assert!(error.starts_with(&format!("another gpushd (pid {pid}) has the socket")), "{error}");
        drop(first);
        // The other process listens without taking gpushd's lock.
        fs::remove_file(&path).unwrap_or_default();
        let other = UnixListener::bind(&path).unwrap();
        assert!(matches!(Listening::bind(&path, SocketUsers::All, "--socket"), Err(SocketError::Live { .. })));
        // Simulates that the process was killed: the file remains, but no process listens on it.
        drop(other);
        assert!(path.exists());
        let second = Listening::bind(&path, SocketUsers::All, "--socket").unwrap();
        UnixStream::connect(&path).unwrap();
        let (_listener, file) = second.split();
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn foreign_socket_file_is_not_removed() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("gpushd.sock");
        let (_listener, file) = Listening::bind(&path, SocketUsers::All, "--socket").unwrap().split();
        fs::remove_file(&path).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn file_that_is_not_a_socket_is_kept() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("gpushd.sock");
        fs::write(&path, "precious").unwrap();
        let error = Listening::bind(&path, SocketUsers::All, "--socket").unwrap_err().to_string();
        assert!(error.contains("is not a socket") && error.contains("--socket"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn admin_socket_is_only_for_its_own_user() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("admin.sock");
        let _socket = Listening::bind(&path, SocketUsers::Own, "--admin-socket").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn long_socket_path_is_refused() {
        let scratch = tempfile::tempdir().unwrap();
        let long = scratch.path().join("x".repeat(120));
        assert!(matches!(Listening::bind(&long, SocketUsers::All, "--socket"), Err(SocketError::TooLong { .. })));
    }
}
