//! Checks that the example file and the reference agree with the code.

use super::super::*;

const EXAMPLE: &str = include_str!("../../../../../config.example.toml");
const REFERENCE: &str = include_str!("../../../../../docs/config.md");

/// Returns the example with the commented-out settings enabled. A comment starts with `# `, a
/// commented-out setting with `#` alone.
fn uncommented(example: &str) -> String {
    let setting = |line: &str| match line.strip_prefix('#') {
        Some(rest) if !rest.is_empty() && !rest.starts_with(' ') => rest.to_owned(),
        Some(_) | None => line.to_owned(),
    };
    example.lines().map(setting).collect::<Vec<_>>().join("\n")
}

#[test]
fn unchanged_example_manages_no_gpu() {
    let config = Config::parse(EXAMPLE, "config.example.toml").unwrap_or_else(|e| panic!("{e}"));
    assert!(config.rules.is_empty(), "installed as it is it must not touch a GPU");
    assert_eq!(Config { layouts: BTreeMap::new(), ..config }, Config::default());
}

#[test]
fn commented_settings_of_the_example_are_the_defaults() {
    let text = uncommented(EXAMPLE);
    let config = Config::parse(&text, "config.example.toml, uncommented").unwrap_or_else(|e| panic!("{e}"));
    assert!(config.rules.len() >= 3 && !config.layouts.is_empty());
    // The example contains values for these settings, which have no default value.
    let api = Api { admin_socket: None };
    let mode_change = ModeChange { before: None, after: None, ..config.mode_change };
    let notify = Notify { command: None, user: None, ..config.notify };
    let idle = Idle { exempt: IdleExempt::default(), ..config.idle };
    let defaults = RuleDefaults::default();
    let metrics = Metrics::default();
    let slurm = Slurm { admin_comment: None, ..config.slurm };
    let (layouts, quotas, prices, rules) = (BTreeMap::new(), Vec::new(), Vec::new(), Vec::new());
    let settings =
        Config { api, mode_change, metrics, notify, idle, slurm, layouts, quotas, prices, defaults, rules, ..config };
    assert_eq!(settings, Config::default());
}

#[test]
fn example_and_reference_contain_every_key() {
    let example = uncommented(EXAMPLE);
    let mut header = "";
    let mut shown = Vec::new();
    for line in example.lines() {
        if line.starts_with('[') {
            header = line.trim();
        } else if let Some((key, _)) = line.split_once(" = ") {
            shown.push((header, key.trim()));
        }
    }
    let mut keys = 0;
    for section in schema::SECTIONS {
        assert!(
            REFERENCE.contains(&format!("`{}`", section.header)) || section.header.is_empty(),
            "{}",
            section.header
        );
        for key in section.keys {
            assert!(shown.contains(&(section.header, key)), "config.example.toml lacks {} {key}", section.header);
            let dotted = match section.table() {
                "" => format!("`{key}`"),
                table => format!("`{table}.{key}`"),
            };
            assert!(REFERENCE.contains(&dotted), "docs/config.md lacks {dotted}");
            keys += 1;
        }
    }
    println!("{keys} keys documented");
}

#[test]
fn reference_gives_the_real_defaults() {
    let mut reported = 0;
    let mut table = "";
    let effective = Config::default().effective();
    for line in effective.lines() {
        if line.starts_with('[') {
            table = line.trim_matches(['[', ']']);
        }
        let Some((key, value)) = line.split_once(" = ") else { continue };
        let dotted = if table.is_empty() { format!("`{key}`") } else { format!("`{table}.{key}`") };
        let row = REFERENCE.lines().find(|row| row.starts_with(&format!("| {dotted} |")));
        let row = row.unwrap_or_else(|| panic!("docs/config.md has no row for {dotted}"));
        assert!(row.contains(&format!("| `{value}` |")), "docs/config.md: {key} is {value} by default, not {row}");
        reported += 1;
    }
    println!("{reported} defaults");
}

#[test]
fn example_and_reference_give_the_defaults_of_an_mps_policy() {
    let config = Config::parse(&uncommented(EXAMPLE), "config.example.toml").unwrap();
    let shared = config.rules.iter().find(|rule| rule.mode == Mode::Mps).unwrap();
    let mut policy = shared.mps_policy();
    // The memory limit has no default value, but the example contains one.
    assert!(policy.settings.memory_limit_mib.take().is_some());
    assert_eq!(policy, MpsPolicy::default());
    let written = sharing::written(&policy, Mode::Mps);
    for pair in written.trim_matches(['{', '}', ' ']).split(", ") {
        let (key, value) = pair.split_once(" = ").unwrap();
        let row = format!("| `gpu.mps.{key}` | `{value}` |");
        assert!(REFERENCE.contains(&row), "docs/config.md lacks {row}");
    }
    let turns = config.rules.iter().find_map(|rule| rule.timeslice.clone());
    assert_eq!(turns, Some(TimeslicePolicy::default()));
    for pair in timeslice::written(&TimeslicePolicy::default()).trim_matches(['{', '}', ' ']).split(", ") {
        let (key, value) = pair.split_once(" = ").unwrap();
        let row = format!("| `gpu.timeslice.{key}` | `{value}` |");
        assert!(REFERENCE.contains(&row), "docs/config.md lacks {row}");
    }
    for key in schema::ALLOW.keys {
        assert!(REFERENCE.contains(&format!("| `{key}` |")) && EXAMPLE.contains(&format!("{key} = ")), "{key}");
    }
}

#[test]
fn toml_blocks_of_the_reference_are_valid() {
    let mut tried = 0;
    for block in REFERENCE.split("```toml\n").skip(1) {
        let text = block.split("```").next().unwrap();
        Config::parse(text, "docs/config.md").unwrap_or_else(|e| panic!("{e}"));
        tried += 1;
    }
    assert!(tried > 0);
    println!("{tried} examples of the reference");
}

#[test]
fn socket_group_is_the_same_in_all_files() {
    const SYSUSERS: &str = include_str!("../../../../../packaging/sysusers.d/gpush.conf");
    const SOCKET: &str = include_str!("../../../../../systemd/gpushd.socket");
    const INSTALL: &str = include_str!("../../../../../docs/install.md");
    assert!(SYSUSERS.lines().any(|line| line == "g gpush -"));
    assert!(SOCKET.lines().any(|line| line == "SocketGroup=gpush"));
    assert!(INSTALL.contains("group `gpush`"));
}
