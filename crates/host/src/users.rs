//! Users and groups from the name service (NSS), which may be slow: LDAP, SSSD.
//!
//! ```text
//! async task ─► cache ── fresh ─────────────────────────────► answer
//!                 └ missing, old ─► NSS thread ─► cache ─► answer, if it came within the deadline
//! ```
//!
//! No lookup runs on an async thread. While a new lookup runs, callers get the old entry, if there is one. A lookup
//! without an answer ([`Unanswered`]) differs from the answer that there is no such user or group: limits depend on
//! identities, so gpushd must not treat an unknown identity as an absent one.

use std::{ffi::CString, time::Duration};

use gpush_api::text;
use nix::unistd::{Group, Uid, User};

pub use crate::name_cache::{Answer, Lookup, Unanswered};
use crate::{
    name_cache::{Cache, IDENTITY_WAIT, MOST_WAITING},
    name_service_outage::Outage,
    transient_uids::TransientUids,
};

/// How long the name of a user is fresh.
const USER_FRESH: Duration = Duration::from_secs(300);

/// How long the answer that a uid has no user is fresh, if it gives another user rights.
const ABSENT_FRESH: Duration = Duration::from_secs(10);

/// How long the id of a group, or of a user in the config, is fresh. The time is short, so that an administrator who
/// has just created the group does not have to wait.
const GROUP_FRESH: Duration = Duration::from_secs(10);

/// How long a request waits for a user name that only appears in its answer. After that, the user is shown by uid.
const USER_WAIT: Duration = Duration::from_millis(50);

/// Number of queued lookups at which gpushd queues no more lookups of subordinate uids. A user can have 65,536 of these
/// uids, and must not fill the queue, because the first request of another user also needs a lookup.
const MOST_BEFORE_SUBORDINATE: usize = MOST_WAITING / 2;

/// The kind of a uid, which decides how much of the queue its lookup may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UidKind {
    /// A uid in a range of subordinate or transient uids.
    Subordinate,
    /// Any other uid.
    Other,
}

impl UidKind {
    fn most_queued(self) -> usize {
        match self {
            Self::Subordinate => MOST_BEFORE_SUBORDINATE,
            Self::Other => MOST_WAITING,
        }
    }
}

/// Looks up names of users and ids of groups. A handle; cloning it is cheap.
#[derive(Debug, Clone)]
pub struct NameService {
    users: Cache<u32, String>,
    uids: Cache<String, u32>,
    groups: Cache<String, u32>,
    memberships: Cache<u32, Vec<u32>>,
    primary_groups: Cache<u32, String>,
    transient: TransientUids,
    outage: Outage,
}

