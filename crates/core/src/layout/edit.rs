//! Adds entries to the current layout of a GPU, or removes entries from this layout.
//!
//! In the result, the entry of each remaining instance has a fixed start: the current one. So a
//! plan keeps the instance.

use std::collections::BTreeMap;

use gpush_api::{ApiError, Code, Gpu, GpuInstance};

use super::{Entry, Layout, Share};

/// A current GPU instance as layout entries.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Present {
    entries: Vec<Entry>,
    in_use: bool,
}

/// Returns the current instances as layout entries. `shared` returns whether a device such as
/// `2g.20gb@2` is shared through MPS.
fn present(gpu: &Gpu, shared: impl Fn(&str) -> bool) -> Vec<Present> {
    let instances = gpu.mig.iter().filter(|mig| mig.enabled).flat_map(|mig| &mig.instances);
    instances
        .map(|instance| {
            let device = format!("{}@{}", instance.profile, instance.placement.start);
            let share = shared(&device).then_some(Share::Mps);
            let in_use =
                !instance.processes.is_empty() || instance.compute.iter().any(|compute| !compute.processes.is_empty());
            Present { entries: entries(instance, share), in_use }
        })
        .collect()
}

/// Returns a GPU instance as entries: one entry for each profile of its compute instances.
fn entries(instance: &GpuInstance, share: Option<Share>) -> Vec<Entry> {
    let mut counts: BTreeMap<&str, u8> = BTreeMap::new();
    for compute in &instance.compute {
        *counts.entry(compute.profile.as_str()).or_default() += 1;
    }
    let entry = |(profile, count): (&str, u8)| {
        let slices = profile.split_once("c.").and_then(|(slices, _)| slices.parse().ok());
        Entry {
            compute_slices: slices,
            profile: instance.profile.clone(),
            start: Some(instance.placement.start),
            count,
            share,
        }
    };
    counts.into_iter().map(entry).collect()
}

fn of(all: Vec<Present>) -> Vec<Entry> {
    all.into_iter().flat_map(|one| one.entries).collect()
}

/// Returns the current layout of a GPU, with `entries` added.
///
/// # Errors
/// An entry is malformed.
pub fn added(gpu: &Gpu, shared: impl Fn(&str) -> bool, entries: &[String]) -> Result<Layout, ApiError> {
    let more = Layout::parse_list(entries).map_err(ApiError::from)?;
    let mut all = of(present(gpu, shared));
    all.extend(more.entries);
    Ok(Layout { entries: all })
}

/// Returns the current layout of a GPU, with `entries` removed. If several instances match an
/// entry, idle instances are removed before instances in use. If several of them are equally
/// suitable, the instance with the highest start is removed first.
///
/// # Errors
/// An entry is malformed, or its count is higher than the number of instances that match.
pub fn removed(gpu: &Gpu, shared: impl Fn(&str) -> bool, entries: &[String]) -> Result<Layout, ApiError> {
    let less = Layout::parse_list(entries).map_err(ApiError::from)?;
    let mut all = present(gpu, shared);
    for entry in &less.entries {
        for removed in 0..entry.count {
            let matches = |one: &Entry| {
                one.profile == entry.profile
                    && entry.compute_slices.is_none_or(|slices| one.compute_slices == Some(slices))
                    && entry.start.is_none_or(|start| one.start == Some(start))
            };
            let found = (0..all.len()).rev().filter(|at| all[*at].entries.iter().any(matches));
            let Some(at) = found.min_by_key(|at| all[*at].in_use) else {
                let one = Entry { count: 1, ..entry.clone() };
                let message = match removed {
                    0 => format!("GPU {} has no instance `{one}` to remove", gpu.index),
                    1 => format!("cannot remove `{entry}` from GPU {}: it has only 1 instance `{one}`", gpu.index),
                    some => {
                        format!("cannot remove `{entry}` from GPU {}: it has only {some} instances `{one}`", gpu.index)
                    }
                };
                let hint = format!("list its instances with 'gpushctl mig list {}'", gpu.index);
                return Err(ApiError::new(Code::NotFound, message).hint(hint));
            };
            // If the GPU instance has other compute instances too, only the compute instance that
            // matches is removed.
            let own = &mut all[at].entries;
            match own.iter().position(|one| matches(one) && entry.compute_slices.is_some()) {
                Some(part) if own.len() > 1 || own[part].count > 1 => match own[part].count {
                    1 => drop(own.remove(part)),
                    _ => own[part].count -= 1,
                },
                Some(_) | None => drop(all.remove(at)),
            }
        }
    }
    Ok(Layout { entries: of(all) })
}

