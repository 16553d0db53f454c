//! Finds the command that the user meant, for a command line that clap refuses. Only a command line that gpushctl
//! accepts is suggested.

use std::ffi::OsString;

use clap::{CommandFactory as _, Parser as _, error::ErrorKind};

use super::{Cli, typed};

/// Returns the command line that the user probably meant.
pub(crate) fn correction(words: &[OsString]) -> Option<String> {
    let words: Vec<&str> = words.iter().skip(1).map(|word| word.to_str()).collect::<Option<_>>()?;
    let line = Line::of(words);
    let sources = [swapped, without_noun, synonym, gpu_as_argument, without_dashes, share_as_argument, option];
    let help = vec!["--help".to_owned()];
    let accepted =
        |words: &Vec<String>| Cli::try_parse_from([&["gpushctl".to_owned()], words.as_slice()].concat()).is_ok();
    let mut found = sources.iter().flat_map(|source| source(&line));
    let found = found.find(accepted).or_else(|| incomplete(&line).map(|words| [words, help].concat()))?;
    typed::command_line(["gpushctl"].into_iter().chain(found.iter().map(String::as_str)))
}

/// Returns the command that the user meant, if its arguments are missing: `mig destroy` means `mig remove`.
fn incomplete(line: &Line<'_>) -> Option<Vec<String>> {
    let lacks_arguments = |words: &Vec<String>| {
        let parsed = Cli::try_parse_from([&["gpushctl".to_owned()], words.as_slice()].concat());
        parsed.is_err_and(|error| error.kind() == ErrorKind::MissingRequiredArgument)
    };
    synonym(line).into_iter().find(lacks_arguments)
}

/// The words of a refused command line, without `gpushctl`.
struct Line<'w> {
    words: Vec<&'w str>,
    /// Positions of the words that are not options, before `--`.
    named: Vec<usize>,
}

impl<'w> Line<'w> {
    fn of(words: Vec<&'w str>) -> Self {
        let end = words.iter().position(|word| *word == "--").unwrap_or(words.len());
        let is_value = |at: usize| at > 0 && crate::WITH_VALUE.contains(&words[at - 1]);
        let named = (0..end).filter(|at| !words[*at].starts_with('-') && !is_value(*at)).collect();
        Self { words, named }
    }

    /// Returns the `n`th word that is not an option.
    fn name(&self, n: usize) -> Option<&'w str> {
        self.named.get(n).map(|at| self.words[*at])
    }

    /// Returns the command line in which `new` replaces the words from name `first` to name `last`, which must be next
    /// to each other.
    fn replaced(&self, first: usize, last: usize, new: &[&str]) -> Option<Vec<String>> {
        let (first, last) = (*self.named.get(first)?, *self.named.get(last)?);
        let words = self.words[..first].iter().chain(new).chain(&self.words[last + 1..]);
        Some(words.map(|word| (*word).to_owned()).collect())
    }

    /// Returns the command line without the word at a position, and with `new` at its end, but before `--`.
    fn moved(&self, at: &[usize], new: &[&str]) -> Vec<String> {
        let end = self.words.iter().position(|word| *word == "--").unwrap_or(self.words.len());
        let before = (0..end).filter(|one| !at.contains(one)).map(|one| self.words[one]);
        let words = before.chain(new.iter().copied()).chain(self.words[end..].iter().copied());
        words.map(str::to_owned).collect()
    }
}

/// Groups of commands, in the order in which they are tried for a verb without a group.
const NOUNS: [&str; 8] = ["gpu", "mig", "lease", "mps", "operation", "config", "maintenance", "process"];

/// Returns whether a group has a subcommand of this name.
fn has_verb(noun: &str, verb: &str) -> bool {
    let cli = Cli::command();
    cli.find_subcommand(noun).is_some_and(|noun| noun.find_subcommand(verb).is_some())
}

/// `reset 3` means `gpu reset 3`. An id among the arguments says which group is meant.
fn without_noun(line: &Line<'_>) -> Vec<Vec<String>> {
    let Some(first) = line.name(0) else { return Vec::new() };
    let verb = meant_verb(first);
    let is_id = |prefix: &str| {
        (1..line.named.len()).filter_map(|n| line.name(n)).any(|word| {
            word.strip_prefix(prefix).is_some_and(|id| !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit()))
        })
    };
    let by_id = [("lease", "L"), ("operation", "op-")].into_iter().filter(|(_, id)| is_id(id)).map(|(noun, _)| noun);
    let nouns = by_id.chain(NOUNS).filter(|noun| has_verb(noun, verb));
    nouns.filter_map(|noun| line.replaced(0, 0, &[noun, verb])).collect()
}

