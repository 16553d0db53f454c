//! Users and commands of the processes in a reading.

use gpush_api::{Mig, Process};
use gpush_host::identity::Users;
use gpush_nvml::Reading;

/// Adds uid, user and command line to the processes of a reading, if they are found in time.
pub(super) async fn identify(users: &Users, reading: &mut Reading) {
    let mut pids: Vec<u32> = processes(reading).filter_map(|process| process.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    let known = users.processes(pids).await;
    for process in processes_mut(reading) {
        let identity = process.pid.and_then(|pid| known.get(&pid));
        process.unidentified = identity.is_none();
        if let Some(identity) = identity {
            process.uid = Some(identity.uid);
            process.user.clone_from(&identity.user);
            process.command.clone_from(&identity.command);
        }
    }
}

fn processes(reading: &Reading) -> impl Iterator<Item = &Process> {
    let instances = reading.mig.iter().flat_map(|mig: &Mig| &mig.instances);
    let inner = instances
        .flat_map(|instance| instance.processes.iter().chain(instance.compute.iter().flat_map(|c| &c.processes)));
    reading.processes.iter().chain(inner)
}

fn processes_mut(reading: &mut Reading) -> impl Iterator<Item = &mut Process> {
    let instances = reading.mig.iter_mut().flat_map(|mig: &mut Mig| &mut mig.instances);
    let inner = instances.flat_map(|instance| {
        instance.processes.iter_mut().chain(instance.compute.iter_mut().flat_map(|c| &mut c.processes))
    });
    reading.processes.iter_mut().chain(inner)
}
