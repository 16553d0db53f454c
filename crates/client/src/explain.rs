//! Explains failed connections, each with a command that solves the problem.
//!
//! ```text
//! stat and connect          meaning                               remedy
//! nothing there             not started, or the file was deleted  systemctl restart gpushd.socket
//! EACCES on the socket      caller is not in the socket's group   usermod -aG GROUP USER, log in again
//! EACCES on a directory     the same for a parent directory       the same
//! ECONNREFUSED              stale socket, gpushd has ended        systemctl start gpushd
//! not a socket              wrong path                            --socket
//! EAGAIN                    the backlog is full                   try again
//! ```
//!
//! [`gather_facts`] collects the facts, and [`explain`] is a pure function of them. So a test can check
//! each message without another user, a service or a gpushd.

use std::{
    io,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use gpush_api::{ApiError, Code};

use crate::socket::{ADMIN_SOCKET, DEFAULT_SOCKET, Origin, Socket};

/// Maximum length of a path in a Unix socket address, in bytes.
pub const LONGEST_PATH: usize = 107;

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
}

/// Directories that can contain systemd units, in descending order of priority.
const UNIT_DIRECTORIES: [&str; 4] =
    ["/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];

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
    }
}

fn is_installed(unit: &str) -> bool {
    UNIT_DIRECTORIES.iter().any(|directory| Path::new(directory).join(unit).exists())
}

/// Returns the systemd unit that creates the socket; `None` if systemd does not create it.
fn socket_unit(facts: &Facts) -> Option<&'static str> {
    let default = Path::new(DEFAULT_SOCKET);
    if !facts.socket_unit_installed {
        None
    } else if facts.socket.path == default {
        Some("gpushd.socket")
    } else {
        (facts.socket.path == default.with_file_name(ADMIN_SOCKET)).then_some("gpushd-admin.socket")
    }
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

/// Returns the error message for a failed `connect`.
#[must_use]
pub fn explain(cause: &io::Error, facts: &Facts) -> ApiError {
    let path = facts.socket.path.display();
    let length = facts.socket.path.as_os_str().len();
    if length > LONGEST_PATH {
        return ApiError::new(
            Code::BadRequest,
            format!("the socket path has {length} bytes, but a Unix socket allows only {LONGEST_PATH}: {path}"),
        )
        .hint("give a shorter path with --socket");
    }
    match (&facts.found, cause.kind()) {
        (PathContent::Other(what), _) => {
            ApiError::new(Code::Unreachable, format!("{path} is {what}, not gpushd's socket")).hint(other_path(facts))
        }
        (PathContent::ClosedDirectory(directory, access), _) => denied(facts, Some(directory), access, 0o010, 0o001),
        (PathContent::Socket(access), io::ErrorKind::PermissionDenied) => denied(facts, None, access, 0o020, 0o002),
        (PathContent::Socket(_), io::ErrorKind::ConnectionRefused) => ApiError::new(
            Code::Unreachable,
            format!(
                "gpushd is not running: the socket {path} is from a previous \
                gpushd"
            ),
        )
        .hint(start(facts)),
        (PathContent::Socket(_), io::ErrorKind::WouldBlock) => ApiError::new(
            Code::Unreachable,
            format!("gpushd accepts no connection on {path} now: too many connections are waiting"),
        )
        .hint("try again; if that fails too, see `journalctl -u gpushd`")
        .retryable(),
        // Between the calls of `connect` and `stat`, the socket was deleted or created. A second attempt will show the
        // current state.
        (PathContent::Nothing, io::ErrorKind::NotFound) => {
            let missing = facts.own.as_ref().map_or_else(
                || format!("there is no socket {path}"),
                |own| format!("neither the socket {path} nor your own agent's socket {} exists", own.display()),
            );
            match socket_unit(facts) {
                // gpushd may be running. `systemctl start` would not create a deleted file again.
                Some(unit) => ApiError::new(Code::Unreachable, format!("cannot connect to gpushd: {missing}"))
                    .hint(format!("{}`systemctl restart {unit}`, which creates the socket", who_runs(facts))),
                None => ApiError::new(Code::Unreachable, format!("gpushd is not running on this host: {missing}"))
                    .hint(start(facts)),
            }
        }
        (PathContent::Nothing | PathContent::Socket(_), _) => {
            ApiError::new(Code::Unreachable, format!("cannot connect to gpushd at {path}"))
                .cause(cause.to_string())
                .hint(start(facts))
        }
    }
}

