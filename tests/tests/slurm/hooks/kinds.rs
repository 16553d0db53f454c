//! Leases of every kind. The kind depends on what Slurm allocated and on what the job requests.

use std::{collections::BTreeSet, fmt::Write as _};

use gpush_api::{LeaseKind, LeaseState, MemberShare, MpsState};
use gpush_tests::mps::{act, lease_now, reaches};

use super::{Job, Node, refused_line, user};

const COMMENT: &str = "SLURM_JOB_COMMENT";

#[test]
fn job_gets_the_mig_devices_of_its_uuids() {
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*3\"]\nowner = \"slurm\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"h100-80-sxm\"\n", config);
    let instances = node.agent().gpu(0).mig.expect("MIG").instances;
    let uuids: Vec<String> = instances.iter().filter_map(|one| one.compute[0].uuid.clone()).collect();
    // Slurm numbers whole GPUs first, and then MIG devices.
    let job =
        Job::new(1).with("SLURM_JOB_GPUS", "2,3").with("CUDA_VISIBLE_DEVICES", format!("{},{}", uuids[2], uuids[0]));
    node.prolog(&job);
    let lease = node.granted(1);
    let members: BTreeSet<&str> = lease.members.iter().map(|member| member.target.as_str()).collect();
    assert_eq!((lease.kind, members), (LeaseKind::Mig, [uuids[0].as_str(), uuids[2].as_str()].into()));
    let second = Job::new(2).with("SLURM_JOB_GPUS", "3").with("CUDA_VISIBLE_DEVICES", &uuids[0]);
    assert!(node.refusal(&second).contains("MIG"));
    // gres.conf lists this GPU as a whole GPU, but the GPU has MIG instances. So gpush refuses the
    // job.
    let whole = node.refusal(&Job::new(3).on("0"));
    assert!(whole.contains("partitioned with MIG"), "{whole}");
    // If a job requests a profile, it gets a device on this GPU.
    node.prolog(&Job::new(4).on("0").with(COMMENT, "gpush:mig=1g.10gb"));
    assert_eq!(node.granted(4).members[0].target, uuids[1]);
    node.epilog(&job);
    node.prolog(&second);
    assert_eq!(node.granted(2).members[0].target, uuids[0]);
}

/// Fault: if Prolog ran again for the same run with another MIG device of the GPU, the job kept the
/// lease of the first device.
#[test]
fn repeated_prolog_with_another_mig_device_gets_a_lease_of_that_device() {
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*3\"]\nowner = \"slurm\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"h100-80-sxm\"\n", config);
    let instances = node.agent().gpu(0).mig.expect("MIG").instances;
    let uuids: Vec<String> = instances.iter().filter_map(|one| one.compute[0].uuid.clone()).collect();
    for (id, comment) in [(1, ""), (2, "gpush:mig=1g.10gb")] {
        let on = |device: usize| {
            let job = Job::new(id).with("SLURM_JOB_GPUS", "2").with("CUDA_VISIBLE_DEVICES", &uuids[device]);
            if comment.is_empty() { job } else { job.with(COMMENT, comment) }
        };
        node.prolog(&on(0));
        let first = node.granted(id);
        node.prolog(&on(1));
        let second = node.granted(id);
        assert_eq!(second.members[0].target, uuids[1], "{comment}");
        assert_eq!(lease_now(node.agent(), first.id).state, LeaseState::Ended);
        assert!(node.task(&on(1)).expect("the task runs").contains(&uuids[1]));
        // If Prolog runs again for the same device, the job keeps its lease.
        node.prolog(&on(1));
        assert_eq!(node.granted(id).id, second.id);
        node.epilog(&on(1));
    }
}

/// Without NVML, Slurm gives a MIG device an index. The hooks then find the MIG device by its
/// device files.
#[test]
fn node_with_whole_gpus_and_mig_devices_serves_both() {
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*2\"]\nowner = \"slurm\"\n\
                  [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
    let host = "[[gpu]]\nmodel = \"h100-80-sxm\"\n[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n";
    let node = Node::start(host, config);
    let (mig, whole) = (node.agent().gpu(0), node.agent().gpu(1));
    let mut conf = format!("AutoDetect=off\nName=gpu Type=h100 File=/dev/nvidia{}\n", whole.minor);
    let mut uuids = Vec::new();
    for instance in mig.mig.expect("MIG").instances {
        let cap = 3 + 135 * mig.minor + 9 * instance.id;
        let caps = format!("/dev/nvidia-caps/nvidia-cap{cap},/dev/nvidia-caps/nvidia-cap{}", cap + 1);
        let _infallible = writeln!(conf, "Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia{},{caps}", mig.minor);
        uuids.push(instance.compute[0].uuid.clone().expect("a UUID"));
    }
    std::fs::write(&node.gres_conf, conf).expect("gres.conf can be written");
    let members = |id: u32| -> Vec<String> { node.granted(id).members.into_iter().map(|one| one.target).collect() };
    node.prolog(&Job::new(1).on("0"));
    assert_eq!(members(1), [whole.uuid]);
    node.prolog(&Job::new(2).on("2"));
    assert_eq!(members(2), [uuids[1].as_str()]);
    let text = node.task(&Job::new(2).on("2")).expect("the task runs");
    assert!(text.contains(&format!("export CUDA_VISIBLE_DEVICES={}\n", uuids[1])), "{text}");
    node.prolog(&Job::new(3).on("1"));
    assert_eq!(members(3), [uuids[0].as_str()]);
    assert!(node.refusal(&Job::new(4).on("0,1")).contains("whole GPUs and MIG devices"));
}

