//! Configs to begin with: a few lines for a lab server, a Slurm node or an inference host.

use std::fmt::Write as _;

use gpush_api::{Gpu, GpuIndex, GpuProfile};

use super::{Isolation, toml_text};
use crate::selector;

/// The use of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// Users log in, and share the GPUs.
    Lab,
    /// Slurm grants the GPUs to jobs.
    Slurm,
    /// Services run on the GPUs.
    Inference,
}

/// What the config is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Starter {
    /// The use of the host.
    pub site: Site,
    /// The isolation of users: MIG where the GPU supports it, or MPS.
    pub isolation: Isolation,
    /// Groups whose members may lease; empty for all users. Only for a lab.
    pub groups: Vec<String>,
}

impl Starter {
    /// Returns the config for these GPUs, as TOML with comments. `gpus` must contain their profiles.
    pub fn config(&self, gpus: &[Gpu]) -> String {
        let mut out = String::new();
        let first = match self.site {
            Site::Lab => "A lab server: users lease shares of the GPUs.",
            Site::Slurm => "A Slurm node: jobs get shares of the GPUs.",
            Site::Inference => "An inference host: services share the GPUs.",
        };
        let _ = writeln!(out, "# {first} Check it with `gpushctl config check FILE`.");
        match self.site {
            Site::Lab => {
                out += "[processes]\nunleased = \"end\"        # end processes that have no lease\n[defaults]\n\
                        lease = \"required\"\nat_end = \"end\"          # end the processes of an expired lease\n";
            }
            Site::Slurm => out += "[defaults]\nowner = \"slurm\"         # only jobs get leases\n",
            Site::Inference => {}
        }
        for (indexes, gpu) in groups(gpus) {
            let _ = writeln!(out, "[[gpu]]");
            let ranges = selector::ranges(indexes.iter().copied());
            let match_ = match ranges.as_slice() {
                [one] => format!("match = \"{one}\""),
                several => format!("match = {}", toml_text::list(several)),
            };
            let _ = writeln!(out, "{match_:<24}# {} x {}", indexes.len(), gpu.name);
            out += &self.rule(gpu);
            if !self.groups.is_empty() {
                let _ = writeln!(out, "groups = {}", toml_text::list(&self.groups));
            }
        }
        if self.site == Site::Lab {
            out += &self.quota();
        }
        out
    }

    /// Returns the mode of a rule and what belongs to it.
    fn rule(&self, gpu: &Gpu) -> String {
        match (self.isolation, smallest(gpu)) {
            (Isolation::Hard, Some(profile)) => {
                format!("mode = \"mig\"\nlayout = [\"{}*{}\"]\n", profile.name, profile.max)
            }
            (Isolation::Hard, None) => {
                "mode = \"exclusive\"      # this model has no MIG: one lease for each GPU\n".to_owned()
            }
            (Isolation::Shared, _) => "mode = \"mps\"            # users = \"many\" needs driver 555\n\
                 mps = { percentage = 25, users = \"many\" }\nisolation = \"shared\"    # users accept each other's faults\n"
                .to_owned(),
        }
    }

    fn quota(&self) -> String {
        let who = if self.groups.is_empty() {
            "everybody = true".to_owned()
        } else {
            format!("groups = {}", toml_text::list(&self.groups))
        };
        format!("[[quota]]\n{who}\nleases = 1\nlongest = \"12h\"\n")
    }
}

/// Returns the GPUs of each model, in the order of the first GPU of the model.
fn groups(gpus: &[Gpu]) -> Vec<(Vec<GpuIndex>, &Gpu)> {
    let mut groups: Vec<(Vec<GpuIndex>, &Gpu)> = Vec::new();
    for gpu in gpus {
        match groups.iter_mut().find(|(_, first)| first.name == gpu.name) {
            Some((indexes, _)) => indexes.push(gpu.index),
            None => groups.push((vec![gpu.index], gpu)),
        }
    }
    groups
}

/// Returns the profile that divides a GPU into the most instances; among these, the one with the simplest name.
fn smallest(gpu: &Gpu) -> Option<&GpuProfile> {
    let profiles = gpu.mig.as_ref()?.profiles.iter();
    profiles
        .filter(|profile| profile.max > 1)
        .max_by_key(|profile| (profile.max, std::cmp::Reverse(profile.name.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Config, desired, preset};

    fn all() -> impl Iterator<Item = Starter> {
        let sites = [Site::Lab, Site::Slurm, Site::Inference];
        let isolations = [Isolation::Hard, Isolation::Shared];
        sites.into_iter().flat_map(move |site| {
            let groups = if site == Site::Lab { vec!["students".to_owned()] } else { Vec::new() };
            isolations.into_iter().map(move |isolation| Starter { site, isolation, groups: groups.clone() })
        })
    }

    #[test]
    fn each_config_is_valid_on_each_preset_and_has_a_plan() {
        for (name, _) in preset::names() {
            let gpus = preset::gpus(name).unwrap();
            for starter in all() {
                let text = starter.config(&gpus);
                let config = Config::parse(&text, "config.toml").unwrap_or_else(|errors| panic!("{text}\n{errors}"));
                let plans = desired::plan_host(&config, &gpus, &gpush_api::PlanRequest::default());
                assert_eq!(desired::lints(&config), [], "{text}");
                for plan in plans.map(|plans| plans.plans).unwrap_or_default() {
                    assert!(plan.refusal.is_none(), "{name}: {text}\n{plan:?}");
                }
            }
        }
    }

    #[test]
    fn each_config_of_a_host_with_one_model_has_fewer_than_20_lines() {
        let gpus = preset::gpus("dgx-a100").unwrap();
        for starter in all() {
            let text = starter.config(&gpus);
            assert!(text.lines().count() < 20, "{text}");
        }
    }

    #[test]
    fn lab_with_mig_gives_each_student_one_slice() {
        let starter = Starter { site: Site::Lab, isolation: Isolation::Hard, groups: vec!["students".to_owned()] };
        insta::assert_snapshot!(starter.config(&preset::gpus("dgx-a100").unwrap()));
    }

    /// Fault: the selector of GPUs of one model that are not adjacent named no GPU.
    #[test]
    fn gpus_of_one_model_need_not_be_adjacent() {
        let mut gpus = preset::gpus("dgx-a100").unwrap();
        gpus.truncate(3);
        gpus[1].name = "another".to_owned();
        let text = Starter { site: Site::Inference, isolation: Isolation::Shared, groups: Vec::new() }.config(&gpus);
        assert!(text.contains("match = [\"0\", \"2\"]") && text.contains("match = \"1\""), "{text}");
    }

    #[test]
    fn mixed_host_gets_one_rule_for_each_model() {
        let starter = Starter { site: Site::Inference, isolation: Isolation::Shared, groups: Vec::new() };
        insta::assert_snapshot!(starter.config(&preset::gpus("mixed").unwrap()));
    }
}
