//! Command lines of other tools, and the command lines that gpushctl has instead.
//!
//! A pattern is a list of words separated by spaces:
//!
//! | word of a pattern | matches |
//! |---|---|
//! | `top`, `top|watch` | one of these words |
//! | `<end>` | a word of the set with this name in `SETS` |
//! | `{L}` | the id of a lease, such as L17 |
//! | `{op}` | the id of an operation, such as op-3 |
//! | `{gpu}` | an index, a range or a list of GPUs |
//! | `{n}` | a number |
//! | `{D}` | a duration, in one or two words |
//! | `{layout}` | an entry of a MIG layout |
//! | `{file}` | a path: a word with `/`, or with a suffix of a config file |
//! | `{name}` | the name of a user: a word that begins with a lowercase letter, and is not the id of a lease |
//! | `{w}` | a word that is not an option |
//! | `[...]` | the same as the word in brackets, or no word |
//! | `$` | the end of the command line |
//!
//! The words after the pattern follow the new command, unless the pattern ends with `$`.

use gpush_core::duration;

use super::words::{is_index_list, is_number, is_profile, joined_duration, lease};

/// Sets of words with the same meaning.
const SETS: [(&str, &[&str]); 8] = [
    (
        "<end>",
        &[
            "cancel",
            "rm",
            "delete",
            "del",
            "remove",
            "kill",
            "stop",
            "scancel",
            "end",
            "release",
            "revoke",
            "free",
            "return",
            "terminate",
            "destroy",
            "drop",
            "kick",
            "evict",
        ],
    ),
    ("<show>", &["logs", "log", "get", "describe", "show", "info", "status", "inspect", "details", "wait", "list"]),
    ("<create>", &["create", "new", "add", "make", "acquire", "grant", "request", "reserve"]),
    ("<renew>", &["renew", "extend", "prolong"]),
    ("<remove>", &["destroy", "remove", "rm", "delete", "del"]),
    ("<agent>", &["gpushd", "gpushd.service", "gpush", "agent", "daemon", "service"]),
    ("<lease>", &["lease", "leases", "job", "jobs"]),
    ("<list>", &["list", "ls", "show", "get", "view"]),
];

