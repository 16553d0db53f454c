//! `cargo xtask soak`: the random tests of `cargo xtask test`, with several times as many steps.
//!
//! 1. Clients of the simulated driver are killed at random.
//! 2. MPS daemons, their servers, clients and gpushd are killed at random. Another test kills the systemd units of the
//!    daemons; it kills one unit for every five processes that the first test kills. Two tests restart gpushd: one while
//!    MPS daemons run, one while commands wait for a drain. Another test boots a host whose driver is loaded later than
//!    gpush-ready.service waits.
//! 3. Random steps on MPS daemons and random operations. After each step, the test checks
//!    invariants from outside gpushd.
//! 4. Random steps on leases, compared with a reference model. Many scopes of leases, many Slurm jobs, and random requests
//!    of Slurm jobs. Twenty million opens of GPUs that the kernel denies, while systemd reloads its units.
//! 5. Simulated weeks of leases under an idle policy, and simulated days of accounts with faults.
//! 6. Mixed requests, after which gpushd must not use more memory than before. A hostile account, which must not delay
//!    others.
//! 7. Each fuzz target for a minute: random bytes for the parsers of requests, configs, files of Slurm, texts of the
//!    kernel, and frames.
//! 8. The packages for hosts. They are built twice, in different folders with different umasks, and must be equal. On
//!    Debian 11, 12 and 13, a test upgrades the packages under 2,000 requests. lintian and rpmlint check the packages.
//! 9. The packages for Arm hosts. The test runs their programs in an emulator, because this machine cannot run them.
//!
//! If a test fails, its message has the seed and the step. `--seed` repeats the run.

use std::{path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{
    package::LATER,
    step::{self, Outcome},
    workspace,
};

/// Number of requests around an upgrade, of which none may fail.
const UPGRADE_REQUESTS: &str = "2000";

/// Seconds of the operation that runs during the upgrade.
const UPGRADE_OPERATION_S: &str = "20";

/// Number of clients of the simulated driver to kill.
const DRIVER_KILLS: u64 = 50_000;

/// How often the other callers do their work while a hostile account sends requests. With more than 400 rounds, the other
/// user's own records exceed the limit of an account, and gpushd deletes the oldest of them.
const HOSTILE_ROUNDS: u64 = 300;

/// Number of scopes that one test creates.
const SCOPES: u64 = 1000;

/// How often a login session tries to open a GPU while systemd reloads its units.
const DENIED_OPENS: u64 = 20_000_000;

/// The test of these opens.
const DENIED: &str = "enforcement::kernel_denies_gpus_to_sessions";

/// Number of Slurm jobs of each of two users.
const JOBS_OF_A_USER: u64 = 100;

/// Number of random requests of Slurm jobs.
const JOB_REQUESTS: u64 = 1000;

/// Number of simulated weeks of leases under an idle policy.
const IDLE_WEEKS: u64 = 10_000;

/// Number of simulated days of accounts.
const ACCOUNT_DAYS: u64 = 30;

/// Seconds for each fuzz target.
const FUZZ_S: u64 = 60;

/// Limit of `gpush-ready.service`, in seconds, as in the unit.
const READY_LIMIT_S: u64 = 90;

/// Builds the packages in a clone of the last commit, with another umask, and compares them with those of this checkout.
const AGAIN: &str = "rm -rf \"$0\" && git clone --quiet . \"$0\" && cd \"$0\" && export CARGO_TARGET_DIR=\"$0/target\"
    umask 077; cargo run --quiet --package xtask -- package
    for made in target/package/*.deb target/package/*.rpm; do cmp \"$made\" \"$1/${made##*/}\"; done";

/// Builds the packages for Arm hosts, and starts their programs. `0` is xtask, and `1` is the folder for the packages.
const ARM: &str = "\"$0\" package --arch aarch64 --out \"$1\"
    dpkg-deb --extract \"$1\"/gpush_*_arm64.deb \"$1/files\"
    for program in sbin/gpushd bin/gpushctl; do
        qemu-aarch64-static -L /usr/aarch64-linux-gnu \"$1/files/usr/$program\" --version
    done";

