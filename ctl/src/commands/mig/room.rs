//! Explains why `mig add` has no room: which instances are in the way, which profiles still fit, and what to remove.

use gpush_api::{ApiError, Code, Gpu, GpuLayout, GpuPlan, LayoutSource, Placement, PlanRequest};
use gpush_core::{
    config::Config,
    desired,
    layout::{Entry, Layout, edit},
};

/// Returns the error for entries that fit on the empty GPU, but not next to its present instances. Returns `None` if
/// the entries fit next to these instances, or if they do not even fit on the empty GPU. `gpu` must contain its
/// profiles.
pub(super) fn explain(gpu: &Gpu, entries: &[String]) -> Option<ApiError> {
    let mig = gpu.mig.as_ref()?;
    let can_add = |more: &[String]| edit::added(gpu, |_| false, more).is_ok_and(|layout| fits(gpu, current(&layout)));
    let empty = Gpu { mig: Some(gpush_api::Mig { instances: Vec::new(), ..mig.clone() }), ..gpu.clone() };
    if mig.instances.is_empty() || !fits(&empty, entries.to_vec()) {
        return None;
    }
    let names: Vec<String> =
        mig.instances.iter().map(|one| format!("{}@{}", one.profile, one.placement.start)).collect();
    if can_add(entries) {
        return None;
    }
    if let Some(error) = start_taken(gpu, entries, can_add) {
        return Some(error);
    }
    let message = format!("GPU {} has no room for {}", gpu.index, entries.join(","));
    let mut error =
        ApiError::new(Code::LayoutImpossible, message).cause(format!("its instances are {}", names.join(", ")));
    let still: Vec<&str> = mig.profiles.iter().map(|profile| profile.name.as_str()).collect();
    let still: Vec<&str> = still.into_iter().filter(|name| can_add(&[(*name).to_owned()])).collect();
    error = error.cause(match still.as_slice() {
        [] => "no profile fits in addition to them".to_owned(),
        [one] => format!("only {one} fits in addition to them"),
        several => format!("each of these profiles fits in addition to them: {}", several.join(", ")),
    });
    let blocked = blocked_by_instances_in_use(gpu, entries);
    error.causes.extend(blocked.iter().flat_map(|blocked| blocked.causes.iter().cloned()));
    // Suggest to remove the smallest idle instance that makes enough room. Do not suggest an instance of a requested
    // profile, because the user wants more of these instances.
    let wanted = Layout::parse_list(entries).ok()?;
    let is_wanted = |profile: &str| wanted.entries.iter().any(|entry| entry.profile == profile);
    let mut by_size: Vec<(u8, &String)> = std::iter::zip(&mig.instances, &names)
        .filter(|(one, _)| !is_wanted(&one.profile))
        .map(|(one, name)| (one.placement.size, name))
        .collect();
    by_size.sort();
    let with = |base: Vec<String>| fits(gpu, base.into_iter().chain(entries.iter().cloned()).collect());
    let removable = by_size.iter().find(|(_, name)| {
        edit::removed(gpu, |_| false, std::slice::from_ref(*name)).is_ok_and(|rest| with(current(&rest)))
    });
    let index = gpu.index;
    Some(error.hint(match removable {
        Some((_, name)) => format!("first remove an instance: `gpushctl mig remove {name} -g {index}`"),
        None if !by_size.is_empty() && fits(gpu, entries.to_vec()) => {
            let layout = quoted(&entries.join(","));
            format!("to replace all instances: `gpushctl mig apply {layout} -g {index}`")
        }
        None => {
            blocked.and_then(|blocked| blocked.hint).unwrap_or_else(|| {
                format!("choose another GPU; `gpushctl mig list {index}` shows who uses the instances")
            })
        }
    }))
}

/// Returns the error that names the instances in use that alone prevent the entries: all instances and the entries fit
/// on the GPU together, but only if these instances move. Returns `None` if there are no such instances.
fn blocked_by_instances_in_use(gpu: &Gpu, entries: &[String]) -> Option<ApiError> {
    let instances = &gpu.mig.as_ref()?.instances;
    // The layout without starts has each GPU instance with one compute instance.
    if instances.iter().any(|one| one.compute.len() != 1 || one.compute[0].profile != one.profile) {
        return None;
    }
    let layout = instances.iter().map(|one| one.profile.clone()).chain(entries.iter().cloned()).collect();
    plan(gpu, layout)?.error.filter(|error| error.code == Code::Blocked)
}

