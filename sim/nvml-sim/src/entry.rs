//! The code that runs before and after the body of every C function.
//!
//! ```text
//!  C caller ─▶ run: panics caught (999), session open? (1) ─▶ Call::…: handle ours? (2)
//!               ─▶ fault rules before ─▶ read the state, or change it under its lock ─▶ trace ─▶ fault rules after
//! ```
//!
//! A panic must never reach a client. So [`exports!`] is the only way in this crate to define a C function with a body.
//! The body gets a [`Call`], and can access the simulated host only through it. So the fault rules apply to every call,
//! and the trace contains every change.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Once};

use silicon::fault::Sensor;
use silicon::machine::{ComputeInstanceHandle, GpuInstanceHandle, Handle, Placement};
use silicon::{Machine, Return};

use crate::caller::{Opaque, Outcome};
use crate::session::{self, Session};

/// Defines C functions that the library exports. Their bodies return an [`Outcome`].
macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) |$call:ident| $body:block)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            $crate::entry::run(stringify!($name), |$call: &$crate::entry::Call| -> $crate::caller::Outcome { $body })
        }
    )*};
}
pub(crate) use exports;

/// Runs the body of a function that needs a session. If `nvmlInit` was not called, returns `UNINITIALIZED` and does not
/// run the body.
pub(crate) fn run(function: &'static str, body: impl FnOnce(&Call) -> Outcome) -> u32 {
    guard(|| body(&Call { function, session: session::current()?, sensor: Cell::new(None) }))
}

/// Runs a body and converts its result to a return code.
pub(crate) fn guard(body: impl FnOnce() -> Outcome) -> u32 {
    static QUIET: Once = Once::new();
    // This library contains its own copy of Rust's standard library, so the hook does not affect the client.
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => Return::Success.code(),
        Ok(Err(code)) => code.code(),
        Err(_panic) => Return::Unknown.code(),
    }
}

/// The device of a call: a whole GPU, by index, or a MIG device.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Device {
    Gpu(u32),
    Mig(ComputeInstanceHandle),
}

impl Device {
    /// Returns the index of the GPU.
    pub(crate) fn gpu(self) -> u32 {
        match self {
            Device::Gpu(index) => index,
            Device::Mig(handle) => handle.gpu,
        }
    }
}

/// Arguments of a call that changes the state, as a text for the trace.
pub(crate) struct Change(String);

impl Change {
    /// The text of a change whose only argument is the handle.
    pub(crate) const NONE: Change = Change(String::new());

    pub(crate) fn create_gpu_instance(profile: u32, placement: Option<Placement>) -> Self {
        Self(created(profile, placement))
    }

    pub(crate) fn create_compute_instance(profile: u32, placement: Option<Placement>) -> Self {
        Self(created(profile, placement))
    }

    /// Creates the text of a change that sets one value, such as a mode.
    pub(crate) fn value(value: u32) -> Self {
        Self(format!("value={value}"))
    }
}

fn created(profile: u32, placement: Option<Placement>) -> String {
    match placement {
        Some(at) => format!("profile={profile} placement={}:{}", at.start, at.size),
        None => format!("profile={profile}"),
    }
}

/// The objects that a call concerns, for the fault rules and the trace.
#[derive(Clone, Copy)]
struct About {
    gpu: Option<u32>,
    gpu_instance: Option<u32>,
    compute_instance: Option<u32>,
}

impl About {
    const HOST: About = About { gpu: None, gpu_instance: None, compute_instance: None };

    fn of(handle: Handle) -> Self {
        match handle {
            Handle::Gpu(h) => About { gpu: Some(h.gpu), ..About::HOST },
            Handle::GpuInstance(h) => About { gpu: Some(h.gpu), gpu_instance: Some(h.id), ..About::HOST },
            Handle::MigDevice(h) | Handle::ComputeInstance(h) => {
                About { gpu: Some(h.gpu), gpu_instance: Some(h.gpu_instance), compute_instance: Some(h.id) }
            }
        }
    }
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.gpu_instance, self.compute_instance) {
            (Some(gi), Some(ci)) => write!(f, "gi={gi} ci={ci}"),
            (Some(gi), None) => write!(f, "gi={gi}"),
            (None, _) => Ok(()),
        }
    }
}

/// A call in progress.
pub(crate) struct Call {
    function: &'static str,
    session: Arc<Session>,
    /// How the values of the call are wrong, as a fault rule demands.
    sensor: Cell<Option<Sensor>>,
}

impl Call {
    /// Returns the session of the call.
    pub(crate) fn session(&self) -> &Session {
        &self.session
    }

    /// Returns how the values of the call are wrong. A function with sensors asks this after it has read them.
    pub(crate) fn sensor(&self) -> Option<Sensor> {
        self.sensor.get()
    }

