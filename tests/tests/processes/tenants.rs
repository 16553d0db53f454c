//! Processes of earlier lease holders on a device that another user now leases alone.
//!
//! If a MIG device is destroyed and created again at the same placement, it has the same UUID. So
//! the environment of an ended lease selects the device of the next holder.

use std::process::Command;

use gpush_api::{GpuProcess, LeaseGrant, LeaseState, OperationState, UnleasedStep};
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    mps::{lease_becomes, release},
};
use serde_json::json;

use super::{END, Job, NOBODY, OTHER, listed, start_without_mps, step_event};

const MIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb\"]\n";

fn lease(agent: &Agent, uid: u32, share: &serde_json::Value) -> LeaseGrant {
    let answer = agent.post("/v1/leases", &json!({ "share": share, "holder_uid": uid, "duration_s": 3600 }));
    serde_json::from_value(answer.json()).expect("a lease")
}

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
fn old_environment_on_the_device_of_the_next_holder_is_reported() {
    let Some((host, agent)) =
        start_without_mps("processes of earlier holders", "[[gpu]]\nmodel = \"h100-80-sxm\"\n", &format!("{END}{MIG}"))
    else {
        return;
    };
    agent.wait_for_layouts_at_start();
    let device = json!({ "kind": "mig_profile", "profile": "1g.10gb" });
    let first = lease(&agent, NOBODY, &device);
    release(&agent, first.lease.id);
    lease_becomes(&agent, first.lease.id, LeaseState::Ended);
    // Destroy the device and create it again.
    for layout in ["7g.80gb", "1g.10gb"] {
        assert_eq!(agent.apply(&["0"], &[layout]).state, OperationState::Done);
    }
    let second = lease(&agent, OTHER, &device);
    let uuid = &second.lease.members[0].target;
    assert_eq!(uuid, &first.lease.members[0].target, "the same UUID again");

    let place = format!("--mig {uuid}");
    let mut old = job(&host, NOBODY, &place, Some(&first));
    let mut bare = job(&host, NOBODY, &place, None);
    // A process in a container runs as another user, but its environment names the present lease of
    // the device.
    let container = job(&host, NOBODY, &place, Some(&second));
    let own = job(&host, OTHER, &place, Some(&second));

    let (one, other) = (first.lease.id, second.lease.id);
    let reported = |job: &Job, why: &str| {
        assert_eq!(seen(&agent, job).unleased.as_deref(), Some(why));
        let action = agent.until("the action is reported", || listed(&agent, job.pid())?.unleased_action);
        assert_eq!(action, "not ended: the rule of its GPU does not require a lease");
    };
    reported(&old, &format!("its environment names lease {one}, but lease {other} holds the device now"));
    reported(&bare, &format!("lease {other} of another user holds the device"));
    assert!(old.lives() && bare.lives());
    assert_eq!((seen(&agent, &container).unleased, seen(&agent, &container).lease), (None, None));
    assert_eq!((seen(&agent, &own).unleased, seen(&agent, &own).lease), (None, Some(other.to_string())));
    let mut command = host.command(program("gpushctl"));
    let output = command.args(["process", "list", "--unleased"]).env("GPUSH_SOCKET", agent.socket()).output();
    assert_eq!(output.expect("gpushctl").status.code(), Some(3));

    // When the lease has ended, the device has no lease, and gpushd does not report the process any
    // more.
    drop((own, container));
    release(&agent, other);
    lease_becomes(&agent, other, LeaseState::Ended);
    agent.until("it is no longer reported", || listed(&agent, old.pid())?.unleased.is_none().then_some(()));
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

/// Fault: nothing reported a process outside Slurm on a GPU that Slurm owns.
#[test]
fn process_outside_slurm_on_a_gpu_of_slurm_is_reported() {
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
    let Some((host, agent)) = start_without_mps("processes on a GPU of Slurm", "[[gpu]]\nmodel = \"l4\"\n", config)
    else {
        return;
    };
    let job = job(&host, NOBODY, "--gpu 0", None);
    let why = "Slurm owns the GPU, but the process belongs to no Slurm job";
    shown_with_its_gpu(&agent, &job, why);
    assert_eq!(seen(&agent, &job).unleased.as_deref(), Some(why));
}