/// Returns the error for entries that fit only at other starts. Returns `None` if they do not fit at all.
fn start_taken(gpu: &Gpu, entries: &[String], can_add: impl Fn(&[String]) -> bool) -> Option<ApiError> {
    let layout = Layout::parse_list(entries).ok()?;
    let with = |more: &Layout| can_add(&more.canonical());
    let anywhere =
        Layout { entries: layout.entries.iter().cloned().map(|entry| Entry { start: None, ..entry }).collect() };
    if anywhere == layout || !with(&anywhere) {
        return None;
    }
    let mig = gpu.mig.as_ref()?;
    let starts = |profile: &str| {
        let profile = mig.profiles.iter().find(|one| one.name.eq_ignore_ascii_case(profile));
        profile.map(|one| one.placements.as_slice()).unwrap_or_default()
    };
    let mut causes = Vec::new();
    for entry in &layout.entries {
        let Some(at) = starts(&entry.profile).iter().find(|place| Some(place.start) == entry.start) else { continue };
        let overlaps = |other: Placement| other.start < at.start + at.size && at.start < other.start + other.size;
        let taken: Vec<String> = mig
            .instances
            .iter()
            .filter(|one| overlaps(one.placement))
            .map(|one| format!("{}@{}", one.profile, one.placement.start))
            .collect();
        if !taken.is_empty() {
            let verb = if taken.len() == 1 { "uses" } else { "use" };
            causes.push(format!("{} already {verb} some slices of {entry}", taken.join(", ")));
        }
    }
    // Name a start in the command, so that the user sees where the instance will be.
    let placed = match layout.entries.as_slice() {
        [one] if one.count == 1 => starts(&one.profile)
            .iter()
            .map(|place| Layout { entries: vec![Entry { start: Some(place.start), ..one.clone() }] })
            .find(with),
        _ => None,
    };
    let how = if placed.is_some() { "use another start" } else { "leave out the starts" };
    let command = quoted(&placed.unwrap_or(anywhere).to_string());
    let index = gpu.index;
    let mut error = ApiError::new(Code::LayoutImpossible, format!("GPU {index} has no room for {layout}"));
    error.causes = causes;
    Some(error.hint(format!("{how}: `gpushctl mig add {command} -g {index}`")))
}

fn current(layout: &Layout) -> Vec<String> {
    layout.canonical().into_iter().filter(|entry| entry != "none").collect()
}

/// Returns whether gpushd could apply this layout to the GPU now.
fn fits(gpu: &Gpu, layout: Vec<String>) -> bool {
    plan(gpu, layout).is_some_and(|plan| plan.error.is_none())
}

/// Returns the plan for this layout on the GPU; `None` if the layout is not valid.
fn plan(gpu: &Gpu, layout: Vec<String>) -> Option<GpuPlan> {
    let layout = LayoutSource::PerGpu(vec![GpuLayout { gpu: gpu.uuid.to_string(), mig: true, layout }]);
    let request = PlanRequest { gpus: Vec::new(), layout };
    desired::plan_host(&Config::default(), std::slice::from_ref(gpu), &request).ok()?.plans.pop()
}

fn quoted(layout: &str) -> String {
    if layout.contains('*') { format!("'{layout}'") } else { layout.to_owned() }
}

#[cfg(test)]
mod tests {
    use gpush_api::{
        ComputeInstance, GpuInstance, LeaseHolder, LeaseId, LeaseKind, LeaseUse, MemberShare, Placement, Process,
        ProcessKind,
    };

    use super::*;

    /// Returns an A100 whose instances are these. `used` is the start of the instance in use.
    fn gpu(instances: &[(&str, u8, u8)], used: Option<u8>) -> Gpu {
        let mut gpu = gpush_core::preset::gpus("dgx-a100").unwrap().swap_remove(0);
        let mig = gpu.mig.as_mut().unwrap();
        mig.enabled = true;
        let process = Process {
            pid: Some(7),
            uid: Some(1000),
            user: None,
            command: None,
            kind: ProcessKind::Compute,
            memory_mib: None,
            unidentified: false,
        };
        let profiles = mig.profiles.clone();
        let profile_of = |name: &str| profiles.iter().find(|known| known.name == name).unwrap();
        mig.instances = instances
            .iter()
            .zip(1..)
            .map(|((profile, start, size), id)| GpuInstance {
                id,
                profile_id: profile_of(profile).id,
                profile: (*profile).to_owned(),
                placement: Placement { start: *start, size: *size },
                memory: None,
                compute: vec![ComputeInstance {
                    id: 0,
                    profile: (*profile).to_owned(),
                    profile_id: profile_of(profile).compute.iter().find(|one| one.name == *profile).unwrap().id,
                    placement: None,
                    uuid: Some(format!("MIG-{id}").into()),
                    processes: if used == Some(*start) { vec![process.clone()] } else { Vec::new() },
                }],
                processes: Vec::new(),
            })
            .collect();
        gpu
    }

