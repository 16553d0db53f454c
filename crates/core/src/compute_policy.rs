//! Parser for `nvidia-smi compute-policy --list`: the time-slice level of each GPU.
//!
//! NVML has no public call that reads the level, and nvidia-smi's output "is not guaranteed to be
//! backwards compatible" (its manual). So the parser reads each line separately. In a line, it
//! looks for a GPU (index, UUID or PCI address). In the same line, it looks for a level, or for the
//! reason why there is no level. It ignores frames, columns and other words. If a line cannot be
//! parsed, the result does not contain the GPU of that line.
//!
//! ```text
//! | GPU     Name           Value        |     a heading: no GPU, no level
//! |   0      Timeslice       Short      |     GPU 0: short
//! GPU 00000000:07:00.0: Timeslice: Long       0000:07:00.0: long
//! Failed to get compute policies for GPU 1 : Not Supported      GPU 1: unsupported
//! ```

use gpush_api::{GpuIndex, GpuUuid, TimesliceLevel};

/// The name of a GPU in the output.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GpuIdentifier {
    /// nvidia-smi's index: the position in NVML's list of GPUs, not the minor number.
    Index(GpuIndex),
    /// `GPU-<uuid>`, in lower case after the prefix.
    Uuid(String),
    /// PCI address in the API's form, `0000:07:00.0`.
    Pci(String),
}

impl GpuIdentifier {
    /// Returns whether this name is the index, UUID or PCI address of a GPU.
    #[must_use]
    pub fn matches(&self, index: GpuIndex, uuid: &GpuUuid, pci: &str) -> bool {
        match self {
            Self::Index(reported) => *reported == index,
            Self::Uuid(reported) => reported.eq_ignore_ascii_case(uuid.as_str()),
            Self::Pci(reported) => reported.eq_ignore_ascii_case(pci),
        }
    }
}

/// What the output says about a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LevelReport {
    /// The GPU has this level.
    Level(TimesliceLevel),
    /// The GPU does not support levels, either in general or in its current mode.
    Unsupported,
    /// nvidia-smi could not read the level. Contains nvidia-smi's message, such as `GPU is lost`.
    Failed(String),
}

/// Returns what the output says about each GPU, in the order of the output. `output` may include
/// nvidia-smi's standard error.
#[must_use]
pub fn levels(output: &str) -> Vec<(GpuIdentifier, LevelReport)> {
    let mut found: Vec<(GpuIdentifier, LevelReport)> = Vec::new();
    for (named, reported) in output.lines().filter_map(parse_line) {
        // Only the first line about a GPU is used, whether that line contains a level or a reason.
        if found.iter().all(|(known, _)| *known != named) {
            found.push((named, reported));
        }
    }
    found
}

/// Returns what the output says about the GPU with this index, UUID or PCI address.
#[must_use]
pub fn level_of<'a>(
    reported: &'a [(GpuIdentifier, LevelReport)],
    index: GpuIndex,
    uuid: &GpuUuid,
    pci: &str,
) -> Option<&'a LevelReport> {
    reported.iter().find(|(named, _)| named.matches(index, uuid, pci)).map(|(_, reported)| reported)
}

fn parse_line(text: &str) -> Option<(GpuIdentifier, LevelReport)> {
    match text.split_once("Failed to ") {
        // A message such as `Failed to retrieve compute policies for requested devices : …` names
        // no GPU, so the parser ignores it.
        Some((_, failed)) => {
            let (subject, reason) = failed.split_once(" : ")?;
            Some((split_words(subject).find_map(gpu_name)?, failure_report(reason.trim())))
        }
        None => parse_row(text),
    }
}

/// Parses a table row, or a line such as `GPU 0: Timeslice: Default`.
fn parse_row(text: &str) -> Option<(GpuIdentifier, LevelReport)> {
    let mut words = split_words(text);
    let gpu = words.find_map(gpu_name)?;
    let rest: Vec<&str> = words.collect();
    // Later versions of nvidia-smi may list more policies in one row. So search for the name of the
    // time-slice policy.
    let at = rest.iter().position(|word| ["timeslice", "time-slice"].contains(&word.to_lowercase().as_str()))?;
    let value = rest[at + 1..].iter().copied().filter(|word| *word != "=");
    let text = value.collect::<Vec<_>>().join(" ");
    if text.is_empty() { None } else { Some((gpu, parse_level(&text))) }
}

/// Returns the words of a line, without frames and separators.
fn split_words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c.is_whitespace() || c == '|')
        .map(|word| word.trim_end_matches([':', ',']))
        .filter(|word| !word.is_empty())
}

fn parse_level(text: &str) -> LevelReport {
    let number = text.parse().ok().and_then(|number: usize| TimesliceLevel::ALL.get(number));
    match (text.parse(), number) {
        (Ok(level), _) | (Err(_), Some(&level)) => LevelReport::Level(level),
        (Err(_), None) => failure_report(text),
    }
}

fn failure_report(reason: &str) -> LevelReport {
    let plain = reason.trim_matches(['[', ']']).to_lowercase();
    match plain.as_str() {
        "not supported" | "n/a" | "unsupported" => LevelReport::Unsupported,
        _ => LevelReport::Failed(reason.to_owned()),
    }
}

