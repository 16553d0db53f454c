//! Hints for a command line that lacks arguments: `lease end L17 --reason x --notice 5m` needs `--kill`.

use clap::{
    Parser as _,
    error::{ContextKind, ContextValue, Error, ErrorKind},
};

use super::{Cli, phrases::Meant, words::lease};

/// Options that can be completed: their names in clap's errors, and the words to add. A value is an example, or a
/// placeholder if only the user knows it.
const OPTIONS: [(&str, &[&str]); 8] = [
    ("--kill", &["--kill"]),
    ("--reason <TEXT>", &["--reason", "TEXT"]),
    ("--for <DURATION>", &["--for", "2h"]),
    ("--end-after <DURATION>", &["--end-after", "1h"]),
    ("--wait[=<DURATION>]", &["--wait"]),
    ("--file <FILE>", &["--file", "FILE"]),
    ("--offline <PRESET|FILE>", &["--offline", "dgx-h100"]),
    ("<--check|--dry-run>", &["--dry-run"]),
];

/// Arguments that only the user knows: their names in clap's errors, and a hint. A hint names no object, because the
/// command may end or change it.
const OBJECTS: [(&str, &str); 9] = [
    ("<LEASE>", "name a lease, such as L17; `gpushctl lease list --mine` lists your leases"),
    ("<GPU>", "name GPUs by index, such as 0 or 0-3; `gpushctl gpu list` lists the GPUs"),
    ("<TARGET>", "name a GPU or a MIG device, such as 0; `gpushctl mps list` lists those that are shared through MPS"),
    (
        "<ENTRY>",
        "name instances, such as 1g.10gb; `gpushctl mig list` lists the instances, and `gpushctl mig profiles` the \
         profiles",
    ),
    ("<ID>", "name an operation, such as op-17; `gpushctl operation list` lists the operations"),
    ("<SHELL>", "name a shell: bash, elvish, fish, powershell or zsh"),
    ("<--percentage", "name a limit, such as --percentage 25"),
    ("<FILE>", "name a file"),
    ("<DIR>", "name a directory"),
];

/// Most arguments that are added to one command line.
const MOST_ADDED: usize = 3;

/// Returns the names of the missing arguments, as clap writes them; none if no argument is missing.
pub(crate) fn names(error: &Error) -> Vec<String> {
    if error.kind() != ErrorKind::MissingRequiredArgument {
        return Vec::new();
    }
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::Strings(names)) => names.clone(),
        Some(ContextValue::String(name)) => vec![name.clone()],
        _ => Vec::new(),
    }
}

/// Returns the typed command line with the missing options, and those that the added ones need. Returns `None` if
/// gpushctl does not accept the result, or no option is missing.
pub(crate) fn completed(error: &Error, typed: &[&str]) -> Option<Meant> {
    let mut words: Vec<String> = typed.iter().map(|word| (*word).to_owned()).collect();
    let mut missing = names(error);
    for _ in 0..MOST_ADDED {
        for name in &missing {
            if name.starts_with("<COMMAND>") {
                words.extend(["--".to_owned(), "COMMAND".to_owned()]);
                continue;
            }
            let (_, added) = OPTIONS.iter().find(|(option, _)| option == name)?;
            let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
            words.splice(end..end, added.iter().map(|word| (*word).to_owned()));
        }
        match Cli::try_parse_from(["gpushctl".to_owned()].iter().chain(&words)) {
            Ok(_) => return (words.len() > typed.len()).then_some(Meant::Gpushctl(words)),
            Err(error) => missing = names(&error),
        }
        if missing.is_empty() {
            return None;
        }
    }
    None
}

/// Returns what an added option does, if the user did not ask for it.
pub(crate) fn remark(error: &Error) -> &'static str {
    if names(error).iter().any(|name| name == "--kill") { " --kill ends the processes too" } else { "" }
}

