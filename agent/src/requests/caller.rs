//! Callers: their identity, their rights, and what they may see.
//!
//! | caller | sees | may change |
//! |---|---|---|
//! | root, the user that gpushd runs as, members of the admin groups | everything | everything |
//! | any other user with access to the socket | GPUs, instances, plans; full details of their own processes | their own leases |
//!
//! The kernel identifies the caller, and the config names the admin groups. A caller in another pid or user namespace
//! is never an administrator, because root in a container can use any user id and group id. What a response shows
//! depends only on the [`Viewer`].

use gpush_api::{Actor, ApiError, Code};
use gpush_core::config::Access;
use gpush_host::{accounts::Account, identity::Users, peer::Peer, users::Unanswered};

/// The user that a response is for. It determines what the response shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Viewer {
    /// gpushd itself, for data that every user may read later. Sees no user's processes.
    Agent,
    /// gpushd itself, for its own decisions and its log, which only root reads. Sees everything.
    Log,
    /// An administrator. Sees everything.
    Admin,
    /// A hook of Slurm, run by root: an administrator that may lease GPUs with `owner = "slurm"`.
    Hook,
    /// A user by uid: sees their own processes in full.
    User(u32),
}

impl Viewer {
    /// Returns whether the viewer may see the full details of a process of `uid`. `None` means that
    /// the owner is not known. `User(0)` is root in a container, and may not see the processes of
    /// the host's root.
    pub(crate) fn may_see(self, uid: Option<u32>) -> bool {
        match self {
            Self::Agent => false,
            Self::Log | Self::Admin | Self::Hook => true,
            Self::User(own) => own != 0 && uid == Some(own),
        }
    }

    /// Returns whether the viewer may change GPUs and their settings.
    pub(crate) fn is_admin(self) -> bool {
        match self {
            Self::Agent | Self::Log | Self::Admin | Self::Hook => true,
            Self::User(_) => false,
        }
    }
}

/// A process that sent a request, identified by its socket peer credentials.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// Credentials of the process.
    pub(crate) peer: Peer,
    /// Determines what the caller may see and do.
    pub(crate) viewer: Viewer,
    /// The account for which limits count the caller. Not known if the name service does not answer.
    pub(crate) account: Result<Account, Unanswered>,
    /// Whether the name service did not answer about an admin group. The caller may be an administrator.
    is_rank_unknown: bool,
}

impl Caller {
    /// Determines the rights and the account of a peer, according to the access rules of the config. Waits for the name
    /// service only if the rights depend on a group.
    pub(crate) async fn of(peer: Peer, access: &Access, users: &Users, own_uid: u32) -> Self {
        // Only a user on this host who is neither root nor the user of gpushd can need an admin group. Groups in a
        // container do not count.
        let may_need_group = peer.is_on_this_host && peer.uid != 0 && peer.uid != own_uid;
        let is_member = match may_need_group {
            true => users.is_in_one_of(&peer.groups, &access.admin_groups).await,
            false => Ok(false),
        };
        let account = match peer.uid {
            // Root of a container has the uid of the host's root, but not its rights.
            0 if !peer.is_on_this_host => Ok(Account::RootContainers),
            uid => users.accounts().last(uid),
        };
        Self::new(peer, own_uid, is_member, account)
    }

    fn new(
        peer: Peer,
        own_uid: u32,
        is_member: Result<bool, Unanswered>,
        account: Result<Account, Unanswered>,
    ) -> Self {
        let admin = peer.is_on_this_host && (peer.uid == 0 || peer.uid == own_uid || is_member == Ok(true));
        let viewer = if admin { Viewer::Admin } else { Viewer::User(peer.uid) };
        Self { peer, viewer, account, is_rank_unknown: is_member.is_err() && !admin }
    }

    /// Creates a caller with the rights of `viewer`, without a lookup. For requests whose client is not connected: those of
    /// gpushd itself, and those that waited in the queue when gpushd was restarted.
    pub(crate) fn with_viewer(peer: Peer, viewer: Viewer, account: Result<Account, Unanswered>) -> Self {
        Self { peer, viewer, account, is_rank_unknown: false }
    }

    /// Returns the uid of the caller, for records, names and idempotency keys. Do not use it to decide what the caller may
    /// do, because root of a container also has uid 0. Use [`Caller::holds`] or the viewer.
    pub(crate) fn uid(&self) -> u32 {
        self.peer.uid
    }

    /// Returns whether the caller is the user `uid` of the host. Root of a container is not the host's root. For any other
    /// uid, a caller in a container is the same user as on the host: a container can use a uid only if this user or root
    /// gave it the uid.
    pub(crate) fn holds(&self, uid: u32) -> bool {
        self.peer.uid == uid && (uid != 0 || self.peer.is_on_this_host)
    }

