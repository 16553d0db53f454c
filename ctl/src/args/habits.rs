//! Finds command lines in the form of nvidia-smi or other tools. The error names the form that gpushctl accepts.

use std::ffi::OsString;

use gpush_api::{ApiError, Code};
use gpush_core::duration::is_duration;

use super::{config_settings, misplaced, misplaced_options, typed, words};

/// Returns the error for a command line that has the form of another tool; `None` for all other command lines.
pub(crate) fn error(args: &[OsString]) -> Option<ApiError> {
    let all: Vec<&str> = args.iter().skip(1).map_while(|arg| arg.to_str()).collect();
    if let Some(error) = misplaced_options::error(&all[command_at(&all)..]) {
        return Some(error);
    }
    let words: Vec<&str> = all.into_iter().take_while(|word| *word != "--").collect();
    let after_options = &words[command_at(&words)..];
    let checks = [value_after_optional, duration_of_two_words, number_after_ended, gpu_as_entry, detached, mps_env];
    let of_command = [kill_of_process, options_of_ps, config_settings::error, nvidia_smi, file_as_f, misplaced::error];
    let found = checks.iter().find_map(|check| check(&words));
    found.or_else(|| of_command.iter().find_map(|check| check(after_options)))
}

/// Returns the position of the first word that is not a global option of gpushctl.
fn command_at(words: &[&str]) -> usize {
    let mut at = 0;
    while let Some(word) = words.get(at) {
        let name = word.split('=').next().unwrap_or_default();
        match name {
            "--json" | "--no-headers" | "--ascii" => at += 1,
            _ if crate::WITH_VALUE.contains(&name) => at += if word.contains('=') { 1 } else { 2 },
            _ => break,
        }
    }
    at.min(words.len())
}

/// Option whose value must follow an equals sign.
const WAIT: &str = "--wait";

/// Refuses `--ended 3`. Without this error, gpushctl would read `3` as a GPU.
fn number_after_ended(words: &[&str]) -> Option<ApiError> {
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
    let two = words.windows(2).find(|two| two[0] == "--ended" && is_number(two[1]))?;
    let number = two[1];
    let message = format!("`--ended {number}` is ambiguous: the number of --ended must follow an equals sign");
    let hint = format!("write `--ended={number}` for the last {number} leases, or `-g {number}` for GPU {number}");
    Some(ApiError::new(Code::BadRequest, message).hint(hint))
}

/// Refuses `--wait 30`. Without this error, gpushctl would read `30` as a layout or a GPU.
fn value_after_optional(words: &[&str]) -> Option<ApiError> {
    let found = words.windows(2).enumerate().find(|(_, two)| two[0] == WAIT && is_duration(two[1]));
    let (at, value) = found.map(|(at, two)| (at, two[1]))?;
    // The unit may be the next word: `--wait 5 minutes`.
    let joined = words.get(at + 2).and_then(|unit| words::joined_duration(value, unit));
    let message = format!("`{WAIT} {value}` is ambiguous: the duration of {WAIT} must follow an equals sign");
    let hint = match joined {
        Some(joined) => format!("write `{WAIT}={joined}`"),
        None if words::is_number(value) => format!("write `{WAIT}={value}s` or `{WAIT}={value}m`"),
        None => format!("write `{WAIT}={value}`"),
    };
    Some(ApiError::new(Code::BadRequest, message).hint(hint))
}

/// Refuses `--since 1 hour`. Without this error, gpushctl would read `hour` as a GPU.
fn duration_of_two_words(words: &[&str]) -> Option<ApiError> {
    let joined = words::joined_durations(words)?;
    let differs = words.iter().zip(&joined).position(|(typed, joined)| typed != joined).unwrap_or(joined.len());
    // Of `1h ago`, only the second word is too much.
    let at = if words.get(differs) == Some(&"ago") { differs.checked_sub(1)? } else { differs };
    let (number, unit) = (words.get(at)?, words.get(at + 1)?);
    // The command of `run` is not among these words.
    if words.get(command_at(words)) == Some(&"run") || !words::can_be_parsed(&joined) {
        return None;
    }
    let meant = typed::command_line(["gpushctl"].into_iter().chain(joined.iter().map(String::as_str)))?;
    let message = format!("`{number} {unit}` is not valid: a duration is one word, such as {}", joined[at]);
    Some(ApiError::new(Code::BadRequest, message).hint(format!("did you mean `{meant}`?")))
}

