//! A step of a longer run: a command. Its output goes to a log, and some lines also go to the
//! terminal.
//!
//! A test run prints thousands of lines, so the terminal shows only the current step and its
//! progress. If a step fails, its whole output is printed, so the log of CI contains it.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::{skips, workspace};

/// The result of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The step has succeeded.
    Passed,
    /// The step has failed. The text is the reason, as a sentence.
    Failed(String),
    /// The step was not run. The text is the reason.
    Skipped(String),
}

/// A finished step.
#[derive(Debug)]
pub(crate) struct Step {
    /// Name of the step in the summary.
    pub(crate) name: String,
    /// Result of the step.
    pub(crate) outcome: Outcome,
    /// Duration of the step.
    pub(crate) took: Duration,
    /// Numbers of tests, if the step runs tests.
    pub(crate) tests: TestCount,
    /// Parts of the tests that were skipped, with their reasons.
    pub(crate) skipped: Vec<String>,
    /// Names of the step's failed tests, in order.
    pub(crate) failed_tests: Vec<String>,
    /// Names of tests that failed in the first run, and passed when they were run again alone.
    pub(crate) flaky: Vec<String>,
}

impl Step {
    fn new(name: &str, outcome: Outcome, started: Instant) -> Self {
        let (name, took) = (name.to_owned(), started.elapsed());
        Self {
            name,
            outcome,
            took,
            tests: TestCount::default(),
            skipped: Vec::new(),
            failed_tests: Vec::new(),
            flaky: Vec::new(),
        }
    }
}

/// Numbers of tests, from the result lines of the test harness.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TestCount {
    /// Number of tests that passed.
    pub(crate) passed: u32,
    /// Number of tests that failed.
    pub(crate) failed: u32,
    /// Number of skipped tests: tests with `#[ignore]`, and tests that passed but reported a
    /// skipped part.
    pub(crate) skipped: u32,
}

impl TestCount {
    /// Adds the numbers of a line such as `test result: ok. 12 passed; 0 failed; 1 ignored; …`.
    fn add(&mut self, line: &str) {
        let Some((_, rest)) = line.split_once("test result: ") else { return };
        for part in rest.split(['.', ';']) {
            let mut words = part.split_whitespace();
            if let (Some(Ok(count)), Some(what)) = (words.next().map(str::parse::<u32>), words.next()) {
                match what {
                    "passed" => self.passed += count,
                    "failed" => self.failed += count,
                    "ignored" => self.skipped += count,
                    _ => {}
                }
            }
        }
    }
}

/// Runs a check of xtask itself as a step.
pub(crate) fn check(name: &str, run: impl FnOnce() -> Result<Outcome>) -> Step {
    println!("── {name}");
    let started = Instant::now();
    let outcome = run().unwrap_or_else(|error| Outcome::Failed(format!("{error:#}")));
    if let Outcome::Failed(why) = &outcome {
        println!("{why}");
    }
    Step::new(name, outcome, started)
}

/// Runs a command to its end, as a step. With `verbose`, prints each line of its output at once.
pub(crate) fn run(name: &str, command: Command, verbose: bool) -> Step {
    println!("── {name}");
    let started = Instant::now();
    let mut heard = Heard::default();
    let outcome = match follow(name, command, verbose, &mut heard) {
        Ok(outcome) => outcome,
        Err(error) => Outcome::Failed(format!("{error:#}")),
    };
    let failed_tests = std::mem::take(&mut heard.failed_tests).into_iter().collect();
    let (tests, skipped) = heard.count();
    Step { tests, skipped, failed_tests, ..Step::new(name, outcome, started) }
}

/// Returns a step that was not run.
pub(crate) fn skipped(name: &str, why: &str) -> Step {
    println!("── {name}: skipped, {why}");
    Step::new(name, Outcome::Skipped(why.to_owned()), Instant::now())
}

/// What is known about a step from its output lines.
#[derive(Debug, Default)]
struct Heard {
    tests: TestCount,
    /// The successful test to which the current lines belong.
    passed_test: Option<String>,
    /// Tests that passed but reported a skipped part.
    silent: BTreeSet<String>,
    skipped: BTreeSet<String>,
    /// Tests whose output the harness printed because they failed.
    failed_tests: BTreeSet<String>,
    /// Whether the current lines are the output of failed tests.
    failures: bool,
}