/// Patterns, and the commands that are tried instead, the best first. A command that begins with `!` is not one of
/// gpushctl. The first pattern that leads to a command is used.
const PHRASES: &[(&str, &[&str])] = &[
    // Leases.
    ("<end> {L}", &["lease end {L}"]),
    ("<end> <lease> {L}", &["lease end {L}"]),
    ("<lease> <end> {L}", &["lease end {L}"]),
    ("<end> lease|leases {n}", &["lease end L{n}"]),
    ("lease|leases <end> -g|--gpu|-i {gpu} {L} $", &["lease end {L}"]),
    ("lease|leases <end> {L} -g|--gpu|-i {gpu} $", &["lease end {L}"]),
    ("lease|leases <end> all|-a|--all $", &["lease end --all"]),
    ("cancel|stop|kill|abort {op}", &["operation cancel {op}"]),
    ("<end> all leases|lease|jobs $", &["lease end --all"]),
    ("<end> leases|lease|jobs all|--all|-a $", &["lease end --all"]),
    ("<end> leases|lease|jobs|job $", &["lease end"]),
    ("<lease> {L} <end> $", &["lease end {L}"]),
    ("{L} <end> $", &["lease end {L}"]),
    ("lease|leases <end> mine|--mine|--me $", &["lease end --all"]),
    ("lease|leases <end> -u|--user {w} $", &["lease end --user {w} --reason TEXT"]),
    ("lease|leases end|stop|cancel|release {name} $", &["lease end --user {name} --reason TEXT"]),
    ("lease|leases show all", &["lease list"]),
    ("lease|leases grant|give {name}", &["lease request --user {name}"]),
    ("book $", &["lease request --for 2h"]),
    ("mine|my $", &["lease list --mine"]),
    ("<renew> {L} [--for|--by|--time|--duration|-t] {D} $", &["lease renew {L} --for {D}"]),
    ("<lease> <renew> {L} [--for|--by|--time|--duration|-t] {D} $", &["lease renew {L} --for {D}"]),
    ("<lease> <renew> {L} --until {w} $", &["lease renew {L} --for 2h"]),
    ("lease|leases <end> {L} --in|--after {D} $", &["lease renew {L} --for {D}"]),
    ("<renew> {L} $", &["lease renew {L} --for 2h"]),
    ("<lease> <renew> {L} $", &["lease renew {L} --for 2h"]),
    ("<show> {L}", &["lease show {L}"]),
    ("<lease> <show> {L}", &["lease show {L}"]),
    ("<show> <lease> {L}", &["lease show {L}"]),
    ("<lease>|squeue {L}", &["lease show {L}"]),
    ("{L} $", &["lease show {L}"]),
    ("<create> lease|leases $", &["lease request --for 2h"]),
    ("<create> lease|leases", &["lease request"]),
    ("list|ls|get leases|lease|jobs|job $", &["lease list"]),
    ("list|ls|get leases|lease|jobs|job -o|--output {w} $", &["lease list -o {w}", "lease list -o json"]),
    ("lease|leases mine|my|me", &["lease list --mine"]),
    ("lease|leases list|ls --me|--my|-m", &["lease list --mine"]),
    ("lease|leases history|ended|past|old [-n|--number|--last|--limit] {n} $", &["lease list --ended={n}"]),
    ("lease|leases history|ended|past|old", &["lease list --ended"]),
    ("lease|leases list|ls -n|--number|--last|--limit|--tail {n} $", &["lease list --ended={n}"]),
    ("lease|leases list|ls --users {w}", &["lease list --user {w}"]),
    ("lease|leases list|ls --all|-a", &["lease list"]),
    ("lease|leases list|ls --state|--status|-s ended|done|finished|completed|past", &["lease list --ended"]),
    ("lease|leases list|ls --state|--status|-s|--sort {w}", &["lease list"]),
    ("why {L}", &["lease show {L}"]),
    ("why {gpu}", &["gpu show {gpu}"]),
    ("lease|leases all $", &["lease list"]),
    ("history|sacct -n|--number|--last|--limit {n} $", &["lease list --ended={n}"]),
    ("history|sacct", &["lease list --ended"]),
    ("bill|bills|billing|cost|costs|price|prices|invoice|invoices", &["bill", "usage"]),
    ("accounting|report|sreport|energy", &["usage"]),
    ("advise|advice|recommend lease|leases", &["advise from-use lease"]),
    ("advise|advice|recommend {L}", &["advise from-use lease {L}"]),
    ("advise|advice|recommend user|users", &["advise from-use user"]),
    ("advise|advice|recommend gpu|gpus", &["advise from-use gpu"]),
    ("advise|advice|recommend host|layout|layouts", &["advise from-use host"]),
    ("usage --month|month|monthly $", &["usage --since 30d"]),
    ("usage --week|week|weekly $", &["usage --since 7d"]),
    ("usage --day|--today|day|today $", &["usage --since 24h"]),
    ("usage {name} $", &["usage --user {name}"]),
    ("squeue|queue|jobs|job|who --me|--mine $", &["lease list --mine"]),
    ("squeue|queue|jobs|job|who -u|--user {w} $", &["lease list --user {w}"]),
    ("squeue|queue|jobs|job|who -j|--job {w}", &["lease list"]),
    ("squeue|queue|jobs|job|who|users|sstat", &["lease list"]),
    ("scontrol show job|jobs {n}", &["slurm usage {n}"]),
    // The number of a job is not the id of a lease.
    ("scancel [{n}]", &["lease list"]),
    // Quotas and users.
    ("whoami|limit|limits|quotas $", &["quota"]),
    ("user|users|quota list|ls $", &["quota --all"]),
    ("user|users show|get|info {w} $", &["quota --user {w}"]),
    ("user {w} $", &["quota --user {w}"]),
    ("quota show|get|info|me|mine|--me|--mine $", &["quota"]),
    ("quota show|get|-u {w} $", &["quota --user {w}"]),
    ("quota all|-a|--users $", &["quota --all"]),
    ("quota {w} $", &["quota --user {w}"]),
    ("get|describe|list quota|quotas $", &["quota"]),
    // GPUs.
    ("{gpu}", &["status {gpu}"]),
    ("gpu|gpus {gpu}", &["gpu show {gpu}"]),
    ("get gpus|gpu $", &["gpu list"]),
    ("gpu|gpus list|ls --free|--available", &["status --summary"]),
    ("gpu|gpus list|ls --sort|--sort-by {w}", &["gpu list"]),
    ("gpu|gpus free|available {gpu}", &["status {gpu}"]),
    ("gpu|gpus free|available $", &["status --summary"]),
    ("gpu|gpus top|watch|monitor", &["top"]),
    ("gpu|gpus restart|reboot", &["gpu reset"]),
    ("restart|reboot gpu|gpus", &["gpu reset"]),
    ("gpu|gpus offline|lock|disable|block|hold", &["gpu cordon"]),
    ("gpu|gpus online|unlock|enable|unblock|resume|release", &["gpu uncordon"]),
    ("disable|lock|offline {gpu}", &["gpu cordon {gpu}"]),
    ("enable|unlock|online {gpu}", &["gpu uncordon {gpu}"]),
    ("cordon node|nodes|host [{w}] $", &["gpu cordon all"]),
    ("uncordon|undrain node|nodes|host [{w}] $", &["gpu uncordon all"]),
    ("drain node|nodes|host [{w}] $", &["gpu drain all"]),
    ("get|describe|list nodes|node|no|host|all [{w}]", &["status"]),
    ("get|describe|list pods|pod|po [{w}]", &["ps"]),
    ("status -n|-l|-d|-w|--watch|--interval|--loop|--refresh {D}", &["top --interval {D}"]),
    ("status -f|--file|--config {file} $", &["status"]),
    ("status -l|-w|--watch|--loop|--refresh|--follow|-f", &["top"]),
    ("top|nvtop|nvitop -n|-b|-1|--batch|--iterations [{n}]", &["top --once"]),
    ("top|nvtop|nvitop -d|-s|--delay|--refresh {D}", &["top --interval {D}"]),
    ("watch|monitor|nvtop|nvitop|htop {gpu}", &["top {gpu}"]),
    ("watch|monitor|nvtop|nvitop|htop", &["top"]),
    ("free|available|avail {layout}", &["mig list --free --profile {layout}"]),
    ("free|available|avail", &["mig list --free", "status"]),
    ("sinfo|scontrol", &["status"]),
    ("timeslice|timeslices|time-slicing list|ls|status", &["gpu list"]),
    ("ps --mine|--me|-ef|-e|-a|-A|--all|aux|list|ls", &["ps"]),
    ("ps -p|--pid {n}", &["ps"]),
    // MIG.
    ("mig {gpu}", &["mig list {gpu}"]),
    ("mig-parted|nvidia-mig-parted apply -f|--config-file {w}", &["mig apply --file {w}"]),
    ("mig-parted|nvidia-mig-parted assert -f|--config-file {w}", &["mig apply --check --file {w}"]),
    ("mig-parted|nvidia-mig-parted export", &["mig export"]),
    ("mig-parted|nvidia-mig-parted", &["mig list"]),
    ("<remove> {gpu} $", &["mig apply none -g {gpu}"]),
    ("mig split|partition|slice|divide|cut|set|change|layout {gpu} {layout}", &["mig apply {layout} -g {gpu}"]),
    ("mig split|partition|slice|divide|cut|set|change|layout {gpu}", &["mig profiles {gpu}"]),
    ("mig split|partition|slice|divide|cut $", &["mig profiles"]),
    ("mig split|partition|slice|divide|cut", &["mig apply"]),
    ("plan {layout}", &["mig apply {layout} --dry-run"]),
    ("plan {gpu}", &["apply {gpu} --dry-run"]),
    ("plan {w}", &["mig apply {w} --dry-run"]),
    ("plan", &["apply --dry-run"]),
    ("operation|operations|op|ops <show> {op}", &["operation show {op}"]),
    ("mig free|available", &["mig list --free"]),
    ("mig <remove>|clear all $", &["mig apply none -g all"]),
    ("mig undo|rollback|revert", &["apply --undo"]),
    ("apply --rollback|--revert", &["apply --undo"]),
    // MPS.
    ("mps drain {w}", &["mps stop {w} --wait"]),
    ("mps {gpu} $", &["mps show {gpu}"]),
    ("mps set_default_active_thread_percentage {n} $", &["mps set TARGET --percentage {n}"]),
    ("mps set_default_device_pinned_mem_limit {gpu} {w} $", &["mps set {gpu} --memory {w}"]),
    ("mps get_server_list|get_server_status|get_device_client_list", &["mps list"]),
    ("mps get_client_list|ps", &["mps clients"]),
    ("nvidia-cuda-mps-control", &["mps list"]),
    ("mps set|limit {w} [percentage|percent|mps|--limit|--mps|--percent] {n} $", &["mps set {w} --percentage {n}"]),
    // Operations, events and the audit trail.
    ("operation|operations|op|ops {op}", &["operation show {op}"]),
    ("operation|operations|op|ops {n}", &["operation show op-{n}"]),
    ("operation|operations|op|ops -a|--all", &["operation list"]),
    ("explain {L} $", &["lease show {L}"]),
    ("explain {op} $", &["operation show {op}"]),
    ("explain xid|Xid|XID {n} $", &["explain xid-{n}"]),
    ("explain exit|status|code|error {n} $", &["explain {n}"]),
    ("explain {w}", &["explain {w}"]),
    ("wait {op}", &["operation wait {op}"]),
    ("<show> {op}", &["operation show {op}"]),
    ("{op} $", &["operation show {op}"]),
    ("events --xid", &["events --kind xid"]),
    ("get|list|show events|event", &["events"]),
    ("audit --user|-u|--who {w}", &["audit --object {w}"]),
    // The config and the host.
    ("check|validate|lint|verify|test {file} $", &["config check {file}"]),
    ("config check|validate|lint|verify {w} {file} $", &["config check --offline {w} {file}"]),
    ("config view|get|cat|print|list", &["config show"]),
    ("config lint|validate|test|verify|path|file", &["config check"]),
    ("config reload|load|use|install {file} $", &["config check {file}"]),
    ("config load|use|install $", &["config reload"]),
    ("config init|new|create|generate {w} $", &["config init --site {w}"]),
    ("config overrides|override {gpu} $", &["config overrides list {gpu}"]),
    ("config export|dump $", &["config show --effective"]),
    ("config overrides|override remove|delete|rm|reset|end|undo", &["config overrides clear"]),
    ("config undo|rollback|revert $", &["config diff"]),
    ("reload config|<agent>|--force|-f|--now|--all $", &["config reload"]),
    ("ping", &["version"]),
    ("-v|-V $", &["version"]),
    ("health|healthcheck|check|diagnose|diag", &["doctor"]),
    ("doctor --fix|-v|--verbose|--all|-a|check|run|gpu|gpus|all", &["doctor"]),
    ("doctor {w}", &["doctor --only {w}"]),
    // Maintenance is for the whole host.
    ("maintenance enter|on|start|begin {gpu}", &["gpu drain {gpu}"]),
    ("maintenance leave|off|stop|end|exit {gpu}", &["gpu uncordon {gpu}"]),
    ("metrics serve {n} $", &["metrics serve --listen 127.0.0.1:{n}"]),
    ("version --short|--client|-s|-c|--verbose", &["version"]),
    ("docker|podman", &["!docker run --rm $(gpushctl lease env L17 -o docker) IMAGE"]),
    ("enter|start|begin maintenance", &["maintenance enter"]),
    ("leave|stop|end|exit|finish maintenance", &["maintenance leave"]),
    // systemd.
    ("restart [<agent>] $", &["!systemctl restart gpushd"]),
    ("start [<agent>] $", &["!systemctl start gpushd"]),
    ("stop [<agent>] $", &["!systemctl stop gpushd"]),
    ("shutdown $", &["!systemctl stop gpushd"]),
    ("enable <agent> $", &["!systemctl enable gpushd"]),
    ("disable <agent> $", &["!systemctl disable gpushd"]),
    ("daemon-reload", &["!systemctl daemon-reload"]),
    ("journal|journalctl|syslog", &["!journalctl -u gpushd"]),
    ("log|logs <agent> $", &["!journalctl -u gpushd"]),
    // Verbs whose object is missing: the hint names the help.
    ("<renew> $", &["lease renew"]),
    ("destroy|remove|rm $", &["mig remove"]),
    ("mig clear|reset|wipe $", &["mig remove"]),
    ("cancel|kill|release|revoke|terminate|end all|--all|-a $", &["lease end"]),
    ("cancel|delete|kill|release|revoke|return|terminate|end $", &["lease end"]),
];

