//! slurm.conf with the files that it includes, as far as gpush needs it.

use super::{HostList, KeyValue, lines};

/// Maximum depth to which files may include each other.
const DEEPEST: usize = 16;

/// Maximum number of included files. Without this limit, a file that includes itself twice would be read 65,536 times.
pub(super) const MOST_INCLUDED: usize = 1024;

/// Paths at which slurm.conf is searched, in order, if the variable `SLURM_CONF` is not set. The
/// second path is slurmd's copy of a file that the controller serves.
pub const SLURM_CONF_PATHS: [&str; 4] =
    ["/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/opt/slurm/etc/slurm.conf"];

/// The pairs of slurm.conf. Lines that slurmd refuses are omitted, because slurmd reports such
/// lines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlurmConf {
    /// The key-value pairs of all lines that do not describe nodes, in the order of the file.
    pub settings: Vec<KeyValue>,
    /// Pairs of each line that describes nodes, in order.
    pub nodes: Vec<Vec<KeyValue>>,
}

impl SlurmConf {
    /// Parses the text of slurm.conf. `read_include` returns the text of an included file; a
    /// relative path is relative to the directory of slurm.conf.
    pub fn parse(text: &str, read_include: impl Fn(&str) -> Option<String>) -> Self {
        let mut conf = Self::default();
        conf.read(text, &read_include, 0, &mut 0);
        conf
    }

    fn read(
        &mut self,
        text: &str,
        read_include: &dyn Fn(&str) -> Option<String>,
        depth: usize,
        included_files: &mut usize,
    ) {
        for line in lines(text) {
            if let Some(included) = line.include() {
                let path = included.replace("%c", self.get("ClusterName").unwrap_or_default());
                if depth < DEEPEST
                    && *included_files < MOST_INCLUDED
                    && let Some(text) = read_include(&path)
                {
                    *included_files += 1;
                    self.read(&text, read_include, depth + 1, included_files);
                }
                continue;
            }
            let Ok(pairs) = line.pairs() else { continue };
            if pairs.first().is_some_and(|pair| pair.is("NodeName")) {
                self.nodes.push(pairs);
            } else {
                self.settings.extend(pairs);
            }
        }
    }

    /// Returns the last value of a setting.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.settings.iter().rev().find(|pair| pair.is(key)).map(|pair| pair.value.as_str())
    }

    /// Returns the pairs of the first line that describes nodes and has `name` in the host list of
    /// one of `keys`. Adds the values that this line inherits from earlier lines
    /// `NodeName=DEFAULT`.
    fn node(&self, keys: &[&str], name: &str) -> Option<Vec<KeyValue>> {
        let mut defaults: Vec<KeyValue> = Vec::new();
        for line in &self.nodes {
            if value(line, "NodeName").is_some_and(|names| names.eq_ignore_ascii_case("DEFAULT")) {
                defaults.retain(|old| !line.iter().any(|new| new.is(&old.key)));
                defaults.extend(line.iter().filter(|pair| !pair.is("NodeName")).cloned());
                continue;
            }
            let contains = |list: &str| HostList::parse(list).is_ok_and(|list| list.contains(name));
            if keys.iter().any(|key| value(line, key).is_some_and(contains)) {
                let inherited = defaults.into_iter().filter(|pair| value(line, &pair.key).is_none());
                return Some(line.iter().cloned().chain(inherited).collect());
            }
        }
        None
    }

    /// Returns the `Gres=` of a node, which determines the number of GPUs and the order of their
    /// types.
    #[must_use]
    pub fn node_gres(&self, node: &str) -> Option<String> {
        value(&self.node(&["NodeName"], node)?, "Gres").map(str::to_owned)
    }

    /// Returns the name of the node on a host, and the `Gres=` of the node. If a line has a list of
    /// nodes and a list of hosts, a node and its host have the same position in the two lists. If
    /// the list of nodes is shorter, some hosts have no node at their position. For such a host,
    /// the function returns the name of the host as the name of the node.
    #[must_use]
    pub fn node_of_host(&self, host: &str) -> Option<(String, String)> {
        let line = self.node(&["NodeHostname", "NodeName"], host)?;
        let names = |key| {
            let list = HostList::parse(value(&line, key).unwrap_or_default());
            list.and_then(|list| list.expand()).unwrap_or_default()
        };
        let position = names("NodeHostname").iter().position(|name| name == host);
        let node = position.and_then(|position| names("NodeName").into_iter().nth(position));
        let gres = value(&line, "Gres").unwrap_or_default().to_owned();
        Some((node.unwrap_or_else(|| host.to_owned()), gres))
    }
}

