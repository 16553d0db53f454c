//! `AutoDetect=nvml`: slurmd finds the devices through Debian's NVML plugin and the simulated driver.

use gpush_api::TargetUuid;
use std::{fs, path::Path, process::Command};

use gpush_tests::{
    host::{Host, program},
    slurm::{ALICE, Setup, Site},
    tools::slurm_nvml_plugin,
};
use nix::sys::signal::Signal;

use super::{WHOLE, completed, mapping::gres_conf, wait_for_output};

/// A script that mounts an overlay over `/dev`, creates device files of GPUs and MIG devices there, and then starts a
/// program. The files exist only in memory.
const WITH_DEVICES: &str = r#"set -e
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay none -o "lowerdir=/dev,upperdir=$1/upper,workdir=$1/work" /dev
shift
mkdir -p /dev/nvidia-caps
for minor in 0 1 2 3; do
    mknod -m 666 "/dev/nvidia$minor" c 195 "$minor"
done
for minor in $(sed 's/.* //' /proc/driver/nvidia-caps/mig-minors 2>/dev/null); do
    mknod -m 444 "/dev/nvidia-caps/nvidia-cap$minor" c 240 "$minor"
done
exec "$@"
"#;

/// The GPU with index i has the minor number MINORS[i].
const MINORS: [u32; 4] = [2, 0, 3, 1];

fn shuffled() -> String {
    MINORS.map(|minor| format!("[[gpu]]\nmodel = \"l4\"\nminor = {minor}\n")).concat()
}

/// Arguments that start a program through [`WITH_DEVICES`], which writes below the directory `around`.
fn with_devices(around: &Path) -> Vec<String> {
    fs::create_dir_all(around).expect("a directory");
    let program = ["unshare", "--mount", "sh", "-c", WITH_DEVICES, "sh"].map(str::to_owned);
    program.into_iter().chain([around.display().to_string()]).collect()
}

/// Returns the directories of Slurm's plugins, with the NVML plugin. If slurmd cannot use this plugin on this host,
/// prints that the test is skipped, and returns `None`.
fn plugins() -> Option<String> {
    let own = ["/usr/lib/x86_64-linux-gnu/slurm-wlm", "/usr/lib/aarch64-linux-gnu/slurm-wlm"];
    let own = own.into_iter().find(|dir| Path::new(dir).is_dir())?;
    let nvml = slurm_nvml_plugin()?;
    let around = tempfile::tempdir().expect("a temporary directory");
    let attempt = with_devices(around.path());
    let attempt = Command::new(&attempt[0]).args(&attempt[1..]).arg("true").status();
    if !attempt.is_ok_and(|status| status.success()) {
        println!("SKIPPED slurmd with NVML: nothing can be mounted over /dev here");
        return None;
    }
    Some(format!("{own}:{}", nvml.parent().expect("a directory").display()))
}

/// Starts slurmd with its NVML plugin and with the simulated driver of a host.
fn with_nvml(setup: Setup, host: &Host, plugins: &str) -> Setup {
    let (sim, dir) = (program("gpush-sim").display().to_string(), host.dir().display().to_string());
    let mut through = vec![sim, "exec".to_owned(), dir, "--".to_owned()];
    through.extend(with_devices(&setup.dir().join("around")));
    setup.line(&format!("PluginDir={plugins}")).through(&through)
}

