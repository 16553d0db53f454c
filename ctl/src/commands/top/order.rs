//! The order and the selection of rows.

use std::cmp::Ordering;

use gpush_api::{Lease, MigDevice};

use super::tree::{Item, Node, job_of};
use crate::render::slices::Use;

/// How to sort rows. Rows whose figure is not known come last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum SortBy {
    /// By index and placement.
    #[default]
    Index,
    /// Most active first.
    Activity,
    /// Most memory first.
    Memory,
    /// Most power first.
    Power,
    /// By user name.
    User,
    /// The longest time without work first.
    Unused,
    /// The earliest end first.
    End,
}

impl SortBy {
    pub(super) const ALL: [Self; 7] =
        [Self::Index, Self::Activity, Self::Memory, Self::Power, Self::User, Self::Unused, Self::End];

    /// Returns the letter that the user types after `o`.
    pub(super) fn letter(self) -> char {
        match self {
            Self::Index => 'i',
            Self::Activity => 'a',
            Self::Memory => 'm',
            Self::Power => 'p',
            Self::User => 'u',
            Self::Unused => 's',
            Self::End => 'e',
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Index => "index",
            Self::Activity => "activity",
            Self::Memory => "memory",
            Self::Power => "power",
            Self::User => "user",
            Self::Unused => "idle since",
            Self::End => "end",
        }
    }

    fn compare(self, one: &Node<'_>, other: &Node<'_>) -> Ordering {
        fn last<T: PartialOrd>(one: Option<T>, other: Option<T>, compare: fn(&T, &T) -> Ordering) -> Ordering {
            match (one, other) {
                (Some(one), Some(other)) => compare(&one, &other),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (None, None) => Ordering::Equal,
            }
        }
        let largest = |one: &f64, other: &f64| other.total_cmp(one);
        match self {
            Self::Index => Ordering::Equal,
            Self::Activity => last(busiest(one), busiest(other), largest),
            Self::Memory => last(one.figures.memory_mib, other.figures.memory_mib, |one, other| other.cmp(one)),
            Self::Power => last(one.figures.power_w, other.figures.power_w, largest),
            Self::User => last(user(one), user(other), Ord::cmp),
            Self::Unused => {
                let since = |node: &Node<'_>| match &node.item {
                    Item::Lease(item) => item.usage.and_then(|usage| usage.unused_since),
                    Item::Gpu { .. } | Item::Instance { .. } | Item::Process(_) | Item::Waiting(_) => None,
                };
                last(since(one), since(other), Ord::cmp)
            }
            Self::End => {
                let end = |node: &Node<'_>| node.lease().and_then(|lease| lease.expires_at);
                last(end(one), end(other), Ord::cmp)
            }
        }
    }
}

/// Returns the activity of a row; for a GPU with MIG, that of its most active instance.
fn busiest(node: &Node<'_>) -> Option<f64> {
    let below = || node.children.iter().filter_map(|child| child.figures.activity.ratio()).max_by(f64::total_cmp);
    node.figures.activity.ratio().or_else(below)
}

fn user<'a>(node: &'a Node<'_>) -> Option<&'a str> {
    match &node.item {
        Item::Process(process) => process.process.user.as_deref(),
        Item::Lease(_) | Item::Waiting(_) => node.lease().and_then(|lease| lease.holder.user.as_deref()),
        Item::Gpu { .. } | Item::Instance { .. } => None,
    }
}

