//! The stored events, and a listener's position among them.

use std::{collections::VecDeque, sync::Arc};

use gpush_api::{Event, ResyncReason};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use super::{Events, RingStatus};

/// Maximum number of events that a listener receives at once.
const BATCH: usize = 32;

/// The last events. Their numbers start at 1.
#[derive(Debug)]
pub(super) struct Ring {
    kept: VecDeque<Arc<Event>>,
    most: usize,
    last: u64,
}

impl Ring {
    pub(super) fn new(most: usize) -> Self {
        Self { kept: VecDeque::new(), most, last: 0 }
    }

    /// Returns the number of the last event; 0 if there is none.
    pub(super) fn last(&self) -> u64 {
        self.last
    }

    pub(super) fn push(&mut self, event: impl FnOnce(u64) -> Event) -> u64 {
        self.last += 1;
        self.kept.push_back(Arc::new(event(self.last)));
        if self.kept.len() > self.most {
            self.kept.pop_front();
        }
        self.last
    }

    /// Returns up to `most` events that follow the event `number`. Returns `None` if some of them
    /// are no longer stored.
    fn after(&self, number: u64, most: usize) -> Option<Vec<Arc<Event>>> {
        let wanted = usize::try_from(self.last.saturating_sub(number)).unwrap_or(usize::MAX);
        let skip = self.kept.len().checked_sub(wanted)?;
        Some(self.kept.iter().skip(skip).take(most).cloned().collect())
    }
}

/// A listener's position.
#[derive(Debug)]
pub(crate) struct Cursor {
    events: Events,
    news: watch::Receiver<RingStatus>,
    /// Number of the last event that the listener received.
    at: u64,
    /// Why the listener has missed events. `None` if it has missed none, or was already informed.
    resync: Option<ResyncReason>,
}

/// What a listener gets next.
#[derive(Debug)]
pub(crate) enum Next {
    /// At least one event.
    Events(Vec<Arc<Event>>),
    /// The listener has missed events.
    Resync(ResyncReason),
    /// No event before the deadline.
    Nothing,
    /// No more events follow.
    Closed,
}

impl Events {
    /// Creates a listener that gets the events after the event `id`; without `id`, only new events.
    pub(crate) fn listen(&self, id: Option<&str>) -> Cursor {
        let news = self.0.news.subscribe();
        let last = self.ring().last();
        let (at, resync) = match id.map(|id| self.number(id)) {
            None => (last, None),
            Some(Some(number)) => (number, None),
            Some(None) => (last, Some(ResyncReason::OtherRun)),
        };
        Cursor { events: self.clone(), news, at, resync }
    }

    /// Creates a listener that first gets all stored events.
    pub(crate) fn listen_from_oldest(&self) -> Cursor {
        let news = self.0.news.subscribe();
        let ring = self.ring();
        let at = ring.last() - ring.kept.len() as u64;
        drop(ring);
        Cursor { events: self.clone(), news, at, resync: None }
    }
}

impl Cursor {
    /// Returns the id of the last event that the listener got, to continue from there later.
    pub(crate) fn id(&self) -> String {
        self.events.id(self.at)
    }

    /// Returns the events that are available now.
    pub(crate) fn poll(&mut self) -> Next {
        if let Some(reason) = self.resync.take() {
            return Next::Resync(reason);
        }
        let closed = self.news.borrow_and_update().closed;
        let ring = self.events.ring();
        match ring.after(self.at, BATCH) {
            None => {
                self.at = ring.last();
                Next::Resync(ResyncReason::Missed)
            }
            Some(events) if !events.is_empty() => {
                self.at += events.len() as u64;
                Next::Events(events)
            }
            Some(_) if closed => Next::Closed,
            Some(_) => Next::Nothing,
        }
    }

