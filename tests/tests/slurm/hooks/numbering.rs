//! Requests that gpush refuses: Prolog succeeds, and the tasks fail with the reason.

use gpush_api::AuditRecord;

use super::{Job, Node, WHOLE, refused_line, user};

#[test]
fn refused_request_fails_the_tasks_and_not_the_node() {
    let node = Node::two_gpus(WHOLE);
    node.prolog(&Job::new(1).on("0"));
    let busy = node.refusal(&Job::new(2).on("0"));
    assert!(busy.contains("a whole GPU") && busy.contains(&node.granted(1).id.to_string()), "{busy}");
    let wrong = node.refusal(&Job::new(3).on("1").with("SLURM_JOB_COMMENT", "x gpush:mps=0 y"));
    assert!(wrong.contains("--comment") && wrong.contains("`mps`"), "{wrong}");
    let kind = node.refusal(&Job::new(4).on("1").with("SPANK__SLURM_SPANK_OPTION_gpush_gpush", "mps=25"));
    assert!(kind.contains("submit the job with `--comment=gpush:whole`"), "{kind}");
    let no_gres = node.refusal(&Job::new(6).with("SLURM_JOB_COMMENT", "gpush:whole"));
    assert!(no_gres.contains("Slurm allocated no GPU") && no_gres.contains("--gres=gpu:1"), "{no_gres}");
    // The node stays in use. The Epilog of a refused job has nothing to do.
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

/// Fault: if Prolog could not write the line about the refusal, it failed. So a user could drain the node.
#[test]
fn refusal_that_cannot_be_printed_does_not_fail_prolog() {
    let node = Node::two_gpus(WHOLE);
    let job = Job::new(1).on("0").with("SLURM_JOB_COMMENT", "gpush:mps=0");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("a full device");
    let status = node.command("prolog").envs(job.0.clone()).stderr(full).status().expect("gpushctl can be started");
    assert!(status.success(), "{status}");
    assert!(node.task(&job).expect_err("the task fails").contains("`mps`"));
}

#[test]
fn quota_and_dynamic_layout_refuse_the_job() {
    if user() == nix::unistd::geteuid().as_raw() {
        println!("SKIPPED quotas of jobs: only root has jobs of other users");
        return;
    }
    let quota = "[[quota]]\neverybody = true\nleases = 1\nlongest = \"1h\"\n";
    let node = Node::two_gpus(&format!("{quota}{WHOLE}"));
    // Slurm limits the duration of jobs. So `longest` does not apply to them.
    node.prolog(&Job::new(1).on("0"));
    node.granted(1);
    let over = node.refusal(&Job::new(2).on("1"));
    assert!(over.contains("may hold 1 lease") && !over.contains("lease release"), "{over}");
    // Waiting would never help, so the hint must not suggest it.
    let kinds = "[[quota]]\neverybody = true\nkinds = [\"mps\"]\n";
    let node = Node::two_gpus(&format!("{kinds}{WHOLE}"));
    let denied = node.refusal(&Job::new(1).on("0"));
    assert!(denied.contains("kind whole") && denied.contains("hint: request mps"), "{denied}");
    let dynamic = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\nowner = \"slurm\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"h100-80-sxm\"\n", dynamic);
    let refused = node.refusal(&Job::new(3).on("0"));
    assert!(refused.contains("dynamic layout"), "{refused}");
}

/// Fault: for a job without gres, Prolog created MIG devices. This could take longer than the time limit of the hook.
#[test]
fn job_without_gres_creates_no_mig_device() {
    let dynamic = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"dynamic\"\n";
    let node = Node::start("[[gpu]]\nmodel = \"h100-80-sxm\"\n", dynamic);
    let refused = node.refusal(&Job::new(3).with("SLURM_JOB_COMMENT", "gpush:mig=1g.10gb"));
    assert!(refused.contains("dynamic layout"), "{refused}");
    assert!(node.agent().gpu(0).mig.is_none_or(|mig| mig.instances.is_empty()));
}

/// Fault: if slurmd detected the devices itself, a comment made Prolog fail, and the node was drained. With `owner =
/// "slurm"`, every job made Prolog fail.
#[test]
fn devices_whose_order_is_not_known_fail_the_job_and_not_the_node() {
    let (nvml, nvidia) = (Some("gpu_nvml.so"), Some("gpu_nvidia.so"));
    for (owner, plugin, detect, gres, reason) in [
        ("", nvml, "nvml", "NodeName=n2 Gres=gpu:2", "slurm.conf has no Gres= with GPUs for the node"),
        ("owner = \"slurm\"\n", nvml, "nvml", "", "slurm.conf has no Gres= with GPUs for the node"),
        ("owner = \"slurm\"\n", nvidia, "nvidia", "NodeName=n1 Gres=gpu:2", "gres.conf has AutoDetect=nvidia"),
        ("owner = \"slurm\"\n", nvml, "nvml", "NodeName=n1 Gres=gpu:3", "gives the node 3 GPUs and MIG devices"),
        ("owner = \"slurm\"\n", nvidia, "off", "NodeName=n1 Gres=gpu:2", "restart slurmd"),
        ("owner = \"slurm\"\n", None, "nvml", "NodeName=n1 Gres=gpu:2", "does not show whether it uses NVML"),
    ] {
        let mut node = Node::two_gpus(&format!("[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\n{owner}"));
        std::fs::write(&node.gres_conf, format!("AutoDetect={detect}\n")).expect("gres.conf can be written");
        if let Some(plugin) = plugin {
            node.with_plugin(plugin);
        }
        let slurm_conf = node.host.scratch("slurm.conf");
        std::fs::write(&slurm_conf, format!("{gres}\n")).expect("slurm.conf can be written");
        let job = |id| Job::new(id).on("0").with("SLURM_CONF", slurm_conf.display());
        if owner.is_empty() {
            node.prolog(&job(60));
            node.epilog(&job(60));
        }
        let comment = if owner.is_empty() { "gpush:whole" } else { "" };
        let refused = node.refusal(&job(61).with("SLURM_JOB_COMMENT", comment));
        assert!(refused.contains("Slurm's index 0") && refused.contains(reason), "{refused}");
        node.epilog(&job(61));
    }
}

/// Whatever a user writes, Prolog must not fail.
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
            let line = refused_line(&node.run("prolog", &job));
            assert!(line.as_ref().is_none_or(|line| line.chars().count() < 1100), "{line:?}");
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
