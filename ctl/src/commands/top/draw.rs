//! The picture of an open top: the text of `text`, arranged on the terminal.

use anstream::adapter::WinconBytes;
use anstyle::{AnsiColor, Effects};
use gpush_api::LeasePast;
use ratatui::{
    Frame,
    layout::Rect,
    style::{Color, Modifier, Style},
    text::{Line, Span, Text},
    widgets::{Block, Clear, Paragraph},
};

use super::{
    order::SortBy,
    state::{State, View},
    text::{self, ColumnWidths, Drawing},
    tree::Node,
};
use crate::render::{
    Appearance, Charset,
    appearance::{NOTE, PLAIN, QUIET, paint, width},
};

/// Minimum size of a terminal, in columns and lines.
const LEAST: (u16, u16) = (40, 8);

/// Number of lines that the header leaves: the names of the columns, five rows and the last line.
const ROWS_BELOW_HEADER: usize = 7;

/// The last line, while the user types no text.
const FOOTER: &str = "q quit  h help  Enter details  t tree  o sort  / filter  r renew  x release";

/// Draws the picture. Without `is_colored`, draws it without styles, except for the selected line.
pub(super) fn picture(frame: &mut Frame<'_>, state: &mut State, is_colored: bool, look: &Appearance) {
    let area = frame.area();
    let (columns, rows) = LEAST;
    if area.width < columns || area.height < rows {
        let text = format!("top needs {columns}x{rows}, not {}x{}", area.width, area.height);
        frame.render_widget(Paragraph::new(text), area);
        return;
    }
    let look = &Appearance { width: usize::from(area.width), wraps: true, ..*look };
    let styled = |line: &str| line_of(line, is_colored);
    let mut header = text::header(&state.answers, &state.connection, look);
    header.truncate(usize::from(area.height) - ROWS_BELOW_HEADER);
    let top = u16::try_from(header.len()).unwrap_or(u16::MAX);
    let [header_area, body, footer_area] = [(0, top), (top, area.height - top - 1), (area.height - 1, 1)]
        .map(|(y, height)| Rect { x: 0, y, width: area.width, height });
    frame.render_widget(Text::from_iter(header.iter().map(|line| styled(line))), header_area);
    let body_lines = match &state.view {
        View::Help { first } => {
            let (lines, first) = page(text::help(look), *first, body.height);
            state.view = View::Help { first };
            lines
        }
        View::Details { first } => {
            let lines = details(state, look);
            let (lines, first) = page(lines, *first, body.height);
            state.view = View::Details { first };
            lines
        }
        View::List | View::Sort | View::Filter | View::Question(_) => Vec::new(),
    };
    if matches!(state.view, View::Help { .. } | View::Details { .. }) {
        state.height = usize::from(body.height);
        frame.render_widget(Text::from_iter(body_lines.iter().map(|line| styled(line))), body);
    } else {
        list(frame, state, body, is_colored, look);
    }
    let (style, text) = footer(state);
    frame.render_widget(styled(&paint(style, &look.fit(&look.clean(&text), look.width))), footer_area);
    if let View::Question(question) = &state.view {
        let lines: Vec<String> = question.lines(look).iter().map(|line| look.clean(line)).collect();
        dialog(frame, &lines, is_colored, look);
    }
}

/// Returns the lines of a page from `first` on, and `first`, so that the last line is at most at the end of the page.
fn page(lines: Vec<String>, first: usize, height: u16) -> (Vec<String>, usize) {
    let first = first.min(lines.len().saturating_sub(usize::from(height)));
    (lines.into_iter().skip(first).collect(), first)
}

fn details(state: &State, look: &Appearance) -> Vec<String> {
    let nodes = state.nodes();
    let lines = state.lines(&nodes);
    match state.marked(&lines) {
        Some(line) => {
            let mut out = text::details(line.node, &state.answers, &state.history, look);
            let is_of_row = |past: &&LeasePast| line.node.lease().is_some_and(|lease| lease.id == past.lease_id);
            out.extend(state.past.as_deref().filter(is_of_row).into_iter().flat_map(|past| text::past(past, look)));
            out
        }
        None => vec!["The row no longer exists.".to_owned()],
    }
}

fn list(frame: &mut Frame<'_>, state: &mut State, area: Rect, is_colored: bool, look: &Appearance) {
    let columns = ColumnWidths::of(look.width);
    state.height = usize::from(area.height).saturating_sub(1).max(1);
    let nodes: Vec<Node<'_>> = state.nodes();
    let lines = state.lines(&nodes);
    let selected = state.selected(&lines);
    let first = state.first(selected, lines.len());
    let drawing = Drawing { status: &state.answers.status, history: &state.history, columns, look };
    let mut drawn = vec![line_of(&text::headings(columns), is_colored)];
    drawn.extend(text::nothing(&nodes, &state.filter, look).map(Line::from));
    for (at, line) in lines.iter().enumerate().skip(first).take(state.height) {
        let mut line = line_of(&text::row(line, &drawing), is_colored);
        if at == selected {
            let fill = usize::from(area.width).saturating_sub(line.width());
            line.push_span(Span::raw(" ".repeat(fill)));
            line = line.patch_style(Style::new().add_modifier(Modifier::REVERSED));
        }
        drawn.push(line);
    }
    frame.render_widget(Text::from(drawn), area);
}

