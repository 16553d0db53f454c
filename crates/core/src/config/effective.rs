//! The complete effective config: as TOML that parses to the same config, and as the API shows it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use gpush_api::{ConfigView, Gpu, NamedLayout, PendingRestart, RuleView, SettingDiff};

use super::{
    Config, PriceRule, QuotaRule, RuleLayout, idle, job_default, leasing, over_limit, requirements, sharing, timeslice,
    toml_text::{list, text},
};
use crate::{desired, layout::DYNAMIC, lease::quota::Subject};

impl Config {
    /// Returns the whole config as TOML, including defaults. This TOML parses to the same config.
    #[must_use]
    pub fn effective(&self) -> String {
        let mut out = String::new();
        let mut table = "";
        for (section, key, value) in self.settings() {
            let Some(value) = value else { continue };
            if section != table {
                let _ = writeln!(out, "\n[{section}]");
                table = section;
            }
            let _ = writeln!(out, "{key} = {value}");
        }
        self.quotas.iter().for_each(|quota| write_quota(&mut out, quota));
        self.prices.iter().for_each(|price| write_price(&mut out, price));
        self.write_layouts_and_rules(&mut out);
        out
    }

    /// Returns the part of the effective config that concerns a user: the layouts, the rules, and the quota of the user.
    /// `quota` is what the user's quota names: the user, a group, or everybody.
    fn effective_for_user(&self, quota: Option<&Subject>) -> String {
        let mut out = "# Only administrators see the other settings.\n".to_owned();
        let own = quota.and_then(|subject| {
            let rule = self.quotas.iter().find(|rule| rule.subjects.contains(subject))?;
            Some(QuotaRule { subjects: vec![subject.clone()], ..rule.clone() })
        });
        own.iter().for_each(|quota| write_quota(&mut out, quota));
        self.write_layouts_and_rules(&mut out);
        out
    }

    fn write_layouts_and_rules(&self, out: &mut String) {
        if !self.layouts.is_empty() {
            let _ = writeln!(out, "\n[layouts]");
            for (name, layout) in &self.layouts {
                let _ = writeln!(out, "{name} = {}", list(&layout.canonical()));
            }
        }
        for rule in &self.rules {
            let _ = writeln!(out, "\n[[gpu]]");
            if let Some(name) = &rule.name {
                let _ = writeln!(out, "name = {}", text(name));
            }
            let matches: Vec<String> = rule.matches.iter().map(ToString::to_string).collect();
            let _ = writeln!(out, "match = {}", list(&matches));
            let _ = writeln!(out, "mode = {}", text(rule.mode.name()));
            match &rule.layout {
                Some(RuleLayout::Named(name)) => {
                    let _ = writeln!(out, "layout = {}", text(name));
                }
                Some(RuleLayout::Inline(layout)) => {
                    let _ = writeln!(out, "layout = {}", list(&layout.canonical()));
                }
                Some(RuleLayout::Dynamic) => {
                    let _ = writeln!(out, "layout = {}", text(DYNAMIC));
                }
                None => {}
            }
            for (key, value) in rule.lease.iter().flat_map(leasing::written) {
                let _ = writeln!(out, "{key} = {}", text(value));
            }
            if let Some((key, value)) = job_default::written(rule) {
                let _ = writeln!(out, "{key} = {value}");
            }
            for (key, value) in over_limit::written(rule) {
                let _ = writeln!(out, "{key} = {value}");
            }
            for (key, names) in rule.access.iter().flat_map(leasing::written_access) {
                let _ = writeln!(out, "{key} = {}", list(names));
            }
            for (key, value) in requirements::written(rule) {
                let _ = writeln!(out, "{key} = {}", text(value));
            }
            if let Some(policy) = &rule.mps {
                let _ = writeln!(out, "mps = {}", sharing::written(policy, rule.mode));
            }
            if let Some(policy) = &rule.timeslice {
                let _ = writeln!(out, "timeslice = {}", timeslice::written(policy));
            }
            if let Some(own) = &rule.idle {
                let _ = writeln!(out, "idle = {}", idle::written_rule(own));
            }
        }
    }

    /// Returns the settings that differ between `self` and the file, and that take effect only
    /// after a restart of gpushd. In `self`, a setting that needs a restart has the value that it
    /// had when gpushd started. All other settings of `self` are from the file.
    #[must_use]
    pub fn pending_restart(&self, in_file: &Self) -> Vec<PendingRestart> {
        let both = self.settings().into_iter().zip(in_file.settings());
        both.filter(|((_, _, in_force), (_, _, in_file))| in_force != in_file)
            .map(|((table, key, in_force), (_, _, in_file))| PendingRestart {
                key: dotted(table, key),
                in_force,
                in_file,
            })
            .collect()
    }

    /// Returns all settings that differ between this config and the file. Rules are not
    /// included, because gpushd compares their effect on each GPU instead.
    #[must_use]
    pub fn differences(&self, in_file: &Self) -> Vec<SettingDiff> {
        let ours = self.by_key();
        let theirs = in_file.by_key();
        let keys: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
        let changed = |key: &&String| ours.get(*key) != theirs.get(*key);
        let diff = |key: &String| SettingDiff {
            in_force: ours.get(key).cloned(),
            in_file: theirs.get(key).cloned(),
            restart: key.starts_with("driver.") || key == "api.admin_socket",
            key: key.clone(),
        };
        keys.into_iter().filter(changed).map(diff).collect()
    }

