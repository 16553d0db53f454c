//! Layouts in the form of nvidia-smi, mig-parted or other tools. The error names the form that gpushctl accepts.
//!
//! A layout never consists of numbers alone, because `mig apply 0` could mean GPU 0 or profile 0.

use gpush_api::{ApiError, Code};
use gpush_core::preset;

/// Returns the error for a layout in the form of another tool; `None` if the layout may be correct.
pub(crate) fn layout(text: &str) -> Option<ApiError> {
    let entries: Vec<&str> = text.split(',').map(str::trim).collect();
    let bad = |message: String, hint: String| Some(ApiError::new(Code::BadRequest, message).hint(hint));
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b"-, ".contains(&b)) {
        let message = format!("`{text}` is not a layout: layouts name profiles, never numbers");
        let hint = match entries.as_slice() {
            [_] => format!(
                "to name GPU {text}, write `-g {text}`; profiles have names such as `1g.10gb`: `gpushctl mig profiles` \
                lists them"
            ),
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
        // People often write `7x1g.10gb` or `7*1g.10gb` for `1g.10gb*7`.
        if let Some((count, profile)) = entry.split_once(['x', 'X', '*', '×'])
            && count.parse::<u8>().is_ok()
            && profile.starts_with(|c: char| c.is_ascii_digit())
        {
            return bad(format!("`{entry}` is not a layout entry"), format!("write '{profile}*{count}'"));
        }
        // People also write `3g.40gb:2`. After a colon, gpushctl accepts only `mps`.
        if let Some((profile, count)) = entry.split_once(':')
            && profile.contains("g.")
            && count.parse::<u8>().is_ok()
        {
            return bad(format!("`{entry}` is not a layout entry"), format!("write '{profile}*{count}'"));
        }
        // `0:1g.10gb@0` is the name of a MIG device, not a layout.
        if let Some((gpu, instance)) = entry.split_once(':')
            && gpu.parse::<u32>().is_ok()
        {
            return bad(format!("`{entry}` is not a layout entry"), format!("write `{instance} -g {gpu}`"));
        }
    }
    None
}

/// Returns the error for a layout name that does not exist here, but is a label in the default config of mig-parted.
pub(crate) fn parted_label(name: &str) -> Option<ApiError> {
    let profile = name.strip_prefix("all-")?;
    let error = ApiError::new(Code::NotFound, format!("the config has no layout `{name}`"));
    if matches!(profile, "disabled" | "enabled" | "balanced") {
        let hint = match profile {
            "disabled" => "disable MIG mode with `gpushctl mig off all`".to_owned(),
            "enabled" => "enable MIG mode with `gpushctl mig on all`".to_owned(),
            _ => format!("name the file of the label: `--file config.yaml -c {name}`"),
        };
        return Some(error.cause(format!("`{name}` is a label in the default config of mig-parted")).hint(hint));
    }
    let is_profile = profile.split_once("g.").is_some_and(|(slices, rest)| {
        slices.parse::<u8>().is_ok() && rest.split_once("gb").is_some_and(|(memory, _)| memory.parse::<u16>().is_ok())
    });
    is_profile.then(|| {
        error.cause(format!("`{name}` is a label in the default config of mig-parted")).hint(format!(
            "write the entries of the layout, such as {}, or use --file config.yaml -c {name}",
            as_many_as_fit(profile)
        ))
    })
}

/// Returns the layout with as many instances of a profile as fit on the GPUs that have it: `'3g.40gb*2'`. Of a profile of
/// an unknown GPU, returns one instance.
fn as_many_as_fit(profile: &str) -> String {
    let of_gpu =
        |gpu: &gpush_api::Gpu| gpu.mig.as_ref()?.profiles.iter().find(|one| one.name == profile).map(|one| one.max);
    let most =
        preset::names().filter_map(|(name, _)| preset::gpus(name).ok()).flatten().filter_map(|gpu| of_gpu(&gpu)).max();
    match most {
        Some(most) if most > 1 => format!("'{profile}*{most}'"),
        _ => profile.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_of_another_tool_is_refused_with_a_hint() {
        let hint = |text: &str| layout(text).map(|error| error.hint.unwrap_or_default());
        for typed in ["7x1g.10gb", "7*1g.10gb", "7×1g.10gb"] {
            assert_eq!(hint(typed).as_deref(), Some("write '1g.10gb*7'"), "{typed}");
        }
        assert_eq!(hint("3g.40gb:2").as_deref(), Some("write '3g.40gb*2'"));
        assert_eq!(hint("0:1g.10gb@0").as_deref(), Some("write `1g.10gb@0 -g 0`"));
        assert!(hint("19,19").unwrap().contains("'1g.10gb*2'"));
        assert!(hint("0").unwrap().contains("-g 0"));
        for right in ["3g.40gb", "1g.10gb*2", "2g.20gb:mps", "mixed", "none", "training-2x"] {
            assert_eq!(hint(right), None, "{right}");
        }
        let label = |text: &str| parted_label(text).map(|error| error.hint.unwrap_or_default());
        // Fault: the hint named seven instances of each profile.
        for (label_, entries) in [
            ("all-1g.10gb", "'1g.10gb*7'"),
            ("all-3g.40gb", "'3g.40gb*2'"),
            ("all-1g.6gb", "'1g.6gb*4'"),
            ("all-7g.80gb", "7g.80gb"),
            ("all-5g.99gb", "5g.99gb"),
        ] {
            let part = format!("such as {entries}, or use --file");
            assert!(label(label_).unwrap().contains(&part), "{label_}: {:?}", label(label_));
        }
        assert!(label("all-disabled").unwrap().contains("mig off all"));
        assert_eq!(label("all-mine"), None);
    }
}
