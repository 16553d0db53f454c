//! Tests of the findings with a number: mistakes in a valid config, and other managers of the GPUs.

use std::fs;

use gpush_api::{ApiError, Code};
use gpush_core::lint::Lint;
use gpush_doctor::{Agent, Area, Host, Severity, examine, other_managers};
use tempfile::TempDir;

fn write(root: &TempDir, path: &str, text: &str) {
    let path = root.path().join(path);
    fs::create_dir_all(path.parent().expect("a file is in a directory")).expect("a directory");
    fs::write(path, text).expect("a file");
}

fn unreachable() -> Agent {
    Agent::Unreachable(ApiError::new(Code::Unreachable, "gpushd is not there"))
}

#[test]
fn lints_of_the_config_are_warnings_with_number_and_hint() {
    let root = tempfile::tempdir().expect("a directory");
    let config = "[[gpu]]\nname = \"desks\"\nmatch = \"0\"\nmode = \"timeslice\"\ntimeslice = { replicas = 4 }\n\
                  isolation = \"hard\"\n[[gpu]]\nmatch = \"1\"\nmode = \"mps\"\nmps = { users = \"many\" }\n";
    write(&root, "etc/gpush/config.toml", config);
    let found = examine(&Host::at(root.path()), &unreachable(), &[Area::Config]);
    let lints: Vec<_> = found.iter().filter_map(|finding| Some((finding.lint?, finding))).collect();
    let numbers: Vec<Lint> = lints.iter().map(|(lint, _)| *lint).collect();
    assert_eq!(numbers, [Lint::TimesliceIsolation, Lint::SharedFaults]);
    for (_, finding) in lints {
        assert_eq!(finding.severity, Severity::Warning);
        assert!(finding.hint.as_ref().is_some_and(|hint| hint.contains("/etc/gpush/config.toml")), "{finding:?}");
    }
}

#[test]
fn manager_of_the_driver_is_g003() {
    for name in ["nvidia-device-p", "nvidia-mig-mana", "nvidia-driver", "gpu-operator"] {
        let root = tempfile::tempdir().expect("a directory");
        write(&root, "proc/7/comm", name);
        let found = other_managers(&Host::at(root.path()));
        assert_eq!(found.iter().map(|one| one.lint).collect::<Vec<_>>(), [Some(Lint::OtherManager)], "{name}");
    }
    let root = tempfile::tempdir().expect("a directory");
    write(&root, "run/nvidia/validations/driver-ready", "");
    assert_eq!(other_managers(&Host::at(root.path()))[0].causes, ["/run/nvidia/validations exists"]);
}

/// DCGM has the GPUs open, but manages neither the driver nor layouts.
#[test]
fn monitor_is_no_manager_of_the_driver() {
    let root = tempfile::tempdir().expect("a directory");
    write(&root, "proc/7/comm", "nv-hostengine");
    let host = Host::at(root.path());
    assert_eq!(other_managers(&host), []);
    let found = examine(&host, &unreachable(), &[Area::Managers]);
    assert_eq!((found.len(), found[0].lint, found[0].severity), (1, None, Severity::Warning));
}
