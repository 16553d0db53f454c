//! Tests of `advise`, and of the lints in `config check` and `explain`.

use std::path::Path;

use insta::assert_snapshot;
use serde_json::Value;

use crate::support::Host;

fn json(host: &Host, args: &[&str]) -> Value {
    let output = host.command(args).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{args:?}: {error}"))
}

#[test]
fn advice_for_presets() {
    let host = Host::new();
    let cases: &[&[&str]] = &[
        &["advise", "--tenants", "120", "--isolation", "hard", "--workload", "notebooks", "--offline", "dgx-a100"],
        &["advise", "--tenants", "1", "--workload", "training", "--offline", "a30x4"],
        &[
            "advise",
            "--tenants",
            "3",
            "--isolation",
            "shared",
            "--workload",
            "batch",
            "--driver",
            "managed",
            "--offline",
            "a30x4",
        ],
        &["advise", "queue", "--memory", "6G", "--compute", "12", "--offline", "dgx-a100", "--hostile"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));
}

#[test]
fn impossible_advice_is_refused() {
    let host = Host::new();
    host.write("wrong.csv", "arrival_s,tenant\n0.5,one\n");
    let offline = ["--offline", "mixed"];
    let cases: &[&[&str]] = &[
        &["advise", "--tenants", "4", "--isolation", "hard", "--workload", "batch", "--offline", "dgx-a1000"],
        &["advise", "--tenants", "4", "--isolation", "hard", "--workload", "batch"],
        &["advise", "--tenants", "0", "--isolation", "hard", "--workload", "batch", offline[0], offline[1]],
        &[
            "advise",
            "--tenants",
            "4",
            "--isolation",
            "hard",
            "--workload",
            "batch",
            "--memory",
            "1000G",
            "--offline",
            "mixed",
        ],
        &["advise", "--tenants", "4", "--isolation", "hard", "--workload", "batch", "--shared-faults", "yes"],
        &["advise", "--tenants", "4", "--isolation", "hard", "--workload", "inference", "--soft-compute", "yes"],
        &["advise", "--tenants", "4", "--offline", "mixed"],
        &["advise", "--workload", "gaming"],
        &["advise", "--compute", "120"],
        &["advise", "queue", "--tenants", "0"],
        &["advise", "queue", "--tenants", "2", "--rate", "1,2,3"],
        &["advise", "queue", "--rate", "0"],
        &["advise", "queue", "--service", "0"],
        &["advise", "queue", "--instances", "0"],
        &["advise", "queue", "--tenants", "1", "--hostile"],
        &["advise", "queue", "--tenants", "1000", "--rate", "1000", "--period", "1d"],
        &["advise", "queue", "--arrivals", "wrong.csv"],
        &["advise", "queue", "--arrivals", "gone.csv"],
        &["advise", "queue", "--offline", "mixed"],
        &["--json", "advise", "queue", "--tenants", "0"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));
}

/// The published arrivals give the published table.
#[test]
fn queue_reproduces_the_published_table() {
    let host = Host::new();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/advice/tests/arrivals-7x12rps-60s.csv");
    let file = file.to_str().unwrap();
    let text = host.run(&["advise", "queue", "--arrivals", file]);
    for row in [
        ["MIG", "5039", "200.92", "1029.04"],
        ["MPS", "5065", "11.80", "30.47"],
        ["time-slicing", "5063", "39.92", "208.21"],
    ] {
        let found = text.lines().any(|line| line.split_whitespace().eq(row));
        assert!(found, "{row:?} is not in\n{text}");
    }
    let estimate = json(&host, &["--json", "advise", "queue", "--arrivals", file]);
    assert_eq!(estimate["offered"], 5067);
    assert_eq!(estimate["estimates"][0]["served"], 5039);
}

#[test]
fn advised_config_passes_its_own_check() {
    let host = Host::new();
    let args =
        ["--json", "advise", "--tenants", "40", "--isolation", "hard", "--workload", "inference", "--offline", "mixed"];
    let advice = json(&host, &args);
    host.write("config.toml", advice["text"].as_str().unwrap());
    let checked = json(&host, &["--json", "config", "check", "config.toml", "--offline", "mixed"]);
    assert_eq!((checked["remarks"].as_array().unwrap().len(), checked["lints"].as_array().unwrap().len()), (0, 0));
}

#[test]
fn config_check_reports_lints_with_their_numbers() {
    let host = Host::new();
    let config = "[[gpu]]\nname = \"desks\"\nmatch = \"0\"\nmode = \"timeslice\"\ntimeslice = { replicas = 4 }\n\
                  isolation = \"hard\"\n\n[[gpu]]\nmatch = \"1\"\nmode = \"mps\"\n\
                  mps = { percentage = 25, memory = \"40G\", users = \"many\" }\n";
    host.write("config.toml", config);
    let checked = json(&host, &["--json", "config", "check", "config.toml", "--offline", "dgx-a100"]);
    let numbers: Vec<_> =
        checked["lints"].as_array().unwrap().iter().map(|lint| lint["lint"].as_str().unwrap()).collect();
    assert_eq!(numbers, ["G001", "G002", "G008"]);
    let text = host.run(&["config", "check", "config.toml", "--offline", "dgx-a100"]);
    let explained = host.run(&["explain", "g001"]);
    assert_snapshot!(text + "\n" + &explained);
}