/// Returns the hint for `lease end L1 --kill` of a user who is not root: only administrators end processes through gpushd.
pub(crate) fn kill_of_user(error: &Error, typed: &[&str]) -> Option<String> {
    let is_end = typed.windows(2).any(|two| matches!(two, ["lease" | "leases", "end"]));
    let is_killed = typed.iter().any(|word| matches!(word.split('=').next(), Some("--kill" | "--notice" | "--grace")));
    let lacks_reason = names(error).iter().any(|name| name.starts_with("--reason"));
    let ids: Vec<String> = typed.iter().filter_map(|word| lease(word)).collect();
    if !is_end || !is_killed || !lacks_reason || ids.is_empty() {
        return None;
    }
    let ids = ids.join(" ");
    Some(format!(
        "did you mean `gpushctl lease end {ids}`? `gpushctl ps` lists the processes of a lease: end yours with \
        `kill PID`. Administrators end all of them with `gpushctl lease end {ids} --kill --reason TEXT`"
    ))
}

/// Returns the hint for a missing argument that only the user knows.
pub(crate) fn object(error: &Error) -> Option<String> {
    let missing = names(error);
    let first = missing.first()?;
    let object = OBJECTS.iter().find(|(name, _)| first.starts_with(name))?;
    Some(object.1.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint_of(line: &str) -> Option<String> {
        let words: Vec<&str> = line.split(' ').collect();
        let error = Cli::try_parse_from(&words).unwrap_err();
        match completed(&error, &words[1..]) {
            Some(Meant::Gpushctl(words)) => {
                Some(format!("did you mean `gpushctl {}`?{}", words.join(" "), remark(&error)))
            }
            Some(Meant::Other(_)) | None => object(&error),
        }
    }

    #[test]
    fn missing_option_is_added_to_the_typed_command() {
        for (typed, meant) in [
            ("lease end L28 --kill", "lease end L28 --kill --reason TEXT"),
            ("lease end L28 --kill --notice 10m", "lease end L28 --kill --notice 10m --reason TEXT"),
            ("lease end --user anna", "lease end --user anna --reason TEXT"),
            ("lease renew L3", "lease renew L3 --for 2h"),
            ("gpu drain 0 --notice 5m", "gpu drain 0 --notice 5m --end-after 1h"),
            ("mps stop 0 --end-after 5m", "mps stop 0 --end-after 5m --wait"),
            ("run --mig 1g.10gb", "run --mig 1g.10gb -- COMMAND"),
        ] {
            let meant = format!("did you mean `gpushctl {meant}`?");
            assert_eq!(hint_of(&format!("gpushctl {typed}")), Some(meant), "{typed}");
        }
    }

    /// Fault: the hint for `lease end L28 --reason x --notice 5s` was the same command with `--help`.
    #[test]
    fn hint_that_adds_kill_says_what_it_ends() {
        for (typed, meant) in [
            ("lease end L28 --reason x --notice 5s", "lease end L28 --reason x --notice 5s --kill"),
            ("lease end L28 --grace 10m", "lease end L28 --grace 10m --reason TEXT --kill"),
        ] {
            let meant = format!("did you mean `gpushctl {meant}`? --kill ends the processes too");
            assert_eq!(hint_of(&format!("gpushctl {typed}")), Some(meant), "{typed}");
        }
    }

    /// Fault: a user was advised to add a reason, which only administrators may give.
    #[test]
    fn user_ends_processes_without_gpushd() {
        let hint = |line: &str| {
            let words: Vec<&str> = line.split(' ').collect();
            kill_of_user(&Cli::try_parse_from(&words).unwrap_err(), &words[1..])
        };
        let text = hint("gpushctl lease end L1 --kill").unwrap();
        assert!(text.starts_with("did you mean `gpushctl lease end L1`?") && text.contains("`kill PID`"), "{text}");
        assert_eq!(hint("gpushctl lease end --kill"), None);
        assert_eq!(hint("gpushctl lease end --user anna"), None);
    }

    #[test]
    fn missing_object_is_named_by_its_kind() {
        for (typed, part) in [
            ("lease end", "`gpushctl lease list --mine` lists"),
            ("gpu cordon", "`gpushctl gpu list` lists"),
            ("mig off", "`gpushctl gpu list` lists"),
            ("mps start", "`gpushctl mps list` lists"),
            ("mps show", "`gpushctl mps list` lists"),
            ("mps set 0", "--percentage 25"),
            ("mig add -g 0", "`gpushctl mig profiles`"),
            ("operation cancel", "`gpushctl operation list` lists"),
        ] {
            let hint = hint_of(&format!("gpushctl {typed}")).unwrap_or_default();
            assert!(hint.contains(part), "{typed}: {hint}");
        }
    }
}