/// Refuses `mig add 1g.10gb 0`, because GPUs are named with `-g`.
fn gpu_as_entry(words: &[&str]) -> Option<ApiError> {
    let at = words.windows(2).position(|two| two[0] == "mig" && ["add", "remove", "rm"].contains(&two[1]))?;
    let entries: Vec<&str> = words[at + 2..].iter().take_while(|word| !word.starts_with('-')).copied().collect();
    let (last, profiles) = entries.split_last()?;
    let is_gpu = |word: &str| words::is_index_list(word);
    if !is_gpu(last) || profiles.is_empty() || profiles.iter().any(|word| is_gpu(word)) {
        return None;
    }
    let mut meant: Vec<&str> = words.to_vec();
    meant.splice(at + 1 + entries.len()..at + 2 + entries.len(), ["-g", last]);
    let meant = typed::command_line(["gpushctl"].into_iter().chain(meant))?;
    let message = format!("`{last}` is not a layout entry: layouts name profiles, and `-g` names GPUs");
    Some(ApiError::new(Code::BadRequest, message).hint(format!("did you mean `{meant}`?")))
}

/// Refuses `--detach` for a command that gpushctl itself carries out, because no other process would continue the
/// command.
fn detached(words: &[&str]) -> Option<ApiError> {
    let named = |noun: &str, verb: &str| words.windows(2).any(|two| two == [noun, verb]);
    let is_detached = words.contains(&"--detach");
    let (command, what) = match () {
        () if !is_detached => return None,
        () if named("gpu", "reset") || named("gpus", "reset") => ("gpu reset", "runs the reset"),
        () if named("maintenance", "enter") => ("maintenance enter", "waits"),
        () => return None,
    };
    let message = format!("`{command}` has no `--detach`: gpushctl itself {what}, so gpushctl must keep running");
    let hint = "to run the command in the background, leave out `--detach`, and add & at the end";
    Some(ApiError::new(Code::BadRequest, message).hint(hint))
}

/// Options of nvidia-smi that gpushctl does not have: what nvidia-smi does, and a hint. `{gpu}` is replaced by the GPU
/// after `-i`, and `{profiles}` by the names of the profiles after the option.
const NVIDIA_SMI: [(&str, &str, &str); 20] = [
    ("-lgip", "list GPU instance profiles", "use `gpushctl mig profiles`"),
    ("-lgipp", "list possible placements", "use `gpushctl mig profiles`"),
    ("-lcip", "list compute instance profiles", "use `gpushctl mig profiles`"),
    ("-lgi", "list GPU instances", "use `gpushctl mig list`"),
    ("-lci", "list compute instances", "use `gpushctl mig list`"),
    ("-cgi", "create GPU instances", CREATE),
    ("--create-gpu-instance", "create GPU instances", CREATE),
    ("-cci", "create compute instances", "name them in the entry, such as `gpushctl mig add 1c.3g.40gb -g {gpu}`"),
    ("-dgi", "destroy GPU instances", DESTROY),
    ("--destroy-gpu-instance", "destroy GPU instances", DESTROY),
    ("-dci", "destroy compute instances", DESTROY),
    ("-gi", "name GPU instances", DESTROY),
    ("--gi", "name GPU instances", DESTROY),
    ("-mig", "set the MIG mode", "use `gpushctl mig on {gpu}` or `gpushctl mig off {gpu}`"),
    ("-L", "list GPUs", "use `gpushctl gpu list`"),
    ("--list-gpus", "list GPUs", "use `gpushctl gpu list`"),
    ("-pm", "set the persistence mode", "gpush does not change this mode: use `nvidia-smi -pm 1`"),
    ("--persistence-mode", "set the persistence mode", "gpush does not change this mode: use `nvidia-smi -pm 1`"),
    ("-pl", "set the power limit", "gpush does not change this limit: use `nvidia-smi -pl WATTS`"),
    ("--gpu-reset", "reset a GPU", "use `gpushctl gpu reset {gpu}`"),
];

