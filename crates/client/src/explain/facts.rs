//! The facts about a socket, the caller and the service that explain a failed connection.

use std::{
    io,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use crate::socket::{Origin, Socket};

/// Owner, group and mode of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// Name of the owner, or the uid as text.
    pub owner: String,
    /// Name of the group, or the gid as text.
    pub group: String,
    /// Permission bits.
    pub mode: u32,
    /// Whether the caller runs with this group.
    pub in_group: bool,
    /// Whether the user database lists the caller as a member. If this field is true and `in_group` is false, the
    /// caller only has to log in again.
    pub listed_in_group: bool,
}

/// What exists at the path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PathContent {
    /// Nothing.
    Nothing,
    /// A socket.
    Socket(Access),
    /// Something else, such as `a regular file`.
    Other(&'static str),
    /// A parent directory that the caller cannot enter.
    ClosedDirectory(PathBuf, Access),
}

/// The facts for an explanation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The socket and how it was chosen.
    pub socket: Socket,
    /// What exists at the path of the socket.
    pub found: PathContent,
    /// Path of the socket of the user's own gpushd, if the client also looked for this socket, and this socket does not
    /// exist.
    pub own: Option<PathBuf>,
    /// Effective uid of the caller.
    pub uid: u32,
    /// User name of the caller, or the uid as text.
    pub user: String,
    /// Whether there is a systemd unit `gpushd.service`.
    pub unit_installed: bool,
    /// Whether there is a systemd unit `gpushd.socket`. If so, systemd creates the sockets of the system's gpushd.
    pub socket_unit_installed: bool,
    /// The masked units among those that gpushd needs. systemd starts none of them.
    pub masked: Vec<&'static str>,
}

/// Directories that can contain systemd units, in descending order of priority.
const UNIT_DIRECTORIES: [&str; 4] =
    ["/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];

/// Directories in which `systemctl mask` creates links to `/dev/null`.
const MASK_DIRECTORIES: [&str; 2] = ["/etc/systemd/system", "/run/systemd/system"];

/// Units that gpushd needs.
const UNITS: [&str; 3] = ["gpushd.service", "gpushd.socket", "gpushd-admin.socket"];

/// Collects facts about the path, the caller and the service.
#[must_use]
pub fn gather_facts(socket: &Socket) -> Facts {
    let uid = nix::unistd::geteuid();
    let user = nix::unistd::User::from_uid(uid).ok().flatten();
    let name = user.as_ref().map_or_else(|| uid.to_string(), |u| u.name.clone());
    Facts {
        found: inspect_path(&socket.path, user.as_ref()),
        socket: socket.clone(),
        own: Socket::of_user().filter(|_| !uid.is_root() && socket.origin == Origin::System),
        uid: uid.as_raw(),
        user: name,
        unit_installed: is_installed("gpushd.service"),
        socket_unit_installed: is_installed("gpushd.socket"),
        masked: UNITS.into_iter().filter(|unit| is_masked(unit)).collect(),
    }
}

fn is_masked(unit: &str) -> bool {
    let is_null = |target: PathBuf| target == Path::new("/dev/null");
    MASK_DIRECTORIES.iter().any(|directory| Path::new(directory).join(unit).read_link().is_ok_and(is_null))
}

fn is_installed(unit: &str) -> bool {
    UNIT_DIRECTORIES.iter().any(|directory| Path::new(directory).join(unit).exists())
}

fn inspect_path(path: &Path, user: Option<&nix::unistd::User>) -> PathContent {
    match path.metadata() {
        Ok(meta) if meta.file_type().is_socket() => PathContent::Socket(access(&meta, user)),
        Ok(meta) if meta.is_dir() => PathContent::Other("a directory"),
        Ok(meta) if meta.is_file() => PathContent::Other("a regular file"),
        Ok(_) => PathContent::Other("a device or pipe"),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            // The caller cannot enter a directory on the path: the deepest directory whose metadata is readable.
            let closed = path.ancestors().skip(1).find_map(|dir| Some((dir.to_owned(), dir.metadata().ok()?)));
            match closed {
                Some((dir, meta)) => PathContent::ClosedDirectory(dir, access(&meta, user)),
                None => PathContent::Nothing,
            }
        }
        Err(_) => PathContent::Nothing,
    }
}

fn access(meta: &std::fs::Metadata, user: Option<&nix::unistd::User>) -> Access {
    use nix::unistd::{Gid, Group, Uid, User, getegid, getgroups};
    let gid = Gid::from_raw(meta.gid());
    let group = Group::from_gid(gid).ok().flatten();
    let owner = User::from_uid(Uid::from_raw(meta.uid())).ok().flatten();
    Access {
        owner: owner.map_or_else(|| meta.uid().to_string(), |o| o.name),
        mode: meta.permissions().mode() & 0o7777,
        in_group: getegid() == gid || getgroups().is_ok_and(|all| all.contains(&gid)),
        listed_in_group: user
            .is_some_and(|u| u.gid == gid || group.as_ref().is_some_and(|g| g.mem.iter().any(|m| m == &u.name))),
        group: group.map_or_else(|| gid.to_string(), |g| g.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gather_finds_the_object_at_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let look = |path: &Path| gather_facts(&Socket::given(path, Origin::Option)).found;
        assert_eq!(look(&path), PathContent::Nothing);
        assert_eq!(look(dir.path()), PathContent::Other("a directory"));
        std::fs::write(&path, "").unwrap();
        assert_eq!(look(&path), PathContent::Other("a regular file"));
        std::fs::remove_file(&path).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(matches!(look(&path), PathContent::Socket(a) if a.in_group));
    }
}
