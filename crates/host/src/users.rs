//! Users and groups from the name service (NSS), which may be slow: LDAP, SSSD.
//!
//! ```text
//! async task ─► cache ── fresh ─────────────────────────────► answer
//!                 └ missing, old ─► NSS thread ─► cache ─► answer, if it came within the deadline
//! ```
//!
//! No lookup runs on an async thread. While a new lookup runs, callers get the old entry, if there is one.

use std::{
    collections::HashMap,
    ffi::CString,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use gpush_api::text;
use nix::unistd::{Group, Uid, User};
use tokio::sync::oneshot;

/// How long the name of a user is fresh.
const USER_FRESH: Duration = Duration::from_secs(300);

/// How long the id of a group is fresh. The time is short, so that an administrator who has just
/// created the group does not have to wait.
const GROUP_FRESH: Duration = Duration::from_secs(10);

/// How long a request waits for the name of a user. After that, the user is shown by uid.
const USER_WAIT: Duration = Duration::from_millis(50);

/// How long a request waits for an admin group that is not in the cache. After that, the caller is
/// refused.
const GROUP_WAIT: Duration = Duration::from_secs(5);

/// Maximum number of entries in a cache. The limit is necessary because callers can have very many
/// different user ids.
const MOST: usize = 1024;

/// Maximum number of queued lookups.
const MOST_WAITING: usize = 64;

/// Looks up names of users and ids of groups. A handle; cloning it is cheap.
#[derive(Debug, Clone)]
pub struct NameService {
    users: Cache<u32, String>,
    groups: Cache<String, u32>,
    memberships: Cache<u32, Vec<u32>>,
}

impl NameService {
    /// Starts the threads that call the name service. Groups have a separate thread, because admin
    /// groups control access and must not wait for user names.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start() -> std::io::Result<Self> {
        Self::with(
            |uid| Some(User::from_uid(Uid::from_raw(*uid)).ok()?.map(|user| text::plain(&user.name))),
            |name| Some(Group::from_name(name).ok()?.map(|group| group.gid.as_raw())),
            |uid| memberships(*uid),
        )
    }

    fn with(
        user: impl Fn(&u32) -> Option<Option<String>> + Send + 'static,
        group: impl Fn(&String) -> Option<Option<u32>> + Send + 'static,
        memberships: impl Fn(&u32) -> Option<Option<Vec<u32>>> + Send + 'static,
    ) -> std::io::Result<Self> {
        Ok(Self {
            users: Cache::start("users", USER_FRESH, user)?,
            groups: Cache::start("groups", GROUP_FRESH, group)?,
            memberships: Cache::start("memberships", GROUP_FRESH, memberships)?,
        })
    }

    /// Returns the name of a user; `None` if the user has no name, or the name was not found within 50 ms.
    pub async fn user(&self, uid: u32) -> Option<String> {
        self.users.get(uid, USER_WAIT).await
    }

    /// Returns the ids of all groups of a user; `None` if there is no such user, or the groups were
    /// not found within 5 s.
    pub async fn groups_of(&self, uid: u32) -> Option<Vec<u32>> {
        self.memberships.get(uid, GROUP_WAIT).await
    }

    /// Returns the id of a group; `None` if the group does not exist, or was not found within 5 s.
    pub async fn group(&self, name: &str) -> Option<u32> {
        self.groups.get(name.to_owned(), GROUP_WAIT).await
    }
}

/// Looks up the groups of a user. The outer `None` means that the name service did not answer; the
/// inner `None` means that there is no such user.
fn memberships(uid: u32) -> Option<Option<Vec<u32>>> {
    let Some(user) = User::from_uid(Uid::from_raw(uid)).ok()? else { return Some(None) };
    let name = CString::new(user.name).ok()?;
    let groups = nix::unistd::getgrouplist(&name, user.gid).ok()?;
    Some(Some(groups.into_iter().map(nix::unistd::Gid::as_raw).collect()))
}

/// A cached answer and the time of its lookup. `None` means that the name service knows no such entry.
type Entry<V> = (Instant, Option<V>);

type Lookup<K, V> = (K, oneshot::Sender<Option<V>>);

#[derive(Debug)]
struct Cache<K, V> {
    entries: Arc<Mutex<HashMap<K, Entry<V>>>>,
    lookups: SyncSender<Lookup<K, V>>,
    /// How long an entry is fresh.
    fresh: Duration,
}

impl<K, V> Clone for Cache<K, V> {
    fn clone(&self) -> Self {
        Self { entries: Arc::clone(&self.entries), lookups: self.lookups.clone(), fresh: self.fresh }
    }
}

