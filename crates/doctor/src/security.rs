//! SELinux and AppArmor, and limits of users.

use gpush_core::config::Config;

use crate::{Area, Finding, Host, user_limits};

pub(crate) fn examine(host: &Host, config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    match host.read("sys/fs/selinux/enforce").as_deref() {
        Some("1") => {
            let message = "SELinux is enforcing, and gpush ships no SELinux policy";
            let hint = "gpushd runs as unconfined_service_t; if SELinux denies it something, `ausearch -m avc -c \
                gpushd` shows it";
            findings.push(Finding::warning(Area::Security, message, hint));
        }
        Some(_) => findings.push(Finding::ok(Area::Security, "SELinux is permissive")),
        None => {}
    }
    let profiles = host.read("sys/kernel/security/apparmor/profiles").unwrap_or_default();
    if let Some(profile) = profiles.lines().find(|line| line.contains("gpushd") && line.ends_with("(enforce)")) {
        let message = format!("an AppArmor profile confines gpushd: {profile}");
        let hint = "if AppArmor denies something to gpushd, `journalctl -k | grep apparmor` shows it";
        findings.push(Finding::warning(Area::Security, message, hint));
    }
    if findings.is_empty() {
        findings.push(Finding::ok(Area::Security, "no policy of SELinux or AppArmor concerns gpushd"));
    }
    findings.extend(user_limits::examine(host, config));
    findings
}
