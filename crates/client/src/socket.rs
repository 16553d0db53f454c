//! The path of gpushd's socket, and how the path was chosen. Error messages contain both.

use std::{
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

/// Socket of the system's gpushd.
pub const DEFAULT_SOCKET: &str = "/run/gpush/gpushd.sock";

/// Name of gpushd's second socket, in the directory of the first socket.
pub const ADMIN_SOCKET: &str = "admin.sock";

/// How a socket path was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// `--socket`.
    Option,
    /// The environment variable `GPUSH_SOCKET`.
    Environment,
    /// The socket of the system's gpushd.
    System,
    /// The socket of the user's own gpushd, below `XDG_RUNTIME_DIR`.
    User,
}

/// A socket path, and how it was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Socket {
    /// Path.
    pub path: PathBuf,
    /// How it was chosen.
    pub origin: Origin,
    /// gpushd's second socket, if it exists and the caller is root or the user that gpushd runs as.
    /// The client tries this socket first, because other users cannot fill its backlog. If the
    /// connection fails, the client uses `path`, and errors are about `path`.
    pub(crate) admin: Option<PathBuf>,
}

impl Socket {
    /// Creates a socket path that the user has given.
    #[must_use]
    pub fn given(path: impl Into<PathBuf>, origin: Origin) -> Self {
        Self { path: path.into(), origin, admin: None }
    }

    /// Returns the default socket. This is the system's socket, unless it does not exist and the user runs a separate
    /// gpushd.
    #[must_use]
    pub fn default_for_user() -> Self {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        Self::choose(Path::new(DEFAULT_SOCKET), runtime.as_deref()).with_admin(nix::unistd::geteuid().as_raw())
    }

    /// Returns the socket that the environment variable `GPUSH_SOCKET` names, else the default socket.
    #[must_use]
    pub fn of_environment() -> Self {
        match std::env::var_os("GPUSH_SOCKET").filter(|path| !path.is_empty()) {
            Some(path) => Self::given(path, Origin::Environment),
            None => Self::default_for_user(),
        }
    }

