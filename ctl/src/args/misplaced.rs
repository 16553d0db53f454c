//! Finds words that a command reads as the names of GPUs, but that name something else: a reason, a file, a device of
//! a program.

use gpush_api::{ApiError, Code};

use super::{
    typed,
    words::{is_index_list, is_number, lease},
};

/// Returns the error for a command line with such a word. The words contain no options before the command.
pub(super) fn error(words: &[&str]) -> Option<ApiError> {
    let checks = [
        reason_as_gpu,
        prefixed_index,
        config_file,
        undo_of_operation,
        drain_of_slurm,
        resize,
        transfer,
        mine,
        renewal_of_all,
        author_of_changes,
        order_of_top,
        user_of_command,
    ];
    checks.iter().find_map(|check| check(words))
}

fn refused(message: String, hint: impl Into<String>) -> ApiError {
    ApiError::new(Code::BadRequest, message).hint(hint)
}

fn did_you_mean<'w>(words: impl IntoIterator<Item = &'w str>) -> Option<String> {
    let meant = typed::command_line(["gpushctl"].into_iter().chain(words))?;
    Some(format!("did you mean `{meant}`?"))
}

/// Refuses `gpu cordon 6 fan replacement`.
fn reason_as_gpu(words: &[&str]) -> Option<ApiError> {
    let ["gpu" | "gpus", verb @ ("cordon" | "drain" | "uncordon" | "undrain" | "reset"), gpus, rest @ ..] = words
    else {
        return None;
    };
    let is_text = |word: &str| word.bytes().all(|byte| byte.is_ascii_alphabetic()) && word != "all";
    let reason: Vec<&str> = rest.iter().take_while(|word| !word.starts_with('-')).copied().collect();
    let first = *reason.first()?;
    if !(is_index_list(gpus) || *gpus == "all") || !is_text(first) || words.contains(&"--reason") {
        return None;
    }
    let text = reason.join(" ");
    let meant = ["gpu", verb, gpus, "--reason", &text].into_iter().chain(rest[reason.len()..].iter().copied());
    Some(refused(format!("`{first}` is not a GPU, and a reason follows --reason"), did_you_mean(meant)?))
}

/// Refuses `status cuda:0`, `status GPU0` and `status gpu 0`: the index of a GPU is a number alone.
fn prefixed_index(words: &[&str]) -> Option<ApiError> {
    if !matches!(words.first(), Some(&("status" | "top" | "ps" | "gpu" | "gpus" | "mig" | "mps"))) {
        return None;
    }
    let is_noun = |word: &str| word.eq_ignore_ascii_case("gpu");
    let number = |at: usize| words.get(at).filter(|word| is_number(word));
    if let Some(at) = (1..words.len()).find(|at| is_noun(words[*at]) && number(at + 1).is_some()) {
        let meant = words.iter().enumerate().filter(|(one, _)| *one != at).map(|(_, word)| *word);
        return Some(refused(format!("`{}` is not a GPU", words[at]), did_you_mean(meant)?));
    }
    let index = |word: &str| {
        let number =
            word.strip_prefix("cuda:").or_else(|| word.get(..3).filter(|of| is_noun(of)).map(|_| &word[3..]))?;
        is_number(number).then(|| number.to_owned())
    };
    let (word, number) = words.iter().find_map(|word| Some((*word, index(word)?)))?;
    let meant = words.iter().map(|one| if *one == word { number.as_str() } else { one });
    let message = format!("`{word}` is not a GPU of the host; gpushctl names GPUs by their index on the host");
    Some(refused(message, did_you_mean(meant)?))
}

/// Refuses `lease transfer L1 anna`: a lease belongs to one user.
fn transfer(words: &[&str]) -> Option<ApiError> {
    let ["lease" | "leases", "transfer" | "move" | "chown", id, ..] = words else { return None };
    let id = lease(id)?;
    Some(refused(
        format!("cannot transfer {id}: the holder of a lease does not change"),
        format!(
            "end it with `gpushctl lease end {id}`, or as an administrator with `gpushctl lease end {id} --reason TEXT`; \
            then request a lease for the other user, with `--user USER` (administrator)"
        ),
    ))
}

/// Refuses `lease list me`: gpushctl would read `me` as a GPU.
fn mine(words: &[&str]) -> Option<ApiError> {
    let ["lease" | "leases", "list" | "ls", word @ ("me" | "mine" | "my"), rest @ ..] = words else { return None };
    let meant = ["lease", "list", "--mine"].into_iter().chain(rest.iter().copied());
    Some(refused(format!("`{word}` is not a GPU"), did_you_mean(meant)?))
}

