//! The state of an open top, and how actions change it.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Lease, LeaseId, LeasePast, LeaseState};
use jiff::{SignedDuration, Timestamp};

use super::{
    answers::HostAnswers,
    ask::{self, LeaseChange, Question},
    history::FigureHistory,
    keys::{Action, KeyContext},
    order::{self, SortBy},
    rows::{self, VisibleRow},
    text::Connection,
    tree::{self, Key, Node},
};
use crate::render::Appearance;

/// Age of the last answer from which on the picture says that gpushd is slow.
const SLOW: SignedDuration = SignedDuration::from_secs(5);

/// What the user looks at or types.
#[derive(Debug, Clone, Default)]
pub(super) enum View {
    #[default]
    List,
    /// The details of the selected row, from this line on.
    Details {
        first: usize,
    },
    /// The help page, from this line on.
    Help {
        first: usize,
    },
    /// The next letter chooses the order.
    Sort,
    /// The user types the filter.
    Filter,
    Question(Question),
}

/// What an action needs from outside of the state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Effect {
    Quit,
    Interrupt,
    Suspend,
    ReadAll,
    /// The past of the lease whose details are shown.
    ReadPast(LeaseId),
    Change(LeaseChange),
}

/// The state of an open top.
#[derive(Debug)]
pub(super) struct State {
    pub(super) answers: HostAnswers,
    pub(super) connection: Connection,
    pub(super) history: FigureHistory,
    pub(super) view: View,
    /// The past of the lease whose details are shown, if gpushd knows it.
    pub(super) past: Option<Box<LeasePast>>,
    pub(super) has_tree: bool,
    pub(super) sort: SortBy,
    pub(super) filter: String,
    /// The result of the last change, or why a key has no effect.
    pub(super) message: Option<String>,
    folded: BTreeSet<Key>,
    selected: Option<Key>,
    /// Index of the selected line. If the selected row ends, the row at the same index is selected.
    position: usize,
    /// Number of lines that fit on the terminal.
    pub(super) height: usize,
}

impl State {
    pub(super) fn new(answers: HostAnswers) -> Self {
        let mut state = Self {
            answers,
            connection: Connection::Answers,
            history: FigureHistory::default(),
            view: View::List,
            past: None,
            has_tree: true,
            sort: SortBy::Index,
            filter: String::new(),
            message: None,
            folded: BTreeSet::new(),
            selected: None,
            position: 0,
            height: 1,
        };
        state.record();
        state
    }

    fn record(&mut self) {
        let Self { answers, history, .. } = self;
        history.record(&tree::of(answers));
    }

    /// Takes over an answer of gpushd. If there is none, keeps the last picture.
    pub(super) fn answered(&mut self, answers: Result<HostAnswers, ApiError>) {
        match answers {
            Ok(answers) => {
                self.answers = answers;
                self.connection = Connection::Answers;
                self.record();
            }
            Err(error) => {
                self.connection = Connection::Failed { message: error.message };
                self.history.record_gap();
            }
        }
    }

    /// Says that gpushd is slow, if its last answer is old and it has not answered the next request.
    pub(super) fn waits_for_answer(&mut self, now: Timestamp) {
        if now.duration_since(self.answers.at) > SLOW && self.connection == Connection::Answers {
            self.connection = Connection::Failed { message: "gpushd has not answered yet".to_owned() };
        }
    }

    pub(super) fn key_context(&self) -> KeyContext {
        match &self.view {
            View::List => KeyContext::List,
            View::Details { .. } | View::Help { .. } => KeyContext::Page,
            View::Sort => KeyContext::Sort,
            View::Filter | View::Question(Question::Renew { .. } | Question::Revoke { .. }) => KeyContext::Input,
            View::Question(Question::Release { .. }) => KeyContext::Confirmation,
        }
    }

