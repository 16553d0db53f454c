//! Where the agent's socket is, and how it was chosen: an error that says so is half mended.

use std::path::{Path, PathBuf};

/// Socket of the system's agent.
pub const DEFAULT_SOCKET: &str = "/run/gpush/gpushd.sock";

/// How a socket path was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// `--socket`.
    Option,
    /// `GPUSH_SOCKET`.
    Environment,
    /// The system's agent.
    System,
    /// The user's own agent, below `XDG_RUNTIME_DIR`.
    User,
}

/// A socket path with its origin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Socket {
    /// Path.
    pub path: PathBuf,
    /// How it was chosen.
    pub origin: Origin,
}

impl Socket {
    /// A socket that the user named.
    #[must_use]
    pub fn given(path: impl Into<PathBuf>, origin: Origin) -> Self {
        Self { path: path.into(), origin }
    }

    /// The socket to use when nothing was said: the system's, unless it is absent and the user
    /// runs an agent of their own.
    #[must_use]
    pub fn default_for_user() -> Self {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        Self::choose(Path::new(DEFAULT_SOCKET), runtime.as_deref())
    }

    /// Where the user's own agent would be, whether it is there or not.
    #[must_use]
    pub fn of_user() -> Option<PathBuf> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty())?;
        Some(PathBuf::from(runtime).join("gpush").join("gpushd.sock"))
    }

    fn choose(system: &Path, runtime_dir: Option<&Path>) -> Self {
        // Whatever can't be looked at (a closed directory) counts as there: the error about it is
        // the one that helps.
        let absent = matches!(system.symlink_metadata(), Err(e) if e.kind() == std::io::ErrorKind::NotFound);
        if absent && let Some(dir) = runtime_dir {
            let own = dir.join("gpush").join("gpushd.sock");
            if own.symlink_metadata().is_ok() {
                return Self { path: own, origin: Origin::User };
            }
        }
        Self { path: system.to_owned(), origin: Origin::System }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_agent_is_taken_only_when_the_system_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let system = dir.path().join("system.sock");
        let runtime = dir.path().join("runtime");
        let own = runtime.join("gpush/gpushd.sock");

        assert_eq!(Socket::choose(&system, None).origin, Origin::System);
        assert_eq!(Socket::choose(&system, Some(&runtime)).origin, Origin::System);

        std::fs::create_dir_all(own.parent().unwrap()).unwrap();
        std::fs::write(&own, "").unwrap();
        assert_eq!(Socket::choose(&system, Some(&runtime)), Socket { path: own, origin: Origin::User });

        std::fs::write(&system, "").unwrap();
        assert_eq!(Socket::choose(&system, Some(&runtime)), Socket { path: system, origin: Origin::System });
    }
}
