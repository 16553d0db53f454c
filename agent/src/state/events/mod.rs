//! Events: modules publish changes here, and clients follow them.
//!
//! ```text
//! operations, config, driver, Xids, mutations ──► ring ◄── cursor ── stream of a client
//! differences of snapshots ─────────────────────┘ (bounded) ◄── cursor ── stream of another client
//! ```
//!
//! All clients read the same ring buffer, each at its own position. If a client reads too slowly, it misses events, and
//! gets a `resync` event instead. Publishing never waits, and listening causes no driver call.
//!
//! An event id is `<epoch>-<number>`. The epoch identifies this run of gpushd. A client that returns with an id from
//! another run also gets a `resync`.
//!
//! | file | subject |
//! |---|---|
//! | `ring` | the stored events, and a client's position among them |
//! | `filter` | which events a client receives |

mod filter;
mod ring;

use std::sync::{Arc, MutexGuard};

use gpush_api::{Event, EventPayload};
use gpush_locked::Locked;
use jiff::Timestamp;
use tokio::sync::watch as channel;

use self::ring::Ring;
pub(crate) use self::{
    filter::Filter,
    ring::{Cursor, Next},
};

/// Number of events that gpushd stores for clients that reconnect. They need about 1 MiB, and cover some dozens of
/// operations on eight GPUs.
const CAPACITY: usize = 1024;

/// All events of this run of gpushd. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Events(Arc<EventParts>);

#[derive(Debug)]
struct EventParts {
    epoch: String,
    ring: Locked<Ring>,
    news: channel::Sender<RingStatus>,
}

/// What waiting listeners watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RingStatus {
    last: u64,
    /// Whether no more events will follow. Streams then end.
    closed: bool,
}

impl Events {
    /// Creates an empty list of events. `instance` is the UUID of this run of gpushd.
    pub(crate) fn new(instance: &str) -> Self {
        Self::keeping(instance, CAPACITY)
    }

    fn keeping(instance: &str, most: usize) -> Self {
        // Twelve hexadecimal digits are enough to distinguish two runs.
        let epoch = instance.chars().filter(char::is_ascii_alphanumeric).take(12).collect();
        let news = channel::Sender::new(RingStatus { last: 0, closed: false });
        Self(Arc::new(EventParts { epoch, ring: Locked::new(Ring::new(most)), news }))
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.ring.lock()
    }

    /// Publishes an event. If the event is about a recorded change, call this after the commit.
    ///
    /// Every user who may connect may read events. [`super::redact::event`] removes what a listener may not see.
    pub(crate) fn publish(&self, what: EventPayload) {
        let mut ring = self.ring();
        let last = ring.push(|number| Event { id: self.id(number), at: Timestamp::now(), what });
        // Notify listeners while the ring is still locked, so that the listeners see the events in the order of the
        // ring.
        self.0.news.send_modify(|news| news.last = last);
    }

    /// Returns the id of the last event.
    pub(super) fn last_id(&self) -> String {
        self.id(self.ring().last())
    }

    /// Ends all streams as soon as they have sent the stored events.
    pub(crate) fn close(&self) {
        self.0.news.send_modify(|news| news.closed = true);
    }

    fn id(&self, number: u64) -> String {
        format!("{}-{number}", self.0.epoch)
    }

    /// Returns the number in an event id. Returns `None` if this run of gpushd has not published an event with this id.
    fn number(&self, id: &str) -> Option<u64> {
        let (epoch, number) = id.rsplit_once('-')?;
        let number = number.parse().ok()?;
        (epoch == self.0.epoch && number <= self.ring().last()).then_some(number)
    }
}
