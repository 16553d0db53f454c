//! Users and groups that the config names but the host does not have.

use std::{fs, os::unix::fs::PermissionsExt};

use gpush_api::{ApiError, Code};
use gpush_doctor::{Agent, Area, Finding, Host, Severity, examine};

fn findings(config: &str) -> Vec<Finding> {
    let root = tempfile::tempdir().expect("a temporary directory");
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        fs::write(&path, text).expect("a file");
        fs::set_permissions(path, fs::Permissions::from_mode(0o644)).expect("permissions");
    };
    write("etc/passwd", "anna:x:1000:1000::/home/anna:/bin/sh\n");
    write("etc/group", "students:x:100:anna\n");
    write("etc/gpush/config.toml", config);
    let agent = Agent::Unreachable(ApiError::new(Code::Unavailable, "it does not run"));
    examine(&Host::at(root.path()), &agent, &[Area::Config])
}

/// Fault: a misspelt group gave all its members the quota for everybody, and only the log of gpushd named the group.
#[test]
fn misspelt_group_of_the_config_is_a_warning() {
    let found = findings("[[quota]]\nusers = [\"anna\"]\ngroups = [\"studnets\"]\nleases = 1\n");
    let warning = found.iter().find(|finding| finding.message.contains("users or groups")).expect("a warning");
    assert_eq!(warning.severity, Severity::Warning);
    let cause = "/etc/gpush/config.toml:3: this host has no group `studnets`, so `quota.groups` ignores this name; \
                 did you mean `students`?";
    assert_eq!(warning.causes, [cause]);
    let found = findings("[[quota]]\nusers = [\"anna\"]\ngroups = [\"students\"]\nleases = 1\n");
    assert!(found.iter().all(|finding| !finding.message.contains("users or groups")), "{found:?}");
}
