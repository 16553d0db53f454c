//! The settings of a cluster: GPUs, hooks, additional lines of slurm.conf.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::obstacle;

/// The settings with which a cluster starts. By default, the cluster has one node with four GPUs
/// and no hooks.
#[derive(Debug)]
pub struct Setup {
    pub(super) dir: tempfile::TempDir,
    pub(super) gres_types: String,
    pub(super) node_gres: String,
    pub(super) gres_conf: String,
    pub(super) gres_by_default: bool,
    pub(super) nodes: u16,
    pub(super) through: Vec<String>,
    pub(super) hooks: Vec<(&'static str, PathBuf)>,
    pub(super) lines: Vec<String>,
}

impl Setup {
    /// Prepares a cluster. If this machine cannot run a cluster, reports a skipped test and returns
    /// `None`.
    ///
    /// # Panics
    /// If the directory cannot be created.
    #[must_use]
    pub fn new() -> Option<Self> {
        if let Some(why) = obstacle() {
            println!("SKIPPED Slurm: {why}");
            return None;
        }
        let dir = tempfile::Builder::new().prefix("gpush-slurm-").tempdir().expect("a temporary directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("an open directory");
        let devices = dir.path().join("dev");
        fs::create_dir(&devices).expect("a directory");
        // slurmd gives an index only to a character device. The devices need no driver: without
        // ConstrainDevices, slurmd does not open them.
        for minor in 0..8 {
            let path = devices.join(format!("nvidia{minor}"));
            let (kind, mode) = (SFlag::S_IFCHR, Mode::from_bits_truncate(0o666));
            if let Err(error) = mknod(&path, kind, mode, makedev(195, minor)) {
                println!("SKIPPED Slurm: this machine permits no device files ({error})");
                return None;
            }
        }
        let gres_conf = format!("AutoDetect=off\nName=gpu Type=h100 File={}/nvidia[0-3]\n", devices.display());
        Some(Self {
            dir,
            gres_types: "gpu".to_owned(),
            node_gres: "gpu:h100:4".to_owned(),
            gres_conf,
            gres_by_default: false,
            nodes: 1,
            through: Vec::new(),
            hooks: Vec::new(),
            lines: Vec::new(),
        })
    }

    /// Returns the directory of the cluster, which users can read.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a directory with the fake device files `nvidia0` to `nvidia7`.
    #[must_use]
    pub fn devices(&self) -> PathBuf {
        self.dir().join("dev")
    }

    /// Returns the path of slurm.conf. The file does not exist before [`Setup::start`].
    #[must_use]
    pub fn slurm_conf(&self) -> PathBuf {
        self.dir().join("slurm.conf")
    }

    /// Sets `GresTypes=`, the `Gres=` of each node, and gres.conf.
    #[must_use]
    pub fn gres(mut self, types: &str, node: &str, conf: &str) -> Self {
        (self.gres_types, self.node_gres, self.gres_conf) = (types.to_owned(), node.to_owned(), conf.to_owned());
        self
    }

    /// Writes the `Gres=` of all nodes as a line `NodeName=DEFAULT` into a file that slurm.conf
    /// includes.
    #[must_use]
    pub fn gres_by_default(mut self) -> Self {
        self.gres_by_default = true;
        self
    }

    /// Sets the number of nodes: `n1`, `n2` and so on. Each node has a slurmd.
    #[must_use]
    pub fn nodes(mut self, nodes: u16) -> Self {
        self.nodes = nodes;
        self
    }

    /// Starts each slurmd through another program. The last arguments of this program are slurmd
    /// and its arguments.
    #[must_use]
    pub fn through(mut self, program: &[String]) -> Self {
        self.through = program.to_vec();
        self
    }

    /// Adds a hook, such as `Prolog`, as a shell script with this body.
    ///
    /// # Panics
    /// If the script cannot be written.
    #[must_use]
    pub fn hook(mut self, key: &'static str, body: &str) -> Self {
        let path = self.dir().join(key.to_lowercase());
        fs::write(&path, format!("#!/bin/sh\n{body}")).expect("a script can be written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("an executable script");
        self.hooks.push((key, path));
        self
    }

    /// Returns whether the settings have this hook.
    #[must_use]
    pub fn has_hook(&self, key: &str) -> bool {
        self.hooks.iter().any(|(name, _)| *name == key)
    }

    /// Adds a line to slurm.conf.
    #[must_use]
    pub fn line(mut self, line: &str) -> Self {
        self.lines.push(line.to_owned());
        self
    }
}
