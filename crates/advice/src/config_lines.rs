//! The config lines of an answer.

use std::fmt::Write as _;

use gpush_api::{GpuIndex, MemoryLimit, Mode, Percentage};
use gpush_core::{config::Isolation, selector};

use crate::{leaf::Leaf, needs::Needs};

/// The content of the rule of a group of GPUs.
pub(crate) struct RuleText<'a> {
    pub(crate) needs: &'a Needs,
    pub(crate) leaf: Leaf,
    /// Indexes of the GPUs.
    pub(crate) gpus: &'a [GpuIndex],
    /// Name of the model.
    pub(crate) model: &'a str,
    /// Memory of one GPU in MiB.
    pub(crate) memory_mib: u64,
    /// Leases on one GPU.
    pub(crate) per_gpu: u32,
    /// Entries of the layout; empty without MIG.
    pub(crate) layout: &'a [String],
    /// Profiles that fit in addition to the layout.
    pub(crate) spare: &'a [String],
}

/// Column of the comments after a key.
const COMMENT: usize = 26;

/// Returns the mode of the rule for an answer. One lease on a GPU needs no time-slicing.
pub(crate) fn mode(leaf: Leaf, per_gpu: u32) -> Mode {
    match leaf {
        Leaf::Timeslice | Leaf::ManagedTimeslice | Leaf::Hami if per_gpu <= 1 => Mode::Exclusive,
        leaf => leaf.mode(),
    }
}

/// Returns the rule as TOML with comments.
pub(crate) fn rule(text: &RuleText<'_>) -> String {
    let mut out = "[[gpu]]\n".to_owned();
    let ranges = selector::ranges(text.gpus.iter().copied());
    let ranges: Vec<String> = ranges.iter().map(|range| format!("\"{range}\"")).collect();
    let selectors = match ranges.as_slice() {
        [one] => one.clone(),
        several => format!("[{}]", several.join(", ")),
    };
    line(&mut out, &format!("match = {selectors}"), &format!("{} x {}", text.gpus.len(), text.model));
    let mode = mode(text.leaf, text.per_gpu);
    line(&mut out, &format!("mode = \"{}\"", mode.name()), "");
    match text.leaf {
        _ if mode == Mode::Exclusive => {}
        Leaf::Mig => {
            let entries: Vec<String> = text.layout.iter().map(|entry| format!("\"{entry}\"")).collect();
            line(&mut out, &format!("layout = [{}]", entries.join(", ")), &also(text.spare));
        }
        Leaf::Mps => {
            let percentage = Percentage::of_tenths(tenths_of(text.per_gpu)).unwrap_or(Percentage::ALL);
            let limit = memory_limit(text);
            let mps = format!("mps = {{ percentage = {percentage}, memory = \"{limit}\", users = \"many\" }}");
            line(&mut out, &mps, "");
            out += "# users = \"many\" needs driver 555; leave it out if all programs run as one user\n";
        }
        Leaf::Timeslice | Leaf::ManagedTimeslice => {
            line(&mut out, &format!("timeslice = {{ replicas = {} }}", text.per_gpu), "");
        }
        Leaf::Hami => {
            line(&mut out, &format!("timeslice = {{ replicas = {} }}", text.per_gpu), "");
            out += &hami(text);
        }
        Leaf::NoSharing => {}
    }
    // Without a required lease, any process may use the devices of another tenant.
    if text.needs.isolation == Isolation::Hard || text.leaf == Leaf::NoSharing {
        line(&mut out, "lease = \"required\"", "");
    }
    let isolation = match text.leaf {
        // The mechanism isolates, so the tenants may need it.
        Leaf::NoSharing | Leaf::Mig => text.needs.isolation,
        Leaf::Mps | Leaf::Hami | Leaf::Timeslice | Leaf::ManagedTimeslice => Isolation::Shared,
    };
    if text.needs.tenants > 1 {
        line(&mut out, &format!("isolation = \"{}\"", isolation.name()), "");
    }
    let is_usual = text.needs.workload.usual_leases().is_none_or(|usual| usual.contains(&text.per_gpu));
    let shares = !matches!(text.leaf, Leaf::NoSharing | Leaf::Mig);
    if is_usual || !shares {
        line(&mut out, &format!("workload = \"{}\"", text.needs.workload.name()), "");
    }
    out
}

/// Returns the table that hard isolation needs, before the rules.
pub(crate) fn processes(needs: &Needs) -> &'static str {
    // A single tenant needs no isolation from others.
    if needs.tenants == 1 {
        return "";
    }
    match needs.isolation {
        Isolation::Hard => "[processes]\nunleased = \"end\"        # end processes that have no lease\n",
        Isolation::Shared => "",
    }
}

/// Appends a key, with a comment.
fn line(out: &mut String, key: &str, comment: &str) {
    let _ = if comment.is_empty() { writeln!(out, "{key}") } else { writeln!(out, "{key:<COMMENT$}# {comment}") };
}

fn also(spare: &[String]) -> String {
    if spare.is_empty() { String::new() } else { format!("also fits: {}", spare.join(", ")) }
}

/// Returns an equal part of a GPU in tenths of a percent, rounded down.
fn tenths_of(leases: u32) -> u16 {
    u16::try_from(1000 / leases.max(1)).unwrap_or(1000).max(1)
}

/// Returns an equal part of the memory, or the demand of a tenant if it is known.
fn memory_limit(text: &RuleText<'_>) -> String {
    let equal = text.memory_mib / u64::from(text.per_gpu.max(1));
    let own = text.needs.demand.memory_mib.map_or(equal, |own| own.min(equal));
    MemoryLimit::of_mib(own).map_or_else(|| format!("{own}M"), |limit| limit.to_string())
}

/// Returns the variables that each program of a tenant needs, as comments.
fn hami(text: &RuleText<'_>) -> String {
    let compute = text.needs.demand.compute.map_or_else(
        || 100 / text.per_gpu.max(1),
        // HAMi takes whole percents.
        |part| u32::from(part.tenths()).div_ceil(10),
    );
    let equal = text.memory_mib / u64::from(text.per_gpu.max(1));
    let memory_mib = text.needs.demand.memory_mib.map_or(equal, |own| own.min(equal));
    let mut out = "# In the environment of each program of a tenant:\n".to_owned();
    for variable in [
        "LD_PRELOAD=/PATH/libvgpu.so".to_owned(),
        "CUDA_DEVICE_ORDER=PCI_BUS_ID".to_owned(),
        format!("CUDA_DEVICE_MEMORY_LIMIT={memory_mib}m"),
        format!("CUDA_DEVICE_SM_LIMIT={compute}"),
        "CUDA_DEVICE_MEMORY_SHARED_CACHE=/PATH/OF/TENANT/cache".to_owned(),
    ] {
        let _ = writeln!(out, "#   {variable}");
    }
    out
}
