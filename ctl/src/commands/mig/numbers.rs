//! Explains numbers where gpushctl expects a layout: profile ids, which nvidia-smi uses, or indexes of GPUs. Where
//! gpushctl expects instances to remove, explains ids of GPU instances and UUIDs of MIG devices.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, Gpu, GpuIndex};
use gpush_client::Client;

/// Returns the error for `mig VERB` with numbers instead of a layout. Returns `None` if the entries are not numbers, or
/// if gpushd does not know profiles with these ids.
pub(super) async fn explain(
    client: &mut Client,
    verb: &str,
    entries: &[String],
    selectors: &[String],
) -> Option<ApiError> {
    let words = entries.iter().flat_map(|entry| entry.split(',')).map(str::trim);
    let numbers: Vec<u32> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
    let all = client.gpus(true).await.ok()?;
    let gpus = super::super::select(all, selectors).ok()?;
    about(verb, &numbers, selectors, &gpus)
}

/// Returns the error for `mig remove` with UUIDs of MIG devices. Returns `None` if no entry is such a UUID.
pub(super) async fn devices(client: &mut Client, entries: &[String]) -> Option<ApiError> {
    let uuid = entries.iter().find(|entry| is_uuid(entry))?;
    let gpus = client.gpus(false).await.unwrap_or_default();
    Some(about_device(uuid, &gpus))
}

fn is_uuid(entry: &str) -> bool {
    entry.get(..4).is_some_and(|start| start.eq_ignore_ascii_case("MIG-"))
}

fn about_device(uuid: &str, gpus: &[Gpu]) -> ApiError {
    let error = ApiError::new(Code::BadRequest, "the UUID of a MIG device is not a layout entry");
    let instances =
        gpus.iter().flat_map(|gpu| gpu.mig.iter().flat_map(move |mig| mig.instances.iter().map(move |one| (gpu, one))));
    let entry = instances.into_iter().find_map(|(gpu, instance)| {
        let has_uuid = |of: &gpush_api::TargetUuid| of.as_str().eq_ignore_ascii_case(uuid);
        let device = instance.compute.iter().find(|one| one.uuid.as_ref().is_some_and(has_uuid))?;
        Some((format!("{}@{}", device.profile, instance.placement.start), gpu.index))
    });
    match entry {
        Some((entry, index)) => {
            error.hint(format!("write the entry of the device: `gpushctl mig remove {entry} -g {index}`"))
        }
        None => error
            .cause("no GPU has this MIG device".to_owned())
            .hint("write PROFILE@START and -g GPU; `gpushctl mig list` lists the devices"),
    }
}

fn about(verb: &str, numbers: &[u32], selectors: &[String], gpus: &[Gpu]) -> Option<ApiError> {
    let typed = numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let error = |hint| ApiError::new(Code::BadRequest, format!("`{typed}` is not a layout")).hint(hint);
    if verb == "remove" {
        return Some(instances(numbers, &typed, gpus));
    }
    let takes_no_layout = matches!(verb, "apply" | "plan" | "assert");
    if let ([index], []) = (numbers, selectors)
        && takes_no_layout
        && gpus.iter().any(|gpu| gpu.index == *index)
    {
        let hint = format!(
            "for the desired layout of GPU {index}, write `gpushctl mig {verb} -g {index}`; \
            `gpushctl mig profiles` lists the names of profiles"
        );
        return Some(error(hint));
    }
    let with_profiles: Vec<&Gpu> =
        gpus.iter().filter(|gpu| gpu.mig.as_ref().is_some_and(|mig| !mig.profiles.is_empty())).collect();
    let mut names: Vec<(&str, usize)> = Vec::new();
    for number in numbers {
        let name = name_of(*number, &with_profiles)?;
        match names.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => names.push((name, 1)),
        }
    }
    let entry =
        |(name, count): &(&str, usize)| if *count == 1 { (*name).to_owned() } else { format!("'{name}*{count}'") };
    let layout = names.iter().map(entry).collect::<Vec<_>>().join(",");
    let gpu = match selectors {
        [] => with_profiles.first()?.index.to_string(),
        selectors => selectors.join(","),
    };
    let ids = if numbers.len() == 1 { "a profile id" } else { "a list of profile ids" };
    let hint = format!("write the names of the profiles: `gpushctl mig {verb} {layout} -g {gpu}`");
    Some(error(hint).cause(format!("`{typed}` is {ids} of nvidia-smi")))
}

