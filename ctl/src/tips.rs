//! Removes suggestions that do not help from clap's usage errors.
//!
//! clap suggests the nearest word of any kind: `version` for `operations`, and `-- -i 0` for
//! `-i 0`. This module keeps a suggestion only if both words have the same beginning or differ in
//! few letters.

use clap::error::{ContextKind, ContextValue, Error};
use gpush_core::nearest::nearest;

use crate::args::spelling::NOT_MISSPELLED;

pub(crate) fn remove_misleading_suggestions(mut error: Error) -> Error {
    let typed = [ContextKind::InvalidArg, ContextKind::InvalidSubcommand, ContextKind::InvalidValue]
        .into_iter()
        .filter_map(|kind| error.get(kind))
        .filter_map(|value| if let ContextValue::String(text) = value { Some(text.clone()) } else { None })
        .next_back()
        .unwrap_or_default();
    for kind in [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue] {
        if error.get(kind).is_some_and(|suggested| !is_close(&typed, suggested)) {
            error.remove(kind);
            // Also remove the usage line, because it belongs to the removed suggestion.
            error.remove(ContextKind::Usage);
        }
    }
    // clap lists all words that are near, in no useful order.
    if let Some(ContextValue::Strings(words)) = error.get(ContextKind::SuggestedSubcommand)
        && let Some(best) = nearest(&typed, words.iter().map(String::as_str)).map(str::to_owned)
    {
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(vec![best]));
    }
    // clap suggests `-- -x` for an unknown option `-x`. But no command accepts an option as an
    // argument.
    error.remove(ContextKind::Suggested);
    error
}

fn is_close(typed: &str, suggested: &ContextValue) -> bool {
    if NOT_MISSPELLED.contains(&typed) {
        return false;
    }
    let near = |word: &String| nearest(typed.trim_start_matches('-'), [word.trim_start_matches('-')]).is_some();
    match suggested {
        ContextValue::String(word) => near(word),
        ContextValue::Strings(words) => words.iter().any(near),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::Cli;

    fn text(words: &str) -> String {
        let error = Cli::try_parse_from(words.split(' ')).unwrap_err();
        remove_misleading_suggestions(error).render().to_string()
    }

    #[test]
    fn suggestions_that_mislead_are_dropped() {
        for words in
            ["gpushctl mig apply --dry-run --socks x", "gpushctl config diff -x 0", "gpushctl completions bsh2"]
        {
            let text = text(words);
            assert!(!text.contains("-- -x") && !text.contains("csh'"), "{text}");
        }
        assert!(text("gpushctl maintenance leave --sinc 3").contains("--sinc"));
        assert!(!text("gpushctl version --since 3").contains("--socket"));
    }

    #[test]
    fn near_words_are_suggested() {
        assert!(text("gpushctl stauts").contains("status"));
        let completion = text("gpushctl completion bash");
        assert!(completion.contains("completions") && !completion.contains("operation"), "{completion}");
        assert!(text("gpushctl mig apply --reson x").contains("--reason"));
    }
}
