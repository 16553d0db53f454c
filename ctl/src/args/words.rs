//! What a typed word can mean: an index, a profile, a lease, or a duration.

use std::ffi::OsString;

use clap::Parser as _;
use gpush_core::duration;

use super::{Cli, default_verb};

/// Placeholder for a MIG profile in a proposed command line.
pub(super) const PROFILE: &str = "PROFILE";

/// Returns the program that runs a script, by the suffix of its name.
pub(crate) fn interpreter(script: &str) -> Option<&'static str> {
    let (_, suffix) = script.rsplit_once('.')?;
    Some(match suffix {
        "py" => "python3",
        "sh" => "bash",
        "jl" => "julia",
        "R" | "r" => "Rscript",
        "pl" => "perl",
        _ => return None,
    })
}

/// Names of programs that users type in the place of a command of gpushctl.
const PROGRAMS: [&str; 12] = [
    "python",
    "python3",
    "bash",
    "sh",
    "torchrun",
    "accelerate",
    "deepspeed",
    "jupyter",
    "jupyter-lab",
    "mpirun",
    "julia",
    "Rscript",
];

/// Returns whether a word is a program or a script: a path, an interpreter, or a name with the suffix of a script.
pub(super) fn is_program(word: &str) -> bool {
    let is_path = ["./", "../", "/", "~/"].iter().any(|start| word.starts_with(start));
    is_path || PROGRAMS.contains(&word) || (interpreter(word).is_some() && !word.starts_with('-'))
}

/// Returns whether gpushctl can parse a command line. The words do not contain `gpushctl`.
pub(super) fn can_be_parsed(words: &[String]) -> bool {
    let words: Vec<OsString> = ["gpushctl".into()].into_iter().chain(words.iter().map(OsString::from)).collect();
    Cli::try_parse_from(default_verb::insert(words)).is_ok()
}

/// Returns whether a word can only name GPUs: an index, a range, or a list of them.
pub(super) fn is_index_list(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_digit()) && word.bytes().all(|b| b.is_ascii_digit() || b == b'-' || b == b',')
}

/// Returns whether a word consists of digits.
pub(super) fn is_number(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns whether a word begins as a MIG profile does, such as 1g.10gb or 1c.3g.40gb.
pub(super) fn is_profile(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_digit()) && word.contains("g.")
}

/// Returns the id of a lease if the word is one: the letter L and a number.
pub(super) fn lease(word: &str) -> Option<String> {
    let number = word.strip_prefix(['L', 'l'])?;
    is_number(number).then(|| format!("L{number}"))
}

/// Joins a number and a unit to a duration: `1` and `day` to `1d`.
pub(super) fn joined_duration(number: &str, unit: &str) -> Option<String> {
    let is_unit = unit.starts_with(|c: char| c.is_ascii_lowercase()) && is_number(number);
    (is_unit && duration::is_duration(&format!("{number}{unit}"))).then(|| {
        let letters = if unit.starts_with("ms") || unit.starts_with("mil") { "ms" } else { &unit[..1] };
        format!("{number}{letters}")
    })
}

/// Options whose value is a duration or a time.
const DURATIONS: [&str; 13] = [
    "--for",
    "--timeout",
    "--notice",
    "--grace",
    "--expires",
    "--since",
    "--end-after",
    "--time",
    "-t",
    "--until",
    "--duration",
    "--request-timeout",
    "--by",
];

/// Joins the words of each duration before `--`: `--for 1 day` becomes `--for 1d`, and `--since 1 hour ago` becomes
/// `--since 1h`. Returns `None` if there is none.
pub(super) fn joined_durations(words: &[&str]) -> Option<Vec<String>> {
    let end = words.iter().position(|word| *word == "--").unwrap_or(words.len());
    let (mut joined, mut at) = (Vec::new(), 0);
    while at < words.len() {
        let three = words[..end].get(at..at + 3).unwrap_or_default();
        match three {
            [option, number, unit] if DURATIONS.contains(option) => {
                if let Some(value) = joined_duration(number, unit) {
                    joined.extend([(*option).to_owned(), value]);
                    at += 3 + usize::from(words[..end].get(at + 3) == Some(&"ago"));
                    continue;
                }
                if *unit == "ago" && duration::is_duration(number) {
                    joined.extend([(*option).to_owned(), (*number).to_owned()]);
                    at += 3;
                    continue;
                }
            }
            _ => {}
        }
        joined.push(words[at].to_owned());
        at += 1;
    }
    (joined.len() < words.len()).then_some(joined)
}
