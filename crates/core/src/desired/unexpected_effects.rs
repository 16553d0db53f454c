//! Warnings about rules and layouts that have another effect on a host than their author probably expects.

use std::collections::BTreeSet;

use gpush_api::{ComputeMode, Gpu, GpuIndex, MPS_CLIENTS, Mode, Refusal};

use super::{claims, gpu_label::label};
use crate::{
    config::{Config, Rule},
    geometry::Geometry,
    layout::Layout,
    plan::{self, Target},
    refusal,
    selector::{Selector, ranges},
    sharing::max_device_clients,
};

/// Returns one sentence for each unexpected effect.
pub(super) fn find(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let claimed = claims(config, gpus);
    let mut findings = Vec::new();
    for (position, rule) in config.rules.iter().enumerate() {
        let own: Vec<&Gpu> =
            gpus.iter().zip(&claimed).filter(|(_, by)| **by == Some(position)).map(|(gpu, _)| gpu).collect();
        let mut add = |text: String| findings.push(format!("{}: {text}", rule.label(position)));
        rule.matches.iter().filter_map(|selector| absent_index(selector, gpus)).for_each(&mut add);
        if !own.is_empty() {
            lost_indexes(rule, gpus, &own).into_iter().for_each(&mut add);
        }
        several_models(config, rule, &own).into_iter().for_each(&mut add);
        fewer_clients(config, rule, &own).into_iter().for_each(&mut add);
        one_replica(rule).into_iter().for_each(&mut add);
    }
    findings.extend(impossible_layouts(config, gpus));
    findings
}

/// Returns one sentence for each rule and GPU model whose layout is impossible, whatever uses the GPU now. `config check`
/// shows these layouts as refused plans.
#[must_use]
pub fn impossible_rule_layouts(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let mut seen: Vec<(usize, &str)> = Vec::new();
    let mut findings = Vec::new();
    for (gpu, by) in gpus.iter().zip(claims(config, gpus)) {
        let Some((position, rule)) = by.and_then(|at| Some((at, config.rules.get(at)?))) else { continue };
        let Some(layout) = config.layout_of(rule).filter(|_| !seen.contains(&(position, gpu.name.as_str()))) else {
            continue;
        };
        if let Some(refusal) = impossible(gpu, &layout) {
            seen.push((position, gpu.name.as_str()));
            let error = refusal::explain(&refusal, gpu.index, &label(gpu));
            let hint = error.hint.map_or_else(String::new, |hint| format!("; {hint}"));
            findings.push(format!("{}: {}{hint}", rule.label(position), error.message));
        }
    }
    findings
}

/// Returns why a GPU can never have a layout.
fn impossible(gpu: &Gpu, layout: &Layout) -> Option<Refusal> {
    let Some(mig) = &gpu.mig else { return Some(Refusal::NoMig) };
    if mig.profiles.is_empty() {
        return None;
    }
    let geometry = Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices);
    let planned = Target::resolve(&geometry, layout).and_then(|target| plan::plan(&geometry, &[], &target));
    planned.err()
}

/// Returns the profiles of a GPU that it knows; `None` if they are not known.
fn profiles(gpu: &Gpu) -> Option<BTreeSet<&str>> {
    let mig = gpu.mig.as_ref()?;
    (!mig.profiles.is_empty()).then(|| mig.profiles.iter().map(|profile| profile.name.as_str()).collect())
}

/// Returns a sentence if the host has only a part of a range of indexes.
pub(super) fn absent_index(selector: &Selector, gpus: &[Gpu]) -> Option<String> {
    let absent = selector.absent(gpus).filter(|_| !selector.matching(gpus).is_empty())?;
    Some(format!("`{selector}` contains GPU {absent}, which this host does not have"))
}