/// Returns the last value of a key. If a key is repeated, Slurm uses the last value.
fn value<'a>(line: &'a [KeyValue], key: &str) -> Option<&'a str> {
    line.iter().rev().find(|pair| pair.is(key)).map(|pair| pair.value.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> SlurmConf {
        SlurmConf::parse(text, |path| {
            let text = match path {
                "nodes.conf" => "NodeName=n[1-2] CPUs=1\ninclude ci/more.conf\n",
                "ci/more.conf" => "NodeName=n3 Gres=gpu:b:1\nPrologFlags=Alloc\n",
                "loop" => "Include loop\n",
                _ => return None,
            };
            Some(text.to_owned())
        })
    }

    #[test]
    fn included_files_are_read_in_their_place() {
        let conf =
            parse("ClusterName=ci\nNodeName=DEFAULT Gres=gpu:a:2\nInclude nodes.conf\nInclude none\nInclude loop\n");
        assert_eq!(conf.node_gres("n2").as_deref(), Some("gpu:a:2"));
        assert_eq!(conf.node_gres("n3").as_deref(), Some("gpu:b:1"));
        assert_eq!(conf.get("prologflags"), Some("Alloc"));
        // In a path, `%c` is the name of the cluster.
        let conf = parse("ClusterName=ci\nInclude %c/more.conf\n");
        assert_eq!(conf.node_gres("n3").as_deref(), Some("gpu:b:1"));
    }

    /// Fault: a file that includes itself twice was read 65,536 times.
    #[test]
    fn file_that_includes_itself_twice_is_read_to_a_limit() {
        let reads = std::cell::Cell::new(0);
        let conf = SlurmConf::parse("Include a\nInclude a\nClusterName=c1\n", |_| {
            reads.set(reads.get() + 1);
            Some("Include a\nInclude a\n".to_owned())
        });
        assert_eq!(reads.get(), MOST_INCLUDED);
        assert_eq!(conf.get("ClusterName"), Some("c1"));
    }

    #[test]
    fn defaults_apply_to_later_nodes_without_the_key() {
        let conf = parse(
            "NodeName=n1 CPUs=1\nNodeName=DEFAULT Gres=gpu:1 CPUs=8\nNodeName=n2\nNodeName=default gres=gpu:2\n\
             NodeName=n3\nNodeName=n4 Gres=gpu:4\nbroken\n",
        );
        let gres = |node| conf.node_gres(node);
        assert_eq!((gres("n1"), gres("n5"), gres("DEFAULT")), (None, None, None));
        assert_eq!([gres("n2"), gres("n3"), gres("n4")].map(Option::unwrap), ["gpu:1", "gpu:2", "gpu:4"]);
    }

    #[test]
    fn host_is_found_by_its_host_name_or_node_name() {
        let conf = parse("NodeName=DEFAULT Gres=gpu:2\nNodeName=a NodeHostname=h1\nNodeName=h[2-3] Gres=gpu:3\n");
        let node = |host| conf.node_of_host(host);
        assert_eq!(node("h1"), Some(("a".to_owned(), "gpu:2".to_owned())));
        assert_eq!(node("h3"), Some(("h3".to_owned(), "gpu:3".to_owned())));
        assert_eq!(node("h4"), None);
    }

    /// Fault: the node on host `h2` was named `h2`, so that the node's lines in gres.conf did not
    /// apply.
    #[test]
    fn lists_of_nodes_and_hosts_are_expanded_in_parallel() {
        let conf = parse(
            "NodeName=a[1-2],b NodeHostname=h[1-2],login Gres=gpu:2\nNodeName=c[1-2] NodeHostname=h9 Port=[7001-7002]\n\
             NodeName=d[1-2],e[01-02] Gres=gpu:1\nNodeName=f[1-2] NodeHostname=h[21-23]\n",
        );
        let node = |host| conf.node_of_host(host).map(|(node, _)| node);
        for (host, name) in [("h1", "a1"), ("h2", "a2"), ("login", "b"), ("h9", "c1"), ("e02", "e02"), ("a2", "a2")] {
            assert_eq!(node(host).as_deref(), Some(name), "{host}");
        }
        // slurmd refuses lists of different lengths.
        assert_eq!(node("h23").as_deref(), Some("h23"));
    }
}