/// Returns the error for a removal of instances by their ids, as nvidia-smi removes them.
fn instances(ids: &[u32], typed: &str, gpus: &[Gpu]) -> ApiError {
    let error = ApiError::new(Code::BadRequest, format!("`{typed}` names no instance"));
    let of_gpu = |gpu: &Gpu| -> Option<(String, GpuIndex)> {
        let all = &gpu.mig.as_ref()?.instances;
        let name = |id: &u32| {
            let instance = all.iter().find(|instance| instance.id == *id)?;
            Some(format!("{}@{}", instance.profile, instance.placement.start))
        };
        let names: Vec<String> = ids.iter().map(name).collect::<Option<_>>()?;
        Some((names.join(","), gpu.index))
    };
    match gpus.iter().filter_map(of_gpu).collect::<Vec<_>>().as_slice() {
        [(names, index)] => {
            let ids = if ids.len() == 1 { "the id of a GPU instance" } else { "a list of ids of GPU instances" };
            error
                .cause(format!("`{typed}` is {ids} of GPU {index}"))
                .hint(format!("write their profiles and starts: `gpushctl mig remove {names} -g {index}`"))
        }
        _ => error.hint("write PROFILE@START and -g GPU; `gpushctl mig list` lists the instances"),
    }
}

/// Returns the name of the profile, if this name is the same on all GPUs that have a profile with this id.
fn name_of<'g>(id: u32, gpus: &[&'g Gpu]) -> Option<&'g str> {
    let profiles = gpus.iter().flat_map(|gpu| &gpu.mig).flat_map(|mig| mig.profiles.iter());
    let names: BTreeSet<&str> = profiles.filter(|profile| profile.id == id).map(|one| one.name.as_str()).collect();
    names.first().copied().filter(|_| names.len() == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_ids_are_translated_to_names() {
        let gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
        let one = |verb, numbers: &[u32], selectors: &[&str]| {
            let selectors: Vec<String> = selectors.iter().map(|text| (*text).to_owned()).collect();
            about(verb, numbers, &selectors, &gpus).and_then(|error| error.hint)
        };
        assert!(one("add", &[19], &["3"]).unwrap().contains("`gpushctl mig add 1g.10gb -g 3`"));
        assert!(one("add", &[19, 19, 9], &["0-1"]).unwrap().contains("`gpushctl mig add '1g.10gb*2',3g.40gb -g 0-1`"));
        assert!(one("apply", &[19], &[]).unwrap().contains("`gpushctl mig apply 1g.10gb -g 0`"), "no GPU has index 19");
        assert!(one("apply", &[0], &[]).unwrap().contains("`gpushctl mig apply -g 0`"));
        assert!(one("apply", &[0], &["1"]).unwrap().contains("`gpushctl mig apply 7g.80gb -g 1`"));
        assert_eq!(one("add", &[77], &["0"]), None);
    }

    /// Fault: the hint for the UUID of a MIG device was about GPUs.
    #[test]
    fn uuid_to_remove_leads_to_the_entry_of_its_device() {
        let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
        let device = crate::render::fixtures::instance(5, "2g.20gb", 0, 2, (28, 19_968), &[]);
        gpus[1].mig.as_mut().unwrap().instances = vec![device];
        let uuid = gpus[1].mig.as_ref().unwrap().instances[0].compute[0].uuid.clone().unwrap();
        let hint = |uuid: &str| about_device(uuid, &gpus).hint.unwrap();
        assert!(is_uuid(uuid.as_str()) && !is_uuid("2g.20gb@0"), "{uuid}");
        assert!(hint(uuid.as_str()).ends_with("`gpushctl mig remove 2g.20gb@0 -g 1`"), "{}", hint(uuid.as_str()));
        assert!(hint("MIG-none").contains("`gpushctl mig list`"));
    }

    /// Fault: the id of an instance was taken for the id of a profile, so the hint removed another instance.
    #[test]
    fn number_to_remove_is_the_id_of_an_instance() {
        let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
        gpus[0].mig.as_mut().unwrap().instances = vec![
            crate::render::fixtures::instance(9, "1g.10gb", 2, 1, (14, 9_856), &[]),
            crate::render::fixtures::instance(2, "3g.40gb", 4, 4, (42, 40_448), &[]),
        ];
        let hint = |ids: &[u32]| about("remove", ids, &["0".to_owned()], &gpus[..1]).unwrap().hint.unwrap();
        assert!(hint(&[9]).ends_with("`gpushctl mig remove 1g.10gb@2 -g 0`"));
        assert!(hint(&[2, 9]).ends_with("`gpushctl mig remove 3g.40gb@4,1g.10gb@2 -g 0`"));
        assert!(hint(&[19]).contains("`gpushctl mig list`"));
    }
}
