//! A cache of answers of the name service, with the thread that asks it.

use std::{
    collections::VecDeque,
    hash::Hash,
    sync::{
        Arc, MutexGuard,
        atomic::{AtomicUsize, Ordering},
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use gpush_locked::Locked;
use hashlink::LruCache;
use tokio::sync::oneshot;

use crate::name_service_outage::Outage;

/// How long a request waits for an identity that decides about access or limits. After that, the caller is refused.
pub(crate) const IDENTITY_WAIT: Duration = Duration::from_secs(5);

/// Maximum number of users and groups in a cache. Only the user database can fill this part.
const MOST_KNOWN: usize = 16_384;

/// Maximum number of ids in a cache that the user database does not know. Callers can have very many of these ids, so
/// they have a separate part, and never evict a known user.
pub(crate) const MOST_ABSENT: usize = 4096;

/// Maximum number of queued lookups.
pub(crate) const MOST_WAITING: usize = 64;

/// Maximum number of failed lookups that a cache remembers and repeats.
const MOST_FAILED: usize = 8;

/// The name service did not answer in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the name service of the host did not answer in time")]
pub struct Unanswered;

/// The answer of the name service; `None` if it knows no such user or group.
pub type Answer<T> = Result<Option<T>, Unanswered>;

/// A function that calls the name service. The outer `None` means that the name service did not answer; the inner
/// `None` means that there is no such user or group.
pub type Lookup<K, V> = Box<dyn Fn(&K) -> Option<Option<V>> + Send>;

/// Cached answers, each with the time of its lookup.
#[derive(Debug)]
pub(crate) struct Entries<K, V> {
    pub(crate) known: LruCache<K, (Instant, V)>,
    pub(crate) absent: LruCache<K, Instant>,
}

impl<K: Eq + Hash + Clone, V: Clone> Entries<K, V> {
    fn new() -> Self {
        Self { known: LruCache::new(MOST_KNOWN), absent: LruCache::new(MOST_ABSENT) }
    }

    fn get(&mut self, key: &K) -> Option<(Instant, Option<V>)> {
        if let Some((at, value)) = self.known.get(key) {
            return Some((*at, Some(value.clone())));
        }
        self.absent.get(key).map(|at| (*at, None))
    }

    fn insert(&mut self, key: K, value: Option<V>) {
        match value {
            Some(value) => {
                self.absent.remove(&key);
                self.known.insert(key, (Instant::now(), value));
            }
            None => {
                self.known.remove(&key);
                self.absent.insert(key, Instant::now());
            }
        }
    }
}

/// A queued lookup.
#[derive(Debug)]
struct Queued<K, V> {
    key: K,
    /// Maximum age of an earlier answer that may be used instead.
    fresh: Duration,
    /// The channel for the answer. If the name service does not answer, the channel is closed.
    answer: oneshot::Sender<Option<V>>,
}

#[derive(Debug)]
pub(crate) struct Cache<K, V> {
    pub(crate) entries: Arc<Locked<Entries<K, V>>>,
    lookups: SyncSender<Queued<K, V>>,
    /// Number of queued lookups.
    queued: Arc<AtomicUsize>,
    /// How long an entry is fresh.
    fresh: Duration,
    /// What the lookups are for.
    kind: &'static str,
    pub(crate) running: Arc<Locked<Running<K>>>,
    outage: Outage,
}

/// The lookup that runs, and those that failed.
#[derive(Debug)]
pub(crate) struct Running<K> {
    /// When the running lookup began.
    pub(crate) began: Option<Instant>,
    /// The last lookups that failed, and have not succeeded since; at most [`MOST_FAILED`].
    failed: VecDeque<K>,
}

impl<K: PartialEq + Clone> Running<K> {
    /// Notes the end of the running lookup. Returns whether no failed lookup is left.
    fn end(&mut self, key: &K, is_answered: bool) -> bool {
        self.began = None;
        self.failed.retain(|failed| failed != key);
        if !is_answered {
            self.failed.push_back(key.clone());
        }
        if self.failed.len() > MOST_FAILED {
            self.failed.pop_front();
        }
        self.failed.is_empty()
    }
}

impl<K, V> Clone for Cache<K, V> {
    fn clone(&self) -> Self {
        let (entries, queued) = (Arc::clone(&self.entries), Arc::clone(&self.queued));
        let (running, outage) = (Arc::clone(&self.running), self.outage.clone());
        Self { entries, lookups: self.lookups.clone(), queued, fresh: self.fresh, kind: self.kind, running, outage }
    }
}

impl<K, V> Cache<K, V>
where
    K: Clone + Eq + Hash + Send + 'static,
    V: Clone + Send + 'static,
{
    /// Starts the thread. `look_up` returns `None` if the name service does not answer. Such a
    /// result is not cached.
    pub(crate) fn start(
        kind: &'static str,
        fresh: Duration,
        look_up: Lookup<K, V>,
        outage: Outage,
    ) -> std::io::Result<Self> {
        let (lookups, waiting) = sync_channel::<Queued<K, V>>(MOST_WAITING);
        let (entries, queued) = (Arc::new(Locked::new(Entries::new())), Arc::new(AtomicUsize::new(0)));
        let (found, queue) = (Arc::clone(&entries), Arc::clone(&queued));
        let running = Arc::new(Locked::new(Running { began: None, failed: VecDeque::new() }));
        let (progress, noted) = (Arc::clone(&running), outage.clone());
        thread::Builder::new().name(kind.to_owned()).spawn(move || {
            for Queued { key, fresh, answer } in waiting {
                queue.fetch_sub(1, Ordering::Relaxed);
                // The thread may already have looked up this key for an earlier request.
                let known = locked(&found).get(&key).filter(|(at, _)| at.elapsed() < fresh);
                let value = match known {
                    Some((_, value)) => value,
                    None => {
                        locked(&progress).began = Some(Instant::now());
                        let value = look_up(&key);
                        let are_all_answered = locked(&progress).end(&key, value.is_some());
                        let Some(value) = value else {
                            noted.unanswered(kind);
                            continue;
                        };
                        if are_all_answered {
                            noted.answered(kind);
                        }
                        locked(&found).insert(key, value.clone());
                        value
                    }
                };
                let _ = answer.send(value);
            }
        })?;
        Ok(Self { entries, lookups, queued, fresh, kind, running, outage })
    }

    /// Notes an outage if the running lookup has lasted longer than a request waits.
    pub(crate) fn note_hanging_lookup(&self) {
        // The thread ends its lookup only under this lock, so it notes the answer after the outage.
        let running = locked(&self.running);
        if running.began.is_some_and(|began| began.elapsed() >= IDENTITY_WAIT) {
            self.outage.unanswered(self.kind);
        }
    }

    /// Repeats the lookups that failed.
    pub(crate) fn retry_failed(&self) {
        let failed = locked(&self.running).failed.clone();
        for key in failed {
            // Look it up even if an earlier answer is still fresh.
            let _answer_is_noted = self.queue(key, MOST_WAITING, Duration::ZERO);
        }
    }

    pub(crate) async fn get(&self, key: K, wait: Duration) -> Answer<V> {
        self.get_queued(key, wait, MOST_WAITING).await
    }

    pub(crate) async fn get_queued(&self, key: K, wait: Duration, most_queued: usize) -> Answer<V> {
        match self.ask(key, most_queued) {
            (Some(value), _) => Ok(value),
            (None, found) => self.answer(found, wait).await,
        }
    }

    /// Returns an answer that is at most `fresh` old. An older answer does not count, even while a new lookup runs.
    pub(crate) async fn get_fresh(&self, key: K, wait: Duration, most_queued: usize, fresh: Duration) -> Answer<V> {
        let known = locked(&self.entries).get(&key).filter(|(at, _)| at.elapsed() < fresh);
        match known {
            Some((_, value)) => Ok(value),
            None => self.answer(self.queue(key, most_queued, fresh), wait).await,
        }
    }

    async fn answer(&self, found: Option<oneshot::Receiver<Option<V>>>, wait: Duration) -> Answer<V> {
        let found = found.ok_or(Unanswered)?;
        let answer = tokio::time::timeout(wait, found).await.ok().and_then(Result::ok);
        if answer.is_none() {
            self.note_hanging_lookup();
        }
        answer.ok_or(Unanswered)
    }

    pub(crate) fn last(&self, key: K) -> Answer<V> {
        self.ask(key, MOST_WAITING).0.ok_or(Unanswered)
    }

    /// Returns the last answer, and the channel for a newer answer if the last one is missing or old. If `most_queued`
    /// lookups are queued, there is no channel.
    pub(crate) fn ask(&self, key: K, most_queued: usize) -> (Option<Option<V>>, Option<oneshot::Receiver<Option<V>>>) {
        let known = locked(&self.entries).get(&key);
        if let Some((at, value)) = known.clone()
            && at.elapsed() < self.fresh
        {
            return (Some(value), None);
        }
        let known = known.map(|(_, value)| value);
        (known, self.queue(key, most_queued, self.fresh))
    }

    /// Queues a lookup. Returns the channel for its answer; `None` if `most_queued` lookups are queued.
    fn queue(&self, key: K, most_queued: usize, fresh: Duration) -> Option<oneshot::Receiver<Option<V>>> {
        self.note_hanging_lookup();
        // Count the lookup first: the thread may take it out of the queue at once.
        if self.queued.fetch_add(1, Ordering::Relaxed) < most_queued {
            let (answer, found) = oneshot::channel();
            if self.lookups.try_send(Queued { key, fresh, answer }).is_ok() {
                return Some(found);
            }
        }
        self.queued.fetch_sub(1, Ordering::Relaxed);
        None
    }
}

pub(crate) fn locked<T>(value: &Locked<T>) -> MutexGuard<'_, T> {
    value.lock()
}
