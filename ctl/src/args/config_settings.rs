//! Finds commands that would change a setting of the config: gpushctl changes no config file.

use gpush_api::{ApiError, Code};

/// How a changed config file takes effect.
const CHANGE: &str =
    "edit the file that `gpushctl config check` names, check it with the same command, then run `gpushctl apply`";

/// Returns the error for a command line that would change a setting of the config. The words contain no options before
/// the command.
pub(super) fn error(words: &[&str]) -> Option<ApiError> {
    let refused = |what: String, hint: String| Some(ApiError::new(Code::BadRequest, what).hint(hint));
    let modes = ["mig", "mps", "timeslice", "time-slicing", "exclusive", "unmanaged", "shared"];
    let setters = ["set", "on", "off", "enable", "disable", "start", "stop", "create", "apply"];
    match words {
        ["config", "edit" | "set" | "change", ..] | ["edit", ..] => {
            refused("gpushctl does not edit the config file".to_owned(), CHANGE.to_owned())
        }
        ["quota" | "quotas", verb @ ("set" | "limit" | "edit" | "add" | "create" | "change"), ..] => refused(
            format!("`quota {verb}` is not a command: the config sets quotas"),
            "change [[quota]] in the file that `gpushctl config check` names, check it with the same command, then run \
             `gpushctl config reload`"
                .to_owned(),
        ),
        ["user" | "users", verb @ ("add" | "create" | "new" | "set" | "remove" | "delete" | "rm" | "del"), ..] => refused(
            format!("`users {verb}` is not a command: the users of gpush are those of the host"),
            format!("name users in `users` or `groups` of a rule or in [[quota]]: {CHANGE}"),
        ),
        [group, verb, ..]
            if (group.starts_with("timeslic") || *group == "time-slicing") && setters.contains(verb) =>
        {
            refused(
                format!("`{group} {verb}` is not a command: the rule of a GPU sets time-slicing"),
                format!("set `mode` and `timeslice` in the rule of the GPU: {CHANGE}"),
            )
        }
        ["gpu" | "gpus", verb, ..] if modes.contains(verb) || matches!(*verb, "mode" | "set-mode" | "set" | "share") => refused(
            format!("`gpu {verb}` is not a command: the rule of a GPU sets its mode"),
            format!("set `mode` in the rule of the GPU: {CHANGE}"),
        ),
        [verb @ ("enable" | "disable"), mode, ..] if *mode != "mig" && modes.contains(mode) => refused(
            format!("`{verb} {mode}` is not a command: the rule of a GPU sets its mode"),
            format!("set `mode` in the rule of the GPU: {CHANGE}"),
        ),
        [verb @ ("set" | "mode" | "share" | "set-mode"), rest @ ..]
            if rest.iter().any(|word| modes.contains(word) || super::words::is_index_list(word)) =>
        {
            refused(
                format!("`{verb}` is not a command: the rule of a GPU sets its mode"),
                format!("set `mode` in the rule of the GPU: {CHANGE}"),
            )
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> Option<(String, String)> {
        let words: Vec<&str> = line.split(' ').collect();
        error(&words).map(|error| (error.message, error.hint.unwrap_or_default()))
    }

    #[test]
    fn command_that_would_change_a_rule_leads_to_the_config() {
        for (line, message) in [
            ("timeslice set 0 short", "the rule of a GPU sets time-slicing"),
            ("gpu mode 6 mps", "`gpu mode` is not a command: the rule of a GPU sets its mode"),
            ("set 6 mps", "`set` is not a command: the rule of a GPU sets its mode"),
            ("gpu exclusive 7", "`gpu exclusive` is not a command"),
            ("enable mps 7", "`enable mps` is not a command"),
            ("set-mode 7 mps", "`set-mode` is not a command"),
            ("share 6", "`share` is not a command: the rule of a GPU sets its mode"),
        ] {
            let (error, hint) = refused(line).unwrap();
            assert!(error.contains(message), "{line}: {error}");
            assert!(hint.starts_with("set `mode`") && hint.contains("then run `gpushctl apply`"), "{line}: {hint}");
        }
        for right in
            ["config show", "quota", "quota anna", "gpu show 0", "mps set 0 --percentage 25", "share", "enable mig 0"]
        {
            assert_eq!(refused(right), None, "{right}");
        }
    }

    /// Fault: the hint named /etc/gpush/config.toml although gpushd used another file.
    #[test]
    fn hint_of_config_edit_names_no_path() {
        for line in ["config edit", "edit", "users add anna", "config set x", "quota set anna --leases 3"] {
            let (_, hint) = refused(line).unwrap();
            assert!(!hint.contains(".toml") && hint.contains("`gpushctl config check` names"), "{line}: {hint}");
        }
        assert!(refused("quota set anna --leases 3").unwrap().1.contains("[[quota]]"));
    }
}