#[cfg(test)]
mod tests {
    use gpush_api::{ComputeInstance, Placement, Process, ProcessKind};

    use super::*;
    use crate::preset;

    fn gpu(instances: &[(&str, u8, &[&str], bool)]) -> Gpu {
        let mut gpu = preset::gpus("dgx-a100").unwrap().remove(0);
        let mig = gpu.mig.as_mut().unwrap();
        mig.enabled = true;
        let process = || Process {
            pid: Some(9),
            uid: None,
            user: None,
            command: None,
            kind: ProcessKind::Compute,
            memory_mib: None,
        };
        mig.instances = (0..)
            .zip(instances)
            .map(|(id, (profile, start, computes, in_use))| GpuInstance {
                id,
                profile_id: 0,
                profile: (*profile).to_owned(),
                placement: Placement { start: *start, size: 1 },
                memory: None,
                compute: (0..)
                    .zip(*computes)
                    .map(|(id, profile)| ComputeInstance {
                        id,
                        profile_id: 0,
                        profile: (*profile).to_owned(),
                        placement: None,
                        uuid: None,
                        processes: in_use.then(process).into_iter().collect(),
                    })
                    .collect(),
                processes: Vec::new(),
            })
            .collect();
        gpu
    }

    fn text(layout: Result<Layout, ApiError>) -> String {
        layout.map_or_else(|error| error.message, |layout| layout.canonical().join(","))
    }

    fn less(gpu: &Gpu, entry: &str) -> String {
        text(removed(gpu, |_| false, &[entry.to_owned()]))
    }

    #[test]
    fn present_instances_keep_their_placement_and_sharing() {
        let gpu = gpu(&[("3g.40gb", 0, &["1c.3g.40gb", "1c.3g.40gb"], false), ("2g.20gb", 4, &["2g.20gb"], true)]);
        let more = added(&gpu, |device| device == "2g.20gb@4", &["1g.10gb".to_owned()]);
        assert_eq!(text(more), "1c.3g.40gb@0*2,2g.20gb@4:mps,1g.10gb");
    }

    #[test]
    fn idle_instances_are_removed_before_those_in_use() {
        let one = "1g.10gb";
        let gpu = gpu(&[(one, 0, &[one], false), (one, 1, &[one], true), (one, 2, &[one], true)]);
        assert_eq!(less(&gpu, "1g.10gb"), "1g.10gb@1,1g.10gb@2");
        assert_eq!(less(&gpu, "1g.10gb*2"), "1g.10gb@1");
        assert_eq!(less(&gpu, "1g.10gb@1"), "1g.10gb@0,1g.10gb@2");
        assert_eq!(less(&gpu, "1g.10gb*3"), "none");
        assert_eq!(less(&gpu, "1g.10gb@5"), "GPU 0 has no instance `1g.10gb@5` to remove");
        assert_eq!(less(&gpu, "1g.10gb*4"), "cannot remove `1g.10gb*4` from GPU 0: it has only 3 instances `1g.10gb`");
        assert_eq!(less(&gpu, "3g.40gb*2"), "GPU 0 has no instance `3g.40gb` to remove");
        assert!(less(&gpu, "7x").contains("7x"));
    }

    #[test]
    fn compute_instances_of_a_split_instance_are_removed_one_by_one() {
        let split = gpu(&[("3g.40gb", 0, &["1c.3g.40gb", "1c.3g.40gb", "1c.3g.40gb"], false)]);
        assert_eq!(less(&split, "1c.3g.40gb"), "1c.3g.40gb@0*2");
        assert_eq!(less(&split, "3g.40gb"), "none");
    }
}
