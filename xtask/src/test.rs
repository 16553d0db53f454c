//! `cargo xtask test`: runs all checks and tests, without manual preparation.
//!
//! If a step fails, the run continues, so one run reports everything. The last line is always `N passed, N failed, N
//! skipped`. It counts tests; a step without tests counts as one test. The lines before it list the skipped tests and
//! their reasons.

use std::{
    collections::BTreeSet,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::{
    arrows, compatibility, generate, install, links,
    package::LATER,
    step::{self, Outcome, Step, TestCount},
    tree,
    workspace::{self, Build},
};

/// What to run.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Run only format check, arrows, lints and unit tests; install nothing
    #[arg(long)]
    quick: bool,
    /// Install nothing; skip and list tests whose requirements are missing
    #[arg(long)]
    no_install: bool,
    /// Show all output of every step
    #[arg(long, short)]
    verbose: bool,
}

/// Runs the steps. Returns true if no step failed.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let started = Instant::now();
    let verbose = arguments.verbose;
    let mut missing = Vec::new();
    if !arguments.quick {
        missing = if arguments.no_install { install::absent() } else { install::all() };
        for what in &missing {
            println!("SKIPPED {what}");
        }
    }
    let mut steps = vec![
        cargo("format", &["fmt", "--all", "--check"], verbose),
        step::check("arrows", || printed(arrows::check())),
        step::check("tree", || printed(tree::check())),
        step::check("compatibility", || printed(compatibility::check())),
        step::check("links", || printed(links::check())),
        cargo("lints", &["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"], verbose),
    ];
    if arguments.quick {
        steps.push(tests("unit tests", &["--workspace", "--lib", "--bins"], verbose));
    } else {
        // The build comes first, so that the end-to-end tests find the programs and the simulated library in one
        // folder. It includes the tests, because they enable features of dependencies. If the tests were built later,
        // the whole workspace would be built a second time.
        let build = cargo("build", &["build", "--workspace", "--lib", "--bins", "--tests", "--locked"], verbose);
        let built = build.outcome == Outcome::Passed;
        steps.push(build);
        if built {
            steps.push(packages(verbose));
            steps.extend(tests_and_repeats(verbose));
            let gpu = Command::new(workspace::root().join("tests/gpu/run"));
            steps.push(step::run("a real GPU", gpu, verbose));
            let programs = Build::Debug.folder();
            steps.push(step::check("man pages, completions", || printed(generate::make_all(&programs))));
            // New users run the demo first, because the README names it.
            steps.push(demo(&programs, verbose));
        } else {
            steps.push(step::skipped("tests", "the workspace does not build"));
        }
        steps.push(docs(verbose));
        steps.push(deny(verbose));
    }
    if std::env::var_os("CI").is_some() {
        check_budgets(&mut steps, started.elapsed());
    }
    summary(&steps, &missing, started);
    Ok(!steps.iter().any(|step| matches!(step.outcome, Outcome::Failed(_))))
}

/// Maximum seconds of each step in CI. The values are for a clean clone on a machine with 2 cores, on which the step
/// `build` takes [`REFERENCE_BUILD`].
const BUDGETS: [(&str, u64); 14] = [
    ("format", 60),
    ("arrows", 60),
    ("tree", 60),
    ("compatibility", 60),
    ("links", 60),
    ("lints", 600),
    ("packages for tests", 120),
    ("tests", 1200),
    ("failed tests, alone", 300),
    ("a real GPU", 120),
    ("man pages, completions", 60),
    ("demo", 180),
    ("documentation", 360),
    ("licences, bans, sources", 120),
];

/// Maximum seconds of the whole run in CI.
const WHOLE_BUDGET: u64 = 40 * 60;

/// Seconds that the step `build` takes on the machine of the [`BUDGETS`].
const REFERENCE_BUILD: u64 = 480;

/// Maximum seconds of the step `build` in CI, on every machine.
const BUILD_BUDGET: u64 = 20 * 60;