/// Commands that change nothing. A hint may omit options of the typed command if it names one of these commands.
const READ_ONLY: [&str; 19] = [
    "explain",
    "version",
    "status",
    "top",
    "ps",
    "quota",
    "events",
    "doctor",
    "lease list",
    "lease show",
    "mig list",
    "mig profiles",
    "mps list",
    "mps clients",
    "gpu list",
    "gpu show",
    "config show",
    "config check",
    "operation list",
];

/// A command line that the user may have meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Meant {
    /// Words after `gpushctl`.
    Gpushctl(Vec<String>),
    /// A command line of another program.
    Other(String),
}

/// Returns the command lines that the words may mean, the best first. The words contain no options before the command.
pub(super) fn meant(words: &[&str]) -> Vec<Meant> {
    PHRASES.iter().flat_map(|(pattern, commands)| of_phrase(pattern, commands, words)).collect()
}

/// Returns the command lines of one phrase; none if the pattern does not match.
fn of_phrase(pattern: &str, commands: &[&str], words: &[&str]) -> Vec<Meant> {
    let Some(matched) = matched(pattern, words) else { return Vec::new() };
    let rest = &words[matched.used..];
    // A word of letters never names a GPU, so a command that lists GPUs must not get it.
    let is_other = |at: usize| {
        rest[at].bytes().all(|byte| byte.is_ascii_alphabetic()) && !(at > 0 && rest[at - 1].starts_with('-'))
    };
    let has_other = (0..rest.len()).any(is_other);
    let mut found = Vec::new();
    for command in commands {
        if let Some(other) = command.strip_prefix('!') {
            found.push(Meant::Other(other.to_owned()));
            continue;
        }
        let filled = matched.values.iter().fold((*command).to_owned(), |text, (name, value)| text.replace(name, value));
        let base: Vec<String> = filled.split(' ').map(str::to_owned).collect();
        if !(has_other && is_read_only(command)) {
            let all = base.iter().cloned().chain(rest.iter().map(|word| (*word).to_owned())).collect();
            found.push(Meant::Gpushctl(all));
        }
        if !rest.is_empty() && is_read_only(command) {
            found.push(Meant::Gpushctl(base));
        }
    }
    found
}