const CREATE: &str = "use `gpushctl mig add {profiles} -g {gpu}`; `gpushctl mig profiles {gpu}` lists the profiles";

const DESTROY: &str = "use `gpushctl mig remove PROFILE@START -g {gpu}`; `gpushctl mig list {gpu}` lists the instances";

/// Commands of nvidia-smi. The fields are those of `NVIDIA_SMI`.
const NVIDIA_SMI_COMMANDS: [(&str, &str, &str); 5] = [
    ("topo", "show how GPUs are connected", "gpush does not show this: use `nvidia-smi topo -m`"),
    ("pmon", "show processes", "use `gpushctl ps`"),
    ("dmon", "show sensors", "use `gpushctl top`"),
    (
        "compute-policy",
        "set the time-slice",
        "set `timeslice.level` in the rule of the GPU; `gpushctl config show` shows the rules",
    ),
    ("nvlink", "show NVLinks", "gpush does not show them: use `nvidia-smi nvlink -s`"),
];

/// Options that both nvidia-smi and gpushctl have. If no command precedes such an option, the user meant nvidia-smi.
/// The fields are those of `NVIDIA_SMI`.
const NVIDIA_SMI_ALONE: [(&str, &str, &str); 10] = [
    ("-q", "show details of GPUs", "use `gpushctl gpu show {gpu}`"),
    ("--query", "show details of GPUs", "use `gpushctl gpu show {gpu}`"),
    ("--query-gpu", "print values of GPUs", "use `gpushctl gpu list -o csv`"),
    ("-r", "reset a GPU", "use `gpushctl gpu reset {gpu}`"),
    ("-l", "repeat the output", "use `gpushctl top`"),
    ("--loop", "repeat the output", "use `gpushctl top`"),
    (
        "-c",
        "set the compute mode",
        "set `mps.compute_mode` or `timeslice.compute_mode` in the rule of the GPU; `gpushctl config show` shows the rules",
    ),
    ("-a", "show details of GPUs", "use `gpushctl gpu show`"),
    ("-i", "name a GPU", "use `gpushctl status {gpu}`"),
    ("--id", "name a GPU", "use `gpushctl status {gpu}`"),
];

fn nvidia_smi(words: &[&str]) -> Option<ApiError> {
    let is_named = words.first() == Some(&"nvidia-smi");
    let unknown =
        || ApiError::new(Code::BadRequest, "`nvidia-smi` is not a command of gpushctl").hint("use `gpushctl status`");
    let words = match words {
        ["nvidia-smi", rest @ ..] => rest,
        // The options after these words belong to the program that the user starts.
        ["run" | "exec" | "srun" | "sbatch" | "salloc" | "alloc" | "start" | "docker" | "podman", ..] => return None,
        [program, ..] if words::is_program(program) => return None,
        all => all,
    };
    // Leave out a value after `=`, because nvidia-smi also accepts `--query-gpu=name`.
    let names = |word: &str| word.split('=').next().unwrap_or_default().to_owned();
    let is_value = |word: &&str| word.starts_with('-') || word.bytes().all(|b| b.is_ascii_digit() || b == b',');
    let all: Vec<String> = words.iter().map(|word| names(word)).collect();
    let alone: Vec<String> = words.iter().take_while(|word| is_value(word)).map(|word| names(word)).collect();
    let find = |table: &'static [(&str, &str, &str)], among: &[String]| {
        table.iter().find(|(option, ..)| among.iter().any(|word| word == option))
    };
    let first = words.first().and_then(|first| NVIDIA_SMI_COMMANDS.iter().find(|(command, ..)| command == first));
    let found = find(&NVIDIA_SMI, &all).or_else(|| find(&NVIDIA_SMI_ALONE, &alone));
    let Some((word, what, hint)) = found.or(first) else { return is_named.then(unknown) };
    let after = |two: &&[&str]| two[0] == "-i" || two[0] == "--id";
    let gpu = words.windows(2).find(after).map_or("0", |two| two[1]);
    let kind = if word.starts_with('-') { "an option" } else { "a command" };
    let message = format!("`{word}` is {kind} of nvidia-smi, which uses it to {what}");
    let value = words.windows(2).find(|two| two[0] == *word).map_or("", |two| two[1]);
    let hint = hint.replace("{gpu}", gpu).replace("{profiles}", &counted_profiles(value));
    Some(ApiError::new(Code::BadRequest, message).hint(hint))
}