    /// Returns settings, layouts, quotas and prices as TOML, by table and key.
    fn by_key(&self) -> BTreeMap<String, String> {
        let settings = self.settings().into_iter();
        let settings = settings.filter_map(|(table, key, value)| Some((dotted(table, key), value?)));
        let layouts = self.layouts.iter().map(|(name, layout)| (dotted("layouts", name), list(&layout.canonical())));
        let quotas = self.quotas.iter().enumerate().map(|(position, quota)| {
            let pairs: Vec<String> = quota.written().iter().map(|(key, value)| format!("{key} = {value}")).collect();
            (dotted("quota", &(position + 1).to_string()), format!("{{ {} }}", pairs.join(", ")))
        });
        let prices = self.prices.iter().enumerate().map(|(position, price)| {
            let pairs: Vec<String> = price.written().iter().map(|(key, value)| format!("{key} = {value}")).collect();
            (dotted("price", &(position + 1).to_string()), format!("{{ {} }}", pairs.join(", ")))
        });
        settings.chain(layouts).chain(quotas).chain(prices).collect()
    }

    /// Returns the config as the API shows it. `path` is the config's file. `gpus` are the GPUs
    /// that rules may claim.
    #[must_use]
    pub fn view(&self, path: Option<&str>, gpus: &[Gpu]) -> ConfigView {
        let claimed = desired::claims(self, gpus);
        ConfigView {
            path: path.map(str::to_owned),
            rules: self
                .rules
                .iter()
                .enumerate()
                .map(|(position, rule)| RuleView {
                    name: rule.label(position),
                    selectors: rule.matches.iter().map(ToString::to_string).collect(),
                    mode: rule.mode,
                    layout: rule.layout.as_ref().map(|layout| match layout {
                        RuleLayout::Named(name) => vec![name.clone()],
                        RuleLayout::Inline(layout) => layout.canonical(),
                        RuleLayout::Dynamic => vec![DYNAMIC.to_owned()],
                    }),
                    mps: rule.mps.clone(),
                    timeslice: rule.timeslice.clone(),
                    lease: rule.lease,
                    access: rule.access.clone(),
                    claims: gpus
                        .iter()
                        .zip(&claimed)
                        .filter(|(_, by)| **by == Some(position))
                        .map(|(gpu, _)| gpu.index)
                        .collect(),
                })
                .collect(),
            layouts: self
                .layouts
                .iter()
                .map(|(name, layout)| NamedLayout { name: name.clone(), entries: layout.canonical() })
                .collect(),
            unleased: self.processes.unleased,
            effective: self.effective(),
            pending_restart: Vec::new(),
            trouble: None,
            generation: 0,
        }
    }

    /// Returns the config as the API shows it to a user who is not an administrator. Quotas of other users, hooks and
    /// the entries of `allow` are missing. `quota` is what the user's quota names.
    #[must_use]
    pub fn view_for_user(&self, path: Option<&str>, gpus: &[Gpu], quota: Option<&Subject>) -> ConfigView {
        ConfigView { effective: self.effective_for_user(quota), ..self.view(path, gpus) }
    }
}

fn write_quota(out: &mut String, quota: &QuotaRule) {
    let _ = writeln!(out, "\n[[quota]]");
    for (key, value) in quota.written() {
        let _ = writeln!(out, "{key} = {value}");
    }
}

fn write_price(out: &mut String, price: &PriceRule) {
    let _ = writeln!(out, "\n[[price]]");
    for (key, value) in price.written() {
        let _ = writeln!(out, "{key} = {value}");
    }
}

fn dotted(table: &str, key: &str) -> String {
    if table.is_empty() { key.to_owned() } else { format!("{table}.{key}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: every user could read the names in the quotas, the paths of hooks, and the entries of `allow`.
    #[test]
    fn config_for_user_has_no_settings_and_no_quota_of_others() {
        let text = "[mode_change]\nbefore = \"/opt/hooks/before\"\n[access]\nadmin_groups = [\"ops\"]\n\
                    [processes]\nallow = [{ exe = \"/opt/monitor\" }]\n\
                    [[quota]]\nusers = [\"alice\", \"bob\"]\nleases = 3\n[[quota]]\ngroups = [\"staff\"]\nleases = 2\n\
                    [layouts]\nhalves = [\"3g.40gb*2\"]\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"halves\"\n";
        let config = Config::parse(text, "config.toml").unwrap();
        let alice = Subject::User("alice".to_owned());
        let view = config.view_for_user(Some("config.toml"), &[], Some(&alice));
        for hidden in ["bob", "staff", "hooks", "monitor", "ops"] {
            assert!(config.effective().contains(hidden) && !view.effective.contains(hidden), "{hidden}: {view:?}");
        }
        let seen = Config::parse(&view.effective, "seen.toml").unwrap();
        assert_eq!((seen.rules, seen.layouts), (config.rules.clone(), config.layouts.clone()));
        assert_eq!((seen.quotas.len(), &seen.quotas[0].subjects, seen.quotas[0].leases), (1, &vec![alice], Some(3)));
        assert_eq!(config.view_for_user(None, &[], None).effective.matches("[[quota]]").count(), 0);
    }
}
