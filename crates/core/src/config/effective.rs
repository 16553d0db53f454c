//! The config in force, written out whole: as TOML that reads back to the same config, and as the
//! API shows it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use gpush_api::{ConfigView, Gpu, NamedLayout, PendingRestart, RuleView, SettingDiff};

use super::{Config, WantedLayout, rules::mode_name};
use crate::desired;

impl Config {
    /// The whole config as TOML, defaults filled in. Reading it gives the same config.
    #[must_use]
    pub fn effective(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(out, "auto_reconcile = {}", self.auto_reconcile);
        let mut table = "";
        for (section, key, value) in self.of_the_agent() {
            if section != table {
                let _ = writeln!(out, "\n[{section}]");
                table = section;
            }
            if let Some(value) = value {
                let _ = writeln!(out, "{key} = {value}");
            }
        }
        let _ = writeln!(out, "\n[access]\nadmin_groups = {}", list(&self.access.admin_groups));
        let xids: Vec<String> = self.health.cordon_xids.iter().map(u32::to_string).collect();
        let _ = writeln!(out, "\n[health]\ncordon_xids = [{}]\npoll_s = {}", xids.join(", "), self.health.poll_s);
        let change = &self.mode_change;
        let _ = writeln!(out, "\n[mode_change]\nservices = {}", list(&change.services));
        for (key, hook) in [("before", &change.before), ("after", &change.after)] {
            if let Some(hook) = hook {
                let _ = writeln!(out, "{key} = {}", text(hook));
            }
        }
        for (key, seconds) in [("hook_s", change.hook_s), ("service_s", change.service_s), ("reset_s", change.reset_s)]
        {
            let _ = writeln!(out, "{key} = {seconds}");
        }
        let _ = writeln!(out, "nvidia_smi = {}", text(&change.nvidia_smi));
        let _ = writeln!(out, "systemctl = {}", text(&change.systemctl));
        let groups: Vec<String> = change.reset_together.iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "reset_together = {}", list(&groups));
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
            let _ = writeln!(out, "mode = {}", text(mode_name(rule.mode)));
            match &rule.layout {
                Some(WantedLayout::Named(name)) => {
                    let _ = writeln!(out, "layout = {}", text(name));
                }
                Some(WantedLayout::Inline(layout)) => {
                    let _ = writeln!(out, "layout = {}", list(&layout.canonical()));
                }
                None => {}
            }
        }
        out
    }

    /// The settings about the agent itself: table, key and value as TOML, in the order of the file.
    fn of_the_agent(&self) -> [(&'static str, &'static str, Option<String>); 8] {
        let Self { log, driver, api, .. } = self;
        [
            ("log", "level", Some(text(log.level.name()))),
            ("driver", "library", Some(text(&driver.library))),
            ("driver", "start_s", Some(driver.start_s.to_string())),
            ("driver", "read_ms", Some(driver.read_ms.to_string())),
            ("driver", "change_s", Some(driver.change_s.to_string())),
            ("api", "socket_group", api.socket_group.as_deref().map(text)),
            ("api", "socket_mode", Some(format!("\"{:04o}\"", api.socket_mode))),
            ("api", "admin_socket", api.admin_socket.as_deref().map(text)),
        ]
    }

    /// In which settings about the agent itself a file differs from what is in force: they wait
    /// for a restart.
    #[must_use]
    pub fn pending_restart(&self, in_file: &Self) -> Vec<PendingRestart> {
        let both = self.of_the_agent().into_iter().zip(in_file.of_the_agent());
        both.filter(|((_, _, in_force), (_, _, in_file))| in_force != in_file)
            .map(|((table, key, in_force), (_, _, in_file))| PendingRestart {
                key: format!("{table}.{key}"),
                in_force,
                in_file,
            })
            .collect()
    }

    /// All settings that a file has otherwise than this config, rules excepted: what those come to is
    /// told GPU by GPU.
    #[must_use]
    pub fn differences(&self, in_file: &Self) -> Vec<SettingDiff> {
        let ours = self.settings();
        let theirs = in_file.settings();
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

    /// Settings by key with their table, as TOML.
    fn settings(&self) -> BTreeMap<String, String> {
        let agent = self.of_the_agent().into_iter();
        let agent = agent.filter_map(|(table, key, value)| Some((format!("{table}.{key}"), value?)));
        let layouts = self.layouts.iter().map(|(name, layout)| (format!("layouts.{name}"), list(&layout.canonical())));
        agent
            .chain(layouts)
            .chain([
                ("auto_reconcile".to_owned(), self.auto_reconcile.to_string()),
                ("access.admin_groups".to_owned(), list(&self.access.admin_groups)),
            ])
            .collect()
    }

    /// As the API shows it; `path` is the file it came from, `gpus` those that rules may claim.
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
                    gpus: rule.matches.iter().map(ToString::to_string).collect(),
                    mode: rule.mode,
                    layout: rule.layout.as_ref().map(|layout| match layout {
                        WantedLayout::Named(name) => vec![name.clone()],
                        WantedLayout::Inline(layout) => layout.canonical(),
                    }),
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
            effective: self.effective(),
            pending_restart: Vec::new(),
            trouble: None,
            generation: 0,
        }
    }
}

fn text(value: &str) -> String {
    toml::Value::String(value.to_owned()).to_string()
}

fn list(values: &[String]) -> String {
    let items: Vec<String> = values.iter().map(|value| text(value)).collect();
    format!("[{}]", items.join(", "))
}
