//! Pictures of an open top, drawn from recorded answers on a terminal in memory.

use gpush_api::{ApiError, Code, LeaseId};
use insta::assert_snapshot;
use ratatui::{Terminal, backend::TestBackend};

use super::{draw, keys::Action, order::SortBy, picture, samples, state::State, text::ColumnWidths};
use crate::render::{Charset, appearance::width, fixtures};

/// Draws on a terminal of this size, without colors.
fn drawn(state: &mut State, columns: u16, rows: u16, charset: Charset) -> String {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
    let look = fixtures::look(usize::from(columns), charset);
    terminal.draw(|frame| draw::picture(frame, state, false, &look)).unwrap();
    terminal.backend().to_string()
}

fn act(state: &mut State, actions: &[Action]) {
    let look = fixtures::look(80, Charset::Utf8);
    for action in actions {
        assert_eq!(state.act(*action, &look), None, "{action:?}");
    }
}

/// Returns a state with a history.
fn state() -> State {
    let mut state = State::new(samples::host());
    for step in 0..6_u32 {
        let mut answers = samples::host();
        let ratio = f64::from(step) / 6.0;
        answers.usage.gpu_usage[1].activity.sm_activity = Some(ratio);
        answers.usage.gpu_usage[0].power_w = Some(100.0 + 100.0 * f64::from(step));
        state.answered(Ok(answers));
    }
    state.answered(Ok(samples::host()));
    state
}

#[test]
fn list_fits_40_to_120_columns() {
    for columns in [40, 60, 80, 120] {
        assert_snapshot!(format!("list-{columns}"), drawn(&mut state(), columns, 30, Charset::Utf8));
    }
    assert_snapshot!("list-ascii", drawn(&mut state(), 80, 30, Charset::Ascii));
}

/// Faults: at 40 columns, figures were cut without a mark; at 40x10, the header left three rows.
#[test]
fn narrow_terminal_leaves_out_columns_and_keeps_five_rows() {
    for columns in 40..=130 {
        let widths = ColumnWidths::of(columns);
        let answers = samples::host();
        let look = fixtures::look(columns, Charset::Utf8);
        let text = fixtures::plain(&picture(&answers, &look));
        assert!(text.lines().all(|line| width(line) <= columns), "{columns}: {widths:?}\n{text}");
        assert!(text.contains("24.6") && text.contains("690/700 W"), "{columns}:\n{text}");
    }
    let mut state = state();
    let error = ApiError::new(Code::Unreachable, "cannot connect to gpushd at /run/gpush/gpushd.sock: it does not run");
    state.answered(Err(error));
    let drawn = drawn(&mut state, 40, 10, Charset::Utf8);
    let lines: Vec<&str> = drawn.lines().collect();
    let headings = lines.iter().position(|line| line.starts_with("\"NAME")).unwrap();
    assert_eq!(lines.len() - headings - 2, 5, "{drawn}");
}

#[test]
fn colors_and_selection_are_styles_of_the_terminal() {
    let mut terminal = Terminal::new(TestBackend::new(80, 12)).unwrap();
    let look = fixtures::look(80, Charset::Utf8);
    let mut state = state();
    terminal.draw(|frame| draw::picture(frame, &mut state, true, &look)).unwrap();
    assert_snapshot!("list-colors", format!("{:?}", terminal.backend().buffer()));
}

#[test]
fn leases_without_tree_are_sorted_by_activity() {
    let mut state = state();
    act(&mut state, &[Action::ToggleTree, Action::SortBy(SortBy::Activity)]);
    assert_snapshot!("leases", drawn(&mut state, 80, 16, Charset::Utf8));
}

#[test]
fn filter_and_folded_rows() {
    let mut state = state();
    act(&mut state, &[Action::Fold, Action::Filter]);
    act(&mut state, &"bob".chars().map(Action::Insert).collect::<Vec<_>>());
    let typing = drawn(&mut state, 80, 16, Charset::Utf8);
    act(&mut state, &[Action::Accept]);
    assert_snapshot!("filter", format!("{typing}\n{}", drawn(&mut state, 80, 16, Charset::Utf8)));
    act(&mut state, &[Action::Filter, Action::Insert('!')]);
    assert!(drawn(&mut state, 80, 16, Charset::Utf8).contains("No row contains"));
}

#[test]
fn details_of_each_kind_of_row() {
    let mut state = state();
    let mut pictures = Vec::new();
    // The GPU, L12 with its process, the split instance, L13; and further below L17 and the unleased process.
    for at in 0..14 {
        if at > 0 {
            act(&mut state, &[Action::Down]);
        }
        if [0, 1, 2, 3, 4, 9, 13].contains(&at) {
            let look = fixtures::look(80, Charset::Utf8);
            let _ = state.act(Action::Accept, &look);
            pictures.push(drawn(&mut state, 80, 34, Charset::Utf8));
            act(&mut state, &[Action::Cancel]);
        }
    }
    assert_snapshot!("details", pictures.join("\n"));
    let _ = state.act(Action::Accept, &fixtures::look(80, Charset::Utf8));
    let mut answers = samples::host();
    answers.status.gpus.truncate(1);
    state.answered(Ok(answers));
    assert!(drawn(&mut state, 80, 34, Charset::Utf8).contains("The row no longer exists."));
}

#[test]
fn help_page() {
    let mut state = state();
    act(&mut state, &[Action::Help]);
    assert_snapshot!("help", drawn(&mut state, 80, 54, Charset::Utf8));
    act(&mut state, &[Action::Last]);
    assert!(drawn(&mut state, 60, 14, Charset::Ascii).contains("every 5 seconds"), "the page can be scrolled");
}

#[test]
fn questions_before_a_lease_changes() {
    let mut state = state();
    act(&mut state, &[Action::Down, Action::Renew]);
    let renew = drawn(&mut state, 60, 12, Charset::Utf8);
    act(&mut state, &[Action::Cancel, Action::End]);
    let release = drawn(&mut state, 60, 12, Charset::Utf8);
    act(&mut state, &[Action::Cancel]);
    state.answers.own.remove(&LeaseId(12));
    act(&mut state, &[Action::End, Action::Insert('x')]);
    let revoke = drawn(&mut state, 60, 12, Charset::Ascii);
    assert_snapshot!("questions", [renew, release, revoke].join("\n"));
}

#[test]
fn gpushd_that_does_not_answer_is_on_the_host_lines() {
    let mut state = state();
    let error = ApiError::new(Code::Unreachable, "cannot connect to gpushd at /run/gpush/gpushd.sock: it does not run");
    state.answered(Err(error));
    assert_snapshot!("away", drawn(&mut state, 80, 12, Charset::Utf8));
}

#[test]
fn small_terminal_gets_one_line() {
    for (columns, rows) in [(39, 20), (80, 7), (1, 1)] {
        let drawn = drawn(&mut state(), columns, rows, Charset::Utf8);
        assert!(!drawn.contains("gpushd"), "{drawn}");
    }
    assert_snapshot!(drawn(&mut state(), 30, 3, Charset::Utf8));
}

#[test]
fn picture_is_printed_once_without_a_terminal() {
    let answers = samples::host();
    for (columns, charset) in [(80, Charset::Utf8), (120, Charset::Ascii)] {
        let text = fixtures::plain(&picture(&answers, &fixtures::look(columns, charset)));
        assert!(text.lines().all(|line| width(line) <= columns && !line.ends_with(' ')), "{text}");
        assert_snapshot!(format!("once-{columns}"), text);
    }
}
