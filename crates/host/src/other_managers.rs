//! Another manager of MIG layouts on the same host: nvidia-mig-manager's service applies a layout of
//! its own at each boot, and destroys what stands. Two that each put their layout back would do so
//! for ever, so gpushd leaves the GPUs to the one that is there and says how to change that.
//!
//! What counts is whether systemd starts it or has it running. Its directory, /etc/nvidia-mig-manager,
//! stays when it is disabled, and says nothing.

use std::path::{Path, PathBuf};

use gpush_api::{ApiError, Code, GpuPlan};

/// Its unit.
const UNIT: &str = "nvidia-mig-manager.service";

/// Where systemd notes which units are to be started, below the root of the host.
const ENABLED: [&str; 3] = ["etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system"];

/// Where a running unit has its cgroup.
const RUNNING: [&str; 2] = ["sys/fs/cgroup/system.slice", "sys/fs/cgroup/systemd/system.slice"];

/// How it was noticed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigManager {
    found: PathBuf,
    running: bool,
}

/// nvidia-mig-manager on the host whose file system is at `root`, if it is to be reckoned with.
pub fn mig_manager(root: &Path) -> Option<MigManager> {
    let running = RUNNING.iter().map(|dir| root.join(dir).join(UNIT)).find(|path| path.is_dir());
    if let Some(found) = running {
        return Some(MigManager { found, running: true });
    }
    let masked = |path: &Path| std::fs::read_link(path).is_ok_and(|to| to == Path::new("/dev/null"));
    if masked(&root.join(ENABLED[0]).join(UNIT)) {
        return None;
    }
    let found = ENABLED.iter().flat_map(|dir| wanted_in(&root.join(dir))).next()?;
    Some(MigManager { found, running: false })
}

/// Links `*.wants/` and `*.requires/` of a directory that start the unit.
fn wanted_in(dir: &Path) -> Option<PathBuf> {
    let starts = |name: &str| name.ends_with(".wants") || name.ends_with(".requires");
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let folders = entries.filter(|entry| entry.file_name().to_str().is_some_and(starts));
    // The link alone says it: what it leads to may be of another root.
    folders.map(|folder| folder.path().join(UNIT)).find(|link| std::fs::symlink_metadata(link).is_ok())
}

impl MigManager {
    /// What it comes to, as an error about `what`.
    pub fn error(&self, what: &str) -> ApiError {
        let how = if self.running { "is running" } else { "is started at each boot" };
        ApiError::new(Code::Conflict, format!("{what}: nvidia-mig-manager manages MIG on this host too"))
            .cause(format!("{UNIT} {how} ({})", self.found.display()))
            .hint(format!(
                "choose one: `systemctl disable --now {UNIT}` leaves MIG to gpushd; docs/migrating-from-mig-parted.md \
                 has the way over"
            ))
    }
}

/// Refuses plans that would change a GPU, while another one does too.
pub fn refuse(root: &Path, plans: &mut [GpuPlan]) {
    if plans.iter().all(|plan| plan.steps.is_empty() && !plan.enables_mig) {
        return;
    }
    let Some(rival) = mig_manager(root) else { return };
    for plan in plans.iter_mut().filter(|plan| !plan.steps.is_empty() || plan.enables_mig) {
        let error = rival.error(&format!("GPU {} ({}) is not reshaped", plan.gpu, plan.uuid));
        plan.steps.clear();
        plan.keeps.clear();
        plan.enables_mig = false;
        plan.error = Some(error);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn what_counts_is_whether_it_is_started_or_runs() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        assert_eq!(mig_manager(root.path()), None);
        // Installed, and disabled.
        fs::create_dir_all(at("etc/nvidia-mig-manager")).unwrap();
        fs::create_dir_all(at("usr/lib/systemd/system")).unwrap();
        fs::write(at("usr/lib/systemd/system/nvidia-mig-manager.service"), "[Service]\n").unwrap();
        assert_eq!(mig_manager(root.path()), None);
        // Enabled: a link that leads nowhere from here.
        let wants = at("etc/systemd/system/multi-user.target.wants");
        fs::create_dir_all(&wants).unwrap();
        let link = wants.join("nvidia-mig-manager.service");
        symlink("/usr/lib/systemd/system/nvidia-mig-manager.service", &link).unwrap();
        assert_eq!(mig_manager(root.path()), Some(MigManager { found: link.clone(), running: false }));
        let error = mig_manager(root.path()).unwrap().error("GPU 0 is not reshaped");
        assert!(error.hint.unwrap().contains("`systemctl disable --now nvidia-mig-manager.service`"));
        // Masked, whatever wants it.
        symlink("/dev/null", at("etc/systemd/system/nvidia-mig-manager.service")).unwrap();
        assert_eq!(mig_manager(root.path()), None);
        fs::remove_file(&link).unwrap();
        // Running all the same.
        let cgroup = at("sys/fs/cgroup/system.slice/nvidia-mig-manager.service");
        fs::create_dir_all(&cgroup).unwrap();
        assert_eq!(mig_manager(root.path()), Some(MigManager { found: cgroup, running: true }));
    }
}