/// Returns a sentence if the rule names indexes of GPUs that earlier rules claim.
fn lost_indexes(rule: &Rule, gpus: &[Gpu], own: &[&Gpu]) -> Option<String> {
    let named = |selector: &&Selector| matches!(selector, Selector::Indexes(..));
    let matched = rule.matches.iter().filter(named).flat_map(|selector| selector.matching(gpus));
    let lost: BTreeSet<GpuIndex> =
        matched.map(|at| gpus[at].index).filter(|index| !own.iter().any(|gpu| gpu.index == *index)).collect();
    let numbers = ranges(lost);
    (!numbers.is_empty())
        .then(|| format!("it does not get GPU {}, because an earlier rule claims it", numbers.join(", ")))
}

/// Returns a sentence if a rule of mode `timeslice` admits only one lease to each GPU. A compute mode for one process, or for none,
/// shows that this is on purpose, or has its own warning.
fn one_replica(rule: &Rule) -> Option<String> {
    let policy = rule.timeslice.as_ref().filter(|policy| policy.replicas == 1)?;
    let is_open = matches!(policy.compute_mode, None | Some(ComputeMode::Default));
    is_open.then(|| {
        "only one lease at a time has each GPU, because `replicas` is 1; to share a GPU, write for example \
         timeslice = { replicas = 4 }"
            .to_owned()
    })
}

/// Returns a sentence if the layout of the rule fits only some models of its GPUs.
fn several_models(config: &Config, rule: &Rule, own: &[&Gpu]) -> Option<String> {
    let layout = config.layout_of(rule)?;
    let known: Vec<(&Gpu, BTreeSet<&str>)> = own.iter().filter_map(|gpu| Some((*gpu, profiles(gpu)?))).collect();
    let lacks = |(_, profiles): &&(&Gpu, BTreeSet<&str>)| {
        layout.entries.iter().any(|entry| !profiles.contains(entry.profile.as_str()))
    };
    let (other, _) = known.iter().find(lacks)?;
    let (fitting, _) = known.iter().find(|one| !lacks(one))?;
    Some(format!(
        "its layout fits {} (GPU {}), but not {} (GPU {}): write one rule for each model",
        fitting.name, fitting.index, other.name, other.index
    ))
}

/// Returns a sentence if MIG devices of the rule have fewer clients than `max_clients` says. The default is not the
/// author's number, so it is not reported.
fn fewer_clients(config: &Config, rule: &Rule, own: &[&Gpu]) -> Option<String> {
    let wanted = rule.mps.as_ref()?.max_clients;
    if rule.mode != Mode::Mig || wanted == MPS_CLIENTS {
        return None;
    }
    let layout = config.layout_of(rule)?;
    let mig = own.iter().find_map(|gpu| gpu.mig.as_ref())?;
    let least = layout.entries.iter().filter(|entry| entry.share.is_some()).filter_map(|entry| {
        let profile = mig.profiles.iter().find(|profile| profile.name == entry.profile)?;
        let slices = entry.compute_slices.unwrap_or(profile.slices);
        Some((max_device_clients(wanted, slices, mig.compute_slices), &entry.profile))
    });
    let (most, profile) = least.min_by_key(|(clients, _)| *clients)?;
    (most < wanted)
        .then(|| format!("`max_clients` is {wanted}, but a daemon of {profile} serves at most {most} clients"))
}

