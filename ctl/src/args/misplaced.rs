//! Finds words that a command reads as the names of GPUs, but that name something else: a reason, a file, a device of
//! a program.

use gpush_api::{ApiError, Code};

use super::{
    typed,
    words::{is_index_list, is_number, lease},
};

/// Returns the error for a command line with such a word. The words contain no options before the command.
pub(super) fn error(words: &[&str]) -> Option<ApiError> {
    let checks =
        [reason_as_gpu, prefixed_index, config_file, undo_of_operation, drain_of_slurm, resize, transfer, mine];
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
