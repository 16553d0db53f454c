//! From a key to an action. The action depends on the context: the same key can be a command or a letter of a text.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::order::SortBy;

/// What the user looks at or types. Each context has its own keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyContext {
    List,
    /// Details, or the help page.
    Page,
    /// The letter of an order.
    Sort,
    /// A question that `y` answers.
    Confirmation,
    /// A text.
    Input,
}

/// What a key means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Quit,
    /// Quit with the exit status of Ctrl-C.
    Interrupt,
    Suspend,
    Help,
    /// Back to the list, or without the filter.
    Cancel,
    Accept,
    Up,
    Down,
    PageUp,
    PageDown,
    First,
    Last,
    Fold,
    Unfold,
    ToggleTree,
    ChooseSort,
    SortBy(SortBy),
    /// The letter after `o` names no order.
    UnknownOrder(char),
    Filter,
    Insert(char),
    Erase,
    /// Removes the whole text.
    Clear,
    Renew,
    End,
    ReadAll,
}

/// Returns the action of a key; `None` if the key means nothing here.
pub(super) fn action(context: KeyContext, key: KeyEvent) -> Option<Action> {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c') => Some(Action::Interrupt),
            KeyCode::Char('z') => Some(Action::Suspend),
            KeyCode::Char('u' | 'w') if context == KeyContext::Input => Some(Action::Clear),
            _ => None,
        };
    }
    match context {
        KeyContext::List => list(key.code),
        KeyContext::Page => page(key.code),
        KeyContext::Sort => Some(match key.code {
            KeyCode::Char(letter) => {
                let by = SortBy::ALL.into_iter().find(|by| by.letter() == letter);
                by.map_or(Action::UnknownOrder(letter), Action::SortBy)
            }
            _ => Action::Cancel,
        }),
        KeyContext::Confirmation => Some(match key.code {
            KeyCode::Char('y' | 'Y') => Action::Accept,
            _ => Action::Cancel,
        }),
        KeyContext::Input => input(key.code),
    }
}

fn list(code: KeyCode) -> Option<Action> {
    Some(match code {
        KeyCode::Char('q') | KeyCode::F(10) => Action::Quit,
        KeyCode::Esc => Action::Cancel,
        KeyCode::Char('h' | '?') | KeyCode::F(1) => Action::Help,
        KeyCode::Enter => Action::Accept,
        KeyCode::Left => Action::Fold,
        KeyCode::Right => Action::Unfold,
        KeyCode::Char('t') => Action::ToggleTree,
        KeyCode::Char('o') | KeyCode::F(6) => Action::ChooseSort,
        KeyCode::Char('/') => Action::Filter,
        KeyCode::Char('r') => Action::Renew,
        KeyCode::Char('x') => Action::End,
        KeyCode::Char('u') => Action::ReadAll,
        other => return movement(other),
    })
}

/// Details, and the help page.
fn page(code: KeyCode) -> Option<Action> {
    Some(match code {
        KeyCode::Char('q' | 'h' | '?') | KeyCode::Esc | KeyCode::Enter | KeyCode::F(_) => Action::Cancel,
        other => return movement(other),
    })
}

fn movement(code: KeyCode) -> Option<Action> {
    Some(match code {
        KeyCode::Up | KeyCode::Char('k') => Action::Up,
        KeyCode::Down | KeyCode::Char('j') => Action::Down,
        KeyCode::PageUp => Action::PageUp,
        KeyCode::PageDown => Action::PageDown,
        KeyCode::Home => Action::First,
        KeyCode::End => Action::Last,
        _ => return None,
    })
}

fn input(code: KeyCode) -> Option<Action> {
    Some(match code {
        KeyCode::Char(letter) => Action::Insert(letter),
        KeyCode::Backspace => Action::Erase,
        KeyCode::Enter => Action::Accept,
        KeyCode::Esc => Action::Cancel,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::text::KEYS;

    fn pressed(name: &str) -> KeyEvent {
        let code = match name {
            "Esc" => KeyCode::Esc,
            "Up" => KeyCode::Up,
            "Down" => KeyCode::Down,
            "Left" => KeyCode::Left,
            "Right" => KeyCode::Right,
            "Enter" => KeyCode::Enter,
            "Ctrl-Z" => return KeyEvent::new(KeyCode::Char('z'), KeyModifiers::CONTROL),
            "Ctrl-C" => return KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL),
            letter => KeyCode::Char(letter.chars().next().unwrap()),
        };
        KeyEvent::new(code, KeyModifiers::NONE)
    }

    #[test]
    fn each_key_of_the_help_page_has_an_action() {
        for name in KEYS.iter().flat_map(|(keys, _)| keys.split(", ")) {
            assert!(action(KeyContext::List, pressed(name)).is_some(), "{name}");
        }
    }

    #[test]
    fn letters_are_text_while_the_user_types() {
        for letter in ['q', 'x', 'r', 'o', '/'] {
            let key = KeyEvent::new(KeyCode::Char(letter), KeyModifiers::NONE);
            assert_eq!(action(KeyContext::Input, key), Some(Action::Insert(letter)));
        }
    }

    #[test]
    fn letter_after_o_is_an_order_or_reported() {
        assert_eq!(action(KeyContext::Sort, pressed("m")), Some(Action::SortBy(SortBy::Memory)));
        assert_eq!(action(KeyContext::Sort, pressed("z")), Some(Action::UnknownOrder('z')));
        assert_eq!(action(KeyContext::Sort, pressed("Esc")), Some(Action::Cancel));
    }

    /// A lease must not end because of a key that was meant for the list.
    #[test]
    fn only_y_confirms_a_release() {
        for name in ["Enter", "x", "q", "Esc", "Down"] {
            assert_eq!(action(KeyContext::Confirmation, pressed(name)), Some(Action::Cancel), "{name}");
        }
        assert_eq!(action(KeyContext::Confirmation, pressed("y")), Some(Action::Accept));
    }
}
