//! Adds entries to the current layout of a GPU, or removes entries from this layout.
//!
//! In the result, the entry of each remaining instance has a fixed start: the current one. So a
//! plan keeps the instance. Only if the added entries do not fit next to these instances, idle
//! instances have no fixed start, so that a plan may move them.

use std::collections::BTreeMap;

use gpush_api::{ApiError, Code, ComputeInstance, Gpu, GpuInstance};

use super::{Entry, Layout, Share};
use crate::{geometry::Geometry, plan::Target};

/// A current GPU instance as layout entries.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Present {
    entries: Vec<Entry>,
    in_use: bool,
}

impl Present {
    fn is_shared(&self) -> bool {
        self.entries.iter().any(|entry| entry.share.is_some())
    }

    /// Returns the entries. The entry of an idle instance has no fixed start, unless the instance is
    /// split: the start says which compute instances are in one GPU instance.
    fn movable_entries(&self) -> Vec<Entry> {
        match self.entries.as_slice() {
            [whole] if !self.in_use && whole.compute_slices.is_none() => vec![Entry { start: None, ..whole.clone() }],
            _ => self.entries.clone(),
        }
    }
}

/// Returns the current instances as layout entries. `shared` returns whether a MIG device is shared
/// through MPS.
fn present(gpu: &Gpu, shared: impl Fn(&ComputeInstance) -> bool) -> Vec<Present> {
    let is_leased =
        |compute: &ComputeInstance| gpu.leases.iter().any(|lease| Some(&lease.target) == compute.uuid.as_ref());
    let is_used = |compute: &ComputeInstance| !compute.processes.is_empty() || is_leased(compute);
    let instances = gpu.mig.iter().filter(|mig| mig.enabled).flat_map(|mig| &mig.instances);
    instances
        .map(|instance| Present {
            entries: entries(instance, &shared),
            in_use: !instance.processes.is_empty() || instance.compute.iter().any(is_used),
        })
        .collect()
}

/// Returns a GPU instance as entries: one entry for each profile of its compute instances, and for
/// each kind of sharing.
pub(super) fn entries(instance: &GpuInstance, shared: impl Fn(&ComputeInstance) -> bool) -> Vec<Entry> {
    let mut counts: BTreeMap<(&str, bool), u8> = BTreeMap::new();
    for compute in &instance.compute {
        *counts.entry((compute.profile.as_str(), shared(compute))).or_default() += 1;
    }
    let entry = |((profile, is_shared), count): ((&str, bool), u8)| {
        let slices = profile.split_once("c.").and_then(|(slices, _)| slices.parse().ok());
        Entry {
            compute_slices: slices,
            profile: instance.profile.clone(),
            start: Some(instance.placement.start),
            count,
            share: is_shared.then_some(Share::Mps),
        }
    };
    counts.into_iter().map(entry).collect()
}

fn of(all: Vec<Present>) -> Vec<Entry> {
    all.into_iter().flat_map(|one| one.entries).collect()
}

/// Returns the current layout of a GPU, with `entries` added. `gpu` must contain its profiles.
///
/// # Errors
/// An entry is malformed.
pub fn added(gpu: &Gpu, shared: impl Fn(&ComputeInstance) -> bool, entries: &[String]) -> Result<Layout, ApiError> {
    let more = Layout::parse_list(entries).map_err(ApiError::from)?;
    let present = present(gpu, shared);
    let with_more = |mut all: Vec<Entry>| {
        all.extend(more.entries.iter().cloned());
        Layout { entries: all }
    };
    let moved = with_more(present.iter().flat_map(Present::movable_entries).collect());
    let kept = with_more(of(present));
    Ok(if !fits(gpu, &kept) && fits(gpu, &moved) { moved } else { kept })
}

/// Returns whether the GPU can have this layout when no instance is in use.
fn fits(gpu: &Gpu, layout: &Layout) -> bool {
    gpu.mig.as_ref().is_some_and(|mig| {
        let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
        Target::resolve(&geometry, layout).is_ok()
    })
}

