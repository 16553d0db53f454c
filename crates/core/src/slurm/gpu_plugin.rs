//! The plugin with which a running slurmd finds GPUs.
//!
//! slurmd loads the plugin when it starts. gres.conf does not show which plugin slurmd uses, for two reasons.
//! `AutoDetect` can have changed since the start of slurmd. With `AutoDetect=nvml`, slurmd uses its plugin for NVML
//! only if slurmd can load NVML's library. Without this library, slurmd writes a line to its log and numbers the
//! devices as with `AutoDetect=off`. The files that slurmd has mapped show the plugin. These rules were compared with
//! slurmd 22.05 and 24.11.

/// The GPU plugin of a running slurmd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GpuPlugin {
    /// slurmd uses the lines of gres.conf (`gpu_generic.so`), or finds GPUs of another vendor.
    Other,
    /// slurmd finds NVIDIA GPUs without NVML (24.11 and later).
    Nvidia,
    /// slurmd finds GPUs through NVML.
    Nvml,
}

impl GpuPlugin {
    /// Finds the plugin in the text of `/proc/PID/maps` of slurmd. Returns `None` if slurmd has mapped
    /// no GPU plugin.
    #[must_use]
    pub fn in_maps(maps: &str) -> Option<Self> {
        let files = maps.lines().filter_map(|line| line.rsplit('/').next());
        let files = files.map(|file| file.trim_end_matches(" (deleted)"));
        files.filter_map(Self::of_file).max()
    }

    /// Finds the plugin in the texts of `/proc/PID/maps` of all processes that may be slurmd. Skips
    /// processes without a plugin, because any user can run a setuid program under the name of
    /// slurmd. Returns `None` if several slurmd use different plugins.
    pub fn agreed(maps: impl IntoIterator<Item = String>) -> Option<Self> {
        let mut plugins = maps.into_iter().filter_map(|maps| Self::in_maps(&maps));
        let first = plugins.next()?;
        plugins.all(|plugin| plugin == first).then_some(first)
    }

    /// Returns the plugin in a file.
    fn of_file(name: &str) -> Option<Self> {
        match name.strip_prefix("gpu_")?.strip_suffix(".so")? {
            "nvml" => Some(Self::Nvml),
            "nvidia" => Some(Self::Nvidia),
            _ => Some(Self::Other),
        }
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
        let nvidia = libraries.clone() + &map("/usr/lib/slurm-wlm/gpu_nvidia.so");
        assert_eq!(GpuPlugin::in_maps(&nvidia), Some(GpuPlugin::Nvidia));
        // Processes that are not slurmd, and children that slurmd has forked, do not change the result.
        let agreed = |maps: &[&String]| GpuPlugin::agreed(maps.iter().map(|maps| (*maps).clone()));
        assert_eq!(agreed(&[&libraries, &generic, &generic, &libraries]), Some(GpuPlugin::Other));
        assert_eq!((agreed(&[&generic, &nvml]), agreed(&[&libraries]), agreed(&[])), (None, None, None));
    }
}
