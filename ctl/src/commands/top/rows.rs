//! The tree of rows as lines, without the rows below folded rows.

use std::collections::BTreeSet;

use super::tree::{Key, Node};

/// A visible row.
#[derive(Debug, Clone, Copy)]
pub(super) struct VisibleRow<'n> {
    pub(super) node: &'n Node<'n>,
    /// Number of rows above that the row belongs to.
    pub(super) depth: usize,
    /// Whether the rows below it are hidden; `None` if it has none.
    pub(super) is_folded: Option<bool>,
}

/// Returns the visible rows.
pub(super) fn of<'n>(nodes: &'n [Node<'n>], folded: &BTreeSet<Key>) -> Vec<VisibleRow<'n>> {
    let mut lines = Vec::new();
    add(nodes, 0, folded, &mut lines);
    lines
}

fn add<'n>(nodes: &'n [Node<'n>], depth: usize, folded: &BTreeSet<Key>, lines: &mut Vec<VisibleRow<'n>>) {
    for node in nodes {
        let is_folded = (!node.children.is_empty()).then(|| folded.contains(&node.key));
        lines.push(VisibleRow { node, depth, is_folded });
        if is_folded == Some(false) {
            add(&node.children, depth + 1, folded, lines);
        }
    }
}
