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
fn lease_is_kept_and_unused_leases_are_listed() {
    let host = Host::new();
    let agent = agent(&host);
    let run = |args: &[&str]| {
        let output = host.command(args).output().unwrap();
        (output.status.code(), stdout(&output), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, kept, _) = run(&["lease", "keep", "L17", "--for", "2h", "--reason", "demo"]);
    assert!(code == Some(0) && kept.starts_with("L17: is kept until 2999-01-01"), "{kept}");
    assert_eq!(agent.bodies("/v1/leases/L17/keep"), ["{\"duration_s\":7200,\"reason\":\"demo\"}"]);
    for (args, part) in [
        (&["lease", "keep", "L17", "--for", "2h"][..], "--reason"),
        (&["lease", "keep", "L17", "--reason", "demo"], "--for"),
        (&["lease", "keep", "L17", "--for", "0", "--reason", "demo"], "must be longer than 0"),
        (&["lease", "keep", "--for", "2h", "--reason", "demo"], "gpushctl lease list --mine"),
        (&["lease", "idle", "--action", "kill"], "release"),
        (&["lease", "idle", "--since", "x"], "--since"),
    ] {
        let (code, _, error) = run(args);
        let error = error.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(code == Some(2) && error.contains(part), "{args:?}: {error}");
    }
    let (code, list, _) = run(&["lease", "idle", "--since", "30d", "-o", "csv"]);
    let lines: Vec<&str> = list.lines().collect();
    assert_eq!((code, lines[0]), (Some(0), "lease,user,state,unused_s,warnings,action,when,dry_run"));
    assert!(
        lines[1].starts_with("L17,alice,idle,") && lines[2].starts_with("L9,alice,no process,14400,2,release,"),
        "{list}"
    );
    let (_, names, _) = run(&["lease", "idle", "-o", "name"]);
    assert_eq!(names.lines().collect::<Vec<_>>(), ["L17", "L9"]);
}

#[test]
fn leases_of_a_slurm_job_are_listed() {
    let host = Host::new();
    Agent::listen(&host.path("gpushd.sock"), |request| match request.path.as_str() {
        "/v1/leases?job=449&ended=20" => Answer::ok(&[lease(17, me())]),
        "/v1/leases?mine=true&job=450" => Answer::ok(&Vec::<Lease>::new()),
        _ => answer(request),
    });
    let text = host.run(&["lease", "list", "--job", "449", "--ended", "-o", "name"]);
    assert!(text.contains("L17\n[exit 0]"), "{text}");
    let text = host.run(&["lease", "list", "--mine", "--job", "450", "-o", "name"]);
    assert!(!text.contains('L') && text.contains("[exit 0]"), "{text}");
    let text = host.run(&["lease", "list", "--job", "449_3x"]);
    assert!(text.contains("--job") && text.contains("[exit 2]"), "{text}");
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
