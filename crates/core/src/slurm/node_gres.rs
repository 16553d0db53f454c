//! `Gres=` of a node in slurm.conf, such as `gpu:h100:4(S:0),mps:400`.

use super::gres_count::count;

/// One element of `Gres=`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeGres<'a> {
    /// `gpu`, `mps`, `shard` or another name. In slurm.conf, Slurm refuses `GPU`; in gres.conf, it
    /// ignores case.
    pub name: &'a str,
    /// The type, if the element has one.
    pub gres_type: Option<&'a str>,
    /// Number of devices or shares.
    pub count: u64,
}

/// Returns the elements of `Gres=`. Omits elements whose count is not a number, because slurmd does
/// not start if it finds such an element.
pub fn node_gres(gres: &str) -> impl Iterator<Item = NodeGres<'_>> {
    gres.split(',').filter_map(element)
}

/// Parses `gpu:a:2(S:0)`, `gpu:4` or `gpu`.
fn element(text: &str) -> Option<NodeGres<'_>> {
    let text = text.split('(').next()?.trim();
    let mut words = text.split(':').filter(|word| *word != "no_consume");
    let name = words.next().filter(|name| !name.is_empty())?;
    let words: Vec<_> = words.collect();
    let (gres_type, count) = match words[..] {
        [] => (None, 1),
        [one] => count(one).map_or((Some(one), 1), |count| (None, count)),
        [gres_type, number, ..] => (Some(gres_type), count(number)?),
    };
    Some(NodeGres { name, gres_type, count })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_have_a_name_a_type_and_a_count() {
        let of = |text| node_gres(text).map(|one| (one.name, one.gres_type, one.count)).collect::<Vec<_>>();
        assert_eq!(of("gpu:h100:4(S:0-1), mps:no_consume:1K"), [("gpu", Some("h100"), 4), ("mps", None, 1024)]);
        assert_eq!(of("gpu,gpu:a100,gpu:2"), [("gpu", None, 1), ("gpu", Some("a100"), 1), ("gpu", None, 2)]);
        assert_eq!(of("gpu:a:many,,:4,"), []);
    }
}
