//! Explains failed connections, each with a command that solves the problem.
//!
//! ```text
//! stat and connect          meaning                               remedy
//! nothing there             not started, or the file was deleted  systemctl restart gpushd.socket
//! nothing there             the units are masked                  systemctl unmask UNITS
//! EACCES on the socket      caller is not in the socket's group   usermod -aG GROUP USER, log in again
//! EACCES on a directory     the same for a parent directory       the same
//! ECONNREFUSED              stale socket, gpushd has ended        systemctl start gpushd
//! ECONNRESET                the units are masked                  systemctl unmask UNITS
//! not a socket              wrong path                            --socket
//! EAGAIN                    the backlog is full                   try again
//! ```
//!
//! [`gather_facts`] collects the facts, and [`explain`] is a pure function of them. So a test can check
//! each message without another user, a service or a gpushd.

mod facts;
mod lost;

use std::{io, path::Path};

use gpush_api::{ApiError, Code};

pub use self::facts::{Access, Facts, PathContent, gather_facts};
pub(crate) use self::lost::explain_lost;
use crate::socket::{ADMIN_SOCKET, DEFAULT_SOCKET, Origin};

/// Maximum length of a path in a Unix socket address, in bytes.
pub const LONGEST_PATH: usize = 107;

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
                _ if is_masked(facts) => {
                    ApiError::new(Code::Unreachable, format!("gpushd is not running on this host: {missing}"))
                        .hint(start(facts))
                }
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
            None => format!("for access to {}", facts.socket.path.display()),
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

/// Returns whether the socket belongs to the system's gpushd, and systemd does not start this gpushd.
fn is_masked(facts: &Facts) -> bool {
    is_of_system(facts) && !facts.masked.is_empty()
}

fn is_of_system(facts: &Facts) -> bool {
    let default = Path::new(DEFAULT_SOCKET);
    facts.socket.path == default || facts.socket.path == default.with_file_name(ADMIN_SOCKET)
}

fn who_runs(facts: &Facts) -> &'static str {
    if facts.uid == 0 { "run " } else { "ask an administrator to run " }
}

/// Returns how to start a gpushd for this socket.
fn start(facts: &Facts) -> String {
    let who = who_runs(facts);
    let path = facts.socket.path.display();
    if is_masked(facts) {
        let units = facts.masked.join(" ");
        return format!(
            "systemd does not start masked units: {who}`systemctl unmask {units}`, then `systemctl start gpushd`"
        );
    }
    if is_of_system(facts) {
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
    use std::path::PathBuf;

    use super::*;
    use crate::socket::Socket;

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
            masked: Vec::new(),
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

    /// Earlier fault: the hint named `systemctl restart`, which fails for a masked unit.
    #[test]
    fn masked_units_are_unmasked_first() {
        let mut at = facts(PathContent::Nothing, Origin::System);
        at.masked = vec!["gpushd.service", "gpushd.socket"];
        let unmask = "`systemctl unmask gpushd.service gpushd.socket`, then `systemctl start gpushd`";
        for kind in [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused] {
            let hint = explained(kind, &at).2;
            assert!(hint.contains(unmask), "{hint}");
        }
        // The masked units of the system do not concern another socket.
        let at = Facts { masked: at.masked, ..facts(PathContent::Nothing, Origin::Option) };
        assert!(!explained(io::ErrorKind::NotFound, &at).2.contains("unmask"));
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
        assert!(hint.ends_with("or for access to /run/gpush/gpushd.sock"), "{hint}");
        // Earlier fault: the hint named settings that do not concern the admin socket, and asked a user to be root.
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
}