    /// Returns whether the calling process has this uid, so that its programs can use a lease of the uid. Do not use it to
    /// decide what the caller may do: root of a container also has uid 0.
    pub(crate) fn runs_as(&self, uid: u32) -> bool {
        self.peer.uid == uid
    }

    /// Returns the account for which limits count the caller. While the name service does not answer, the caller counts
    /// like all unknown uids.
    pub(crate) fn counted_account(&self) -> Account {
        self.account.unwrap_or(Account::Unknown)
    }

    /// Returns the caller as a hook of Slurm. The caller must be an administrator that uses the admin socket.
    pub(crate) fn into_hook(self) -> Self {
        Self { viewer: Viewer::Hook, ..self }
    }

    /// Returns gpushd itself as a caller.
    pub(crate) fn agent() -> Self {
        let uid = nix::unistd::geteuid().as_raw();
        let (pid, groups) = (Some(std::process::id()), Vec::new());
        let peer = Peer { uid, pid, start: None, groups, is_on_this_host: true };
        Self::with_viewer(peer, Viewer::Agent, Ok(Account::User(uid)))
    }

    /// Returns the error for a caller that may be an administrator, if gpushd cannot determine that. `what` completes the
    /// sentence "USER may not …". Return this error instead of each refusal that does not apply to administrators.
    pub(crate) fn rank_unknown(&self, what: &str) -> Option<ApiError> {
        let uid = self.peer.uid;
        let message =
            format!("cannot determine whether uid {uid} may {what}: the name service of the host does not answer");
        let error = ApiError::new(Code::Unavailable, message)
            .cause("the config names admin groups (admin_groups under [access])")
            .hint("try again, or ask root to run the command")
            .retryable();
        self.is_rank_unknown.then_some(error)
    }

    /// Returns the error for a caller that is not an administrator: `unavailable` if gpushd cannot determine that, else
    /// `denied`. `what` completes the sentence "USER may not …". `user` is the name of the user, if known.
    pub(crate) fn denied(&self, what: &str, user: Option<&str>, access: &Access) -> ApiError {
        let uid = self.peer.uid;
        if let Some(unavailable) = self.rank_unknown(what) {
            return unavailable;
        }
        let who = user.map_or_else(|| format!("uid {uid}"), |user| format!("user {user} (uid {uid})"));
        let name = user.unwrap_or("USER");
        let admit = match access.admin_groups.as_slice() {
            [] => "add one of your groups to the config (admin_groups = [\"GROUP\"] under [access]) and run \
                `gpushctl config reload`"
                .to_owned(),
            [group, ..] => format!("add you with `usermod -aG {group} {name}`, then log in again"),
        };
        let denied = ApiError::new(Code::Denied, format!("{who} may not {what}"));
        if !self.peer.is_on_this_host {
            return denied
                .cause(
                    "your process has ended, or runs in another pid or user namespace, such as that of a container: \
                     gpushd does not accept the user id and groups of such a process",
                )
                .hint("run the command on the host, outside of containers");
        }
        denied
            .cause("only root, the user that gpushd runs as, and members of gpushd's admin groups may do this")
            .hint(format!("ask an administrator to run it, or to {admit}"))
    }

