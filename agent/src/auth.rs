//! Who may do what.
//!
//! | who | sees | may |
//! |---|---|---|
//! | root, the uid of gpushd, members of the admin groups | everything | everything |
//! | everybody else who may connect | GPUs, instances, plans; of processes their own | look and plan |
//!
//! The kernel says who asks; the config says which groups are admins.

use axum::{extract::FromRequestParts, http::request::Parts};
use gpush_api::{Actor, ApiError, Code};
use gpush_core::config::Access;
use nix::unistd::Group;

use crate::{agent::Shared, http::failure::Failure, listen::peer::Peer};

/// Whoever asks, and what that makes them.
#[derive(Debug, Clone)]
pub(crate) struct Asker {
    /// The process, by the kernel's word.
    pub(crate) peer: Peer,
    /// Whether they may do and see everything.
    pub(crate) admin: bool,
    /// Sees nobody's processes: what is made for this asker is shown to everybody.
    pub(crate) blind: bool,
}

impl Asker {
    /// What `peer` is under this config.
    pub(crate) fn new(peer: Peer, access: &Access, own_uid: u32) -> Self {
        let admin = peer.uid == 0 || peer.uid == own_uid || in_one_of(&peer.groups, &access.admin_groups);
        Self { peer, admin, blind: false }
    }

    /// The agent itself. What it is refused at start stands in `/v1/health`, so it sees nobody.
    pub(crate) fn agent() -> Self {
        let uid = nix::unistd::geteuid().as_raw();
        Self { peer: Peer { uid, pid: Some(std::process::id()), groups: Vec::new() }, admin: true, blind: true }
    }

    /// The agent itself, for its log, which is root's.
    pub(crate) fn log() -> Self {
        Self { blind: false, ..Self::agent() }
    }

    /// Whether a process of `uid` may be shown in full.
    pub(crate) fn may_see(&self, uid: Option<u32>) -> bool {
        !self.blind && (self.admin || uid == Some(self.peer.uid))
    }

    /// The refusal of whoever is no admin, called `user` if the name is known.
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

    /// The asker as the API records them.
    pub(crate) fn actor(&self, user: Option<String>) -> Actor {
        Actor { uid: self.peer.uid, user, pid: self.peer.pid }
    }
}

fn in_one_of(gids: &[u32], names: &[String]) -> bool {
    // A group that does not exist has no members.
    names.iter().any(|name| matches!(Group::from_name(name), Ok(Some(group)) if gids.contains(&group.gid.as_raw())))
}

impl FromRequestParts<Shared> for Asker {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, agent: &Shared) -> Result<Self, Failure> {
        // The accept loop puts it there before anything else sees the request.
        let Some(peer) = parts.extensions.get::<Peer>().cloned() else { return Err(Failure::internal()) };
        Ok(Self::new(peer, &agent.settings.config().access, agent.own_uid))
    }
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
        assert!(Asker::new(peer(0, &[]), &none, 990).admin);
        assert!(Asker::new(peer(990, &[]), &none, 990).admin);
        assert!(!Asker::new(peer(1000, &[0]), &none, 990).admin);
        // gid 0 has a name everywhere.
        let root = Group::from_gid(0.into()).unwrap().unwrap().name;
        let access = Access { admin_groups: vec!["no-such-group".to_owned(), root] };
        assert!(Asker::new(peer(1000, &[7, 0]), &access, 990).admin);
        assert!(!Asker::new(peer(1000, &[7]), &access, 990).admin);
    }

    #[test]
    fn the_refusal_says_what_to_do() {
        let access = Access { admin_groups: vec!["gpu-admins".to_owned()] };
        let asker = Asker::new(peer(1000, &[]), &access, 990);
        assert!(!asker.admin);
        let error = asker.denied("change MIG layouts", Some("bob"), &access);
        assert_eq!(error.code, Code::Denied);
        assert_eq!(error.message, "user bob (uid 1000) may not change MIG layouts");
        assert!(error.hint.unwrap().contains("`usermod -aG gpu-admins bob`"));
        let error = asker.denied("change MIG layouts", None, &Access::default());
        assert_eq!(error.message, "uid 1000 may not change MIG layouts");
        let hint = error.hint.unwrap();
        assert!(hint.contains("admin_groups") && hint.contains("systemctl reload gpushd"), "{hint}");
    }
}
