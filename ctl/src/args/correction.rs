//! Finds the command that the user meant, for a command line that clap refuses. Only a command line that gpushctl
//! accepts is suggested.

use std::ffi::OsString;

use clap::{CommandFactory as _, Parser as _, error::ErrorKind};
use gpush_core::duration;
use jiff::Zoned;

use super::{
    Cli, Command, Lease,
    foreign_values::time_until,
    habits,
    phrases::{self, Meant},
    request_line, spelling, synonyms,
    words::{self, is_index_list, joined_durations},
};

/// Returns the command line that the user probably meant. `typed` are the words without `gpushctl`.
pub(crate) fn correction(typed: &[&str], is_root: bool) -> Option<Meant> {
    let words = typed.to_vec();
    let joined = joined_durations(&words).unwrap_or_default();
    let words = if joined.is_empty() { words } else { joined.iter().map(String::as_str).collect() };
    if let Some(("help", rest)) = words.split_first().map(|(first, rest)| (*first, rest)) {
        let page = spelling::corrected(rest)?;
        return Some(Meant::Gpushctl(page.into_iter().chain(["--help".to_owned()]).collect()));
    }
    if let Some(page) = help_page(&words).or_else(|| of_program(&words)) {
        return Some(Meant::Gpushctl(page));
    }
    let line = Line::of(words);
    // `docker run --gpus 1 IMAGE` has the words of a request, so it does not lead to the phrase about docker.
    if let Some(run) = line
        .name(0)
        .filter(|first| matches!(*first, "docker" | "podman"))
        .and_then(|_| request(&line).into_iter().find(|words| accepted(words)))
    {
        return Some(Meant::Gpushctl(run));
    }
    let sources = [
        unchanged,
        positive_time,
        request,
        layout_of_several_words,
        all_instances,
        number_of_xid,
        swapped,
        hyphenated,
        without_noun,
        synonym,
        gpu_as_argument,
        option,
    ];
    let mut of_phrases = Vec::new();
    for meant in line.meant() {
        match meant {
            Meant::Gpushctl(words) if accepted(&words) => {
                of_phrases.push(words);
                break;
            }
            // A command of another program is the best hint if no command of gpushctl came before it.
            Meant::Other(command) => return Some(Meant::Other(command)),
            Meant::Gpushctl(words) => of_phrases.push(words),
        }
    }
    // A phrase may lead to a request in the form of another tool: `create lease 1g.10gb`.
    let requests = of_phrases.iter().flat_map(|words| request(&Line::of(words.iter().map(String::as_str).collect())));
    let mut found: Vec<Vec<String>> = of_phrases.iter().cloned().chain(requests).collect();
    found.extend(sources.iter().flat_map(|source| source(&line)));
    // An option of the corrected command may also have another name.
    let with_options = found.iter().flat_map(|words| {
        let line = Line::of(words.iter().map(String::as_str).collect());
        option(&line).into_iter().chain(gpu_as_argument(&line))
    });
    let help = vec!["--help".to_owned()];
    let found = found.iter().cloned().chain(with_options).find(|words| accepted(words)).or_else(|| {
        of_phrases
            .into_iter()
            .chain(synonym(&line))
            .chain(swapped(&line))
            .chain(without_noun(&line))
            // The help of the typed command is the last resort: `missing` may know the argument.
            .find(|words| lacks_arguments(words) && *words != line.words)
            .map(|words| [words, help].concat())
            .or_else(|| spelling::corrected(&line.words).filter(|words| accepted(words)))
    })?;
    Some(Meant::Gpushctl(with_reason(with_end(found, typed), typed, is_root)))
}