/// The number of steps of each kind.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Number of kills
    #[arg(long, default_value = "1000", value_name = "NUMBER")]
    kills: u64,
    /// Number of random steps of MPS and of operations
    #[arg(long, default_value = "1000", value_name = "NUMBER")]
    steps: u64,
    /// Number of random steps of leases
    #[arg(long, default_value = "10000", value_name = "NUMBER")]
    leases: u64,
    /// Number of mixed requests between two measurements of resident memory
    #[arg(long, default_value = "10000", value_name = "NUMBER")]
    requests: u64,
    /// Seed of the random numbers [default: a fixed seed]
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
}

/// Runs the tests. Returns true if all succeeded.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    // cargo may build xtask again during the tests. After that, the kernel no longer gives a usable path.
    let xtask = std::env::current_exe().context("the path of xtask is not known")?;
    let mut build = workspace::cargo();
    build.args(["build", "--workspace", "--locked"]);
    if step::run("build", build, false).outcome != Outcome::Passed {
        return Ok(false);
    }
    let kills = ("GPUSH_TEST_KILLS", arguments.kills);
    // systemd needs seconds for each kill, so this test has fewer kills.
    let unit_kills = ("GPUSH_TEST_UNIT_KILLS", arguments.kills / 5);
    let daemon_kills = ("GPUSH_TEST_DAEMON_KILLS", arguments.kills / 50);
    let restarts = ("GPUSH_TEST_RESTARTS", arguments.kills / 10);
    let drained = ("GPUSH_TEST_DRAIN_RESTARTS", arguments.kills / 20);
    let late = ("GPUSH_TEST_READY_LIMIT_S", READY_LIMIT_S);
    let steps = ("GPUSH_TEST_STEPS", arguments.steps);
    let leases = ("GPUSH_TEST_LEASE_STEPS", arguments.leases);
    let requests = ("GPUSH_TEST_REQUESTS", arguments.requests);
    let mut outcomes = Vec::new();
    for (name, test, filter, number) in [
        ("kills of clients of the simulated driver", "driver", "sigkill::", ("GPUSH_TEST_KILLS", DRIVER_KILLS)),
        ("kills at every write of the store", "mig", "kill_at_store_writes", ("GPUSH_TEST_WRITE_STEP", 1)),
        ("kills of what belongs to MPS", "mps", "kills::", kills),
        ("kills of units of systemd", "systemd", "mps::kills::", unit_kills),
        ("restarts of gpushd beside MPS daemons", "systemd", "mps::daemons_and_clients_outlive_a_gpushd", restarts),
        ("kills of MPS daemons and of gpushd", "systemd", "mps::killed_daemons_and_gpushd", daemon_kills),
        ("scopes of leases", "systemd", "leases::many_scopes::", ("GPUSH_TEST_SCOPES", SCOPES)),
        ("opens of denied GPUs while systemd reloads", "systemd", DENIED, ("GPUSH_TEST_DENIED_OPENS", DENIED_OPENS)),
        ("restarts of gpushd while commands wait for a drain", "systemd", "drains::", drained),
        ("a driver that is loaded too late", "systemd", "ready::ready_unit_fails_after_its_limit", late),
        ("random steps of MPS and of operations", "load", "steps::", steps),
        ("random steps of leases", "load", "leases::leases_follow_the_model_in_random_steps", leases),
        ("memory of gpushd under mixed requests", "load", "memory::", requests),
        ("a hostile account", "load", "hostile::", ("GPUSH_TEST_HOSTILE_ROUNDS", HOSTILE_ROUNDS)),
        ("jobs of two users", "slurm", "load::many_jobs", ("GPUSH_TEST_SLURM_JOBS", JOBS_OF_A_USER)),
        ("random requests of jobs", "slurm", "fuzz::", ("GPUSH_TEST_SLURM_REQUESTS", JOB_REQUESTS)),
        ("weeks of leases under an idle policy", "idle_weeks", "", ("GPUSH_TEST_IDLE_WEEKS", IDLE_WEEKS)),
        ("days of accounts with faults", "account_days", "", ("GPUSH_TEST_ACCOUNT_DAYS", ACCOUNT_DAYS)),
        ("fuzz targets", "fuzz", "", ("GPUSH_TEST_FUZZ_S", FUZZ_S)),
    ] {
        let mut command = tests(test, filter);
        command.env(number.0, number.1.to_string());
        if let Some(seed) = arguments.seed {
            command.env("GPUSH_TEST_SEED", seed.to_string());
        }
        outcomes.push(step::run(name, command, true).outcome);
    }
    outcomes.extend(packages(&xtask)?);
    outcomes.push(arm(&xtask));
    Ok(outcomes.iter().all(|outcome| !matches!(outcome, Outcome::Failed(_))))
}

