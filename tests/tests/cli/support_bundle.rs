//! `gpushctl support-bundle`: what the archive contains, and what it must never contain.
//!
//! The helper functions may use `unwrap`, because a panic makes the test fail.
#![allow(clippy::unwrap_used)]

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Child, Command, Stdio},
};

use gpush_tests::{
    agent::Agent,
    host::{Host, program},
};
use serde_json::Value;

use crate::{transcript, verbs::on_a_terminal};

/// Texts that the archive must not contain: a secret on the command line of a process, a secret in
/// the config, a secret in a reason, a user name, and a program name.
const PLANTED: [&str; 5] = ["hunter2", "hunter3", "hunter4", "zebediah", "secret-model.py"];

const HOST: &str = "[[gpu]]\nmodel = \"a100-80\"\n";
const CONFIG: &str = "# db_password=hunter3\n# curl -u admin:hunter3 https://u:hunter3@host\n\
                      # passphrase = \"correct hunter3\"\n# Authorization: Basic hunter3\n[[quota]]\nusers = [\"zebediah\"]\nleases = 1\n\
                      [[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"7g.80gb\"]\n";

/// The uid of `nobody`.
const NOBODY: u32 = 65_534;

/// A process on the GPU with a secret on its command line.
struct Job(Child);

impl Job {
    fn start(host: &Host, program: &str) -> Self {
        let mut command = Command::new("sleep");
        command.arg0(program).arg("1000");
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let pid = child.id().to_string();
        host.sim("process", &["add", "--pid", &pid, "--gpu", "0", "--gi", "0", "--ci", "0"]);
        Self(child)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Unpacks a bundle. Returns the name and the text of each file.
fn unpacked(bundle: &Path, into: &Path) -> Vec<(String, String)> {
    fs::create_dir_all(into).unwrap();
    let unpacked = Command::new("tar").arg("-xzf").arg(bundle).arg("-C").arg(into).status().unwrap();
    assert!(unpacked.success());
    let [directory] = &fs::read_dir(into).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>()[..] else {
        panic!("the archive has one directory")
    };
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    files.map(|file| (file.file_name().into_string().unwrap(), fs::read_to_string(file.path()).unwrap())).collect()
}

fn of<'f>(files: &'f [(String, String)], name: &str) -> &'f str {
    files.iter().find(|(file, _)| file == name).map_or("", |(_, text)| text)
}

