//! Explains why `mig add` has no room: which instances are in the way, which profiles still fit, and what to remove.

use gpush_api::{ApiError, Code, Gpu, GpuLayout, LayoutSource, PlanRequest};
use gpush_core::{
    config::Config,
    desired,
    layout::{Layout, edit},
};

/// Returns the error for entries that fit on the empty GPU, but not next to its present instances. Returns `None` if
/// the entries fit next to these instances, or if they do not even fit on the empty GPU. `gpu` must contain its
/// profiles.
pub(super) fn explain(gpu: &Gpu, entries: &[String]) -> Option<ApiError> {
    let mig = gpu.mig.as_ref()?;
    let with = |base: Vec<String>| fits(gpu, base.into_iter().chain(entries.iter().cloned()).collect());
    let empty = Gpu { mig: Some(gpush_api::Mig { instances: Vec::new(), ..mig.clone() }), ..gpu.clone() };
    if mig.instances.is_empty() || !fits(&empty, entries.to_vec()) {
        return None;
    }
    let names: Vec<String> =
        mig.instances.iter().map(|one| format!("{}@{}", one.profile, one.placement.start)).collect();
    let present = current(&edit::added(gpu, |_| false, &["none".to_owned()]).ok()?);
    if with(present.clone()) {
        return None;
    }
    let message = format!("GPU {} has no room for {}", gpu.index, entries.join(","));
    let mut error =
        ApiError::new(Code::LayoutImpossible, message).cause(format!("its instances are {}", names.join(", ")));
    let still: Vec<&str> = mig.profiles.iter().map(|profile| profile.name.as_str()).collect();
    let still: Vec<&str> = still
        .into_iter()
        .filter(|name| fits(gpu, present.iter().cloned().chain([(*name).to_owned()]).collect()))
        .collect();
    error = error.cause(match still.as_slice() {
        [] => "no profile fits in addition to them".to_owned(),
        [one] => format!("only {one} fits in addition to them"),
        several => format!("each of these profiles fits in addition to them: {}", several.join(", ")),
    });
    // Suggest to remove the smallest idle instance that makes enough room. Do not suggest an instance of a requested
    // profile, because the user wants more of these instances.
    let wanted = Layout::parse_list(entries).ok()?;
    let is_wanted = |profile: &str| wanted.entries.iter().any(|entry| entry.profile == profile);
    let mut by_size: Vec<(u8, &String)> = std::iter::zip(&mig.instances, &names)
        .filter(|(one, _)| !is_wanted(&one.profile))
        .map(|(one, name)| (one.placement.size, name))
        .collect();
    by_size.sort();
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
        None => format!("choose another GPU; `gpushctl mig list {index}` shows who uses the instances"),
    }))
}

fn current(layout: &Layout) -> Vec<String> {
    layout.canonical().into_iter().filter(|entry| entry != "none").collect()
}

/// Returns whether gpushd could apply this layout to the GPU now.
fn fits(gpu: &Gpu, layout: Vec<String>) -> bool {
    let layout = LayoutSource::PerGpu(vec![GpuLayout { gpu: gpu.uuid.clone(), mig: true, layout }]);
    let request = PlanRequest { gpus: Vec::new(), layout };
    desired::plan_host(&Config::default(), std::slice::from_ref(gpu), &request)
        .is_ok_and(|plans| plans.plans.iter().all(|plan| plan.error.is_none()))
}

fn quoted(layout: &str) -> String {
    if layout.contains('*') { format!("'{layout}'") } else { layout.to_owned() }
}

#[cfg(test)]
mod tests {
    use gpush_api::{ComputeInstance, GpuInstance, Placement, Process, ProcessKind};

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
                    uuid: Some(format!("MIG-{id}")),
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

    #[test]
    fn profiles_that_still_fit_are_named() {
        let (text, hint) = explained(&gpu(&[("3g.40gb", 4, 4), ("2g.20gb", 0, 2)], None), "3g.40gb").unwrap();
        assert!(text.contains("each of these profiles fits in addition to them: 1g.10gb, "), "{text}");
        assert!(hint.contains("mig remove 2g.20gb@0 -g 0"), "{hint}");
        assert_eq!(explained(&gpu(&[("3g.40gb", 4, 4)], None), "1g.10gb*9"), None, "never fits");
    }
}