/// Writes a list of profile names as a layout for a shell: `3g.40gb,3g.40gb` as `'3g.40gb*2'`. For other values, such as profile ids,
/// returns the placeholder `PROFILE`.
fn counted_profiles(list: &str) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for name in list.split(',') {
        if !name.contains("g.") {
            return "PROFILE".to_owned();
        }
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    let entry =
        |(name, count): &(&str, usize)| if *count == 1 { (*name).to_owned() } else { format!("{name}*{count}") };
    let layout = counts.iter().map(entry).collect::<Vec<_>>().join(",");
    if layout.contains('*') { format!("'{layout}'") } else { layout }
}

/// Refuses `kill 1234`: gpushctl ends leases, not single processes.
fn kill_of_process(words: &[&str]) -> Option<ApiError> {
    let is_pid = |word: &&str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let (["kill", pid] | ["process" | "ps", "kill", pid]) = words else { return None };
    is_pid(pid).then(|| {
        let message = format!("`kill` is not a command: gpushctl ends leases, not single processes such as {pid}");
        ApiError::new(Code::BadRequest, message).hint(format!(
            "`gpushctl ps` shows the lease of process {pid}; then end the lease and its processes with \
            `gpushctl lease end L17 --kill --reason TEXT` (administrator), or end your process with `kill {pid}`"
        ))
    })
}

/// Refuses `ps aux`. Without this error, gpushctl would read `aux` as a GPU.
fn options_of_ps(words: &[&str]) -> Option<ApiError> {
    let ["ps", options @ ("aux" | "auxw" | "auxww" | "auxf" | "ax" | "ef"), ..] = words else { return None };
    let message = format!("`{options}` is an option of another `ps`: gpushctl lists the processes on GPUs");
    Some(ApiError::new(Code::BadRequest, message).hint("use `gpushctl ps`"))
}

/// Refuses `mps env`, and names `lease env` instead, because only a lease gives a program access to an MPS daemon.
fn mps_env(words: &[&str]) -> Option<ApiError> {
    let at = words.windows(2).position(|two| two == ["mps", "env"])?;
    let target = words.get(at + 2).filter(|word| !word.starts_with('-')).copied().unwrap_or("0");
    let message = "`mps env` is not a command: the environment belongs to a lease";
    let error = ApiError::new(Code::BadRequest, message);
    Some(error.hint(format!(
        "use `gpushctl lease env --mps --target {target}`, or `gpushctl lease env L17` for a lease that you hold"
    )))
}