/// Refuses `lease renew --all`: a renewal names one lease.
fn renewal_of_all(words: &[&str]) -> Option<ApiError> {
    let ["lease" | "leases", "renew" | "extend", rest @ ..] = words else { return None };
    let duration = rest.windows(2).find(|two| two[0] == "--for").map_or("2h", |two| two[1]);
    let meant = typed::command_line(["gpushctl", "lease", "renew", "L17", "--for", duration])?;
    rest.iter().any(|word| matches!(*word, "--all" | "-a" | "all")).then(|| {
        refused(
            "`lease renew` renews one lease at a time".to_owned(),
            format!("`gpushctl lease list --mine` lists your leases; renew each, as with `{meant}`"),
        )
    })
}

/// Refuses `audit --user bob`: the audit trail is filtered by what was changed.
fn author_of_changes(words: &[&str]) -> Option<ApiError> {
    let ["audit", rest @ ..] = words else { return None };
    let is_author = |word: &str| matches!(word.split('=').next(), Some("--user" | "-u" | "--who" | "--by"));
    let at = rest.iter().position(|word| is_author(word))?;
    let name = rest[at].split_once('=').map(|(_, name)| name).or_else(|| rest.get(at + 1).copied()).unwrap_or("USER");
    let search = typed::command_line(["grep", "-w", name])?;
    let option = rest[at].split('=').next().unwrap_or_default();
    Some(refused(
        format!("`{option}` is not an option of `audit`, which filters by object, not by who made a change"),
        format!("search the list: `gpushctl audit | {search}`"),
    ))
}

/// Refuses `top --sort memory`: a key sorts the rows.
fn order_of_top(words: &[&str]) -> Option<ApiError> {
    let ["top", rest @ ..] = words else { return None };
    let option =
        rest.iter().find_map(|word| word.split('=').next().filter(|name| matches!(*name, "--sort" | "--sort-by")))?;
    Some(refused(
        format!("`{option}` is not an option of `top`: a key sorts the rows"),
        "start `gpushctl top`, then press o and the letter of an order, such as m for memory",
    ))
}

/// Refuses `run --user bob`: a command runs as the user who typed it.
fn user_of_command(words: &[&str]) -> Option<ApiError> {
    let ["run", rest @ ..] = words else { return None };
    let end =
        rest.iter().position(|word| *word == "--").or_else(|| rest.iter().position(|word| !word.starts_with('-')));
    let options = &rest[..end.unwrap_or(rest.len())];
    let option = options.iter().position(|word| word.split('=').next() == Some("--user"))?;
    let name = rest[option].split_once('=').map(|(_, name)| name).or_else(|| rest.get(option + 1).copied())?;
    let request = typed::command_line(["gpushctl", "lease", "request", "--user", name, "--for", "2h"])?;
    Some(refused(
        "`--user` is not an option of `run`: the command runs as the user who types it".to_owned(),
        format!("to request a lease for {name}, use `{request}` (administrator)"),
    ))
}

/// Refuses `apply host.toml`: `apply` uses the config file of gpushd.
fn config_file(words: &[&str]) -> Option<ApiError> {
    let ["apply", file, ..] = words else { return None };
    let is_config = file.ends_with(".toml");
    let is_parted = [".yaml", ".yml"].iter().any(|end| file.ends_with(end));
    let message = format!("`{file}` is not a GPU: `apply` uses the config file of gpushd");
    let command = |words: &[&str]| typed::command_line(words.iter().copied().chain([*file]));
    if is_config {
        let check = command(&["gpushctl", "config", "check"])?;
        return Some(refused(message, format!("check another file with `{check}`")));
    }
    let parted = is_parted.then(|| command(&["gpushctl", "mig", "apply", "--file"])).flatten()?;
    Some(refused(message, format!("for a mig-parted file, use `{parted}`")))
}

/// Refuses `operation undo op-20`: only the last change of a GPU can be undone.
fn undo_of_operation(words: &[&str]) -> Option<ApiError> {
    let verbs = ["undo", "rollback", "revert"];
    let (verb, id) = match words {
        ["operation" | "operations" | "op" | "ops", verb, id] | [verb, id] => (*verb, *id),
        _ => return None,
    };
    let is_operation = id.strip_prefix("op-").is_some_and(is_number);
    (verbs.contains(&verb) && is_operation).then(|| {
        refused(
            format!("cannot undo {id}: only the last change of a GPU can be undone"),
            "`gpushctl apply --undo --dry-run` shows the last change and the layout before it",
        )
    })
}

/// Refuses `scontrol update nodename=… state=drain`.
fn drain_of_slurm(words: &[&str]) -> Option<ApiError> {
    let ["scontrol", "update", rest @ ..] = words else { return None };
    let value = |name: &str| {
        rest.iter().find_map(|word| {
            let (key, value) = word.split_once('=')?;
            key.eq_ignore_ascii_case(name).then_some(value)
        })
    };
    let verb = match value("state")?.to_ascii_lowercase().as_str() {
        "drain" | "draining" | "drained" | "down" => "drain",
        "resume" | "idle" | "undrain" => "uncordon",
        _ => return None,
    };
    let reason = value("reason").map(|reason| ["--reason", reason]).into_iter().flatten();
    let meant = did_you_mean(["gpu", verb, "all"].into_iter().chain(reason))?;
    Some(refused("`scontrol` is a command of Slurm".to_owned(), meant))
}

