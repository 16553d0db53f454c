//! The verb that a group of commands has without one: `gpushctl lease` means `gpushctl lease list`.

use std::ffi::{OsStr, OsString};

/// Groups with their names, and the verb that each has by default.
const GROUPS: [(&[&str], &str); 9] = [
    (&["lease", "leases"], "list"),
    (&["gpu", "gpus"], "list"),
    (&["mig"], "list"),
    (&["mps"], "list"),
    (&["operation", "operations", "op", "ops"], "list"),
    (&["config"], "show"),
    (&["enforce"], "status"),
    (&["metrics"], "show"),
    (&["advise", "advice"], "mechanism"),
];

/// Returns the default verb of a group.
pub(super) fn of_group(name: &str) -> Option<&'static str> {
    GROUPS.iter().find(|(names, _)| names.contains(&name)).map(|(_, verb)| *verb)
}

/// The option that stands for the command `advise from-use`.
const FROM_USE: &str = "--from-use";

/// Inserts the default verb after a group of commands if no verb follows: at the end of the command line, or before an
/// option. Help requests do not change.
pub(crate) fn insert(mut words: Vec<OsString>) -> Vec<OsString> {
    if let Some((group, option)) = from_use(&words) {
        words.remove(option);
        words.insert(group + 1, FROM_USE.trim_start_matches('-').into());
    } else if let Some((at, verb)) = missing(&words) {
        words.insert(at, verb.into());
    }
    words
}

/// Returns the positions of `advise` and of the option that stands for its command. If a command is named, the option is
/// wrong.
fn from_use(words: &[OsString]) -> Option<(usize, usize)> {
    let group = group_at(words).filter(|at| words[*at] == "advise" || words[*at] == "advice")?;
    let option = group + words[group..].iter().take_while(|word| *word != "--").position(|word| word == FROM_USE)?;
    let is_command = |word: &OsString| ["mechanism", "queue", "from-use"].iter().any(|command| word == command);
    (!words[group..option].iter().any(is_command)).then_some((group, option))
}

/// Returns the position of the first word that is not an option.
fn group_at(words: &[OsString]) -> Option<usize> {
    let mut at = 1;
    loop {
        let word = words.get(at)?.to_str()?;
        if crate::WITH_VALUE.contains(&word) {
            at += 2;
        } else if word.starts_with('-') {
            at += 1;
        } else {
            return Some(at);
        }
    }
}

/// Returns the position at which a verb is missing, and the default verb.
fn missing(words: &[OsString]) -> Option<(usize, &'static str)> {
    let at = group_at(words)?;
    let verb = of_group(words[at].to_str()?)?;
    let rest = &words[at + 1..];
    let is_option = |word: &OsString| word.to_str().is_some_and(|word| word.starts_with('-'));
    let asks_for_help = words.iter().any(|word| word == OsStr::new("-h") || word == OsStr::new("--help"));
    (rest.first().is_none_or(is_option) && !asks_for_help).then_some((at + 1, verb))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::args::Cli;

    fn inserted(line: &str) -> String {
        let words = insert(line.split(' ').map(OsString::from).collect());
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn group_without_a_verb_gets_its_default_verb() {
        for (typed, meant) in [
            ("gpushctl lease", "gpushctl lease list"),
            ("gpushctl leases --mine", "gpushctl leases list --mine"),
            ("gpushctl -o json gpus", "gpushctl -o json gpus list"),
            ("gpushctl gpu -g 0", "gpushctl gpu list -g 0"),
            ("gpushctl op", "gpushctl op list"),
            ("gpushctl config --effective", "gpushctl config show --effective"),
            ("gpushctl advise --tenants 8", "gpushctl advise mechanism --tenants 8"),
            ("gpushctl advise --from-use", "gpushctl advise from-use"),
            ("gpushctl --json advise --from-use --since 7d gpu", "gpushctl --json advise from-use --since 7d gpu"),
            ("gpushctl advice --since 7d user --from-use", "gpushctl advice from-use --since 7d user"),
        ] {
            assert_eq!(inserted(typed), meant);
        }
    }

    #[test]
    fn complete_command_and_help_request_do_not_change() {
        for line in [
            "gpushctl",
            "gpushctl gpu --help",
            "gpushctl -h lease",
            "gpushctl lease show L17",
            "gpushctl gpu 0",
            "gpushctl status",
            "gpushctl --socket lease",
            "gpushctl maintenance",
            "gpushctl advise queue --from-use",
            "gpushctl usage --from-use",
        ] {
            assert_eq!(inserted(line), line);
        }
    }

    #[test]
    fn every_default_verb_is_a_command() {
        let cli = Cli::command();
        for (names, verb) in GROUPS {
            for name in names {
                let group = cli.find_subcommand(name).unwrap_or_else(|| panic!("{name} is not a group"));
                assert!(group.find_subcommand(verb).is_some(), "{name} {verb}");
            }
        }
    }
}
