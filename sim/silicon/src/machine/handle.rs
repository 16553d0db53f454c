//! Handles: references of a client to a GPU, a GPU instance or a compute instance.
//!
//! Each handle has a generation. If an object is destroyed and replaced, the new object has another
//! generation. A handle is packed into 64 bits, which the simulated library returns as a pointer.

/// A handle of a physical GPU. Its generation is the number of the boot, because a GPU exists from
/// one boot to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GpuHandle {
    /// Index of the GPU.
    pub gpu: u32,
    /// Number of the boot in which the handle was returned.
    pub boot: u64,
}

/// A handle of a GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GpuInstanceHandle {
    /// Index of the GPU.
    pub gpu: u32,
    /// GPU instance id.
    pub id: u32,
    /// Generation of the instance.
    pub generation: u64,
}

/// A handle of a compute instance. Used as a device handle, it refers to the MIG device of the
/// compute instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ComputeInstanceHandle {
    /// Index of the GPU.
    pub gpu: u32,
    /// GPU instance id.
    pub gpu_instance: u32,
    /// Compute instance id.
    pub id: u32,
    /// Generation of the compute instance.
    pub generation: u64,
}

/// Any handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Handle {
    /// `nvmlDevice_t` of a physical GPU.
    Gpu(GpuHandle),
    /// `nvmlDevice_t` of a MIG device.
    MigDevice(ComputeInstanceHandle),
    /// `nvmlGpuInstance_t`.
    GpuInstance(GpuInstanceHandle),
    /// `nvmlComputeInstance_t`.
    ComputeInstance(ComputeInstanceHandle),
}

// Layout of the 64 bits: kind 4 bits, GPU 8, GPU instance 4, compute instance 4, generation 44.
const GENERATION_BITS: u32 = 44;
const GENERATION_MASK: u64 = (1 << GENERATION_BITS) - 1;
/// Tag in the upper bits of the kind. With the tag, an arbitrary pointer rarely looks like a
/// handle.
const TAG: u64 = 0b1010;

impl Handle {
    /// Packs the handle into 64 bits. The result is never 0.
    #[must_use]
    pub fn pack(self) -> u64 {
        let (kind, gpu, gi, ci, generation) = match self {
            Handle::Gpu(h) => (0, h.gpu, 0, 0, h.boot),
            Handle::MigDevice(h) => (1, h.gpu, h.gpu_instance, h.id, h.generation),
            Handle::GpuInstance(h) => (2, h.gpu, h.id, 0, h.generation),
            Handle::ComputeInstance(h) => (3, h.gpu, h.gpu_instance, h.id, h.generation),
        };
        let kind = (TAG & 0b1100) | kind;
        kind << 60
            | u64::from(gpu & 0xff) << 52
            | u64::from(gi & 0xf) << 48
            | u64::from(ci & 0xf) << 44
            | generation & GENERATION_MASK
    }

    /// Unpacks 64 bits. Returns `None` if the bits are not a handle.
    #[must_use]
    pub fn unpack(bits: u64) -> Option<Self> {
        if bits >> 62 != TAG >> 2 {
            return None;
        }
        let gpu = (bits >> 52 & 0xff) as u32;
        let gi = (bits >> 48 & 0xf) as u32;
        let ci = (bits >> 44 & 0xf) as u32;
        let generation = bits & GENERATION_MASK;
        Some(match bits >> 60 & 0b11 {
            0 => Handle::Gpu(GpuHandle { gpu, boot: generation }),
            1 => Handle::MigDevice(ComputeInstanceHandle { gpu, gpu_instance: gi, id: ci, generation }),
            2 => Handle::GpuInstance(GpuInstanceHandle { gpu, id: gi, generation }),
            _ => Handle::ComputeInstance(ComputeInstanceHandle { gpu, gpu_instance: gi, id: ci, generation }),
        })
    }

    /// Returns the index of the GPU.
    #[must_use]
    pub fn gpu(self) -> u32 {
        match self {
            Handle::Gpu(h) => h.gpu,
            Handle::GpuInstance(h) => h.gpu,
            Handle::MigDevice(h) | Handle::ComputeInstance(h) => h.gpu,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_unpack_and_other_bits_do_not() {
        let mut tried = 0;
        for gpu in [0, 7, 63] {
            for id in 0..15 {
                for generation in [1, 77, GENERATION_MASK] {
                    let ci = ComputeInstanceHandle { gpu, gpu_instance: id, id: id % 8, generation };
                    for handle in [
                        Handle::Gpu(GpuHandle { gpu, boot: generation }),
                        Handle::MigDevice(ci),
                        Handle::GpuInstance(GpuInstanceHandle { gpu, id, generation }),
                        Handle::ComputeInstance(ci),
                    ] {
                        assert_eq!(Handle::unpack(handle.pack()), Some(handle));
                        assert_eq!(handle.gpu(), gpu);
                        tried += 1;
                    }
                }
            }
        }
        println!("{tried} handles packed and read back");
        for stray in [0, 1, 0x7fff_ffff_ffff, u64::MAX] {
            assert_eq!(Handle::unpack(stray), None);
        }
    }
}
