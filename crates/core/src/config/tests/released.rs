//! Configs of released versions. Every later version must accept them with the same meaning.

use std::collections::BTreeSet;

use crate::config::{AgentDown, Config, LogLevel, schema};

/// Configs that contain every key of their version, oldest first. The values of the settings are not the defaults. The
/// last config belongs to the current version, and gets new keys until the release. After the release it never changes.
const RELEASES: [(&str, &str); 1] = [("v0.1", include_str!("../../../tests/fixtures/config-v0.1.toml"))];

#[test]
fn config_of_each_release_is_accepted() {
    for (release, text) in RELEASES {
        let config = Config::parse(text, release).unwrap_or_else(|errors| panic!("{release}: {errors}"));
        assert!(config.auto_reconcile && config.log.level == LogLevel::Debug, "{release}");
        assert_eq!((config.slurm.agent_down, config.processes.allow.len()), (AgentDown::Pass, 2), "{release}");
        assert_eq!((config.quotas.len(), config.layouts.len(), config.rules.len()), (1, 3, 7), "{release}");
        let policy = config.rules.iter().find(|rule| rule.label(0) == "inference").and_then(|rule| rule.mps.clone());
        assert_eq!(policy.map(|mps| mps.settings.percentage.to_string()).as_deref(), Some("12.5"), "{release}");
    }
}

/// Each line of the fixture must change the config. Otherwise, the parser accepts a key that has no effect. Rules and
/// quotas need several keys, so other tests check their keys.
#[test]
fn each_key_has_an_effect_on_the_config() {
    let (release, text) = RELEASES[RELEASES.len() - 1];
    let mut header = "";
    let mut tried = 0;
    for line in text.lines() {
        if line.starts_with('[') {
            header = line;
        }
        // The names of exempt rules need the rules.
        if !line.contains(" = ")
            || line.starts_with("rules = ")
            || header.starts_with("[[")
            || header.starts_with("[gpu.")
        {
            continue;
        }
        let config = Config::parse(&format!("{header}\n{line}\n"), release).unwrap_or_else(|e| panic!("{e}"));
        assert_ne!(config, Config::default(), "{header} {line}: the value is the default");
        assert!(!Config::default().differences(&config).is_empty(), "{header} {line}: a reload would not show it");
        assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config, "{header} {line}");
        tried += 1;
    }
    assert!(tried > 30, "{tried}");
}

#[test]
fn config_fixture_of_this_version_has_every_key() {
    let (release, text) = RELEASES[RELEASES.len() - 1];
    let mut header = "";
    let mut present = BTreeSet::new();
    for line in text.lines() {
        if line.starts_with('[') {
            header = line;
            present.insert((header, ""));
        } else if let Some((key, _)) = line.split_once(" = ") {
            present.insert((header, key));
        }
    }
    for section in schema::SECTIONS {
        for key in section.keys.iter().chain([&""]) {
            let is_top = section.header.is_empty() && key.is_empty();
            let name = format!("{} {key}", section.header);
            assert!(
                is_top || present.contains(&(section.header, key)),
                "crates/core/tests/fixtures/config-{release}.toml lacks {name}: add it, or the fixture of a new version"
            );
        }
    }
    let allow = text.lines().find(|line| line.starts_with("allow = ")).unwrap_or_default();
    for key in schema::ALLOW.keys {
        assert!(allow.contains(&format!("{key} = ")), "the entries of processes.allow lack {key}");
    }
}
