//! `cargo xtask soak`: the random tests of `cargo xtask test`, with at least ten times the steps.
//!
//! 1. MPS daemons, their servers, clients and gpushd are killed at random. Another test kills their
//!    systemd units, a fifth as often.
//! 2. Random steps on MPS daemons and random operations. After each step, the test checks
//!    invariants from outside gpushd.
//! 3. Random steps on leases, compared with a reference model.
//! 4. Mixed requests, after which gpushd must not use more memory than before.
//!
//! A failure message names the seed and the step. `--seed` repeats the run.

use anyhow::Result;

use crate::{
    step::{self, Outcome},
    workspace,
};

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
    /// Seed of the random numbers [default: one that is always the same]
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
}

/// Runs the tests. Returns true if all succeeded.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let mut build = workspace::cargo();
    build.args(["build", "--workspace", "--locked"]);
    if step::run("build", build, false).outcome != Outcome::Passed {
        return Ok(false);
    }
    let mut kills = workspace::cargo();
    kills.args(["test", "--locked", "--package", "gpush-tests", "--test", "mps", "--", "--show-output", "kills::"]);
    kills.env("GPUSH_TEST_KILLS", arguments.kills.to_string());
    if let Some(seed) = arguments.seed {
        kills.env("GPUSH_TEST_SEED", seed.to_string());
    }
    let daemons = step::run("kills of what belongs to MPS", kills, true).outcome;
    let mut units = workspace::cargo();
    units.args([
        "test",
        "--locked",
        "--package",
        "gpush-tests",
        "--test",
        "systemd",
        "--",
        "--show-output",
        "mps::kills::",
    ]);
    // systemd needs seconds for each kill, so the number is smaller.
    units.env("GPUSH_TEST_UNIT_KILLS", (arguments.kills / 5).to_string());
    if let Some(seed) = arguments.seed {
        units.env("GPUSH_TEST_SEED", seed.to_string());
    }
    let units = step::run("kills of units of systemd", units, true).outcome;
    let mut steps = workspace::cargo();
    steps.args(["test", "--locked", "--package", "gpush-tests", "--test", "load", "--", "--show-output", "steps::"]);
    steps.env("GPUSH_TEST_STEPS", arguments.steps.to_string());
    if let Some(seed) = arguments.seed {
        steps.env("GPUSH_TEST_SEED", seed.to_string());
    }
    let steps = step::run("random steps of MPS and of operations", steps, true).outcome;
    let mut leases = workspace::cargo();
    let test = "leases::leases_follow_the_model_in_random_steps";
    leases.args([
        "test",
        "--locked",
        "--package",
        "gpush-tests",
        "--test",
        "load",
        "--",
        "--show-output",
        "--exact",
        test,
    ]);
    leases.env("GPUSH_TEST_LEASE_STEPS", arguments.leases.to_string());
    if let Some(seed) = arguments.seed {
        leases.env("GPUSH_TEST_SEED", seed.to_string());
    }
    let leases = step::run("random steps of leases", leases, true).outcome;
    let mut memory = workspace::cargo();
    memory.args(["test", "--locked", "--package", "gpush-tests", "--test", "load", "--", "--show-output", "memory::"]);
    memory.env("GPUSH_TEST_REQUESTS", arguments.requests.to_string());
    let memory = step::run("memory of gpushd under mixed requests", memory, true).outcome;
    Ok([daemons, units, steps, leases, memory].iter().all(|outcome| *outcome == Outcome::Passed))
}
