//! The part of a snapshot that a caller may see.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, Code, Gpu, GpuIndex, GpuUuid, Process};
use gpush_core::selector::Selector;
use gpush_nvml::DriverError;

use super::{GpuSnapshot, HostState, redact, words};
use crate::requests::caller::Viewer;

/// A snapshot that was taken after a reading.
#[derive(Debug, Clone)]
pub(crate) struct Observed {
    pub(crate) host: Arc<HostState>,
    /// UUIDs of the GPUs that gpushd is still reading.
    pub(crate) late: BTreeSet<GpuUuid>,
}

impl Observed {
    /// Returns whether `self` and `other` show the same snapshot.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.host, &other.host) && self.late == other.late
    }

    /// Returns the GPUs. Leaves out what `viewer` may not see.
    pub(crate) fn gpus(&self, viewer: Viewer) -> Vec<Gpu> {
        self.gpus_for_plans(viewer, &BTreeSet::new())
    }

    /// Returns the GPUs for use in plans. Leaves out the processes with a pid in `idle`, because they do no work for a
    /// user.
    pub(crate) fn gpus_for_plans(&self, viewer: Viewer, idle: &BTreeSet<u32>) -> Vec<Gpu> {
        self.host.gpus.iter().map(|gpu| self.one(gpu, viewer, idle)).collect()
    }

    /// Returns the viewer whose response `viewer` gets. If a user may see nothing more than everyone else, this is
    /// [`Viewer::Agent`], so that all such users share one response.
    pub(crate) fn viewer(&self, viewer: Viewer) -> Viewer {
        match viewer {
            Viewer::User(uid) if !self.host.gpus.iter().any(|gpu| concerns(&gpu.gpu, uid)) => Viewer::Agent,
            Viewer::Agent | Viewer::Log | Viewer::Admin | Viewer::Hook | Viewer::User(_) => viewer,
        }
    }

    /// Returns the GPU at a position. Leaves out what `viewer` may not see.
    pub(crate) fn at(&self, position: usize, viewer: Viewer) -> Gpu {
        self.one(&self.host.gpus[position], viewer, &BTreeSet::new())
    }

    fn one(&self, snapshot: &GpuSnapshot, viewer: Viewer, idle: &BTreeSet<u32>) -> Gpu {
        let mut gpu = snapshot.gpu.clone();
        gpu.stale |= self.late.contains(&gpu.uuid);
        // Call this before the redaction, which removes the pids.
        leave_out(&mut gpu, idle);
        redact::gpu(&mut gpu, viewer);
        gpu
    }
}

impl HostState {
    /// Returns the GPUs as last read. Leaves out what `viewer` may not see.
    pub(crate) fn gpus(self: &Arc<Self>, viewer: Viewer) -> Vec<Gpu> {
        Observed { host: Arc::clone(self), late: BTreeSet::new() }.gpus(viewer)
    }

    /// Checks that gpushd knows the GPUs of the host.
    ///
    /// # Errors
    /// If there is no driver, the driver has not answered yet, or gpushd has read nothing before maintenance began.
    pub(crate) fn check_known(&self) -> Result<(), ApiError> {
        match (&self.driver, &self.maintenance) {
            (_, Some(maintenance)) if !self.was_listed => Err(words::not_read_error(maintenance)),
            (Some(error), None) => Err(no_driver(error)),
            (_, _) => Ok(()),
        }
    }

    /// Returns a GPU by UUID.
    pub(crate) fn gpu(&self, uuid: &GpuUuid) -> Option<&GpuSnapshot> {
        self.gpus.iter().find(|gpu| gpu.gpu.uuid == *uuid).map(AsRef::as_ref)
    }

    /// Returns the positions of the GPUs that match the selectors.
    ///
    /// # Errors
    /// If a selector matches no GPU. If it names a GPU that the driver lists but cannot identify, the error says so.
    pub(crate) fn positions(&self, texts: &[&str]) -> Result<Vec<usize>, ApiError> {
        let gpus = self.selectable();
        Selector::resolve(texts, &gpus).map_err(|error| self.explain_absent(texts, error))
    }