    /// Returns the socket path of the user's own gpushd, even if it does not exist.
    #[must_use]
    pub fn of_user() -> Option<PathBuf> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty())?;
        Some(PathBuf::from(runtime).join("gpush").join("gpushd.sock"))
    }

    /// Adds the admin socket in the same directory, if `uid` may use it.
    fn with_admin(mut self, uid: u32) -> Self {
        let admin = self.path.with_file_name(ADMIN_SOCKET);
        let may = admin.symlink_metadata().is_ok_and(|m| m.file_type().is_socket() && (uid == 0 || m.uid() == uid));
        self.admin = may.then_some(admin);
        self
    }

    /// Returns the socket for Slurm's hooks. gpushd refuses hooks on the socket that all users may use.
    ///
    /// - If `--socket` gave this path, the hooks use this path.
    /// - Otherwise, they use `configured`, which is `api.admin_socket` of the config.
    /// - Without `configured`, they use the admin socket in the directory of this path, even if it does not exist yet.
    ///   Exception: if `GPUSH_SOCKET` gave this path, the path exists, and no admin socket exists next to it, they use
    ///   this path.
    #[must_use]
    pub fn for_hooks(self, configured: Option<&Path>) -> Self {
        let beside = self.path.with_file_name(ADMIN_SOCKET);
        match (self.origin, configured) {
            (Origin::Option, _) => self,
            (Origin::Environment | Origin::System | Origin::User, Some(path)) => Self::given(path, Origin::System),
            // `GPUSH_SOCKET` may itself name an admin socket.
            (Origin::Environment, None) if self.path.exists() && !beside.exists() => self,
            (Origin::Environment | Origin::System | Origin::User, None) => Self::given(beside, self.origin),
        }
    }

    fn choose(system: &Path, runtime_dir: Option<&Path>) -> Self {
        // If the user cannot enter a directory on the path, treat the path as existing. The user then gets an error
        // about that directory.
        let absent = matches!(system.symlink_metadata(), Err(e) if e.kind() == std::io::ErrorKind::NotFound);
        if absent && let Some(dir) = runtime_dir {
            let own = dir.join("gpush").join("gpushd.sock");
            if own.symlink_metadata().is_ok() {
                return Self::given(own, Origin::User);
            }
        }
        Self::given(system, Origin::System)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn admin_socket_is_used_by_root_and_its_owner_only() {
        let dir = tempfile::tempdir().unwrap();
        let socket = || Socket::given(dir.path().join("gpushd.sock"), Origin::System);
        let own = nix::unistd::geteuid().as_raw();
        assert_eq!(socket().with_admin(0).admin, None, "there is none");
        let admin = dir.path().join(ADMIN_SOCKET);
        std::fs::write(&admin, "").unwrap();
        assert_eq!(socket().with_admin(own).admin, None, "a file of that name");
        std::fs::remove_file(&admin).unwrap();
        let _listener = UnixListener::bind(&admin).unwrap();
        for uid in [0, own] {
            assert_eq!(socket().with_admin(uid).admin.as_ref(), Some(&admin));
        }
        assert_eq!(socket().with_admin(own + 1).admin, None);
    }

    /// Regression test: a hook that ran while gpushd restarted found no admin socket. The hook then waited for the
    /// socket of all users.
    #[test]
    fn hooks_use_the_admin_socket_also_while_it_does_not_exist() {
        let system = Socket::given("/run/none/gpushd.sock", Origin::System).with_admin(0);
        assert_eq!(system.clone().for_hooks(None), Socket::given("/run/none/admin.sock", Origin::System));
        let configured = Socket::given("/run/none/x.sock", Origin::System);
        assert_eq!(system.for_hooks(Some(Path::new("/run/none/x.sock"))), configured);
        let given = Socket::given("/run/none/x.sock", Origin::Option);
        assert_eq!(given.clone().for_hooks(Some(Path::new("/run/none/y.sock"))), given);
    }

    /// Fault: with `GPUSH_SOCKET`, gpushd refused the hooks, because they used the socket of all users.
    #[test]
    fn hooks_use_the_admin_socket_next_to_the_one_in_the_environment() {
        let dir = tempfile::tempdir().unwrap();
        let named = |name: &str| Socket::given(dir.path().join(name), Origin::Environment);
        assert_eq!(named("gpushd.sock").for_hooks(None), named(ADMIN_SOCKET), "neither exists");
        std::fs::write(dir.path().join("x.sock"), "").unwrap();
        assert_eq!(named("x.sock").for_hooks(None), named("x.sock"), "it may be the admin socket");
        std::fs::write(dir.path().join(ADMIN_SOCKET), "").unwrap();
        assert_eq!(named("x.sock").for_hooks(None), named(ADMIN_SOCKET));
        assert_eq!(named(ADMIN_SOCKET).for_hooks(None), named(ADMIN_SOCKET));
    }

    #[test]
    fn users_own_agent_is_used_only_without_a_system_agent() {
        let dir = tempfile::tempdir().unwrap();
        let system = dir.path().join("system.sock");
        let runtime = dir.path().join("runtime");
        let own = runtime.join("gpush/gpushd.sock");

        assert_eq!(Socket::choose(&system, None).origin, Origin::System);
        assert_eq!(Socket::choose(&system, Some(&runtime)).origin, Origin::System);

        std::fs::create_dir_all(own.parent().unwrap()).unwrap();
        std::fs::write(&own, "").unwrap();
        assert_eq!(Socket::choose(&system, Some(&runtime)), Socket::given(own, Origin::User));

        std::fs::write(&system, "").unwrap();
        assert_eq!(Socket::choose(&system, Some(&runtime)), Socket::given(system, Origin::System));
    }
}
