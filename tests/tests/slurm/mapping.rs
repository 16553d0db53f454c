//! How gpush finds the GPU of an index of Slurm: through gres.conf and minor numbers, or through the UUID of a MIG
//! device.

use std::fmt::Write as _;

use gpush_core::slurm::HostList;
use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    slurm::{ALICE, Setup, Site},
};

use super::WHOLE;

/// The GPU with index i has the minor number MINORS[i].
pub(super) const MINORS: [u32; 4] = [2, 0, 3, 1];

pub(super) fn shuffled() -> String {
    MINORS.iter().fold(String::new(), |mut host, minor| {
        let _ = writeln!(host, "[[gpu]]\nmodel = \"l4\"\nminor = {minor}");
        host
    })
}

/// Returns gres.conf and the `Gres=` of the node, as `gpushctl slurm gres-conf` prints them for these GPUs.
pub(super) fn gres_conf(host: &Host, agent: &Agent, gpus: &[&str]) -> (String, String) {
    let mut print = host.command(program("gpushctl"));
    print.arg("--socket").arg(agent.socket()).args(["slurm", "gres-conf", "--node", "n1", "--json"]).args(gpus);
    let printed = print.output().expect("gpushctl can be started");
    assert!(printed.status.success(), "{printed:?}");
    let printed: serde_json::Value = serde_json::from_slice(&printed.stdout).expect("JSON");
    let text = |key: &str| printed[key].as_str().expect("a text").to_owned();
    (text("gres_conf"), text("gres"))
}

/// With `File=/dev/nvidia[2-3]`, Slurm uses the indexes 0 and 1, which are neither minor numbers nor indexes of the
/// driver.
#[test]
fn index_of_gres_conf_is_not_the_index_of_the_driver() {
    let gres = |setup: Setup| {
        let conf = format!("AutoDetect=off\nName=gpu File={}/nvidia[2-3]\n", setup.devices().display());
        setup.gres("gpu", "gpu:2", &conf)
    };
    let Some(site) = Site::start(&shuffled(), WHOLE, |setup, _, _| gres(setup)) else { return };
    let gpus = site.agent.gpus();
    assert_eq!(gpus.iter().map(|gpu| gpu.minor).collect::<Vec<_>>(), MINORS);
    let ended = site.cluster.run_job(ALICE, &["--gres=gpu:1"], "env");
    // Index 0 of Slurm is /dev/nvidia2, which has index 0 in the driver. /dev/nvidia3 has index 2 in the driver.
    assert_eq!(ended.variable("CUDA_VISIBLE_DEVICES"), Some(gpus[0].uuid.as_str()), "{}", ended.output);
    let ended = site.cluster.run_job(ALICE, &["--gres=gpu:2"], "env");
    let both = format!("{},{}", gpus[0].uuid, gpus[2].uuid);
    assert_eq!(ended.variable("CUDA_VISIBLE_DEVICES"), Some(both.as_str()), "{}", ended.output);
    site.assert_clean();
}

#[test]
fn types_of_slurm_conf_decide_the_order_of_indexes() {
    order_of_types(|setup| setup);
}

/// Fault: gpush did not read included files and `NodeName=DEFAULT`. So a job got a lease of another GPU than Slurm had
/// allocated to it.
#[test]
fn types_of_an_included_default_decide_the_order_of_indexes() {
    order_of_types(Setup::gres_by_default);
}

fn order_of_types(change: impl FnOnce(Setup) -> Setup) {
    let gres = |setup: Setup| {
        let dev = setup.devices();
        let dev = dev.display();
        let conf =
            format!("AutoDetect=off\nName=gpu Type=a File={dev}/nvidia[0-1]\nName=gpu Type=b File={dev}/nvidia[2-3]\n");
        setup.gres("gpu", "gpu:b:2,gpu:a:2", &conf)
    };
    let Some(site) = Site::start(super::HOST, WHOLE, |setup, _, _| change(gres(setup))) else { return };
    let gpus = site.agent.gpus();
    for (gres, index) in [("--gres=gpu:b:1", 2), ("--gres=gpu:a:1", 0)] {
        let ended = site.cluster.run_job(ALICE, &[gres], "env");
        assert_eq!(ended.variable("CUDA_VISIBLE_DEVICES"), Some(gpus[index].uuid.as_str()), "{}", ended.output);
    }
    site.assert_clean();
}