impl<K, V> Cache<K, V>
where
    K: Clone + Eq + std::hash::Hash + Send + 'static,
    V: Clone + Send + 'static,
{
    /// Starts the thread. `look_up` returns `None` if the name service does not answer. Such a
    /// result is not cached.
    fn start(
        name: &str,
        fresh: Duration,
        look_up: impl Fn(&K) -> Option<Option<V>> + Send + 'static,
    ) -> std::io::Result<Self> {
        let (lookups, waiting) = sync_channel::<Lookup<K, V>>(MOST_WAITING);
        let entries = Arc::<Mutex<HashMap<K, Entry<V>>>>::default();
        let found = Arc::clone(&entries);
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            for (key, answer) in waiting {
                // The thread may already have looked up this key for an earlier request.
                let known = locked(&found).get(&key).filter(|(at, _)| at.elapsed() < fresh).cloned();
                let value = match known {
                    Some((_, value)) => value,
                    None => {
                        let Some(value) = look_up(&key) else { continue };
                        let mut entries = locked(&found);
                        if entries.len() >= MOST {
                            entries.clear();
                        }
                        entries.insert(key, (Instant::now(), value.clone()));
                        value
                    }
                };
                let _ = answer.send(value);
            }
        })?;
        Ok(Self { entries, lookups, fresh })
    }

    async fn get(&self, key: K, wait: Duration) -> Option<V> {
        let known = locked(&self.entries).get(&key).cloned();
        if let Some((at, value)) = &known
            && at.elapsed() < self.fresh
        {
            return value.clone();
        }
        let (answer, found) = oneshot::channel();
        let is_asked = self.lookups.try_send((key, answer)).is_ok();
        match known {
            Some((_, old)) => old,
            None if is_asked => tokio::time::timeout(wait, found).await.ok()?.ok()?,
            None => None,
        }
    }
}

fn locked<K, V>(entries: &Mutex<HashMap<K, Entry<V>>>) -> MutexGuard<'_, HashMap<K, Entry<V>>> {
    entries.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, atomic::AtomicUsize, atomic::Ordering};

    use super::*;

    #[tokio::test]
    async fn own_user_and_group_are_found() {
        let names = NameService::start().unwrap();
        // Every host has the user `root` and a group with gid 0.
        assert_eq!(names.users.get(0, GROUP_WAIT).await.as_deref(), Some("root"));
        let root = Group::from_gid(0.into()).unwrap().unwrap().name;
        assert_eq!(names.group(&root).await, Some(0));
        assert_eq!(names.group("no-such-group").await, None);
    }

    #[tokio::test]
    async fn slow_name_service_blocks_no_async_thread() {
        let gate = Arc::new(Barrier::new(2));
        let (slow, lookups) = (Arc::clone(&gate), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&lookups);
        let group = move |_: &String| {
            count.fetch_add(1, Ordering::SeqCst);
            slow.wait();
            Some(Some(7))
        };
        let names = NameService::with(|_| Some(None), group, |_| Some(None)).unwrap();
        // The test has only one thread: another task runs on it while the lookup is pending.
        let (found, ()) = tokio::join!(names.group("admins"), async {
            tokio::task::spawn_blocking(move || gate.wait()).await.unwrap();
        });
        assert_eq!(found, Some(7));
        for _ in 0..100 {
            assert_eq!(names.group("admins").await, Some(7));
        }
        assert_eq!(lookups.load(Ordering::SeqCst), 1, "one lookup, then the cache");
    }

    #[tokio::test]
    async fn old_entry_is_used_while_a_newer_one_is_looked_up() {
        let (reported, answers) = std::sync::mpsc::channel::<Option<u32>>();
        let answers = Mutex::new(answers);
        let names =
            NameService::with(|_| Some(None), move |_| Some(answers.lock().unwrap().recv().unwrap()), |_| Some(None))
                .unwrap();
        reported.send(Some(7)).unwrap();
        assert_eq!(names.group("admins").await, Some(7));
        let Some(past) = Instant::now().checked_sub(GROUP_FRESH) else {
            return println!("SKIPPED: the host has just started");
        };
        locked(&names.groups.entries).insert("admins".to_owned(), (past, Some(7)));
        // The name service answers only in the next line, so `group` returns the old value here.
        assert_eq!(names.group("admins").await, Some(7));
        reported.send(Some(8)).unwrap();
        while names.group("admins").await != Some(8) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn name_service_that_is_down_is_asked_again() {
        let calls = AtomicUsize::new(0);
        let group = move |_: &String| (calls.fetch_add(1, Ordering::SeqCst) > 0).then_some(Some(7));
        let names = NameService::with(|_| Some(None), group, |_| Some(None)).unwrap();
        assert_eq!(names.group("admins").await, None);
        assert_eq!(names.group("admins").await, Some(7));
    }
}
