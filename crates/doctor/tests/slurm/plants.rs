//! Faults in Slurm's files, planted one at a time into a suitable host. The doctor must find each of them.

use gpush_api::{ComputeInstance, GpuInstance, Placement};

use super::*;

/// A fault.
struct Plant {
    what: &'static str,
    plant: fn(&mut Planted),
    /// A part of the message of the finding.
    message: &'static str,
    /// A part of its hint.
    hint: &'static str,
}

fn gres(host: &Planted, gres: &str) {
    host.write("etc/slurm/nodes.conf", &format!("NodeName=n[1-4] CPUs=16 Gres={gres}\n"));
}

fn gres_conf(host: &Planted, lines: &str) {
    host.write("etc/slurm/gres.conf", &format!("AutoDetect=off\n{lines}\n"));
}

fn types(host: &Planted, types: &str) {
    host.change("GresTypes=gpu", &format!("GresTypes={types}"));
}

/// Gives GPU 0 two MIG devices, with the files of their capabilities.
fn mig(host: &mut Planted) {
    let instance = |id: u32, profile: &str| GpuInstance {
        id,
        profile_id: 9,
        profile: profile.to_owned(),
        placement: Placement { start: 0, size: 4 },
        memory: None,
        compute: vec![ComputeInstance {
            id: 0,
            profile_id: 2,
            profile: profile.to_owned(),
            placement: None,
            uuid: Some(format!("MIG-{id}").as_str().into()),
            processes: Vec::new(),
        }],
        processes: Vec::new(),
    };
    host.gpus = preset::gpus("dgx-h100").expect("a preset");
    host.gpus.truncate(2);
    host.gpus[1].mig = None;
    host.gpus[0].mig.as_mut().expect("MIG").instances = vec![instance(1, "3g.40gb"), instance(5, "2g.20gb")];
    for (gi, minors) in [(1, [12, 13]), (5, [48, 49])] {
        let path = format!("proc/driver/nvidia/capabilities/gpu0/mig/gi{gi}");
        host.write(&format!("{path}/access"), &format!("DeviceFileMinor: {}\n", minors[0]));
        host.write(&format!("{path}/ci0/access"), &format!("DeviceFileMinor: {}\n", minors[1]));
        for minor in minors {
            host.write(&format!("dev/nvidia-caps/nvidia-cap{minor}"), "");
        }
    }
    gres(host, "gpu:h100:1,gpu:3g.40gb:1,gpu:2g.20gb:1");
    gres_conf(host, &lines("3g.40gb", "2g.20gb", 48));
}

/// Returns the lines of the two MIG devices and of GPU 1. `first` and `second` are the types, `cap` is the number of the
/// second device's first file.
fn lines(first: &str, second: &str, cap: u32) -> String {
    let line = |gres_type: &str, cap: u32| {
        let files = format!("/dev/nvidia0,/dev/nvidia-caps/nvidia-cap{cap},/dev/nvidia-caps/nvidia-cap{}", cap + 1);
        format!("Name=gpu Type={gres_type} MultipleFiles={files}\n")
    };
    format!("Name=gpu Type=h100 File=/dev/nvidia1\n{}{}", line(first, 12), line(second, cap))
}