/// Returns a sentence for each profile of a named layout that no GPU of the host has. The plan of a rule reports the
/// layouts that rules use.
fn impossible_layouts(config: &Config, gpus: &[Gpu]) -> Vec<String> {
    let known: Option<Vec<BTreeSet<&str>>> = gpus.iter().filter(|gpu| gpu.mig.is_some()).map(profiles).collect();
    let Some(known) = known.filter(|known| !known.is_empty()) else { return Vec::new() };
    let is_used = |layout: &Layout| config.rules.iter().any(|rule| config.layout_of(rule).as_ref() == Some(layout));
    let unused = config.layouts.iter().filter(|(_, layout)| !is_used(layout));
    let of = |(name, layout): (&String, &Layout)| {
        let absent =
            layout.entries.iter().find(|entry| !known.iter().any(|all| all.contains(entry.profile.as_str())))?;
        Some(format!(
            "layout `{name}`: no GPU of this host has the profile {}, and no rule uses the layout",
            absent.profile
        ))
    };
    unused.filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preset;

    fn found(text: &str, host: &str) -> Vec<String> {
        find(&Config::parse(text, "config.toml").unwrap(), &preset::gpus(host).unwrap())
    }

    fn check(text: &str, expected: &[&str]) {
        assert_eq!(found(text, "dgx-a100"), expected, "{text}");
    }

    #[test]
    fn range_beyond_the_host_is_reported() {
        check(
            "[[gpu]]\nmatch = \"0-9\"\nmode = \"exclusive\"\n",
            &["rule 1: `0-9` contains GPU 8, which this host does not have"],
        );
        check("[[gpu]]\nmatch = [\"0-3\", \"4-7\"]\nmode = \"exclusive\"\n", &[]);
    }

    #[test]
    fn rule_that_loses_gpus_to_an_earlier_rule_is_reported() {
        let rules = |first: &str, second: &str| {
            format!(
                "[[gpu]]\nmatch = \"{first}\"\nmode = \"exclusive\"\n[[gpu]]\nmatch = \"{second}\"\nmode = \"mps\"\n"
            )
        };
        check(&rules("0-3", "2-5"), &["rule 2: it does not get GPU 2-3, because an earlier rule claims it"]);
        check(&rules("0-3", "all"), &[]);
        check(&rules("0-3", "4-7"), &[]);
    }

    #[test]
    fn time_slicing_without_replicas_is_reported() {
        let rule = |more: &str| format!("[[gpu]]\nmatch = \"0\"\nmode = \"timeslice\"\n{more}\n");
        assert!(found(&rule(""), "dgx-a100")[0].contains("timeslice = { replicas = 4 }"));
        check(&rule("timeslice = { replicas = 2 }"), &[]);
    }

    #[test]
    fn client_limit_above_the_share_of_a_device_is_reported() {
        let rule = |clients: u32| {
            format!(
                "[[gpu]]\nmatch = \"0\"\nmode = \"mig\"\nlayout = [\"3g.40gb:mps\"]\nmps = {{ max_clients = {clients} }}\n"
            )
        };
        check(&rule(30), &["rule 1: `max_clients` is 30, but a daemon of 3g.40gb serves at most 20 clients"]);
        check(&rule(20), &[]);
    }

    #[test]
    fn unused_layout_with_an_unknown_profile_is_reported() {
        check(
            "[layouts]\nbig = [\"3g.99gb\"]\nsmall = [\"1g.10gb\"]\n",
            &["layout `big`: no GPU of this host has the profile 3g.99gb, and no rule uses the layout"],
        );
    }

    #[test]
    fn layout_that_does_not_fit_all_models_of_a_rule_is_reported() {
        let text = "[[gpu]]\nmatch = \"all\"\nmode = \"mig\"\nlayout = [\"1g.10gb*7\"]\n";
        let reported = found(text, "mixed");
        assert!(reported.iter().any(|one| one.ends_with("write one rule for each model")), "{reported:?}");
        check(text, &[]);
    }

    #[test]
    fn impossible_layout_is_reported_once_for_each_model() {
        let of = |layout: &str| {
            let text = format!("[[gpu]]\nmatch = \"0-3\"\nmode = \"mig\"\nlayout = [\"{layout}\"]\n");
            let config = Config::parse(&text, "config.toml").unwrap();
            impossible_rule_layouts(&config, &preset::gpus("dgx-a100").unwrap())
        };
        assert_eq!(of("1g.10gb*7"), [""; 0]);
        let found = of("4g.40gb*2");
        assert!(found.len() == 1 && found[0].starts_with("rule 1: ") && found[0].contains("GPU 0"), "{found:?}");
    }
}
