//! Events: whoever changes something says so here, and whoever listens hears it.
//!
//! ```text
//! operations, config, driver, Xids, mutations ── publish ──► ring ◄── cursor ── stream of a client
//! readings landed ─► watch: is a GPU different? ──┘ (bounded)    ◄── cursor ── another
//! ```
//!
//! All listeners read the same ring, each at its own place, which is all that a listener costs: one
//! that does not read falls behind, and hears that it has missed something. Publishing never waits,
//! and listening causes no driver call: a GPU's event comes of a reading that somebody else wanted.
//!
//! An id is `<epoch>-<number>`. The epoch is this life of the agent, so an id of another life is
//! known as such; what it missed can't be told, and it is told that.
//!
//! | file | subject |
//! |---|---|
//! | `ring` | the events kept, and a listener's place among them |
//! | `filter` | which events a listener wants |
//! | `watch` | events that nobody publishes: of GPUs, the driver, Xids |

mod filter;
mod ring;
mod watch;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpush_api::{Event, Happening};
use jiff::Timestamp;
use tokio::sync::{Notify, watch as channel};

use self::ring::Ring;
pub(crate) use self::{
    filter::Filter,
    ring::{Cursor, Next},
    watch::run,
};

/// Events kept for those who come back: some dozens of operations on eight GPUs, in about a MiB.
const KEPT: usize = 1024;

/// All events of this life of the agent. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Events(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    epoch: String,
    ring: Mutex<Ring>,
    news: channel::Sender<News>,
    /// A GPU may be different: see `watch`.
    look: Arc<Notify>,
}

/// What those hear who wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct News {
    last: u64,
    /// Nothing more comes: streams end.
    closed: bool,
}

impl Events {
    /// Of the life of the agent that `instance`, a UUID, names.
    pub(crate) fn new(instance: &str) -> Self {
        Self::keeping(instance, KEPT)
    }

    fn keeping(instance: &str, most: usize) -> Self {
        // Twelve hexadecimal digits tell two lives apart, and are short enough to be typed.
        let epoch = instance.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
        let news = channel::Sender::new(News { last: 0, closed: false });
        Self(Arc::new(Inner { epoch, ring: Mutex::new(Ring::new(most)), news, look: Arc::default() }))
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells everybody that something happened. What is on record is told once it is; what an event
    /// holds may be read by everybody who may connect, but for the process of an [`gpush_api::Actor`],
    /// which is left out where the listener may not see it.
    pub(crate) fn publish(&self, what: Happening) {
        let mut ring = self.ring();
        let last = ring.push(|number| Event { id: self.id(number), at: Timestamp::now(), what });
        // Within the lock, so that nobody hears of a later one first.
        self.0.news.send_modify(|news| news.last = last);
    }

    /// Has the GPUs compared with what was last told of them: something of them that the agent keeps
    /// (a condition, the config, who changes them) may be different now.
    pub(crate) fn look_again(&self) {
        self.0.look.notify_one();
    }

    /// Rung when a GPU may be different.
    pub(crate) fn bell(&self) -> Arc<Notify> {
        Arc::clone(&self.0.look)
    }

    /// Ends all streams once they have told what there is.
    pub(crate) fn close(&self) {
        self.0.news.send_modify(|news| news.closed = true);
    }

    fn id(&self, number: u64) -> String {
        format!("{}-{number}", self.0.epoch)
    }

    /// The number of an id of this life, if there is such an event.
    fn number(&self, id: &str) -> Option<u64> {
        let (epoch, number) = id.rsplit_once('-')?;
        let number = number.parse().ok()?;
        (epoch == self.0.epoch && number <= self.ring().last()).then_some(number)
    }
}
