//! Errors for command lines that clap refuses, in the form of all other errors: what is wrong, and a hint.

use std::ffi::OsString;

use clap::{
    Parser as _,
    error::{ContextKind, ContextValue, Error, ErrorKind},
};
use gpush_api::{ApiError, Code};

use crate::{
    args::{Cli, Offers, as_hint, as_typed_job, correction, help, missing, typed},
    tips,
};

/// Returns the error for a refused command line. `named` are its words that are not options. `offers` asks what the host
/// offers; it is called only if the hint depends on that.
pub(crate) fn error(
    error: Error,
    words: &[OsString],
    named: &[&str],
    offers: impl FnOnce() -> Option<Offers>,
) -> ApiError {
    let typed: Option<Vec<&str>> = words.iter().skip(1).map(|word| word.to_str()).collect();
    let typed = typed.unwrap_or_default();
    let Some(job) = as_typed_job(&typed) else { return of_gpushctl(error, words, &typed, named, offers) };
    let offers = offers();
    if offers.as_ref().is_some_and(|offers| offers.only_slurm) {
        return ApiError::new(Code::BadRequest, message(&error)).hint(job);
    }
    of_gpushctl(error, words, &typed, named, || offers)
}

/// Returns the error for a command line that means a command of gpushctl.
fn of_gpushctl(
    error: Error,
    words: &[OsString],
    typed: &[&str],
    named: &[&str],
    offers: impl FnOnce() -> Option<Offers>,
) -> ApiError {
    let is_root = nix::unistd::geteuid().is_root();
    if let Some(hint) = missing::kill_of_user(&error, typed).filter(|_| !is_root) {
        return ApiError::new(Code::BadRequest, message(&error)).hint(hint);
    }
    let (meant, remark) = match correction::correction(typed, is_root) {
        Some(meant) => (Some(meant), ""),
        None => (missing::completed(&error, typed), missing::remark(&error)),
    };
    if let Some(hint) = meant.and_then(|meant| as_hint(&meant, offers)) {
        return ApiError::new(Code::BadRequest, message(&error)).hint(hint + remark);
    }
    let error = tips::remove_misleading_suggestions(error);
    let help = help::path(named);
    let (message, hint) = match error.kind() {
        ErrorKind::ValueValidation => value(&error),
        // clap's text for this error is the whole help.
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => ("a command is missing".to_owned(), None),
        _ => (message(&error), of_environment(&error, named).or_else(|| hint(&error, words))),
    };
    let hint = hint.unwrap_or_else(|| format!("see `{help} --help`"));
    ApiError::new(Code::BadRequest, message).hint(hint)
}

/// Returns what is wrong, as one sentence.
fn message(error: &Error) -> String {
    let missing = missing::names(error);
    if !missing.is_empty() {
        let named: Vec<String> = missing.iter().map(|name| shown(name)).collect();
        let verb = if named.len() == 1 { "is" } else { "are" };
        return format!("{} {verb} missing", named.join(" and "));
    }
    first_line(error)
}

/// Returns the name of an argument, or the names of alternatives, which clap writes as `<--check|--dry-run>`.
fn shown(name: &str) -> String {
    match name.strip_prefix("<--").and_then(|rest| rest.strip_suffix('>')) {
        Some(rest) => format!("`--{}`", rest.split('|').collect::<Vec<_>>().join("` or `")),
        None => {
            let name = name.trim_end_matches("...");
            let optional = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
            format!("`{}`", optional.unwrap_or(name))
        }
    }
}

