//! Explains numbers where gpushctl expects a layout: profile ids, which nvidia-smi uses, or indexes of GPUs.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, Gpu};
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

fn about(verb: &str, numbers: &[u32], selectors: &[String], gpus: &[Gpu]) -> Option<ApiError> {
    let typed = numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let error = |hint| ApiError::new(Code::BadRequest, format!("`{typed}` is not a layout")).hint(hint);
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
}
