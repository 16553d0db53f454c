//! Exports the instances of a host's GPUs as a mig-parted file.
//!
//! A mig-parted file contains only counts of MIG devices. The format cannot express their
//! placements, or which devices share a GPU instance. The export reports what the file omits. To
//! detect omissions, the export plans the content of the file on the current GPU: the file is
//! complete if the plan has no steps.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use gpush_api::{ApiError, Code, Gpu, GpuState, Mig};

use super::double_memory;
use crate::{
    geometry::Geometry,
    layout::{Entry, Layout},
    plan::{self, Target},
    selector::inventory,
};

/// An exported file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The file as YAML.
    pub text: String,
    /// What the file omits, one sentence each.
    pub remarks: Vec<String>,
}

/// The state of one GPU as mig-parted expresses it: MIG mode off, or a count for each profile.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum ExportedState {
    Off,
    On(BTreeMap<String, u8>),
}

/// Exports the current state of the GPUs for which `chosen` returns true, under one label.
///
/// # Errors
/// None of the chosen GPUs supports MIG.
pub fn export(gpus: &[Gpu], label: &str, chosen: impl Fn(&Gpu) -> bool) -> Result<Exported, ApiError> {
    let mut remarks = Vec::new();
    // The groups are in the order of their first GPU.
    let mut groups: Vec<(ExportedState, Vec<usize>)> = Vec::new();
    for (at, gpu) in gpus.iter().enumerate().filter(|(_, gpu)| chosen(gpu)) {
        let Some(state) = state(gpu, &mut remarks) else { continue };
        match groups.iter_mut().find(|(known, _)| *known == state) {
            Some((_, members)) => members.push(at),
            None => groups.push((state, vec![at])),
        }
    }
    if !gpus.iter().any(|gpu| gpu.mig.is_some() && chosen(gpu)) {
        let error = ApiError::new(Code::NotFound, "nothing to export: none of the selected GPUs supports MIG");
        let error = remarks.into_iter().fold(error, ApiError::cause);
        return Err(error.cause(inventory(gpus)).hint("`gpushctl status` shows the GPUs of this host"));
    }
    let mut text = String::from("version: v1\nmig-configs:\n");
    let _ = writeln!(text, "  {}:", key(label));
    for (state, members) in &groups {
        for (filter, devices) in split(gpus, members) {
            let mut lines = Vec::new();
            match filter.as_slice() {
                [] => {}
                [one] => lines.push(format!("device-filter: \"{one}\"")),
                several => lines.push(format!("device-filter: [\"{}\"]", several.join("\", \""))),
            }
            lines.push(format!("devices: {devices}"));
            match state {
                ExportedState::Off => lines.push("mig-enabled: false".to_owned()),
                ExportedState::On(counts) => {
                    lines.push("mig-enabled: true".to_owned());
                    lines.push(if counts.is_empty() { "mig-devices: {}" } else { "mig-devices:" }.to_owned());
                    lines.extend(counts.iter().map(|(profile, count)| format!("  \"{profile}\": {count}")));
                }
            }
            for (n, line) in lines.iter().enumerate() {
                let _ = writeln!(text, "    {} {line}", if n == 0 { "-" } else { " " });
            }
        }
    }
    Ok(Exported { text, remarks })
}

