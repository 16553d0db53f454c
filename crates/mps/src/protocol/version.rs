//! Versions of the control daemon: the versions with which the protocol was tested, and the
//! versions that gpushd does not support yet. A daemon does not report its version on its socket.
//! Before CUDA 13.1, a daemon reports its version nowhere.
//!
//! | version | |
//! |---|---|
//! | 535, 550, 555 | tested: the same bytes; 535 has fewer commands |
//! | 580 | tested with gpushd on two GPUs; this daemon needs a GPU, so the conformance tests cannot run |
//! | others | the same protocol as far as known: used directly, and through the front-end if that fails |
//! | 590 (CUDA 13.1) on, with `-S` | static SM partitioning: other commands; not supported yet |
//! | 615 on, with `-p 3` or `CUDA_MPS_PROTOCOL_VERSION=3` | MPS v3: another protocol; not supported yet |
//!
//! The options and variables are from NVIDIA's documentation of release 615.

use std::fmt;

/// Driver branches whose daemons were used to test the protocol.
pub const TESTED: [u32; 4] = [535, 550, 555, 580];

/// Environment variable that selects another protocol.
const PROTOCOL: &str = "CUDA_MPS_PROTOCOL_VERSION";

/// Whether the protocol was tested with a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// The protocol was tested with this branch.
    Tested,
    /// The protocol was not tested with this branch.
    Untried(u32),
}

/// Returns whether the protocol was tested with a driver version, such as `550.163.01`; `None` if the text is not a
/// version.
#[must_use]
pub fn known(version: &str) -> Option<Known> {
    let branch = version.split('.').next()?.parse().ok()?;
    Some(if TESTED.contains(&branch) { Known::Tested } else { Known::Untried(branch) })
}

/// Finds the version in a program's data: a NUL-terminated string that contains only a version.
/// Returns `None` if there is no such string, or if there are several that differ.
#[must_use]
pub fn of_program(bytes: &[u8]) -> Option<&str> {
    let words = bytes.split(|byte| *byte == 0).filter(|word| is_version(word));
    let mut words = words.filter_map(|word| std::str::from_utf8(word).ok());
    let first = words.next()?;
    words.all(|other| other == first).then_some(first)
}

/// Returns whether a word is a version, such as `535.309.01` or `590.44`.
fn is_version(word: &[u8]) -> bool {
    let parts: Vec<&[u8]> = word.split(|byte| *byte == b'.').collect();
    let digits = |part: &&[u8]| part.iter().all(u8::is_ascii_digit);
    let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
    parts.iter().all(digits) && matches!(lengths.as_slice(), [3, 2..=3] | [3, 2..=3, 2])
}

/// Why gpushd does not support the protocol of a daemon. The options and the environment with which the daemon was
/// started decide this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsupported {
    /// The protocol of release 615.
    V3,
    /// SMs are granted to clients as partitions.
    StaticPartitioning,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::V3 => write!(f, "the MPS daemon uses MPS v3, which gpushd does not support yet"),
            Self::StaticPartitioning => {
                write!(f, "the MPS daemon partitions SMs statically, which gpushd does not support yet")
            }
        }
    }
}

/// Returns why a daemon with this command line and environment uses an unsupported protocol. Both arguments have the
/// format of `/proc`: each entry ends with a NUL byte.
#[must_use]
pub fn unsupported(command_line: &[u8], environment: &[u8]) -> Option<Unsupported> {
    let words = |bytes: &[u8]| -> Vec<String> {
        bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
    };
    let (line, environment) = (words(command_line), words(environment));
    let behind = |options: [&str; 2]| {
        let at = line.iter().position(|word| options.contains(&word.as_str()))?;
        line.get(at + 1).cloned()
    };
    let with_it = line.iter().find_map(|word| word.strip_prefix("--protocol=").or_else(|| word.strip_prefix("-p")));
    let asked = behind(["-p", "--protocol"]).or_else(|| with_it.map(str::to_owned)).or_else(|| {
        environment.iter().find_map(|word| Some(word.strip_prefix(PROTOCOL)?.strip_prefix('=')?.to_owned()))
    });
    if asked.is_some_and(|version| version.trim().parse::<u32>().is_ok_and(|version| version >= 3)) {
        return Some(Unsupported::V3);
    }
    let partitioned = line.iter().any(|word| word == "-S" || word == "--static-partitioning");
    partitioned.then_some(Unsupported::StaticPartitioning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_tested_untested_or_unknown() {
        for (version, is) in [
            ("535.309.01", Some(Known::Tested)),
            ("550.163.01", Some(Known::Tested)),
            ("580.65.06", Some(Known::Tested)),
            ("570.86.15", Some(Known::Untried(570))),
            ("615.10", Some(Known::Untried(615))),
            ("", None),
            ("unknown", None),
        ] {
            assert_eq!(known(version), is, "{version}");
        }
    }

    #[test]
    fn program_version_is_found_once() {
        let of = |words: &[&str]| of_program(words.join("\0").as_bytes()).map(str::to_owned);
        let version = Some("535.309.01".to_owned());
        assert_eq!(of(&["ELF", "535.309.01", "OUTBHELL"]), version);
        assert_eq!(of(&["535.309.01", "x", "535.309.01"]), version);
        assert_eq!(of(&["535.309.01", "550.163.01"]), None);
        assert_eq!(of(&["1.2.3", "192.168.0.1", "v535.309.01", "535.", ""]), None);
        match std::fs::read("/usr/bin/nvidia-cuda-mps-control") {
            Ok(program) => assert!(known(of_program(&program).unwrap()).is_some()),
            Err(_) => println!("SKIPPED the real one: nvidia-cuda-mps-control is not installed"),
        }
    }

    #[test]
    fn unsupported_protocols_are_recognised() {
        let line = |words: &[&str]| words.iter().flat_map(|word| [word.as_bytes(), b"\0"].concat()).collect::<Vec<_>>();
        let usual = line(&["/usr/bin/nvidia-cuda-mps-control", "-f"]);
        assert_eq!(unsupported(&usual, b"PATH=/usr/bin\0"), None);
        assert_eq!(unsupported(b"", b""), None);
        assert_eq!(unsupported(&usual, b"A=1\0CUDA_MPS_PROTOCOL_VERSION=3\0"), Some(Unsupported::V3));
        assert_eq!(unsupported(&usual, b"CUDA_MPS_PROTOCOL_VERSION=2\0"), None);
        for option in [&["-p", "3"][..], &["--protocol", "3"], &["--protocol=3"], &["-p3"]] {
            assert_eq!(unsupported(&line(&[&["x", "-f"], option].concat()), b""), Some(Unsupported::V3), "{option:?}");
        }
        assert_eq!(unsupported(&line(&["x", "-p", "2"]), b"CUDA_MPS_PROTOCOL_VERSION=3\0"), None, "the option wins");
        for option in ["-S", "--static-partitioning"] {
            assert_eq!(unsupported(&line(&["x", option]), b""), Some(Unsupported::StaticPartitioning));
        }
    }
}
