//! Invalid files, each with its complete diagnostic, and labels that do not match a host.

use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;

fn group(lines: &[&str]) -> String {
    let mut text = String::new();
    for (n, line) in lines.iter().enumerate() {
        let _ = writeln!(text, "    {} {line}", if n == 0 { "-" } else { " " });
    }
    label(&text)
}

fn on(devices: &str) -> String {
    group(&["devices: all", "mig-enabled: true", devices])
}

fn corpus() -> Vec<(&'static str, String)> {
    let own = str::to_owned;
    vec![
        ("empty", own("")),
        ("a comment only", own("# nothing\n")),
        ("not YAML", own("version: v1\nmig-configs: [\n")),
        ("a tab", own("version: v1\nmig-configs:\n\tx: 1\n")),
        ("a list", own("- version: v1\n")),
        ("TOML", own("[layouts]\nx = 1\n")),
        ("no version", own("mig-configs:\n  x:\n    - devices: all\n      mig-enabled: false\n")),
        ("another version", own("version: v2\nmig-configs:\n  x:\n    - devices: all\n      mig-enabled: false\n")),
        ("no configs", own("version: v1\n")),
        ("a key misspelt", own("version: v1\nmig-config:\n  x: []\n")),
        ("a Kubernetes object", own("apiVersion: v1\nkind: ConfigMap\ndata:\n  config.yaml: x\n")),
        ("no label", own("version: v1\nmig-configs: {}\n")),
        ("labels as a list", own("version: v1\nmig-configs:\n  - x\n")),
        ("a label without groups", own("version: v1\nmig-configs:\n  x: []\n  y:\n")),
        ("two documents", own("version: v1\n---\nversion: v1\n")),
        ("a label twice", own("version: v1\nmig-configs:\n  x: []\n  x: []\n")),
        ("an alias of itself", own("version: v1\nmig-configs: &a\n  x: *a\n")),
        ("a group that is none", label("    - all\n")),
        ("unknown key", group(&["device: all", "mig-enabled: false", "mig-placements: {}"])),
        ("keys missing", group(&["device-filter: 0x20B210DE"])),
        ("enabled without instances", group(&["devices: all", "mig-enabled: true"])),
        ("disabled with instances", group(&["devices: all", "mig-enabled: false", "mig-devices: {1g.10gb: 1}"])),
        ("not a truth value", group(&["devices: all", "mig-enabled: \"true\"", "mig-devices: {}"])),
        ("devices misspelt", group(&["devices: every", "mig-enabled: false"])),
        ("no devices", group(&["devices: []", "mig-enabled: false"])),
        ("a device that is none", group(&["devices: [0, -1, \"2\", 1.5, [3]]", "mig-enabled: false"])),
        (
            "a filter that is none",
            group(&["device-filter: [A100, 20B210DE, 0x20B2, {a: 1}]", "devices: all", "mig-enabled: false"]),
        ),
        ("instances as a list", on("mig-devices: [1g.10gb]")),
        ("no instances", on("mig-devices:")),
        ("counts", on("mig-devices: {1g.10gb: 0, 2g.20gb: -1, 3g.40gb: many, 4g.40gb: 9, 7g.80gb: \"1\"}")),
        (
            "profiles",
            on("mig-devices: {1g10gb: 1, \"3g.40gb@4\": 1, \"1g.10gb*2\": 1, none: 1, 5c.3g.40gb: 1, MIG 2g.20gb: 1}"),
        ),
        ("one profile in two spellings", on("mig-devices: {1g.10gb: 1, 1G.10GB: 1}")),
        ("a profile twice", on("mig-devices: {1g.10gb: 1, 1g.10gb: 2}")),
        (
            "many at once, and letters of several bytes",
            own(
                "version: v1\nmig-configs:\n  größe:\n    - devices: ä\n      mig-enabled: ö\n      mig-devices: {ü: 1}\n",
            ),
        ),
    ]
}

#[test]
fn bad_files_give_the_expected_messages() {
    let mut shown = String::new();
    let corpus = corpus();
    for (what, text) in &corpus {
        let errors = File::from_bytes(text.as_bytes(), "parted.yaml").expect_err(what);
        let _ = writeln!(shown, "### {what}\n{errors}");
        for place in errors.located() {
            assert!(!place.hint.is_empty() && place.line <= text.lines().count() + 1, "{what}");
        }
    }
    println!("{} wrong files", corpus.len());
    insta::assert_snapshot!(shown);
}

