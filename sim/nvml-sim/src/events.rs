//! Event sets: Xid errors and MIG configuration changes.
//!
//! Each event set has its own position in the host's queue of events. So every listener gets each
//! event once, and gets no event from before its registration. A client registers for the events of
//! a whole GPU. The events name the instances. A wait uses no thread and holds no lock.

use std::collections::BTreeMap;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use gpush_locked::Locked;
use nvml_wrapper_sys::bindings::nvmlEventData_t;
use silicon::machine::{Event, Handle, MIG_CONFIG_CHANGE, XID_CRITICAL_ERROR};
use silicon::{Host, Machine, Return};

use crate::caller::{Opaque, Outcome, Ptr};
use crate::entry::exports;

/// Events that simulated GPUs report.
const SUPPORTED: u64 = XID_CRITICAL_ERROR | MIG_CONFIG_CHANGE;
/// Instance id in an event that concerns no instance.
const NO_INSTANCE: u32 = u32::MAX;
/// Interval at which a waiting call checks whether another thread has freed the event set.
const SLICE: Duration = Duration::from_secs(1);

/// The output of `nvmlEventSetWait`. This function is older than MIG, so the output has no instance
/// ids.
#[repr(C)]
pub(crate) struct EventDataV1 {
    device: *mut std::ffi::c_void,
    kind: u64,
    data: u64,
}

#[derive(Clone, Default)]
struct EventSet {
    /// For each registered GPU: the selected event types, and the position of the queue at
    /// registration.
    gpus: BTreeMap<u32, (u64, u64)>,
    /// The boot in which the set was registered. After a reboot, the set is invalid.
    boot: u64,
    /// The last event that the set has returned to the client.
    cursor: u64,
}

impl EventSet {
    fn wants(&self, event: &Event) -> bool {
        self.gpus.get(&event.gpu).is_some_and(|(types, from)| types & event.kind != 0 && event.sequence > *from)
    }
}

struct Sets {
    next: usize,
    open: BTreeMap<usize, EventSet>,
}

static SETS: Locked<Sets> = Locked::new(Sets { next: 1, open: BTreeMap::new() });

fn sets() -> MutexGuard<'static, Sets> {
    SETS.lock()
}

/// Drops all sets, because their session has ended.
pub(crate) fn forget_all() {
    sets().open.clear();
}

exports! {
    /// Creates an event set.
    fn nvmlEventSetCreate(set: Ptr<usize>) |call| {
        set.required()?;
        call.host(|_| Ok(()))?;
        let mut sets = sets();
        let id = sets.next;
        sets.next += 1;
        sets.open.insert(id, EventSet::default());
        set.put(id)
    }

    /// Frees an event set.
    fn nvmlEventSetFree(set: usize) |call| {
        call.host(|_| Ok(()))?;
        sets().open.remove(&set).map(|_| ()).ok_or(Return::InvalidArgument)
    }

    /// Returns the event types that a GPU reports.
    fn nvmlDeviceGetSupportedEventTypes(device: Opaque, types: Ptr<u64>) |call| {
        types.put(call.gpu(device, supported)?)
    }

    /// Registers an event set for later events of a GPU.
    fn nvmlDeviceRegisterEvents(device: Opaque, types: u64, set: usize) |call| {
        let (gpu, from, boot) = call.gpu(device, |m, gpu| {
            if types & !supported(m, gpu)? != 0 {
                return Err(Return::NotSupported);
            }
            Ok((gpu, m.events().cursor(), m.state().boot))
        })?;
        let mut sets = sets();
        let listener = sets.open.get_mut(&set).ok_or(Return::InvalidArgument)?;
        listener.boot = boot;
        let (wanted, _) = listener.gpus.entry(gpu).or_insert((0, from));
        *wanted |= types;
        Ok(())
    }

    /// Waits at most `timeout_ms` for an event. The result has no instance ids.
    fn nvmlEventSetWait(set: usize, data: Ptr<EventDataV1>, timeout_ms: u32) |call| {
        data.required()?;
        call.host(|_| Ok(()))?;
        let (event, device) = wait(&call.session().host, set, timeout_ms)?;
        data.put(EventDataV1 { device: device.pointer(), kind: event.kind, data: event.data })
    }

    /// Waits at most `timeout_ms` for an event.
    fn nvmlEventSetWait_v2(set: usize, data: Ptr<nvmlEventData_t>, timeout_ms: u32) |call| {
        data.required()?;
        call.host(|_| Ok(()))?;
        let (event, device) = wait(&call.session().host, set, timeout_ms)?;
        data.put(nvmlEventData_t {
            device: device.pointer(),
            eventType: event.kind,
            eventData: event.data,
            gpuInstanceId: event.gpu_instance.unwrap_or(NO_INSTANCE),
            computeInstanceId: event.compute_instance.unwrap_or(NO_INSTANCE),
        })
    }
}

fn supported(m: &Machine, gpu: u32) -> Outcome<u64> {
    m.gpu(gpu)?;
    Ok(if m.part(gpu)?.has_mig() { SUPPORTED } else { XID_CRITICAL_ERROR })
}

/// Returns the next selected event of a set, and the handle of its GPU. If no event arrives,
/// returns `TIMEOUT`. If no event is left and a GPU is lost, returns `GPU_IS_LOST`.
fn wait(host: &Host, set: usize, timeout_ms: u32) -> Outcome<(Event, Opaque)> {
    // In NVML, the maximum value means no limit. As a number of ms, it is 49 days, which has the
    // same effect.
    let until = Instant::now() + Duration::from_millis(timeout_ms.into());
    loop {
        let listener = sets().open.get(&set).cloned().ok_or(Return::InvalidArgument)?;
        let left = until.saturating_duration_since(Instant::now());
        let found = host.wait_event(listener.cursor, left.min(SLICE), |event| listener.wants(event))?;
        let machine = host.read()?;
        if !listener.gpus.is_empty() && machine.state().boot != listener.boot {
            return Err(Return::InvalidArgument);
        }
        if let Some(event) = found {
            let mut sets = sets();
            let listener = sets.open.get_mut(&set).ok_or(Return::InvalidArgument)?;
            if listener.cursor >= event.sequence {
                continue; // another thread that waits on this set received it
            }
            listener.cursor = event.sequence;
            let handle = silicon::machine::GpuHandle { gpu: event.gpu, boot: machine.state().boot };
            return Ok((event, Opaque::of(Handle::Gpu(handle))));
        }
        if machine.gpus().iter().any(|gpu| gpu.lost && listener.gpus.contains_key(&gpu.index)) {
            return Err(Return::GpuIsLost);
        }
        if Instant::now() >= until {
            return Err(Return::Timeout);
        }
    }
}
