//! Syntax errors of a config: the messages of the TOML parser, with hints for habits from other formats.

use std::ops::Range;

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use crate::{
    diagnostic::{MOST_PROBLEMS, Problem},
    quote::Quoted,
};

/// Returns the problems to report for the errors of the TOML parser: the first error of each line. If the first error
/// shows that the file has another format, returns only this error: the others follow from it.
pub(super) fn problems(text: &str, table: &Spanned<DeTable<'_>>, errors: &[toml::de::Error]) -> Vec<Problem> {
    if let Some(other) = errors.first().and_then(|first| other_format(text, first)) {
        return vec![other];
    }
    // Everything after an open list or string is read as a part of it, so the other errors are no mistakes of the author.
    if let Some(first) = errors.first() {
        if ["unclosed array", "unclosed inline table"].iter().any(|open| first.message().contains(open)) {
            return vec![problem(text, table, first)];
        }
        if let Some(open) = open_list(text, first) {
            return vec![open];
        }
    }
    let line = |error: &toml::de::Error| error.span().and_then(|span| text.get(..span.start)).map(newlines);
    let mut first_of_lines: Vec<&toml::de::Error> = Vec::new();
    for error in errors {
        let is_next = first_of_lines.last().is_none_or(|last| line(last).is_none() || line(last) != line(error));
        if is_next {
            first_of_lines.push(error);
        }
    }
    first_of_lines.into_iter().take(MOST_PROBLEMS + 1).map(|error| problem(text, table, error)).collect()
}

/// Returns a problem if an error shows that a list in an earlier line is not closed: a line in the list begins like a key.
fn open_list(text: &str, error: &toml::de::Error) -> Option<Problem> {
    let at = error.span().filter(|_| error.message().contains("between array elements"))?.start;
    let (before, after) = text.split_at_checked(at)?;
    let begins_line = before.trim_end_matches([' ', '\t']).ends_with('\n');
    let is_key = after.lines().next().is_some_and(begins_table_or_value);
    let open = before.rfind("= [").map(|at| at + 2).or_else(|| before.rfind("=[").map(|at| at + 1));
    let open = open.filter(|_| begins_line && is_key)?;
    Some(Problem::new(open..open + 1, "this list is not closed", "close the list with ]"))
}

/// Returns whether a line begins with a key and `=`, or is the header of a table.
fn begins_table_or_value(line: &str) -> bool {
    let is_word = |word: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        !word.is_empty() && word.chars().all(fits)
    };
    let header = line.trim_end().strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let header = header.map(|rest| rest.trim_start_matches('[').trim_end_matches(']'));
    header.is_some_and(is_word) || line.split_once('=').is_some_and(|(key, _)| is_word(key.trim_end()))
}

fn newlines(text: &str) -> usize {
    text.matches('\n').count()
}