/// Returns the last line and its style: the text that the user types, a message, or the keys.
fn footer(state: &State) -> (anstyle::Style, String) {
    let mut view = Vec::new();
    if state.sort != SortBy::Index {
        view.push(format!("sort: {}", state.sort.name()));
    }
    if !state.filter.is_empty() {
        view.push(format!("filter: {}", state.filter));
    }
    match (&state.view, &state.message) {
        (View::Filter, _) => (PLAIN, format!("/{}_", state.filter)),
        (View::Sort, _) => {
            let orders: Vec<String> = SortBy::ALL.iter().map(|by| format!("{} {}", by.letter(), by.name())).collect();
            (PLAIN, format!("sort: {}", orders.join("  ")))
        }
        (_, Some(message)) => (NOTE, message.clone()),
        (View::Details { .. } | View::Help { .. }, None) => (QUIET, "Esc back  Up, Down scroll".to_owned()),
        (View::List | View::Question(_), None) => {
            view.push(FOOTER.to_owned());
            (QUIET, view.join("  "))
        }
    }
}

/// Draws lines in a box in the middle of the terminal.
fn dialog(frame: &mut Frame<'_>, lines: &[String], is_colored: bool, look: &Appearance) {
    let area = frame.area();
    let inside = usize::from(area.width) - 4;
    let lines: Vec<String> = lines.iter().map(|line| look.fit(line, inside)).collect();
    let columns = lines.iter().map(|line| width(line)).max().unwrap_or(0) + 4;
    let columns = u16::try_from(columns).unwrap_or(area.width).clamp(LEAST.0.min(area.width), area.width);
    let rows = u16::try_from(lines.len()).unwrap_or(area.height).saturating_add(2).min(area.height);
    let area = Rect { x: (area.width - columns) / 2, y: (area.height - rows) / 2, width: columns, height: rows };
    let border = match look.charset {
        Charset::Utf8 => ratatui::symbols::border::PLAIN,
        Charset::Ascii => ratatui::symbols::border::Set {
            top_left: "+",
            top_right: "+",
            bottom_left: "+",
            bottom_right: "+",
            vertical_left: "|",
            vertical_right: "|",
            horizontal_top: "-",
            horizontal_bottom: "-",
        },
    };
    let block = Block::bordered().border_set(border).padding(ratatui::widgets::Padding::horizontal(1));
    frame.render_widget(Clear, area);
    let text = Text::from_iter(lines.iter().map(|line| line_of(line, is_colored)));
    frame.render_widget(Paragraph::new(text).block(block), area);
}

/// Converts text with color codes.
fn line_of(text: &str, is_colored: bool) -> Line<'static> {
    let mut parser = WinconBytes::new();
    let parts = parser.extract_next(text.as_bytes());
    parts.map(|(style, text)| Span::styled(text, if is_colored { style_of(style) } else { Style::new() })).collect()
}

fn style_of(style: anstyle::Style) -> Style {
    let mut out = Style::new();
    if let Some(anstyle::Color::Ansi(color)) = style.get_fg_color() {
        out = out.fg(match color {
            AnsiColor::Black => Color::Black,
            AnsiColor::BrightBlack => Color::DarkGray,
            AnsiColor::Red => Color::Red,
            AnsiColor::BrightRed => Color::LightRed,
            AnsiColor::Green => Color::Green,
            AnsiColor::BrightGreen => Color::LightGreen,
            AnsiColor::Yellow => Color::Yellow,
            AnsiColor::BrightYellow => Color::LightYellow,
            AnsiColor::Blue => Color::Blue,
            AnsiColor::BrightBlue => Color::LightBlue,
            AnsiColor::Magenta => Color::Magenta,
            AnsiColor::BrightMagenta => Color::LightMagenta,
            AnsiColor::Cyan => Color::Cyan,
            AnsiColor::BrightCyan => Color::LightCyan,
            AnsiColor::White => Color::Gray,
            AnsiColor::BrightWhite => Color::White,
        });
    }
    for (effect, modifier) in [(Effects::BOLD, Modifier::BOLD), (Effects::DIMMED, Modifier::DIM)] {
        if style.get_effects().contains(effect) {
            out = out.add_modifier(modifier);
        }
    }
    out
}
