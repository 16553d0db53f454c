//! The lines of Slurm's files that the area `slurm` reads, for a bug report. Other lines of
//! slurm.conf may contain passwords.

use gpush_core::slurm::lines;

use super::files::Files;
use crate::Host;

/// Settings of slurm.conf that this area reads.
const SETTINGS: [&str; 9] = [
    "Prolog",
    "Epilog",
    "TaskProlog",
    "PrologFlags",
    "PrologEpilogTimeout",
    "ProctrackType",
    "TaskPlugin",
    "JobAcctGatherType",
    "JobAcctGatherParams",
];

/// Settings that the area `slurm` of the doctor reads from a line that describes nodes.
const OF_NODES: [&str; 3] = ["NodeName", "NodeHostname", "Gres"];

/// The settings of cgroup.conf that this area reads.
const OF_CGROUPS: [&str; 1] = ["ConstrainDevices"];

/// Returns the lines. A comment with the path precedes the lines of each file. Returns `None` when
/// the host has no slurm.conf.
pub(crate) fn excerpt(host: &Host) -> Option<String> {
    let files = Files::of(host)?;
    let mut text = format!("# {} and the files that it includes\n", files.path);
    let of_settings = files.settings().iter().filter(|pair| SETTINGS.iter().any(|key| pair.is(key)));
    for pair in of_settings {
        text += &format!("{}={}\n", pair.key, pair.value);
    }
    for node in files.nodes() {
        let pairs = node.iter().filter(|pair| OF_NODES.iter().any(|key| pair.is(key)));
        let pairs: Vec<String> = pairs.map(|pair| format!("{}={}", pair.key, pair.value)).collect();
        text += &format!("{}\n", pairs.join(" "));
    }
    for (name, keys) in [("gres.conf", None), ("cgroup.conf", Some(&OF_CGROUPS[..]))] {
        let path = files.sibling(name);
        let Some(content) = host.read(&path) else {
            text += &format!("# {path} cannot be read, or does not exist\n");
            continue;
        };
        text += &format!("# {path}\n");
        for line in lines(&content) {
            let is_read = |keys: &[&str]| {
                line.pairs().is_ok_and(|pairs| pairs.iter().any(|pair| keys.iter().any(|key| pair.is(key))))
            };
            if keys.is_none_or(is_read) {
                text += &format!("{}\n", line.text);
            }
        }
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excerpt_has_the_lines_that_are_read_and_no_password() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("etc/slurm");
        std::fs::create_dir_all(&directory).unwrap();
        let conf = "SlurmctldHost=c1\nAccountingStoragePass=hunter2\nPrologFlags=Alloc # why\nInclude more.conf\n\
                    NodeName=n[1-2] CPUs=8 Gres=gpu:4\nJobCompPass=hunter3\n";
        std::fs::write(directory.join("slurm.conf"), conf).unwrap();
        std::fs::write(directory.join("more.conf"), "prolog=/usr/share/gpush/slurm/prolog\nAuthInfo=x\n").unwrap();
        std::fs::write(directory.join("gres.conf"), "Name=gpu File=/dev/nvidia[0-3]\n").unwrap();
        std::fs::write(directory.join("cgroup.conf"), "ConstrainDevices=yes\nCgroupMountpoint=/x\n").unwrap();
        let text = excerpt(&Host::at(root.path())).unwrap();
        assert_eq!(
            text,
            "# /etc/slurm/slurm.conf and the files that it includes\nPrologFlags=Alloc\n\
             prolog=/usr/share/gpush/slurm/prolog\nNodeName=n[1-2] Gres=gpu:4\n# /etc/slurm/gres.conf\n\
             Name=gpu File=/dev/nvidia[0-3]\n# /etc/slurm/cgroup.conf\nConstrainDevices=yes\n"
        );
        assert_eq!(excerpt(&Host::at(root.path().join("etc"))), None);
    }

    /// If the doctor reads a setting that is not in the list, bug reports do not contain that
    /// setting.
    #[test]
    fn list_has_every_setting_that_the_area_reads() {
        let sources = [include_str!("limits.rs"), include_str!("hooks.rs"), include_str!("devices.rs")];
        let mut found = 0;
        for start in ["files.get(\"", "files.has(\"", "files.all(\""] {
            for rest in sources.iter().flat_map(|source| source.split(start).skip(1)) {
                let key = rest.split('"').next().unwrap();
                assert!(SETTINGS.contains(&key), "{key}");
                found += 1;
            }
        }
        assert!(found > 5, "{found}");
    }
}