/// Returns a problem for a line that is written in another format: a comment with `//`, a key of YAML, or quotation marks
/// of a word processor.
fn other_format(text: &str, error: &toml::de::Error) -> Option<Problem> {
    let at = error.span()?.start;
    let start = text.get(..at)?.rfind('\n').map_or(0, |newline| newline + 1);
    let whole = text.get(start..)?.lines().next()?;
    let line = whole.trim_start();
    let span = |from: usize, length: usize| start + from..start + from + length;
    let indent = whole.len() - line.len();
    if line.starts_with("//") {
        let message = "`//` does not begin a comment in TOML";
        return Some(Problem::new(span(indent, 2), message, "begin comments with #"));
    }
    let quote = at - start;
    if whole.get(quote..)?.starts_with(['\u{201c}', '\u{201d}', '\u{201e}', '\u{2018}', '\u{2019}']) {
        let length = whole[quote..].chars().next().map_or(1, char::len_utf8);
        let message = "this quotation mark does not quote a string in TOML";
        return Some(Problem::new(
            span(quote, length),
            message,
            "write straight quotation marks (\") in the whole file",
        ));
    }
    let begin = text.trim_start();
    if begin.starts_with('{') || begin.strip_prefix('[').is_some_and(|list| list.trim_start().starts_with('{')) {
        let message = "this looks like JSON; the config is TOML";
        return Some(Problem::new(span(indent, 1), message, "write `key = value` lines under `[table]` headers"));
    }
    let whole_line = || span(indent, whole.trim_end().len() - indent);
    if matches!(line.split_once(':'), Some(("version" | "mig-configs" | "flags" | "sharing", _))) {
        let has = |key: &str| text.lines().any(|line| line.trim_start().strip_prefix(key).is_some());
        let (message, hint) = if !has("mig-configs:") && (has("sharing:") || has("flags:")) {
            (
                "this looks like a config of NVIDIA's device plugin for Kubernetes",
                "write [[gpu]] above each rule, with mode = \"timeslice\" for `timeSlicing`, or mode = \"mps\" for `mps`",
            )
        } else {
            (
                "this looks like a file of nvidia-mig-parted",
                "convert one of its labels with `gpushctl mig import FILE -c LABEL`, which prints the rules",
            )
        };
        return Some(Problem::new(whole_line(), message, hint));
    }
    if line.starts_with("NodeName=") || line.starts_with("Name=gpu") || line.starts_with("AutoDetect=") {
        let hint = "write [[gpu]] rules; `gpushctl slurm gres-conf` prints the lines of gres.conf for them";
        return Some(Problem::new(whole_line(), "this looks like gres.conf of Slurm", hint));
    }
    if let Some(name) = line.trim_end().strip_prefix('[').and_then(|rest| rest.strip_suffix(']'))
        && let Some((kind, number)) = name.trim().split_once(' ')
        && kind.eq_ignore_ascii_case("gpu")
        && number.trim().bytes().all(|digit| digit.is_ascii_digit())
    {
        let hint = format!("write [[gpu]], and match = \"{}\" below it", number.trim());
        return Some(Problem::new(whole_line(), "the header of a rule contains no index", hint));
    }
    let unlisted = line.strip_prefix("- ").unwrap_or(line);
    let (key, value) = unlisted.split_once(':')?;
    let value = value.split_once(" #").map_or(value, |(value, _comment)| value);
    let is_key = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
    if !is_key || value.contains('=') {
        return None;
    }
    let example = match value.trim() {
        "" if matches!(key, "gpu" | "quota") => format!("[[{key}]] on a line of its own above each item"),
        "" => format!("[{key}] on a line of its own"),
        value => format!("`{key} = {}`", if value.parse::<i64>().is_ok() { value.to_owned() } else { quoted(value) }),
    };
    let message = "this looks like YAML; the config is TOML";
    Some(Problem::new(span(indent, whole.trim_end().len() - indent), message, format!("write {example}")))
}

/// Returns a value of YAML as a value of TOML.
fn quoted(value: &str) -> String {
    let is_ready = value.starts_with(['"', '\'', '[', '{']) || matches!(value, "true" | "false");
    if is_ready { value.to_owned() } else { format!("\"{}\"", value.replace('"', "")) }
}

/// Converts a TOML error. Replaces the parser's message if that message does not help to fix the
/// error.
fn problem(text: &str, table: &Spanned<DeTable<'_>>, error: &toml::de::Error) -> Problem {
    let end = text.len();
    let span = error.span().unwrap_or(end..end);
    let message = error.message().trim_end_matches('.').to_owned();
    if message.contains("duplicate key") {
        return duplicate(text, table, span);
    }
    let written = text.get(span.clone()).unwrap_or_default();
    let bare = written.trim();
    let is_value = text.get(..span.start).is_some_and(|before| before.trim_end().ends_with(['=', '[', ',']));
    let hint = if let Some(hint) = of_line(text, span.start) {
        hint
    } else if message.contains("between array elements") {
        "put a comma between the entries of the list".to_owned()
    } else if is_value && bare.is_empty() {
        "write a value after the `=`".to_owned()
    } else if is_value && ["yes", "no", "on", "off", "true", "false"].iter().any(|word| bare.eq_ignore_ascii_case(word))
    {
        "write true or false".to_owned()
    } else if is_value && bare.starts_with(|c: char| c.is_alphabetic() || c == '/') && !bare.contains(['"', '\n']) {
        format!("write \"{bare}\" with quotes")
    } else if message.contains("unclosed") || message.contains("invalid basic string") {
        "close the string or list: each \" and [ needs a matching end".to_owned()
    } else {
        "write TOML: `key = value` lines under `[table]` headers, as https://toml.io describes".to_owned()
    };
    Problem::new(span, format!("this is not TOML: {message}"), hint)
}

