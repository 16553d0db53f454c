//! The driver layer under test on a simulated host: [`Hardware`] with a separate worker.

use std::{path::Path, time::Duration};

use gpush_api::{GpuInstance, GpuUuid, Mig, Placement};
use gpush_nvml::{Hardware, Options, Reading};

use crate::host::{Host, program};

/// Returns the options of a worker that uses `host`. The deadlines are long enough for a busy
/// machine.
#[must_use]
pub fn options(host: &Host) -> Options {
    options_in(host.env().iter().map(|(key, value)| (key.as_str(), value.as_str())))
}

/// Returns the options of a worker with this environment. All tests of a program share one process,
/// so the program `env` sets the environment only in the worker.
pub fn options_in<'a>(env: impl Iterator<Item = (&'a str, &'a str)>) -> Options {
    let mut options = Options::new("/usr/bin/env");
    options.args = env.map(|(key, value)| format!("{key}={value}")).collect();
    options.args.push(program("driver_worker").display().to_string());
    options.deadlines.read = Duration::from_secs(60);
    options.deadlines.sample = Duration::from_secs(60);
    options.deadlines.sample_wait = Duration::from_secs(60);
    options
}

/// Opens the hardware of a simulated host.
#[must_use]
pub fn hardware(host: &Host) -> Hardware {
    Hardware::start(options(host))
}

/// Opens the hardware with the NVML library at any path.
#[must_use]
pub fn hardware_of(library: &Path) -> Hardware {
    let mut options = options_in(std::iter::empty());
    options.library = Some(library.to_owned());
    Hardware::start(options)
}

/// Returns the UUIDs of the GPUs, in the order of their indexes.
///
/// # Panics
/// If a GPU cannot be listed.
pub async fn uuids(hardware: &Hardware) -> Vec<GpuUuid> {
    let list = hardware.list().await.expect("the GPUs can be listed");
    list.into_iter().map(|listed| listed.identity.expect("the GPU has an identity").uuid).collect()
}

/// Returns the MIG part of a reading.
///
/// # Panics
/// If the GPU has no MIG.
#[must_use]
pub fn mig(reading: &Reading) -> &Mig {
    reading.mig.as_ref().expect("a GPU with MIG")
}

/// Creates a GPU instance of a profile at a start slice.
///
/// # Panics
/// If the profile or placement does not exist, or the driver refuses.
pub async fn create(hardware: &Hardware, uuid: &str, profile: &str, start: u8) -> GpuInstance {
    let (profile_id, placement) = place(hardware, uuid, profile, start).await;
    hardware.create_gpu_instance(&uuid.into(), profile_id, placement).await.expect("the instance can be created")
}

/// Returns the id of the profile with this name, and the profile's placement at a start slice.
///
/// # Panics
/// If the profile or the placement does not exist.
pub async fn place(hardware: &Hardware, uuid: &str, profile: &str, start: u8) -> (u32, Placement) {
    let reading = hardware.read(&uuid.into()).await.expect("the GPU can be read");
    let profile = mig(&reading).profiles.iter().find(|p| p.name == profile).expect("such a profile");
    let placement = profile.placements.iter().find(|p| p.start == start).expect("such a placement");
    (profile.id, *placement)
}
