//! Rewrites a command line that requests a share in the form of Slurm, Docker and other tools: `srun --gres=gpu:2 ./x`
//! means `run --whole --count 2 -- ./x`.

use clap::{Arg, CommandFactory as _};
use gpush_core::duration;

use super::{
    Cli, docker_line,
    foreign_values::{duration_of, fraction, is_memory, is_percentage, memory_with_unit, priority, unit_of_memory},
    request_options::{
        DETACHED, DURATIONS, FRACTIONS, IGNORED, IGNORED_OF_SLURM, IGNORED_WITH_VALUE, LARGEST_INDEX, LONG, MEMORY,
        NUMBER_OF_GPUS, RENAMED, SHARES, WITH_SHARE,
    },
    words::{PROFILE, interpreter, is_index_list, is_number, is_profile, joined_duration, lease},
};

/// The command that a request belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// `run`. If `is_foreign`, the user typed the command of another tool, such as `srun`.
    Run { is_foreign: bool },
    /// `lease request`.
    Request,
    /// `lease env`.
    Env,
}

/// Returns the command line that the words mean, if they request a share. The words contain no options before the
/// command.
pub(super) fn rewritten(words: &[&str]) -> Option<Vec<String>> {
    let (kind, rest) = kind(words)?;
    let is_of_docker = matches!(words.first(), Some(&("docker" | "podman")));
    if kind == (Kind::Run { is_foreign: false })
        && let Some(found) = docker_line::rewritten(rest)
    {
        return Some(["run".to_owned()].into_iter().chain(found).collect());
    }
    if is_of_docker {
        return None;
    }
    let mut line = Rewritten::of(kind);
    line.read(rest)?;
    if !rest.contains(&"--") {
        line.find_flags_after_command();
    }
    line.drop_second_share();
    line.add_share_of_priority();
    line.split_command();
    let is_rewritten = !line.flags.iter().map(String::as_str).eq(rest.iter().copied());
    let found = line.words(is_rewritten)?;
    (found.iter().map(String::as_str).ne(words.iter().copied())).then_some(found)
}