/// Fails each step that took longer than its budget. Adds a failed step if the whole run took too long. The
/// budgets grow with the time of the step `build`, to at most twice their values: on a slow machine, all steps take
/// longer.
fn check_budgets(steps: &mut Vec<Step>, whole: Duration) {
    let build = steps.iter().find(|step| step.name == "build").map_or(0, |build| build.took.as_secs());
    let factored = |most: u64| most * build.clamp(REFERENCE_BUILD, 2 * REFERENCE_BUILD) / REFERENCE_BUILD;
    let over = |took: Duration, most: u64| {
        (took.as_secs() > most).then(|| Outcome::Failed(format!("took longer than its budget of {most} s")))
    };
    for step in steps.iter_mut().filter(|step| step.outcome == Outcome::Passed) {
        let budget = match step.name.as_str() {
            "build" => Some(BUILD_BUDGET),
            other => BUDGETS.iter().find(|(name, _)| *name == other).map(|(_, most)| factored(*most)),
        };
        if let Some(failed) = budget.and_then(|most| over(step.took, most)) {
            step.outcome = failed;
        }
    }
    if let Some(failed) = over(whole, factored(WHOLE_BUDGET)) {
        steps.push(step::check("time of all steps", || Ok(failed)));
    }
}

/// Prints the summary of a check. If the check returned an error, the step fails.
fn printed(result: Result<String>) -> Result<Outcome> {
    println!("{}", result?);
    Ok(Outcome::Passed)
}

fn cargo(name: &str, arguments: &[&str], verbose: bool) -> Step {
    let mut command = workspace::cargo();
    command.args(arguments);
    step::run(name, command, verbose)
}

/// Number of tests that run at the same time on each core: most end-to-end tests wait for programs and for the disk. With
/// one test on each core, the tests take 1.5 times as long.
const THREADS_OF_A_CORE: usize = 2;

