//! Finds the command that the user meant, for a command line that clap refuses. Only a command line that gpushctl
//! accepts is suggested.

use std::ffi::OsString;

use clap::{CommandFactory as _, Parser as _, error::ErrorKind};

use super::{
    Cli, default_verb, habits,
    phrases::{self, Meant, joined_duration},
    request_line, spelling, synonyms, typed,
};

/// Returns the command line that the user probably meant.
pub(crate) fn correction(words: &[OsString]) -> Option<String> {
    let words: Vec<&str> = words.iter().skip(1).map(|word| word.to_str()).collect::<Option<_>>()?;
    let joined = joined_durations(&words).unwrap_or_default();
    let words = if joined.is_empty() { words } else { joined.iter().map(String::as_str).collect() };
    let line = Line::of(words);
    let sources = [
        unchanged,
        request,
        layout_of_several_words,
        all_instances,
        number_of_xid,
        swapped,
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
            Meant::Other(command) => return Some(command),
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
            .find(lacks_arguments)
            .map(|words| [words, help].concat())
            .or_else(|| spelling::corrected(&line.words).filter(|words| accepted(words)))
    })?;
    typed::command_line(["gpushctl"].into_iter().chain(found.iter().map(String::as_str)))
}

/// Returns whether gpushctl accepts a command line.
pub(super) fn accepted(words: &[String]) -> bool {
    let words: Vec<OsString> = ["gpushctl".into()].into_iter().chain(words.iter().map(OsString::from)).collect();
    habits::error(&words).is_none() && Cli::try_parse_from(default_verb::insert(words)).is_ok()
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
    let has_operation = arguments.any(|word| word.strip_prefix("op-").is_some_and(phrases::is_number));
    let nouns = has_operation.then_some("operation").into_iter().chain(NOUNS);
    let names_profile = line.words.iter().any(|word| phrases::is_profile(word));
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

/// Returns whether a word can only name GPUs: an index, a range, or a list of them.
pub(super) fn is_index_list(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_digit()) && word.bytes().all(|b| b.is_ascii_digit() || b == b'-' || b == b',')
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

/// Options whose value is a duration or a time.
const DURATIONS: [&str; 13] = [
    "--for",
    "--timeout",
    "--notice",
    "--grace",
    "--expires",
    "--since",
    "--end-after",
    "--time",
    "-t",
    "--until",
    "--duration",
    "--request-timeout",
    "--by",
];

/// Joins the two words of each duration before `--`: `--for 1 day` becomes `--for 1d`. Returns `None` if there is none.
pub(super) fn joined_durations(words: &[&str]) -> Option<Vec<String>> {
    let end = words.iter().position(|word| *word == "--").unwrap_or(words.len());
    let (mut joined, mut at) = (Vec::new(), 0);
    while at < words.len() {
        let three = words[..end].get(at..at + 3).unwrap_or_default();
        match three {
            [option, number, unit] if DURATIONS.contains(option) => {
                if let Some(value) = joined_duration(number, unit) {
                    joined.extend([(*option).to_owned(), value]);
                    at += 3;
                    continue;
                }
            }
            _ => {}
        }
        joined.push(words[at].to_owned());
        at += 1;
    }
    (joined.len() < words.len()).then_some(joined)
}

/// Returns the words themselves, which differ from the typed ones if a duration was joined.
fn unchanged(line: &Line<'_>) -> Vec<Vec<String>> {
    vec![line.words.iter().map(|word| (*word).to_owned()).collect()]
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

fn option(line: &Line<'_>) -> Vec<Vec<String>> {
    let mut found = Vec::new();
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

    #[test]
    fn id_of_a_lease_leads_to_a_command_for_leases() {
        assert_corrected(&[
            ("cancel L19", "lease end L19"),
            ("rm L19", "lease end L19"),
            ("delete L19", "lease end L19"),
            ("delete lease L19", "lease end L19"),
            ("kill L19", "lease end L19"),
            ("stop L19 L20", "lease end L19 L20"),
            ("scancel L19", "lease end L19"),
            ("scancel 12", "lease end L12"),
            ("lease end all", "lease end --all"),
            ("lease end -a", "lease end --all"),
            ("lease end --mine", "lease end --all"),
            ("cancel all leases", "lease end --all"),
            ("kill all", "lease end --help"),
            ("delete leases", "lease end --help"),
            ("L19 end", "lease end L19"),
            ("lease L19 cancel", "lease end L19"),
            ("wait op-3", "operation wait op-3"),
            ("lease end -u anna", "lease end --user anna --reason TEXT"),
            ("lease renew L19 +2h", "lease renew L19 --for 2h"),
            ("lease cancel all", "lease end --all"),
            ("logs L19", "lease show L19"),
            ("get L19", "lease show L19"),
            ("describe L19", "lease show L19"),
            ("L19", "lease show L19"),
            ("lease L19", "lease show L19"),
            ("renew L19", "lease renew L19 --for 2h"),
            ("renew L19 3h", "lease renew L19 --for 3h"),
            ("extend L19 2h", "lease renew L19 --for 2h"),
            ("lease extend L19 2h", "lease renew L19 --for 2h"),
            ("lease renew L19 3h", "lease renew L19 --for 3h"),
            ("lease renew L19", "lease renew L19 --for 2h"),
            ("lease renew L19 --for 1 day", "lease renew L19 --for 1d"),
            ("exec L1 python x.py", "run --lease L1 -- python x.py"),
            ("exec L1 -- python x.py", "run --lease L1 -- python x.py"),
            ("create lease", "lease request --for 2h"),
            ("create lease --mig 1g.10gb", "lease request --mig 1g.10gb"),
            ("create lease 1g.10gb", "lease request --mig 1g.10gb"),
            ("cancel", "lease end --help"),
            ("renew", "lease renew --help"),
            ("--json cancel L19", "--json lease end L19"),
            ("lease mine", "lease list --mine"),
            ("lease history", "lease list --ended"),
            ("lease list --user anna", "lease list"),
        ]);
    }

    /// A hint must not end or destroy what the user did not name.
    #[test]
    fn verb_without_its_object_does_not_lead_to_an_end() {
        assert_corrected(&[("free 3", "mig list --free 3"), ("free", "mig list --free"), ("stop 3", "mps stop 3")]);
        assert_corrected(&[("disable 0", "gpu cordon 0"), ("enable 0", "gpu uncordon 0")]);
        assert_corrected(&[("gpu free 3", "status 3"), ("gpu free", "status --summary")]);
        for typed in [
            "stop all",
            "release 3",
            "revoke 3",
            "return 3",
            "end 3",
            "off 0",
            "on 0",
            "destroy all",
            "rm x",
            "restart x",
        ] {
            assert_eq!(corrected(&format!("gpushctl {typed}")), None, "{typed}");
        }
    }

    #[test]
    fn option_of_another_tool_does_not_hide_the_command() {
        assert_corrected(&[
            ("top -n 1", "status --watch"),
            ("top 3", "status 3 --watch"),
            ("history 3", "lease list --ended"),
            ("history -n 5", "lease list --ended=5"),
            ("usage --since 1d", "lease list --ended"),
            ("who -u", "lease list"),
            ("queue -u anna", "lease list"),
            ("users -a", "lease list"),
            ("reload gpushd", "config reload"),
            ("squeue --me", "lease list --mine"),
            ("ps --user anna", "ps"),
            ("ps --mine", "ps"),
            ("ps -ef", "ps"),
            ("events --last 5", "events -n 5"),
            ("events --limit 5", "events -n 5"),
            ("events --limit=5", "events -n 5"),
            ("status -l", "status --watch"),
            ("reload --force", "config reload"),
            ("events --tail 5", "events -n 5"),
            ("audit --tail 5", "audit -n 5"),
            ("apply --rollback", "apply --undo"),
            ("status -n 2", "status --watch=2s"),
        ]);
    }

    #[test]
    fn words_of_schedulers_and_services_lead_to_a_command() {
        assert_corrected(&[
            ("squeue", "lease list"),
            ("sinfo", "status"),
            ("sinfo -N", "status"),
            ("scontrol show node", "status"),
            ("whoami", "quota"),
            ("user list", "quota --all"),
            ("avail", "mig list --free"),
            ("job", "lease list"),
            ("jobs", "lease list"),
            ("limit", "quota"),
            ("quota nobody", "quota --user nobody"),
            ("health", "doctor"),
            ("doctor mps", "doctor --only mps"),
            ("plan", "apply --dry-run"),
            ("plan 3g.40gb -g 0", "mig apply 3g.40gb --dry-run -g 0"),
            ("edit", "config show"),
            ("config view", "config show"),
            ("config lint", "config check"),
            ("config path", "config check"),
            ("config undo", "config diff"),
            ("undo op-1", "apply --undo --dry-run"),
            ("mig undo", "apply --undo"),
            ("mig split", "mig profiles"),
            ("mig split 0", "mig profiles 0"),
            ("mig set 4", "mig profiles 4"),
            ("mps set 0 25", "mps set 0 --percentage 25"),
            ("gpu 2", "gpu show 2"),
            ("gpu offline 2", "gpu cordon 2"),
            ("gpu lock 2", "gpu cordon 2"),
            ("operation op-1", "operation show op-1"),
            ("get pods", "ps"),
            ("get nodes", "status"),
            ("describe node gpu01", "status"),
            ("uncordon node", "gpu uncordon all"),
            ("mig remove -g 4 --all", "mig apply none -g 4"),
            ("destroy 3", "mig apply none -g 3"),
            ("remove 3", "mig apply none -g 3"),
            ("restart mps 0", "mps restart 0"),
            ("restart 0", "mps restart 0"),
            ("restart mps", "mps restart --help"),
            ("enter maintenance", "maintenance enter"),
            ("end maintenance", "maintenance leave"),
            ("mig delete 3g.40gb 0", "mig remove 3g.40gb -g 0"),
            ("mig destroy all", "mig apply none -g all"),
            ("mps set 0 percentage 25", "mps set 0 --percentage 25"),
            ("reset", "gpu reset --help"),
            ("explain exit 4", "explain 4"),
            ("explain mig layouts", "explain mig"),
            ("explain L17", "lease show L17"),
            ("gpu list --free", "status --summary"),
            ("gpu drain 2 --wait", "gpu drain 2"),
            ("events --type xid", "events --kind xid"),
            ("operation undo op-1", "apply --undo --dry-run"),
            ("config overrides remove 0", "config overrides clear 0"),
            ("restart gpu 0", "gpu reset 0"),
            ("plan mixed -g 0", "mig apply mixed --dry-run -g 0"),
            ("mig set 4 3g.40gb", "mig apply 3g.40gb -g 4"),
            ("mig remove --all", "mig apply none -g all"),
            ("avail 1g.10gb", "mig list --free --profile 1g.10gb"),
            ("user anna", "quota --user anna"),
            ("doctor --fix", "doctor"),
            ("scancel -u anna", "lease list"),
            ("audit --user anna", "audit --object anna"),
            ("ls", "gpu list"),
            ("free 1g.10gb", "mig list --free --profile 1g.10gb"),
        ]);
        for (typed, meant) in [
            ("restart", "systemctl restart gpushd"),
            ("restart gpushd", "systemctl restart gpushd"),
            ("start", "systemctl start gpushd"),
            ("stop", "systemctl stop gpushd"),
            ("daemon-reload", "systemctl daemon-reload"),
            ("journal", "journalctl -u gpushd"),
            ("journal -f", "journalctl -u gpushd"),
        ] {
            assert_eq!(corrected(&format!("gpushctl {typed}")).as_deref(), Some(meant), "{typed}");
        }
    }

    #[test]
    fn misspelled_words_are_corrected() {
        assert_corrected(&[
            ("stauts", "status"),
            ("status --sumary", "status --summary"),
            ("leese list --mien", "lease list --mine"),
            ("gpu shwo 2", "gpu show 2"),
            ("lease renw L3 --for 2h", "lease renew L3 --for 2h"),
        ]);
        for typed in ["mig of 0", "maintenance lease", "rcover", "bogus"] {
            assert_eq!(corrected(&format!("gpushctl {typed}")), None, "{typed}");
        }
    }

    #[test]
    fn request_in_the_form_of_another_tool_is_rewritten() {
        assert_corrected(&[
            ("run --gpus=1 -- true", "run --whole -- true"),
            ("run --whole=2 ./x", "run --whole --count 2 -- ./x"),
            ("run --mps 25% ./x", "run --mps 25 -- ./x"),
            ("run 25% ./x", "run --mps 25 -- ./x"),
            ("run ./x --for 2h --whole", "run --for 2h --whole -- ./x"),
            ("run ./x --memory 8G", "run -- ./x --memory 8G"),
            ("srun -n 4 ./x", "run -- ./x"),
            ("sbatch --time=1-12:00:00 ./x", "run --for 1d12h -- ./x"),
            ("run --whole -t 30 ./x", "run --whole --for 30m -- ./x"),
            ("run --gpus=1", "run --whole -- COMMAND"),
            ("run --gpus", "run --whole -- COMMAND"),
            ("run 1g.10gb", "run --mig 1g.10gb -- COMMAND"),
            ("run --hours 2 --whole ./x", "run --for 2h --whole -- ./x"),
            ("run --gpus 2 -- true", "run --whole --count 2 -- true"),
            ("run --gpus all -- true", "run --whole -- true"),
            ("run --gpus 0 -- true", "run --whole -- true"),
            ("run --gpus-per-task 1 -- true", "run --whole -- true"),
            ("run --gres gpu:1 -- true", "run --whole -- true"),
            ("run --gres=gpu:a100:2 -- true", "run --whole --count 2 -- true"),
            ("run -t 2h --whole -- true", "run --for 2h --whole -- true"),
            ("run --whole --time 2h -- true", "run --whole --for 2h -- true"),
            ("run --whole --time 2 h -- true", "run --whole --for 2h -- true"),
            ("run --whole --time=02:30:00 -- true", "run --whole --for 2h30m -- true"),
            ("run --whole --until 18:00 -- true", "run --whole --for 2h -- true"),
            ("run --whole --for 2 h -- true", "run --whole --for 2h -- true"),
            ("run --mem 8G -- true", "run --memory 8G -- true"),
            ("run --mem-per-gpu 8G -- true", "run --memory 8G -- true"),
            ("run --shared -- true", "run --mps -- true"),
            ("run --share 25 -- true", "run --mps 25 -- true"),
            ("run -it --rm --whole -- true", "run --whole -- true"),
            ("run --detach --whole -- true", "run --whole -- true"),
            ("run nvidia-smi -L", "run -- nvidia-smi -L"),
            ("run true", "run -- true"),
            ("run 1g.10gb python x.py", "run --mig 1g.10gb -- python x.py"),
            ("run python x.py --mig 1g.10gb", "run --mig 1g.10gb -- python x.py"),
            ("run --mps 50 25 -- true", "run --mps 50 -- true"),
            ("run --mps 25 --time 2h python x.py --time 3", "run --mps 25 --for 2h -- python x.py --time 3"),
            ("sbatch --gres=gpu:1 ./job.sh", "run --whole -- ./job.sh"),
            ("srun -p gpu --gpus 2 ./x", "run --whole --count 2 -- ./x"),
            ("salloc", "run -- COMMAND"),
            ("alloc 1g.10gb", "run --mig 1g.10gb -- COMMAND"),
            ("lease request --gpus 2 --time 2h", "lease request --whole --count 2 --for 2h"),
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
            ("mps drain 0", "mps stop 0 --wait"),
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
        for typed in
            ["bogus", "run --mps 25", "mps start", "mig apply 1g.10gb x y", "mig apply --wait=soon", "gpu drain"]
        {
            assert_eq!(corrected(&format!("gpushctl {typed}")), None, "{typed}");
        }
    }
}
