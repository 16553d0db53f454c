//! Heavy answers: made off the async workers, so many at a time, each uid its share.
//!
//! A plan for 64 GPUs, or all of them with their profiles, takes milliseconds to make and to write
//! as JSON. On the async workers a few dozen of them would hold up everybody, those who only ask
//! whether the agent is well included. So a heavy answer is made in turns on blocking threads:
//!
//! ```text
//! request ─┬─► turn ─► polled once ─► ready ─► answer
//!          └─── woken ◄─── pending ◄──┘
//! ```
//!
//! A turn lasts until the work waits for something, a reading of the hardware say: a GPU that hangs
//! holds up nobody, not even the uid that asked for it. How many requests of one uid may wait so is
//! bounded by its connections. Turns are given in the order in which they were asked for, and a uid
//! has only its share of them, so whoever asks once waits for one turn of each other uid at most.
//! Root and the agent's own user have turns of their own, which nobody else can take.

use std::{
    collections::HashMap,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, Wake, Waker},
    thread::available_parallelism,
};

use axum::{
    body::Bytes,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use tokio::sync::{AcquireError, Notify, OwnedSemaphorePermit, Semaphore};

use super::failure::Failure;
use crate::{agent::Shared, caller::Caller};

/// Turns at once, at most: more threads than that would only make each answer slower.
const MOST_TURNS: usize = 4;

/// Gives out turns.
#[derive(Debug)]
pub(crate) struct Desk {
    public: Lane,
    privileged: Lane,
}

#[derive(Debug)]
struct Lane {
    turns: Arc<Semaphore>,
    /// Turns that one uid may have at once.
    share: usize,
    /// What each uid may have of them.
    uids: Mutex<HashMap<u32, Arc<Semaphore>>>,
}

/// The right to work, until dropped.
struct Turn {
    _lane: OwnedSemaphorePermit,
    _share: OwnedSemaphorePermit,
}

impl Default for Desk {
    /// Half the processors for each of the two lanes.
    fn default() -> Self {
        let turns = (available_parallelism().map_or(1, usize::from) / 2).clamp(1, MOST_TURNS);
        Self { public: Lane::new(turns), privileged: Lane::new(turns) }
    }
}

impl Lane {
    fn new(turns: usize) -> Self {
        Self { turns: Arc::new(Semaphore::new(turns)), share: turns.div_ceil(2), uids: Mutex::default() }
    }

    fn share(&self, uid: u32) -> Arc<Semaphore> {
        let mut uids = self.uids.lock().unwrap_or_else(PoisonError::into_inner);
        // Those of whom nothing is in work.
        uids.retain(|_, share| Arc::strong_count(share) > 1);
        Arc::clone(uids.entry(uid).or_insert_with(|| Arc::new(Semaphore::new(self.share))))
    }

    async fn turn(&self, share: &Arc<Semaphore>) -> Result<Turn, AcquireError> {
        // First within the uid: the queue of the lane holds no more of it than its share.
        let share = Arc::clone(share).acquire_owned().await?;
        Ok(Turn { _share: share, _lane: Arc::clone(&self.turns).acquire_owned().await? })
    }
}

/// Wakes the task that asks for the next turn.
struct Bell(Notify);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

impl Desk {
    /// Carries `work` to its end in turns.
    ///
    /// # Errors
    /// When it panics.
    async fn carry<T: Send + 'static>(
        &self,
        caller: &Caller,
        privileged: bool,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Failure> {
        let lane = if privileged { &self.privileged } else { &self.public };
        let share = lane.share(caller.peer.uid);
        let bell = Arc::new(Bell(Notify::new()));
        let mut work: Pin<Box<dyn Future<Output = T> + Send>> = Box::pin(work);
        loop {
            // Nobody closes these semaphores.
            let turn = lane.turn(&share).await.map_err(|_| Failure::internal())?;
            let waker = Waker::from(Arc::clone(&bell));
            let polled = tokio::task::spawn_blocking(move || {
                let polled = work.as_mut().poll(&mut Context::from_waker(&waker));
                drop(turn);
                (polled, work)
            });
            match polled.await.map_err(|_| Failure::internal())? {
                (Poll::Ready(done), _) => return Ok(done),
                (Poll::Pending, unfinished) => work = unfinished,
            }
            bell.0.notified().await;
        }
    }
}

/// Makes a heavy answer: `work`, and what it gives written as JSON.
pub(super) async fn answer<T, W, F>(
    agent: Shared,
    caller: Caller,
    status: StatusCode,
    work: W,
) -> Result<Response, Failure>
where
    T: Serialize,
    W: FnOnce(Shared, Caller) -> F + Send + 'static,
    F: Future<Output = Result<T, Failure>> + Send + 'static,
{
    let shared = Arc::clone(&agent);
    let made = async move |caller| written(&work(shared, caller).await?);
    Ok(json(status, carry(&agent, caller, made).await?))
}

/// Carries `work` to its end in turns of the caller.
pub(super) async fn carry<T, W, F>(agent: &Shared, caller: Caller, work: W) -> Result<T, Failure>
where
    T: Send + 'static,
    W: FnOnce(Caller) -> F + Send + 'static,
    F: Future<Output = Result<T, Failure>> + Send + 'static,
{
    let privileged = caller.peer.uid == 0 || caller.peer.uid == agent.own_uid;
    let who = caller.clone();
    agent.desk.carry(&caller, privileged, async move { work(who).await }).await?
}

/// A value as JSON.
pub(super) fn written<T: Serialize>(value: &T) -> Result<Bytes, Failure> {
    serde_json::to_vec(value).map(Bytes::from).map_err(|_| Failure::internal())
}

/// An answer that is written already.
pub(super) fn json(status: StatusCode, written: Bytes) -> Response {
    (status, [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], written).into_response()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot;

    use gpush_host::peer::Peer;

    use super::*;
    use crate::caller::Viewer;

    fn caller(uid: u32) -> Caller {
        Caller { peer: Peer { uid, pid: None, groups: Vec::new(), is_on_this_host: true }, viewer: Viewer::User(uid) }
    }

    fn one_turn() -> Arc<Desk> {
        Arc::new(Desk { public: Lane::new(1), privileged: Lane::new(1) })
    }

    #[tokio::test]
    async fn work_that_waits_holds_up_nobody_and_goes_on_when_it_is_woken() {
        let desk = one_turn();
        let (tx, rx) = oneshot::channel::<u32>();
        let waiting = tokio::spawn({
            let desk = Arc::clone(&desk);
            async move { desk.carry(&caller(1000), false, rx).await.unwrap().unwrap() }
        });
        // However many of them wait.
        let mut others = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let desk = Arc::clone(&desk);
            others.spawn(async move { desk.carry(&caller(1000), false, std::future::pending::<()>()).await.is_ok() });
        }
        tokio::task::yield_now().await;
        // The same uid, another one: each has its turn while the first waits.
        assert_eq!(desk.carry(&caller(1000), false, async { 1 }).await.unwrap(), 1);
        assert_eq!(desk.carry(&caller(1001), false, async { 2 }).await.unwrap(), 2);
        tx.send(7).unwrap();
        assert_eq!(waiting.await.unwrap(), 7);
        others.shutdown().await;
        desk.carry(&caller(1), false, async {}).await.unwrap();
        assert_eq!(desk.public.uids.lock().unwrap().len(), 1, "who has gone is forgotten");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_uid_with_much_work_costs_another_one_turn_and_root_none() {
        let desk = one_turn();
        let (started, mut start) = tokio::sync::mpsc::unbounded_channel();
        let (gate, gates) = std::sync::mpsc::channel::<()>();
        let gates = Arc::new(Mutex::new(gates));
        let mut work = Vec::new();
        for _ in 0..20 {
            let (desk, gates, started) = (Arc::clone(&desk), Arc::clone(&gates), started.clone());
            work.push(tokio::spawn(async move {
                let blocks = async move {
                    started.send(()).unwrap();
                    gates.lock().unwrap().recv().unwrap();
                };
                desk.carry(&caller(1000), false, blocks).await.unwrap();
            }));
        }
        start.recv().await.unwrap();
        // Root is not behind it, though the only public turn is taken.
        assert_eq!(desk.carry(&caller(0), true, async { 1 }).await.unwrap(), 1);
        let other = tokio::spawn({
            let desk = Arc::clone(&desk);
            async move { desk.carry(&caller(1001), false, async { 2 }).await.unwrap() }
        });
        // Until it queues for the turn.
        while desk.public.uids.lock().unwrap().get(&1001).is_none_or(|share| share.available_permits() > 0) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        gate.send(()).unwrap();
        assert_eq!(other.await.unwrap(), 2);
        assert!(work.iter().filter(|work| work.is_finished()).count() < 3);
        for _ in 0..19 {
            gate.send(()).unwrap();
        }
        for work in work {
            work.await.unwrap();
        }
    }

    #[tokio::test]
    async fn work_that_panics_gives_its_turn_back() {
        let desk = one_turn();
        assert!(desk.carry::<()>(&caller(1000), false, async { panic!("on purpose") }).await.is_err());
        assert_eq!(desk.carry(&caller(1000), false, async { 3 }).await.unwrap(), 3);
    }
}