    /// Returns the caller as it is stored in records. `user` is the name of its uid. Root of a container has no name in
    /// records, because `root` is the host's root.
    pub(crate) fn actor(&self, user: Option<String>) -> Actor {
        let user = user.filter(|_| self.holds(self.peer.uid));
        Actor { uid: self.peer.uid, user, pid: self.peer.pid }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn peer(uid: u32) -> Peer {
        Peer { uid, pid: Some(1), start: None, groups: Vec::new(), is_on_this_host: true }
    }

    /// Returns an administrator for uid 0, and a user for any other uid.
    pub(crate) fn caller_of(uid: u32) -> Caller {
        let peer = Peer { uid, pid: None, start: None, groups: Vec::new(), is_on_this_host: true };
        let viewer = if uid == 0 { Viewer::Admin } else { Viewer::User(uid) };
        Caller::with_viewer(peer, viewer, Ok(Account::User(uid)))
    }

    fn caller(peer: Peer, is_member: bool) -> Caller {
        let account = Ok(Account::User(peer.uid));
        Caller::new(peer, 990, Ok(is_member), account)
    }

    /// Fault: root of a container could read, renew and release leases of the host's root.
    #[test]
    fn root_of_a_container_holds_nothing_of_the_hosts_root() {
        let inside = |uid| caller(Peer { is_on_this_host: false, ..peer(uid) }, false);
        assert!(!inside(0).holds(0) && inside(1000).holds(1000));
        assert!(caller(peer(0), false).holds(0) && !caller(peer(0), false).holds(1000));
        assert!(!caller(peer(1000), false).holds(0));
    }

    /// Fault: lists showed root of a container as `root`.
    #[test]
    fn root_of_a_container_has_no_name_in_records() {
        let name = |uid, is_on_this_host| {
            caller(Peer { is_on_this_host, ..peer(uid) }, false).actor(Some("name".to_owned())).user
        };
        assert_eq!((name(0, false), name(0, true).is_some(), name(1000, false).is_some()), (None, true, true));
    }

    #[test]
    fn unknown_admin_group_is_unavailable_and_not_denied() {
        let caller = Caller::new(peer(1000), 990, Err(Unanswered), Err(Unanswered));
        assert!(!caller.viewer.is_admin());
        let error = caller.denied("change MIG layouts", Some("bob"), &Access::default());
        assert_eq!((error.code, error.retryable), (Code::Unavailable, true));
        assert_eq!(caller.counted_account(), Account::Unknown);
    }

    /// A member keeps its rights during an outage if gpushd has found the group before. Otherwise gpushd refuses the requests
    /// of all users that only administrators may send, and the refusal is retryable.
    #[tokio::test]
    async fn member_of_an_admin_group_has_rights_only_if_the_group_is_known() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let is_down = std::sync::Arc::new(AtomicBool::new(true));
        let down = std::sync::Arc::clone(&is_down);
        let group = move |_: &String| (!down.load(Ordering::SeqCst)).then_some(Some(77));
        let lookups = gpush_host::users::Lookups { group: Box::new(group), ..gpush_host::users::Lookups::empty() };
        let names = gpush_host::users::NameService::with(lookups).unwrap();
        let users = Users::new(names, 990, std::path::Path::new("/nowhere"));
        let access = Access { admin_groups: vec!["ops".to_owned()] };
        let of = async |uid, groups| Caller::of(Peer { groups, ..peer(uid) }, &access, &users, 990).await;
        for (uid, groups) in [(1000, vec![77]), (1001, vec![])] {
            let caller = of(uid, groups).await;
            assert_eq!(caller.viewer, Viewer::User(uid));
            assert_eq!(caller.denied("revoke leases", None, &access).code, Code::Unavailable);
            assert!(caller.rank_unknown("revoke leases").unwrap().retryable);
        }
        assert_eq!(of(0, vec![]).await.viewer, Viewer::Admin, "root needs no group");
        is_down.store(false, Ordering::SeqCst);
        assert_eq!(of(1000, vec![77]).await.viewer, Viewer::Admin);
        is_down.store(true, Ordering::SeqCst);
        assert_eq!(of(1000, vec![77]).await.viewer, Viewer::Admin, "gpushd uses the last answer");
        let other = of(1001, vec![]).await;
        assert!(other.rank_unknown("revoke leases").is_none());
        assert_eq!(other.denied("revoke leases", None, &access).code, Code::Denied);
    }

    #[test]
    fn root_agent_user_and_group_members_are_administrators() {
        let is_admin = |uid, is_member| caller(peer(uid), is_member).viewer.is_admin();
        assert!(is_admin(0, false) && is_admin(990, false) && is_admin(1000, true));
        assert!(!is_admin(1000, false));
    }

    #[test]
    fn caller_in_a_container_is_not_an_administrator() {
        let caller = |uid, is_member| caller(Peer { is_on_this_host: false, ..peer(uid) }, is_member);
        for (uid, is_member) in [(0, false), (990, false), (1000, true)] {
            assert!(!caller(uid, is_member).viewer.is_admin(), "{uid}");
        }
        assert!(!caller(0, false).viewer.may_see(Some(0)) && caller(1000, false).viewer.may_see(Some(1000)));
        let error = caller(0, false).denied("change MIG layouts", Some("root"), &Access::default());
        assert!(error.causes[0].contains("container") && error.hint.unwrap().contains("on the host"));
    }

    #[test]
    fn refusal_has_a_hint() {
        let access = Access { admin_groups: vec!["gpu-admins".to_owned()] };
        let caller = caller(peer(1000), false);
        assert!(!caller.viewer.is_admin());
        let error = caller.denied("change MIG layouts", Some("bob"), &access);
        assert_eq!(error.code, Code::Denied);
        assert_eq!(error.message, "user bob (uid 1000) may not change MIG layouts");
        assert!(error.hint.unwrap().contains("`usermod -aG gpu-admins bob`"));
        let error = caller.denied("change MIG layouts", None, &Access::default());
        assert_eq!(error.message, "uid 1000 may not change MIG layouts");
        let hint = error.hint.unwrap();
        assert!(hint.contains("admin_groups") && hint.contains("gpushctl config reload"), "{hint}");
    }
}
