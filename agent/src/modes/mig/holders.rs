//! Holders of GPUs: processes with user, command and unit, and kernel modules. [`gpush_host::device_files`] searches the
//! open files of all processes.

use std::time::Duration;

use gpush_api::{ApiError, Code, GpuUuid, Holder, ProcessKind};
use gpush_core::holders as judged;
use gpush_host::{device_files, subtask};
use gpush_mps::daemon::server_processes::{Place, Server};

use super::MigMode;
use crate::{
    state::{readings::Readings, redact},
    system::host_services::HostServices,
};

/// Maximum duration of a search of all processes.
const SEARCH: Duration = Duration::from_secs(10);

/// Finds the holders of GPUs by UUID, see [`scan`].
///
/// # Errors
/// If gpushd does not know one of the GPUs, or cannot search the processes of the host in time.
pub(crate) async fn of(mig: &MigMode, uuids: &[GpuUuid]) -> Result<Vec<Holder>, ApiError> {
    scan(mig, &minors(&mig.driver.readings, uuids)?).await
}

/// Returns the minor numbers of GPUs.
///
/// # Errors
/// If gpushd does not know one of the GPUs.
pub(super) fn minors(readings: &Readings, uuids: &[GpuUuid]) -> Result<Vec<u32>, ApiError> {
    let host = readings.known()?;
    let minor = |uuid: &GpuUuid| {
        host.gpu(uuid).map(|gpu| gpu.gpu.minor).ok_or_else(|| {
            ApiError::new(Code::NotFound, format!("{uuid} does not exist any more"))
                .hint("`gpushctl status` shows the GPUs")
        })
    };
    uuids.iter().map(minor).collect()
}

/// Finds the processes that have a GPU with one of these minor numbers open, and the kernel modules that have GPUs open.
/// Leaves out gpushd's own processes.
///
/// # Errors
/// If gpushd cannot search the processes of the host in time.
pub(super) async fn scan(mig: &MigMode, minors: &[u32]) -> Result<Vec<Holder>, ApiError> {
    let own: Vec<u32> = std::iter::once(std::process::id()).chain(mig.driver.hardware.worker_pids()).collect();
    let (proc, minors, servers) = (mig.context.host_services.proc.clone(), minors.to_vec(), mig.mps.servers());
    let search = subtask::blocking(move || {
        let mut found = device_files::holders(&proc, &minors, &own)?;
        for holder in &mut found {
            let server = holder.pid.and_then(|pid| servers.of_process(pid, ProcessKind::Compute, Place::DeviceFiles));
            holder.mps = server.map(Server::describe);
            holder.mps_target = match server {
                Some(Server::Of(target)) => Some(target.name.clone()),
                Some(Server::Foreign) | None => None,
            };
        }
        found.extend(device_files::kernel_modules(&proc));
        Ok::<_, std::io::Error>(found)
    });
    let mut found = match tokio::time::timeout(SEARCH, search).await {
        Ok(Some(Ok(found))) => found,
        Ok(Some(Err(error))) => return Err(unknown(&error.to_string())),
        Ok(None) => return Err(unknown("gpushd is stopping")),
        Err(_) => {
            return Err(unknown(&format!("the search for these processes took longer than {}s", SEARCH.as_secs())));
        }
    };
    let processes: Vec<(u32, u32)> = found.iter().filter_map(|holder| Some((holder.pid?, holder.uid?))).collect();
    let mut commands = mig.context.users.commands(&mig.context.host_services.proc, &processes).await;
    for holder in &mut found {
        holder.command = holder.pid.and_then(|pid| commands.remove(&pid));
        if let Some(uid) = holder.uid {
            holder.user = mig.context.users.user(uid).await;
        }
    }
    Ok(found)
}

/// Returns whether a trusted user runs a fabric manager. Returns `false` if the search fails. gpushd then assumes that
/// a reset affects more GPUs, so more GPUs must be free.
pub(super) async fn fabric_manager_runs(host_services: &HostServices) -> bool {
    let proc = host_services.proc.clone();
    let search = subtask::blocking(move || device_files::fabric_manager_runs(&proc));
    matches!(tokio::time::timeout(SEARCH, search).await, Ok(Some(Ok(true))))
}

fn unknown(why: &str) -> ApiError {
    ApiError::new(Code::DriverError, "the processes that have the GPU open are unknown")
        .cause(why.to_owned())
        .hint("list these processes with `fuser -v /dev/nvidia*`, then try again")
        .retryable()
}

/// Two descriptions of a holder, as causes of an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeldBy {
    /// For every user.
    pub(crate) public: String,
    /// For administrators: with pid, user and command.
    pub(crate) in_full: String,
}

impl HeldBy {
    pub(crate) fn of(holder: &Holder) -> Self {
        let cause = |holder: &Holder| format!("held by {}", judged::describe(holder));
        Self { public: cause(&redact::blank_holder(holder.clone())), in_full: cause(holder) }
    }
}
