//! slurm.conf with the files that it includes, and the other files in its directory.

use gpush_core::slurm::{KeyValue, SLURM_CONF_PATHS, SlurmConf};

use crate::Host;

/// The files of Slurm on a host.
#[derive(Debug)]
pub(super) struct Files {
    /// Path of slurm.conf.
    pub(super) path: String,
    directory: String,
    conf: SlurmConf,
}

impl Files {
    /// Reads slurm.conf; `None` when the host has no slurm.conf.
    pub(super) fn of(host: &Host) -> Option<Self> {
        let path = Self::paths(host).into_iter().find(|path| host.has(path))?.to_owned();
        let directory = path.rsplit_once('/').map_or(String::new(), |(directory, _)| directory.to_owned());
        let text = host.read(&path).unwrap_or_default();
        let mut files = Self { path, directory, conf: SlurmConf::default() };
        files.conf = SlurmConf::parse(&text, |included| host.read(files.sibling(included)));
        Some(files)
    }

    /// Returns the paths where the doctor looks for slurm.conf. If `SLURM_CONF` is set, returns
    /// only the path in this variable.
    pub(super) fn paths(host: &Host) -> Vec<&str> {
        host.slurm_conf().map_or(SLURM_CONF_PATHS.to_vec(), |path| vec![path])
    }

    /// Returns the key-value pairs of all lines that do not describe nodes, in order.
    pub(super) fn settings(&self) -> &[KeyValue] {
        &self.conf.settings
    }

    /// Returns the key-value pairs of each line that describes nodes.
    pub(super) fn nodes(&self) -> &[Vec<KeyValue>] {
        &self.conf.nodes
    }

    /// Returns the path of a file that slurm.conf names, or that is in the directory of slurm.conf.
    pub(super) fn sibling(&self, name: &str) -> String {
        if name.starts_with('/') { name.to_owned() } else { format!("{}/{name}", self.directory) }
    }

    /// Returns the value of a setting.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.conf.get(key).filter(|value| !value.is_empty() && *value != "(null)")
    }

    /// Returns all values of a setting that may be given more than once.
    pub(super) fn all(&self, key: &str) -> Vec<&str> {
        let values = self.conf.settings.iter().filter(|pair| pair.is(key));
        values.flat_map(|pair| pair.value.split(',')).filter(|value| !value.is_empty()).collect()
    }

    /// Returns whether the list in a setting contains an element.
    pub(super) fn has(&self, key: &str, element: &str) -> bool {
        self.get(key).is_some_and(|value| value.split(',').any(|one| one.trim().eq_ignore_ascii_case(element)))
    }

    /// Returns the node name of this host, and the `Gres=` of that node.
    pub(super) fn node(&self, host: &Host) -> Option<(String, String)> {
        let name = host.read("proc/sys/kernel/hostname")?;
        self.conf.node_of_host(name.split('.').next().unwrap_or_default())
    }
}