/// Replaces the example `--for 2h` by the time until the end that the user typed: `--until 18:00`.
fn with_end(mut words: Vec<String>, typed: &[&str]) -> Vec<String> {
    let value = |at: usize| match typed[at].split_once('=') {
        Some((_, value)) => Some(value),
        None => typed.get(at + 1).copied(),
    };
    let end = typed.iter().position(|word| word.split('=').next() == Some("--until")).and_then(value);
    let left = end.and_then(|end| time_until(end, &Zoned::now()));
    let example = words.windows(2).position(|two| two == ["--for", "2h"]);
    if let (Some(left), Some(at)) = (left, example) {
        words[at + 1] = left;
    }
    words
}

/// Adds a reason to the end of leases that root revokes: without a reason, only root's own leases end.
fn with_reason(mut words: Vec<String>, typed: &[&str], is_root: bool) -> Vec<String> {
    let ends = words.windows(2).any(|two| two[0] == "lease" && two[1] == "end");
    let is_complete = words.iter().any(|word| word == "--help" || word.starts_with("--reason"));
    if is_root && ends && !is_complete && ["revoke", "kick", "evict"].iter().any(|verb| typed.contains(verb)) {
        words.extend(["--reason", "TEXT"].map(str::to_owned));
    }
    words
}

/// `run help` means `run --help`, and `explain run` too.
fn help_page(words: &[&str]) -> Option<Vec<String>> {
    if let ["explain", command @ ..] = words
        && !command.is_empty()
        && is_path(command)
    {
        return Some(command.iter().copied().chain(["--help"]).map(str::to_owned).collect());
    }
    let (last, command) = words.split_last()?;
    let page: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
    let is_command = *last == "help" && !command.is_empty() && !command.iter().any(|word| word.starts_with('-'));
    (is_command && is_path(command)).then(|| [page, vec!["--help".to_owned()]].concat())
}

/// Returns whether words are the names of a command and of its groups.
fn is_path(words: &[&str]) -> bool {
    let cli = Cli::command();
    words.iter().try_fold(&cli, |command, word| command.find_subcommand(word)).is_some()
}

/// `python x.py` and `./x` mean `run -- python x.py` and `run -- ./x`.
fn of_program(words: &[&str]) -> Option<Vec<String>> {
    let first = words.first().filter(|word| words::is_program(word))?;
    let interpreter = words::interpreter(first).filter(|_| !first.contains('/'));
    let command = interpreter.into_iter().chain(words.iter().copied()).map(str::to_owned);
    Some(["run", "--"].into_iter().map(str::to_owned).chain(command).collect())
}

/// Returns whether gpushctl accepts a command line, and the request in it.
fn accepted(words: &[String]) -> bool {
    let all: Vec<OsString> = ["gpushctl".into()].into_iter().chain(words.iter().map(OsString::from)).collect();
    habits::error(&all).is_none() && words::can_be_parsed(words) && has_valid_request(words)
}

/// Returns whether the request of a command line is valid. A placeholder for a profile counts as one.
fn has_valid_request(words: &[String]) -> bool {
    let filled = words.iter().map(|word| if word == words::PROFILE { "1g.10gb" } else { word });
    let Ok(cli) = Cli::try_parse_from(["gpushctl"].into_iter().chain(filled)) else { return true };
    match cli.command {
        Command::Run(args) => args.request.request().is_ok(),
        Command::Lease(Lease::Request { request, .. } | Lease::Env { request, .. }) => request.request().is_ok(),
        _ => true,
    }
}

