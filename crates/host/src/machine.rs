//! Describes the host for the log, so that a log file shows which system wrote it.

use sysinfo::{MemoryRefreshKind, RefreshKind, System};

/// Returns the host's name; `None` if it has none.
#[must_use]
pub fn name() -> Option<String> {
    System::host_name()
}

/// Returns the host's name, operating system, kernel, architecture, CPUs and memory as text.
pub fn describe() -> String {
    let system =
        System::new_with_specifics(RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram()));
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    line(
        System::host_name().as_deref(),
        System::long_os_version().as_deref(),
        System::kernel_version().as_deref(),
        &format!("{}, {cpus} CPUs, {} MiB memory", System::cpu_arch(), system.total_memory() >> 20),
    )
}

fn line(name: Option<&str>, os: Option<&str>, kernel: Option<&str>, hardware: &str) -> String {
    let name = name.unwrap_or("a host without a name");
    let os = os.unwrap_or("an unknown operating system");
    format!("{name}: {os}, kernel {}, {hardware}", kernel.unwrap_or("unknown"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn description_names_kernel_cpus_and_memory() {
        let text = describe();
        assert!(text.contains(", kernel ") && text.contains(" CPUs, ") && !text.contains(" 0 MiB"), "{text}");
    }

    #[test]
    fn unknown_parts_are_named_as_unknown() {
        let text = line(None, None, None, "x86_64");
        assert_eq!(text, "a host without a name: an unknown operating system, kernel unknown, x86_64");
    }
}
