//! Configs to begin with: a few lines for a lab server, a Slurm node or an inference host.

use std::fmt::Write as _;

use gpush_api::{Driver, Gpu, GpuIndex, GpuProfile};

use super::{Isolation, toml_text};
use crate::{
    desired::{KnownHost, serves_many_users},
    selector,
};

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
    /// Returns the config for a host, as TOML with comments.
    pub fn config(&self, host: KnownHost<'_>) -> String {
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
        for RuleGroup { indexes, models, rule } in self.groups_with_rules(host) {
            let _ = writeln!(out, "[[gpu]]");
            let ranges = selector::ranges(indexes.iter().copied());
            let match_ = match ranges.as_slice() {
                [one] => format!("match = \"{one}\""),
                several => format!("match = {}", toml_text::list(several)),
            };
            let what = match models.as_slice() {
                [one] => format!("{} x {one}", indexes.len()),
                several => format!("{} GPUs of {} models", indexes.len(), several.len()),
            };
            let _ = writeln!(out, "{match_:<24}# {what}");
            out += &rule;
            if !self.groups.is_empty() {
                let _ = writeln!(out, "groups = {}", toml_text::list(&self.groups));
            }
        }
        if self.site == Site::Lab {
            out += &self.quota();
        }
        out
    }

    /// Returns the GPUs of each rule, in the order of the first GPU of the rule.
    fn groups_with_rules<'a>(&self, host: KnownHost<'a>) -> Vec<RuleGroup<'a>> {
        let mut groups: Vec<RuleGroup<'a>> = Vec::new();
        for gpu in host.gpus {
            let rule = self.rule(gpu, host.driver);
            let at = groups.iter().position(|group| group.rule == rule).unwrap_or_else(|| {
                groups.push(RuleGroup { indexes: Vec::new(), models: Vec::new(), rule });
                groups.len() - 1
            });
            let Some(group) = groups.get_mut(at) else { continue };
            group.indexes.push(gpu.index);
            if !group.models.contains(&gpu.name.as_str()) {
                group.models.push(&gpu.name);
            }
        }
        groups
    }

    /// Returns the mode of a rule and what belongs to it.
    fn rule(&self, gpu: &Gpu, driver: Option<&Driver>) -> String {
        match (self.isolation, smallest(gpu)) {
            (Isolation::Hard, Some(profile)) => {
                format!("mode = \"mig\"\nlayout = [\"{}*{}\"]\n", profile.name, profile.max)
            }
            (Isolation::Hard, None) => {
                "mode = \"exclusive\"      # this model has no MIG: one lease for each GPU\n".to_owned()
            }
            (Isolation::Shared, _) => {
                let (note, users) = match driver {
                    Some(driver) if !serves_many_users(driver) => {
                        (format!("driver {} serves one user at a time", driver.version), "")
                    }
                    Some(_) => ("several users at a time".to_owned(), ", users = \"many\""),
                    None => ("users = \"many\" needs driver 555".to_owned(), ", users = \"many\""),
                };
                format!(
                    "mode = \"mps\"            # {note}\nmps = {{ percentage = 25{users} }}\n\
                     isolation = \"shared\"    # users accept each other's faults\n"
                )
            }
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

/// The GPUs of one rule.
struct RuleGroup<'a> {
    indexes: Vec<GpuIndex>,
    models: Vec<&'a str>,
    rule: String,
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

    fn on(gpus: &[Gpu]) -> KnownHost<'_> {
        KnownHost { gpus, driver: None }
    }

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
                let text = starter.config(on(&gpus));
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
            let text = starter.config(on(&gpus));
            assert!(text.lines().count() < 20, "{text}");
        }
    }

    #[test]
    fn lab_with_mig_gives_each_student_one_slice() {
        let starter = Starter { site: Site::Lab, isolation: Isolation::Hard, groups: vec!["students".to_owned()] };
        insta::assert_snapshot!(starter.config(on(&preset::gpus("dgx-a100").unwrap())));
    }

    /// Fault: the selector of GPUs of one model that are not adjacent named no GPU.
    #[test]
    fn gpus_of_one_model_need_not_be_adjacent() {
        let mut gpus = preset::gpus("dgx-a100").unwrap();
        gpus.truncate(3);
        gpus[1] = Gpu { index: gpus[1].index, ..preset::gpus("mixed").unwrap().pop().unwrap() };
        let text = Starter { site: Site::Inference, isolation: Isolation::Hard, groups: Vec::new() }.config(on(&gpus));
        assert!(text.contains("match = [\"0\", \"2\"]") && text.contains("match = \"1\""), "{text}");
    }

    /// Fault: the config had users = "many" although gpushd knew that the driver does not support it.
    #[test]
    fn old_driver_gets_daemons_for_one_user() {
        let starter = Starter { site: Site::Lab, isolation: Isolation::Shared, groups: Vec::new() };
        let gpus = preset::gpus("dgx-a100").unwrap();
        let driver = |version: &str| Driver {
            version: version.to_owned(),
            nvml: String::new(),
            cuda: "12.4".to_owned(),
            library: String::new(),
            simulated: true,
            memory_limits: false,
        };
        let with = |version: &str| {
            let driver = driver(version);
            let host = KnownHost { gpus: &gpus, driver: Some(&driver) };
            let text = starter.config(host);
            let config = Config::parse(&text, "config.toml").unwrap();
            let remarks = desired::findings(&config, Some(host));
            assert!(!remarks.iter().any(|one| one.to_string().contains("driver")), "{remarks:?}");
            text.contains("users = \"many\"")
        };
        assert_eq!((with("550.163.01"), with("560.28.03")), (false, true));
    }

    #[test]
    fn equal_rules_of_several_models_are_one_rule() {
        let starter = Starter { site: Site::Inference, isolation: Isolation::Shared, groups: Vec::new() };
        insta::assert_snapshot!(starter.config(on(&preset::gpus("mixed").unwrap())));
    }
}
