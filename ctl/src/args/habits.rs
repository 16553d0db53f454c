//! Command lines in the form of nvidia-smi, mig-parted or other tools. The error names the form
//! that gpushctl accepts.
//!
//! A layout never consists of numbers alone, because `mig apply 0` could mean GPU 0 or profile 0.

use std::ffi::OsString;

use gpush_api::{ApiError, Code};
use gpush_core::duration::is_duration;

/// Returns the error for a command line with a known wrong form, `None` for all other command lines.
pub(crate) fn error(args: &[OsString]) -> Option<ApiError> {
    let words: Vec<&str> = args.iter().skip(1).map_while(|arg| arg.to_str()).take_while(|word| *word != "--").collect();
    value_after_optional(&words).or_else(|| nvidia_smi(&words)).or_else(|| file_as_f(&words))
}

/// Options whose value must follow an equals sign.
const OPTIONAL: [&str; 2] = ["--wait", "--watch"];

/// Refuses `--wait 30`. Without this error, gpushctl would read `30` as a layout or a GPU.
fn value_after_optional(words: &[&str]) -> Option<ApiError> {
    let [option, value] = *words.windows(2).find(|two| OPTIONAL.contains(&two[0]) && is_duration(two[1]))? else {
        return None;
    };
    let message = format!("`{option} {value}` is ambiguous: the duration of {option} follows an equals sign");
    Some(ApiError::new(Code::BadRequest, message).hint(format!("write `{option}={value}`")))
}

/// Options of `nvidia-smi mig`, with their meaning and the equivalent command of gpushctl.
const NVIDIA_SMI: [(&str, &str, &str); 11] = [
    ("-lgip", "list GPU instance profiles", "gpushctl mig profiles"),
    ("-lgipp", "list possible placements", "gpushctl mig profiles"),
    ("-lcip", "list compute instance profiles", "gpushctl mig profiles"),
    ("-lgi", "list GPU instances", "gpushctl mig list"),
    ("-lci", "list compute instances", "gpushctl mig list"),
    ("-cgi", "create GPU instances", "gpushctl mig add 1g.10gb -g 0"),
    ("-cci", "create compute instances", "gpushctl mig add 1c.3g.40gb -g 0"),
    ("-dgi", "destroy GPU instances", "gpushctl mig remove 1g.10gb -g 0"),
    ("-dci", "destroy compute instances", "gpushctl mig remove 1g.10gb -g 0"),
    ("-mig", "set the MIG mode", "gpushctl mig on 0"),
    ("-L", "list GPUs", "gpushctl gpu list"),
];

fn nvidia_smi(words: &[&str]) -> Option<ApiError> {
    let (option, what, command) = NVIDIA_SMI.iter().find(|(option, ..)| words.contains(option))?;
    let message = format!("`{option}` is an option of nvidia-smi, to {what}");
    Some(ApiError::new(Code::BadRequest, message).hint(format!("use '{command}'")))
}

/// Refuses `mig apply -f FILE`. In gpushctl, `-f` is short for `--follow`.
fn file_as_f(words: &[&str]) -> Option<ApiError> {
    let is_mig = words.windows(2).any(|two| two[0] == "mig" && ["plan", "apply", "assert"].contains(&two[1]));
    let file = words.iter().position(|word| *word == "-f").filter(|_| is_mig)?;
    let path = words.get(file + 1).copied().unwrap_or("FILE");
    let error = ApiError::new(Code::BadRequest, "`-f` is not an option of this command");
    Some(error.hint(format!("write `--file {path}`")))
}

/// Returns the error for a layout in the form of another tool, `None` for layouts that may be correct.
pub(crate) fn layout(text: &str) -> Option<ApiError> {
    let entries: Vec<&str> = text.split(',').map(str::trim).collect();
    let bad = |message: String, hint: String| Some(ApiError::new(Code::BadRequest, message).hint(hint));
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b"-, ".contains(&b)) {
        let message = format!("`{text}` is not a layout: layouts name profiles, never numbers");
        let hint = match entries.as_slice() {
            [_] => format!("name GPUs with -g {text}, and profiles as `1g.10gb`; `gpushctl mig profiles` lists them"),
            _ => "write profile names, such as '1g.10gb*2'; `gpushctl mig profiles` lists them".to_owned(),
        };
        return bad(message, hint);
    }
    if text.contains('.')
        && let Some(error) = parted_label(text)
    {
        return Some(error);
    }
    for entry in entries {
        // `7x1g.10gb` is a common notation in prose.
        if let Some((count, profile)) = entry.split_once(['x', 'X'])
            && count.parse::<u8>().is_ok()
            && profile.starts_with(|c: char| c.is_ascii_digit())
        {
            return bad(format!("`{entry}` is not a layout entry"), format!("write '{profile}*{count}'"));
        }
        // `0:1g.10gb@0`: the notation of targets.
        if let Some((gpu, instance)) = entry.split_once(':')
            && gpu.parse::<u32>().is_ok()
        {
            return bad(format!("`{entry}` is not a layout entry"), format!("write `{instance} -g {gpu}`"));
        }
    }
    None
}