impl Heard {
    fn line(&mut self, line: &str) {
        self.tests.add(line);
        match line {
            "successes:" => self.failures = false,
            "failures:" => self.failures = true,
            _ => {}
        }
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.passed_test = (!self.failures).then(|| name.to_owned());
            if self.failures {
                self.failed_tests.insert(name.to_owned());
            }
        } else if line.trim_start().starts_with("Running ") {
            self.passed_test = None;
        }
        if let Some(what) = skips::from_line(line) {
            self.skipped.insert(what);
            self.silent.extend(self.passed_test.clone());
        }
    }

    fn count(self) -> (TestCount, Vec<String>) {
        let silent = u32::try_from(self.silent.len()).unwrap_or(u32::MAX);
        let TestCount { passed, failed, skipped } = self.tests;
        let tests = TestCount { passed: passed.saturating_sub(silent), failed, skipped: skipped + silent };
        (tests, self.skipped.into_iter().collect())
    }
}

fn log_path(name: &str) -> Result<PathBuf> {
    let file: String = name.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect();
    Ok(workspace::scratch()?.join(format!("{file}.log")))
}

fn follow(name: &str, mut command: Command, verbose: bool, heard: &mut Heard) -> Result<Outcome> {
    let path = log_path(name)?;
    let mut log = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    let (reader, writer) = std::io::pipe().context("no pipe")?;
    let program = command.get_program().to_string_lossy().into_owned();
    // Use one pipe for both output streams, so that their lines keep their order.
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
    // `command` has copies of the write end of the pipe. They would keep the pipe open.
    drop(command);

    for line in BufReader::new(reader).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        writeln!(log, "{line}")?;
        heard.line(&line);
        if verbose || tells(&line) {
            println!("{line}");
        }
    }
    let status = child.wait()?;
    if status.success() {
        return Ok(Outcome::Passed);
    }
    if !verbose {
        print_failure(&path)?;
    }
    Ok(Outcome::Failed(format!("{status}; whole output in {}", path.display())))
}

/// Returns whether a line must be printed while its step runs.
fn tells(line: &str) -> bool {
    let line = line.trim_start();
    ["Running ", "Doc-tests ", "test result: ", "Compiling gpush", "error", "warning: "]
        .iter()
        .any(|start| line.starts_with(start))
        || line.ends_with("... FAILED")
        || skips::from_line(line).is_some()
}

/// Prints the output of a failed step, without the output of successful tests.
fn print_failure(path: &std::path::Path) -> Result<()> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    println!("┄┄ its output");
    let mut in_success = false;
    for line in text.lines() {
        match line {
            "successes:" => in_success = true,
            "failures:" => in_success = false,
            _ if line.starts_with("test result: ") => in_success = false,
            _ => {}
        }
        if !in_success && !line.ends_with("... ok") {
            println!("{line}");
        }
    }
    println!("┄┄");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up_over_several_result_lines() {
        let mut count = TestCount::default();
        count.add("test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s");
        count.add("test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out");
        count.add("test planner::plans ... ok");
        assert_eq!(count, TestCount { passed: 15, failed: 2, skipped: 1 });
    }

    #[test]
    fn test_that_reports_a_skip_counts_as_skipped() {
        let mut heard = Heard::default();
        for line in [
            "test clients::nvtop ... ok",
            "test clients::gpustat ... ok",
            "",
            "successes:",
            "",
            "---- clients::nvtop stdout ----",
            "SKIPPED nvtop: not installed",
            "SKIPPED nvtop with MIG: not installed",
            "test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
        ] {
            heard.line(line);
        }
        let (tests, skipped) = heard.count();
        assert_eq!(tests, TestCount { passed: 1, failed: 0, skipped: 1 });
        assert_eq!(skipped, ["nvtop with MIG: not installed", "nvtop: not installed"]);
    }

    #[test]
    fn failed_tests_are_known_by_name() {
        let mut heard = Heard::default();
        for line in [
            "successes:",
            "---- a::passes stdout ----",
            "failures:",
            "---- b::fails stdout ----",
            "thread 'b::fails' panicked",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s",
            "     Running tests/other.rs (target/debug/deps/other)",
            "successes:",
            "---- c::passes stdout ----",
        ] {
            heard.line(line);
        }
        assert_eq!(heard.failed_tests.into_iter().collect::<Vec<_>>(), ["b::fails"]);
    }

    #[test]
    fn failed_command_is_a_failed_step() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo went wrong; exit 3"]);
        let step = run("step test failing", command, false);
        assert!(matches!(&step.outcome, Outcome::Failed(why) if why.contains('3')), "{step:?}");

        let step = run("step test passing", Command::new("true"), false);
        assert_eq!(step.outcome, Outcome::Passed);

        let step = run("step test absent", Command::new("no-such-program-here"), false);
        assert!(matches!(step.outcome, Outcome::Failed(_)), "{step:?}");
    }
}
