//! Leases of subordinate uids, and of the users who own these uids.

use std::{os::unix::process::CommandExt, process::Command};

use gpush_api::LeaseState;
use gpush_tests::{
    agent::{Agent, Setup},
    host::{Host, program},
    mps::lease_becomes,
};
use nix::unistd::geteuid;

const CONFIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 16 }\n\
                      [[quota]]\nusers = [\"nobody\"]\nleases = 1\n";

/// Uid of `nobody`, who owns the next two uids.
const OWNER: u32 = 65_534;
const SUBORDINATE: u32 = 4_200_001;
const ANOTHER_SUBORDINATE: u32 = 4_200_002;

/// Uid of another user.
const OTHER: u32 = 64_003;

const REQUEST: [&str; 6] = ["lease", "request", "--timeslice", "--for", "1h", "-q"];

fn start() -> Option<(Host, Agent)> {
    if !geteuid().is_root() {
        println!("SKIPPED leases of subordinate uids: only root can have other uids");
        return None;
    }
    let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 1\n");
    let agent = Setup::on(&host).config(CONFIG).subuid(&format!("{OWNER}:4200000:100\n")).start_public();
    agent.wait_for_layouts_at_start();
    Some((host, agent))
}

/// Runs gpushctl as a user. Returns its exit status, and its output in one line.
fn run(agent: &Agent, uid: u32, args: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(program("gpushctl"));
    command.args(args).env("GPUSH_SOCKET", agent.socket()).env("HOME", "/").uid(uid).gid(uid).current_dir("/");
    let output = command.output().expect("gpushctl");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    // Words only, because gpushctl wraps long lines.
    (output.status.code(), text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Fault: the leases of subordinate uids counted for the quota of their owner, but the owner could not release them.
#[test]
fn owner_reads_renews_and_releases_leases_of_subordinate_uids() {
    let Some((_host, agent)) = start() else { return };
    let (code, text) = run(&agent, SUBORDINATE, &REQUEST);
    assert_eq!(code, Some(0), "{text}");
    let show = ["lease", "show", "L1", "-o", "json"];
    let list = ["lease", "list", "-o", "json"];
    let renew = ["lease", "renew", "L1", "--for", "2h"];
    for (uid, is_full) in [(SUBORDINATE, true), (OWNER, true), (OTHER, false), (ANOTHER_SUBORDINATE, false)] {
        for args in [&show[..], &list] {
            let (code, text) = run(&agent, uid, args);
            assert_eq!((code, text.contains("\"asked_by\"")), (Some(0), is_full), "{uid} {args:?}: {text}");
            assert!(text.contains("\"account\": \"nobody\""), "{uid} {args:?}: {text}");
        }
        let (code, text) = run(&agent, uid, &renew);
        assert_eq!(code == Some(0), is_full, "{uid}: {text}");
        assert_eq!(text.contains("only the holder, the owner of the holder's subordinate uid"), !is_full, "{text}");
    }
    // Fault: lists showed the uid like any unknown uid.
    for args in [&["lease", "list"][..], &["audit"]] {
        let (code, text) = run(&agent, 0, args);
        assert!(code == Some(0) && text.contains("4200001 (subordinate of nobody)"), "{args:?}: {text}");
    }
    // The environment is for processes of the holder.
    let (code, text) = run(&agent, OWNER, &["lease", "env", "L1"]);
    assert!(code != Some(0) && text.contains("only the holder and administrators may use a lease"), "{text}");
    let (code, text) = run(&agent, OTHER, &["lease", "end", "L1"]);
    assert!(code != Some(0) && text.contains("you may not release lease L1"), "{text}");
    let (code, text) = run(&agent, OWNER, &["lease", "end", "L1"]);
    assert_eq!(code, Some(0), "{text}");
    lease_becomes(&agent, "L1".parse().expect("an id"), LeaseState::Ended);
    for (uid, is_visible) in [(OWNER, true), (SUBORDINATE, true), (OTHER, false), (ANOTHER_SUBORDINATE, false)] {
        let (code, text) = run(&agent, uid, &show);
        assert_eq!(
            (code == Some(0), text.contains("there is no lease L1")),
            (is_visible, !is_visible),
            "{uid}: {text}"
        );
        let (_, text) = run(&agent, uid, &["lease", "list", "--ended", "-o", "json"]);
        assert_eq!(text.contains("\"L1\""), is_visible, "{uid}: {text}");
    }
}

/// Fault: the hint named a lease of another uid of the account, and the command of the hint was denied.
#[test]
fn hint_after_quota_denial_names_only_releasable_leases() {
    let Some((_host, agent)) = start() else { return };
    let (code, text) = run(&agent, SUBORDINATE, &REQUEST);
    assert_eq!(code, Some(0), "{text}");
    for (uid, may_release) in [(SUBORDINATE, true), (ANOTHER_SUBORDINATE, false), (OWNER, true)] {
        let (code, text) = run(&agent, uid, &REQUEST);
        assert!(code != Some(0) && text.contains("leases: L1"), "{uid}: {text}");
        let hint = if may_release { "`gpushctl lease end L1`" } else { "the holder or an administrator can end it" };
        assert!(text.contains(hint) && may_release == text.contains("lease end"), "{uid}: {text}");
    }
    // An administrator who requests a lease for the user may release every lease.
    let holder = SUBORDINATE.to_string();
    let (_, text) = run(&agent, 0, &[&REQUEST[..], &["--user", &holder]].concat());
    assert!(text.contains("`gpushctl lease end L1`"), "{text}");
    let (code, text) = run(&agent, OWNER, &["lease", "end", "L1"]);
    assert_eq!(code, Some(0), "{text}");
}
