//! What the hardware looks like: the agent's only way to read it.
//!
//! Two kinds of look:
//!
//! - [`Observer::recent`], for whoever reads the API: each GPU's last reading, made anew when it is
//!   older than a second. Askers at the same time share a reading, and none is waited for once it has
//!   taken 75 ms: a GPU that hangs is shown as it was, marked stale, and holds up no other. So there
//!   is an answer within 100 ms, whatever the driver does.
//! - [`Observer::now`], for whoever is about to change something: a reading begun after the call.
//!
//! GPUs are known by UUID. One that the driver no longer lists stays known, as lost, until the
//! agent ends: who had it in use wants to know what became of it.

mod cached;
mod identify;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use gpush_host::identity::Users;
use gpush_nvml::{DriverError, ErrorKind, Hardware, Identity, Listed, Reading};
use tokio::sync::Notify;

pub(crate) use self::cached::Moment;
use self::{
    cached::{Cached, Known},
    identify::identify,
};

/// How long a newer reading may take before askers get the last one.
const WAIT: Duration = Duration::from_millis(75);

/// How long the first reading ever may take: without persistence mode a real driver brings up each
/// GPU first.
const FIRST: Duration = Duration::from_secs(5);

/// A GPU, as last seen.
#[derive(Debug, Clone)]
pub(crate) struct Sight {
    /// What it is.
    pub(crate) identity: Identity,
    /// Whether the driver still lists it.
    pub(crate) listed: bool,
    /// The last good reading.
    pub(crate) reading: Option<Arc<Reading>>,
    /// When that was made, or when the GPU was listed.
    pub(crate) at: Moment,
    /// Why there is no newer one.
    pub(crate) error: Option<DriverError>,
    /// Whether a newer one was wanted, or it is known to be from before a change.
    pub(crate) stale: bool,
}

/// The host, as last seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Host {
    /// GPUs by index; lost ones last.
    pub(crate) gpus: Vec<Sight>,
    /// GPUs that the driver lists but that can't even be identified.
    pub(crate) nameless: Vec<(u32, DriverError)>,
}

/// Reads the hardware and remembers. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Observer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    hardware: Hardware,
    users: Users,
    list: Cached<Arc<Vec<Listed>>>,
    gpus: Mutex<BTreeMap<String, Entry>>,
    /// Rung when something was read, or could not be.
    bell: Arc<Notify>,
}

#[derive(Debug, Clone)]
struct Entry {
    identity: Identity,
    readings: Cached<Arc<Reading>>,
}

