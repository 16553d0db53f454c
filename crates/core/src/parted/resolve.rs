//! Resolves a label: finds the layouts that it gives to the GPUs of a host.
//!
//! The result identifies GPUs by UUID, so that gpushd plans for the same GPUs even if indexes
//! change.

use gpush_api::{ApiError, Code, Gpu, GpuIndex, GpuLayout, GpuState, Remedy};

use super::{DesiredMode, Devices, File, Group, Label, double_memory};
use crate::{
    quote::Quoted,
    selector::{Selector, inventory},
};

/// The layouts that a label gives to the GPUs of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// The layout of each GPU that the label configures, in the order of the host's GPUs.
    pub layouts: Vec<GpuLayout>,
    /// GPUs that the label skips because they do not support MIG, one sentence each.
    pub remarks: Vec<String>,
}

/// Resolves `label` for the GPUs of a host. The selectors in `only` limit the label to some GPUs;
/// an empty list means all GPUs.
///
/// A group with `devices: all` and MIG on skips GPUs without MIG, as in mig-parted, unless `only`
/// selects them.
///
/// # Errors
/// The label names GPUs that the host does not have, the label configures no GPU, or too little is
/// known about the host.
pub fn resolve(file: &File, label: &Label, gpus: &[Gpu], only: &[String]) -> Result<Resolved, ApiError> {
    let chosen = match only {
        [] => None,
        selectors => Some(Selector::resolve(selectors, gpus)?),
    };
    let place = |group: &Group| format!("{}:{}", file.path, group.line);
    let mut wants: Vec<Option<&Group>> = vec![None; gpus.len()];
    for group in &label.groups {
        let parts = matching_filter(group, gpus, &place(group))?;
        for at in matching_devices(group, gpus, &parts, &place(group))? {
            // If several groups match a GPU, the last group applies, as in mig-parted.
            wants[at] = Some(group);
        }
    }
    if let Some(chosen) = &chosen {
        let silent: Vec<String> =
            chosen.iter().filter(|at| wants[**at].is_none()).map(|at| gpus[*at].index.to_string()).collect();
        if !silent.is_empty() {
            let message = format!("label {} has no group for GPU {}", Quoted(&label.name), silent.join(", "));
            return Err(ApiError::new(Code::NotFound, message)
                .hint("leave the GPU out of --gpu, or add a group for it to the file"));
        }
    }
    let meant = |at: &usize| chosen.as_ref().is_none_or(|chosen| chosen.contains(at));
    let left_out: Vec<usize> = (0..gpus.len())
        .filter(|at| chosen.is_none() && wants[*at].is_some_and(|group| skips(group, &gpus[*at])))
        .collect();
    left_out.iter().for_each(|at| wants[*at] = None);
    if let Some(at) = left_out.first()
        && wants.iter().all(Option::is_none)
    {
        let message = format!("label {} configures no GPU: no GPU that it selects supports MIG", Quoted(&label.name));
        return Err(ApiError::new(Code::Unsupported, message)
            .cause(inventory(gpus))
            .hint(format!("`gpushctl gpu show {}` shows what the GPU can do", gpus[*at].index)));
    }
    let layouts: Vec<GpuLayout> = (0..gpus.len())
        .filter(meant)
        .filter_map(|at| {
            let want = &wants[at]?.want;
            let (mig, layout) = match want {
                DesiredMode::Off => (false, Vec::new()),
                DesiredMode::On(layout) if layout.is_none() => (true, Vec::new()),
                DesiredMode::On(layout) => (
                    true,
                    match &gpus[at].mig {
                        Some(mig) => double_memory::as_on_gpu(layout, mig).canonical(),
                        None => layout.canonical(),
                    },
                ),
            };
            Some(GpuLayout { gpu: gpus[at].uuid.to_string(), mig, layout })
        })
        .collect();
    if layouts.is_empty() {
        let mut error =
            ApiError::new(Code::NotFound, format!("label {} selects no GPU of this host", Quoted(&label.name)));
        for group in label.groups.iter().take(8) {
            let ids: Vec<String> = group.filter.iter().map(ToString::to_string).collect();
            error = error.cause(format!("{}: this group is only for the PCI ids {}", place(group), ids.join(", ")));
        }
        let ids: Vec<&str> = gpus.iter().filter_map(|gpu| gpu.pci_id.as_deref()).collect();
        let mut distinct = ids.clone();
        distinct.dedup();
        return Err(error
            .cause(format!("{} ({})", inventory(gpus), distinct.join(", ")))
            .hint("choose a label that selects these GPUs, or add a group with their PCI ids"));
    }
    let remark = |at: &usize| {
        format!(
            "GPU {} ({}) is left out: it does not support \
        MIG",
            gpus[*at].index, gpus[*at].name
        )
    };
    Ok(Resolved { layouts, remarks: left_out.iter().map(remark).collect() })
}

