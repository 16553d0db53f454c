//! Checks that every list of event kinds is complete.

use std::{path::Path, process::Command};

use gpush_api::EventKind;
use gpush_tests::host::program;

fn file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the part of a text between `from` and `to`.
fn between<'a>(text: &'a str, from: &str, to: &str) -> &'a str {
    let (_, rest) = text.split_once(from).unwrap_or_else(|| panic!("{from:?} is not in it"));
    rest.split_once(to).map_or(rest, |(found, _)| found)
}

fn all_named(place: &str, text: &str) {
    let words: Vec<&str> = text.split(|c: char| !c.is_ascii_lowercase()).collect();
    for kind in EventKind::ALL {
        assert!(words.contains(&kind.name()), "{place} lacks {}: {text}", kind.name());
    }
}

#[test]
fn every_list_of_event_kinds_is_complete() {
    let help = Command::new(program("gpushctl")).args(["events", "--help"]).output().expect("it runs");
    let help = String::from_utf8(help.stdout).expect("text");
    all_named("gpushctl events --help", between(&help, "--kind", "--gpu"));
    let page = file("docs/api.md");
    all_named("docs/api.md", between(&page, "| kind | when |", "\n\n"));
}