/// Returns whether only the arguments of a command are missing: `mig destroy` means `mig remove`.
fn lacks_arguments(words: &Vec<String>) -> bool {
    let parsed = Cli::try_parse_from([&["gpushctl".to_owned()], words.as_slice()].concat());
    parsed.is_err_and(|error| error.kind() == ErrorKind::MissingRequiredArgument)
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

    /// Returns the words before the command, and those from the command on.
    fn parts(&self) -> (&[&'w str], &[&'w str]) {
        self.words.split_at(self.named.first().copied().unwrap_or(0))
    }

    /// Returns the command lines that `phrases` has for the line, the best first.
    fn meant(&self) -> Vec<Meant> {
        let (before, after) = self.parts();
        let with_options = |words: Vec<String>| before.iter().map(|word| (*word).to_owned()).chain(words).collect();
        let meant = phrases::meant(after).into_iter();
        meant
            .map(|meant| match meant {
                Meant::Gpushctl(words) => Meant::Gpushctl(with_options(words)),
                Meant::Other(command) => Meant::Other(command),
            })
            .collect()
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

/// Returns gpushctl's verbs for a typed verb: its synonym, and the same word.
fn verbs(typed: &str) -> impl Iterator<Item = &str> {
    let synonym = synonyms::verb(typed);
    [synonym].into_iter().chain((synonym != typed).then_some(typed))
}

/// `reset 3` means `gpu reset 3`. An id among the arguments says which group is meant. A lease is ended only by its id,
/// and MIG mode is changed only by a command that names MIG.
fn without_noun(line: &Line<'_>) -> Vec<Vec<String>> {
    let Some(first) = line.name(0) else { return Vec::new() };
    let mut arguments = (1..line.named.len()).filter_map(|n| line.name(n));
    let names_group = |word: &str| NOUNS.iter().any(|noun| word == *noun || word.strip_suffix('s') == Some(*noun));
    if line.name(1).is_some_and(names_group) {
        return Vec::new();
    }
    let has_operation = arguments.any(|word| word.strip_prefix("op-").is_some_and(words::is_number));
    let nouns = has_operation.then_some("operation").into_iter().chain(NOUNS);
    let names_profile = line.words.iter().any(|word| words::is_profile(word));
    let is_safe = |noun: &str, verb: &str| match (noun, verb) {
        ("lease", "end") | ("mig", "on" | "off") => false,
        ("mig", "add" | "remove" | "rm") => names_profile,
        ("operation", "cancel") => has_operation,
        // The name of a GPU or of a MIG device has a digit.
        ("mps", "start" | "stop" | "restart") => {
            line.name(1).is_none_or(|target| target.bytes().any(|byte| byte.is_ascii_digit()))
        }
        _ => true,
    };
    let pairs = nouns.flat_map(|noun| verbs(first).map(move |verb| (noun, verb)));
    let pairs = pairs.filter(|(noun, verb)| has_verb(noun, verb) && is_safe(noun, verb));
    pairs.filter_map(|(noun, verb)| line.replaced(0, 0, &[noun, verb])).collect()
}

/// `gpu-reset 4` means `gpu reset 4`.
fn hyphenated(line: &Line<'_>) -> Vec<Vec<String>> {
    let Some((noun, verb)) = line.name(0).and_then(|first| first.split_once(['-', '_', ':'])) else {
        return Vec::new();
    };
    let verbs = verbs(verb).filter(|verb| has_verb(noun, verb));
    verbs.filter_map(|verb| line.replaced(0, 0, &[noun, verb])).collect()
}

/// `list gpus` means `gpu list`.
fn swapped(line: &Line<'_>) -> Vec<Vec<String>> {
    let (Some(verb), Some(noun)) = (line.name(0), line.name(1)) else { return Vec::new() };
    let nouns = [noun.strip_suffix('s').unwrap_or(noun), noun];
    let pairs = nouns.into_iter().flat_map(|noun| verbs(verb).map(move |verb| (noun, verb)));
    let pairs = pairs.filter(|(noun, verb)| has_verb(noun, verb));
    pairs.filter_map(|(noun, verb)| line.replaced(0, 1, &[noun, verb])).collect()
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

/// `mig apply 3g.40gb 0` means `mig apply 3g.40gb -g 0`.
fn gpu_as_argument(line: &Line<'_>) -> Vec<Vec<String>> {
    if line.name(0) != Some("mig") && line.name(0) != Some("lease") {
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

/// Returns the words themselves, which differ from the typed ones if a duration was joined.
fn unchanged(line: &Line<'_>) -> Vec<Vec<String>> {
    vec![line.words.iter().map(|word| (*word).to_owned()).collect()]
}

/// `events --since -1h` means `events --since 1h`.
fn positive_time(line: &Line<'_>) -> Vec<Vec<String>> {
    let value = |at: usize| line.words.get(at + 1)?.strip_prefix('-').filter(|value| duration::is_duration(value));
    let is_since = |at: &usize| matches!(line.words[*at], "--since" | "--for" | "--end-after");
    let found = (0..line.words.len()).filter(is_since).find_map(|at| Some((at + 1, value(at)?)));
    let replaced = found.map(|(at, value)| {
        line.words.iter().enumerate().map(|(one, word)| if one == at { value } else { word }.to_owned()).collect()
    });
    replaced.into_iter().collect()
}

/// `srun --gres=gpu:2 ./x` means `run --whole --count 2 -- ./x`.
fn request(line: &Line<'_>) -> Vec<Vec<String>> {
    let (before, after) = line.parts();
    let found = request_line::rewritten(after);
    found.into_iter().map(|words| before.iter().map(|word| (*word).to_owned()).chain(words).collect()).collect()
}

/// `mig destroy 0` and `mig remove -g 0 --all` mean `mig apply none -g 0`: they name a GPU, not an instance.
fn all_instances(line: &Line<'_>) -> Vec<Vec<String>> {
    let is_removal = |verb: &str| synonyms::verb(verb) == "remove" || verb == "clear" || verb == "reset";
    if line.name(0) != Some("mig") || !line.name(1).is_some_and(is_removal) {
        return Vec::new();
    }
    let without_all = Line::of(line.words.iter().filter(|word| **word != "--all").copied().collect());
    let names_gpu = line.words.iter().any(|word| matches!(*word, "-g" | "-i" | "--gpu"));
    match without_all.name(2) {
        Some(gpus) if is_index_list(gpus) && without_all.named.len() == 3 && !names_gpu => {
            without_all.replaced(1, 2, &["apply", "none", "-g", gpus]).into_iter().collect()
        }
        Some(gpus) if is_index_list(gpus) && without_all.named.len() == 3 => {
            without_all.replaced(1, 1, &["apply", "none"]).into_iter().collect()
        }
        None if line.words.contains(&"--all") => {
            without_all.replaced(1, 1, &["apply", "none", "-g", "all"]).into_iter().collect()
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

/// `gpu list --device 0` means `gpu list --gpu 0`, and `-o yaml` means `-o json`.
fn option(line: &Line<'_>) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    if let Some(at) = line.words.iter().position(|word| matches!(*word, "yaml" | "yml")).filter(|at| *at > 0) {
        let mut words: Vec<String> = line.words.iter().map(|word| (*word).to_owned()).collect();
        words[at] = "json".to_owned();
        found.push(words);
    }
    for (at, word) in line.words.iter().enumerate().take_while(|(_, word)| **word != "--") {
        let (name, value) = word.split_once('=').map_or((*word, None), |(name, value)| (name, Some(value)));
        let Some((_, meant)) = synonyms::OPTIONS.iter().find(|(typed, _)| *typed == name) else { continue };
        for new in *meant {
            let mut words: Vec<String> = line.words.iter().map(|word| (*word).to_owned()).collect();
            match (new.is_empty(), value) {
                // A value shows that the user wants the option.
                (true, Some(_)) => continue,
                (true, None) => drop(words.remove(at)),
                (false, Some(value)) if !new.starts_with("--") => {
                    words.splice(at..=at, [(*new).to_owned(), value.to_owned()]);
                }
                (false, Some(value)) => words[at] = format!("{new}={value}"),
                (false, None) => words[at] = (*new).to_owned(),
            }
            found.push(words);
        }
    }
    found
}

#[cfg(test)]
mod tests;