/// Returns the error for an unknown layout name that is a label of the default config of mig-parted.
pub(crate) fn parted_label(name: &str) -> Option<ApiError> {
    let profile = name.strip_prefix("all-")?;
    let error = ApiError::new(Code::NotFound, format!("the config has no layout `{name}`"));
    if matches!(profile, "disabled" | "enabled" | "balanced") {
        let hint = match profile {
            "disabled" => "disable MIG mode with 'gpushctl mig off all'".to_owned(),
            "enabled" => "enable MIG mode with 'gpushctl mig on all'".to_owned(),
            _ => format!("read the label from its file: --file config.yaml -c {name}"),
        };
        return Some(error.cause("it is a label of mig-parted").hint(hint));
    }
    let is_profile = profile.split_once("g.").is_some_and(|(slices, rest)| {
        slices.parse::<u8>().is_ok() && rest.split_once("gb").is_some_and(|(memory, _)| memory.parse::<u16>().is_ok())
    });
    is_profile.then(|| {
        error.cause("it is a label of mig-parted").hint(format!(
            "write the entries of the layout, such as '{profile}*7', or use --file config.yaml -c {name}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hint(line: &str) -> Option<String> {
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        error(&args).map(|error| error.hint.unwrap_or_default())
    }

    #[test]
    fn duration_without_equals_sign_is_refused_with_a_hint() {
        assert_eq!(hint("gpushctl mig apply --wait 30 -g 0").as_deref(), Some("write `--wait=30`"));
        assert_eq!(hint("gpushctl mig apply --wait 1h30m").as_deref(), Some("write `--wait=1h30m`"));
        assert_eq!(hint("gpushctl status --watch 2").as_deref(), Some("write `--watch=2`"));
        for right in [
            "gpushctl mig apply --wait=30 mixed",
            "gpushctl mig apply --wait mixed",
            "gpushctl run --mps 25 -- x --wait 3",
        ] {
            assert_eq!(hint(right), None, "{right}");
        }
    }

    #[test]
    fn option_of_nvidia_smi_is_refused_with_the_gpushctl_command() {
        assert_eq!(hint("gpushctl mig -lgip").as_deref(), Some("use 'gpushctl mig profiles'"));
        assert_eq!(hint("gpushctl mig -cgi 19,19 -C").as_deref(), Some("use 'gpushctl mig add 1g.10gb -g 0'"));
        assert_eq!(hint("gpushctl mig apply -f x.yaml").as_deref(), Some("write `--file x.yaml`"));
        assert_eq!(hint("gpushctl events -f"), None);
    }

    #[test]
    fn layout_of_another_tool_is_refused_with_a_hint() {
        let hint = |text: &str| layout(text).map(|error| error.hint.unwrap_or_default());
        assert_eq!(hint("7x1g.10gb").as_deref(), Some("write '1g.10gb*7'"));
        assert_eq!(hint("0:1g.10gb@0").as_deref(), Some("write `1g.10gb@0 -g 0`"));
        assert!(hint("19,19").unwrap().contains("'1g.10gb*2'"));
        assert!(hint("0").unwrap().contains("-g 0"));
        for right in ["3g.40gb", "1g.10gb*2", "2g.20gb:mps", "mixed", "none", "training-2x"] {
            assert_eq!(hint(right), None, "{right}");
        }
        let label = |text: &str| parted_label(text).map(|error| error.hint.unwrap_or_default());
        assert!(label("all-1g.10gb").unwrap().contains("'1g.10gb*7'"));
        assert!(label("all-disabled").unwrap().contains("mig off all"));
        assert_eq!(label("all-mine"), None);
    }
}
