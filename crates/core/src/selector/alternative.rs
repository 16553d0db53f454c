//! What to write in place of a selector that matches no GPU, such as a regular expression.

use std::fmt;

use gpush_api::{Gpu, GpuIndex};

use super::{Selector, is_model};

/// Selectors that match GPUs of a host, as a value of the config: `"0-3"`, or `["*A100*", "*H100*"]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alternative(Vec<String>);

impl fmt::Display for Alternative {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quoted: Vec<String> = self.0.iter().map(|selector| format!("\"{selector}\"")).collect();
        match quoted.as_slice() {
            [one] => f.write_str(one),
            several => write!(f, "[{}]", several.join(", ")),
        }
    }
}

impl Selector {
    /// Returns what the author of this selector probably means, for a selector that matches no GPU of the host.
    #[must_use]
    pub fn alternative(&self, gpus: &[Gpu]) -> Option<Alternative> {
        let exists = |index: u32| gpus.iter().any(|gpu| gpu.index == GpuIndex(index));
        match self {
            Self::Model(text) if matches!(text.as_str(), "any" | "every" | "each" | ".*" | "^.*$" | "gpu" | "gpus") => {
                Some(Alternative(vec!["all".to_owned()]))
            }
            Self::Model(text) => {
                let number = text.strip_prefix("gpu").map(|rest| rest.trim_start_matches(['-', '_', ' ']));
                if let Some(index) = number.and_then(|rest| rest.parse().ok()).filter(|index| exists(*index)) {
                    return Some(Alternative(vec![index.to_string()]));
                }
                let globs: Option<Vec<String>> = text.split('|').map(|part| model(part, gpus)).collect();
                globs.map(Alternative)
            }
            // People write a range with a colon, which is a PCI address.
            Self::Pci { domain: 0, bus, device, function: 0 } if bus < device => {
                let (first, last) = (u32::from(*bus), u32::from(*device));
                (exists(first) && exists(last)).then(|| Alternative(vec![format!("{first}-{last}")]))
            }
            Self::All | Self::Indexes(..) | Self::Uuid(_) | Self::Pci { .. } | Self::DeviceId(_) => None,
        }
    }
}

/// Returns the product name with wildcards for a part of a name or a regular expression.
fn model(part: &str, gpus: &[Gpu]) -> Option<String> {
    let name = part.trim_matches(['^', '$', '(', ')', ' ']).replace(".*", "*");
    let name = name.trim_matches('*').trim();
    let name = name.strip_prefix("nvidia ").unwrap_or(name);
    let glob = format!("*{name}*");
    let is_known = !name.is_empty() && gpus.iter().any(|gpu| is_model(&glob, &gpu.name.to_ascii_lowercase()));
    is_known.then(|| glob.to_ascii_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preset;

    #[test]
    fn selector_without_a_gpu_has_an_alternative() {
        let gpus = preset::gpus("dgx-a100").unwrap();
        for (text, alternative) in [
            ("A100", "\"*A100*\""),
            ("NVIDIA A100.*", "\"*A100*\""),
            ("^nvidia a100.*$", "\"*A100*\""),
            (".*", "\"all\""),
            ("any", "\"all\""),
            ("gpu0", "\"0\""),
            ("GPU 7", "\"7\""),
            ("0:3", "\"0-3\""),
            ("A100|SXM4", "[\"*A100*\", \"*SXM4*\"]"),
        ] {
            let selector: Selector = text.parse().unwrap();
            assert!(selector.matching(&gpus).is_empty(), "{text}");
            let found = selector.alternative(&gpus).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(found.to_string(), alternative, "{text}");
            for one in &found.0 {
                assert!(!one.parse::<Selector>().unwrap().matching(&gpus).is_empty(), "{one}");
            }
        }
        for text in ["H100", "gpu9", "0:9", "9", "GPU-12"] {
            assert_eq!(text.parse::<Selector>().unwrap().alternative(&gpus), None, "{text}");
        }
    }
}