#[test]
fn support_bundle_has_all_facts_and_no_secrets() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, CONFIG);
    agent.wait_for_layouts_at_start();
    let _job = Job::start(&host, "secret-model.py --run zebediah --api-key=hunter2");
    let reason = ["gpu", "cordon", "-g", "0", "--reason", "password=hunter4SECRET"];
    let cordoned = transcript::gpushctl(&agent, &reason, 80).output().unwrap();
    assert!(cordoned.status.success(), "{cordoned:?}");
    // The process blocks a change, so gpushd's messages name the process.
    let refused = transcript::gpushctl(&agent, &["mig", "apply", "none", "-g", "0", "--json"], 80).output().unwrap();
    assert!(String::from_utf8_lossy(&refused.stdout).contains("hunter2"), "{refused:?}");

    let file = host.scratch("bundle.tar.gz");
    let args = ["support-bundle", "--file", file.to_str().unwrap()];
    let output = transcript::gpushctl(&agent, &args, 100).output().unwrap();
    let printed = transcript::transcript(&args, &output);
    assert!(output.status.success() && output.stderr.is_empty(), "{printed}");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let files = unpacked(&file, &host.scratch("unpacked"));
    for (name, text) in &files {
        for planted in PLANTED {
            assert!(!text.contains(planted), "{name} has {planted}:\n{text}");
        }
        assert!(name == "bundle.json" || printed.contains(name.as_str()), "{name} is not listed:\n{printed}");
    }
    for planted in PLANTED {
        assert!(!printed.contains(planted), "{printed}");
    }
    let status: Value = serde_json::from_str(of(&files, "status.json")).unwrap();
    let processes = &status["gpus"][0]["mig"]["instances"][0]["compute_instances"][0]["processes"];
    assert!(processes.as_array().unwrap().iter().all(|process| process["command"] == "(left out)"), "{status:#}");
    for name in ["version.json", "gpus.json", "leases.json", "operations.json", "events.json", "config.json"] {
        serde_json::from_str::<Value>(of(&files, name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    for name in ["config.json", "config-file.json"] {
        let config: Value = serde_json::from_str(of(&files, name)).unwrap();
        let settings = if name == "config.json" { &config["effective"] } else { &config };
        assert_eq!(settings["mps"]["control"], "/usr/bin/nvidia-cuda-mps-control", "{config:#}");
        assert_eq!(settings["quota"][0]["users"], serde_json::json!(["(left out)"]), "{config:#}");
        assert_eq!(settings["gpu"][0]["layout"], serde_json::json!(["7g.80gb"]), "{config:#}");
    }
    let cordon = &status["gpus"][0]["cordons"][0];
    assert!(
        cordon["reason"] == "(left out)" && cordon["cause"] == "admin" && cordon["by"]["uid"].is_u64(),
        "{status:#}"
    );
    assert!(of(&files, "doctor.json").contains("\"area\": \"agent\""));
    assert!(of(&files, "kernel.txt").contains("Linux"));
    agent.stop();
}

#[test]
fn support_bundle_without_gpushd_names_missing_parts() {
    let host = Host::up(HOST);
    let file = host.scratch("bundle.tar.gz");
    let mut command = Command::new(program("gpushctl"));
    command.args(["support-bundle", "--yes", "--file"]).arg(&file).env_clear().env("LANG", "C.UTF-8");
    let output = command.env("GPUSH_SOCKET", host.scratch("nothing.sock")).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("status.json") && printed.contains("missing"), "{output:?}");
    let files = unpacked(&file, &host.scratch("unpacked"));
    let contents: Value = serde_json::from_str(of(&files, "bundle.json")).unwrap();
    let missing: Vec<&str> =
        contents["missing"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    for name in ["status.json", "gpus.json", "leases.json", "operations.json", "events.json", "config.json"] {
        assert!(missing.contains(&name) && of(&files, name).is_empty(), "{missing:?}");
    }
    let reason = contents["missing"][0]["reason"].as_str().unwrap();
    assert!(reason.contains("nothing.sock"), "{reason}");
    assert!(of(&files, "version.json").contains("\"ctl\""));
    assert!(of(&files, "doctor.json").contains("\"area\": \"driver\""));

    // It replaces no file, and writes to no directory of another user.
    let run = |file: &Path, uid: Option<u32>| {
        let mut command = Command::new(program("gpushctl"));
        if let Some(uid) = uid {
            // Other users may not be able to enter the build directory.
            let copy = file.parent().unwrap().join("gpushctl");
            assert!(Command::new("cp").arg(program("gpushctl")).arg(&copy).status().unwrap().success());
            command = Command::new(copy);
            command.uid(uid).gid(uid).current_dir("/");
        }
        command.args(["support-bundle", "--file"]).arg(file).env_clear().env("LANG", "C.UTF-8");
        let output = command.env("GPUSH_SOCKET", host.scratch("nothing.sock")).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let existing = host.scratch("existing");
    fs::write(&existing, "mine").unwrap();
    let (code, printed) = run(&existing, None);
    assert!(code == 2 && printed.contains("existing exists already") && printed.contains("hint:"), "{code} {printed}");
    assert_eq!(fs::read_to_string(&existing).unwrap(), "mine");
    let (code, printed) = run(&host.scratch("no/such/directory.tar.gz"), None);
    assert!(code == 2 && printed.contains("directory.tar.gz") && printed.contains("hint:"), "{code} {printed}");
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED a directory of another user: only root can run programs as others");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let (code, printed) = run(&dir.path().join("bundle.tar.gz"), Some(NOBODY));
    assert!(code == 5 && printed.contains("bundle.tar.gz") && printed.contains("cause:"), "{code} {printed}");
    assert!(!dir.path().join("bundle.tar.gz").exists());
}

#[test]
fn support_bundle_asks_on_a_terminal_after_its_list() {
    let host = Host::up(HOST);
    let agent = Agent::start(&host, "");
    let file = host.scratch("bundle.tar.gz");
    let command = format!("support-bundle --file {}", file.display());
    let (code, text) = on_a_terminal(&agent, &command, "n\n");
    let listed = text.find("status.json").unwrap_or_else(|| panic!("{text}"));
    assert!(code == 1 && text.find("Write the file? [y/N]").is_some_and(|asked| asked > listed), "{code} {text}");
    assert!(text.contains("Nothing was written") && !file.exists(), "{text}");
    let (code, text) = on_a_terminal(&agent, &command, "y\n");
    assert!(code == 0 && text.contains("Wrote ") && file.exists(), "{code} {text}");
    let (code, text) = on_a_terminal(&agent, &format!("{command}.2 --yes"), "");
    assert!(code == 0 && !text.contains("[y/N]"), "{code} {text}");
    agent.stop();
}