impl Observer {
    /// Knows nothing yet, and asks nothing before it is asked. Rings `bell` whenever it knows more.
    pub(crate) fn new(hardware: Hardware, users: Users, bell: Arc<Notify>) -> Self {
        let list = Cached::ringing(Arc::clone(&bell));
        Self(Arc::new(Inner { hardware, users, list, gpus: Mutex::new(BTreeMap::new()), bell }))
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.0.gpus.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host as it was at most a second ago, or as it was last seen.
    ///
    /// # Errors
    /// When there is no driver, or it has not answered yet.
    pub(crate) async fn recent(&self) -> Result<Host, DriverError> {
        // Known GPUs are read while the list is made.
        self.entries().values().for_each(|entry| self.refresh(entry));
        self.0.list.refresh(|| self.list());
        let list = self.0.list.wait(patience(&self.0.list)).await;
        let listed = self.take_in(&list)?;
        let entries: Vec<Entry> = self.entries().values().cloned().collect();
        // Those that are new by now.
        for entry in entries.iter().filter(|entry| is_listed(&listed, &entry.identity.uuid)) {
            self.refresh(entry);
        }
        let mut gpus = Vec::new();
        for entry in entries {
            let known = entry.readings.wait(patience(&entry.readings)).await;
            let present = is_listed(&listed, &entry.identity.uuid);
            gpus.push(sight(entry.identity, present, known, list.good.as_ref().map(|good| good.1)));
        }
        Ok(self.arrange(gpus, &listed))
    }

    /// The host as it was last seen, without asking the driver anything.
    ///
    /// # Errors
    /// When nothing was seen yet, or the driver is known to be gone.
    pub(crate) fn known(&self) -> Result<Host, DriverError> {
        let list = self.0.list.last();
        let listed = self.take_in(&list)?;
        Ok(self.remembered(&listed, list.good.map(|good| good.1), |known| known))
    }

    /// The host as it was last seen, all of it as stale, while there is no driver on purpose; `None`
    /// when it never was seen.
    pub(crate) fn last_seen(&self) -> Option<Host> {
        let (listed, at) = self.0.list.last().good?;
        Some(self.remembered(&listed, Some(at), |known| Known { error: None, stale: true, ..known }))
    }

    fn remembered(
        &self,
        listed: &[Listed],
        at: Option<Moment>,
        as_shown: impl Fn(Known<Arc<Reading>>) -> Known<Arc<Reading>>,
    ) -> Host {
        let seen = |entry: &Entry| {
            let present = is_listed(listed, &entry.identity.uuid);
            sight(entry.identity.clone(), present, as_shown(entry.readings.last()), at)
        };
        let gpus = self.entries().values().map(seen).collect();
        self.arrange(gpus, listed)
    }

    /// Index of a GPU when it was last listed.
    pub(crate) fn index_of(&self, uuid: &str) -> Option<u32> {
        self.entries().get(uuid).map(|entry| entry.identity.index)
    }

    /// Makes the next asker read everything anew: what went wrong before counts no more.
    pub(crate) fn begin_anew(&self) {
        self.0.list.begin_anew();
        self.entries().values().for_each(|entry| entry.readings.begin_anew());
    }

    /// These GPUs as they are now: each reading is begun after the call.
    pub(crate) async fn now(&self, uuids: &[String]) -> Vec<(String, Result<Arc<Reading>, DriverError>)> {
        let mut tasks = tokio::task::JoinSet::new();
        for (position, uuid) in uuids.iter().enumerate() {
            let (observer, uuid) = (self.clone(), uuid.clone());
            tasks.spawn(async move { (position, observer.read_now(&uuid).await) });
        }
        let mut read: Vec<Option<_>> = uuids.iter().map(|_| None).collect();
        while let Some(done) = tasks.join_next().await {
            if let Ok((position, outcome)) = done {
                read[position] = Some(outcome);
            }
        }
        let missing = || Err(DriverError::new(ErrorKind::Stopped, "reading the GPU"));
        uuids.iter().cloned().zip(read.into_iter().map(|outcome| outcome.unwrap_or_else(missing))).collect()
    }

    /// One GPU as it is now.
    pub(crate) async fn read_now(&self, uuid: &str) -> Result<Arc<Reading>, DriverError> {
        let begun = Moment::now();
        let outcome = self.read(uuid).await;
        if let Some(entry) = self.entries().get(uuid) {
            entry.readings.put(begun, outcome.clone());
        }
        outcome
    }

    /// Makes the next asker read this GPU anew, since something on it has changed.
    pub(crate) fn outdate(&self, uuid: &str) {
        if let Some(entry) = self.entries().get(uuid) {
            entry.readings.outdate();
        }
    }

    fn refresh(&self, entry: &Entry) {
        entry.readings.refresh(|| {
            let (observer, uuid) = (self.clone(), entry.identity.uuid.clone());
            async move { observer.read(&uuid).await }
        });
    }

    async fn read(&self, uuid: &str) -> Result<Arc<Reading>, DriverError> {
        let mut reading = self.0.hardware.read(uuid).await?;
        identify(&self.0.users, &mut reading).await;
        Ok(Arc::new(reading))
    }

    fn list(&self) -> impl Future<Output = Result<Arc<Vec<Listed>>, DriverError>> + Send + use<> {
        let hardware = self.0.hardware.clone();
        async move { hardware.list().await.map(Arc::new) }
    }

    /// Notes the GPUs of a list, and gives the last good one unless the driver is known to be gone.
    fn take_in(&self, list: &Known<Arc<Vec<Listed>>>) -> Result<Arc<Vec<Listed>>, DriverError> {
        if let Some(error) = &list.error
            && (error.is_driver_unavailable() || list.good.is_none())
        {
            return Err(error.clone());
        }
        let Some((listed, _)) = &list.good else {
            return Err(DriverError::new(ErrorKind::WorkerUnavailable, "listing the GPUs")
                .detail("the driver is still starting"));
        };
        let mut entries = self.entries();
        for identity in listed.iter().filter_map(|listed| listed.identity.as_ref().ok()) {
            entries
                .entry(identity.uuid.clone())
                .and_modify(|entry| entry.identity.clone_from(identity))
                .or_insert_with(|| Entry {
                    identity: identity.clone(),
                    readings: Cached::ringing(Arc::clone(&self.0.bell)),
                });
        }
        Ok(Arc::clone(listed))
    }

    /// Gives each unidentified GPU of the list to the one that was last seen at its index.
    fn arrange(&self, mut gpus: Vec<Sight>, listed: &[Listed]) -> Host {
        let unsettled = self.0.hardware.status().unsettled;
        let mut nameless = Vec::new();
        for (index, error) in listed.iter().filter_map(|l| l.identity.as_ref().err().map(|error| (l.index, error))) {
            match gpus.iter_mut().find(|gpu| !gpu.listed && gpu.identity.index == index) {
                // Left out because of an earlier call; whether that is still so is known better
                // than by the list.
                Some(gpu) if error.kind == ErrorKind::Unsettled => gpu.listed = true,
                Some(gpu) => {
                    gpu.listed = true;
                    gpu.error = Some(error.clone());
                    gpu.stale = true;
                }
                None => nameless.push((index, error.clone())),
            }
        }
        for gpu in gpus.iter_mut().filter(|gpu| unsettled.contains(&gpu.identity.uuid)) {
            gpu.listed = true;
        }
        gpus.sort_by_key(|gpu| (!gpu.listed, gpu.identity.index));
        Host { gpus, nameless }
    }
}

/// How long a reading of this may take.
fn patience<V: Clone + Send + 'static>(cached: &Cached<V>) -> Duration {
    if cached.is_known() { WAIT } else { FIRST }
}

fn is_listed(listed: &[Listed], uuid: &str) -> bool {
    listed.iter().any(|listed| listed.identity.as_ref().is_ok_and(|identity| identity.uuid == uuid))
}

fn sight(identity: Identity, listed: bool, known: Known<Arc<Reading>>, list_at: Option<Moment>) -> Sight {
    let (reading, at) = match known.good {
        Some((reading, at)) => (Some(reading), at),
        None => (None, list_at.unwrap_or_else(Moment::now)),
    };
    Sight { identity, listed, reading, at, error: known.error, stale: known.stale }
}