const PLANTS: &[Plant] = &[
    Plant {
        what: "gres.conf lists fewer GPUs",
        plant: |host| gres(host, "gpu:h100:3"),
        message: "gres.conf lists fewer GPUs for node n1",
        hint: "gpushctl slurm gres-conf",
    },
    Plant {
        what: "gres.conf lists more GPUs",
        plant: |host| gres(host, "gpu:h100:1"),
        message: "Slurm does not use all GPUs of node n1",
        hint: "raise the count in Gres=",
    },
    Plant {
        what: "the types have other counts",
        plant: |host| {
            gres_conf(host, "Name=gpu Type=h100 File=/dev/nvidia0\nName=gpu Type=h100mps File=/dev/nvidia1");
        },
        message: "the types of the GPUs of node n1 differ",
        hint: "gpushctl slurm gres-conf",
    },
    Plant {
        what: "a GPU without a type, where slurm.conf has types",
        plant: |host| gres_conf(host, "Name=gpu File=/dev/nvidia[0-1]"),
        message: "the types of the GPUs of node n1 differ",
        hint: "restart slurmctld and slurmd",
    },
    Plant {
        what: "the type of another model",
        plant: |host| {
            gres(host, "gpu:a100:2");
            gres_conf(host, "Name=gpu Type=a100 File=/dev/nvidia[0-1]");
        },
        message: "the type a100, but the GPU is a NVIDIA H100",
        hint: "gpushctl slurm gres-conf",
    },
    Plant {
        what: "with AutoDetect=nvml, a type that is not part of a name",
        plant: |host| {
            gres(host, "gpu:h100mps:2");
            host.write("etc/slurm/gres.conf", "AutoDetect=nvml\n");
        },
        message: "the type h100mps, which is not a part of the name",
        hint: "slurmd -G",
    },
    Plant {
        what: "a device file that does not exist",
        plant: |host| gres_conf(host, "Name=gpu Type=h100 File=/dev/nvidia[0,7]"),
        message: "/dev/nvidia7, which does not exist",
        hint: "gpushctl slurm gres-conf",
    },
    Plant {
        what: "a file of a capability that does not exist",
        plant: |host| {
            mig(host);
            gres_conf(host, &lines("3g.40gb", "2g.20gb", 90));
        },
        message: "nvidia-cap90, which does not exist",
        hint: "gpushctl slurm gres-conf",
    },
    Plant {
        what: "capabilities of an earlier layout",
        plant: |host| {
            mig(host);
            for minor in [66, 67] {
                host.write(&format!("dev/nvidia-caps/nvidia-cap{minor}"), "");
            }
            gres_conf(host, &lines("3g.40gb", "2g.20gb", 66));
        },
        message: "which are not the files of one MIG device of GPU 0",
        hint: "gpushctl slurm gres-conf",
    },
    Plant {
        what: "two swapped types of MIG devices",
        plant: |host| {
            mig(host);
            gres_conf(host, &lines("2g.20gb", "3g.40gb", 48));
        },
        message: "the type 2g.20gb, but it is a 3g.40gb",
        hint: "gpushctl slurm gres-conf",
    },
    Plant {
        what: "GresTypes without mps",
        plant: |host| gres(host, "gpu:h100:2,mps:100"),
        message: "GresTypes in /etc/slurm/slurm.conf lacks mps",
        hint: "set GresTypes=gpu,mps",
    },
    Plant {
        what: "GresTypes without gpu",
        plant: |host| types(host, "license"),
        message: "GresTypes in /etc/slurm/slurm.conf lacks gpu",
        hint: "restart slurmctld and slurmd",
    },
    Plant {
        what: "slurmd does not run",
        plant: |host| host.remove("proc/900/comm"),
        message: "slurmd does not run",
        hint: "systemctl start slurmd",
    },
    Plant {
        what: "gres.conf was changed after slurmd started",
        plant: |host| {
            host.write("proc/stat", "cpu 1\nbtime 1000\n");
            host.write("proc/900/stat", &format!("900 (slurmd) S 1 {}100 0\n", "0 ".repeat(17)));
        },
        message: "gres.conf was changed after slurmd had started",
        hint: "scontrol reconfigure",
    },
    Plant {
        what: "slurmd has not loaded NVML",
        plant: |host| {
            host.write("etc/slurm/gres.conf", "AutoDetect=nvml\nName=gpu Type=h100 File=/dev/nvidia[0-1]\n");
            host.write(
                "proc/900/maps",
                "7f2a00000000-7f2a00004000 r-xp 00001000 fe:00 5201 /usr/lib/slurm/gpu_generic.so\n",
            );
        },
        message: "the running slurmd has not loaded NVML",
        hint: "restart slurmd",
    },
    Plant {
        what: "AutoDetect of another library",
        plant: |host| host.write("etc/slurm/gres.conf", "AutoDetect=nvidia\n"),
        message: "cannot match Slurm's GPU indexes to GPUs",
        hint: "AutoDetect=off",
    },
    Plant {
        what: "a GPU of Slurm without a line",
        plant: |host| {
            gres(host, "gpu:h100:1");
            gres_conf(host, "Name=gpu Type=h100 File=/dev/nvidia0");
        },
        message: "only Slurm jobs can lease GPU 1, but Slurm does not have it",
        hint: "gpushctl slurm gres-conf 1",
    },
    Plant {
        what: "a GPU of users in gres.conf",
        plant: |host| host.rules = vec![rule("jobs", LeaseOwner::Slurm, &[0]), rule("users", LeaseOwner::Users, &[1])],
        message: "the same GPU at the same time: GPU 1",
        hint: "owner = \"slurm\"",
    },
    Plant {
        what: "gres/mps on several GPUs",
        plant: |host| {
            types(host, "gpu,mps");
            gres(host, "gpu:h100:2,mps:200");
            gres_conf(host, "Name=gpu Type=h100 File=/dev/nvidia[0-1]\nName=mps Count=200");
            host.gpus.iter_mut().for_each(|gpu| gpu.mode = Mode::Mps);
        },
        message: "gres/mps is on 2 GPUs of node n1",
        hint: "Name=mps Count=100 File=/dev/nvidia0",
    },
    Plant {
        what: "gres/mps, but the GPUs are not shared",
        plant: |host| {
            types(host, "gpu,mps");
            gres(host, "gpu:h100:2,mps:100");
            gres_conf(host, "Name=gpu Type=h100 File=/dev/nvidia[0-1]\nName=mps Count=100 File=/dev/nvidia0");
        },
        message: "gres/mps, but no GPU of Slurm has mode mps",
        hint: "gpushctl config reload",
    },
    Plant {
        what: "gres/shard, but the GPUs are not shared",
        plant: |host| {
            types(host, "gpu,shard");
            gres(host, "gpu:h100:2,shard:8");
            gres_conf(host, "Name=gpu Type=h100 File=/dev/nvidia[0-1]\nName=shard Count=8");
        },
        message: "gres/shard, but no GPU of Slurm has mode mps or timeslice",
        hint: "gpushctl apply",
    },
    Plant {
        what: "gres/mps and gres/shard on one node",
        plant: |host| {
            types(host, "gpu,mps,shard");
            gres(host, "gpu:h100:2,mps:100,shard:8");
            gres_conf(
                host,
                "Name=gpu Type=h100 File=/dev/nvidia[0-1]\nName=mps Count=100 File=/dev/nvidia0\nName=shard Count=8",
            );
            host.gpus.iter_mut().for_each(|gpu| gpu.mode = Mode::Mps);
        },
        message: "both gres/mps and gres/shard",
        hint: "remove `mps` or `shard`",
    },
    Plant {
        what: "gres/shard and MIG devices of two types",
        plant: |host| {
            mig(host);
            types(host, "gpu,shard");
            gres(host, "gpu:h100:1,gpu:3g.40gb:1,gpu:2g.20gb:1,shard:4");
            let lines = lines("3g.40gb", "2g.20gb", 48);
            gres_conf(host, &format!("{lines}Name=shard Count=4 File=/dev/nvidia1"));
            host.gpus[1].mode = Mode::Timeslice;
        },
        message: "gres/shard and MIG devices of several types",
        hint: "remove shard from Gres=",
    },
    Plant {
        what: "the node is not in slurm.conf",
        plant: |host| host.write("etc/slurm/nodes.conf", "NodeName=m[1-4] CPUs=16 Gres=gpu:h100:2\n"),
        message: "no NodeName for this host",
        hint: "gpushctl slurm gres-conf",
    },
    Plant {
        what: "an order that CUDA does not have",
        plant: |host| gres_conf(host, "Name=gpu Type=h100 File=/dev/nvidia[1,0]"),
        message: "a different order than CUDA",
        hint: "in the order of `gpushctl slurm gres-conf`",
    },
    Plant {
        what: "a hook that does not exist",
        plant: |host| host.remove("usr/share/gpush/slurm/epilog"),
        message: "Epilog does not run gpush",
        hint: "scontrol reconfigure",
    },
];

#[test]
fn every_planted_fault_is_found_with_a_hint() {
    assert!(PLANTS.len() >= 24, "{}", PLANTS.len());
    for Plant { what, plant, message, hint } in PLANTS {
        let mut host = Planted::healthy();
        plant(&mut host);
        let findings = host.findings();
        let found = findings.iter().find(|finding| finding.message.contains(message));
        let Some(found) = found else { panic!("{what}: {findings:#?}") };
        assert_ne!(found.severity, Severity::Ok, "{what}");
        assert!(found.hint.as_ref().is_some_and(|text| text.contains(hint)), "{what}: {found:#?}");
        assert!(findings.len() <= 2, "{what}: one fault has many findings: {findings:#?}");
    }
}

#[test]
fn suitable_mig_devices_have_no_finding() {
    let mut host = Planted::healthy();
    mig(&mut host);
    let findings = host.findings();
    assert!(findings.iter().all(|finding| finding.severity == Severity::Ok), "{findings:#?}");
}
