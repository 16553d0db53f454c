//! The simulated `nvidia-smi compute-policy` and `nvidia-smi -pm`, called as real callers do.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use silicon::Host;
use silicon::machine::Timeslice;
use tempfile::TempDir;

/// A host with four GPUs: two with MIG off, one with MIG on, and one without MIG.
const HOST: &str = "
[[gpu]]
model = \"a100-80\"
mig = false
count = 2
[[gpu]]
model = \"h100-80-sxm\"
[[gpu]]
model = \"t4\"
";

struct TestHost {
    dir: TempDir,
}

impl TestHost {
    fn new(description: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("library.so"), "").unwrap();
        std::fs::write(dir.path().join("host.toml"), description).unwrap();
        let place = Self { dir };
        let (file, host) = (place.path("host.toml"), place.path("host"));
        assert!(place.sim(&["up", file.to_str().unwrap(), host.to_str().unwrap()]).status.success());
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn sim(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpush-sim"));
        command.env("GPUSH_SIM_LIBRARY", self.path("library.so")).env_remove("NVML_SIM_STATE");
        command.args(arguments).output().unwrap()
    }

    /// Runs `gpush-sim COMMAND HOST ARGS…`, which must succeed.
    fn on_host(&self, command: &str, arguments: &str) -> String {
        let host = self.path("host");
        let words: Vec<&str> = [command, host.to_str().unwrap()].into_iter().chain(arguments.split(' ')).collect();
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        let output = self.sim(&words);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `nvidia-smi ARGS…`. Returns the exit code and the standard output.
    fn smi(&self, arguments: &str) -> (i32, String) {
        let mut command = Command::new(self.path("host").join("bin/nvidia-smi"));
        let output = command.env_clear().args(arguments.split_whitespace()).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    }

    fn levels(&self) -> Vec<Timeslice> {
        Host::open(&self.path("host")).unwrap().read().unwrap().gpus().iter().map(|gpu| gpu.timeslice).collect()
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        self.on_host("down", "");
    }
}

#[test]
fn levels_are_listed_in_a_table_and_set_by_number() {
    let place = TestHost::new(HOST);
    assert_eq!(
        place.smi("compute-policy -i 0,3 --set-timeslice 1"),
        (
            0,
            "Successfully set timeslice policy with value Short for GPU 0\n\
             Successfully set timeslice policy with value Short for GPU 3\n"
                .to_owned()
        )
    );
    let (code, listed) = place.smi("compute-policy --list");
    assert_eq!(
        listed,
        "\
+-------------------------------------+
| GPU compute policies:               |
| GPU     Name           Value        |
|=====================================|
|   0      Timeslice        Short     |
|   1      Timeslice       Default    |
|   3      Timeslice        Short     |
+-------------------------------------+
Failed to get compute policies for GPU 2 : Not Supported
Failed to retrieve compute policies for requested devices : Not Supported
"
    );
    assert_eq!(code, 3, "one of them is in MIG mode");
    let drawn = place.on_host("show", "");
    assert_eq!(drawn.matches("  time-slice Short\n").count(), 2, "{drawn}");
    let uuid = Host::open(&place.path("host")).unwrap().hardware().slots[1].identity.uuid.clone();
    assert_eq!(place.smi(&format!("compute-policy --set-timeslice=3 -i {uuid}")).0, 0);
    assert_eq!(place.levels()[1], Timeslice::Long);
}

#[test]
fn refusals_have_the_manuals_exit_codes() {
    let place = TestHost::new(HOST);
    let (code, reported) = place.smi("compute-policy -i 2 --set-timeslice=2");
    assert_eq!(code, 3);
    assert_eq!(
        reported,
        "Failed to set timeslice policy with value Medium for GPU 2 : Not Supported\n\
         Failed to set timeslice for requested devices : Not Supported\n"
    );
    assert_eq!(place.smi("compute-policy -i 7 -l").0, 6);
    for wrong in ["--set-timeslice=4", "--set-timeslice short", "-l --set-timeslice=1", "--fast"] {
        assert_eq!(place.smi(&format!("compute-policy {wrong}")).0, 2, "{wrong}");
    }
    for help in ["compute-policy", "compute-policy -h"] {
        let (code, reported) = place.smi(help);
        assert!(code == 0 && reported.contains("--set-timeslice"), "{reported}");
    }
    assert!(place.levels().iter().all(|level| *level == Timeslice::Default));
}

#[test]
fn fault_rules_make_compute_policy_fail() {
    let place = TestHost::new(HOST);
    place.on_host("fault", "add compute-policy-set --gpu 0 --rc UNKNOWN --times 1");
    let (code, reported) = place.smi("compute-policy -i 0,1 --set-timeslice=1");
    assert_eq!(code, 255);
    assert!(reported.contains("value Short for GPU 0 : Unknown Error"), "{reported}");
    assert_eq!(place.levels()[..2], [Timeslice::Default, Timeslice::Short]);
    assert_eq!(place.smi("compute-policy -i 0 --set-timeslice=1").0, 0);
    place.on_host("fault", "add compute-policy-list --gpu 0 --rc GPU_IS_LOST");
    let (code, reported) = place.smi("compute-policy -l -i 0");
    assert_eq!(code, 15);
    assert!(reported.contains("Failed to get compute policies for GPU 0 : GPU is lost"), "{reported}");
    // With this fault, the command reports success but changes nothing.
    place.on_host("fault", "add compute-policy-set --gpu 1 --rc SUCCESS");
    assert_eq!(place.smi("compute-policy -i 1 --set-timeslice=3").0, 0);
    assert_eq!(place.levels()[1], Timeslice::Short);
}

#[test]
fn only_root_sets_levels_and_all_users_read_them() {
    // With `owner_is_root = false`, the owner of the host has no root permissions. If the test runs
    // as root, it has root permissions on every host, so it is skipped.
    let place = TestHost::new(&format!("owner_is_root = false\n{HOST}"));
    if Host::open(&place.path("host")).unwrap().privileged() {
        println!("SKIPPED: run as root");
        return;
    }
    let (code, reported) = place.smi("compute-policy -i 0 --set-timeslice=1");
    assert_eq!(code, 4);
    assert!(reported.contains(": Insufficient Permissions"), "{reported}");
    assert_eq!(place.smi("compute-policy -i 0 -l").0, 0);
    assert_eq!(place.smi("-i 0 -pm 0").0, 4);
}

#[test]
fn settings_are_lost_without_persistence_mode() {
    let place = TestHost::new(HOST);
    assert_eq!(place.smi("-pm 0 -i 0").0, 0);
    assert!(place.on_host("show", "").contains("persistence mode off"));
    assert_eq!(place.smi("compute-policy -i 0,1 --set-timeslice=2").0, 0);
    assert_eq!(place.levels()[..2], [Timeslice::Default, Timeslice::Medium]);
    // A process on the GPU keeps the GPU initialised.
    let pid = place.on_host("process", "add --spawn --gpu 0");
    assert_eq!(place.smi("compute-policy -i 0 --set-timeslice=2").0, 0);
    assert_eq!(place.levels()[0], Timeslice::Medium);
    place.on_host("process", &format!("remove {}", pid.trim()));
    assert_eq!(place.levels()[..2], [Timeslice::Default, Timeslice::Medium]);
    place.on_host("reboot", "");
    assert!(place.levels().iter().all(|level| *level == Timeslice::Default));
}

#[test]
fn mps_server_has_its_process_name() {
    let place = TestHost::new(HOST);
    let server = place.on_host("process", "add --spawn --gpu 3 --kind mps-server --memory 30");
    let client = place.on_host("process", "add --spawn --gpu 3 --kind mps --memory 400");
    let listed = place.on_host("process", "list");
    assert!(listed.contains(&format!("(pid {}) compute 30 MiB", server.trim())), "{listed}");
    assert!(listed.contains(&format!("(pid {}) mps 400 MiB", client.trim())), "{listed}");
    let shown = |name: &str| Path::new("/proc").join(server.trim()).join(name);
    let command = std::fs::read_to_string(shown("cmdline")).unwrap();
    assert!(command.starts_with("nvidia-cuda-mps-server\0"), "{command:?}");
    // The kernel truncates a process name to 15 characters. The process sets its name a moment
    // after its start, so poll for the name.
    let named = (0..200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        std::fs::read_to_string(shown("comm")).unwrap().trim() == "nvidia-cuda-mps"
    });
    assert!(named);
}
