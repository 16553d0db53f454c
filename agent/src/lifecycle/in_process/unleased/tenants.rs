//! Processes on a device that another user has leased alone, or that Slurm owns.

use gpush_api::{Event, EventPayload, Health, LeaseGrant, LeaseState, ProcessKind, UnleasedStep};
use serde_json::json;

use super::{HOLDER, OTHER, start};
use crate::lifecycle::in_process::{InProcess, programs::UserProgram, user};

/// If a MIG device is destroyed and created again at the same placement, it has the same UUID. So the environment of an
/// ended lease selects the device of the next holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_environment_on_the_device_of_the_next_holder_is_reported() {
    // No other test has these users, because the processes here name their lease without its host.
    const HOLDER: u32 = 3003;
    const OTHER: u32 = 3004;
    let config = "[processes]\nunleased = \"end\"\ngrace = \"0s\"\n\
        [[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb\"]\n";
    let Some(host) = start("processes of earlier holders", config).await else { return };
    let device = async |uid: u32| -> LeaseGrant {
        let share = json!({ "kind": "mig_profile", "profile": "1g.10gb" });
        host.post_as(user(uid), "/v1/leases", &json!({ "share": share, "duration_s": 3600 })).await.expect("a lease")
    };
    let first = device(HOLDER).await;
    host.release(&first).await;
    host.wait_until_ended(&first).await;
    // Destroy the device and create it again.
    for layout in ["7g.80gb", "1g.10gb"] {
        host.apply(&["0"], &[layout]).await;
    }
    let second = device(OTHER).await;
    assert_eq!(second.lease.members[0].target, first.lease.members[0].target, "the same UUID again");
    let job = |uid: u32, environment: &[(String, String)]| {
        let job = UserProgram::with_environment(uid, environment);
        host.gpus.use_first_device(0, job.pid());
        job
    };
    let (mut old, mut bare) = (job(HOLDER, &first.environment), job(HOLDER, &[]));
    // A process in a container runs as another user, but its environment names the present lease of the device.
    let container = job(HOLDER, &second.environment);
    let own = job(OTHER, &second.environment);
    host.check().await;
    let (one, other) = (first.lease.id, second.lease.id);
    for (job, why) in [
        (&old, format!("its environment names lease {one}, but lease {other} holds the device now")),
        (&bare, format!("lease {other} holds the device, and belongs to another user than the process")),
    ] {
        assert_eq!(host.listed(job).await.unleased, Some(why));
        assert_eq!(host.action(job).await, "not ended: the rule of its GPU does not require a lease");
    }
    assert!(old.lives() && bare.lives());
    let (in_container, of_holder) = (host.listed(&container).await, host.listed(&own).await);
    assert_eq!((in_container.unleased, in_container.lease), (None, None));
    assert_eq!((of_holder.unleased, of_holder.lease), (None, Some(other.to_string())));
    // When the lease has ended, the device has no lease, and gpushd does not report the process any more.
    for job in [own, container] {
        host.gpus.end_process(0, job.pid());
    }
    host.release(&second).await;
    let path = format!("/v1/leases/{other}");
    host.until("the lease ends", async || {
        let now: gpush_api::Lease = host.get(&path).await;
        (now.state == LeaseState::Ended).then_some(())
    })
    .await;
    host.until("it is not reported", async || host.listed(&old).await.unleased.is_none().then_some(())).await;
}

impl InProcess {
    /// Waits until a GPU and health show a process on a device of others.
    async fn shown_with_its_gpu(&self, job: &UserProgram, why: &str) {
        self.check().await;
        assert_eq!(self.listed(job).await.unleased.as_deref(), Some(why));
        let shown = self.gpus().await.remove(0).unleased.into_iter().next().expect("the GPU shows the process");
        assert_eq!((shown.process.pid, shown.why.as_str()), (Some(job.pid()), why));
        let health: Health = self.get("/v1/health").await;
        let health = format!("{:?}", health.errors);
        assert!(health.contains("1 process uses a device that belongs to others"), "{health}");
        assert!(!health.contains(&job.pid().to_string()), "every user may read health: {health}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_on_a_leased_whole_gpu_of_another_user_is_reported() {
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n";
    let Some(host) = start("processes on a leased GPU", config).await else { return };
    let free = host.job(HOLDER, 0, ProcessKind::Compute);
    assert_eq!(host.listed(&free).await.unleased, None, "no lease has the GPU");
    host.gpus.end_process(0, free.pid());
    drop(free);
    let body = json!({ "share": { "kind": "whole" }, "duration_s": 3600 });
    let granted: LeaseGrant =
        host.until("the GPU is free", async || host.post_as(user(OTHER), "/v1/leases", &body).await.ok()).await;
    let mut listener = host.listen("?kinds=unleased", None).await;
    let job = host.job(HOLDER, 0, ProcessKind::Compute);
    host.shown_with_its_gpu(
        &job,
        &format!("lease {} holds the device, and belongs to another user than the process", granted.lease.id),
    )
    .await;
    let is_found = |event: &Event| {
        let EventPayload::Unleased(change) = &event.what else { return false };
        change.pid == Some(job.pid()) && change.step == UnleasedStep::Found
    };
    listener.until(is_found).await;
}

/// Fault: nothing reported a process outside Slurm on a GPU that Slurm owns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_outside_slurm_on_a_gpu_of_slurm_is_reported() {
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
    let Some(host) = start("processes on a GPU of Slurm", config).await else { return };
    let job = host.job(HOLDER, 0, ProcessKind::Compute);
    host.shown_with_its_gpu(&job, "Slurm owns the GPU, but the process belongs to no Slurm job").await;
}