/// Returns a command that runs tests of one test program: those whose names contain `filter`.
fn tests(test: &str, filter: &str) -> Command {
    let mut command = workspace::cargo();
    command.args(["test", "--locked", "--workspace", "--test", test, "--", "--show-output", filter]);
    command
}

/// Builds the packages for hosts in two versions, and tests them. Leaves out what this machine cannot do.
fn packages(xtask: &Path) -> Result<Vec<Outcome>> {
    let name = "packages for hosts";
    if let Some(absent) = ["cargo-zigbuild", "dpkg-deb", "rpmbuild"].iter().find(|name| !workspace::is_installed(name))
    {
        return Ok(vec![step::skipped(name, &format!("{absent} is not installed")).outcome]);
    }
    let folder = workspace::target().join("package");
    let mut package = Command::new(xtask);
    package.arg("package");
    let mut outcomes = vec![step::run(name, package, true).outcome];
    let mut later = Command::new(xtask);
    later.args(["package", "--version", LATER]);
    outcomes.push(step::run("packages of a later version", later, true).outcome);
    let mut tested = tests("systemd", "packages::");
    tested.env("GPUSH_TEST_PACKAGES", &folder).env("GPUSH_TEST_UPGRADE_REQUESTS", UPGRADE_REQUESTS);
    tested.env("GPUSH_TEST_UPGRADE_OPERATION_S", UPGRADE_OPERATION_S);
    outcomes.push(step::run("tests of the packages", tested, true).outcome);
    for (linter, more) in [
        ("lintian", "--fail-on error,warning --tag-display-limit 0 *_VERSION-1_*.deb"),
        ("rpmlint", "--config \"$0/packaging/rpm/rpmlint.toml\" *-VERSION-1.*.rpm"),
    ] {
        if !workspace::is_installed(linter) {
            outcomes.push(step::skipped(linter, "it is not installed").outcome);
            continue;
        }
        let mut command = Command::new("sh");
        let line = format!("{linter} {}", more.replace("VERSION", env!("CARGO_PKG_VERSION")));
        command.args(["-c", &line]).arg(workspace::root()).current_dir(&folder);
        outcomes.push(step::run(linter, command, true).outcome);
    }
    let name = "the same packages from another folder";
    if !is_committed()? {
        outcomes.push(step::skipped(name, "files are not committed").outcome);
        return Ok(outcomes);
    }
    let clone = workspace::target().join("clone");
    let mut again = Command::new("sh");
    again.args(["-ec", AGAIN]).arg(&clone).arg(&folder).current_dir(workspace::root());
    outcomes.push(step::run(name, again, true).outcome);
    let _ = std::fs::remove_dir_all(&clone);
    Ok(outcomes)
}

/// Builds the packages for Arm hosts, and runs their programs in an emulator.
fn arm(xtask: &Path) -> Outcome {
    let name = "packages for Arm hosts";
    let needed = ["cargo-zigbuild", "dpkg-deb", "rpmbuild", "aarch64-linux-gnu-objcopy", "qemu-aarch64-static"];
    if let Some(absent) = needed.iter().find(|program| !workspace::is_installed(program)) {
        return step::skipped(name, &format!("{absent} is not installed")).outcome;
    }
    let mut command = Command::new("sh");
    command.args(["-ec", ARM]).arg(xtask).arg(workspace::target().join("package-arm"));
    step::run(name, command, true).outcome
}

/// Returns whether the last commit contains all files of this checkout.
fn is_committed() -> Result<bool> {
    let status = Command::new("git").args(["status", "--porcelain"]).current_dir(workspace::root()).output();
    let status = status.context("cannot start git")?;
    Ok(status.status.success() && status.stdout.is_empty())
}
