//! `cargo xtask soak`: what a usual run does a hundred times, a thousand times: MPS daemons, their servers,
//! clients and gpushd killed at random; and a fifth as often their units, on a systemd. Then ten thousand mixed
//! requests, after which gpushd must not take more memory than before.

use anyhow::Result;

use crate::{
    step::{self, Outcome},
    workspace,
};

/// How much of it.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// How often something is killed
    #[arg(long, default_value = "1000", value_name = "NUMBER")]
    kills: u64,
    /// Number of mixed requests between two measurements of resident memory
    #[arg(long, default_value = "10000", value_name = "NUMBER")]
    requests: u64,
    /// Begin with this number in place of the usual one
    #[arg(long, value_name = "NUMBER")]
    seed: Option<u64>,
}

/// Runs it; true when all went well.
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
    // Each takes seconds, which systemd has.
    units.env("GPUSH_TEST_UNIT_KILLS", (arguments.kills / 5).to_string());
    if let Some(seed) = arguments.seed {
        units.env("GPUSH_TEST_SEED", seed.to_string());
    }
    let units = step::run("kills of units of systemd", units, true).outcome;
    let mut memory = workspace::cargo();
    memory.args(["test", "--locked", "--package", "gpush-tests", "--test", "load", "--", "--show-output", "memory::"]);
    memory.env("GPUSH_TEST_REQUESTS", arguments.requests.to_string());
    let memory = step::run("memory of gpushd under mixed requests", memory, true).outcome;
    Ok([daemons, units, memory].iter().all(|outcome| *outcome == Outcome::Passed))
}
