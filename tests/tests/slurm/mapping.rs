//! How gpush uses gres.conf to find the device for an index that Slurm allocated.

use gpush_api::TargetUuid;
use std::fmt::Write as _;

use gpush_tests::{
    agent::Agent,
    host::{Host, program},
    slurm::{ALICE, Site},
};

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
        let mut devices: Vec<TargetUuid> =
            ended.variable("CUDA_VISIBLE_DEVICES").unwrap_or_default().split(',').map(TargetUuid::from).collect();
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
