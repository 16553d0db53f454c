//! An error and its causes as one line of text.

use std::error::Error;

/// Returns an error's message and its causes, separated by colons. Omits causes that the text already contains.
#[must_use]
pub fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot start the unit")]
    struct Outer(#[source] Middle);

    #[derive(Debug, thiserror::Error)]
    #[error("the bus failed: no such file")]
    struct Middle(#[source] Inner);

    #[derive(Debug, thiserror::Error)]
    #[error("no such file")]
    struct Inner;

    #[test]
    fn cause_that_the_message_contains_is_not_repeated() {
        assert_eq!(in_full(&Outer(Middle(Inner))), "cannot start the unit: the bus failed: no such file");
        assert_eq!(in_full(&Inner), "no such file");
    }
}