/// MIG devices as GRES. slurmd names them by UUID, as if it had found them through NVML.
#[test]
fn mig_devices_are_leased_by_their_uuid() {
    let host = "[[gpu]]\nmodel = \"h100-80-sxm\"\n";
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*2\", \"3g.40gb\"]\nowner = \"slurm\"\n";
    let mut uuids = Vec::new();
    let start = Site::start(host, config, |setup, _, agent| {
        let gpu = agent.gpu(0);
        let instances = gpu.mig.as_ref().expect("a GPU with MIG").instances.clone();
        let dev = setup.devices();
        let (mut fake, mut conf) = (String::new(), "AutoDetect=nvml\n".to_owned());
        for instance in instances {
            let device = &instance.compute[0];
            let uuid = device.uuid.clone().expect("a UUID");
            let profile = instance.profile.clone();
            let gi = setup.devices().join(format!("cap{}", uuids.len() * 2));
            let ci = setup.devices().join(format!("cap{}", uuids.len() * 2 + 1));
            for file in [&gi, &ci] {
                let made = std::process::Command::new("mknod").arg(file).args(["c", "240", "1"]).status();
                assert!(made.is_ok_and(|status| status.success()));
            }
            let files = format!("{}/nvidia0,{},{}", dev.display(), gi.display(), ci.display());
            let _ = writeln!(fake, "{profile}|160|0-159|(null)|{files}|{uuid}|nvidia_gpu_env");
            let _ = writeln!(conf, "Name=gpu Type={profile} MultipleFiles={files}");
            uuids.push((profile, uuid));
        }
        setup.gres("gpu", "gpu:1g.10gb:2,gpu:3g.40gb:1", &conf).fake_gpus(&fake)
    });
    let Some(site) = start else { return };
    let of = |profile: &str| {
        uuids.iter().filter(|(name, _)| name == profile).map(|(_, uuid)| uuid.clone()).collect::<Vec<_>>()
    };
    let ended = site.cluster.run_job(ALICE, &["--gres=gpu:3g.40gb:1"], "env");
    assert_eq!(ended.variable("CUDA_VISIBLE_DEVICES"), Some(of("3g.40gb")[0].as_str()), "{}", ended.output);
    assert!(ended.variable("GPUSH_LEASE").is_some(), "{}", ended.output);
    let ended = site.cluster.run_job(ALICE, &["--gres=gpu:1g.10gb:2"], "env");
    let visible = ended.variable("CUDA_VISIBLE_DEVICES").unwrap_or_default().to_owned();
    let mut visible: Vec<&str> = visible.split(',').collect();
    visible.sort_unstable();
    let mut both = of("1g.10gb");
    both.sort_unstable();
    assert_eq!(visible, both, "{}", ended.output);
    site.assert_clean();
}

/// Without NVML, slurmd gives every device an index. slurmd then does not know the UUIDs of MIG devices.
#[test]
fn node_with_whole_gpus_and_mig_devices_serves_both() {
    let host = "[[gpu]]\nmodel = \"h100-80-sxm\"\n[[gpu]]\nmodel = \"h100-80-sxm\"\nmig = false\n";
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*2\"]\nowner = \"slurm\"\n\
                  [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
    let mut uuids = Vec::new();
    let start = Site::start(host, config, |setup, _, agent| {
        let (mig, whole) = (agent.gpu(0), agent.gpu(1));
        let dev = setup.devices();
        let mut conf = format!("AutoDetect=off\nName=gpu Type=h100 File={}/nvidia{}\n", dev.display(), whole.minor);
        for instance in mig.mig.expect("MIG").instances {
            let cap = 3 + 135 * mig.minor + 9 * instance.id;
            let caps = [cap, cap + 1].map(|cap| dev.join(format!("nvidia-cap{cap}")));
            for file in &caps {
                let made = std::process::Command::new("mknod").arg(file).args(["c", "240", "1"]).status();
                assert!(made.is_ok_and(|status| status.success()));
            }
            let files = format!("{}/nvidia{},{},{}", dev.display(), mig.minor, caps[0].display(), caps[1].display());
            let _ = writeln!(conf, "Name=gpu Type=1g.10gb MultipleFiles={files}");
            uuids.push(instance.compute[0].uuid.clone().expect("a UUID"));
        }
        setup.gres("gpu", "gpu:h100:1,gpu:1g.10gb:2", &conf)
    });
    let Some(site) = start else { return };
    let devices = |gres: &str| {
        let ended = site.cluster.run_job(ALICE, &[gres], "env");
        let mut devices: Vec<String> =
            ended.variable("CUDA_VISIBLE_DEVICES").unwrap_or_default().split(',').map(str::to_owned).collect();
        devices.sort_unstable();
        assert!(ended.variable("GPUSH_LEASE").is_some(), "{gres}: {}", ended.output);
        devices
    };
    assert_eq!(devices("--gres=gpu:h100:1"), [site.agent.gpu(1).uuid]);
    let one = devices("--gres=gpu:1g.10gb:1");
    assert!(one.len() == 1 && uuids.contains(&one[0]), "{one:?} {uuids:?}");
    uuids.sort_unstable();
    assert_eq!(devices("--gres=gpu:1g.10gb:2"), uuids);
    site.assert_clean();
}

/// slurmd accepts the lines that `gpushctl slurm gres-conf` prints.
#[test]
fn printed_lines_are_read_by_slurmd_in_the_same_order() {
    let Some(setup) = Setup::new() else { return };
    let host = Host::up(&shuffled());
    let agent = Agent::start(&host, "");
    let (text, node) = gres_conf(&host, &agent, &[]);
    assert_eq!(node, "gpu:l4:4");
    let devices = setup.devices().display().to_string();
    let cluster = setup.gres("gpu", &node, &text.replace("/dev/", &format!("{devices}/"))).start();
    let output = cluster.command("slurmd").args(["-N", "n1", "-G"]).output().expect("slurmd can be started");
    // slurmd prints to standard error.
    let output = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let lists = output.lines().filter_map(|line| line.split("File=").nth(1)?.split(' ').next());
    let files: Vec<String> =
        lists.flat_map(|list| HostList::parse(list).and_then(|list| list.expand()).expect("a list")).collect();
    let expected: Vec<String> = MINORS.iter().map(|minor| format!("{devices}/nvidia{minor}")).collect();
    assert_eq!(files, expected, "{output}\n{text}");
}
