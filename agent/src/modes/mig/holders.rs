//! Processes that have a GPU open, with user and command. [`gpush_host::device_files`] searches the open files of all
//! processes.

use std::time::Duration;

use gpush_api::{ApiError, Code, Holder};
use gpush_host::device_files;

use super::MigMode;
use crate::host_services::HostServices;

/// Maximum duration of a search of all processes.
const SEARCH: Duration = Duration::from_secs(10);

/// Finds the processes that have a GPU with one of these minor numbers open. Leaves out gpushd's own processes.
///
/// # Errors
/// If gpushd cannot search the processes of the host in time.
pub(super) async fn scan(mig: &MigMode, minors: &[u32]) -> Result<Vec<Holder>, ApiError> {
    let status = mig.driver.hardware.status();
    let own = [Some(std::process::id()), status.worker];
    let own: Vec<u32> = own.into_iter().chain(status.abandoned.iter().map(|worker| worker.pid)).flatten().collect();
    let (proc, minors) = (mig.host_services.proc.clone(), minors.to_vec());
    let search = tokio::task::spawn_blocking(move || device_files::holders(&proc, &minors, &own));
    let mut found = match tokio::time::timeout(SEARCH, search).await {
        Ok(Ok(Ok(found))) => found,
        Ok(Ok(Err(error))) => return Err(unknown(&error.to_string())),
        Ok(Err(error)) => return Err(unknown(&error.to_string())),
        Err(_) => {
            return Err(unknown(&format!("the search for these processes took longer than {}s", SEARCH.as_secs())));
        }
    };
    let processes: Vec<(u32, u32)> = found.iter().filter_map(|holder| Some((holder.pid?, holder.uid?))).collect();
    let mut commands = mig.users.commands(&mig.host_services.proc, &processes).await;
    for holder in &mut found {
        holder.command = holder.pid.and_then(|pid| commands.remove(&pid));
        if let Some(uid) = holder.uid {
            holder.user = mig.users.user(uid).await;
        }
    }
    Ok(found)
}

/// Returns whether a trusted user runs a fabric manager. Returns `false` if the search fails. gpushd then assumes that
/// a reset affects more GPUs, so more GPUs must be free.
pub(super) async fn fabric_manager_runs(host_services: &HostServices) -> bool {
    let proc = host_services.proc.clone();
    let search = tokio::task::spawn_blocking(move || device_files::fabric_manager_runs(&proc));
    matches!(tokio::time::timeout(SEARCH, search).await, Ok(Ok(Ok(true))))
}

fn unknown(why: &str) -> ApiError {
    ApiError::new(Code::DriverError, "cannot reset the GPU: the processes that have it open are unknown")
        .cause(why.to_owned())
        .hint("run `fuser -v /dev/nvidia*` to see which processes have GPUs open, then try again")
        .retryable()
}

/// Removes the pid, user and command of a process, because only administrators may see these details.
pub(super) fn blank(holder: Holder) -> Holder {
    Holder { pid: None, uid: None, user: None, command: None, ..holder }
}
