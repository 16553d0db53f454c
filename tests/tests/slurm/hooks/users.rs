//! What a user may not do with the lease of a job.

use std::{os::unix::process::CommandExt, path::Path, process::Command};

use gpush_api::{Code, LeaseState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::program,
    mps::lease_now,
};
use serde_json::json;

use super::{Job, NOBODY, Node, WHOLE, silent};

#[test]
fn user_cannot_release_renew_or_enter_the_lease_of_a_job() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED what users do with leases of jobs: only root has processes of others");
        return;
    }
    let mut node = Node::two_gpus(WHOLE);
    // Other users can connect to the new socket. The path of the admin socket does not change.
    node.kill();
    node.agent = Some(Agent::start_public(&node.host, WHOLE));
    node.prolog(&Job::new(1).on("0"));
    let lease = node.granted(1);
    let id = lease.id.to_string();
    let as_user = |words: &[&str]| {
        let mut command = Command::new(program("gpushctl"));
        command.env_clear().args(words).env("GPUSH_SOCKET", node.agent().socket());
        let output = command.uid(NOBODY).gid(NOBODY).current_dir("/").output().expect("gpushctl can be started");
        assert_eq!(output.status.code(), Some(5), "{words:?}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let text = as_user(&["lease", "release", &id]);
    assert!(text.contains("Slurm job 1") && text.contains("scancel 1"), "{text}");
    as_user(&["lease", "renew", &id, "--for", "1h"]);
    as_user(&["lease", "env", &id]);
    as_user(&["lease", "revoke", &id, "--reason", "mine"]);
    assert_eq!(lease_now(node.agent(), lease.id).state, LeaseState::Active);
    assert!(node.task(&Job::new(1)).is_ok());
    node.epilog(&Job::new(1));
}

#[test]
fn only_hooks_lease_gpus_of_slurm_and_for_jobs() {
    let node = Node::two_gpus(WHOLE);
    let job = json!({ "cluster": "ci", "job": 1, "uid": 0, "until_ms": 4_102_444_800_000_i64 });
    // The caller is an administrator, but sends the request through the socket for all users.
    let denied = node.agent().post("/v1/slurm/jobs", &job).error();
    assert_eq!(denied.code, Code::Denied, "{denied:?}");
    assert_eq!(node.agent().post("/v1/slurm/jobs/end", &job).error().code, Code::Denied);
    let body = json!({ "share": { "kind": "whole" }, "selectors": ["0"] });
    assert_eq!(node.agent().post("/v1/leases", &body).error().code, Code::Denied, "also when it names the GPU");
}

/// Fault: if `GPUSH_SOCKET` was set, hooks used the socket for all users, on which gpushd refuses
/// hooks. So the node was drained. The hooks also ignored `api.admin_socket`.
#[test]
fn hooks_use_the_admin_socket_whatever_names_gpushd() {
    let mut node = Node::two_gpus(WHOLE);
    let run = |node: &Node, verb: &str, job: &Job, socket: &Path| {
        let mut command = Command::new(program("gpushctl"));
        command.env_clear().envs(job.0.clone()).env("GPUSH_SOCKET", socket).args(["slurm", verb]);
        command.arg("--config").arg(node.host.scratch("gpushd.toml")).arg("--dir").arg(node.directory());
        if verb == "prolog" {
            command.arg("--gres-conf").arg(&node.gres_conf);
        }
        silent(&command.output().expect("gpushctl can be started"));
    };
    let named = format!("[api]\nadmin_socket = {:?}\n{WHOLE}", node.host.scratch("gpushd.admin.sock"));
    std::fs::write(node.host.scratch("gpushd.toml"), named).expect("the config can be written");
    run(&node, "prolog", &Job::new(1).on("0"), node.agent().socket());
    node.granted(1);
    run(&node, "epilog", &Job::new(1).on("0"), node.agent().socket());
    assert!(node.lease(1).is_none());
    // Without `api.admin_socket`, the admin socket is next to the socket for all users.
    node.kill();
    node.agent = Some(Setup::on(&node.host).config(WHOLE).admin_beside().start());
    run(&node, "prolog", &Job::new(2).on("0"), node.agent().socket());
    node.granted(2);
    // GPUSH_SOCKET may also be the path of the admin socket.
    run(&node, "epilog", &Job::new(2).on("0"), &node.host.scratch("admin.sock"));
    assert!(node.lease(2).is_none());
}
