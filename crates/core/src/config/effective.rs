//! The config in force, written out whole: as TOML that reads back to the same config, and as the
//! API shows it.

use std::fmt::Write as _;

use gpush_api::{ConfigView, Gpu, NamedLayout, RuleView};

use super::{Config, WantedLayout, rules::mode_name};
use crate::desired;

impl Config {
    /// The whole config as TOML, defaults filled in. Reading it gives the same config.
    #[must_use]
    pub fn effective(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(out, "auto_reconcile = {}", self.auto_reconcile);
        let _ = writeln!(out, "\n[log]\nlevel = {}", text(self.log.level.name()));
        let driver = &self.driver;
        let _ = writeln!(out, "\n[driver]\nlibrary = {}", text(&driver.library));
        let _ = writeln!(out, "start_s = {}", driver.start_s);
        let _ = writeln!(out, "read_ms = {}", driver.read_ms);
        let _ = writeln!(out, "change_s = {}", driver.change_s);
        let _ = writeln!(out, "\n[api]");
        if let Some(group) = &self.api.socket_group {
            let _ = writeln!(out, "socket_group = {}", text(group));
        }
        let _ = writeln!(out, "socket_mode = \"{:04o}\"", self.api.socket_mode);
        let _ = writeln!(out, "\n[access]\nadmin_groups = {}", list(&self.access.admin_groups));
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