    /// Waits for the next events, until a deadline.
    pub(crate) async fn next(&mut self, until: Instant) -> Next {
        loop {
            match self.poll() {
                Next::Nothing => {}
                next => return next,
            }
            match timeout_at(until, self.news.changed()).await {
                Ok(Ok(())) => {}
                // Cannot happen: this handle keeps the sender alive.
                Ok(Err(_)) => return Next::Closed,
                Err(_) => return Next::Nothing,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gpush_api::{ConfigChange, EventPayload};

    use super::*;

    fn publish(events: &Events, count: usize) {
        for _ in 0..count {
            let change = ConfigChange { taken: true, error: None, pending_restart: Vec::new() };
            events.publish(EventPayload::Config(change));
        }
    }

    /// Returns the numbers of the events that a listener gets now. For a resync, returns `missed`
    /// or `other run`.
    fn heard(cursor: &mut Cursor) -> Vec<String> {
        let mut heard = Vec::new();
        loop {
            match cursor.poll() {
                Next::Events(events) => {
                    heard.extend(events.iter().map(|event| event.id.rsplit_once('-').unwrap().1.to_owned()));
                }
                Next::Resync(ResyncReason::Missed) => heard.push("missed".to_owned()),
                Next::Resync(ResyncReason::OtherRun) => heard.push("other run".to_owned()),
                Next::Nothing | Next::Closed => return heard,
            }
        }
    }

    #[test]
    fn each_cursor_gets_every_later_event_once() {
        let events = Events::keeping("8c1f-aaaa", 100);
        let mut early = events.listen(None);
        publish(&events, 70);
        let mut late = events.listen(None);
        let mut back = events.listen(Some("8c1faaaa-67"));
        publish(&events, 2);
        assert_eq!(heard(&mut early), (1..=72).map(|n| n.to_string()).collect::<Vec<_>>());
        assert_eq!(heard(&mut late), ["71", "72"]);
        assert_eq!(heard(&mut back), ["68", "69", "70", "71", "72"]);
        assert_eq!((heard(&mut early), late.id()), (Vec::new(), "8c1faaaa-72".to_owned()));
        assert_eq!(heard(&mut events.listen_from_oldest()).len(), 72);
    }

    #[test]
    fn cursor_that_fell_behind_gets_a_resync() {
        let events = Events::keeping("new", 4);
        let mut slow = events.listen(None);
        publish(&events, 4);
        let mut just = events.listen(Some("new-0"));
        assert_eq!(heard(&mut just), ["1", "2", "3", "4"]);
        publish(&events, 1);
        assert_eq!(heard(&mut slow), ["missed"]);
        assert_eq!(heard(&mut events.listen(Some("new-0"))), ["missed"]);
        assert_eq!(heard(&mut events.listen(Some("new-1"))), ["2", "3", "4", "5"]);
        assert_eq!(heard(&mut events.listen_from_oldest()), ["2", "3", "4", "5"]);
        // None of these ids is from this run of gpushd.
        for other in ["old-3", "new-6", "new-", "new", "", "-", "new-x", "new--1"] {
            let mut cursor = events.listen(Some(other));
            assert_eq!(heard(&mut cursor), ["other run"], "{other}");
            assert_eq!(cursor.id(), "new-5");
        }
        publish(&events, 1);
        assert_eq!(heard(&mut slow), ["6"], "after a resync it goes on from there");
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_cursor_is_woken_and_ends_after_the_last_event() {
        let events = Events::keeping("e", 10);
        let mut cursor = events.listen(None);
        let soon = || Instant::now() + Duration::from_secs(15);
        assert!(matches!(cursor.next(soon()).await, Next::Nothing));
        let waiting = tokio::spawn(async move {
            let next = cursor.next(soon()).await;
            (next, cursor)
        });
        tokio::task::yield_now().await;
        publish(&events, 1);
        let (next, mut cursor) = waiting.await.unwrap();
        assert!(matches!(next, Next::Events(events) if events.len() == 1));
        publish(&events, 1);
        events.close();
        assert!(matches!(cursor.next(soon()).await, Next::Events(_)));
        assert!(matches!(cursor.next(soon()).await, Next::Closed));
        assert!(matches!(events.listen(None).next(soon()).await, Next::Closed));
    }
}