impl NameService {
    /// Starts the threads that call the name service. Each kind of lookup has a separate thread, because admin
    /// groups control access and must not wait for user names.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start() -> std::io::Result<Self> {
        Self::with(Lookups {
            user: Box::new(|uid| Some(User::from_uid(Uid::from_raw(*uid)).ok()?.map(|user| text::plain(&user.name)))),
            uid: Box::new(|name| Some(User::from_name(name).ok()?.map(|user| user.uid.as_raw()))),
            group: Box::new(|name| Some(Group::from_name(name).ok()?.map(|group| group.gid.as_raw()))),
            memberships: Box::new(|uid| memberships(*uid)),
            primary_group: Box::new(|uid| primary_group(*uid)),
        })
    }

    /// Starts the threads with other functions than those of the host.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn with(lookups: Lookups) -> std::io::Result<Self> {
        let Lookups { user, uid, group, memberships, primary_group } = lookups;
        let transient = TransientUids::default();
        let noted = transient.clone();
        let outage = Outage::default();
        // A transient uid has a name, but it is not a user, and must not evict users from the cache.
        let user = move |uid: &u32| Some(user(uid)?.filter(|name| !noted.note(*uid, name)));
        Ok(Self {
            users: Cache::start("users", USER_FRESH, Box::new(user), outage.clone())?,
            uids: Cache::start("uids", GROUP_FRESH, uid, outage.clone())?,
            groups: Cache::start("groups", GROUP_FRESH, group, outage.clone())?,
            memberships: Cache::start("memberships", GROUP_FRESH, memberships, outage.clone())?,
            primary_groups: Cache::start("primary groups", USER_FRESH, primary_group, outage.clone())?,
            transient,
            outage,
        })
    }

    /// Returns whether a uid is in a range of transient uids of a user namespace, as far as known.
    pub(crate) fn is_transient(&self, uid: u32) -> bool {
        self.transient.has(uid)
    }

    /// Returns the name of a user; `None` if the user has no name, or the name was not found within 50 ms.
    pub async fn user(&self, uid: u32, kind: UidKind) -> Option<String> {
        self.users.get_queued(uid, USER_WAIT, kind.most_queued()).await.ok().flatten()
    }

    /// Returns the name of a user that decides about limits.
    ///
    /// # Errors
    /// The name service did not answer within 5 s, or too many lookups are queued.
    pub async fn known_user(&self, uid: u32, kind: UidKind) -> Answer<String> {
        self.users.get_queued(uid, IDENTITY_WAIT, kind.most_queued()).await
    }

    /// Returns the name of a user that decides about another user's rights. The answer is at most [`ABSENT_FRESH`] old.
    ///
    /// # Errors
    /// The name service did not answer within 5 s, or too many lookups are queued.
    pub(crate) async fn user_now(&self, uid: u32, kind: UidKind) -> Answer<String> {
        self.users.get_fresh(uid, IDENTITY_WAIT, kind.most_queued(), ABSENT_FRESH).await
    }

    /// Returns the last answer about a user, without waiting. If the answer is missing or old, requests a new one.
    ///
    /// # Errors
    /// There is no answer yet.
    pub fn last_known_user(&self, uid: u32, kind: UidKind) -> Answer<String> {
        self.users.ask(uid, kind.most_queued()).0.ok_or(Unanswered)
    }

    /// Returns the uid of a user of the config.
    ///
    /// # Errors
    /// The name service did not answer within 5 s.
    pub async fn uid(&self, name: &str) -> Answer<u32> {
        self.uids.get(name.to_owned(), IDENTITY_WAIT).await
    }

    /// Returns the last answer about a user of the config or of `/etc/subuid`, without waiting. If the answer is missing
    /// or old, requests a new one.
    ///
    /// # Errors
    /// There is no answer yet.
    pub fn last_uid(&self, name: &str) -> Answer<u32> {
        self.uids.last(name.to_owned())
    }

    /// Returns the ids of all groups of a user; `None` if there is no such user.
    ///
    /// # Errors
    /// The name service did not answer within 5 s.
    pub async fn groups_of(&self, uid: u32) -> Answer<Vec<u32>> {
        self.memberships.get(uid, IDENTITY_WAIT).await
    }

    /// Returns the name of a user's primary group; `None` if there is none.
    ///
    /// # Errors
    /// The name service did not answer within 5 s.
    pub async fn primary_group(&self, uid: u32) -> Answer<String> {
        self.primary_groups.get(uid, IDENTITY_WAIT).await
    }

    /// Returns the id of a group; `None` if the group does not exist.
    ///
    /// # Errors
    /// The name service did not answer within 5 s.
    pub async fn group(&self, name: &str) -> Answer<u32> {
        self.groups.get(name.to_owned(), IDENTITY_WAIT).await
    }

    /// Returns the last answer about a group, without waiting. If the answer is missing or old, requests a new one.
    ///
    /// # Errors
    /// There is no answer yet.
    pub fn last_group(&self, name: &str) -> Answer<u32> {
        self.groups.last(name.to_owned())
    }

    /// Returns what the name service does not answer about now: `users`, `uids`, `groups`, `memberships` or `primary
    /// groups`. Empty if it answers, or if no lookup was needed.
    #[must_use]
    pub fn unanswered(&self) -> Vec<&'static str> {
        self.users.note_hanging_lookup();
        self.uids.note_hanging_lookup();
        self.groups.note_hanging_lookup();
        self.memberships.note_hanging_lookup();
        self.primary_groups.note_hanging_lookup();
        self.outage.kinds()
    }

    /// Repeats the last lookup of each kind that failed, so that the end of an outage is noticed without a request.
    pub fn retry_failed(&self) {
        self.users.retry_failed();
        self.uids.retry_failed();
        self.groups.retry_failed();
        self.memberships.retry_failed();
        self.primary_groups.retry_failed();
    }

    /// Looks up all users and groups that the config names. After the first call, requests find their ids in the cache
    /// even if the name service does not answer.
    pub async fn resolve(&self, users: &[String], groups: &[String]) {
        for name in users {
            let _unanswered_is_retried = self.uid(name).await;
        }
        for name in groups {
            let _unanswered_is_retried = self.group(name).await;
        }
    }
}

/// The functions that call the name service.
pub struct Lookups {
    /// Finds the name of a user.
    pub user: Lookup<u32, String>,
    /// Finds the uid of a user.
    pub uid: Lookup<String, u32>,
    /// Finds the gid of a group.
    pub group: Lookup<String, u32>,
    /// Finds the gids of all groups of a user.
    pub memberships: Lookup<u32, Vec<u32>>,
    /// Finds the name of the primary group of a user.
    pub primary_group: Lookup<u32, String>,
}

