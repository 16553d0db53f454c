//! Tests of `lease list`, `show`, `renew`, `release` and `revoke`.

use super::*;

#[test]
fn leases_are_listed_shown_and_ended() {
    let host = Host::new();
    let agent = agent(&host);
    let cases: &[&[&str]] = &[
        &["lease", "list"],
        &["lease", "list", "--mine", "--ended=1"],
        &["lease", "list", "1"],
        &["lease", "list", "-o", "name"],
        &["lease", "list", "-o", "csv", "--no-headers"],
        &["lease", "list", "-o", "sh"],
        &["lease", "show", "L19"],
        &["lease", "show", "L99"],
        &["lease", "show", "17"],
        &["lease", "show", "x17"],
        &["lease", "renew", "L17", "--for", "2h"],
        &["lease", "renew", "L17"],
        &["lease", "end", "L17", "L98", "L99"],
        &["lease", "end", "L17"],
        &["lease", "end", "L17", "--reason", "fan"],
        &["lease", "end", "L17", "L20", "--reason", "fan", "--kill"],
        &["lease", "end", "L20", "L98", "L99", "--reason", "fan"],
        &["lease", "end", "L17", "--reason", "fan", "--notice", "10m"],
        &["lease", "end"],
        &["lease", "end", "--all"],
        &["lease", "end", "--user", "anna"],
        &["lease", "end", "-g", "0", "--reason", "fan", "--yes"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    // Remove times of day, which depend on the current time and the time zone.
    let text = text.join("\n");
    let lines = text.lines().map(|line| match line.split_once(" (20") {
        Some((before, _)) => format!("{before} (...)"),
        _ => line.to_owned(),
    });
    assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
    assert_eq!(agent.bodies("/v1/leases/L17/renew"), ["{\"duration_s\":7200}"]);
    assert_eq!(agent.bodies("/v1/leases/L17/revoke")[0], "{\"reason\":\"fan\"}");
}

#[test]
fn json_of_leases_is_the_types_of_the_api() {
    let host = Host::new();
    agent(&host);
    fn json<T: serde::de::DeserializeOwned>(host: &Host, args: &[&str]) -> (T, Option<i32>) {
        let output = host.command(args).arg("--json").output().unwrap();
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        (serde_json::from_slice(&output.stdout).unwrap(), output.status.code())
    }
    assert_eq!(json::<Vec<Lease>>(&host, &["lease", "list"]).0.len(), 3);
    assert_eq!(json(&host, &["lease", "show", "L17"]), (lease(17, me()), Some(0)));
    assert_eq!(json::<Vec<Lease>>(&host, &["lease", "show"]).0.len(), 2);
    assert_eq!(json(&host, &["lease", "request", "--for", "1h"]), (granted(17, me()), Some(0)));
    let ended = |args: &[&str]| {
        let (document, code) = json::<serde_json::Value>(&host, args);
        assert_eq!(code, Some(0));
        serde_json::from_value::<Vec<Lease>>(document["leases"].clone()).unwrap()
    };
    assert_eq!(ended(&["lease", "end", "L17", "--reason", "x"]), [revoked()]);
    assert_eq!(ended(&["lease", "end", "L17"])[0].state, LeaseState::Ended);
    let (environment, _) = json::<serde_json::Value>(&host, &["lease", "env", "L17"]);
    assert_eq!(environment["GPUSH_LEASE"], "L17");
}