/// Runs a job, and returns the devices of its lease, sorted.
#[track_caller]
fn devices(site: &Site, gres: &str) -> Vec<TargetUuid> {
    let ended = site.cluster.run_job(ALICE, &[gres], "env");
    assert!(ended.variable("GPUSH_LEASE").is_some(), "{gres}: {}\n{}", ended.output, site.cluster.logs());
    let visible = ended.variable("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let mut devices: Vec<TargetUuid> = visible.split(',').map(TargetUuid::from).collect();
    devices.sort_unstable();
    devices
}

/// slurmd numbers the GPUs that it detects in the order of the driver, even if slurm.conf lists the types in another
/// order.
#[test]
fn types_of_slurm_conf_do_not_change_the_order_of_detected_gpus() {
    let Some(plugins) = plugins() else { return };
    let host = "[[gpu]]\nmodel = \"l4\"\nminor = 3\n[[gpu]]\nmodel = \"h100-80-sxm\"\nminor = 1\nmig = false\n\
                [[gpu]]\nmodel = \"l4\"\nminor = 0\n[[gpu]]\nmodel = \"h100-80-sxm\"\nminor = 2\nmig = false\n";
    let gres = |setup: Setup, host: &Host| {
        with_nvml(setup, host, &plugins).gres("gpu", "gpu:h100:2,gpu:l4:2", "AutoDetect=nvml\n")
    };
    let Some(site) = Site::start(host, WHOLE, |setup, host, _| gres(setup, host)) else { return };
    let gpus = site.agent.gpus();
    assert_eq!(devices(&site, "--gres=gpu:h100:1"), [gpus[1].uuid.as_str()]);
    assert_eq!(devices(&site, "--gres=gpu:l4:1"), [gpus[0].uuid.as_str()]);
    let mut both = [gpus[0].uuid.clone(), gpus[2].uuid.clone()];
    both.sort_unstable();
    assert_eq!(devices(&site, "--gres=gpu:l4:2"), both);
    is_refused_after_change(&site, "AutoDetect=off\n");
}

/// Faults: slurmd had no NVML plugin and used the lines of gres.conf, but gpush used the order of the driver. gpush did not
/// read included files and `NodeName=DEFAULT`, so it did not know the order of the types. Both times, a job got a lease of
/// a GPU that Slurm had not allocated to it.
#[test]
fn slurmd_without_nvml_uses_lines_in_the_order_of_slurm_conf() {
    let gres = |setup: Setup| {
        let devices = setup.devices().display().to_string();
        let line = |gres_type: &str, minors: &str| format!("Name=gpu Type={gres_type} File={devices}/nvidia{minors}\n");
        let conf = format!("AutoDetect=nvml\n{}{}", line("a", "[0-1]"), line("b", "[2-3]"));
        setup.gres("gpu", "gpu:b:2,gpu:a:2", &conf).gres_by_default()
    };
    let Some(site) = Site::start(&shuffled(), WHOLE, |setup, _, _| gres(setup)) else { return };
    let gpus = site.agent.gpus();
    assert_eq!(gpus.iter().map(|gpu| gpu.minor).collect::<Vec<_>>(), MINORS);
    let with_minor = |minor: u32| gpus.iter().find(|gpu| gpu.minor == minor).expect("a GPU").uuid.clone();
    assert_eq!(devices(&site, "--gres=gpu:b:1"), [with_minor(2)]);
    assert_eq!(devices(&site, "--gres=gpu:a:1"), [with_minor(0)]);
    let mut both = [with_minor(2), with_minor(3)];
    both.sort_unstable();
    assert_eq!(devices(&site, "--gres=gpu:b:2"), both);
    is_refused_after_change(&site, "AutoDetect=nvml\n");
}

/// Checks that a job is refused after gres.conf was changed and slurmd was not restarted. Faults: Prolog failed, or the job
/// got the lease of another GPU.
fn is_refused_after_change(site: &Site, conf: &str) {
    site.assert_clean();
    fs::write(site.cluster.slurm_conf().with_file_name("gres.conf"), conf).expect("gres.conf");
    let ended = site.cluster.run_job(ALICE, &["--gres=gpu:1"], "env");
    assert_eq!(ended.state, "FAILED", "{}", ended.output);
    assert!(ended.output.contains("gpush: ") && ended.output.contains("restart slurmd"), "{}", ended.output);
    site.assert_clean();
}

/// Slurm gets only some GPUs of a node, with whole GPUs and MIG devices. The lines that `gpushctl slurm gres-conf`
/// prints must match the devices that slurmd detects.
#[test]
fn printed_lines_of_a_node_with_whole_gpus_and_mig_devices_serve_both() {
    let Some(plugins) = plugins() else { return };
    let host = "[[gpu]]\nmodel = \"h100-80-sxm\"\nminor = 2\n[[gpu]]\nmodel = \"l4\"\nminor = 3\n\
                [[gpu]]\nmodel = \"l4\"\nminor = 1\n[[gpu]]\nmodel = \"l4\"\nminor = 0\n";
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"1g.10gb*2\"]\nowner = \"slurm\"\n\
                  [[gpu]]\nmatch = [\"2-3\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
    let start = Site::start(host, config, |setup, host, agent| {
        let (text, node) = gres_conf(host, agent, &["0", "2-3"]);
        with_nvml(setup, host, &plugins).gres("gpu", &node, &text)
    });
    let Some(site) = start else { return };
    let gpus = site.agent.gpus();
    assert_eq!(devices(&site, "--gres=gpu:l4:1"), [gpus[2].uuid.as_str()]);
    let mut both = [gpus[2].uuid.clone(), gpus[3].uuid.clone()];
    both.sort_unstable();
    assert_eq!(devices(&site, "--gres=gpu:l4:2"), both);
    let mig = gpus[0].mig.iter().flat_map(|mig| &mig.instances).flat_map(|instance| &instance.compute);
    let mut mig: Vec<TargetUuid> = mig.filter_map(|device| device.uuid.clone()).collect();
    mig.sort_unstable();
    assert_eq!(devices(&site, "--gres=gpu:1g.10gb:2"), mig);
    site.assert_clean();
}

/// Runs the commands of docs/slurm.md, section "Change the MIG layout", for Slurm 22.05.
#[test]
fn mig_layout_is_changed_on_a_drained_node() {
    let Some(plugins) = plugins() else { return };
    let host = "[[gpu]]\nmodel = \"h100-80-sxm\"\n[[gpu]]\nmodel = \"l4\"\n";
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"1g.10gb*2\"]\nowner = \"slurm\"\n\
                  [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
    let start = Site::start(host, config, |setup, host, agent| {
        let (text, node) = gres_conf(host, agent, &[]);
        with_nvml(setup, host, &plugins).gres("gpu", &node, &text)
    });
    let Some(mut site) = start else { return };
    let before = devices(&site, "--gres=gpu:3g.40gb:1");
    let small = devices(&site, "--gres=gpu:1g.10gb:2");
    assert!(small.len() == 2 && !small.contains(&before[0]), "{small:?} {before:?}");
    let go = site.cluster.dir().join("go");
    let last = site.cluster.sbatch(
        ALICE,
        &["--gres=gpu:1g.10gb:1"],
        &format!("echo begun; while [ ! -e '{}' ]; do sleep 0.1; done", go.display()),
    );
    wait_for_output(&site, last, "begun");

    site.cluster.run("scontrol", &["update", "nodename=n1", "state=drain", "reason=MIG layout"]);
    fs::write(&go, "").expect("a file");
    completed(site.cluster.ended(last));
    assert_eq!(site.cluster.run("squeue", &["-h", "-w", "n1"]), "");
    let mut apply = site.host.command(program("gpushctl"));
    apply.arg("--socket").arg(site.agent.socket()).args(["mig", "apply", "2g.20gb*3", "-g", "0"]);
    let applied = apply.output().expect("gpushctl can be started");
    assert!(applied.status.success(), "{applied:?}");
    let old = fs::read_to_string(site.cluster.slurm_conf()).expect("slurm.conf");
    let (text, node) = gres_conf(&site.host, &site.agent, &[]);
    let line = old.lines().find(|line| line.starts_with("NodeName=n1 ")).expect("a line of the node");
    let gres = line.split(' ').find(|word| word.starts_with("Gres=")).expect("the GRES of the node");
    fs::write(site.cluster.slurm_conf(), old.replace(gres, &format!("Gres={node}"))).expect("slurm.conf");
    fs::write(site.cluster.slurm_conf().with_file_name("gres.conf"), text).expect("gres.conf");
    site.cluster.restart_controller();
    site.cluster.signal_node(0, Signal::SIGKILL);
    site.cluster.restart_node(0);
    site.cluster.until("registered node", || {
        let shown = site.cluster.run("scontrol", &["show", "node", "n1"]);
        (shown.contains("2g.20gb:3") && shown.contains("State=IDLE+DRAIN ")).then_some(())
    });
    site.cluster.resume("n1");
    site.cluster.wait_until_idle();

    let gpu = site.agent.gpu(0);
    let new = gpu.mig.iter().flat_map(|mig| &mig.instances).flat_map(|instance| &instance.compute);
    let mut new: Vec<TargetUuid> = new.filter_map(|device| device.uuid.clone()).collect();
    new.sort_unstable();
    assert!(new.len() == 3 && !new.contains(&before[0]), "{new:?} {before:?}");
    assert_eq!(devices(&site, "--gres=gpu:2g.20gb:3"), new);
    assert_eq!(devices(&site, "--gres=gpu:l4:1"), [site.agent.gpu(1).uuid]);
    assert_eq!((site.leases(), site.job_files()), (Vec::new(), Vec::new()));
    assert_eq!(site.cluster.drain_reasons(), [""; 0], "{}", site.cluster.logs());
}
