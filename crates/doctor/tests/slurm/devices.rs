//! Findings about the GPUs of Slurm: gres.conf, their order, and users who can lease them.

use super::*;

#[test]
fn gres_conf_is_compared_with_the_host() {
    let host = Planted::healthy();
    host.write("etc/slurm/gres.conf", "Name=gpu Type=h100 File=/dev/nvidia[0-1\n");
    host.finds(Severity::Problem, "has an unmatched bracket", "gpushctl slurm gres-conf");
    host.write("etc/slurm/gres.conf", "Name=gpu Type=h100 File=/dev/nvidia0\n");
    host.finds(Severity::Problem, "fewer GPUs for node n1", "gpushctl slurm gres-conf");
    host.write("etc/slurm/gres.conf", "Name=gpu Type=h100 File=/dev/nvidia[0,7]\n");
    host.finds(Severity::Problem, "/dev/nvidia7, which does not exist", "gpushctl slurm gres-conf");
    host.write("etc/slurm/gres.conf", "Name=gpu Type=h100 File=/dev/nvidia[0-1] Colour=red\n");
    host.finds(Severity::Warning, "gres.conf:1: key `Colour` is not known", "slurmd -G");
    host.write("etc/slurm/nodes.conf", "NodeName=m[1-4] CPUs=16 Gres=gpu:h100:2\n");
    host.finds(Severity::Warning, "no NodeName for this host", "gpushctl slurm gres-conf");
}

#[test]
fn order_that_differs_from_cuda_is_found() {
    let host = Planted::healthy();
    host.gpu(0, 1);
    host.gpu(1, 0);
    host.finds(Severity::Warning, "a different order than CUDA", "gpushctl slurm gres-conf");
    host.write("etc/slurm/gres.conf", "Name=gpu Type=h100 File=/dev/nvidia[1,0]\n");
    assert_eq!(host.findings()[0].severity, Severity::Ok);
}

/// Fault: with `AutoDetect=nvml`, every job drained the node, and the doctor found nothing.
#[test]
fn detected_devices_without_a_known_order_are_found() {
    let mut host = Planted::healthy();
    host.write("etc/slurm/gres.conf", "AutoDetect=nvml\n");
    assert_eq!(host.findings()[0].severity, Severity::Ok, "{:#?}", host.findings());
    let known = std::mem::take(&mut host.gpus);
    assert_eq!(host.findings()[0].severity, Severity::Ok, "without gpushd, the devices are not known");
    host.gpus = gpus(3);
    host.finds(Severity::Problem, "cannot match Slurm's GPU indexes to GPUs", "gpushctl slurm gres-conf");
    host.gpus = known;
    host.write("etc/slurm/gres.conf", "AutoDetect=nvidia\n");
    host.finds(Severity::Problem, "cannot match Slurm's GPU indexes to GPUs", "AutoDetect=off");
    host.write("etc/slurm/gres.conf", "AutoDetect=nvml\n");
    host.write("etc/slurm/nodes.conf", "NodeName=n1 Gres=mps:200\n");
    host.change("GresTypes=gpu", "GresTypes=gpu,mps");
    host.finds(Severity::Problem, "cannot match Slurm's GPU indexes to GPUs", "gpushctl slurm gres-conf");
    host.write("srv/gpush.toml", "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\n");
    host.finds(Severity::Warning, "cannot match Slurm's GPU indexes to GPUs", "gpushctl slurm gres-conf");
}

