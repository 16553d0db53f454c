//! Hints. The tests run the commands that hints suggest. Each command must exist and solve the
//! problem, and the user who reads the hint must be allowed to run it.
//!
//! The helper functions may use `unwrap`, because a panic makes the test fail.
#![allow(clippy::unwrap_used)]

use std::{
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Command, Output},
};

use gpush_api::{Code, DeviceUse, LeaseState, MpsState};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::reaches,
};

use crate::{
    transcript,
    verbs::{MIXED, TWO, devices, done, run, started},
};

/// The uid of a user who is in no group and owns no files.
const NOBODY: u32 = 65_534;

/// Runs a command that must fail. Returns the commands in the hint of its error, in order.
fn hinted(agent: &Agent, args: &[&str]) -> Vec<Vec<String>> {
    let output = transcript::gpushctl(agent, &[&["--json"], args].concat(), 80).output().unwrap();
    assert!(!output.status.success(), "{}", transcript::transcript(args, &output));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // The JSON output has the error of the command, or the error of its first plan.
    let error = [&document["error"], &document["plans"][0]["error"]].into_iter().find(|error| error.is_object());
    let hint = error.unwrap_or_else(|| panic!("{args:?}: {document}"))["hint"].as_str().unwrap().replace('\'', "`");
    let quoted = hint.split('`').skip(1).step_by(2).filter_map(|command| command.strip_prefix("gpushctl "));
    quoted.map(|command| command.split_whitespace().map(str::to_owned).collect()).collect()
}

/// Runs the suggested command that begins with `start`. The command must succeed.
fn type_hint(agent: &Agent, args: &[&str], start: &str) {
    let commands = hinted(agent, args);
    let command = commands.iter().find(|command| command.join(" ").starts_with(start));
    let mut command = words(command.unwrap_or_else(|| panic!("{args:?}: {commands:?}")));
    // The reader of the hint replaces this word.
    command.iter_mut().filter(|word| **word == "COMMAND").for_each(|word| *word = "true");
    done(agent, &command);
}

/// Runs the suggested command, and then the refused command again. Both must succeed.
fn helps(agent: &Agent, args: &[&str], start: &str) {
    type_hint(agent, args, start);
    done(agent, args);
}

#[test]
fn hinted_commands_of_refusals_solve_the_problem() {
    let host = Host::up(TWO);
    let agent = started(&host, &format!("{MIXED}[[gpu]]\nmatch = [\"1\"]\nmode = \"mps\"\n"));
    done(&agent, &["apply", "--wait"]);
    reaches(&agent, "1", MpsState::Ready);
    done(&agent, &["gpu", "cordon", "0"]);
    helps(&agent, &["mig", "apply"], "gpu uncordon");
    done(&agent, &["mig", "off", "0", "--yes"]);
    helps(&agent, &["lease", "request", "--mig", "1g.10gb", "-g", "0", "--for", "1h"], "apply 0");
    type_hint(&agent, &["maintenance", "enter"], "lease end");
    // A revoked lease ends when the driver has listed its processes, so the command can return earlier.
    let has_none = || agent.get("/v1/leases").json().as_array().is_some_and(Vec::is_empty).then_some(());
    agent.until("the lease has ended", has_none);
    done(&agent, &["maintenance", "enter"]);
    helps(&agent, &["mig", "apply", "7g.80gb", "-g", "0"], "maintenance leave");
    let share = ["lease", "request", "--mps", "25", "-g", "1", "--for", "1h"];
    done(&agent, &share);
    type_hint(&agent, &["mps", "stop", "1"], "lease end");
    agent.until("the lease of the share has ended", has_none);
    done(&agent, &["mps", "stop", "1"]);
    done(&agent, &["mps", "start", "1"]);
    reaches(&agent, "1", MpsState::Ready);
    done(&agent, &share);
    helps(&agent, &["mps", "stop", "1"], "mps stop 1 --force");
    done(&agent, &["mps", "start", "1"]);
    reaches(&agent, "1", MpsState::Ready);
    for lease in done(&agent, &["lease", "list", "-o", "name"]).lines() {
        done(&agent, &["lease", "end", lease, "--reason", "test"]);
    }
    type_hint(&agent, &["run", "--whole", "--", "true"], "run --mig");
    done(&agent, &["mps", "stop", "1"]);
    helps(&agent, &["lease", "request", "--mps", "-g", "1", "--for", "1h"], "mps start");
    // An override for GPU 0 is active at this point.
    agent.write_config("[[gpu]]\nname = \"training\"\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb\"]\n");
    helps(&agent, &["config", "reload"], "config reload --clear-overrides");
}