#[test]
fn mps_percentage_comes_from_the_request_or_from_gres() {
    let config = "[mps]\nhealth_s = 1\n[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nowner = \"slurm\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"l4\"\n", config);
    reaches(node.agent(), "0", MpsState::Ready);
    let percentage = |id: u32| match &node.granted(id).members[0].share {
        MemberShare::Mps { percentage, .. } => percentage.to_string(),
        other => panic!("{other:?}"),
    };
    node.prolog(&Job::new(1).on("0").with("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 50));
    assert_eq!(percentage(1), "50");
    let option =
        Job::new(2).on("0").with("SPANK__SLURM_SPANK_OPTION_gpush_gpush", "mps=20,mem=2G").with(COMMENT, "gpush:mps=1");
    node.prolog(&option);
    assert_eq!(percentage(2), "20");
    let text = node.task(&option).expect("the task runs");
    for expected in ["export CUDA_MPS_PIPE_DIRECTORY=/", "export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20\n", "=0=2048M\n"]
    {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let over =
        node.refusal(&Job::new(3).on("0").with("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 10).with(COMMENT, "gpush:mps=20"));
    assert!(over.contains("gres/mps gives the job only 10 %"), "{over}");
    // Prolog cannot distinguish gres/shard from gres/gpu.
    let shard = node.refusal(&Job::new(4).on("0"));
    assert!(shard.contains("requests no share") && shard.contains("gpush:mps=25"), "{shard}");
    if user() != nix::unistd::geteuid().as_raw() {
        // A daemon serves one user at a time, so gpush refuses this job.
        let other = Job::new(5).on("0").with("SLURM_JOB_UID", 65_532).with(COMMENT, "gpush:mps=10");
        assert!(refused_line(&node.run("prolog", &other)).is_some());
        let trail = node.agent().get("/v1/audit?object=job%205").json().to_string();
        assert!(trail.contains("refused"), "{trail}");
        assert!(node.lease(5).is_none());
    }
    node.epilog(&Job::new(1));
    node.epilog(&Job::new(2));
    assert!(node.lease(1).is_none() && node.lease(2).is_none());
    // The target has free capacity, but an administrator has stopped its daemon. Waiting would not
    // help, so gpush refuses the job.
    assert_eq!(act(node.agent(), "0", "stop", &serde_json::json!({})).status, 200);
    reaches(node.agent(), "0", MpsState::Stopped);
    let stopped = node.refusal(&Job::new(6).on("0").with(COMMENT, "gpush:mps=10"));
    assert!(stopped.contains("its MPS daemon is stopped") && stopped.contains("gpushctl mps start 0"), "{stopped}");
}

#[test]
fn replica_of_a_time_sliced_gpu_needs_a_request() {
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\nowner = \"slurm\"\ntimeslice = { replicas = 2 }\n";
    let node = Node::start("[[gpu]]\nmodel = \"l4\"\n", config);
    for id in [1, 2] {
        node.prolog(&Job::new(id).on("0").with(COMMENT, "gpush:timeslice"));
        assert_eq!(node.granted(id).kind, LeaseKind::Timeslice);
    }
    assert!(node.refusal(&Job::new(3).on("0").with(COMMENT, "gpush:timeslice")).contains("replica"));
    assert!(node.refusal(&Job::new(4).on("0")).contains("time-sliced"));
}

/// If Slurm allocated no GPU to a job, the job gets no GPU that belongs to Slurm.
#[test]
fn request_without_gres_gets_a_gpu_of_users_only() {
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n[[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
    let node = Node::two_gpus(config);
    node.prolog(&Job::new(1).with(COMMENT, "gpush:whole"));
    assert_eq!(node.granted(1).members[0].gpu, node.agent().gpu(0).uuid);
    assert!(node.refusal(&Job::new(2).with(COMMENT, "gpush:whole")).contains("a whole GPU"));
}
