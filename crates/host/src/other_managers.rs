//! Other managers of MIG layouts on the same host.
//!
//! The service nvidia-mig-manager applies its own layout at each boot, and destroys existing instances. Two managers
//! would keep undoing each other's layouts. So gpushd changes no GPU while the other manager is active, and the error
//! says how to choose one of the two managers.
//!
//! The service counts as active if systemd starts it at boot, or if it is running now. The
//! directory /etc/nvidia-mig-manager is not evidence, because it also exists while the service is
//! disabled.

use std::path::{Path, PathBuf};

use gpush_api::{ApiError, Code, GpuPlan};

const UNIT: &str = "nvidia-mig-manager.service";

/// Directories with the links that make systemd start units, relative to the root of the host.
const ENABLED: [&str; 3] = ["etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system"];

/// Directories with the cgroups of running units.
const RUNNING: [&str; 2] = ["sys/fs/cgroup/system.slice", "sys/fs/cgroup/systemd/system.slice"];

/// A nvidia-mig-manager that is enabled or running, with a path as evidence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigManager {
    found: PathBuf,
    running: bool,
}

/// Looks for nvidia-mig-manager on the host whose file system is at `root`; `None` if it is neither
/// enabled nor running.
pub fn mig_manager(root: &Path) -> Option<MigManager> {
    let running = RUNNING.iter().map(|dir| root.join(dir).join(UNIT)).find(|path| path.is_dir());
    if let Some(found) = running {
        return Some(MigManager { found, running: true });
    }
    let masked = |path: &Path| std::fs::read_link(path).is_ok_and(|to| to == Path::new("/dev/null"));
    if masked(&root.join(ENABLED[0]).join(UNIT)) {
        return None;
    }
    let found = ENABLED.iter().flat_map(|dir| find_enabling_link(&root.join(dir))).next()?;
    Some(MigManager { found, running: false })
}

/// Finds a link that starts the unit, in a `*.wants/` or `*.requires/` directory.
fn find_enabling_link(dir: &Path) -> Option<PathBuf> {
    let starts = |name: &str| name.ends_with(".wants") || name.ends_with(".requires");
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let folders = entries.filter(|entry| entry.file_name().to_str().is_some_and(starts));
    // Only the link is checked: its target is an absolute path, which may be below another root.
    folders.map(|folder| folder.path().join(UNIT)).find(|link| std::fs::symlink_metadata(link).is_ok())
}

impl MigManager {
    /// Returns the error about the conflict. `what` is the subject of the message.
    pub fn error(&self, what: &str) -> ApiError {
        let how = if self.running { "is running" } else { "is started at each boot" };
        ApiError::new(Code::Conflict, format!("{what}: nvidia-mig-manager manages MIG on this host"))
            .cause(format!("{UNIT} {how} ({})", self.found.display()))
            .hint(format!(
                "let only one program manage MIG: `systemctl disable --now {UNIT}` leaves MIG to gpushd; see \
                docs/migrating-from-mig-parted.md"
            ))
    }
}

/// If nvidia-mig-manager is enabled or running, refuses each plan that would change MIG. Such a
/// plan then contains an error and no steps.
pub fn refuse(root: &Path, plans: &mut [GpuPlan]) {
    if !plans.iter().any(GpuPlan::changes_mig) {
        return;
    }
    let Some(other) = mig_manager(root) else { return };
    for plan in plans.iter_mut().filter(|plan| plan.changes_mig()) {
        let error = other.error(&format!("cannot change the layout of GPU {} ({})", plan.gpu, plan.gpu_uuid));
        *plan = plan.without_steps().refused(error);
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use gpush_api::{MigModeStep, MpsStep, Step};

    use super::*;

    #[test]
    fn service_counts_when_it_is_enabled_or_runs() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        assert_eq!(mig_manager(root.path()), None);
        // nvidia-mig-manager is installed, but disabled.
        fs::create_dir_all(at("etc/nvidia-mig-manager")).unwrap();
        fs::create_dir_all(at("usr/lib/systemd/system")).unwrap();
        fs::write(at("usr/lib/systemd/system/nvidia-mig-manager.service"), "[Service]\n").unwrap();
        assert_eq!(mig_manager(root.path()), None);
        // nvidia-mig-manager is enabled by a link whose target does not exist here.
        let wants = at("etc/systemd/system/multi-user.target.wants");
        fs::create_dir_all(&wants).unwrap();
        let link = wants.join("nvidia-mig-manager.service");
        symlink("/usr/lib/systemd/system/nvidia-mig-manager.service", &link).unwrap();
        assert_eq!(mig_manager(root.path()), Some(MigManager { found: link.clone(), running: false }));
        let error = mig_manager(root.path()).unwrap().error("GPU 0 is not reshaped");
        assert!(error.hint.unwrap().contains("`systemctl disable --now nvidia-mig-manager.service`"));
        // nvidia-mig-manager is masked, so systemd does not start it.
        symlink("/dev/null", at("etc/systemd/system/nvidia-mig-manager.service")).unwrap();
        assert_eq!(mig_manager(root.path()), None);
        fs::remove_file(&link).unwrap();
        // nvidia-mig-manager is running, although it is masked.
        let cgroup = at("sys/fs/cgroup/system.slice/nvidia-mig-manager.service");
        fs::create_dir_all(&cgroup).unwrap();
        assert_eq!(mig_manager(root.path()), Some(MigManager { found: cgroup, running: true }));
    }

    /// Disabling MIG mode on a GPU without instances also changes MIG.
    #[test]
    fn plan_that_only_disables_mig_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let cgroup = root.path().join("sys/fs/cgroup/system.slice/nvidia-mig-manager.service");
        fs::create_dir_all(cgroup).unwrap();
        let mut plans = [GpuPlan::default(), GpuPlan::default(), GpuPlan::default()];
        plans[0].add(Step::MigMode(MigModeStep::Disable { reset: None, at_reboot: false }));
        plans[1].add(Step::Mps(MpsStep::StartDaemon { device: None }));
        refuse(root.path(), &mut plans);
        assert_eq!(plans[0].error.as_ref().map(|error| error.code), Some(Code::Conflict));
        assert!(plans[0].is_empty(), "nothing of it is executed");
        assert!(plans[1].error.is_none() && !plans[1].is_empty(), "MPS is not nvidia-mig-manager's");
        assert_eq!(plans[2], GpuPlan::default());
    }
}