#[test]
fn hinted_read_commands_succeed() {
    let host = Host::up(TWO);
    let agent = started(&host, "");
    for args in [
        &["gpu", "show", "9"][..],
        &["mig", "apply", "--dry-run", "3g.48gb", "-g", "0"],
        &["mig", "apply", "--dry-run", "7g.80gb,1g.10gb", "-g", "0"],
        &["apply"],
        &["timeslice", "show", "0"],
        &["operation", "show"],
        &["config", "overrides", "clear", "0"],
        &["mig", "remove", "1g.10gb", "-g", "0"],
    ] {
        for command in hinted(&agent, args) {
            done(&agent, &command.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }
}

#[test]
fn hinted_commands_of_leases_and_layouts_work() {
    let host = Host::up(TWO);
    let agent = started(&host, &format!("{MIXED}lease = \"optional\"\n"));
    done(&agent, &["lease", "request", "--mig", "3g.40gb", "-g", "0", "--for", "1h"]);
    // While the lease uses the instance, gpushd does not destroy the instance.
    let lease = devices(&agent, &["0", "--profile", "3g.40gb"]).remove(0);
    assert_eq!((lease.usage, lease.available), (DeviceUse::Granted, false));
    assert!(lease.grants[0].expires_at.is_some(), "holder and end are shown: {lease:?}");
    // The last device of the profile is not free. The list shows who holds the device.
    let free = ["mig", "list", "--free", "--profile", "3g.40gb", "-o", "uuid"];
    let (code, text) = run(&agent, &free);
    assert_eq!(code, i32::from(Code::Blocked.exit_status()), "{text}");
    let status = done(&agent, &["status", "0"]);
    assert!(status.contains("◐ 3g.40gb") && status.contains("1 granted"), "a leased device looks free: {status}");
    assert!(done(&agent, &["mig", "list", "0"]).contains("granted"));
    let apply = ["mig", "apply", "none", "-g", "0", "--yes"];
    let revoke =
        hinted(&agent, &apply).into_iter().find(|command| command.starts_with(&["lease".into(), "end".into()]));
    done(&agent, &words(&revoke.unwrap()));
    agent.await_that("the revoked lease has ended", || devices(&agent, &["0"]).iter().all(|one| one.grants.is_empty()));
    done(&agent, &apply);
    let all: Vec<gpush_api::Lease> =
        serde_json::from_str(&done(&agent, &["lease", "list", "--ended", "--json"])).unwrap();
    assert!(all.iter().all(|one| one.state == LeaseState::Ended), "{all:?}");
    // These arguments contain names that do not exist, or use the syntax of other tools.
    for args in [
        &["lease", "request", "--mig", "9g.90gb", "--for", "1h"][..],
        &["lease", "renew", "L99", "--for", "1h"],
        &["lease", "show", "L99"],
        &["operation", "cancel", "op-99"],
        &["mig", "-lgip"],
        &["mig", "apply", "19,19"],
        &["mig", "apply", "all-disabled", "-g", "0"],
    ] {
        let commands = hinted(&agent, args);
        assert!(!commands.is_empty(), "{args:?}");
        for command in commands {
            done(&agent, &words(&command));
        }
    }
    let off = agent.gpu(0).mig.unwrap();
    assert!(!off.enabled, "`gpushctl mig off all` was typed");
}

fn words(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}

/// Adds the quoted `gpushctl` commands in the texts of a document to `found`. Leaves out commands
/// in texts for administrators.
fn for_everybody(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::String(text) if !text.contains("administrator") => {
            let quoted = text.replace('\'', "`");
            let commands = quoted.split('`').skip(1).step_by(2).filter_map(|one| one.strip_prefix("gpushctl "));
            found.extend(commands.map(str::to_owned));
        }
        serde_json::Value::Array(all) => all.iter().for_each(|one| for_everybody(one, found)),
        serde_json::Value::Object(all) => all.values().for_each(|one| for_everybody(one, found)),
        _ => {}
    }
}

/// Fault: a hint to a user who is not an administrator suggested a command that only administrators
/// may run.
#[test]
fn hinted_commands_are_permitted_to_the_user() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED hinted_commands_are_permitted_to_the_user: asking as another user takes root");
        return;
    }
    let host = Host::up(TWO);
    let agent = Agent::start_public(&host, &format!("{MIXED}[[gpu]]\nmatch = [\"1\"]\nmode = \"mps\"\n"));
    agent.wait_for_layouts_at_start();
    // Other users may not be able to enter the build directory, so copy gpushctl. Let another
    // process make the copy: if this process wrote the file while another test forked, executing
    // the file would fail with ETXTBSY.
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let binary = dir.path().join("gpushctl");
    assert!(Command::new("cp").arg(program("gpushctl")).arg(&binary).status().unwrap().success());
    let as_nobody = |args: &[&str]| -> Output {
        let mut command = Command::new(&binary);
        command.args(args).env_clear().env("LANG", "C.UTF-8").env("GPUSH_SOCKET", agent.socket());
        command.current_dir("/").uid(NOBODY).gid(NOBODY).output().unwrap()
    };
    let mut typed = 0;
    let mut check = |state: &str| {
        for args in [
            &["status"][..],
            &["gpu", "show"],
            &["mig", "apply", "--dry-run"],
            &["mig", "apply", "--dry-run", "7g.80gb", "-g", "0"],
            &["mig", "list", "--free"],
            &["mps", "show", "1"],
            &["ps"],
            &["config", "overrides"],
            &["maintenance", "status"],
            &["operation", "show"],
            &["lease", "request", "--mig", "3g.40gb", "--for", "1h"],
            &["lease", "request", "--mps", "25", "-g", "1", "--for", "1h"],
            &["lease", "request", "--whole", "--for", "1h"],
            &["lease", "show", "L99"],
        ] {
            let output = as_nobody(&[args, &["--json"]].concat());
            let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            let mut commands = Vec::new();
            for_everybody(&document, &mut commands);
            for command in commands {
                // Shorten the wait, because the other user's lease does not end.
                let command = command.replace(" --wait", " --wait=1s");
                let output = as_nobody(&command.split_whitespace().collect::<Vec<_>>());
                let denied = i32::from(Code::Denied.exit_status());
                assert_ne!(output.status.code(), Some(denied), "{state}: {args:?} names `gpushctl {command}`");
                typed += 1;
            }
        }
        // Release the leases that are left, because they would prevent the change to the next state
        // of the host.
        for lease in done(&agent, &["lease", "list", "-o", "name"]).lines() {
            done(&agent, &["lease", "end", lease, "--reason", "test"]);
        }
        agent.await_that("no lease is left", || done(&agent, &["lease", "list", "-o", "name"]).is_empty());
    };
    check("at rest");
    reaches(&agent, "1", MpsState::Ready);
    done(&agent, &["mps", "stop", "1", "--force"]);
    check("an MPS daemon is stopped");
    done(&agent, &["gpu", "cordon", "0-1"]);
    check("all GPUs are cordoned");
    done(&agent, &["gpu", "uncordon", "0-1"]);
    done(&agent, &["maintenance", "enter"]);
    check("in maintenance");
    assert!(typed > 4, "only {typed} commands were typed");
}
