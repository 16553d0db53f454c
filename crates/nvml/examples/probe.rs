//! Prints what the driver layer reads of each GPU of this host, as JSON. It changes nothing.
//!
//! `probe [LIBRARY]`: one object with the driver and its GPUs. A GPU that can't be read in full,
//! for want of the right to list instances say, still shows its identity, MIG mode and profiles.
//! Used by `tests/gpu/run` to compare with nvidia-smi, and to record fixtures.

use std::{path::Path, process::ExitCode};

use gpush_nvml::{
    DriverError,
    driver::{Driver, Gpu, ProfileCache},
};
use serde_json::{Value, json};

fn main() -> ExitCode {
    let library = std::env::args_os().nth(1);
    let report = Driver::load(library.as_deref().map(Path::new)).and_then(|driver| report(&driver));
    match report {
        Ok(report) => {
            println!("{report:#}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("probe: {error}");
            if let Some(hint) = error.hint() {
                eprintln!("hint: {hint}");
            }
            ExitCode::FAILURE
        }
    }
}

fn report(driver: &Driver) -> Result<Value, DriverError> {
    let gpus: Vec<_> = (0..driver.count()?)
        .map(|index| match driver.gpu_by_index(index) {
            Ok(gpu) => gpu_report(&gpu),
            Err(error) => json!({ "index": index, "error": error.to_string() }),
        })
        .collect();
    Ok(json!({ "driver": driver.info()?, "gpus": gpus }))
}

fn gpu_report(gpu: &Gpu<'_>) -> Value {
    match gpu.read(&mut ProfileCache::default()) {
        Ok(reading) => json!(reading),
        Err(error) => json!({
            "error": error.to_string(),
            "identity": gpu.identity().ok(),
            "memory": gpu.memory().ok(),
            "mig_mode": gpu.mig_mode().ok().flatten().map(|mode| (mode.enabled, mode.pending)),
            "profiles": gpu.memory().and_then(|memory| gpu.gpu_profiles(memory.total_mib)).ok(),
        }),
    }
}
