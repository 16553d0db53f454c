//! Minor numbers of the capability devices `/dev/nvidia-caps/nvidia-cap<minor>`.
//!
//! The formula comes from the open kernel modules (`nvidia-caps`). Each GPU has 135 minor numbers,
//! 9 of them for each GPU instance.

/// Minor number of `mig/config`.
pub const CONFIG: u32 = 1;
/// Minor number of `mig/monitor`.
pub const MONITOR: u32 = 2;

/// Returns the minor number of `gpu<minor>/mig/gi<id>/access`.
#[must_use]
pub const fn gpu_instance(gpu_minor: u32, gpu_instance: u32) -> u32 {
    3 + 135 * gpu_minor + 9 * gpu_instance
}

/// Returns the minor number of `gpu<minor>/mig/gi<id>/ci<id>/access`.
#[must_use]
pub const fn compute_instance(gpu_minor: u32, gi: u32, ci: u32) -> u32 {
    gpu_instance(gpu_minor, gi) + 1 + ci
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minors_never_collide() {
        let mut seen = std::collections::BTreeSet::from([CONFIG, MONITOR]);
        let mut count = 2;
        for gpu in 0..32 {
            for gi in 0..15 {
                assert!(seen.insert(gpu_instance(gpu, gi)));
                for ci in 0..8 {
                    assert!(seen.insert(compute_instance(gpu, gi, ci)));
                    count += 1;
                }
                count += 1;
            }
        }
        println!("{count} minors, none twice");
        assert_eq!(gpu_instance(0, 0), 3);
        assert_eq!(compute_instance(1, 3, 0), 3 + 135 + 27 + 1);
    }
}
