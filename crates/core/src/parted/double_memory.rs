//! Compute instances that mig-parted does not distinguish.
//!
//! On Hopper and later models, a double-memory `1g` has two compute profiles with one slice: the whole GPU instance
//! (`1g.20gb`) and a smaller one (`1c.1g.20gb`). mig-parted calls both `1g.20gb`: it creates the smaller one, and its
//! `assert` accepts both. So gpush writes this name for both. When gpush reads the name, it chooses the instances that the
//! GPU has.

use gpush_api::Mig;

use crate::layout::{Entry, Layout};

/// Returns the name by which mig-parted counts a compute instance. A compute instance with as many slices as its GPU
/// instance has the name of the GPU instance.
pub(super) fn counted_as(entry: &Entry) -> String {
    let whole = slices(&entry.profile) == entry.compute_slices;
    let entry = Entry { compute_slices: entry.compute_slices.filter(|_| !whole), ..entry.clone() };
    entry.to_string()
}

/// Returns the layout that a file describes for a GPU. If the GPU has smaller compute instances under a name that
/// mig-parted uses for both, the file means these instances. New instances are whole.
pub(super) fn as_on_gpu(layout: &Layout, mig: &Mig) -> Layout {
    let mut entries = Vec::new();
    for entry in &layout.entries {
        let smaller = match entry.compute_slices {
            Some(_) => None,
            None => slices(&entry.profile).map(|slices| Entry { compute_slices: Some(slices), ..entry.clone() }),
        };
        let Some(smaller) = smaller else {
            entries.push(entry.clone());
            continue;
        };
        let present = |entry: &Entry| {
            let name = Entry { count: 1, ..entry.clone() }.to_string();
            let all = mig.instances.iter().flat_map(|instance| &instance.compute);
            u8::try_from(all.filter(|compute| compute.profile == name).count()).unwrap_or(u8::MAX)
        };
        // The whole instances that exist count first.
        let kept = present(&smaller).min(entry.count.saturating_sub(present(entry)));
        entries.extend((kept < entry.count).then(|| Entry { count: entry.count - kept, ..entry.clone() }));
        entries.extend((kept > 0).then_some(Entry { count: kept, ..smaller }));
    }
    Layout { entries }
}

/// Returns the number of slices in the name of a GPU instance profile: the 3 of `3g.40gb`.
fn slices(profile: &str) -> Option<u8> {
    profile.split_once('g')?.0.parse().ok()
}