/// Refuses `mig apply -f FILE` and `apply -f FILE`. In gpushctl, `-f` is short for `--follow`.
fn file_as_f(words: &[&str]) -> Option<ApiError> {
    let is_mig = words.windows(2).any(|two| two[0] == "mig" && ["plan", "apply", "assert"].contains(&two[1]));
    let is_apply = words.first() == Some(&"apply");
    let is_file =
        |word: &str| word == "-f" || (is_apply && matches!(word, "--file" | "--filename" | "-c" | "--config"));
    let file = words.iter().position(|word| is_file(word)).filter(|_| is_mig || is_apply)?;
    let path = words.get(file + 1).copied().unwrap_or("FILE");
    let error = ApiError::new(Code::BadRequest, format!("`{}` is not an option of this command", words[file]));
    if is_mig {
        return Some(error.hint(format!("write `--file {path}`")));
    }
    let command = |words: &[&str]| typed::command_line(words.iter().copied().chain([path]));
    Some(if path.ends_with(".toml") {
        error.hint(format!(
            "`apply` uses the config file of gpushd; `{}` checks another file",
            command(&["gpushctl", "config", "check"])?
        ))
    } else {
        error.hint(format!(
            "for a mig-parted file, use `{}`; `apply` uses the config file of gpushd",
            command(&["gpushctl", "mig", "apply", "--file"])?
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpush_api::GpuIndex;

    fn hint(line: &str) -> Option<String> {
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        error(&args).map(|error| error.hint.unwrap_or_default())
    }

    #[test]
    fn duration_without_equals_sign_is_refused_with_a_hint() {
        assert_eq!(hint("gpushctl mig apply --wait 30 -g 0").as_deref(), Some("write `--wait=30s` or `--wait=30m`"));
        assert_eq!(hint("gpushctl mig apply --wait 1h30m").as_deref(), Some("write `--wait=1h30m`"));
        assert_eq!(hint("gpushctl gpu reset 0 --wait 1 hour").as_deref(), Some("write `--wait=1h`"));
        assert!(hint("gpushctl lease list --ended 3").unwrap().starts_with("write `--ended=3` for the last 3 leases"));
        for right in [
            "gpushctl lease list 3 --ended",
            "gpushctl lease list --ended -g 3",
            "gpushctl mig apply --wait=30s mixed",
            "gpushctl mig apply --wait mixed",
            "gpushctl run --mps 25 -- x --wait 3",
        ] {
            assert_eq!(hint(right), None, "{right}");
        }
    }

    #[test]
    fn option_of_nvidia_smi_is_refused_with_the_gpushctl_command() {
        assert_eq!(hint("gpushctl mig -lgip").as_deref(), Some("use `gpushctl mig profiles`"));
        let create = |profiles: &str, gpu: GpuIndex| {
            let add = format!("use `gpushctl mig add {profiles} -g {gpu}`");
            Some(format!("{add}; `gpushctl mig profiles {gpu}` lists the profiles"))
        };
        assert_eq!(hint("gpushctl mig -cgi 19,19 -C"), create("PROFILE", GpuIndex(0)));
        assert_eq!(hint("gpushctl mig -cgi 3g.40gb,3g.40gb -C -i 7"), create("'3g.40gb*2'", GpuIndex(7)));
        assert_eq!(hint("gpushctl mig --create-gpu-instance 9,9"), create("PROFILE", GpuIndex(0)));
        assert!(hint("gpushctl mig -dgi -gi 3 -i 0").unwrap().contains("mig remove PROFILE@START -g 0"));
        assert!(hint("gpushctl mig destroy --gi 9").unwrap().contains("mig remove PROFILE@START -g 0"));
        assert_eq!(hint("gpushctl mig apply -f x.yaml").as_deref(), Some("write `--file x.yaml`"));
        assert_eq!(hint("gpushctl events -f"), None);
        for (line, command) in [
            ("gpushctl -q", "use `gpushctl gpu show 0`"),
            ("gpushctl -q -d MEMORY -i 3", "use `gpushctl gpu show 3`"),
            ("gpushctl -pm 1", "gpush does not change this mode: use `nvidia-smi -pm 1`"),
            ("gpushctl -r", "use `gpushctl gpu reset 0`"),
            ("gpushctl -i 2 -r", "use `gpushctl gpu reset 2`"),
            ("gpushctl --gpu-reset -i 3", "use `gpushctl gpu reset 3`"),
            ("gpushctl --query-gpu=name,uuid --format=csv", "use `gpushctl gpu list -o csv`"),
            ("gpushctl -l 2", "use `gpushctl top`"),
            ("gpushctl pmon", "use `gpushctl ps`"),
            ("gpushctl -i 0", "use `gpushctl status 0`"),
            ("gpushctl -o json -i 0", "use `gpushctl status 0`"),
            ("gpushctl -a", "use `gpushctl gpu show`"),
            ("gpushctl --list-gpus", "use `gpushctl gpu list`"),
            ("gpushctl nvidia-smi", "use `gpushctl status`"),
            ("gpushctl nvidia-smi -L", "use `gpushctl gpu list`"),
            ("gpushctl nvidia-smi -q -i 3", "use `gpushctl gpu show 3`"),
        ] {
            assert_eq!(hint(line).as_deref(), Some(command), "{line}");
        }
        assert!(hint("gpushctl compute-policy --set-timeslice=1").unwrap().starts_with("set `timeslice.level`"));
        assert!(hint("gpushctl -c 3").unwrap().starts_with("set `mps.compute_mode` or `timeslice.compute_mode`"));
        assert_eq!(hint("gpushctl run nvidia-smi -L"), None);
        for right in
            ["gpushctl mig apply -q", "gpushctl mig apply --dry-run --file x -c all", "gpushctl -o json status"]
        {
            assert_eq!(hint(right), None, "{right}");
        }
    }

    #[test]
    fn gpu_after_the_entries_is_refused_with_the_right_command() {
        for (typed, meant) in [
            ("mig add 1g.10gb 0", "mig add 1g.10gb -g 0"),
            ("mig add 1g.10gb 2g.20gb 0-3 --once", "mig add 1g.10gb 2g.20gb -g 0-3 --once"),
            ("mig remove 1g.10gb*2 3", "mig remove '1g.10gb*2' -g 3"),
        ] {
            assert_eq!(hint(&format!("gpushctl {typed}")), Some(format!("did you mean `gpushctl {meant}`?")));
        }
        for other in ["gpushctl mig add 1g.10gb -g 0", "gpushctl mig add 19", "gpushctl mig add 19 19 -g 0"] {
            assert_eq!(hint(other), None, "{other}");
        }
    }

    #[test]
    fn detach_without_an_operation_is_refused_with_the_reason() {
        for line in ["gpushctl gpu reset 3 --detach", "gpushctl maintenance enter --wait --detach"] {
            assert!(hint(line).unwrap().contains("leave out `--detach`"), "{line}");
        }
        for right in ["gpushctl gpu drain 3 --detach", "gpushctl mig apply --detach", "gpushctl gpu reset 3"] {
            assert_eq!(hint(right), None, "{right}");
        }
    }

    #[test]
    fn mps_env_names_lease_env() {
        let printed = hint("gpushctl mps env 9").unwrap();
        assert!(printed.starts_with("use `gpushctl lease env --mps --target 9`"), "{printed}");
        assert_eq!(hint("gpushctl lease env --mps"), None);
    }

    #[test]
    fn duration_of_two_words_is_refused_with_one_word() {
        for (typed, meant) in [
            ("events --since 1 hour", "events --since 1h"),
            ("events --since 1 hour ago", "events --since 1h"),
            ("events --since 1h ago", "events --since 1h"),
            ("events --since 2 days ago -f", "events --since 2d -f"),
            ("gpu drain 2 --end-after 5 seconds", "gpu drain 2 --end-after 5s"),
            ("lease renew L1 --for 1 day", "lease renew L1 --for 1d"),
            ("mig apply mixed -g 0 --expires 2 h", "mig apply mixed -g 0 --expires 2h"),
        ] {
            assert_eq!(hint(&format!("gpushctl {typed}")), Some(format!("did you mean `gpushctl {meant}`?")));
        }
        for right in
            ["gpushctl events --since 1h 0", "gpushctl events --since 1 0", "gpushctl gpu drain 2 --timeout 5 3"]
        {
            assert_eq!(hint(right), None, "{right}");
        }
    }

    #[test]
    fn options_of_another_ps_are_refused() {
        assert_eq!(hint("gpushctl ps aux").as_deref(), Some("use `gpushctl ps`"));
        assert_eq!(hint("gpushctl ps 0"), None);
    }

    #[test]
    fn file_of_another_tool_leads_to_a_command_for_files() {
        assert!(hint("gpushctl apply -f x.toml").unwrap().contains("`gpushctl config check x.toml`"));
        assert!(hint("gpushctl apply -f x.yaml").unwrap().contains("`gpushctl mig apply --file x.yaml`"));
    }
}