#[test]
fn gpus_of_slurm_that_users_can_lease_are_found() {
    let mut host = Planted::healthy();
    host.rules = vec![rule("jobs", LeaseOwner::Slurm, &[0]), rule("users", LeaseOwner::Users, &[1])];
    host.finds(Severity::Warning, "the same GPU at the same time: GPU 1", &format!("rules in {CONFIG} and"));
    for conf in ["Name=gpu Type=h100 File=/dev/nvidia[0-1]", "AutoDetect=nvml"] {
        host.write("etc/slurm/gres.conf", &format!("{conf}\n"));
        host.finds(Severity::Warning, "the same GPU at the same time: GPU 1", "owner = \"slurm\"");
    }
    // Users lease a GPU that Slurm does not have.
    host.write("etc/slurm/gres.conf", "Name=gpu Type=h100 File=/dev/nvidia0\n");
    host.write("etc/slurm/nodes.conf", "NodeName=DEFAULT Gres=gpu:h100:1\nNodeName=n[1-4]\n");
    assert_eq!(host.findings()[0].severity, Severity::Ok, "{:#?}", host.findings());
    // Users cannot lease an unmanaged GPU.
    host.rules = vec![RuleView { lease: None, ..rule("other", LeaseOwner::Users, &[0]) }];
    assert_eq!(host.findings()[0].severity, Severity::Ok);
}

#[test]
fn slurmd_that_has_not_loaded_nvml_is_found() {
    let host = Planted::healthy();
    host.write("etc/slurm/gres.conf", "AutoDetect=nvml\nNodeName=n[1-4] Name=gpu Type=h100 File=/dev/nvidia[0-1]\n");
    // Any user can start a process with this name, also a setuid program such as passwd (pid 4100).
    for (pid, uid) in [(4000, 1000), (4100, 0), (4711, 0)] {
        host.write(&format!("proc/{pid}/comm"), "slurmd\n");
        host.write(&format!("proc/{pid}/status"), &format!("Name:\tslurmd\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n"));
    }
    let map = |plugin: &str| format!("7f2a00000000-7f2a00004000 r-xp 00001000 fe:00 5201 /usr/lib/slurm/{plugin}\n");
    let message = "/etc/slurm/gres.conf has AutoDetect=nvml, but the running slurmd has not loaded NVML";
    let is_found = |host: &Planted| host.findings().iter().any(|finding| finding.message.starts_with(message));
    host.write("proc/4711/maps", &map("gpu_nvml.so"));
    host.write("proc/4000/maps", &map("gpu_generic.so"));
    host.write("proc/4100/maps", &map("libc.so.6"));
    assert!(!is_found(&host));
    host.write("proc/4711/maps", &map("gpu_generic.so"));
    assert!(is_found(&host));
    // AutoDetect was changed from off to nvml, and slurmd was not restarted.
    host.write("etc/slurm/gres.conf", "AutoDetect=nvml\n");
    host.finds(Severity::Warning, message, "restart slurmd");
    assert!(host.findings()[0].causes[0].contains("lists 0 of 2 GPUs"), "{:#?}", host.findings());
    // AutoDetect was changed from nvml to off, and slurmd was not restarted.
    host.write("proc/4711/maps", &map("gpu_nvml.so"));
    host.write("etc/slurm/gres.conf", "AutoDetect=off\nName=gpu Type=h100 File=/dev/nvidia[0-1]\n");
    host.finds(Severity::Problem, "cannot match Slurm's GPU indexes to GPUs", "restart slurmctld and slurmd");
    assert!(host.findings()[0].causes[0].contains("restart slurmd"), "{:#?}", host.findings());
}

/// Fault: if one gres.conf with `AutoDetect=nvml` served all nodes, a node without GPUs of Slurm
/// had findings.
#[test]
fn node_without_gpus_of_slurm_has_no_finding_about_them() {
    let mut host = Planted::healthy();
    host.write("srv/gpush.toml", "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\n");
    host.rules = vec![rule("users", LeaseOwner::Users, &[0, 1])];
    for conf in ["AutoDetect=nvml", "AutoDetect=nvidia", "Name=gpu File=/dev/nvidia[0-1]"] {
        host.write("etc/slurm/gres.conf", &format!("{conf}\n"));
        for gres in ["", "Gres=gpu:0", "Gres=license:4"] {
            host.write("etc/slurm/nodes.conf", &format!("NodeName=n1 CPUs=16 {gres}\n"));
            assert_eq!(host.findings()[0].severity, Severity::Ok, "{conf} {gres}: {:#?}", host.findings());
        }
    }
}