    fn explained(gpu: &Gpu, entry: &str) -> Option<(String, String)> {
        let error = explain(gpu, &[entry.to_owned()])?;
        Some((format!("{}: {}", error.message, error.causes.join("; ")), error.hint.unwrap()))
    }

    #[test]
    fn full_gpu_names_its_instances_and_what_to_remove() {
        let full = [("2g.20gb", 0, 2), ("1g.10gb", 2, 1), ("1g.10gb", 3, 1), ("3g.40gb", 4, 4)];
        let (text, hint) = explained(&gpu(&full, None), "1g.10gb").unwrap();
        assert_eq!(
            text,
            "GPU 0 has no room for 1g.10gb: its instances are 2g.20gb@0, 1g.10gb@2, 1g.10gb@3, 3g.40gb@4; no profile \
             fits in addition to them"
        );
        assert!(hint.ends_with("`gpushctl mig remove 2g.20gb@0 -g 0`"), "{hint}");
        let (_, hint) = explained(&gpu(&full, Some(0)), "1g.10gb").unwrap();
        assert!(hint.ends_with("`gpushctl mig remove 3g.40gb@4 -g 0`"), "2g.20gb@0 is in use: {hint}");
        let (_, hint) = explained(&gpu(&full, None), "7g.80gb").unwrap();
        assert!(hint.ends_with("`gpushctl mig apply 7g.80gb -g 0`"), "{hint}");
        let (_, hint) = explained(&gpu(&full, Some(0)), "7g.80gb").unwrap();
        assert!(hint.starts_with("choose another GPU; "), "{hint}");
    }

    /// Earlier fault: the error said that there was no room for the profile, but also that this profile fits.
    #[test]
    fn taken_start_is_named_with_a_free_start() {
        let (text, hint) = explained(&gpu(&[("1g.10gb", 0, 1)], Some(0)), "3g.40gb@0").unwrap();
        assert_eq!(text, "GPU 0 has no room for 3g.40gb@0: 1g.10gb@0 already uses some slices of 3g.40gb@0");
        assert_eq!(hint, "use another start: `gpushctl mig add 3g.40gb@4 -g 0`");
        let taken = gpu(&[("1g.10gb", 0, 1), ("1g.10gb", 1, 1)], Some(0));
        let both = explain(&taken, &["2g.20gb@0".to_owned(), "1g.10gb@2".to_owned()]).unwrap();
        assert_eq!(both.hint.unwrap(), "leave out the starts: `gpushctl mig add 2g.20gb,1g.10gb -g 0`");
        let (_, hint) = explained(&gpu(&[("3g.40gb", 4, 4), ("1g.10gb", 0, 1)], None), "3g.40gb@0").unwrap();
        assert!(hint.contains("mig remove 1g.10gb@0 -g 0"), "no start is free: {hint}");
    }

    /// Fault: the error listed all instances, although one of them alone prevents the profile.
    #[test]
    fn error_names_only_the_instance_that_blocks_the_profile() {
        let scattered = gpu(&[("1g.10gb", 0, 1), ("1g.10gb", 1, 1), ("1g.10gb", 5, 1)], Some(5));
        let leases = ["MIG-1", "MIG-2"].map(|target| LeaseUse {
            share: MemberShare::Mig { profile: "1g.10gb".to_owned() },
            id: LeaseId(3),
            target: target.into(),
            kind: LeaseKind::Mig,
            holder: LeaseHolder { uid: 1000, user: None },
            until: None,
        });
        let error = explain(&Gpu { leases: leases.into(), ..scattered }, &["3g.40gb".to_owned()]).unwrap();
        let held: Vec<&String> = error.causes.iter().filter(|cause| cause.contains(" is held by ")).collect();
        assert!(matches!(held.as_slice(), [one] if one.starts_with("1g.10gb@5 ")), "{:?}", error.causes);
    }

    #[test]
    fn profiles_that_still_fit_are_named() {
        let (text, hint) = explained(&gpu(&[("3g.40gb", 4, 4), ("2g.20gb", 0, 2)], None), "3g.40gb").unwrap();
        assert!(text.contains("each of these profiles fits in addition to them: 1g.10gb, "), "{text}");
        assert!(hint.contains("mig remove 2g.20gb@0 -g 0"), "{hint}");
        assert_eq!(explained(&gpu(&[("3g.40gb", 4, 4)], None), "1g.10gb*9"), None, "never fits");
    }
}