fn denied(facts: &Facts, directory: Option<&Path>, access: &Access, group_bit: u32, other_bit: u32) -> ApiError {
    let path = facts.socket.path.display();
    let door = match directory {
        Some(directory) => format!("the directory {} is open", directory.display()),
        None => "the socket is open".to_owned(),
    };
    let to_group = access.mode & group_bit != 0;
    let allowed = match (to_group, access.group.as_str()) {
        _ if access.mode & other_bit != 0 => {
            "to everyone, but an access list or a security module denies access".to_owned()
        }
        (true, "root") | (false, _) => format!("to {} only", access.owner),
        (true, group) if access.owner == "root" => format!("to root and group {group} only"),
        (true, group) => format!("to {} and group {group} only", access.owner),
    };
    let error = ApiError::new(
        Code::Denied,
        format!("user {} (uid {}) may not connect to {path}: {door} {allowed}", facts.user, facts.uid),
    );
    let error = error.cause(format!("permission denied (mode {:04o})", access.mode));
    let (group, owner) = (&access.group, &access.owner);
    let is_denied_elsewhere = access.mode & other_bit != 0 || access.in_group && to_group;
    if !is_denied_elsewhere && (!to_group || group == "root") {
        let (run, or) = match owner.as_str() {
            "root" => ("ask an administrator to run the same command".to_owned(), "or".to_owned()),
            owner => (format!("run the command as {owner}"), format!("or ask {owner}")),
        };
        let setting = match socket_unit(facts) {
            // gpushd does not change the mode of a socket that systemd created.
            Some(unit) => format!(
                "to set SocketMode= and SocketGroup= with `systemctl edit {unit}` so that your user may connect, then \
                 to run `systemctl restart {unit}`"
            ),
            None => "to set socket_group and socket_mode in [api] of gpushd's config so that your user may connect"
                .to_owned(),
        };
        let is_for_root = facts.socket.path.to_string_lossy().ends_with(ADMIN_SOCKET);
        return error.hint(match directory {
            Some(directory) => format!("{run}, {or} for access to the directory {}", directory.display()),
            // No setting gives other users access to this socket.
            None if is_for_root => run,
            None => format!("{run}, {or} {setting}"),
        });
    }
    if is_denied_elsewhere {
        return error.hint(format!(
            "the file mode allows the connection, so an access list or a security module denies it: check with \
            `getfacl {}` and `ausearch -m avc`",
            directory.unwrap_or(&facts.socket.path).display()
        ));
    }
    if access.listed_in_group {
        return error.hint(format!(
            "you were added to {group} after this session began: log in again, or run `newgrp {group}`"
        ));
    }
    let user = &facts.user;
    error.hint(format!("ask an administrator to run `usermod -aG {group} {user}`, then log in again"))
}

fn who_runs(facts: &Facts) -> &'static str {
    if facts.uid == 0 { "run " } else { "ask an administrator to run " }
}

