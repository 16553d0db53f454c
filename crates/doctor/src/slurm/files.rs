//! slurm.conf with the files that it includes, and the other files in its directory.

use gpush_core::slurm::{HostList, KeyValue, lines};

use crate::Host;

/// Paths at which slurm.conf is searched, in order. The second path is slurmd's copy if the
/// controller serves the files.
pub(super) const PLACES: [&str; 4] =
    ["/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/opt/slurm/etc/slurm.conf"];

/// Maximum depth of files that include each other.
const DEEPEST: usize = 8;

/// The files of Slurm on a host.
#[derive(Debug)]
pub(super) struct Files {
    /// Path of slurm.conf.
    pub(super) path: &'static str,
    directory: String,
    /// Pairs of all lines that do not describe nodes, in order.
    settings: Vec<KeyValue>,
    /// Pairs of each line that describes nodes.
    nodes: Vec<Vec<KeyValue>>,
}

impl Files {
    /// Reads slurm.conf; `None` when the host has none.
    pub(super) fn of(host: &Host) -> Option<Self> {
        let path = PLACES.into_iter().find(|path| host.has(path))?;
        let directory = path.rsplit_once('/').map_or(String::new(), |(directory, _)| directory.to_owned());
        let mut files = Self { path, directory, settings: Vec::new(), nodes: Vec::new() };
        files.read(host, path, 0);
        Some(files)
    }

    fn read(&mut self, host: &Host, path: &str, depth: usize) {
        for line in lines(&host.read(path).unwrap_or_default()) {
            if let Some(included) = line.include() {
                if depth < DEEPEST {
                    self.read(host, &self.sibling(included), depth + 1);
                }
                continue;
            }
            // Ignore an invalid line: slurmd does not start with such a line, and reports it
            // itself.
            let Ok(pairs) = line.pairs() else { continue };
            if pairs.first().is_some_and(|pair| pair.is("NodeName")) {
                self.nodes.push(pairs);
            } else {
                self.settings.extend(pairs);
            }
        }
    }

    /// Returns the pairs of all lines that do not describe nodes, in order.
    pub(super) fn settings(&self) -> &[KeyValue] {
        &self.settings
    }

    /// Returns the pairs of each line that describes nodes.
    pub(super) fn nodes(&self) -> &[Vec<KeyValue>] {
        &self.nodes
    }

    /// Returns the path of a file that slurm.conf names, or that is in its directory.
    pub(super) fn sibling(&self, name: &str) -> String {
        if name.starts_with('/') { name.to_owned() } else { format!("{}/{name}", self.directory) }
    }

    /// Returns the value of a setting.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        let found = self.settings.iter().rev().find(|pair| pair.is(key))?;
        Some(found.value.as_str()).filter(|value| !value.is_empty() && *value != "(null)")
    }

    /// Returns all values of a setting that may be given more than once.
    pub(super) fn all(&self, key: &str) -> Vec<&str> {
        let values = self.settings.iter().filter(|pair| pair.is(key));
        values.flat_map(|pair| pair.value.split(',')).filter(|value| !value.is_empty()).collect()
    }

    /// Returns whether the list in a setting contains an element.
    pub(super) fn has(&self, key: &str, element: &str) -> bool {
        self.get(key).is_some_and(|value| value.split(',').any(|one| one.trim().eq_ignore_ascii_case(element)))
    }

    /// Returns the name of the node that this host is, and its `Gres=`.
    pub(super) fn node(&self, host: &Host) -> Option<(String, String)> {
        let name = host.read("proc/sys/kernel/hostname")?;
        let name = name.split('.').next().unwrap_or_default().to_owned();
        let value = |line: &[KeyValue], key: &str| line.iter().find(|pair| pair.is(key)).map(|pair| pair.value.clone());
        let contains = |list: &str| HostList::parse(list).is_ok_and(|list| list.contains(&name));
        let is_it = |line: &&Vec<KeyValue>| {
            ["NodeHostname", "NodeName"].iter().any(|key| value(line, key).is_some_and(|list| contains(&list)))
        };
        let line = self.nodes.iter().find(is_it)?;
        let gres = value(line, "Gres").unwrap_or_default();
        // A line may describe several nodes. Then use the host name as the name of this node.
        let node = value(line, "NodeName").filter(|node| !node.contains(['[', ','])).unwrap_or(name);
        Some((node, gres))
    }
}