/// Returns the correction of a line `key = value` with a common mistake: a percent sign, a range without quotes, or a comma
/// at the end.
fn of_line(text: &str, at: usize) -> Option<String> {
    let start = text.get(..at)?.rfind('\n').map_or(0, |newline| newline + 1);
    let line = text.get(start..)?.lines().next()?;
    let line = line.split_once(" #").map_or(line, |(line, _comment)| line);
    let (key, value) = line.split_once('=')?;
    let (key, value) = (key.trim(), value.trim());
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    if let Some(number) = value.strip_suffix('%').map(str::trim_end).filter(|number| is_number(number)) {
        return Some(format!("write {key} = {number}"));
    }
    let inner = value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(value).trim();
    if let Some((first, last)) = inner.split_once('-')
        && is_number(first.trim_end())
        && is_number(last.trim_start())
        && matches!(key, "match" | "gpus")
    {
        return Some(format!("write {key} = \"{}-{}\"", first.trim_end(), last.trim_start()));
    }
    let before = value.strip_suffix(',')?.trim_end();
    let is_whole = before.starts_with('"') && before.ends_with('"') && before.matches('"').count() == 2
        || is_number(before)
        || matches!(before, "true" | "false");
    is_whole.then(|| format!("remove the comma at the end of the line: {key} = {before}"))
}

/// Returns the problem for a key or table that the file contains twice.
fn duplicate(text: &str, table: &Spanned<DeTable<'_>>, span: Range<usize>) -> Problem {
    let name = text.get(span.clone()).unwrap_or_default().trim_matches(['"', '\'']).to_owned();
    let before = text.get(..span.start).unwrap_or_default();
    let begins = |prefix: &str| before.lines().any(|line| line.trim_start().starts_with(prefix));
    let inner = before.lines().map(str::trim).find(|line| line.starts_with(&format!("[{name}.")));
    if let Some(inner) = inner.filter(|_| before.ends_with("[[") && !begins(&format!("[[{name}]]"))) {
        let message = format!("{inner} is above the [[{name}]] that it belongs to");
        let at = before.find(inner).unwrap_or_default();
        return Problem::new(at..at + inner.len(), message, format!("put {inner} below [[{name}]]"));
    }
    let hint = if !before.ends_with('[') {
        "keep one of the two".to_owned()
    } else if before.ends_with("[[") || begins(&format!("[[{name}]]")) {
        format!("write [[{name}]] with two brackets in both places")
    } else {
        format!("move the keys below this header to the first [{name}], and remove this header")
    };
    let problem = Problem::new(span.clone(), format!("{} is repeated here", Quoted(&name)), hint);
    let mut first = None;
    earlier(table.get_ref(), &name, span.start, &mut first);
    match first.or_else(|| earlier_header(text, &name, span.start)) {
        Some(first) => problem.also(first, "the first is"),
        None => problem,
    }
}

/// Finds the last header `[name]` before the position `before`. Searches the text, because the TOML
/// parser keeps only one position if two tables have the same name.
fn earlier_header(text: &str, name: &str, before: usize) -> Option<Range<usize>> {
    let header = format!("[{name}]");
    let mut at = 0;
    let mut found = None;
    for line in text.split_inclusive('\n') {
        let indent = line.len() - line.trim_start().len();
        if at + indent + 1 < before && line.trim_start().starts_with(&header) {
            found = Some(at + indent + 1..at + indent + 1 + name.len());
        }
        at += line.len();
    }
    found
}