/// Refuses `mig resize 1g.10gb 2g.20gb`: NVIDIA's driver cannot resize an instance.
fn resize(words: &[&str]) -> Option<ApiError> {
    let ["mig", verb @ ("resize" | "grow" | "shrink" | "move" | "modify"), ..] = words else { return None };
    Some(refused(
        format!("`mig {verb}` is not a command: an instance cannot be changed, only replaced"),
        "write the whole new layout, as in `gpushctl mig apply 3g.40gb,2g.20gb -g GPU --dry-run`",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(line: &str) -> Option<String> {
        let words: Vec<&str> = line.split(' ').collect();
        error(&words).map(|error| error.hint.unwrap_or_default())
    }

    #[test]
    fn word_that_is_not_a_gpu_leads_to_its_command() {
        for (typed, meant) in [
            ("gpu cordon 6 fan replacement", "gpu cordon 6 --reason 'fan replacement'"),
            ("gpu drain 0-3 upgrade --timeout 1h", "gpu drain 0-3 --reason upgrade --timeout 1h"),
            ("status cuda:0", "status 0"),
            ("status gpu 0", "status 0"),
            ("status GPU0", "status 0"),
            ("gpu show gpu1 -o json", "gpu show 1 -o json"),
            ("mig list cuda:2 --free", "mig list 2 --free"),
            ("scontrol update nodename=gpu01 state=drain", "gpu drain all"),
            ("scontrol update NodeName=gpu01 State=DRAIN Reason=fan", "gpu drain all --reason fan"),
            ("scontrol update nodename=gpu01 state=resume", "gpu uncordon all"),
            ("lease list me -o json", "lease list --mine -o json"),
        ] {
            assert_eq!(hint(typed), Some(format!("did you mean `gpushctl {meant}`?")), "{typed}");
        }
        for right in [
            "status 0",
            "status L4",
            "gpu cordon 6 --reason fan",
            "gpu cordon 0 1 2",
            "gpu cordon 0 all",
            "gpu 0",
            "gpu reset 0 GPU-5e8c07a4",
            "lease show L3",
            "apply 0",
            "scontrol show node",
        ] {
            assert_eq!(hint(right), None, "{right}");
        }
    }

    /// Faults: `audit --user bob` led to changes of the object bob, and the other lines had no hint.
    #[test]
    fn option_that_a_command_does_not_have_leads_to_what_it_has() {
        for (typed, part) in [
            ("audit --user bob", "`gpushctl audit | grep -w bob`"),
            ("audit --by=bob --since 1d", "`gpushctl audit | grep -w bob`"),
            ("lease renew --all", "`gpushctl lease renew L17 --for 2h`"),
            ("lease renew --all --for 1h", "`gpushctl lease renew L17 --for 1h`"),
            ("top --sort memory", "press o"),
            ("run --user bob ./x", "`gpushctl lease request --user bob --for 2h` (administrator)"),
            ("run --user=bob -- ./x", "`gpushctl lease request --user bob --for 2h` (administrator)"),
        ] {
            assert!(hint(typed).is_some_and(|hint| hint.contains(part)), "{typed}: {:?}", hint(typed));
        }
        for right in ["audit --object L3", "lease renew L3 --for 1h", "top 0", "run docker run --user 1000 x"] {
            assert_eq!(hint(right), None, "{right}");
        }
    }

    #[test]
    fn file_after_apply_leads_to_a_command_for_files() {
        assert_eq!(hint("apply new.toml").as_deref(), Some("check another file with `gpushctl config check new.toml`"));
        let parted = "for a mig-parted file, use `gpushctl mig apply --file new.yaml`";
        assert_eq!(hint("apply new.yaml").as_deref(), Some(parted));
    }

    /// Fault: the hint for `operation undo op-20` undid the last operation, whatever it was.
    #[test]
    fn undo_of_an_operation_says_what_can_be_undone() {
        for line in ["operation undo op-20", "op revert op-20", "undo op-20"] {
            let words: Vec<&str> = line.split(' ').collect();
            let error = error(&words).unwrap();
            assert_eq!(error.message, "cannot undo op-20: only the last change of a GPU can be undone");
            assert!(error.hint.unwrap().starts_with("`gpushctl apply --undo --dry-run` shows"));
        }
    }

    #[test]
    fn resize_of_an_instance_leads_to_a_new_layout() {
        assert!(hint("lease transfer L1 anna").unwrap().starts_with("end it with `gpushctl lease end L1`, or as"));
        assert!(hint("mig resize 1g.10gb 2g.20gb").unwrap().contains("`gpushctl mig apply "));
    }
}
