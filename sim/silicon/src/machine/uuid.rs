//! UUIDs of GPUs and MIG devices.
//!
//! The UUIDs are deterministic: equal descriptions give equal UUIDs. If an instance is destroyed
//! and created again in the same slot, it is the same MIG device, as with real drivers since R470.
//! So a UUID does not distinguish generations.

use uuid::Uuid;

use crate::description::DriverVersion;

/// Namespace of all simulated UUIDs.
const NAMESPACE: Uuid = Uuid::from_u128(0x6770_7573_682d_4d49_b16e_5369_6c69_636f);

/// Returns the `GPU-<uuid>` of a GPU. It depends on the host's seed, the GPU's index and the model.
#[must_use]
pub fn of_gpu(seed: u64, index: u32, model: &str) -> String {
    format!("GPU-{}", Uuid::new_v5(&NAMESPACE, format!("{seed}/{index}/{model}").as_bytes()))
}

/// First driver branch that gives MIG devices UUIDs of the form `MIG-<uuid>`.
const FIRST_WITH_OWN_UUIDS: u32 = 470;

/// Returns the UUID of a compute instance of the GPU with this UUID: `MIG-<uuid>`, or before R470
/// `MIG-GPU-<uuid>/<GPU instance id>/<compute instance id>`.
#[must_use]
pub fn of_mig_device(driver: DriverVersion, gpu: &str, gpu_instance: u32, compute_instance: u32) -> String {
    if driver.branch() < FIRST_WITH_OWN_UUIDS {
        return format!("MIG-{gpu}/{gpu_instance}/{compute_instance}");
    }
    format!("MIG-{}", Uuid::new_v5(&NAMESPACE, format!("{gpu}/{gpu_instance}/{compute_instance}").as_bytes()))
}

/// Returns a boot id in the form of `/proc/sys/kernel/random/boot_id`. Each boot must pass a
/// different `entropy`.
#[must_use]
pub fn of_boot(entropy: &str) -> String {
    Uuid::new_v5(&NAMESPACE, entropy.as_bytes()).to_string()
}
