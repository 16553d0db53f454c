//! The plugin with which a running slurmd finds GPUs.
//!
//! With `AutoDetect=nvml`, slurmd uses its plugin for NVML only if it can load NVML's library.
//! Otherwise slurmd writes a line to its log and numbers the devices as with `AutoDetect=off`. The
//! config files of Slurm do not show which of these two cases applies, but the files that slurmd
//! has mapped do. These rules were compared with slurmd 22.05.

/// Name of the plugin for NVML.
const NVML: &str = "gpu_nvml.so";

/// The GPU plugin of a running slurmd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GpuPlugin {
    /// slurmd finds GPUs through NVML.
    Nvml,
    /// slurmd uses the lines of gres.conf (`gpu_generic.so`), or finds GPUs of another kind.
    Other,
}

impl GpuPlugin {
    /// Finds the plugin in the text of `/proc/PID/maps` of slurmd. Returns `None` if slurmd has mapped
    /// no GPU plugin.
    #[must_use]
    pub fn in_maps(maps: &str) -> Option<Self> {
        let files = maps.lines().filter_map(|line| line.rsplit('/').next());
        let files = files.map(|file| file.trim_end_matches(" (deleted)"));
        files.fold(None, |found, file| match found {
            _ if file == NVML => Some(Self::Nvml),
            None if file.starts_with("gpu_") && file.ends_with(".so") => Some(Self::Other),
            found => found,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_is_found_among_the_files_that_slurmd_has_mapped() {
        let map = |file: &str| format!("7f2a00000000-7f2a00004000 r-xp 00001000 fe:00 5201 {file}\n");
        let libraries = map("/usr/lib/x86_64-linux-gnu/libc.so.6") + &map("/usr/lib/slurm-wlm/gres_gpu.so");
        assert_eq!(GpuPlugin::in_maps(&libraries), None);
        let generic = libraries.clone() + &map("/usr/lib/slurm-wlm/gpu_generic.so");
        assert_eq!(GpuPlugin::in_maps(&generic), Some(GpuPlugin::Other));
        let nvml = map("/usr/lib/slurm-wlm/gpu_generic.so") + &map("/opt/slurm/gpu_nvml.so (deleted)") + &libraries;
        assert_eq!(GpuPlugin::in_maps(&nvml), Some(GpuPlugin::Nvml));
    }
}
