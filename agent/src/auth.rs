//! Who may do what.
//!
//! | caller | sees | may |
//! |---|---|---|
//! | root, the user that gpushd runs as, members of the admin groups | everything | everything |
//! | any other | GPUs, instances, plans; their own processes | look and plan |
//!
//! The kernel identifies the caller, and the config names the admin groups. A caller in another pid or user namespace
//! is no administrator: root of a container may take any user id and group id there.

use axum::{extract::FromRequestParts, http::request::Parts};
use gpush_api::{Actor, ApiError, Code};
use gpush_core::config::Access;
use gpush_host::peer::Peer;

use crate::{agent::Shared, http::failure::Failure};

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
    /// Identifies a caller under the config as it is now. Groups are resolved off the async threads.
    pub(crate) async fn of(agent: &Shared, peer: Peer) -> Self {
        let groups = &agent.settings.config().access.admin_groups;
        // Root may do everything anyway, and nothing that a container says of groups counts.
        let may_need_group = peer.is_on_this_host && peer.uid != 0 && peer.uid != agent.own_uid;
        let is_member = may_need_group && agent.users.is_in_one_of(&peer.groups, groups).await;
        Self::new(peer, agent.own_uid, is_member)
    }

    fn new(peer: Peer, own_uid: u32, is_member: bool) -> Self {
        let admin = peer.is_on_this_host && (peer.uid == 0 || peer.uid == own_uid || is_member);
        Self { peer, admin, blind: false }
    }

    /// The agent itself. What it is refused at start stands in `/v1/health`, so it sees nobody.
    pub(crate) fn agent() -> Self {
        let uid = nix::unistd::geteuid().as_raw();
        let peer = Peer { uid, pid: Some(std::process::id()), groups: Vec::new(), is_on_this_host: true };
        Self { peer, admin: true, blind: true }
    }

    /// The agent itself, for its log, which is root's.
    pub(crate) fn log() -> Self {
        Self { blind: false, ..Self::agent() }
    }

    /// Returns whether a process of `uid` may be shown in full. Root's processes are not those of a container's root.
    pub(crate) fn may_see(&self, uid: Option<u32>) -> bool {
        let is_own = uid == Some(self.peer.uid) && self.peer.uid != 0;
        !self.blind && (self.admin || is_own)
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
        let denied = ApiError::new(Code::Denied, format!("{who} may not {what}"));
        if !self.peer.is_on_this_host {
            return denied
                .cause(
                    "your process has ended, or is in another pid or user namespace than gpushd, as in a container: its \
                     user id and groups do not count there",
                )
                .hint("run the command on the host, outside of containers");
        }
        denied
            .cause("only root, the user that gpushd runs as, and members of its admin groups may")
            .hint(format!("run it with sudo, or have an administrator {admit}"))
    }

    /// The asker as the API records them.
    pub(crate) fn actor(&self, user: Option<String>) -> Actor {
        Actor { uid: self.peer.uid, user, pid: self.peer.pid }
    }
}

impl FromRequestParts<Shared> for Asker {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, agent: &Shared) -> Result<Self, Failure> {
        // The accept loop puts it there before anything else sees the request.
        let Some(peer) = parts.extensions.get::<Peer>().cloned() else { return Err(Failure::internal()) };
        Ok(Self::of(agent, peer).await)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(uid: u32) -> Peer {
        Peer { uid, pid: Some(1), groups: Vec::new(), is_on_this_host: true }
    }

    #[test]
    fn root_our_own_user_and_members_are_administrators() {
        let is_admin = |uid, is_member| Asker::new(peer(uid), 990, is_member).admin;
        assert!(is_admin(0, false) && is_admin(990, false) && is_admin(1000, true));
        assert!(!is_admin(1000, false));
    }

    #[test]
    fn caller_in_a_container_is_no_administrator() {
        let asker = |uid, is_member| Asker::new(Peer { is_on_this_host: false, ..peer(uid) }, 990, is_member);
        for (uid, is_member) in [(0, false), (990, false), (1000, true)] {
            assert!(!asker(uid, is_member).admin, "{uid}");
        }
        assert!(!asker(0, false).may_see(Some(0)) && asker(1000, false).may_see(Some(1000)));
        let error = asker(0, false).denied("change MIG layouts", Some("root"), &Access::default());
        assert!(error.causes[0].contains("container") && error.hint.unwrap().contains("on the host"));
    }

    #[test]
    fn refusal_says_what_to_do() {
        let access = Access { admin_groups: vec!["gpu-admins".to_owned()] };
        let asker = Asker::new(peer(1000), 990, false);
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
