//! Who calls, what that makes them, and what they may see.
//!
//! | caller | sees | may change |
//! |---|---|---|
//! | root, the uid of gpushd, members of the admin groups | everything | everything |
//! | any other user who may connect | GPUs, instances, plans; processes of their own in full | nothing |
//!
//! The kernel says who calls; the config says which groups are administrators. What is shown depends on the
//! [`Viewer`] alone.

use gpush_api::{Actor, ApiError, Code};
use gpush_core::config::Access;
use nix::unistd::Group;

use crate::listen::peer::Peer;

/// For whom an answer is made: it decides what is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Viewer {
    /// gpushd itself, for what every user may read afterwards: sees the processes of no user.
    Agent,
    /// gpushd itself, for its own decisions and its log, which is root's: sees everything.
    Log,
    /// An administrator: sees everything.
    Admin,
    /// A user by uid: sees their own processes in full.
    User(u32),
}

impl Viewer {
    /// Whether a process of `uid` may be shown in full. The owner of some processes is not known.
    pub(crate) fn may_see(self, uid: Option<u32>) -> bool {
        match self {
            Self::Agent => false,
            Self::Log | Self::Admin => true,
            Self::User(own) => uid == Some(own),
        }
    }

    /// Whether it may change GPUs and their settings.
    pub(crate) fn is_admin(self) -> bool {
        match self {
            Self::Agent | Self::Log | Self::Admin => true,
            Self::User(_) => false,
        }
    }
}

/// A process that sent a request, identified by its socket's peer credentials.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// Its credentials.
    pub(crate) peer: Peer,
    /// What it may see and do.
    pub(crate) viewer: Viewer,
}

impl Caller {
    /// Classifies `peer` under the access rules of the config.
    pub(crate) fn new(peer: Peer, access: &Access, own_uid: u32) -> Self {
        let admin = peer.uid == 0 || peer.uid == own_uid || in_one_of(&peer.groups, &access.admin_groups);
        let viewer = if admin { Viewer::Admin } else { Viewer::User(peer.uid) };
        Self { peer, viewer }
    }

    /// gpushd itself.
    pub(crate) fn agent() -> Self {
        let uid = nix::unistd::geteuid().as_raw();
        Self { peer: Peer { uid, pid: Some(std::process::id()), groups: Vec::new() }, viewer: Viewer::Agent }
    }

    /// Refuses a caller who is not an administrator; `user` is its name if it has one.
    pub(crate) fn denied(&self, what: &str, user: Option<&str>, access: &Access) -> ApiError {
        let uid = self.peer.uid;
        let who = user.map_or_else(|| format!("uid {uid}"), |user| format!("user {user} (uid {uid})"));
        let name = user.unwrap_or("USER");
        let admit = match access.admin_groups.as_slice() {
            [] => "name a group of yours in the config (admin_groups = [\"GROUP\"] under [access]), then \
                   `systemctl reload gpushd`"
                .to_owned(),
            [group, ..] => format!("add you with `usermod -aG {group} {name}`, then log in again"),
        };
        ApiError::new(Code::Denied, format!("{who} may not {what}"))
            .cause("only root, the user that gpushd runs as, and members of its admin groups may")
            .hint(format!("run it with sudo, or have an administrator {admit}"))
    }

    /// The caller as the API records them.
    pub(crate) fn actor(&self, user: Option<String>) -> Actor {
        Actor { uid: self.peer.uid, user, pid: self.peer.pid }
    }
}

fn in_one_of(gids: &[u32], names: &[String]) -> bool {
    // A group that does not exist has no members.
    names.iter().any(|name| matches!(Group::from_name(name), Ok(Some(group)) if gids.contains(&group.gid.as_raw())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(uid: u32, groups: &[u32]) -> Peer {
        Peer { uid, pid: Some(1), groups: groups.to_vec() }
    }

    #[test]
    fn root_our_own_uid_and_admin_groups_are_admins() {
        let none = Access::default();
        assert!(Caller::new(peer(0, &[]), &none, 990).viewer.is_admin());
        assert!(Caller::new(peer(990, &[]), &none, 990).viewer.is_admin());
        assert!(!Caller::new(peer(1000, &[0]), &none, 990).viewer.is_admin());
        // gid 0 has a name everywhere.
        let root = Group::from_gid(0.into()).unwrap().unwrap().name;
        let access = Access { admin_groups: vec!["no-such-group".to_owned(), root] };
        assert!(Caller::new(peer(1000, &[7, 0]), &access, 990).viewer.is_admin());
        assert!(!Caller::new(peer(1000, &[7]), &access, 990).viewer.is_admin());
    }

    #[test]
    fn the_refusal_says_what_to_do() {
        let access = Access { admin_groups: vec!["gpu-admins".to_owned()] };
        let caller = Caller::new(peer(1000, &[]), &access, 990);
        assert!(!caller.viewer.is_admin());
        let error = caller.denied("change MIG layouts", Some("bob"), &access);
        assert_eq!(error.code, Code::Denied);
        assert_eq!(error.message, "user bob (uid 1000) may not change MIG layouts");
        assert!(error.hint.unwrap().contains("`usermod -aG gpu-admins bob`"));
        let error = caller.denied("change MIG layouts", None, &Access::default());
        assert_eq!(error.message, "uid 1000 may not change MIG layouts");
        let hint = error.hint.unwrap();
        assert!(hint.contains("admin_groups") && hint.contains("systemctl reload gpushd"), "{hint}");
    }
}