    fn named(&self, about: About) -> silicon::Call<'static> {
        silicon::Call {
            function: self.function,
            gpu: about.gpu,
            gpu_instance: about.gpu_instance,
            compute_instance: about.compute_instance,
        }
    }

    fn read<T>(&self, about: About, body: impl FnOnce(&Machine) -> Outcome<T>) -> Outcome<T> {
        let session = &self.session;
        let decision = session.host.before(&self.named(about))?;
        self.sensor.set(decision.sensor);
        let outcome = match decision.rc {
            Some(code) => Err(code),
            None if decision.stale => body(&session.at_init),
            None => session.host.read().map_err(Return::from).and_then(|machine| body(&machine)),
        };
        session.host.after(decision);
        outcome
    }

    /// Changes the state. Only root and the owner of the simulated host may change it. If a fault rule sets an
    /// activation status, `body` must handle it.
    fn change<T>(
        &self,
        about: About,
        what: &Change,
        body: impl FnOnce(&mut Machine, Option<Return>) -> Outcome<T>,
    ) -> Outcome<T> {
        let session = &self.session;
        let decision = session.host.before(&self.named(about))?;
        let outcome = match decision.rc {
            Some(code) => Err(code),
            None if !session.host.privileged() => Err(Return::NoPermission),
            None => session.host.update(|machine| body(machine, decision.activation_status)),
        };
        let arguments = format!("{about} {}", what.0);
        let code = outcome.as_ref().err().copied().unwrap_or(Return::Success);
        session.host.trace(self.function, about.gpu, arguments.trim(), code);
        session.host.after(decision);
        outcome
    }

    /// Runs the body of a call that concerns no GPU.
    pub(crate) fn host<T>(&self, body: impl FnOnce(&Machine) -> Outcome<T>) -> Outcome<T> {
        self.read(About::HOST, body)
    }

    /// Runs the body of a call about the GPU with this index.
    pub(crate) fn at<T>(&self, index: u32, body: impl FnOnce(&Machine) -> Outcome<T>) -> Outcome<T> {
        self.read(About { gpu: Some(index), ..About::HOST }, body)
    }

    /// Runs the body of a call about a GPU, or about one of its GPU instances.
    pub(crate) fn place<T>(
        &self,
        gpu: u32,
        gpu_instance: Option<u32>,
        body: impl FnOnce(&Machine) -> Outcome<T>,
    ) -> Outcome<T> {
        self.read(About { gpu: Some(gpu), gpu_instance, compute_instance: None }, body)
    }

    /// Runs the body of a call about a GPU or a MIG device.
    pub(crate) fn device<T>(&self, device: Opaque, body: impl FnOnce(&Machine, Device) -> Outcome<T>) -> Outcome<T> {
        let handle = device.open()?;
        self.read(About::of(handle), |machine| body(machine, resolve_device(machine, handle)?))
    }

    /// Runs the body of a call that reads a whole GPU at the present time of the host's clock, in ms. For a MIG device,
    /// returns `NOT_SUPPORTED`.
    pub(crate) fn now<T>(&self, device: Opaque, body: impl FnOnce(&Machine, u32, u64) -> Outcome<T>) -> Outcome<T> {
        self.gpu(device, |machine, gpu| body(machine, gpu, self.session.host.now_ms(machine)))
    }

    /// Runs the body of a call that reads a whole GPU. For a MIG device, returns `NOT_SUPPORTED`.
    pub(crate) fn gpu<T>(&self, device: Opaque, body: impl FnOnce(&Machine, u32) -> Outcome<T>) -> Outcome<T> {
        self.device(device, |machine, at| match at {
            Device::Gpu(index) => body(machine, index),
            Device::Mig(_) => Err(Return::NotSupported),
        })
    }

    /// Runs the body of a call that reads a GPU instance, which the caller names by its id on a GPU, at the present time
    /// of the host's clock, in ms.
    pub(crate) fn instance_now<T>(
        &self,
        device: Opaque,
        gpu_instance: u32,
        body: impl FnOnce(&Machine, u32, u64) -> Outcome<T>,
    ) -> Outcome<T> {
        let handle = device.open()?;
        let about = About { gpu_instance: Some(gpu_instance), ..About::of(handle) };
        self.read(about, |machine| match resolve_device(machine, handle)? {
            Device::Gpu(index) => body(machine, index, self.session.host.now_ms(machine)),
            Device::Mig(_) => Err(Return::InvalidArgument),
        })
    }

    /// Runs the body of a call that is valid only for a whole GPU. For a MIG device, returns `INVALID_ARGUMENT`.
    pub(crate) fn parent<T>(&self, device: Opaque, body: impl FnOnce(&Machine, u32) -> Outcome<T>) -> Outcome<T> {
        self.device(device, |machine, at| match at {
            Device::Gpu(index) => body(machine, index),
            Device::Mig(_) => Err(Return::InvalidArgument),
        })
    }

    /// Runs the body of a call that is valid only for a MIG device.
    pub(crate) fn mig_device<T>(
        &self,
        device: Opaque,
        body: impl FnOnce(&Machine, ComputeInstanceHandle) -> Outcome<T>,
    ) -> Outcome<T> {
        self.device(device, |machine, at| match at {
            Device::Gpu(_) => Err(Return::InvalidArgument),
            Device::Mig(handle) => body(machine, handle),
        })
    }

    /// Runs the body of a call about a GPU instance.
    pub(crate) fn gpu_instance<T>(
        &self,
        instance: Opaque,
        body: impl FnOnce(&Machine, GpuInstanceHandle) -> Outcome<T>,
    ) -> Outcome<T> {
        let (handle, about) = gpu_instance(instance)?;
        self.read(about, |machine| {
            machine.resolve_gpu_instance(handle)?;
            body(machine, handle)
        })
    }

    /// Runs the body of a call about a compute instance.
    pub(crate) fn compute_instance<T>(
        &self,
        instance: Opaque,
        body: impl FnOnce(&Machine, ComputeInstanceHandle) -> Outcome<T>,
    ) -> Outcome<T> {
        let (handle, about) = compute_instance(instance)?;
        self.read(about, |machine| body(machine, handle))
    }

    /// Runs the body of a call that changes a whole GPU.
    pub(crate) fn change_parent<T>(
        &self,
        device: Opaque,
        what: &Change,
        body: impl FnOnce(&mut Machine, u32) -> Outcome<T>,
    ) -> Outcome<T> {
        self.change_gpu(device, what, |machine, gpu, _| body(machine, gpu))
    }

    /// Sets MIG mode and returns the activation status.
    pub(crate) fn set_mig_mode(&self, device: Opaque, enable: bool) -> Outcome<Return> {
        self.change_gpu(device, &Change::value(u32::from(enable)), |machine, gpu, status| match status {
            Some(status) => machine.set_mig_mode_pending(gpu, enable).map(|()| status),
            None => machine.set_mig_mode(gpu, enable, std::process::id()),
        })
    }

    fn change_gpu<T>(
        &self,
        device: Opaque,
        what: &Change,
        body: impl FnOnce(&mut Machine, u32, Option<Return>) -> Outcome<T>,
    ) -> Outcome<T> {
        let handle = device.open()?;
        self.change(About::of(handle), what, |machine, status| match resolve_device(machine, handle)? {
            Device::Gpu(index) => body(machine, index, status),
            Device::Mig(_) => Err(Return::InvalidArgument),
        })
    }

    /// Runs the body of a call that changes a GPU instance, or an object in it.
    pub(crate) fn change_gpu_instance<T>(
        &self,
        instance: Opaque,
        what: &Change,
        body: impl FnOnce(&mut Machine, GpuInstanceHandle) -> Outcome<T>,
    ) -> Outcome<T> {
        let (handle, about) = gpu_instance(instance)?;
        self.change(about, what, |machine, _| body(machine, handle))
    }

    /// Runs the body of a call that changes a compute instance.
    pub(crate) fn change_compute_instance<T>(
        &self,
        instance: Opaque,
        what: &Change,
        body: impl FnOnce(&mut Machine, ComputeInstanceHandle) -> Outcome<T>,
    ) -> Outcome<T> {
        let (handle, about) = compute_instance(instance)?;
        self.change(about, what, |machine, _| body(machine, handle))
    }
}