    /// Returns the position of the only GPU that matches a selector.
    ///
    /// # Errors
    /// As [`HostState::positions`], and if the selector matches several GPUs.
    pub(crate) fn position(&self, text: &str) -> Result<usize, ApiError> {
        if let Some(at) = self.gpus.iter().position(|gpu| gpu.gpu.uuid == text) {
            return Ok(at);
        }
        match self.positions(&[text])?.as_slice() {
            [one] => Ok(*one),
            several => {
                Err(ApiError::new(Code::BadRequest, format!("{text:?} matches {} GPUs; name one", several.len()))
                    .hint("give an index, a UUID or a PCI address: `gpushctl gpu list` shows them"))
            }
        }
    }

    /// Returns the UUIDs of the GPUs that match selectors separated by commas.
    ///
    /// # Errors
    /// If a selector matches no GPU, or the driver has not listed the GPUs yet.
    pub(crate) fn named(&self, text: &str) -> Result<Vec<GpuUuid>, ApiError> {
        if let Some(error) = &self.driver {
            return Err(no_driver(error));
        }
        let positions = self.positions(&[text])?;
        Ok(positions.into_iter().map(|at| self.gpus[at].gpu.uuid.clone()).collect())
    }

    fn selectable(&self) -> Vec<&Gpu> {
        self.gpus.iter().map(|gpu| &gpu.gpu).collect()
    }

    /// If a selector names a GPU that the driver lists but cannot identify, returns the error about that GPU instead of
    /// `not found`.
    pub(crate) fn explain_absent<S: AsRef<str>>(&self, texts: &[S], error: ApiError) -> ApiError {
        if error.code != Code::NotFound {
            return error;
        }
        self.unidentified_among(texts).unwrap_or(error)
    }

    /// Returns the error about the first GPU that these selectors name by its index, if the driver lists this GPU but
    /// cannot identify it.
    pub(crate) fn unidentified_among<S: AsRef<str>>(&self, texts: &[S]) -> Option<ApiError> {
        let absent = Selector::first_absent(texts, &self.selectable())?;
        let listed = self.nameless.iter().find(|(index, _)| absent == *index);
        listed.map(|(index, why)| unidentified(*index, why))
    }
}

/// Returns the error that the driver cannot identify a GPU.
pub(crate) fn unidentified(index: GpuIndex, error: &DriverError) -> ApiError {
    error.to_api().context(format!("GPU {index} can't be identified"))
}

/// Returns the error that gpushd reports instead of the GPUs while it cannot show any GPU.
pub(crate) fn no_driver(error: &DriverError) -> ApiError {
    let message = error.to_api();
    if error.is_driver_unavailable() {
        return message;
    }
    // Replace the code: what matters is that the driver does not answer now.
    let answer = ApiError { code: Code::DriverUnavailable, ..message }.retryable();
    if answer.hint.is_some() { answer } else { answer.hint("see the log of gpushd: `journalctl -u gpushd`") }
}

/// Returns whether the user has a process on the GPU, or has set a cordon or the override of the GPU.
fn concerns(gpu: &Gpu, uid: u32) -> bool {
    let authors = gpu.cordons.iter().filter_map(|cordon| cordon.by.as_ref());
    let mut authors = authors.chain(gpu.overridden.as_ref().map(|one| &one.by));
    let own = |processes: &[Process]| processes.iter().any(|process| process.uid == Some(uid));
    let mut instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    authors.any(|author| author.uid == uid)
        || own(&gpu.processes)
        || instances
            .any(|instance| own(&instance.processes) || instance.compute.iter().any(|compute| own(&compute.processes)))
}

/// Removes the processes with a pid in `idle`.
fn leave_out(gpu: &mut Gpu, idle: &BTreeSet<u32>) {
    if idle.is_empty() {
        return;
    }
    let free = |all: &mut Vec<Process>| all.retain(|one| one.pid.is_none_or(|pid| !idle.contains(&pid)));
    free(&mut gpu.processes);
    for instance in gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances) {
        free(&mut instance.processes);
        instance.compute.iter_mut().for_each(|compute| free(&mut compute.processes));
    }
}
