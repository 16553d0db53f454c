//! Finds the command that the user meant, for a command line that clap refuses. Only a command line that gpushctl
//! accepts is suggested.

use std::ffi::OsString;

use clap::{CommandFactory as _, Parser as _, error::ErrorKind};
use gpush_core::duration;

use super::{Cli, default_verb, synonyms, typed};

/// Returns the command line that the user probably meant.
pub(crate) fn correction(words: &[OsString]) -> Option<String> {
    let words: Vec<&str> = words.iter().skip(1).map(|word| word.to_str()).collect::<Option<_>>()?;
    let line = Line::of(words);
    let sources = [
        layout_of_several_words,
        duration_of_two_words,
        number_of_gpus,
        all_instances,
        number_of_xid,
        swapped,
        without_noun,
        synonym,
        gpu_as_argument,
        without_dashes,
        share_as_argument,
        option,
    ];
    let help = vec!["--help".to_owned()];
    let accepted = |words: &Vec<String>| {
        let words = ["gpushctl".into()].into_iter().chain(words.iter().map(OsString::from)).collect();
        Cli::try_parse_from(default_verb::insert(words)).is_ok()
    };
    let found: Vec<Vec<String>> = sources.iter().flat_map(|source| source(&line)).collect();
    // An option of the corrected command may also have another name.
    let with_options = found.iter().flat_map(|words| option(&Line::of(words.iter().map(String::as_str).collect())));
    let found = found
        .iter()
        .cloned()
        .chain(with_options)
        .find(accepted)
        .or_else(|| incomplete(&line).map(|words| [words, help].concat()))?;
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
const NOUNS: [&str; 7] = ["gpu", "mig", "lease", "mps", "operation", "config", "maintenance"];

/// Returns whether a group has a subcommand of this name.
fn has_verb(noun: &str, verb: &str) -> bool {
    let cli = Cli::command();
    cli.find_subcommand(noun).is_some_and(|noun| noun.find_subcommand(verb).is_some())
}

/// `reset 3` means `gpu reset 3`. An id among the arguments says which group is meant.
fn without_noun(line: &Line<'_>) -> Vec<Vec<String>> {
    let Some(first) = line.name(0) else { return Vec::new() };
    let verb = synonyms::verb(first);
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
    let nouns = nouns.into_iter().filter(|noun| has_verb(noun, synonyms::verb(verb)));
    nouns.filter_map(|noun| line.replaced(0, 1, &[noun, synonyms::verb(verb)])).collect()
}

/// Replaces a verb that the group does not have, and commands that gpushctl has under another name.
fn synonym(line: &Line<'_>) -> Vec<Vec<String>> {
    let (Some(first), second) = (line.name(0), line.name(1).unwrap_or_default()) else { return Vec::new() };
    let of_two = synonyms::of_words(first, second).iter().filter_map(|new| line.replaced(0, 1, new));
    let of_one = synonyms::of_word(first).iter().filter_map(|new| line.replaced(0, 0, new));
    let mut found: Vec<Vec<String>> = of_two.chain(of_one).collect();
    let verb = synonyms::verb(second);
    if verb != second {
        found.extend(line.replaced(0, 1, &[first, verb]));
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

/// `mig apply -g 0 3g.40gb 1g.10gb` means `mig apply 3g.40gb,1g.10gb -g 0`.
fn layout_of_several_words(line: &Line<'_>) -> Vec<Vec<String>> {
    if (line.name(0), line.name(1)) != (Some("mig"), Some("apply")) {
        return Vec::new();
    }
    let entries: Vec<usize> = line.named.iter().copied().filter(|at| line.words[*at].contains("g.")).collect();
    if entries.len() < 2 {
        return Vec::new();
    }
    let layout = entries.iter().map(|at| line.words[*at].trim_end_matches(',')).collect::<Vec<_>>().join(",");
    vec![line.moved(&entries, &[&layout])]
}

/// `run --whole --for 1 day -- x` means `run --whole --for 1d -- x`.
fn duration_of_two_words(line: &Line<'_>) -> Vec<Vec<String>> {
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let takes_duration = |word: &str| matches!(word, "--for" | "--timeout" | "--notice" | "--grace" | "--expires");
    let at = line.words.windows(3).position(|three| {
        takes_duration(three[0]) && is_number(three[1]) && duration::is_duration(&[three[1], three[2]].concat())
    });
    let Some(at) = at else { return Vec::new() };
    let unit = line.words[at + 2].chars().next().unwrap_or_default();
    let value = format!("{}{unit}", line.words[at + 1]);
    let words = line.words[..=at].iter().copied().chain([value.as_str()]).chain(line.words[at + 3..].iter().copied());
    vec![words.map(str::to_owned).collect()]
}

/// `run --gpus 2` means `run --whole --count 2`, as in other tools.
fn number_of_gpus(line: &Line<'_>) -> Vec<Vec<String>> {
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let option = |word: &str| matches!(word, "--gpus" | "-G" | "--ngpus");
    let Some(at) = line.words.windows(2).position(|two| option(two[0]) && is_number(two[1])) else { return Vec::new() };
    let number = line.words[at + 1];
    let new: &[&str] = if number == "1" { &["--whole"] } else { &["--whole", "--count", number] };
    let words = line.words[..at].iter().chain(new).chain(&line.words[at + 2..]).map(|word| (*word).to_owned());
    let words: Vec<String> = words.collect();
    let with_dashes = |words: &[String]| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        without_dashes(&Line::of(words))
    };
    [vec![words.clone()], with_dashes(&words)].concat()
}

/// `mig destroy 0` means `mig apply none -g 0`: it names a GPU, not an instance.
fn all_instances(line: &Line<'_>) -> Vec<Vec<String>> {
    let is_removal = |verb: &str| synonyms::verb(verb) == "remove" || verb == "clear" || verb == "reset";
    match (line.name(0), line.name(1), line.name(2)) {
        (Some("mig"), Some(verb), Some(gpus)) if is_removal(verb) && is_index_list(gpus) && line.named.len() == 3 => {
            line.replaced(1, 2, &["apply", "none", "-g", gpus]).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

/// `explain xid 79` means `explain xid-79`.
fn number_of_xid(line: &Line<'_>) -> Vec<Vec<String>> {
    match (line.name(0), line.name(1), line.name(2)) {
        (Some("explain"), Some(xid), Some(number)) if xid.eq_ignore_ascii_case("xid") => {
            line.replaced(1, 2, &[&format!("xid-{number}")]).into_iter().collect()
        }
        _ => Vec::new(),
    }
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

fn option(line: &Line<'_>) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, word) in line.words.iter().enumerate() {
        let (name, value) = word.split_once('=').map_or((*word, None), |(name, value)| (name, Some(value)));
        let Some((_, meant)) = synonyms::OPTIONS.iter().find(|(typed, _)| *typed == name) else { continue };
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
            ("release L17", "lease end L17"),
            ("cancel op-3", "operation cancel op-3"),
            ("reload", "config reload"),
            ("overrides clear 0", "config overrides clear 0"),
            ("revoke L17 --reason x", "lease end L17 --reason x"),
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
            ("lease release L17", "lease end L17"),
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

    /// The guesses of a trial with new users, for which earlier versions had no hint or a wrong one.
    #[test]
    fn guesses_of_new_users_lead_to_the_command_that_they_meant() {
        assert_corrected(&[
            ("mig apply -g 0 3g.40gb 1g.10gb", "mig apply -g 0 3g.40gb,1g.10gb"),
            ("run --whole --for 1 day -- ./x", "run --whole --for 1d -- ./x"),
            ("mig destroy 0", "mig apply none -g 0"),
            ("lease get", "lease show"),
            ("lease get L17", "lease show L17"),
            ("run --gpus 1 -- ./x", "run --whole -- ./x"),
            ("run --gpus 2 python x.py", "run --whole --count 2 -- python x.py"),
            ("run --exclusive -- ./x", "run --whole -- ./x"),
            ("who", "lease list"),
            ("users", "lease list"),
            ("queue", "lease list"),
            ("history", "lease list --ended"),
            ("usage", "lease list --ended"),
            ("free", "mig list --free"),
            ("events --tail", "events --follow"),
            ("process list", "ps"),
            ("process list --unleased", "ps --unleased"),
            ("mig plan 3g.40gb -g 0", "mig apply --dry-run 3g.40gb -g 0"),
            ("mig assert", "mig apply --check"),
            ("mps drain 0", "mps stop --wait 0"),
            ("lease revoke L17 --reason x --end", "lease end L17 --reason x --kill"),
            ("maintenance status", "status"),
            ("explain xid 79", "explain xid-79"),
            ("timeslice show 0", "gpu show 0"),
        ]);
    }

    #[test]
    fn misplaced_arguments_are_moved() {
        assert_corrected(&[
            ("mig apply 3g.40gb 0", "mig apply 3g.40gb -g 0"),
            ("mig apply --dry-run 0 3g.40gb", "mig apply --dry-run 3g.40gb -g 0"),
            ("mig apply 3g.40gb 0 1", "mig apply 3g.40gb -g 0,1"),
            ("run python train.py", "run -- python train.py"),
            ("run --mps 25 python -u x", "run --mps 25 -- python -u x"),
            ("lease request 1g.10gb --for 2h", "lease request --mig 1g.10gb --for 2h"),
            ("lease request mps=25", "lease request --request mps=25"),
            ("lease request --whole --device 0", "lease request --whole --gpu 0"),
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