/// Returns the first line of clap's text.
fn first_line(error: &Error) -> String {
    let text = error.render().to_string();
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// Separates the error of a wrong value from the text that says what to write.
fn value(error: &Error) -> (String, Option<String>) {
    let text = first_line(error);
    match text.split_once("': write ") {
        Some((message, write)) => (format!("{message}'"), Some(format!("write {write}"))),
        None => (text, None),
    }
}

/// Returns the hint for a wrong format of an environment: its formats are not those of lists.
fn of_environment(error: &Error, named: &[&str]) -> Option<String> {
    let is_format = strings(error, ContextKind::InvalidArg).iter().any(|arg| arg.starts_with("--output"));
    let is_environment = matches!(named, ["lease" | "leases", "env", ..]);
    (is_format && is_environment).then(|| "use `-o sh`, `-o fish`, `-o csh`, `-o json` or `-o docker`".to_owned())
}

/// Hidden commands that a misspelled word never means. The first one writes files.
const NEVER_MEANT: [&str; 2] = ["man", "check-spec"];

fn hint(error: &Error, words: &[OsString]) -> Option<String> {
    let suggestions = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];
    let meant = |word: &String| !NEVER_MEANT.contains(&word.as_str());
    if let Some(word) = suggestions.into_iter().find_map(|kind| strings(error, kind).into_iter().find(meant)) {
        let line = with_suggestion(error, words, &word);
        return Some(format!("did you mean `{}`?", line.unwrap_or(word)));
    }
    match error.kind() {
        ErrorKind::MissingRequiredArgument => missing::object(error),
        ErrorKind::InvalidValue => {
            let values = strings(error, ContextKind::ValidValue);
            (!values.is_empty()).then(|| format!("write one of {}", values.join(", ")))
        }
        ErrorKind::ArgumentConflict => {
            let both: Vec<String> = [ContextKind::InvalidArg, ContextKind::PriorArg]
                .into_iter()
                .flat_map(|kind| strings(error, kind))
                .collect();
            match both.as_slice() {
                [one, other] if one == other => Some(format!("write {} only once", shown(one))),
                [one, other] => Some(format!("leave out {} or {}", shown(one), shown(other))),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Returns the typed command line with a suggested word, if gpushctl accepts it.
fn with_suggestion(error: &Error, words: &[OsString], suggested: &str) -> Option<String> {
    let refused = [ContextKind::InvalidValue, ContextKind::InvalidSubcommand, ContextKind::InvalidArg];
    let typed = refused.into_iter().find_map(|kind| strings(error, kind).into_iter().next())?;
    let typed_words = words.iter().skip(1).map(|word| word.to_str());
    let mut words: Vec<&str> = [Some("gpushctl")].into_iter().chain(typed_words).collect::<Option<_>>()?;
    let at = words.iter().position(|word| *word == typed)?;
    words[at] = suggested;
    Cli::try_parse_from(&words).ok()?;
    typed::command_line(words)
}

fn strings(error: &Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> (String, String) {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let named: Vec<&str> = line.split(' ').skip(1).filter(|word| !word.starts_with('-')).collect();
        let error = error(Cli::try_parse_from(&words).unwrap_err(), &words, &named, || None);
        (error.message, error.hint.unwrap_or_default())
    }

    /// Fault: the first line of clap's text was the message, and this line does not name the missing argument.
    #[test]
    fn error_of_a_missing_argument_names_the_argument() {
        for (line, message, hint) in [
            (
                "gpushctl lease end L28 --reason x --notice 5s",
                "`--kill` is missing",
                "did you mean `gpushctl lease end L28 --reason x --notice 5s --kill`? --kill ends the processes too",
            ),
            (
                "gpushctl lease renew L3",
                "`--for <DURATION>` is missing",
                "did you mean `gpushctl lease renew L3 --for 2h`?",
            ),
            (
                "gpushctl mps set 0",
                "`--percentage <PERCENT>` or `--memory <MEMORY>` or `--priority <PRIORITY>` or `--reset` is missing",
                "name a limit, such as --percentage 25",
            ),
            (
                "gpushctl run --mig 1g.10gb",
                "`<COMMAND>` is missing",
                "did you mean `gpushctl run --mig 1g.10gb -- COMMAND`?",
            ),
            (
                "gpushctl run",
                "`<COMMAND>` is missing",
                "did you mean `gpushctl run -- COMMAND`? Add a share if the host offers several kinds, such as --memory 10G",
            ),
        ] {
            assert_eq!(refused(line), (message.to_owned(), hint.to_owned()), "{line}");
        }
    }

    #[test]
    fn every_refused_command_line_has_a_hint() {
        for (line, hint) in [
            ("gpushctl gpu list --color blue", "write one of auto, always, never"),
            ("gpushctl mig apply --detach --timeout 3s", "leave out `--detach` or `--timeout <DURATION>`"),
            (
                "gpushctl metrics serve --listen 127.0.0.1:1 --listen 127.0.0.1:2",
                "write `--listen <ADDRESS>` only once",
            ),
            ("gpushctl lease env -o env", "use `-o sh`, `-o fish`, `-o csh`, `-o json` or `-o docker`"),
            ("gpushctl mig apply --wait=soon", "write 90s, 15m, 1h30m or 2d"),
            ("gpushctl mig apply --timeout 0", "see `gpushctl mig apply --help`"),
            ("gpushctl stop all", "see `gpushctl --help`"),
            ("gpushctl ban student1", "see `gpushctl --help`"),
            ("gpushctl slurm check", "see `gpushctl slurm --help`"),
            ("gpushctl completion bash", "did you mean `gpushctl completions bash`?"),
            ("gpushctl -o jsno status", "did you mean `gpushctl -o json status`?"),
            ("gpushctl config init --site labs", "did you mean `gpushctl config init --site lab`?"),
            ("gpushctl bogus", "see `gpushctl --help`"),
            ("gpushctl gpu list --bogus", "see `gpushctl gpu list --help`"),
        ] {
            assert_eq!(refused(line).1, hint, "{line}");
        }
    }
}
