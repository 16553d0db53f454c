//! Processes of earlier lease holders on a device that another user now leases alone.
//!
//! If a MIG device is destroyed and created again at the same placement, it has the same UUID. So
//! the environment of an ended lease selects the device of the next holder.

use std::process::Command;

use gpush_api::{GpuProcess, LeaseGrant, UnleasedStep};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
};
use serde_json::json;

use super::{Job, NOBODY, OTHER, listed, start_without_mps, step_event};

/// Starts a program as a user on a GPU or MIG device. `granted` is the lease whose environment the
/// program gets.
fn job(host: &Host, uid: u32, place: &str, granted: Option<&LeaseGrant>) -> Job {
    let environment = granted.into_iter().flat_map(|granted| granted.environment.iter().cloned());
    Job::start(Command::new("/bin/sleep").arg("1000").envs(environment), uid).on(host, place)
}

fn seen(agent: &Agent, job: &Job) -> GpuProcess {
    agent.until("the process is listed", || listed(agent, job.pid()))
}

#[test]
fn process_on_a_leased_whole_gpu_of_another_user_is_reported() {
    let Some((host, agent)) = start_without_mps(
        "processes on a leased GPU",
        "[[gpu]]\nmodel = \"l4\"\n",
        "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n",
    ) else {
        return;
    };
    let free = job(&host, NOBODY, "--gpu 0", None);
    assert_eq!(seen(&agent, &free).unleased, None, "no lease has the GPU");
    drop(free);
    let granted = agent.until("the GPU is free", || {
        let answer = agent.post("/v1/leases", &json!({ "share": { "kind": "whole" }, "holder_uid": OTHER }));
        (answer.status < 400).then(|| serde_json::from_value::<LeaseGrant>(answer.json()).expect("a lease"))
    });
    let mut listener = agent.listen("?kinds=unleased", None);
    let job = job(&host, NOBODY, "--gpu 0", None);
    let why = format!("lease {} of another user holds the device", granted.lease.id);
    assert_eq!(seen(&agent, &job).unleased.as_ref(), Some(&why));
    shown_with_its_gpu(&agent, &job, &why);
    step_event(&mut listener, job.pid(), UnleasedStep::Found);
    // The holder of the lease sees the process, too.
    let mut command = host.command(program("gpushctl"));
    let shown = command.args(["lease", "show", &granted.lease.id.to_string()]).env("GPUSH_SOCKET", agent.socket());
    let text = String::from_utf8_lossy(&shown.output().expect("gpushctl").stdout).into_owned();
    assert!(text.contains("! unleased: pid"), "{text}");
}

/// Waits until a GPU and health show a process on a device of others.
fn shown_with_its_gpu(agent: &Agent, job: &Job, why: &str) {
    let shown = agent.until("the GPU shows the process", || agent.gpu(0).unleased.into_iter().next());
    assert_eq!((shown.process.pid, shown.why.as_str()), (Some(job.pid()), why));
    let health = agent.get("/v1/health").json()["errors"].to_string();
    assert!(health.contains("1 process uses a device that belongs to others"), "{health}");
    assert!(!health.contains(&job.pid().to_string()), "every user may read health: {health}");
}
