//! Limits of users' slices that gpushd cannot carry over to the slices of their leases.

use std::collections::{BTreeMap, BTreeSet};

use gpush_core::{
    config::Config,
    lease::{
        access::session_devices,
        user_limits::{NOT_CARRIED, UserLimits},
    },
};

use crate::{Area, Finding, Host};

/// Directories of unit files and of properties that `systemctl set-property` has set.
const UNIT_DIRECTORIES: [&str; 5] = [
    "etc/systemd/system",
    "etc/systemd/system.control",
    "run/systemd/system",
    "run/systemd/system.control",
    "usr/lib/systemd/system",
];

/// Names each slice with such limits. Examines the limits for all users, the slices of the users that are logged in, and
/// the slices with unit files.
pub(crate) fn examine(host: &Host, config: &Config) -> Option<Finding> {
    if !host.has("run/systemd/system") {
        return None;
    }
    let properties = format!("--property=Id,{}", NOT_CARRIED.join(","));
    // systemctl shows only loaded units for a pattern. The slice of root has the limits that all users have.
    let mut arguments = vec!["show", &properties, "user.slice", "user-0.slice", "user-*.slice"];
    let with_files = slices_with_files(host);
    arguments.extend(with_files.iter().map(String::as_str));
    let found = limited(&host.run("usr/bin/systemctl", &arguments)?);
    if found.is_empty() {
        return None;
    }
    let message = match config.leases.user_limits {
        UserLimits::Carry => "some limits of users do not apply to the processes of their leases",
        UserLimits::Require => "gpushd refuses leases with a scope, because it cannot carry over all limits of users",
    };
    let hint = "if the processes of leases need these limits, set them with `systemctl edit gpulease-.slice`. To refuse \
                such leases, set user_limits = \"require\" under [leases] in the config";
    let causes = found.iter().map(|(slice, names)| {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        format!("{slice}: {}", names.join(", "))
    });
    Some(causes.fold(Finding::warning(Area::Security, message, hint), Finding::cause))
}

/// Returns the slices of users that have unit files.
fn slices_with_files(host: &Host) -> BTreeSet<String> {
    let names = UNIT_DIRECTORIES.into_iter().flat_map(|directory| host.names(directory));
    let slice = |name: String| {
        let slice = name.strip_suffix(".d").unwrap_or(&name);
        let uid = slice.strip_prefix("user-")?.strip_suffix(".slice")?;
        uid.parse::<u32>().is_ok().then(|| slice.to_owned())
    };
    names.filter_map(slice).collect()
}

/// Returns the slices with a value for one of [`NOT_CARRIED`], from the output of `systemctl show`.
fn limited(printed: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut found: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for unit in printed.split("\n\n") {
        let lines = || unit.lines().filter_map(|line| line.split_once('='));
        let Some((_, id)) = lines().find(|(name, _)| *name == "Id") else { continue };
        let is_set = |(name, value): &(&str, &str)| {
            NOT_CARRIED.contains(name) && !matches!(value.trim(), "" | "auto" | "~" | "[not set]")
        };
        let mut names: BTreeSet<String> = lines().filter(is_set).map(|(name, _)| name.to_owned()).collect();
        if has_session_devices(lines().filter(|(name, _)| *name == "DeviceAllow").map(|(_, value)| value)) {
            // The scopes of leases have the same devices, and those of the lease.
            names.retain(|name| !matches!(name.as_str(), "DevicePolicy" | "DeviceAllow"));
        }
        if !names.is_empty() {
            found.insert(id.to_owned(), names);
        }
    }
    found
}

/// Returns whether a list of devices is the one that `gpushctl enforce on` sets.
fn has_session_devices<'a>(values: impl Iterator<Item = &'a str>) -> bool {
    let listed: BTreeSet<&str> = values.filter_map(|value| value.split_whitespace().next()).collect();
    let own: Vec<String> = session_devices().iter().map(|device| device.pattern()).collect();
    listed.len() == own.len() && own.iter().all(|pattern| listed.contains(pattern.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_with_limits_that_are_not_carried_over_are_named() {
        let printed = "Id=user.slice\nDevicePolicy=closed\nDeviceAllow=/dev/null rw\nDeviceAllow=char-pts rw\n\n\
                       Id=user-0.slice\nDevicePolicy=auto\nIPIngressFilterPath=\nRestrictNetworkInterfaces=~\n\n\
                       Id=user-1000.slice\nDevicePolicy=auto\nSocketBindDeny=any\n";
        let found = limited(printed);
        let names = |slice: &str| found.get(slice).map(|names| names.iter().cloned().collect::<Vec<_>>().join(" "));
        assert_eq!(names("user.slice").as_deref(), Some("DeviceAllow DevicePolicy"));
        assert_eq!((names("user-0.slice"), names("user-1000.slice").as_deref()), (None, Some("SocketBindDeny")));
        assert!(limited("systemd 247\n").is_empty());
        let own: String =
            session_devices().iter().map(|device| format!("DeviceAllow={} rwm\n", device.pattern())).collect();
        let enforced = format!("Id=user.slice\nDevicePolicy=closed\n{own}");
        assert!(limited(&enforced).is_empty(), "gpushctl enforce on has set the list");
        assert_eq!(limited(&format!("{enforced}SocketBindDeny=any\n"))["user.slice"].len(), 1);
    }

    #[test]
    fn slices_of_users_are_found_by_their_unit_files() {
        let scratch = tempfile::tempdir().unwrap();
        for name in ["etc/systemd/system/user-1000.slice.d", "run/systemd/system.control/user-7.slice.d"] {
            std::fs::create_dir_all(scratch.path().join(name)).unwrap();
        }
        for name in ["user-.slice.d", "user-x.slice", "user-8.slice", "user.slice.d"] {
            std::fs::write(scratch.path().join("etc/systemd/system").join(name), "").unwrap();
        }
        let found: Vec<String> = slices_with_files(&Host::at(scratch.path())).into_iter().collect();
        assert_eq!(found, ["user-1000.slice", "user-7.slice", "user-8.slice"]);
    }
}
