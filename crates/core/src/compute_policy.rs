//! Parser for `nvidia-smi compute-policy --list`: the time-slice level of each GPU.
//!
//! NVML has no public call for this, and nvidia-smi's output "is not guaranteed to be backwards
//! compatible" (its manual). So the parser reads each line separately. In a line, it looks for a
//! GPU (index, UUID or PCI address) and for a level, or for the reason why there is no level. It
//! ignores frames, columns and other words. A line that cannot be parsed gives no level, so the
//! result does not contain that GPU.
//!
//! ```text
//! | GPU     Name           Value        |     a heading: no GPU, no level
//! |   0      Timeslice       Short      |     GPU 0: short
//! GPU 00000000:07:00.0: Timeslice: Long       0000:07:00.0: long
//! Failed to get compute policies for GPU 1 : Not Supported      GPU 1: unsupported
//! ```

use gpush_api::TimesliceLevel;

/// The name of a GPU in the output.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Named {
    /// nvidia-smi's index: the position in NVML's list of GPUs, not the minor number.
    Index(u32),
    /// `GPU-<uuid>`, in lower case after the prefix.
    Uuid(String),
    /// PCI address in the API's form, `0000:07:00.0`.
    Pci(String),
}

impl Named {
    /// Returns whether this name is the index, UUID or PCI address of a GPU.
    #[must_use]
    pub fn is(&self, index: u32, uuid: &str, pci: &str) -> bool {
        match self {
            Self::Index(told) => *told == index,
            Self::Uuid(told) => told.eq_ignore_ascii_case(uuid),
            Self::Pci(told) => told.eq_ignore_ascii_case(pci),
        }
    }
}

/// What the output says about a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// The GPU has this level.
    Level(TimesliceLevel),
    /// The GPU does not support levels, or not in its present mode.
    Unsupported,
    /// nvidia-smi could not read the level. Contains its message, such as `GPU is lost`.
    Failed(String),
}

/// Returns the levels in the output, in the same order. The text may include standard error.
#[must_use]
pub fn levels(output: &str) -> Vec<(Named, Told)> {
    let mut found: Vec<(Named, Told)> = Vec::new();
    for (named, told) in output.lines().filter_map(line) {
        // Only the first line for a GPU is used, whether it has a level or a reason.
        if found.iter().all(|(known, _)| *known != named) {
            found.push((named, told));
        }
    }
    found
}

/// Returns what the output says about the GPU with this index, UUID or PCI address.
#[must_use]
pub fn level_of<'a>(told: &'a [(Named, Told)], index: u32, uuid: &str, pci: &str) -> Option<&'a Told> {
    told.iter().find(|(named, _)| named.is(index, uuid, pci)).map(|(_, told)| told)
}

fn line(text: &str) -> Option<(Named, Told)> {
    match text.split_once("Failed to ") {
        // `Failed to retrieve compute policies for requested devices : …` does not name a GPU.
        Some((_, failed)) => {
            let (subject, reason) = failed.split_once(" : ")?;
            Some((words(subject).find_map(named)?, failure(reason.trim())))
        }
        None => row(text),
    }
}

/// Parses a table row, or a line such as `GPU 0: Timeslice: Default`.
fn row(text: &str) -> Option<(Named, Told)> {
    let mut words = words(text);
    let gpu = words.find_map(named)?;
    let rest: Vec<&str> = words.collect();
    // Later versions may list other policies in the same row, so the parser searches for the name.
    let at = rest.iter().position(|word| ["timeslice", "time-slice"].contains(&word.to_lowercase().as_str()))?;
    let value = rest[at + 1..].iter().copied().filter(|word| *word != "=");
    let text = value.collect::<Vec<_>>().join(" ");
    if text.is_empty() { None } else { Some((gpu, level(&text))) }
}

/// Returns the words of a line, without frames and separators.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c.is_whitespace() || c == '|')
        .map(|word| word.trim_end_matches([':', ',']))
        .filter(|word| !word.is_empty())
}