fn resolve_device(machine: &Machine, handle: Handle) -> Outcome<Device> {
    match handle {
        Handle::Gpu(handle) => machine.resolve_gpu(handle).map(|gpu| Device::Gpu(gpu.index)),
        Handle::MigDevice(handle) => machine.resolve_compute_instance(handle).map(|_| Device::Mig(handle)),
        Handle::GpuInstance(_) | Handle::ComputeInstance(_) => Err(Return::InvalidArgument),
    }
}

fn gpu_instance(instance: Opaque) -> Outcome<(GpuInstanceHandle, About)> {
    match instance.open()? {
        handle @ Handle::GpuInstance(of) => Ok((of, About::of(handle))),
        Handle::Gpu(_) | Handle::MigDevice(_) | Handle::ComputeInstance(_) => Err(Return::InvalidArgument),
    }
}

fn compute_instance(instance: Opaque) -> Outcome<(ComputeInstanceHandle, About)> {
    match instance.open()? {
        handle @ Handle::ComputeInstance(of) => Ok((of, About::of(handle))),
        Handle::Gpu(_) | Handle::MigDevice(_) | Handle::GpuInstance(_) => Err(Return::InvalidArgument),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panic_becomes_unknown_error() {
        assert_eq!(guard(|| panic!("of a bug")), 999);
        assert_eq!(guard(|| Err(Return::InUse)), 19);
        assert_eq!(guard(|| Ok(())), 0);
        assert_eq!(run("nvmlTest", |_| panic!("never reached without a session")), 1);
    }
}
