//! An error for people: what, why, and what to type next.

use gpush_api::ApiError;

use super::{
    Look,
    look::{BAD, IDLE, QUIET, paint},
};

/// `error: …`, its causes, what stands for all that, and its hint; `word` says what happened, `indent` blanks come first.
pub(crate) fn lines(word: &str, error: &ApiError, indent: usize, look: &Look) -> Vec<String> {
    let margin = " ".repeat(indent);
    let mut out = Vec::new();
    let mut part = |label: &str, style, text: &str| {
        // A cause may have lines of its own, such as a place in a config file with a caret below it.
        for (at, line) in text.lines().enumerate() {
            let line = look.clean(line);
            let first = format!("{margin}{label}: ");
            if text.contains('\n') {
                let first = if at == 0 { format!("{margin}{}: ", paint(style, label)) } else { format!("{margin}  ") };
                out.push(format!("{first}{line}"));
                continue;
            }
            for wrapped in look.wrap(&first, &line) {
                out.push(match wrapped.strip_prefix(&first) {
                    Some(rest) => format!("{margin}{} {rest}", paint(style, &format!("{label}:"))),
                    None => wrapped,
                });
            }
        }
    };
    part(word, BAD, &error.message);
    for cause in &error.causes {
        part("  because", QUIET, cause);
    }
    if let Some(outcome) = &error.outcome {
        part("  outcome", QUIET, outcome);
    }
    if let Some(hint) = &error.hint {
        part("  hint", IDLE, hint);
    }
    out
}