/// Returns the command, and the words after it.
fn kind<'w>(words: &'w [&'w str]) -> Option<(Kind, &'w [&'w str])> {
    let foreign = Kind::Run { is_foreign: true };
    Some(match words {
        ["run", rest @ ..] => (Kind::Run { is_foreign: false }, rest),
        ["start", rest @ ..] if rest.first() == Some(&"--") => (foreign, rest),
        ["docker" | "podman", "run", ..] => (Kind::Run { is_foreign: false }, words),
        ["exec" | "srun" | "sbatch" | "salloc" | "alloc" | "launch" | "submit", rest @ ..]
        | ["lease" | "leases", "exec" | "run" | "attach" | "enter", rest @ ..] => (foreign, rest),
        ["attach" | "enter", id, ..] if lease(id).is_some() => (foreign, &words[1..]),
        ["get", rest @ ..] | ["lease" | "leases", "get", rest @ ..] if names_share(rest) => (Kind::Request, rest),
        ["request" | "reserve" | "acquire" | "book", rest @ ..]
        | ["lease" | "leases", "request" | "create" | "new" | "add" | "grant" | "acquire", rest @ ..] => {
            (Kind::Request, rest)
        }
        ["lease" | "leases", "env", rest @ ..] => (Kind::Env, rest),
        _ => return None,
    })
}

/// Returns whether one of the words is an option that names a share.
fn names_share(words: &[&str]) -> bool {
    words.iter().any(|word| SHARES.contains(&word.split('=').next().unwrap_or_default()))
}

struct Rewritten {
    kind: Kind,
    flags: Vec<String>,
    command: Vec<String>,
    /// Whether `--whole` comes from a number of GPUs, such as `--gpus 2`.
    is_number_of_gpus: bool,
    /// Whether the command is meant to run in the background.
    is_detached: bool,
}

impl Rewritten {
    fn of(kind: Kind) -> Self {
        Self { kind, flags: Vec::new(), command: Vec::new(), is_number_of_gpus: false, is_detached: false }
    }

    /// Reads the words after the command. Returns `None` if a word before `--` has no meaning.
    fn read(&mut self, words: &[&str]) -> Option<()> {
        let has_dashes = words.contains(&"--");
        let mut at = 0;
        while let Some(word) = words.get(at) {
            let rest = &words[at + 1..];
            if *word == "--" {
                self.command = rest.iter().map(|word| (*word).to_owned()).collect();
                return Some(());
            }
            if word.starts_with('-') && word.len() > 1 {
                at += 1 + self.read_option(word, rest);
            } else if let Some(used) = self.read_argument(word, rest) {
                at += used;
            } else if has_dashes || !matches!(self.kind, Kind::Run { .. }) {
                return None;
            } else {
                self.command = words[at..].iter().map(|word| (*word).to_owned()).collect();
                return Some(());
            }
        }
        Some(())
    }

    /// Reads an option. Returns how many of the words after it are its value.
    fn read_option(&mut self, word: &str, rest: &[&str]) -> usize {
        let (name, attached) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        // `-mig` means `--mig`.
        let with_dashes = format!("-{name}");
        let name = if LONG.contains(&with_dashes.as_str()) { with_dashes.as_str() } else { name };
        let next = rest.first().copied().filter(|next| !next.starts_with('-'));
        let value = attached.or(next);
        let used = usize::from(attached.is_none() && next.is_some());
        if name == "--gpus" && value.is_none() {
            self.add("--whole", None);
            return 0;
        }
        if name == "--mig" && !value.is_some_and(|value| value.starts_with(|c: char| c.is_ascii_digit())) {
            self.add("--mig", Some(PROFILE));
            return 0;
        }
        // `--mig 1g.10gb*2` is an entry of a layout.
        if name == "--mig"
            && let Some((profile, number)) = value.and_then(|value| value.split_once('*'))
            && number.parse::<u8>().is_ok_and(|number| number > 0)
        {
            self.add("--mig", Some(profile));
            self.add("--count", Some(number));
            return used;
        }
        if name == "--timeslice" && attached.is_some() {
            self.add("--timeslice", None);
            return 0;
        }
        if FRACTIONS.contains(&name)
            && let Some(percentage) = value.and_then(fraction)
        {
            self.add("--mps", Some(&percentage));
            return used;
        }
        let is_foreign = self.kind == Kind::Run { is_foreign: true };
        if is_foreign && IGNORED_OF_SLURM.contains(&name) {
            return used;
        }
        // `--memory 8 GB` is an amount of two words.
        if MEMORY.contains(&name)
            && let (None, [number, unit, ..]) = (attached, rest)
            && is_number(number)
            && let Some(letter) = unit_of_memory(unit)
        {
            self.add("--memory", Some(&format!("{number}{letter}")));
            return 2;
        }
        if MEMORY.contains(&name)
            && let Some(amount) = value.and_then(memory_with_unit)
        {
            self.add("--memory", Some(&amount));
            return used;
        }
        if name == "--priority"
            && let Some(priority) = value.and_then(priority)
        {
            self.add("--priority", Some(priority));
            return used;
        }
        // `-p` names a profile, as `--profile` does.
        if name == "-p"
            && let Some(profile) = value.filter(|value| is_profile(value))
        {
            self.add("--mig", Some(profile));
            return used;
        }
        // A job of Slurm requests its share in the comment.
        if name == "--comment"
            && let Some(request) = value.and_then(|comment| comment.strip_prefix("gpush:"))
        {
            self.add("--request", Some(request));
            return used;
        }
        // `--slice 1` is a number of slices, and `--slice 1g.10gb` a profile.
        if name == "--slice"
            && let Some(number) = value.filter(|value| is_number(value))
        {
            self.add("--slices", Some(number));
            return used;
        }
        if NUMBER_OF_GPUS.contains(&name)
            && let Some(value) = value
            && self.add_gpus(value)
        {
            return used;
        }
        let unit = match name {
            "--hours" => Some("h"),
            "--minutes" => Some("m"),
            "--days" => Some("d"),
            _ => None,
        };
        if let (Some(unit), Some(number)) = (unit, value.filter(|value| is_number(value))) {
            self.add("--for", Some(&format!("{number}{unit}")));
            return used;
        }
        if DURATIONS.contains(&name) {
            if attached.is_none()
                && let [number, unit, ..] = rest
                && let Some(value) = joined_duration(number, unit)
            {
                self.add("--for", Some(&value));
                return 2;
            }
            if let Some(value) = value.and_then(|value| duration_of(name, value)) {
                self.add("--for", Some(&value));
                return used;
            }
            if name == "--until" {
                self.add("--for", Some("2h"));
                return used;
            }
        }
        self.is_detached |= DETACHED.contains(&name);
        // Without `--wait`, a request does not wait.
        if IGNORED.contains(&name) || matches!(name, "--nowait" | "--no-wait") {
            return 0;
        }
        if IGNORED_WITH_VALUE.contains(&name) {
            return used;
        }
        if let Some((_, new)) = RENAMED.iter().find(|(typed, _)| *typed == name) {
            let takes_value = match *new {
                "--whole" => false,
                "--mps" => value.is_some_and(is_percentage),
                _ => value.is_some(),
            };
            let value = value.map(|value| if *new == "--mps" { value.trim_end_matches('%') } else { value });
            self.add(new, value.filter(|_| takes_value));
            return if takes_value { used } else { 0 };
        }
        if let ("--whole", Some(number)) = (name, attached) {
            return usize::from(!self.add_gpus(number));
        }
        self.flags.push(attached.map_or_else(|| name.to_owned(), |value| format!("{name}={value}")));
        match (attached, next) {
            (None, Some(next)) if self.takes_value(name) && (name != "--mps" || is_percentage(next)) => {
                self.flags.push(if name == "--mps" { next.trim_end_matches('%') } else { next }.to_owned());
                1
            }
            _ => 0,
        }
    }

    /// Reads an argument that describes the share, and returns how many words it has. Returns `None` for other words.
    fn read_argument(&mut self, word: &str, rest: &[&str]) -> Option<usize> {
        let next_number = rest.first().filter(|next| is_number(next));
        match word {
            "mps" => {
                self.add("--mps", next_number.copied());
                return Some(1 + usize::from(next_number.is_some()));
            }
            "whole" | "exclusive" => self.add("--whole", None),
            "timeslice" => self.add("--timeslice", None),
            _ if fraction(word).is_some() => self.add("--mps", fraction(word).as_deref()),
            _ if is_profile(word) => self.add("--mig", Some(word)),
            _ if word.ends_with('%') && is_percentage(word) => self.add("--mps", Some(word.trim_end_matches('%'))),
            _ if is_memory(word) => self.add("--memory", Some(word)),
            _ if self.kind == Kind::Request && word.contains('=') => self.add("--request", Some(word)),
            _ if self.kind == Kind::Env && lease(word).is_some() => self.flags.push(word.to_owned()),
            _ => {
                if let Some(id) = lease(word).filter(|_| matches!(self.kind, Kind::Run { .. })) {
                    self.add("--lease", Some(&id));
                } else if is_number(word) && self.flags.iter().any(|flag| flag == "--mps") {
                    // `--mps 50 25` has one value too many, unless it is the index of a GPU.
                    if word.parse::<u32>().is_ok_and(|index| index < 16) {
                        self.add("-g", Some(word));
                    }
                } else if is_index_list(word) && word.parse::<u32>().map_or(true, |index| index <= LARGEST_INDEX) {
                    self.add("-g", Some(word));
                } else if is_number(word) && is_percentage(word) && matches!(self.kind, Kind::Run { .. }) {
                    self.add("--mps", Some(word));
                } else if !is_number(word)
                    && word.starts_with(|c: char| c.is_ascii_digit())
                    && duration::is_duration(word)
                {
                    self.add("--for", Some(word));
                } else {
                    return None;
                }
            }
        }
        Some(1)
    }

    /// Adds a request for a number of whole GPUs. Returns whether the value is such a number.
    fn add_gpus(&mut self, value: &str) -> bool {
        let value = value.trim_matches('"');
        if let Some(index) = value.strip_prefix("device=") {
            self.add("--whole", None);
            self.add("--gpu", Some(index));
            let number = index.split(',').count();
            if number > 1 {
                self.add("--count", Some(&number.to_string()));
            }
            return true;
        }
        if let Some(percentage) = value.strip_prefix("mps:").filter(|value| is_number(value)) {
            self.add("--mps", Some(percentage));
            return true;
        }
        if let Some(profile) = value.split(':').find(|part| is_profile(part)) {
            self.add("--mig", Some(profile));
            if let Some(count) = value.rsplit(':').next().filter(|count| is_number(count) && *count != "1") {
                self.add("--count", Some(count));
            }
            return true;
        }
        let number = if value.starts_with("gpu") { value.rsplit(':').next().unwrap_or_default() } else { value };
        let number = match number {
            "all" | "gpu" => "1".to_owned(),
            list if list.contains(',') => list.split(',').count().to_string(),
            number if is_number(number) => number.to_owned(),
            _ => return false,
        };
        self.is_number_of_gpus = true;
        self.add("--whole", None);
        if !matches!(number.as_str(), "0" | "1") {
            self.add("--count", Some(&number));
        }
        true
    }

    fn add(&mut self, flag: &str, value: Option<&str>) {
        if value.is_none() && self.flags.iter().any(|known| known == flag) {
            return;
        }
        self.flags.push(flag.to_owned());
        self.flags.extend(value.map(str::to_owned));
    }

    /// Returns whether an option of `run` or `lease request` takes the next word as its value.
    fn takes_value(&self, name: &str) -> bool {
        let cli = Cli::command();
        let command = match self.kind {
            Kind::Run { .. } => cli.find_subcommand("run"),
            Kind::Request => cli.find_subcommand("lease").and_then(|lease| lease.find_subcommand("request")),
            Kind::Env => cli.find_subcommand("lease").and_then(|lease| lease.find_subcommand("env")),
        };
        let is_named = |arg: &&Arg| match name.strip_prefix("--") {
            Some(long) => arg.get_long() == Some(long),
            None => {
                let mut short = name.chars().skip(1);
                let (first, second) = (short.next(), short.next());
                second.is_none()
                    && (arg.get_short() == first
                        || arg.get_all_short_aliases().is_some_and(|all| first.is_some_and(|c| all.contains(&c))))
            }
        };
        let args = command.into_iter().flat_map(clap::Command::get_arguments).chain(cli.get_arguments());
        args.filter(is_named).any(|arg| arg.get_action().takes_values() && !arg.is_require_equals_set())
    }

    /// Moves options that name a share from the end of the command to the front: `run ./x --mig 1g.10gb`.
    fn find_flags_after_command(&mut self) {
        if self.flags.iter().any(|flag| SHARES.contains(&flag.as_str())) {
            return;
        }
        let name = |word: &String| word.split('=').next().unwrap_or_default().to_owned();
        if !self.command.iter().any(|word| SHARES.contains(&name(word).as_str())) {
            return;
        }
        let is_flag = |word: &String| [&SHARES[..], &WITH_SHARE].concat().contains(&name(word).as_str());
        let Some(at) = self.command.iter().position(is_flag).filter(|at| *at > 0) else { return };
        let mut flags = Self::of(self.kind);
        let words: Vec<&str> = self.command[at..].iter().map(String::as_str).collect();
        if flags.read(&words).is_some() && flags.command.is_empty() {
            self.flags.extend(flags.flags);
            self.command.truncate(at);
        }
    }

    /// Removes `--whole` if it comes from a number of GPUs and the line also names another share. A share of a GPU that
    /// several programs use has no count.
    fn drop_second_share(&mut self) {
        let names = |flag: &str| self.flags.iter().any(|word| word == flag);
        let is_device = ["--mig", "--memory", "--slices"].into_iter().any(names);
        let is_shared = names("--mps") || names("--timeslice");
        if !self.is_number_of_gpus || !(is_device || is_shared) {
            return;
        }
        self.flags.retain(|word| word != "--whole");
        if let Some(at) = self.flags.iter().position(|word| word == "--count").filter(|_| is_shared) {
            self.flags.drain(at..(at + 2).min(self.flags.len()));
        }
    }

    /// Adds `--mps` if the line names a priority and no share: only MPS has priorities.
    fn add_share_of_priority(&mut self) {
        let has =
            |flags: &[&str]| self.flags.iter().any(|word| flags.contains(&word.split('=').next().unwrap_or_default()));
        let names_share = has(&SHARES) || has(&["--slices", "--target", "--request", "--lease"]);
        if has(&["--priority"]) && !names_share {
            self.flags.insert(0, "--mps".to_owned());
        }
    }

    /// Rewrites a command that only a shell would understand. Splits a command that the user quoted as one word, such as
    /// `"python3 train.py"`, but leaves one with other characters of a shell to a shell. Adds `env` to `CUDA_CACHE=1 ./x`.
    fn split_command(&mut self) {
        let is_name = |name: &str| name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_');
        let sets_variable = |word: &String| {
            word.split_once('=').is_some_and(|(name, value)| {
                name.starts_with(|c: char| c.is_ascii_uppercase()) && is_name(name) && !value.contains(' ')
            })
        };
        if self.command.first().is_some_and(sets_variable) {
            self.command.insert(0, "env".to_owned());
        }
        if let Some(interpreter) =
            self.command.first().filter(|word| !word.contains(['/', ' '])).and_then(|word| interpreter(word))
        {
            self.command.insert(0, interpreter.to_owned());
        }
        let [line] = self.command.as_slice() else { return };
        if !line.contains(' ') {
            return;
        }
        self.command = if line.contains(['|', ';', '&', '<', '>', '$', '*', '\'', '"', '\\', '(']) {
            vec!["sh".to_owned(), "-c".to_owned(), line.clone()]
        } else {
            line.split_whitespace().map(str::to_owned).collect()
        };
    }

    /// Returns the words of the command line. Adds the placeholder `COMMAND` if `run` has no command. But returns `None`
    /// if only the command is missing: the error then says so.
    fn words(&self, is_rewritten: bool) -> Option<Vec<String>> {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        match self.kind {
            Kind::Run { .. } if self.is_detached => Some([owned(&["lease", "request"]), self.flags.clone()].concat()),
            Kind::Request => Some([owned(&["lease", "request"]), self.flags.clone()].concat()),
            Kind::Env => Some([owned(&["lease", "env"]), self.flags.clone()].concat()),
            Kind::Run { is_foreign } => {
                let command = match (self.command.is_empty(), is_foreign || is_rewritten) {
                    (true, false) => return None,
                    (true, true) => owned(&["COMMAND"]),
                    (false, _) => self.command.clone(),
                };
                Some([owned(&["run"]), self.flags.clone(), owned(&["--"]), command].concat())
            }
        }
    }
}