    /// Returns the rows, filtered and sorted.
    pub(super) fn nodes(&self) -> Vec<Node<'_>> {
        let mut nodes = tree::of(&self.answers);
        order::filter(&mut nodes, &self.filter, &self.answers.status.devices);
        if !self.has_tree {
            nodes = order::leases_only(nodes);
        }
        order::sort(&mut nodes, self.sort);
        nodes
    }

    /// Returns the visible rows.
    pub(super) fn lines<'n>(&self, nodes: &'n [Node<'n>]) -> Vec<VisibleRow<'n>> {
        rows::of(nodes, &self.folded)
    }

    /// Returns the index of the selected line.
    pub(super) fn selected(&self, lines: &[VisibleRow<'_>]) -> usize {
        let is_selected = |line: &VisibleRow<'_>| Some(&line.node.key) == self.selected.as_ref();
        // Two targets of a lease that gpushd still creates have the same key.
        if lines.get(self.position).is_some_and(is_selected) {
            return self.position;
        }
        let found = lines.iter().position(is_selected);
        found.unwrap_or(self.position).min(lines.len().saturating_sub(1))
    }

    /// Returns the row that the user has selected; `None` if it has ended.
    pub(super) fn marked<'l, 'n>(&self, lines: &'l [VisibleRow<'n>]) -> Option<&'l VisibleRow<'n>> {
        lines.iter().find(|line| Some(&line.node.key) == self.selected.as_ref())
    }

    /// Returns the index of the first line that is drawn, so that the selected line is visible.
    pub(super) fn first(&self, selected: usize, lines: usize) -> usize {
        let height = self.height.max(1);
        selected.saturating_sub(height / 2).min(lines.saturating_sub(height))
    }

    /// Executes an action.
    pub(super) fn act(&mut self, action: Action, look: &Appearance) -> Option<Effect> {
        self.message = None;
        match action {
            Action::Quit => return Some(Effect::Quit),
            Action::Interrupt => return Some(Effect::Interrupt),
            Action::Suspend => return Some(Effect::Suspend),
            Action::ReadAll => return Some(Effect::ReadAll),
            Action::Cancel => return self.cancel(),
            Action::Accept => return self.accept(),
            Action::Help => self.view = View::Help { first: 0 },
            Action::Up => self.go(|at, _| at.saturating_sub(1)),
            Action::Down => self.go(|at, _| at.saturating_add(1)),
            Action::PageUp => self.go(usize::saturating_sub),
            Action::PageDown => self.go(usize::saturating_add),
            Action::First => self.go(|_, _| 0),
            Action::Last => self.go(|_, _| usize::MAX),
            Action::Fold => self.fold(true),
            Action::Unfold => self.fold(false),
            Action::ToggleTree => self.has_tree = !self.has_tree,
            Action::ChooseSort => self.view = View::Sort,
            Action::SortBy(by) => (self.sort, self.view) = (by, View::List),
            Action::UnknownOrder(letter) => {
                let letters: Vec<String> = SortBy::ALL.iter().map(|by| by.letter().to_string()).collect();
                self.message = Some(format!("{letter} is not an order: type one of {}", letters.join(", ")));
                self.view = View::List;
            }
            Action::Filter => self.view = View::Filter,
            Action::Insert(letter) => {
                if let Some(input) = self.input() {
                    input.push(letter);
                }
            }
            Action::Erase => {
                if let Some(input) = self.input() {
                    input.pop();
                }
            }
            Action::Clear => {
                if let Some(input) = self.input() {
                    input.clear();
                }
            }
            Action::Renew => self.ask(|lease, answers| ask::renew(lease, &answers.own, look.now)),
            Action::End => self.ask(|lease, answers| ask::end(lease, &answers.own, look)),
        }
        None
    }

    /// Returns the text that the user types.
    fn input(&mut self) -> Option<&mut String> {
        match &mut self.view {
            View::Filter => Some(&mut self.filter),
            View::Question(question) => question.input(),
            View::List | View::Details { .. } | View::Help { .. } | View::Sort => None,
        }
    }

    fn cancel(&mut self) -> Option<Effect> {
        match &self.view {
            View::List if self.filter.is_empty() => return Some(Effect::Quit),
            View::List | View::Filter => self.filter.clear(),
            View::Details { .. } | View::Help { .. } | View::Sort => {}
            View::Question(_) => self.message = Some("nothing was changed".to_owned()),
        }
        self.view = View::List;
        None
    }

    fn accept(&mut self) -> Option<Effect> {
        match &self.view {
            View::List => {
                // The details stay with this row.
                self.go(|at, _| at);
                self.view = View::Details { first: 0 };
                self.past = None;
                return self
                    .lease()
                    .filter(|lease| lease.state == LeaseState::Active)
                    .map(|lease| Effect::ReadPast(lease.id));
            }
            View::Details { .. } | View::Help { .. } | View::Sort | View::Filter => self.view = View::List,
            View::Question(question) => match question.accept() {
                Ok(change) => {
                    self.view = View::List;
                    return Some(Effect::Change(change));
                }
                Err(why) => self.message = Some(why),
            },
        }
        None
    }

    /// Selects another line, or moves the text of a page. `to` gets the present line and the height.
    fn go(&mut self, to: impl Fn(usize, usize) -> usize) {
        let height = self.height;
        match &mut self.view {
            View::Details { first } | View::Help { first } => *first = to(*first, height).min(1000),
            View::List => {
                let (position, key) = {
                    let nodes = self.nodes();
                    let lines = self.lines(&nodes);
                    let position = to(self.selected(&lines), height).min(lines.len().saturating_sub(1));
                    (position, lines.get(position).map(|line| line.node.key.clone()))
                };
                (self.position, self.selected) = (position, key);
            }
            View::Sort | View::Filter | View::Question(_) => {}
        }
    }

    fn fold(&mut self, is_folded: bool) {
        let nodes = self.nodes();
        let lines = self.lines(&nodes);
        let Some(line) = lines.get(self.selected(&lines)) else { return };
        let key = line.node.key.clone();
        if is_folded && !line.node.children.is_empty() {
            self.folded.insert(key);
        } else {
            self.folded.remove(&key);
        }
    }

    /// Returns the lease of the selected line.
    fn lease(&self) -> Option<Lease> {
        let nodes = self.nodes();
        let lines = self.lines(&nodes);
        lines.get(self.selected(&lines)).and_then(|line| line.node.lease()).cloned()
    }

    /// Asks a question about the lease of the selected line.
    fn ask(&mut self, question: impl Fn(&Lease, &HostAnswers) -> Result<Question, String>) {
        let asked = match self.lease() {
            Some(lease) => question(&lease, &self.answers),
            None => Err("select a lease first".to_owned()),
        };
        match asked {
            Ok(question) => self.view = View::Question(question),
            Err(why) => self.message = Some(why),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        commands::top::samples,
        render::{Charset, fixtures},
    };

    fn act(state: &mut State, actions: &[Action]) -> Option<Effect> {
        let look = fixtures::look(80, Charset::Ascii);
        actions.iter().fold(None, |_, action| state.act(*action, &look))
    }

    fn selected_lease(state: &State) -> Option<String> {
        let nodes = state.nodes();
        let lines = state.lines(&nodes);
        lines[state.selected(&lines)].node.lease().map(|lease| lease.id.to_string())
    }

    #[test]
    fn selection_stays_on_its_row_when_the_order_changes() {
        let mut state = State::new(samples::host());
        act(&mut state, &[Action::ToggleTree, Action::Down, Action::Down]);
        let before = selected_lease(&state);
        assert!(before.is_some());
        act(&mut state, &[Action::SortBy(SortBy::User)]);
        assert_eq!(selected_lease(&state), before);
    }

    #[test]
    fn release_needs_a_confirmation() {
        let mut state = State::new(samples::host());
        act(&mut state, &[Action::ToggleTree]);
        let own = state.answers.own.iter().next().unwrap().to_string();
        while selected_lease(&state).as_deref() != Some(own.as_str()) {
            act(&mut state, &[Action::Down]);
        }
        assert_eq!(act(&mut state, &[Action::End, Action::Cancel]), None);
        assert!(state.message.is_some());
        let effect = act(&mut state, &[Action::End, Action::Accept]);
        assert!(matches!(effect, Some(Effect::Change(LeaseChange::Release { lease })) if lease.to_string() == own));
    }

    #[test]
    fn escape_removes_the_filter_before_it_quits() {
        let mut state = State::new(samples::host());
        let typed = [Action::Filter, Action::Insert('z'), Action::Insert('z'), Action::Accept];
        assert_eq!(act(&mut state, &typed), None);
        assert_eq!((state.filter.as_str(), state.nodes().len()), ("zz", 0));
        assert_eq!(act(&mut state, &[Action::Cancel]), None);
        assert!(state.filter.is_empty());
        assert_eq!(act(&mut state, &[Action::Cancel]), Some(Effect::Quit));
    }

    #[test]
    fn last_picture_stays_while_gpushd_does_not_answer() {
        let mut state = State::new(samples::host());
        let rows = state.nodes().len();
        state.answered(Err(ApiError::new(gpush_api::Code::Unreachable, "cannot connect")));
        assert_eq!(state.nodes().len(), rows);
        assert!(matches!(state.connection, Connection::Failed { .. }));
        state.answered(Ok(samples::host()));
        assert_eq!(state.connection, Connection::Answers);
        let at = state.answers.at;
        state.waits_for_answer(at + SLOW);
        assert_eq!(state.connection, Connection::Answers);
        state.waits_for_answer(at + SLOW + SLOW);
        assert!(matches!(state.connection, Connection::Failed { .. }));
    }

    /// Fault: `o` with a wrong letter did nothing, and did not say so.
    #[test]
    fn unknown_order_is_reported() {
        let mut state = State::new(samples::host());
        act(&mut state, &[Action::ChooseSort, Action::UnknownOrder('z')]);
        assert!(state.message.as_deref().is_some_and(|text| text.starts_with("z is not an order")));
        assert_eq!((state.sort, state.key_context()), (SortBy::Index, KeyContext::List));
    }

    #[test]
    fn action_on_a_gpu_asks_for_a_lease() {
        let mut state = State::new(samples::host());
        act(&mut state, &[Action::End]);
        assert_eq!(state.message.as_deref(), Some("select a lease first"));
        act(&mut state, &[Action::Fold]);
        let nodes = state.nodes();
        assert_eq!(state.lines(&nodes)[0].is_folded, Some(true));
    }
}