/// Returns whether a command changes nothing.
pub(super) fn is_read_only(command: &str) -> bool {
    READ_ONLY
        .iter()
        .any(|known| command.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with(' ')))
}

/// What a pattern matched.
#[derive(Default)]
struct Matched {
    /// Number of the words that the pattern matched.
    used: usize,
    /// Placeholders, and the words that they matched.
    values: Vec<(String, String)>,
}

fn matched(pattern: &str, words: &[&str]) -> Option<Matched> {
    let mut matched = Matched::default();
    for token in pattern.split(' ') {
        let rest = &words[matched.used..];
        if token == "$" {
            return rest.is_empty().then_some(matched);
        }
        let (token, is_optional) = match token.strip_prefix('[').and_then(|token| token.strip_suffix(']')) {
            Some(token) => (token, true),
            None => (token, false),
        };
        match value(token, rest) {
            Some((used, value)) => {
                matched.used += used;
                matched.values.push((token.to_owned(), value));
            }
            None if is_optional => {}
            None => return None,
        }
    }
    Some(matched)
}

/// Returns the number of words that a token of a pattern matches, and their value.
fn value(token: &str, words: &[&str]) -> Option<(usize, String)> {
    let first = *words.first()?;
    let one = |matches: bool| matches.then(|| (1, first.to_owned()));
    match token {
        "{L}" => lease(first).map(|id| (1, id)),
        "{op}" => one(first.strip_prefix("op-").is_some_and(is_number)),
        "{gpu}" => one(is_index_list(first)),
        "{n}" => {
            let number = first.trim_end_matches('%');
            is_number(number).then(|| (1, number.to_owned()))
        }
        "{D}" => {
            let first = first.strip_prefix('+').unwrap_or(first);
            let two = words.get(1).and_then(|second| joined_duration(first, second));
            two.map(|value| (2, value)).or_else(|| match first {
                number if is_number(number) => Some((1, format!("{number}s"))),
                text => duration::is_duration(text).then(|| (1, text.to_owned())),
            })
        }
        "{layout}" => one(is_profile(first)),
        "{file}" => {
            one(first.contains('/') || [".toml", ".yaml", ".yml", ".json"].iter().any(|end| first.ends_with(end)))
        }
        "{name}" => {
            let is_part = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
            let begins = first.starts_with(|c: char| c.is_ascii_lowercase());
            one(begins && first.chars().all(is_part) && lease(first).is_none())
        }
        "{w}" => one(!first.starts_with('-')),
        _ => one(token.split('|').any(|word| {
            let set = SETS.iter().find(|(name, _)| *name == word);
            set.map_or(word == first, |(_, words)| words.contains(&first))
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_matches_words_sets_and_values() {
        let values = |pattern: &str, line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            matched(pattern, &words)
                .map(|found| (found.used, found.values.into_iter().map(|(_, value)| value).collect()))
        };
        let some =
            |used, values: &[&str]| Some((used, values.iter().map(|value| (*value).to_owned()).collect::<Vec<_>>()));
        assert_eq!(values("<end> {L}", "kill l19 x"), some(2, &["kill", "L19"]));
        assert_eq!(values("a|b [-n] {n} $", "b 5"), some(2, &["b", "5"]));
        assert_eq!(values("a {D}", "a 2 hours"), some(3, &["a", "2h"]));
        assert_eq!(values("a {D}", "a 2"), some(2, &["a", "2s"]));
        for (pattern, line) in [("a $", "a b"), ("<end> {L}", "kill 19"), ("a {w}", "a -x"), ("a {D}", "a soon")] {
            assert_eq!(values(pattern, line), None, "{pattern}: {line}");
        }
    }

    #[test]
    fn every_set_of_a_pattern_exists() {
        for (pattern, _) in PHRASES {
            for word in pattern.split([' ', '|', '[', ']']).filter(|word| word.starts_with('<')) {
                assert!(SETS.iter().any(|(name, _)| *name == word), "{pattern}");
            }
        }
    }

    /// A hint must not name a command that ends or destroys something if the user asked for something else.
    #[test]
    fn phrase_that_ends_something_has_a_verb_of_that_meaning() {
        let ends =
            ["lease end", "mig apply none", "mig remove", "gpu reset", "operation cancel", "mps stop", "mig off"];
        let asks = [
            "<end>",
            "end|stop|cancel|release",
            "<remove>",
            "scancel",
            "cancel",
            "destroy",
            "restart",
            "wipe",
            "mps drain",
        ];
        for (pattern, commands) in PHRASES {
            if commands.iter().any(|command| ends.iter().any(|end| command.starts_with(end))) {
                assert!(asks.iter().any(|verb| pattern.contains(verb)), "{pattern}");
            }
        }
    }
}