/// Sorts rows, and the rows below each of them. Equal rows keep their order.
pub(super) fn sort(nodes: &mut [Node<'_>], by: SortBy) {
    if by != SortBy::Index {
        nodes.sort_by(|one, other| by.compare(one, other));
        nodes.iter_mut().for_each(|node| sort(&mut node.children, by));
    }
}

/// Keeps the rows that contain a text, the rows below them, and the rows above them. Ignores case. `devices` are the MIG
/// devices of the host.
pub(super) fn filter(nodes: &mut Vec<Node<'_>>, text: &str, devices: &[MigDevice]) {
    let text = text.to_lowercase();
    if !text.is_empty() {
        nodes.retain_mut(|node| matches(node, &text, devices));
    }
}

fn matches(node: &mut Node<'_>, text: &str, devices: &[MigDevice]) -> bool {
    if words(node, devices).to_lowercase().contains(text) {
        return true;
    }
    node.children.retain_mut(|child| matches(child, text, devices));
    !node.children.is_empty()
}

/// Returns the words for a user: the name, which a row shows, and the uid, which it shows without a name.
fn user_words(user: Option<&str>, uid: Option<u32>, account: Option<&str>) -> String {
    let uid = uid.map_or_else(String::new, |uid| format!("uid {uid}"));
    format!("{} {} {uid}", user.unwrap_or_default(), account.unwrap_or_default())
}

/// Returns the words of a row in which the filter searches.
fn words(node: &Node<'_>, devices: &[MigDevice]) -> String {
    let of_lease = |node: &Node<'_>| {
        let Some(lease) = node.lease() else { return String::new() };
        let job = job_of(lease).map_or_else(String::new, |job| format!("job {job}"));
        let Lease { id, holder, account, .. } = lease;
        let user = user_words(holder.user.as_deref(), Some(holder.uid), account.as_deref());
        format!("{id} {user} {} {job} {}", lease.kind, lease.state)
    };
    match &node.item {
        Item::Gpu { gpu, .. } => format!("gpu {} {} {} {}", gpu.index, gpu.name, gpu.uuid, gpu.mode.name()),
        Item::Instance { instance, gpu } => {
            let devices: Vec<&MigDevice> = devices.iter().filter(|device| device.gpu_uuid == gpu.uuid).collect();
            let usage = Use::of(instance, &devices);
            let start = instance.placement.start;
            format!("{}@{start} {} {}", instance.profile, usage.word(), usage.symbol())
        }
        Item::Lease(item) => {
            let state = item.usage.map_or("", |usage| usage.state.name());
            format!("{} {} {state}", of_lease(node), item.device.as_deref().unwrap_or_default())
        }
        Item::Waiting(_) => format!("{} waiting", of_lease(node)),
        Item::Process(process) => {
            let one = &process.process;
            let pid = one.pid.map_or_else(String::new, |pid| pid.to_string());
            let user = user_words(one.user.as_deref(), one.uid, process.account.as_deref());
            format!("{pid} {user} {}", one.command.as_deref().unwrap_or_default())
        }
    }
}

/// Returns the leases without the rows above and below them.
pub(super) fn leases_only(nodes: Vec<Node<'_>>) -> Vec<Node<'_>> {
    let mut found = Vec::new();
    for mut node in nodes {
        let below = leases_only(std::mem::take(&mut node.children));
        if node.lease().is_some() {
            found.push(node);
        }
        found.extend(below);
    }
    found
}

#[cfg(test)]
mod tests {
    use gpush_api::LeaseHolder;

    use super::*;
    use crate::commands::top::{samples, tree};

    fn ids(nodes: &[Node<'_>]) -> Vec<String> {
        nodes.iter().filter_map(|node| Some(node.lease()?.id.to_string())).collect()
    }

    #[test]
    fn row_without_a_figure_is_sorted_last() {
        let answers = samples::host();
        let mut leases = leases_only(tree::of(&answers));
        let known = leases.iter().filter(|node| node.figures.activity.ratio().is_some()).count();
        sort(&mut leases, SortBy::Activity);
        let ratios: Vec<f64> = leases[..known].iter().filter_map(|node| node.figures.activity.ratio()).collect();
        assert_eq!(ratios.len(), known);
        assert!(ratios.is_sorted_by(|one, other| one >= other), "{ratios:?}");
    }

    #[test]
    fn filter_keeps_the_rows_above_and_below_a_match() {
        let answers = samples::host();
        let mut nodes = tree::of(&answers);
        filter(&mut nodes, "TRAIN.PY", &[]);
        assert_eq!(nodes.len(), 1, "one GPU has the process");
        assert_eq!(ids(&leases_only(nodes.clone())), ["L17"]);
        filter(&mut nodes, "no such text", &[]);
        assert!(nodes.is_empty());
    }

    /// Fault: `/uid 1001` found no row, although rows showed `uid 1001`.
    #[test]
    fn filter_finds_uids_and_states_of_instances() {
        let mut answers = samples::host();
        answers.status.leases[0].holder = LeaseHolder { uid: 1001, user: None };
        let process =
            answers.processes.as_mut().unwrap().processes.iter_mut().find(|one| one.process.pid == Some(31_337));
        let process = &mut process.unwrap().process;
        (process.uid, process.user) = (Some(1002), None);
        let found = |text: &str| {
            let mut nodes = tree::of(&answers);
            filter(&mut nodes, text, &answers.status.devices);
            nodes
        };
        assert_eq!(ids(&leases_only(found("uid 1001"))), ["L12"]);
        assert_eq!(found("UID 1002").len(), 1);
        let split = |text: &str| {
            let nodes = found(text);
            nodes.iter().flat_map(|node| &node.children).any(|node| matches!(node.item, Item::Instance { .. }))
        };
        assert!(split("granted") && split("2g.20gb@4") && split("◐") && !split("⊘"));
    }

    #[test]
    fn each_order_has_its_letter() {
        let mut letters: Vec<char> = SortBy::ALL.iter().map(|by| by.letter()).collect();
        letters.sort_unstable();
        letters.dedup();
        assert_eq!(letters.len(), SortBy::ALL.len());
    }
}