/// Returns whether the group skips a GPU, because the group enables MIG on all GPUs and this GPU
/// does not support MIG. A GPU that cannot be read may support MIG. Such a GPU is not skipped, and
/// its plan reports the problem.
fn skips(group: &Group, gpu: &Gpu) -> bool {
    let readable = match gpu.state {
        GpuState::Ready | GpuState::Changing | GpuState::Cordoned | GpuState::Degraded | GpuState::Held => true,
        GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    let turns_mig_on = match group.want {
        DesiredMode::On(_) => true,
        DesiredMode::Off => false,
    };
    gpu.mig.is_none() && readable && turns_mig_on && group.devices == Devices::All
}

/// Returns the positions of the GPUs that match the filter.
fn matching_filter(group: &Group, gpus: &[Gpu], place: &str) -> Result<Vec<usize>, ApiError> {
    if group.filter.is_empty() {
        return Ok((0..gpus.len()).collect());
    }
    let mut through = Vec::new();
    for (at, gpu) in gpus.iter().enumerate() {
        let answers: Vec<Option<bool>> = group.filter.iter().map(|id| id.matches(gpu)).collect();
        if answers.contains(&Some(true)) {
            through.push(at);
        } else if answers.contains(&None) {
            let message = format!("the PCI ids of GPU {} ({}) are not known", gpu.index, gpu.uuid);
            return Err(ApiError::new(Code::BadRequest, message)
                .cause(format!("{place}: this device-filter needs the PCI ids of the GPU"))
                .hint(
                    "write the file with the GPUs of the host again, with this version: `gpushctl gpu list --json > \
                FILE`",
                ));
        }
    }
    Ok(through)
}

/// Returns the positions from `parts` whose GPUs match the `devices` of the group.
fn matching_devices(group: &Group, gpus: &[Gpu], parts: &[usize], place: &str) -> Result<Vec<usize>, ApiError> {
    let indexes = match &group.devices {
        Devices::All => return Ok(parts.to_vec()),
        // If the filter matches no model of this host, the indexes may be for other hosts, so do
        // not check them.
        Devices::Listed(_) if parts.is_empty() => return Ok(Vec::new()),
        Devices::Listed(indexes) => indexes,
    };
    let absent: Vec<String> =
        indexes.iter().filter(|index| gpus.iter().all(|gpu| gpu.index != **index)).map(GpuIndex::to_string).collect();
    if !absent.is_empty() {
        let message = format!("{place}: there is no GPU {} on this host", absent.join(", "));
        return Err(ApiError::new(Code::NotFound, message).cause(inventory(gpus)).remedy(
            Remedy::CorrectDevices,
            "correct `devices` in the file; if the GPU has fallen off the bus, `gpushctl status` shows that",
        ));
    }
    // The driver numbers only the remaining GPUs. So an index may mean either of two GPUs if it is
    // equal to or higher than the index of the lost GPU.
    let lost = gpus.iter().filter(|gpu| gpu.state == GpuState::Lost).min_by_key(|gpu| gpu.index);
    if let Some(lost) = lost
        && let Some(unsure) = indexes.iter().find(|index| **index >= lost.index)
    {
        let message = format!("{place}: index {unsure} is ambiguous while GPU {} is lost", lost.index);
        return Err(ApiError::new(Code::GpuLost, message)
            .cause(format!(
                "GPU {} ({}) has fallen off the bus; the driver may give other indexes to the GPUs after it",
                lost.index, lost.uuid
            ))
            .hint("reboot the host to recover the lost GPU; until then, select GPUs by UUID: `gpushctl mig apply --gpu UUID --layout ENTRIES` (administrator)"));
    }
    Ok(parts.iter().copied().filter(|at| indexes.contains(&gpus[*at].index)).collect())
}
