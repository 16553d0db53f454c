//! Durations of driver calls as on hardware, for hosts with `latencies = true`.
//!
//! Each kind of call has a range of durations: 0.1 to 1 s for the creation or destruction of a GPU
//! instance, less for a compute instance, and seconds for a change of the MIG mode. The ranges come
//! from maintainers of the DRA driver, and from recorded runs. Within its range, a duration depends
//! only on the call and the state. So a script takes the same time in every run.

use std::time::Duration;

/// Ranges of durations in milliseconds, by prefix of the function's name.
const RANGES: &[(&str, u64, u64)] = &[
    ("nvmlDeviceCreateGpuInstance", 100, 400),
    ("nvmlGpuInstanceDestroy", 200, 1000),
    ("nvmlGpuInstanceCreateComputeInstance", 30, 120),
    ("nvmlComputeInstanceDestroy", 20, 100),
    ("nvmlDeviceSetMigMode", 800, 2000),
    ("nvmlInit", 20, 60),
];

/// Returns the duration of a call, which is zero for calls that only read.
#[must_use]
pub fn of(function: &str, gpu: u32, generation: u64) -> Duration {
    let Some(&(_, least, most)) = RANGES.iter().find(|(name, ..)| function.starts_with(name)) else {
        return Duration::ZERO;
    };
    let mixed = crate::fingerprint::of(&format!("{function}/{gpu}/{generation}"));
    Duration::from_millis(least + (mixed >> 17) % (most - least + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_in_range_and_repeat() {
        let mut tried = 0;
        for &(name, least, most) in RANGES {
            for generation in 0..200 {
                let took = of(name, 3, generation);
                assert!(took >= Duration::from_millis(least) && took <= Duration::from_millis(most));
                assert_eq!(took, of(name, 3, generation));
                tried += 1;
            }
        }
        println!("{tried} latencies in range");
        assert_eq!(of("nvmlDeviceGetCount_v2", 0, 0), Duration::ZERO);
    }
}
