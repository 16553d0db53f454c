//! Jobs on a node whose slurmd detects the devices in an order that Prolog does not know.

use super::{Job, Node};

/// Fault: if slurmd detected the devices itself, a comment made Prolog fail, and the node was drained. With `owner =
/// "slurm"`, every job made Prolog fail.
#[test]
fn unknown_order_of_devices_fails_the_job_and_not_the_node() {
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