#[test]
fn oversized_file_is_refused_at_once() {
    let deep = "[".repeat(200_000);
    let wide = format!(
        "version: v1\nmig-configs:\n  a: &a\n{}{}",
        "    - {devices: all, mig-enabled: false}\n".repeat(4000),
        (0..4000).map(|n| format!("  b{n}: *a\n")).collect::<String>()
    );
    let merged = format!(
        "a: &a {{{}}}\n{}",
        (0..500).map(|n| format!("k{n}: 1, ")).collect::<String>(),
        (0..4000).map(|n| format!("b{n}: {{<<: *a}}\n")).collect::<String>()
    );
    let wrong = on(&format!("mig-devices: {{{}}}", (0..20_000).map(|n| format!("x{n}: 1, ")).collect::<String>()));
    let listed = group(&[&format!("devices: [{}]", "0, ".repeat(5000)), "mig-enabled: false"]);
    for (what, text, says) in [
        ("deep", deep, "not YAML"),
        ("wide", wide, "more than 4096 groups"),
        ("merged", merged, "too large"),
        ("wrong", wrong, "is not a MIG profile"),
        ("listed", listed, "more than 1024 GPUs"),
        ("large", "#".repeat(MOST_BYTES + 1), "more than 1048576 bytes"),
    ] {
        let errors = File::from_bytes(text.as_bytes(), "parted.yaml").expect_err(what);
        assert!(
            errors.problems().iter().any(|problem| problem.message.contains(says)),
            "{what}: {}",
            errors.problems()[0].message
        );
        assert!(errors.problems().len() <= 50, "{what}");
    }
    let errors = File::from_bytes(b"version: v1\n# \xff\n", "parted.yaml").unwrap_err();
    assert!(errors.to_string().starts_with("parted.yaml:2:3: the file is not UTF-8"), "{errors}");
    let errors = File::from_bytes(b"\xff\xfev\0e\0", "parted.yaml").unwrap_err();
    assert!(errors.to_string().contains("the file is UTF-16"), "{errors}");
    let errors = File::from_bytes(b"version: v1\n\0", "parted.yaml").unwrap_err();
    assert!(errors.to_string().starts_with("parted.yaml:2:1: byte 12 of the file is NUL"), "{errors}");
}

#[test]
fn labels_that_do_not_match_the_host_are_refused() {
    let host = preset::gpus("mixed").unwrap();
    let mut unknown = preset::gpus("a30x4").unwrap();
    unknown.iter_mut().for_each(|gpu| gpu.pci_id = None);
    let a30 = preset::gpus("a30x4").unwrap();
    let cases: &[(&str, String, &[Gpu])] = &[
        ("an index past the end", group(&["devices: [0, 9, 11]", "mig-enabled: false"]), &host),
        ("a filter for other parts", group(&["device-filter: 0x1FB010DE", "devices: all", "mig-enabled: false"]), &a30),
        ("a list for other parts", group(&["device-filter: 0x1FB010DE", "devices: [9]", "mig-enabled: false"]), &a30),
        (
            "another subsystem",
            group(&["device-filter: 0x20B710DE:0x180410DE", "devices: all", "mig-enabled: false"]),
            &a30,
        ),
        (
            "ids that are not known",
            group(&["device-filter: 0x20B710DE", "devices: all", "mig-enabled: false"]),
            &unknown,
        ),
    ];
    let mut shown = String::new();
    for (what, text, gpus) in cases {
        let error = meant(text, gpus).expect_err(what);
        let _ = writeln!(shown, "### {what}\n{}: {}", serde_json::to_string(&error.code).unwrap(), error.message);
        for cause in &error.causes {
            let _ = writeln!(shown, "  cause: {cause}");
        }
        let _ = writeln!(shown, "  hint: {}", error.hint.unwrap());
    }
    insta::assert_snapshot!(shown);
}

#[test]
fn unknown_label_lists_similar_ones_first() {
    let labels: String = ["all-disabled", "all-1g.5gb", "all-3g.20gb", "mixed"]
        .iter()
        .map(|name| format!("  {name}: [{{devices: all, mig-enabled: false}}]\n"))
        .collect();
    let file = file(&format!("version: v1\nmig-configs:\n{labels}"));
    let error = file.select(Some("all-3g.10gb")).unwrap_err();
    assert_eq!(error.hint.as_deref(), Some("did you mean `all-3g.20gb`?"));
    assert!(error.causes[0].starts_with("the labels are: all-3g.20gb, all-1g.5gb"), "{}", error.causes[0]);
    assert!(error.causes[0].contains("mixed"), "{}", error.causes[0]);
    assert!(file.select(None).unwrap_err().message.contains("4 labels"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// A file with any inserted text is either accepted, or refused with positions inside the file.
    #[test]
    fn mig_parted_reader_never_panics(at in any::<prop::sample::Index>(), length in 0..40_usize, insert in "[ -~\n\t\u{e4}]{0,12}", which in any::<prop::sample::Index>()) {
        let corpus = corpus();
        let mut chars: Vec<char> = which.get(&corpus).1.chars().collect();
        let from = at.index(chars.len() + 1);
        let to = (from + length).min(chars.len());
        chars.splice(from..to, insert.chars());
        let text: String = chars.into_iter().collect();
        if let Err(errors) = File::from_bytes(text.as_bytes(), "x") {
            let shown = errors.to_string();
            prop_assert!(shown.starts_with("x:"), "{shown}");
        }
    }
}