/// `list gpus` means `gpu list`.
fn swapped(line: &Line<'_>) -> Vec<Vec<String>> {
    let (Some(verb), Some(noun)) = (line.name(0), line.name(1)) else { return Vec::new() };
    let nouns = [noun.strip_suffix('s').unwrap_or(noun), noun];
    let nouns = nouns.into_iter().filter(|noun| has_verb(noun, meant_verb(verb)));
    nouns.filter_map(|noun| line.replaced(0, 1, &[noun, meant_verb(verb)])).collect()
}

/// Returns gpushctl's verb for a verb of another tool.
fn meant_verb(verb: &str) -> &str {
    match verb {
        "get" | "describe" | "info" | "details" => "show",
        "ls" | "status" => "list",
        "enable" => "on",
        "disable" => "off",
        "create" | "new" => "add",
        "delete" | "del" | "destroy" | "rm" => "remove",
        "validate" | "test" | "verify" => "check",
        "end" | "return" | "free" => "release",
        "extend" => "renew",
        "kill" | "abort" => "cancel",
        "limits" | "limit" => "set",
        other => other,
    }
}

/// Replaces a verb that the group does not have, and commands that gpushctl has under another name.
fn synonym(line: &Line<'_>) -> Vec<Vec<String>> {
    let (Some(first), second) = (line.name(0), line.name(1).unwrap_or_default()) else { return Vec::new() };
    let whole: &[&[&str]] = match (first, second) {
        ("top", _) => return line.replaced(0, 0, &["status", "--watch"]).into_iter().collect(),
        ("info" | "list" | "ls" | "smi", _) => return line.replaced(0, 0, &["status"]).into_iter().collect(),
        ("log" | "logs", "") => &[&["events"]],
        ("log" | "logs", _) => return line.replaced(0, 0, &["mps", "logs"]).into_iter().collect(),
        ("overrides" | "override", _) => {
            return line.replaced(0, 0, &["config", "overrides"]).into_iter().collect();
        }
        ("gpu" | "gpus", "status") => &[&["status"]],
        ("gpu" | "gpus", "release" | "free" | "enable" | "resume") => &[&["gpu", "uncordon"]],
        ("gpu" | "gpus", "disable") => &[&["gpu", "cordon"]],
        ("mig", "status" | "devices" | "instances") => &[&["mig", "list"]],
        ("mig", "set" | "layout" | "change") => &[&["mig", "apply"]],
        ("mig", "check" | "diff") => &[&["mig", "assert"]],
        ("mps", "status" | "daemons") => &[&["mps", "list"]],
        ("mps", "on" | "enable") => &[&["mps", "start"]],
        ("mps", "off" | "disable" | "kill" | "quit") => &[&["mps", "stop"]],
        ("lease" | "leases", "new" | "create" | "add" | "get" | "grant" | "acquire") => {
            &[&["lease", "request"], &["lease", "show"]]
        }
        ("lease" | "leases", "end" | "cancel" | "stop" | "delete" | "rm" | "remove" | "free" | "return") => {
            &[&["lease", "release"]]
        }
        ("lease" | "leases", "kill") => &[&["lease", "revoke"]],
        ("lease" | "leases", "status") => &[&["lease", "list"], &["lease", "show"]],
        ("op" | "ops" | "operation" | "operations", "status") => &[&["operation", "show"], &["operation", "list"]],
        ("maintenance", "on" | "start" | "begin" | "enable") => &[&["maintenance", "enter"]],
        ("maintenance", "off" | "stop" | "end" | "exit" | "disable") => &[&["maintenance", "leave"]],
        ("maintenance", "show" | "list") => &[&["maintenance", "status"]],
        ("config", "apply") => &[&["apply"]],
        ("config", "clear") => &[&["config", "overrides", "clear"]],
        ("config", "list" | "get" | "print") => &[&["config", "show"]],
        ("timeslice", "status") => &[&["timeslice", "list"]],
        _ => &[],
    };
    let last = if second.is_empty() { 0 } else { 1 };
    let mut found: Vec<Vec<String>> = whole.iter().filter_map(|new| line.replaced(0, last, new)).collect();
    let verb = meant_verb(second);
    if verb != second {
        found.extend(line.replaced(0, last, &[first, verb]));
    }
    found
}