fn gpu_name(word: &str) -> Option<GpuIdentifier> {
    if let Some(uuid) = word.strip_prefix("GPU-") {
        return (uuid.len() == 36).then(|| GpuIdentifier::Uuid(format!("GPU-{}", uuid.to_lowercase())));
    }
    if word.contains(':') {
        return parse_pci(word).map(GpuIdentifier::Pci);
    }
    word.parse().ok().map(GpuIdentifier::Index)
}

/// Converts `00000000:07:00.0` to `0000:07:00.0`.
fn parse_pci(word: &str) -> Option<String> {
    let (domain, rest) = word.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    Some(format!("{:04x}:{:02x}:{:02x}.{:x}", number(domain)?, number(bus)?, number(device)?, number(function)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Output of gpush-sim's nvidia-smi for three GPUs, one of them in MIG mode.
    const TABLE: &str = "\
+-------------------------------------+
| GPU compute policies:               |
| GPU     Name           Value        |
|=====================================|
|   0      Timeslice       Default    |
|  12      Timeslice        Short     |
+-------------------------------------+
Failed to get compute policies for GPU 1 : Not Supported
Failed to get compute policies for GPU 3 : GPU is lost
Failed to retrieve compute policies for requested devices : GPU is lost
";

    fn index(number: u32) -> GpuIdentifier {
        GpuIdentifier::Index(GpuIndex(number))
    }

    #[test]
    fn compute_policy_table_is_parsed() {
        let reported = levels(TABLE);
        assert_eq!(
            reported,
            [
                (index(0), LevelReport::Level(TimesliceLevel::Default)),
                (index(12), LevelReport::Level(TimesliceLevel::Short)),
                (index(1), LevelReport::Unsupported),
                (index(3), LevelReport::Failed("GPU is lost".to_owned())),
            ]
        );
        assert_eq!(
            level_of(&reported, GpuIndex(12), &"GPU-x".into(), "0000:01:00.0"),
            Some(&LevelReport::Level(TimesliceLevel::Short))
        );
        assert_eq!(level_of(&reported, GpuIndex(4), &"GPU-x".into(), "0000:01:00.0"), None);
    }

    #[test]
    fn other_compute_policy_forms_are_parsed() {
        let uuid = "GPU-696A7A08-9eda-2bfb-4515-85925dc57c9a";
        let low = GpuIdentifier::Uuid("GPU-696a7a08-9eda-2bfb-4515-85925dc57c9a".to_owned());
        let pci = GpuIdentifier::Pci("0000:07:00.0".to_owned());
        for (text, named, reported) in [
            ("GPU  0: Timeslice: Default", index(0), LevelReport::Level(TimesliceLevel::Default)),
            ("| 1 | Timeslice | LONG |\r", index(1), LevelReport::Level(TimesliceLevel::Long)),
            ("|1|timeslice|medium|", index(1), LevelReport::Level(TimesliceLevel::Medium)),
            ("0, Time-slice, 2", index(0), LevelReport::Level(TimesliceLevel::Medium)),
            ("GPU 00000000:07:00.0: Timeslice = Short", pci.clone(), LevelReport::Level(TimesliceLevel::Short)),
            (&format!("| {uuid}  Timeslice  Short |"), low, LevelReport::Level(TimesliceLevel::Short)),
            ("|   0      Timeslice       N/A   |", index(0), LevelReport::Unsupported),
            ("|   0      Timeslice   [Not Supported]   |", index(0), LevelReport::Unsupported),
            ("|   0      Timeslice       Tiny   |", index(0), LevelReport::Failed("Tiny".to_owned())),
            ("Failed to get compute policies for GPU 00000000:07:00.0 : Not Supported", pci, LevelReport::Unsupported),
        ] {
            assert_eq!(levels(text), [(named, reported)], "{text}");
        }
    }

    #[test]
    fn output_without_a_level_gives_none() {
        for text in [
            "",
            "No devices were found",
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
            "| GPU     Name           Value        |",
            "|   0      Timeslice                  |",
            "|          Timeslice       Default    |",
            "|   0      Preemption      Default    |",
            "Successfully set timeslice policy with value Short for GPU 0",
            "Failed to set timeslice for requested devices : Not Supported",
            "Failed to get",
        ] {
            assert_eq!(levels(text), [], "{text}");
        }
    }

    #[test]
    fn names_match_in_any_case_and_first_line_counts() {
        let uuid = GpuIdentifier::Uuid("GPU-696a7a08-9eda-2bfb-4515-85925dc57c9a".to_owned());
        assert!(uuid.matches(GpuIndex(9), &"GPU-696A7A08-9eda-2bfb-4515-85925dc57c9a".into(), "0000:09:00.0"));
        assert!(GpuIdentifier::Pci("0000:af:00.0".to_owned()).matches(GpuIndex(9), &"".into(), "0000:AF:00.0"));
        let twice = "|  0  Timeslice  Long  |\nFailed to get compute policies for GPU 0 : Not Supported";
        assert_eq!(levels(twice), [(index(0), LevelReport::Level(TimesliceLevel::Long))]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn compute_policy_parser_never_panics(text in "(\\PC|[|:.=\\n]|GPU|Failed to |Timeslice| : |[0-9]){0,40}") {
            let _any = levels(&text);
        }
    }
}