/// Returns how to start a gpushd for this socket.
fn start(facts: &Facts) -> String {
    let who = who_runs(facts);
    let path = facts.socket.path.display();
    let default = Path::new(DEFAULT_SOCKET);
    if facts.socket.path == default || facts.socket.path == default.with_file_name(ADMIN_SOCKET) {
        return if facts.unit_installed {
            format!("{who}`systemctl start gpushd`; if gpushd ends again, see `journalctl -u gpushd`")
        } else {
            "gpushd is not installed as a service here; start it with `gpushd --config FILE --socket PATH`, \
             and give its socket with --socket PATH or GPUSH_SOCKET"
                .to_owned()
        };
    }
    let gpushd = format!("gpushd --config FILE --socket {path}");
    match facts.socket.origin {
        Origin::Option => format!(
            "start it again with the same command as before, for example `{gpushd}`, or give another path with --socket"
        ),
        Origin::Environment => {
            format!(
                "start it again with the same command as before, for example `{gpushd}`, or unset GPUSH_SOCKET to use the system's gpushd"
            )
        }
        Origin::User | Origin::System => {
            format!("start it again with the same command as before, for example `{gpushd}`")
        }
    }
}

fn other_path(facts: &Facts) -> String {
    match facts.socket.origin {
        Origin::Option => "give the path of gpushd's socket with --socket".to_owned(),
        Origin::Environment => "the path comes from GPUSH_SOCKET: set it to gpushd's socket, or unset it".to_owned(),
        Origin::User | Origin::System => {
            let unit = socket_unit(facts).unwrap_or("gpushd");
            format!("remove that file or directory, then run `systemctl restart {unit}`")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(group: &str, mode: u32) -> Access {
        Access { owner: "root".into(), group: group.into(), mode, in_group: false, listed_in_group: false }
    }

    fn facts(found: PathContent, origin: Origin) -> Facts {
        let path = match origin {
            Origin::System => DEFAULT_SOCKET,
            Origin::User => "/run/user/1000/gpush/gpushd.sock",
            Origin::Option | Origin::Environment => "/tmp/a/gpushd.sock",
        };
        Facts {
            socket: Socket::given(path, origin),
            own: None,
            found,
            uid: 1000,
            user: "alice".into(),
            unit_installed: origin == Origin::System,
            socket_unit_installed: origin == Origin::System,
        }
    }

    fn explained(kind: io::ErrorKind, facts: &Facts) -> (Code, String, String) {
        let error = explain(&io::Error::from(kind), facts);
        (error.code, error.message, error.hint.expect("every connect error has a way out"))
    }

    #[test]
    fn absent_socket_hints_at_starting_the_agent() {
        let mut at = facts(PathContent::Nothing, Origin::System);
        let (code, message, hint) = explained(io::ErrorKind::NotFound, &at);
        assert_eq!(code.exit_status(), 6);
        assert!(message.contains(DEFAULT_SOCKET), "{message}");
        // Earlier fault: the hint was `systemctl start gpushd`, which does not create a deleted socket file again.
        assert!(hint.starts_with("ask an administrator to run `systemctl restart gpushd.socket`"), "{hint}");
        assert!(message.starts_with("cannot connect"), "gpushd may be running: {message}");

        at.own = Some("/run/user/1000/gpush/gpushd.sock".into());
        let (_, message, _) = explained(io::ErrorKind::NotFound, &at);
        assert!(message.contains(DEFAULT_SOCKET) && message.contains("/run/user/1000/gpush/gpushd.sock"), "{message}");
        at.own = None;

        at.uid = 0;
        assert!(explained(io::ErrorKind::NotFound, &at).2.starts_with("run `systemctl restart gpushd.socket`"));
        // Hooks and administrators use the admin socket.
        at.socket = at.socket.for_hooks(None);
        assert!(explained(io::ErrorKind::NotFound, &at).2.starts_with("run `systemctl restart gpushd-admin.socket`"));

        at.socket_unit_installed = false;
        assert!(explained(io::ErrorKind::NotFound, &at).2.starts_with("run `systemctl start gpushd`"));
        at.unit_installed = false;
        assert!(explained(io::ErrorKind::NotFound, &at).2.contains("not installed as a service"));

        let at = facts(PathContent::Nothing, Origin::Environment);
        let hint = explained(io::ErrorKind::NotFound, &at).2;
        assert!(
            hint.contains("gpushd --config FILE --socket /tmp/a/gpushd.sock") && hint.contains("unset GPUSH_SOCKET"),
            "{hint}"
        );
    }

    #[test]
    fn stale_socket_differs_from_absent_one() {
        let at = facts(PathContent::Socket(access("gpush", 0o660)), Origin::System);
        let (code, message, hint) = explained(io::ErrorKind::ConnectionRefused, &at);
        assert_eq!(code.exit_status(), 6);
        assert!(message.contains("not running"), "{message}");
        assert!(hint.contains("systemctl start gpushd"), "{hint}");
    }

    #[test]
    fn denied_socket_names_the_group() {
        let mut door = access("gpush", 0o660);
        let at = facts(PathContent::Socket(door.clone()), Origin::System);
        let (code, message, hint) = explained(io::ErrorKind::PermissionDenied, &at);
        assert_eq!(code.exit_status(), 5);
        assert!(message.contains("alice") && message.contains("root and group gpush only"), "{message}");
        assert!(hint.contains("`usermod -aG gpush alice`") && !hint.contains("sudo"), "{hint}");

        door.listed_in_group = true;
        let hint =
            explained(io::ErrorKind::PermissionDenied, &facts(PathContent::Socket(door.clone()), Origin::System)).2;
        assert!(hint.contains("log in again"), "{hint}");

        door.in_group = true;
        let hint = explained(io::ErrorKind::PermissionDenied, &facts(PathContent::Socket(door), Origin::System)).2;
        assert!(hint.contains("getfacl"), "{hint}");

        let private = facts(PathContent::Socket(access("root", 0o600)), Origin::System);
        let (_, message, hint) = explained(io::ErrorKind::PermissionDenied, &private);
        assert!(message.ends_with("the socket is open to root only"), "{message}");
        // Earlier fault: the hint named the settings of the config, which gpushd ignores for a socket of systemd.
        assert!(!hint.contains("usermod") && hint.contains("`systemctl edit gpushd.socket`"), "{hint}");
        let own = Facts { socket_unit_installed: false, ..private.clone() };
        let hint = explained(io::ErrorKind::PermissionDenied, &own).2;
        assert!(hint.contains("socket_group and socket_mode"), "{hint}");
        // Earlier fault: the hint named settings that do not concern the admin socket, and told a user to be root.
        let mut of_root = private.clone();
        of_root.socket.path = DEFAULT_SOCKET.replace("gpushd.sock", ADMIN_SOCKET).into();
        let hint = explained(io::ErrorKind::PermissionDenied, &of_root).2;
        assert_eq!(hint, "ask an administrator to run the same command");
    }

    #[test]
    fn closed_directory_is_named_with_its_group() {
        let at = facts(PathContent::ClosedDirectory("/run/gpush".into(), access("gpush", 0o750)), Origin::System);
        let (code, message, hint) = explained(io::ErrorKind::PermissionDenied, &at);
        assert_eq!(code.exit_status(), 5);
        assert!(message.contains("the directory /run/gpush is open to root and group gpush only"), "{message}");
        assert!(hint.contains("usermod -aG gpush alice"), "{hint}");
    }

    #[test]
    fn file_that_is_not_a_socket_is_reported() {
        let at = facts(PathContent::Other("a regular file"), Origin::Option);
        // connect(2) on a regular file returns ECONNREFUSED. The same error is returned for a stale
        // socket.
        let (code, message, hint) = explained(io::ErrorKind::ConnectionRefused, &at);
        assert_eq!(code.exit_status(), 6);
        assert!(message.contains("a regular file, not gpushd's socket"), "{message}");
        assert!(hint.contains("--socket"), "{hint}");
    }

    #[test]
    fn path_too_long_for_an_address_is_a_usage_error() {
        let mut at = facts(PathContent::Nothing, Origin::Option);
        at.socket.path = PathBuf::from(format!("/tmp/{}", "x".repeat(120)));
        let (code, message, _) = explained(io::ErrorKind::InvalidInput, &at);
        assert_eq!(code.exit_status(), 2);
        assert!(message.contains("125 bytes") && message.contains("107"), "{message}");
    }

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