/// Returns the current layout of a GPU, with `entries` removed. If several instances match an
/// entry, idle instances are removed before instances in use, and instances without MPS before
/// instances that are shared through MPS. If several of them are equally suitable, the instance with
/// the highest start is removed first.
///
/// # Errors
/// An entry is malformed, or its count is higher than the number of instances that match.
pub fn removed(gpu: &Gpu, shared: impl Fn(&ComputeInstance) -> bool, entries: &[String]) -> Result<Layout, ApiError> {
    let less = Layout::parse_list(entries).map_err(ApiError::from)?;
    let mut all = present(gpu, shared);
    for entry in &less.entries {
        for removed in 0..entry.count {
            let matches = |one: &Entry| {
                one.profile == entry.profile
                    && entry.compute_slices.is_none_or(|slices| one.compute_slices == Some(slices))
                    && entry.start.is_none_or(|start| one.start == Some(start))
                    && entry.share.is_none_or(|share| one.share == Some(share))
            };
            let found = (0..all.len()).rev().filter(|at| all[*at].entries.iter().any(matches));
            let Some(at) = found.min_by_key(|at| (all[*at].in_use, all[*at].is_shared())) else {
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
    use gpush_api::{LeaseHolder, LeaseId, LeaseKind, LeaseUse, Placement, Process, ProcessKind, TargetUuid};

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
            unidentified: false,
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
                        uuid: Some(format!("MIG-{start}-{id}").into()),
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
        let shared = |compute: &ComputeInstance| {
            ["MIG-0-1", "MIG-4-0"].map(Some).contains(&compute.uuid.as_ref().map(TargetUuid::as_str))
        };
        let more = added(&gpu, shared, &["1g.10gb".to_owned()]);
        assert_eq!(text(more), "1c.3g.40gb@0,1c.3g.40gb@0:mps,2g.20gb@4:mps,1g.10gb");
    }

    fn leased(mut gpu: Gpu, target: &str) -> Gpu {
        gpu.leases.push(LeaseUse {
            share: gpush_api::MemberShare::Mig { profile: "1g.10gb".to_owned() },
            id: LeaseId(3),
            target: target.into(),
            kind: LeaseKind::Mig,
            holder: LeaseHolder { uid: 1000, user: None },
            until: None,
        });
        gpu
    }

    /// Fault: `mig add 4g.40gb` was refused although `mig apply '2g.20gb,4g.40gb'` was possible, because the added
    /// instance needs the slices of an idle one.
    #[test]
    fn idle_instances_move_only_if_there_is_no_other_room() {
        let more = |gpu: &Gpu, entry: &str| text(added(gpu, |_| false, &[entry.to_owned()]));
        let idle = || gpu(&[("2g.20gb", 0, &["2g.20gb"], false)]);
        assert_eq!(more(&idle(), "4g.40gb"), "2g.20gb,4g.40gb");
        assert_eq!(more(&idle(), "3g.40gb"), "2g.20gb@0,3g.40gb");
        let busy = gpu(&[("2g.20gb", 0, &["2g.20gb"], true)]);
        assert_eq!(more(&busy, "4g.40gb"), "2g.20gb@0,4g.40gb");
        assert_eq!(more(&leased(idle(), "MIG-0-0"), "4g.40gb"), "2g.20gb@0,4g.40gb");
        // The start of a split instance says which compute instances belong together.
        let split = gpu(&[("2g.20gb", 0, &["1c.2g.20gb", "1c.2g.20gb"], false)]);
        assert_eq!(more(&split, "4g.40gb"), "1c.2g.20gb@0*2,4g.40gb");
        // Only the instance in use keeps its start.
        let both = gpu(&[("1g.10gb", 0, &["1g.10gb"], false), ("1g.10gb", 6, &["1g.10gb"], true)]);
        assert_eq!(more(&both, "4g.40gb"), "1g.10gb,1g.10gb@6,4g.40gb");
        // A layout that never fits is returned as it is, for the error.
        assert_eq!(more(&idle(), "7g.80gb"), "2g.20gb@0,7g.80gb");
    }

    #[test]
    fn leased_and_shared_instances_are_removed_last() {
        let one = "1g.10gb";
        let three = gpu(&[(one, 0, &[one], false), (one, 1, &[one], false), (one, 2, &[one], false)]);
        let shared = |compute: &ComputeInstance| compute.uuid.as_ref().is_some_and(|uuid| *uuid == "MIG-1-0");
        let less = |entry: &str| text(removed(&leased(three.clone(), "MIG-2-0"), shared, &[entry.to_owned()]));
        assert_eq!(less("1g.10gb"), "1g.10gb@1:mps,1g.10gb@2");
        assert_eq!(less("1g.10gb*2"), "1g.10gb@2");
        assert_eq!(less("1g.10gb:mps"), "1g.10gb@0,1g.10gb@2");
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