/// Returns whether a word can only name GPUs: an index, a range, or a list of them.
pub(super) fn is_index_list(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_digit()) && word.bytes().all(|b| b.is_ascii_digit() || b == b'-' || b == b',')
}

/// `mig apply 3g.40gb 0` means `mig apply 3g.40gb -g 0`.
fn gpu_as_argument(line: &Line<'_>) -> Vec<Vec<String>> {
    if line.name(0) != Some("mig") && line.name(0) != Some("lease") && line.name(0) != Some("run") {
        return Vec::new();
    }
    let indexes: Vec<usize> = line.named.iter().skip(1).copied().filter(|at| is_index_list(line.words[*at])).collect();
    let last = indexes.last().map(|at| line.moved(&[*at], &["-g", line.words[*at]]));
    let joined = indexes.iter().map(|at| line.words[*at]).collect::<Vec<_>>().join(",");
    let all = (indexes.len() > 1).then(|| line.moved(&indexes, &["-g", &joined]));
    last.into_iter().chain(all).collect()
}

/// `run python train.py` means `run -- python train.py`.
fn without_dashes(line: &Line<'_>) -> Vec<Vec<String>> {
    if line.name(0) != Some("run") || line.words.contains(&"--") {
        return Vec::new();
    }
    let at = |position: usize| {
        let words = line.words[..position].iter().chain(&["--"]).chain(&line.words[position..]);
        words.map(|word| (*word).to_owned()).collect()
    };
    // A word after an option may be the value of the option, so try the other words first.
    let after_option = |position: &&usize| line.words[**position - 1].starts_with('-');
    let (values, others): (Vec<&usize>, Vec<&usize>) = line.named.iter().skip(1).partition(after_option);
    // A number after an option is the option's value, as in `--mps 25`.
    let values = values.into_iter().filter(|at| !line.words[**at].starts_with(|c: char| c.is_ascii_digit()));
    others.into_iter().chain(values).map(|position| at(*position)).collect()
}

/// `lease request 1g.10gb` means `lease request --mig 1g.10gb`.
fn share_as_argument(line: &Line<'_>) -> Vec<Vec<String>> {
    let first = match (line.name(0), line.name(1)) {
        (Some("lease" | "leases"), Some("request" | "env")) => 2,
        (Some("run"), _) => 1,
        _ => return Vec::new(),
    };
    let Some(at) = line.named.get(first).copied() else { return Vec::new() };
    let word = line.words[at];
    let new: &[&str] = match word {
        "mps" => &["--mps"],
        "whole" => &["--whole"],
        "timeslice" => &["--timeslice"],
        word if word.contains('=') => &["--request", word],
        word if word.contains("g.") => &["--mig", word],
        _ => return Vec::new(),
    };
    let words = line.words[..at].iter().chain(new).chain(&line.words[at + 1..]);
    vec![words.map(|word| (*word).to_owned()).collect()]
}

/// Options of other tools, each with the options of gpushctl that are tried instead; an empty text means that the
/// option is removed.
const OPTIONS: [(&str, &[&str]); 18] = [
    ("--id", &["--gpu"]),
    ("--gpus", &["--gpu", "--count"]),
    ("--device", &["--gpu"]),
    ("--devices", &["--gpu"]),
    ("--index", &["--gpu"]),
    ("--profile", &["--mig"]),
    ("--memory", &["--mem"]),
    ("--mem", &["--memory"]),
    ("--percent", &["--percentage", "--mps"]),
    ("--percentage", &["--mps"]),
    ("--time", &["--for", "--timeout", "--since"]),
    ("--duration", &["--for"]),
    ("--until", &["--expires"]),
    ("--number", &["--count"]),
    ("-n", &["--count"]),
    ("--format", &["--output"]),
    ("--all", &["", "all"]),
    ("--shell", &[""]),
];