/// Finds the last key with this name before the position `before`.
fn earlier(table: &DeTable<'_>, name: &str, before: usize, found: &mut Option<Range<usize>>) {
    for (key, value) in table {
        let span = key.span();
        if key.get_ref() == name && span.start < before && found.as_ref().is_none_or(|f| f.start < span.start) {
            *found = Some(span);
        }
        match value.get_ref() {
            DeValue::Table(inner) => earlier(inner, name, before, found),
            DeValue::Array(items) => {
                for item in items {
                    if let DeValue::Table(inner) = item.get_ref() {
                        earlier(inner, name, before, found);
                    }
                }
            }
            DeValue::String(_)
            | DeValue::Integer(_)
            | DeValue::Float(_)
            | DeValue::Boolean(_)
            | DeValue::Datetime(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn errors(text: &str) -> String {
        Config::parse(text, "config.toml").unwrap_err().to_string()
    }

    #[test]
    fn file_in_another_format_has_one_error_that_says_what_to_write() {
        for (text, place, hint) in [
            ("// the lab\n// by Ann\n[[gpu]]\nmatch = \"0\"\n", "config.toml:1:1:", "begin comments with #"),
            (
                "gpu:\n  - match: all\n    mode: mps\n",
                "config.toml:1:1:",
                "write [[gpu]] on a line of its own above each item",
            ),
            ("mps:\n  health: 5s\n", "config.toml:1:1:", "write [mps] on a line of its own"),
            ("version: v1\nmig-configs:\n  a: []\n", "config.toml:1:1:", "gpushctl mig import"),
            ("{\n  \"gpu\": []\n}\n", "config.toml:1:1:", "`key = value` lines"),
            (
                "[[gpu]]\nlayout = [\"3g.40gb*2\"\nmatch = \"0\"\nmode = \"mig\"\n",
                "config.toml:2:10:",
                "close the list with ]",
            ),
            ("[[gpu]]\nmatch: all\nmode: mps\n", "config.toml:2:1:", "write `match = \"all\"`"),
            ("[[gpu]]\n- replicas: 4\n", "config.toml:2:1:", "write `replicas = 4`"),
            (
                "[[gpu]]\nmatch = \u{201c}0\u{201d}\nmode = \u{201c}mps\u{201d}\n",
                "config.toml:2:9:",
                "straight quotation marks",
            ),
        ] {
            let shown = errors(text);
            assert_eq!(shown.matches("config.toml:").count(), 1, "{shown}");
            assert!(shown.starts_with(place) && shown.contains(hint), "{shown}");
        }
    }

    #[test]
    fn line_with_several_errors_is_reported_once() {
        let shown = errors("match mode\nauto_reconcile true\n");
        assert_eq!(shown.matches("config.toml:").count(), 2, "{shown}");
    }

    #[test]
    fn list_with_a_missing_comma_is_not_called_open() {
        let shown = errors("[processes]\nallow = [\n  { uid = 1 }\n  { uid = 2 },\n]\n");
        assert!(!shown.contains("not closed"), "{shown}");
        let shown = errors("auto_reconcile = yes # the lab\u{2019}s host\n");
        assert!(shown.contains("write true or false"), "{shown}");
    }

    /// A colon in a string or a time is no YAML.
    #[test]
    fn error_beside_a_colon_keeps_the_message_of_toml() {
        for text in ["[[gpu]]\nmatch = 07:00.0\n", "[[gpu]]\nlayout = \"1g.10gb:mps\nmode = \"mig\"\n"] {
            assert!(errors(text).contains("this is not TOML"), "{}", errors(text));
        }
    }

    /// Fault: the hint for each of these files lost a setting, or had no correction.
    #[test]
    fn common_syntax_mistakes_have_their_correction() {
        for (text, hint) in [
            ("[defaults]\nlease = \"required\"\n[defaults]\nat_end = \"end\"\n", "to the first [defaults], and remove"),
            ("[[quota]]\nleases = 1\n[quota]\neverybody = true\n", "write [[quota]] with two brackets in both places"),
            ("[gpu.mps]\npercentage = 25\n[[gpu]]\nmatch = \"0\"\nmode = \"mps\"\n", "put [gpu.mps] below [[gpu]]"),
            ("[gpu.mps]\npercentage = 25\n", "put [gpu.mps] below the [[gpu]] rule"),
            ("[mps]\npercentage = 25\n", "[gpu.mps] below the [[gpu]] rule that it belongs to"),
            ("[gpu.0]\nmode = \"mps\"\n", "write [[gpu]] in place of [gpu.0], and match = \"0\""),
            ("[gpu 0]\nmode = \"mps\"\n", "write [[gpu]], and match = \"0\" below it"),
            ("[[gpu]]\nmatch = [0-3]\nmode = \"mps\"\n", "write match = \"0-3\""),
            ("[[gpu]]\nmatch = \"0\"\nmode = \"mps\",\n", "remove the comma at the end of the line: mode = \"mps\""),
            ("[[gpu]]\nmatch = \"0\"\nmode = \"mps\"\n[gpu.mps]\npercentage = 50%\n", "write percentage = 50"),
            ("[[gpu]]\nmatch = [\"0\" \"1\"]\nmode = \"mps\"\n", "put a comma between the entries"),
            ("[{\"match\": \"0\"}]\n", "`key = value` lines"),
            ("NodeName=gpu01 Name=gpu File=/dev/nvidia0\n", "gpushctl slurm gres-conf"),
            ("version: v1\nsharing:\n  timeSlicing:\n    resources: []\n", "mode = \"timeslice\" for `timeSlicing`"),
            ("version: v1\nmig-configs:\n  a: []\n", "gpushctl mig import FILE -c LABEL"),
            ("log_level = \"debug\"\n", "write [log] on a line of its own, and `level` below it"),
            ("[leases]\nmax_duration = \"4h\"\n", "write [[quota]] with everybody = true, and `longest` below it"),
            ("[[rule]]\nmatch = \"0\"\n", "write [[gpu]] above each rule"),
            ("gpus = [0]\n", "write [[gpu]] above each rule"),
        ] {
            let shown = errors(text);
            assert!(shown.contains(hint), "{text}\n{shown}");
        }
    }
}