impl Lookups {
    /// Returns the functions of a name service that knows no user and no group. Tests replace some of the functions.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            user: Box::new(|_| Some(None)),
            uid: Box::new(|_| Some(None)),
            group: Box::new(|_| Some(None)),
            memberships: Box::new(|_| Some(None)),
            primary_group: Box::new(|_| Some(None)),
        }
    }
}

impl std::fmt::Debug for Lookups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lookups").finish_non_exhaustive()
    }
}

/// Looks up the groups of a user.
fn memberships(uid: u32) -> Option<Option<Vec<u32>>> {
    let Some(user) = User::from_uid(Uid::from_raw(uid)).ok()? else { return Some(None) };
    let name = CString::new(user.name).ok()?;
    let groups = nix::unistd::getgrouplist(&name, user.gid).ok()?;
    Some(Some(groups.into_iter().map(nix::unistd::Gid::as_raw).collect()))
}

/// Looks up the primary group of a user.
fn primary_group(uid: u32) -> Option<Option<String>> {
    let Some(user) = User::from_uid(Uid::from_raw(uid)).ok()? else { return Some(None) };
    Some(Group::from_gid(user.gid).ok()?.map(|group| text::plain(&group.name)))
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc, Barrier, Mutex,
            atomic::{AtomicUsize, Ordering},
        },
        time::Instant,
    };

    use crate::name_cache::{IDENTITY_WAIT, MOST_ABSENT, locked};

    use gpush_locked::Locked;

    use super::*;

    /// Returns a name service that knows only what `group` finds.
    fn with_groups(group: impl Fn(&String) -> Option<Option<u32>> + Send + 'static) -> NameService {
        NameService::with(Lookups { group: Box::new(group), ..Lookups::empty() }).unwrap()
    }

    #[tokio::test]
    async fn own_user_and_group_are_found() {
        let names = NameService::start().unwrap();
        // Every host has the user `root` and a group with gid 0.
        assert_eq!(names.known_user(0, UidKind::Other).await, Ok(Some("root".to_owned())));
        assert_eq!(names.uid("root").await, Ok(Some(0)));
        let root = Group::from_gid(0.into()).unwrap().unwrap().name;
        assert_eq!(names.group(&root).await, Ok(Some(0)));
        assert_eq!(names.group("no-such-group").await, Ok(None));
        assert!(names.groups_of(0).await.unwrap().unwrap().contains(&0));
    }

    #[tokio::test]
    async fn slow_name_service_blocks_no_async_thread() {
        let gate = Arc::new(Barrier::new(2));
        let (slow, lookups) = (Arc::clone(&gate), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&lookups);
        let names = with_groups(move |_: &String| {
            count.fetch_add(1, Ordering::SeqCst);
            slow.wait();
            Some(Some(7))
        });
        assert_eq!(names.last_group("admins"), Err(Unanswered), "unknown is not absent");
        // The test has only one thread: another task runs on it while the lookup is pending.
        let (found, ()) = tokio::join!(names.group("admins"), async {
            tokio::task::spawn_blocking(move || gate.wait()).await.unwrap();
        });
        assert_eq!(found, Ok(Some(7)));
        for _ in 0..100 {
            assert_eq!(names.group("admins").await, Ok(Some(7)));
        }
        assert_eq!(names.last_group("admins"), Ok(Some(7)));
        assert_eq!(lookups.load(Ordering::SeqCst), 1, "one lookup, then the cache");
    }

    #[tokio::test]
    async fn old_entry_is_used_while_a_newer_one_is_looked_up() {
        let (reported, answers) = std::sync::mpsc::channel::<Option<u32>>();
        let answers = Locked::new(answers);
        let names = with_groups(move |_| Some(answers.lock().recv().unwrap()));
        reported.send(Some(7)).unwrap();
        assert_eq!(names.group("admins").await, Ok(Some(7)));
        let Some(past) = Instant::now().checked_sub(GROUP_FRESH) else {
            return println!("SKIPPED: the host has just started");
        };
        locked(&names.groups.entries).known.insert("admins".to_owned(), (past, 7));
        // The name service answers only in the next line, so `group` returns the old value here.
        assert_eq!(names.group("admins").await, Ok(Some(7)));
        reported.send(Some(8)).unwrap();
        while names.group("admins").await != Ok(Some(8)) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn name_service_that_is_down_is_asked_again() {
        let calls = AtomicUsize::new(0);
        let names = with_groups(move |_: &String| (calls.fetch_add(1, Ordering::SeqCst) > 0).then_some(Some(7)));
        assert_eq!(names.group("admins").await, Err(Unanswered));
        assert_eq!(names.group("admins").await, Ok(Some(7)));
    }

    /// Fault: no log line and no health report said that the name service did not answer.
    #[tokio::test]
    async fn outage_is_known_until_the_failed_lookup_succeeds() {
        let is_down = Arc::new(std::sync::atomic::AtomicBool::new(true));
        let down = Arc::clone(&is_down);
        let names = with_groups(move |_| (!down.load(Ordering::SeqCst)).then_some(None));
        assert!(names.unanswered().is_empty());
        assert_eq!(names.group("admins").await, Err(Unanswered));
        assert_eq!(names.unanswered(), ["groups"]);
        assert_eq!(names.known_user(1000, UidKind::Other).await, Ok(None));
        assert_eq!(names.unanswered(), ["groups"], "the answer about a user says nothing about groups");
        is_down.store(false, Ordering::SeqCst);
        names.retry_failed();
        while !names.unanswered().is_empty() {
            tokio::task::yield_now().await;
        }
        names.retry_failed();
        assert!(names.unanswered().is_empty());
    }

    /// Fault: the end of an outage was reported when any lookup of the kind succeeded.
    #[tokio::test]
    async fn outage_lasts_until_all_failed_lookups_succeed() {
        let down = Arc::new(Mutex::new(vec!["a".to_owned(), "b".to_owned()]));
        let known = Arc::clone(&down);
        let names = with_groups(move |name| (!known.lock().unwrap().contains(name)).then_some(Some(7)));
        for name in ["a", "b"] {
            assert_eq!(names.group(name).await, Err(Unanswered));
        }
        assert_eq!(names.group("c").await, Ok(Some(7)));
        down.lock().unwrap().remove(0);
        assert_eq!(names.group("a").await, Ok(Some(7)));
        assert_eq!(names.unanswered(), ["groups"], "the lookup of b still fails");
        down.lock().unwrap().clear();
        names.retry_failed();
        while !names.unanswered().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(names.last_group("b"), Ok(Some(7)));
    }

    /// Fault: for five minutes after a user was created, the owner of a range with the new uid could act for this user.
    #[tokio::test]
    async fn old_answer_that_a_uid_has_no_user_gives_no_rights() {
        let names = NameService::with(Lookups { user: Box::new(|_| Some(Some("new".to_owned()))), ..Lookups::empty() });
        let names = names.unwrap();
        let Some(past) = Instant::now().checked_sub(ABSENT_FRESH) else {
            return println!("SKIPPED: the host has just started");
        };
        locked(&names.users.entries).absent.insert(100_000, past);
        assert_eq!(names.known_user(100_000, UidKind::Subordinate).await, Ok(None));
        assert_eq!(names.user_now(100_000, UidKind::Subordinate).await, Ok(Some("new".to_owned())));
    }

    #[tokio::test]
    async fn lookup_that_hangs_is_an_outage() {
        let (reported, answers) = std::sync::mpsc::channel::<()>();
        let answers = Mutex::new(answers);
        let names = with_groups(move |_| Some(answers.lock().unwrap().recv().ok().map(|()| 7)));
        let _no_answer_yet = names.last_group("admins");
        while locked(&names.groups.running).began.is_none() {
            tokio::task::yield_now().await;
        }
        assert!(names.unanswered().is_empty(), "a slow lookup is not an outage");
        let Some(past) = Instant::now().checked_sub(IDENTITY_WAIT) else {
            return println!("SKIPPED: the host has just started");
        };
        locked(&names.groups.running).began = Some(past);
        assert_eq!(names.unanswered(), ["groups"]);
        reported.send(()).unwrap();
        while !names.unanswered().is_empty() {
            tokio::task::yield_now().await;
        }
        assert_eq!(names.last_group("admins"), Ok(Some(7)));
    }

    /// Fault: 1,025 uids cleared the whole cache, and the next request of a user with a quota had no name.
    #[tokio::test]
    async fn unknown_uids_evict_no_known_user_from_the_cache() {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&calls);
        let user = move |uid: &u32| {
            counted.fetch_add(usize::from(*uid == 1000), Ordering::SeqCst);
            Some((*uid == 1000).then(|| "alice".to_owned()))
        };
        let names = NameService::with(Lookups { user: Box::new(user), ..Lookups::empty() }).unwrap();
        assert_eq!(names.known_user(1000, UidKind::Other).await, Ok(Some("alice".to_owned())));
        for uid in 0..u32::try_from(MOST_ABSENT).unwrap() + 100 {
            assert_eq!(names.known_user(100_000 + uid, UidKind::Subordinate).await, Ok(None));
        }
        assert_eq!(names.known_user(1000, UidKind::Other).await, Ok(Some("alice".to_owned())));
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        assert_eq!(locked(&names.users.entries).absent.len(), MOST_ABSENT);
    }
}
