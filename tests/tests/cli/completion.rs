//! Completion in a real bash on a terminal. A simulated host provides the values.
//!
//! The helper functions may use `unwrap`, because a panic makes the test fail.
#![allow(clippy::unwrap_used)]

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
};

use gpush_api::MpsState;
use gpush_tests::{agent::Agent, host::Host, mps::reaches};

use crate::verbs::{TWO, done, path, started};

const CONFIG: &str = "[layouts]\nbalanced = [\"3g.40gb\", \"2g.20gb\"]\n\
    [[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"1g.10gb*2\"]\n\
    [[gpu]]\nmatch = [\"1\"]\nmode = \"mps\"\n";

/// Keys that insert all completions of the word before the cursor (readline's
/// `insert-completions`).
const ALL: &str = "\u{1b}*";

/// Types a line in an interactive bash. Returns the line after its completion, before Enter.
fn typed(socket: &Path, line: &str) -> String {
    let mut bash = Command::new("script");
    bash.args(["-q", "-e", "-c", "bash --norc --noprofile -i", "/dev/null"])
        .env("PATH", path())
        .env("GPUSH_SOCKET", socket)
        .env("TERM", "dumb")
        .env("INPUTRC", "/dev/null")
        .env_remove("PROMPT_COMMAND")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let mut bash = bash.spawn().unwrap();
    // After the completion, Ctrl-A moves the cursor to the start of the line, and Ctrl-E moves it
    // to the end.
    let keys = format!("source <(gpushctl completions bash)\n{line}\u{1}echo \"<\u{5}>\"\nexit\n");
    bash.stdin.take().unwrap().write_all(keys.as_bytes()).unwrap();
    let output = String::from_utf8_lossy(&bash.wait_with_output().unwrap().stdout).into_owned();
    let printed = output.lines().rev().find_map(|line| line.trim_end().strip_prefix('<')?.strip_suffix('>'));
    printed.unwrap_or_else(|| panic!("no line in: {output}")).trim_end().to_owned()
}

fn is_available() -> bool {
    let found = Command::new("script").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let is_available = found.is_ok_and(|status| status.success());
    if !is_available {
        println!("SKIPPED completion in bash: there is no `script`");
    }
    is_available
}

#[test]
fn bash_completes_values_of_the_host() {
    if !is_available() {
        return;
    }
    let host = Host::up(TWO);
    let agent: Agent = started(&host, CONFIG);
    reaches(&agent, "1", MpsState::Ready);
    let lease = done(&agent, &["lease", "request", "--mig", "1g.10gb", "--for", "1h", "-o", "name"]);
    let lease = lease.trim();
    for (line, expected) in [
        (format!("gpushctl gpu show {ALL}"), "gpushctl gpu show 0 1 all".to_owned()),
        ("gpushctl status -g GP\t".to_owned(), "gpushctl status -g GPU-".to_owned()),
        ("gpushctl gpus ls -i 1\t".to_owned(), "gpushctl gpus ls -i 1".to_owned()),
        ("gpushctl mig apply bal\t".to_owned(), "gpushctl mig apply balanced".to_owned()),
        ("gpushctl mig add -g 0 2\t".to_owned(), "gpushctl mig add -g 0 2g.20gb".to_owned()),
        (format!("gpushctl mig remove -g 0 1{ALL}"), String::new()),
        ("gpushctl run --mig 1g.10gb\t".to_owned(), "gpushctl run --mig 1g.10gb".to_owned()),
        (format!("gpushctl mps show {ALL}"), "gpushctl mps show 1".to_owned()),
        (format!("gpushctl lease end {ALL}"), format!("gpushctl lease end {lease}")),
        (format!("gpushctl operation show {ALL}"), String::new()),
        ("gpushctl status --gpu=1\t".to_owned(), "gpushctl status --gpu=1".to_owned()),
        ("gpushctl lease env -o doc\t".to_owned(), "gpushctl lease env -o docker".to_owned()),
    ] {
        let shown = typed(agent.socket(), &line);
        // For an empty word, bash lists the options after the values.
        let values = shown.split(" -").next().unwrap_or_default();
        match expected.as_str() {
            "" if line.contains("remove") => assert!(shown.contains("1g.10gb@"), "{line:?}: {shown}"),
            "" => assert!(shown.contains(" op-1"), "{line:?}: {shown}"),
            _ if line.contains(ALL) => assert_eq!(values, expected, "{line:?}: {shown}"),
            _ => assert!(shown.starts_with(&expected), "{line:?}: {shown}"),
        }
    }
}

/// Without gpushd, bash completes only commands and the values that gpushctl itself knows.
#[test]
fn bash_completes_static_words_without_gpushd() {
    if !is_available() {
        return;
    }
    let nothing = Path::new("/run/gpush-absent/gpushd.sock");
    assert_eq!(typed(nothing, "gpushctl mig prof\t"), "gpushctl mig profiles");
    assert_eq!(typed(nothing, "gpushctl gpu show 0\t"), "gpushctl gpu show 0");
    assert_eq!(typed(nothing, "gpushctl events --kind dri\t"), "gpushctl events --kind driver");
}