fn level(text: &str) -> Told {
    let number = text.parse().ok().and_then(|number: usize| TimesliceLevel::ALL.get(number));
    match (text.parse(), number) {
        (Ok(level), _) | (Err(_), Some(&level)) => Told::Level(level),
        (Err(_), None) => failure(text),
    }
}

fn failure(reason: &str) -> Told {
    let plain = reason.trim_matches(['[', ']']).to_lowercase();
    match plain.as_str() {
        "not supported" | "n/a" | "unsupported" => Told::Unsupported,
        _ => Told::Failed(reason.to_owned()),
    }
}

fn named(word: &str) -> Option<Named> {
    if let Some(uuid) = word.strip_prefix("GPU-") {
        return (uuid.len() == 36).then(|| Named::Uuid(format!("GPU-{}", uuid.to_lowercase())));
    }
    if word.contains(':') {
        return pci(word).map(Named::Pci);
    }
    word.parse().ok().map(Named::Index)
}

/// Converts `00000000:07:00.0` to `0000:07:00.0`.
fn pci(word: &str) -> Option<String> {
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

    fn index(number: u32) -> Named {
        Named::Index(number)
    }

    #[test]
    fn compute_policy_table_is_parsed() {
        let told = levels(TABLE);
        assert_eq!(
            told,
            [
                (index(0), Told::Level(TimesliceLevel::Default)),
                (index(12), Told::Level(TimesliceLevel::Short)),
                (index(1), Told::Unsupported),
                (index(3), Told::Failed("GPU is lost".to_owned())),
            ]
        );
        assert_eq!(level_of(&told, 12, "GPU-x", "0000:01:00.0"), Some(&Told::Level(TimesliceLevel::Short)));
        assert_eq!(level_of(&told, 4, "GPU-x", "0000:01:00.0"), None);
    }

    #[test]
    fn other_compute_policy_forms_are_parsed() {
        let uuid = "GPU-696A7A08-9eda-2bfb-4515-85925dc57c9a";
        let low = Named::Uuid("GPU-696a7a08-9eda-2bfb-4515-85925dc57c9a".to_owned());
        let pci = Named::Pci("0000:07:00.0".to_owned());
        for (text, named, told) in [
            ("GPU  0: Timeslice: Default", index(0), Told::Level(TimesliceLevel::Default)),
            ("| 1 | Timeslice | LONG |\r", index(1), Told::Level(TimesliceLevel::Long)),
            ("|1|timeslice|medium|", index(1), Told::Level(TimesliceLevel::Medium)),
            ("0, Time-slice, 2", index(0), Told::Level(TimesliceLevel::Medium)),
            ("GPU 00000000:07:00.0: Timeslice = Short", pci.clone(), Told::Level(TimesliceLevel::Short)),
            (&format!("| {uuid}  Timeslice  Short |"), low, Told::Level(TimesliceLevel::Short)),
            ("|   0      Timeslice       N/A   |", index(0), Told::Unsupported),
            ("|   0      Timeslice   [Not Supported]   |", index(0), Told::Unsupported),
            ("|   0      Timeslice       Tiny   |", index(0), Told::Failed("Tiny".to_owned())),
            ("Failed to get compute policies for GPU 00000000:07:00.0 : Not Supported", pci, Told::Unsupported),
        ] {
            assert_eq!(levels(text), [(named, told)], "{text}");
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
        let uuid = Named::Uuid("GPU-696a7a08-9eda-2bfb-4515-85925dc57c9a".to_owned());
        assert!(uuid.is(9, "GPU-696A7A08-9eda-2bfb-4515-85925dc57c9a", "0000:09:00.0"));
        assert!(Named::Pci("0000:af:00.0".to_owned()).is(9, "", "0000:AF:00.0"));
        let twice = "|  0  Timeslice  Long  |\nFailed to get compute policies for GPU 0 : Not Supported";
        assert_eq!(levels(twice), [(index(0), Told::Level(TimesliceLevel::Long))]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn compute_policy_parser_never_panics(text in "(\\PC|[|:.=\\n]|GPU|Failed to |Timeslice| : |[0-9]){0,40}") {
            let _any = levels(&text);
        }
    }
}