/// Returns the content of the file for a GPU; `None` if the GPU could not be read.
fn state(gpu: &Gpu, remarks: &mut Vec<String>) -> Option<ExportedState> {
    let who = format!("GPU {}", gpu.index);
    match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Changing | GpuState::Held => {}
        // Only the last reading is available, and the state may have changed since then. So leave
        // this GPU out.
        GpuState::Maintenance => {
            remarks.push(format!("{who} is left out: the host is in maintenance"));
            return None;
        }
        GpuState::Unknown => {
            remarks.push(format!("{who} is left out: it can't be read"));
            return None;
        }
        GpuState::Lost => {
            remarks.push(format!("{who} is left out: it has fallen off the bus"));
            return None;
        }
    }
    // A mig-parted file must include GPUs without MIG too.
    let Some(mig) = &gpu.mig else { return Some(ExportedState::Off) };
    if mig.reset_pending {
        let to = if mig.pending_mode() { "on" } else { "off" };
        remarks
            .push(format!("{who}: MIG mode will be {to} after the next reset, but the file contains the present mode"));
    }
    if !mig.enabled {
        return Some(ExportedState::Off);
    }
    let mut counts: BTreeMap<String, u8> = BTreeMap::new();
    for instance in &mig.instances {
        let name = format!("{}@{} (GPU instance {})", instance.profile, instance.placement.start, instance.id);
        if instance.compute.is_empty() {
            remarks.push(format!(
                "{who}: {name} is left out: the GPU instance has no compute instance, and mig-parted counts only \
                compute instances"
            ));
        }
        for compute in &instance.compute {
            match entry(&compute.profile) {
                Some(entry) => *counts.entry(double_memory::counted_as(&entry)).or_default() += 1,
                None => {
                    remarks.push(format!("{who}: a compute instance of {name} is left out: its profile has no name"));
                }
            }
        }
    }
    if mig.instances.iter().all(|i| !i.compute.is_empty() && i.compute.iter().all(|c| entry(&c.profile).is_some()))
        && !is_complete(mig, &counts)
    {
        remarks.push(format!(
            "{who}: the file contains only the number of compute instances of each profile, so the layout in the file \
            differs from the layout of the GPU"
        ));
    }
    Some(ExportedState::On(counts))
}

/// Parses a profile name as a layout entry; `None` if the text is not exactly one entry.
fn entry(profile: &str) -> Option<Entry> {
    match Layout::parse(profile).ok()?.entries.as_slice() {
        [entry] => Some(entry.clone()),
        _ => None,
    }
}

/// Returns whether a plan for these counts would leave the GPU unchanged.
fn is_complete(mig: &Mig, counts: &BTreeMap<String, u8>) -> bool {
    let entries = counts.iter().filter_map(|(name, count)| Some(Entry { count: *count, ..entry(name)? })).collect();
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    let target = Target::resolve(&geometry, &double_memory::as_on_gpu(&Layout { entries }, mig));
    target.and_then(|target| plan::plan(&geometry, &mig.instances, &target)).is_ok_and(|plan| plan.steps.is_empty())
}

/// Returns filters and values of `devices` that together match exactly the GPUs in `members`. If
/// all GPUs of a model are members, the filter is the id of the model. Other members are listed by
/// their indexes.
fn split(gpus: &[Gpu], members: &[usize]) -> Vec<(Vec<String>, String)> {
    if members.len() == gpus.len() {
        return vec![(Vec::new(), "all".to_owned())];
    }
    let ids: BTreeSet<Option<&str>> = gpus.iter().map(|gpu| gpu.pci_id.as_deref()).collect();
    let distinguished = ids.len() > 1 && !ids.contains(&None);
    let all_of = |id: &str| {
        let mut of = (0..gpus.len()).filter(|at| gpus[*at].pci_id.as_deref() == Some(id));
        of.all(|at| members.contains(&at))
    };
    let mut whole: Vec<String> = Vec::new();
    let mut single: Vec<usize> = Vec::new();
    for at in members {
        match gpus[*at].pci_id.as_deref().filter(|_| distinguished) {
            Some(id) if all_of(id) => {
                if !whole.iter().any(|known| known == id) {
                    whole.push(id.to_owned());
                }
            }
            Some(_) | None => single.push(*at),
        }
    }
    let mut groups = Vec::new();
    if !whole.is_empty() {
        groups.push((whole, "all".to_owned()));
    }
    if !single.is_empty() {
        let indexes: Vec<String> = single.iter().map(|at| gpus[*at].index.to_string()).collect();
        let mut filter: Vec<String> = Vec::new();
        for id in single.iter().filter_map(|at| gpus[*at].pci_id.clone()).filter(|_| distinguished) {
            if !filter.contains(&id) {
                filter.push(id);
            }
        }
        groups.push((filter, format!("[{}]", indexes.join(", "))));
    }
    groups
}

/// Formats a label as a YAML key. Quotes the label if YAML might not read the label as text.
fn key(label: &str) -> String {
    const WORDS: [&str; 9] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    let simple = label.starts_with(|c: char| c.is_ascii_alphabetic())
        && label.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
        && !WORDS.contains(&label.to_ascii_lowercase().as_str());
    // A JSON string is also a YAML string.
    if simple { label.to_owned() } else { serde_json::Value::from(label).to_string() }
}