fn threads() -> usize {
    THREADS_OF_A_CORE * std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn tests(name: &str, which: &[&str], verbose: bool) -> Step {
    let mut command = workspace::cargo();
    command.args(["test", "--locked", "--no-fail-fast"]).args(which).arg("--");
    // With this option, successful tests also print which parts they have skipped.
    command.arg("--show-output").env("GPUSH_TEST_VENV", install::venv());
    command.env("GPUSH_TEST_SLURM_PLUGINS", install::slurm_plugins());
    command.env("GPUSH_TEST_PROMETHEUS", install::prometheus());
    command.env("RUST_TEST_THREADS", threads().to_string());
    step::run(name, command, verbose)
}

/// Maximum number of failed tests that are run again.
const MOST_REPEATED: usize = 16;

/// Runs all tests. If only a few tests fail, runs each of them again, alone. If a test then passes, it is reported as
/// flaky, and the run does not fail because of it.
fn tests_and_repeats(verbose: bool) -> Vec<Step> {
    let mut all = tests("tests", &["--workspace"], verbose);
    let failed = all.failed_tests.len();
    let are_all_named = u32::try_from(failed) == Ok(all.tests.failed);
    if failed == 0 || failed > MOST_REPEATED || !are_all_named {
        return vec![all];
    }
    let mut command = workspace::cargo();
    command.args(["test", "--locked", "--no-fail-fast", "--workspace", "--", "--test-threads", "1", "--exact"]);
    command.args(&all.failed_tests).env("GPUSH_TEST_VENV", install::venv());
    command.env("GPUSH_TEST_SLURM_PLUGINS", install::slurm_plugins());
    command.env("GPUSH_TEST_PROMETHEUS", install::prometheus());
    let again = step::run("failed tests, alone", command, verbose);
    if again.outcome == Outcome::Passed && again.tests.passed >= all.tests.failed {
        all.outcome = Outcome::Passed;
        all.tests.failed = 0;
        all.flaky = std::mem::take(&mut all.failed_tests);
    }
    vec![all, again]
}

fn demo(programs: &Path, verbose: bool) -> Step {
    // The build step may have replaced the file of this process. So run the xtask that the build step has built.
    let mut command = Command::new(programs.join("xtask"));
    command.args(["demo", "--every-preset", "--built"]);
    step::run("demo", command, verbose)
}

/// Builds debug packages in the folder in which `tests/tests/systemd/packages` looks for them. Builds two versions, for
/// tests of upgrades.
fn packages(verbose: bool) -> Step {
    let name = "packages for tests";
    if let Some(program) = ["dpkg-deb", "objcopy"].into_iter().find(|program| !workspace::is_installed(program)) {
        return step::skipped(name, &format!("{program} is not installed"));
    }
    let folder = Build::Debug.folder();
    let formats = if workspace::is_installed("rpmbuild") { "deb,rpm" } else { "deb" };
    let package = format!("\"$0\" package --debug-build --built --format {formats} --out \"$1/packages\"");
    let mut command = Command::new("sh");
    command.args(["-ec", &format!("{package}\n{package} --version {LATER}")]).arg(folder.join("xtask")).arg(&folder);
    step::run(name, command, verbose)
}

fn docs(verbose: bool) -> Step {
    let mut command = workspace::cargo();
    command
        .args(["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"])
        .env("RUSTDOCFLAGS", "-D warnings");
    step::run("documentation", command, verbose)
}

fn deny(verbose: bool) -> Step {
    let name = "licences, bans, sources";
    let mut present = workspace::cargo();
    let present =
        present.args(["deny", "--version"]).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    if present.status().is_ok_and(|status| status.success()) {
        cargo(name, &["deny", "--workspace", "check", "bans", "licenses", "sources"], verbose)
    } else {
        step::skipped(
            name,
            "cargo-deny is not installed; `cargo install --locked cargo-deny` takes minutes and is left to you",
        )
    }
}

fn summary(steps: &[Step], missing: &[String], started: Instant) {
    println!("\n{:<26} {:<8} {:>8}", "step", "result", "seconds");
    let mut all = TestCount::default();
    for step in steps {
        let (result, why) = match &step.outcome {
            Outcome::Passed if count(step).passed == 0 => ("skipped", step.skipped.first().map_or("", String::as_str)),
            Outcome::Passed => ("passed", ""),
            Outcome::Failed(why) => ("FAILED", why.as_str()),
            Outcome::Skipped(why) => ("skipped", why.as_str()),
        };
        let TestCount { passed, failed, skipped } = count(step);
        all.passed += passed;
        all.failed += failed;
        all.skipped += skipped;
        let tests = if step.tests == TestCount::default() {
            String::new()
        } else {
            format!("{passed} tests passed, {failed} failed, {skipped} skipped ")
        };
        let line = format!("{:<26} {result:<8} {:>8.1}  {tests}{why}", step.name, step.took.as_secs_f64());
        println!("{}", line.lines().next().unwrap_or_default().trim_end());
    }
    println!("{:<26} {:<8} {:>8.1}", "all", "", started.elapsed().as_secs_f64());

    let skipped: BTreeSet<&String> = missing.iter().chain(steps.iter().flat_map(|step| &step.skipped)).collect();
    if !skipped.is_empty() {
        println!("\nSKIPPED within steps:");
        for what in skipped {
            println!("  {what}");
        }
    }
    let flaky: Vec<&String> = steps.iter().flat_map(|step| &step.flaky).collect();
    if !flaky.is_empty() {
        println!("\nFLAKY: failed together with other tests, passed alone:");
        for test in flaky {
            println!("  {test}");
        }
    }
    println!("\n{} passed, {} failed, {} skipped", all.passed, all.failed, all.skipped);
}

/// Counts the tests of a step. A step without tests counts as one test. If a step has failed, at least one failure is
/// counted.
fn count(step: &Step) -> TestCount {
    let tests = step.tests;
    match step.outcome {
        Outcome::Passed if tests == TestCount::default() && !step.skipped.is_empty() => {
            TestCount { skipped: 1, ..tests }
        }
        Outcome::Passed if tests == TestCount::default() => TestCount { passed: 1, ..tests },
        Outcome::Passed => tests,
        Outcome::Failed(_) => TestCount { failed: tests.failed.max(1), ..tests },
        Outcome::Skipped(_) => TestCount { skipped: 1, ..tests },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(outcome: Outcome, tests: TestCount) -> Step {
        Step {
            name: "demo".into(),
            outcome,
            took: Duration::from_secs(100),
            tests,
            skipped: Vec::new(),
            failed_tests: Vec::new(),
            flaky: Vec::new(),
        }
    }

    #[test]
    fn step_or_run_over_its_budget_fails() {
        let none = TestCount::default();
        let slow = Step { took: Duration::from_secs(181), ..step(Outcome::Passed, none) };
        let mut steps = vec![step(Outcome::Passed, none), slow];
        check_budgets(&mut steps, Duration::from_secs(WHOLE_BUDGET));
        assert_eq!(steps[0].outcome, Outcome::Passed);
        assert_eq!(steps[1].outcome, Outcome::Failed("took longer than its budget of 180 s".into()));
        check_budgets(&mut steps, Duration::from_secs(WHOLE_BUDGET + 1));
        assert!(matches!(&steps[2].outcome, Outcome::Failed(why) if why.contains("2400 s")), "{steps:?}");
    }

    #[test]
    fn budgets_grow_with_the_time_of_the_build() {
        let none = TestCount::default();
        let took = |seconds| Step { took: Duration::from_secs(seconds), ..step(Outcome::Passed, none) };
        let build = Step { name: "build".into(), ..took(2 * REFERENCE_BUILD) };
        let mut steps = vec![build, took(360), took(361)];
        check_budgets(&mut steps, Duration::from_secs(2 * WHOLE_BUDGET));
        let outcomes: Vec<bool> = steps.iter().map(|step| step.outcome == Outcome::Passed).collect();
        assert_eq!(outcomes, [true, true, false]);
    }

    /// A build that is far too slow fails, and does not hide that other steps are too slow.
    #[test]
    fn slow_build_fails_and_at_most_doubles_the_budgets() {
        let none = TestCount::default();
        let took = |seconds| Step { took: Duration::from_secs(seconds), ..step(Outcome::Passed, none) };
        let build = |seconds| Step { name: "build".into(), ..took(seconds) };
        let mut steps = vec![build(BUILD_BUDGET), took(361)];
        check_budgets(&mut steps, Duration::from_secs(0));
        assert_eq!(steps[0].outcome, Outcome::Passed);
        assert_eq!(steps[1].outcome, Outcome::Failed("took longer than its budget of 360 s".into()));
        let mut steps = vec![build(BUILD_BUDGET + 1)];
        check_budgets(&mut steps, Duration::from_secs(0));
        assert_eq!(steps[0].outcome, Outcome::Failed("took longer than its budget of 1200 s".into()));
    }

    #[test]
    fn failed_step_always_counts() {
        let none = TestCount::default();
        let some = TestCount { passed: 5, failed: 0, skipped: 1 };
        assert_eq!(count(&step(Outcome::Failed("does not build".into()), none)).failed, 1);
        assert_eq!(count(&step(Outcome::Failed("aborted".into()), some)), TestCount { failed: 1, ..some });
        assert_eq!(count(&step(Outcome::Passed, some)), some);
        assert_eq!(count(&step(Outcome::Passed, none)).passed, 1);
        assert_eq!(count(&step(Outcome::Skipped("why".into()), none)).skipped, 1);
        let skip_reported = Step { skipped: vec!["no GPU".into()], ..step(Outcome::Passed, none) };
        assert_eq!(count(&skip_reported), TestCount { skipped: 1, ..none });
    }
}
