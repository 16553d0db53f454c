//! The past figures of each row, for the pictures of the history.

use std::collections::{BTreeMap, VecDeque};

use super::tree::{Key, Node};

/// Maximum number of figures of a row: five minutes at the usual interval.
const MOST: usize = 150;

/// The figures of a row at one time. A figure that is not known is absent.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct PastFigures {
    pub(super) activity: Option<f64>,
    pub(super) memory_mib: Option<u64>,
    pub(super) power_w: Option<f64>,
}

/// The past figures of each row that the last picture had.
#[derive(Debug, Default)]
pub(super) struct FigureHistory(BTreeMap<Key, VecDeque<PastFigures>>);

impl FigureHistory {
    /// Adds the figures of these rows, and forgets all other rows.
    pub(super) fn record(&mut self, nodes: &[Node<'_>]) {
        let mut present = BTreeMap::new();
        self.take(nodes, &mut present);
        self.0 = present;
    }

    fn take(&mut self, nodes: &[Node<'_>], present: &mut BTreeMap<Key, VecDeque<PastFigures>>) {
        for node in nodes {
            let mut past = self.0.remove(&node.key).unwrap_or_default();
            let figures = &node.figures;
            let activity = figures.activity.ratio();
            push(&mut past, PastFigures { activity, memory_mib: figures.memory_mib, power_w: figures.power_w });
            present.insert(node.key.clone(), past);
            self.take(&node.children, present);
        }
    }

    /// Adds a gap to each row, because gpushd did not answer.
    pub(super) fn record_gap(&mut self) {
        self.0.values_mut().for_each(|past| push(past, PastFigures::default()));
    }

    /// Returns the past figures of a row, the oldest first.
    pub(super) fn of(&self, key: &Key) -> impl DoubleEndedIterator<Item = &PastFigures> + ExactSizeIterator {
        self.0.get(key).map(VecDeque::iter).unwrap_or_default()
    }
}

fn push(past: &mut VecDeque<PastFigures>, moment: PastFigures) {
    if past.len() == MOST {
        past.pop_front();
    }
    past.push_back(moment);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::{samples, tree};

    #[test]
    fn history_is_bounded_and_forgets_rows_that_have_ended() {
        let answers = samples::host();
        let nodes = tree::of(&answers);
        let key = nodes[0].key.clone();
        let mut history = FigureHistory::default();
        for _ in 0..MOST + 10 {
            history.record(&nodes);
        }
        assert_eq!(history.of(&key).len(), MOST);
        history.record(&nodes[1..]);
        assert_eq!(history.of(&key).len(), 0);
    }

    #[test]
    fn time_without_answers_is_a_gap() {
        let answers = samples::host();
        let nodes = tree::of(&answers);
        let mut history = FigureHistory::default();
        history.record(&nodes);
        history.record_gap();
        let past: Vec<_> = history.of(&nodes[0].key).copied().collect();
        assert_eq!(past.last(), Some(&PastFigures::default()));
        assert!(past[0].memory_mib.is_some());
    }
}