fn option(line: &Line<'_>) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, word) in line.words.iter().enumerate() {
        let (name, value) = word.split_once('=').map_or((*word, None), |(name, value)| (name, Some(value)));
        let Some((_, meant)) = OPTIONS.iter().find(|(typed, _)| *typed == name) else { continue };
        for new in *meant {
            let mut words: Vec<String> = line.words.iter().map(|word| (*word).to_owned()).collect();
            match (new.is_empty(), value) {
                (true, _) => drop(words.remove(at)),
                (false, Some(value)) => words[at] = format!("{new}={value}"),
                (false, None) => words[at] = (*new).to_owned(),
            }
            found.push(words);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corrected(line: &str) -> Option<String> {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        assert!(Cli::try_parse_from(&words).is_err(), "`{line}` is a command");
        correction(&words)
    }

    /// Checks the correction of each command line: what was typed, and what was meant.
    fn assert_corrected(lines: &[(&str, &str)]) {
        for (typed, meant) in lines {
            assert_eq!(corrected(&format!("gpushctl {typed}")), Some(format!("gpushctl {meant}")), "{typed}");
        }
    }

    #[test]
    fn command_without_its_group_is_completed() {
        assert_corrected(&[
            ("reset 3", "gpu reset 3"),
            ("drain 0-1 --reason fan", "gpu drain 0-1 --reason fan"),
            ("undrain 3", "gpu undrain 3"),
            ("show 3", "gpu show 3"),
            ("show L17", "lease show L17"),
            ("show op-3", "operation show op-3"),
            ("release L17", "lease release L17"),
            ("cancel op-3", "operation cancel op-3"),
            ("reload", "config reload"),
            ("overrides clear 0", "config overrides clear 0"),
            ("plan 3g.40gb -g 0", "mig plan 3g.40gb -g 0"),
            ("list", "gpu list"),
            ("list gpus", "gpu list"),
            ("list leases", "lease list"),
            ("reset gpu 3", "gpu reset 3"),
            ("top", "status --watch"),
        ]);
    }

    #[test]
    fn verbs_of_other_tools_are_translated() {
        assert_corrected(&[
            ("mig enable 0", "mig on 0"),
            ("mig disable 0", "mig off 0"),
            ("mig create 1g.10gb -g 0", "mig add 1g.10gb -g 0"),
            ("mig destroy 1g.10gb -g 0", "mig remove 1g.10gb -g 0"),
            ("mig status", "mig list"),
            ("mps status", "mps list"),
            ("mps enable 4", "mps start 4"),
            ("lease create --whole", "lease request --whole"),
            ("lease end L17", "lease release L17"),
            ("lease extend L17 --for 2h", "lease renew L17 --for 2h"),
            ("maintenance start", "maintenance enter"),
            ("maintenance end", "maintenance leave"),
            ("config validate x.toml", "config check x.toml"),
            ("gpu status", "status"),
            ("gpu enable 3", "gpu uncordon 3"),
            ("gpu resume 3", "gpu uncordon 3"),
            ("gpu resume", "gpu uncordon --help"),
            ("mig destroy", "mig remove --help"),
        ]);
    }

    #[test]
    fn misplaced_arguments_are_moved() {
        assert_corrected(&[
            ("mig apply 3g.40gb 0", "mig apply 3g.40gb -g 0"),
            ("mig plan 0 3g.40gb", "mig plan 3g.40gb -g 0"),
            ("mig apply 3g.40gb 0 1", "mig apply 3g.40gb -g 0,1"),
            ("run python train.py", "run -- python train.py"),
            ("run --mps 25 python -u x", "run --mps 25 -- python -u x"),
            ("lease request 1g.10gb --for 2h", "lease request --mig 1g.10gb --for 2h"),
            ("lease request mps=25", "lease request --request mps=25"),
            ("lease request --whole --gpus 0", "lease request --whole --gpu 0"),
            ("lease request --profile 1g.10gb", "lease request --mig 1g.10gb"),
            ("mps set 4 --percent 30", "mps set 4 --percentage 30"),
            ("gpu list --all", "gpu list"),
            ("mig off --all", "mig off all"),
            ("completions --shell bash", "completions bash"),
        ]);
    }

    #[test]
    fn nothing_is_suggested_without_a_command_that_parses() {
        for typed in ["bogus", "run --mps 25", "mps start", "mig apply 1g.10gb x y", "gpu drain", "lease renew L17"] {
            assert_eq!(corrected(&format!("gpushctl {typed}")), None, "{typed}");
        }
    }
}
