//! Refused requests: Prolog succeeds, and the tasks fail with the reason.

use gpush_api::AuditRecord;

use super::{Job, Node, WHOLE, user};

#[test]
fn refused_request_fails_the_tasks_and_not_the_node() {
    let node = Node::two_gpus(WHOLE);
    node.prolog(&Job::new(1).on("0"));
    let busy = node.refusal(&Job::new(2).on("0"));
    assert!(busy.contains("a whole GPU") && busy.contains(&node.granted(1).id.to_string()), "{busy}");
    let wrong = node.refusal(&Job::new(3).on("1").with("SLURM_JOB_COMMENT", "x gpush:mps=0 y"));
    assert!(wrong.contains("--comment") && wrong.contains("`mps`"), "{wrong}");
    let kind = node.refusal(&Job::new(4).on("1").with("SPANK__SLURM_SPANK_OPTION_gpush_gpush", "mps=25"));
    assert!(kind.contains("whole"), "{kind}");
    // The node remains in use. Epilog of the refused jobs has nothing to do.
    for id in 2..=4 {
        node.epilog(&Job::new(id).on("1"));
        assert_eq!(node.task(&Job::new(id)), Ok(String::new()));
    }
    node.prolog(&Job::new(5).on("1"));
    node.granted(5);
    let trail: Vec<AuditRecord> =
        serde_json::from_value(node.agent().get("/v1/audit?object=job%202").json()).expect("a trail");
    assert_eq!(trail.iter().map(|record| record.action.as_str()).collect::<Vec<_>>(), ["slurm.start"]);
}

#[test]
fn quota_and_dynamic_layout_refuse_the_job() {
    if user() == nix::unistd::geteuid().as_raw() {
        println!("SKIPPED quotas of jobs: only root has jobs of other users");
        return;
    }
    let quota = "[[quota]]\neverybody = true\nleases = 1\nlongest = \"1h\"\n";
    let node = Node::two_gpus(&format!("{quota}{WHOLE}"));
    // Slurm limits the duration of a job, so `longest` does not apply to it.
    node.prolog(&Job::new(1).on("0"));
    node.granted(1);
    let over = node.refusal(&Job::new(2).on("1"));
    assert!(over.contains("may hold 1 lease") && !over.contains("lease release"), "{over}");
    let dynamic = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\nowner = \"slurm\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"h100-80-sxm\"\n", dynamic);
    let refused = node.refusal(&Job::new(3).on("0"));
    assert!(refused.contains("dynamic layout"), "{refused}");
}

/// Earlier, gpushd created MIG devices in Prolog for a job without gres, which could take longer
/// than the time limit of the hook.
#[test]
fn job_without_gres_creates_no_mig_device() {
    let dynamic = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"h100-80-sxm\"\n", dynamic);
    let refused = node.refusal(&Job::new(3).with("SLURM_JOB_COMMENT", "gpush:mig=1g.10gb"));
    assert!(refused.contains("dynamic layout"), "{refused}");
    assert!(node.agent().gpu(0).mig.is_none_or(|mig| mig.instances.is_empty()));
}

/// Earlier, if gres.conf did not name the devices, a comment made Prolog fail and drained the node.
#[test]
fn request_on_devices_without_a_file_is_refused() {
    let node = Node::two_gpus("[[gpu]]\nmatch = [\"0-1\"]\nmode = \"mps\"\n");
    std::fs::write(&node.gres_conf, "AutoDetect=nvml\n").expect("gres.conf can be written");
    node.prolog(&Job::new(60).on("0"));
    let refused = node.refusal(&Job::new(61).on("0").with("SLURM_JOB_COMMENT", "mps"));
    assert!(refused.contains("AutoDetect"), "{refused}");
    node.epilog(&Job::new(61).on("0"));
}

/// No text that a user writes may make Prolog fail.
#[test]
fn any_comment_and_option_leaves_the_node_in_use() {
    let node = Node::two_gpus(WHOLE);
    let long = "x".repeat(20_000);
    let texts = [
        "",
        "gpush:",
        "gpush:mps=25,mps=25",
        "gpush:mig=../../etc",
        "gpush:$(reboot)",
        "gpush:mps=25;reboot",
        "a\nb gpush:mem=8G\nexport X=1",
        "gpush:whole gpush:mps=25",
        "\u{202e}gpush:mps=\u{661}",
        "gpush:mps=99999999999999999999",
        "mps-per-gpu",
        &long,
    ];
    for (at, text) in texts.into_iter().enumerate() {
        let id = 100 + u32::try_from(at).expect("small");
        for name in ["SLURM_JOB_COMMENT", "SPANK__SLURM_SPANK_OPTION_gpush_gpush"] {
            let job = Job::new(id).on("0").with(name, text);
            node.prolog(&job);
            let printed = match node.task(&job) {
                Ok(text) | Err(text) => text,
            };
            let is_protocol =
                |line: &str| ["export ", "unset ", "print gpush: "].iter().any(|word| line.starts_with(word));
            assert!(printed.lines().all(is_protocol), "{text:?}: {printed}");
            node.epilog(&job);
            assert!(node.lease(id).is_none());
        }
    }
}
