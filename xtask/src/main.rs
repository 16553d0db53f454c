//! All tasks that a developer or CI runs on this repository.

mod arrows;
mod bench;
mod compatibility;
mod demo;
mod generate;
mod install;
mod links;
mod names;
mod package;
mod skips;
mod soak;
mod step;
mod test;
mod tree;
mod workspace;

use std::process::ExitCode;

use clap::Parser;

/// Run the tasks of a developer or of CI on this repository
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Task {
    /// Demonstrate gpush on a simulated host
    Demo(demo::Arguments),
    /// Run all checks and tests; install what they need, if possible
    Test(test::Arguments),
    /// Run the benchmarks, and write docs/benchmarks.md
    Bench(bench::Arguments),
    /// Run the random tests with many more steps, and test the packages for hosts
    Soak(soak::Arguments),
    /// Build the .deb and .rpm packages
    Package(package::Arguments),
    /// Write docs/openapi.json from the code
    Openapi(generate::Arguments),
    /// Write docs/released: the API and config that later versions must keep
    ReleaseBaseline,
    /// Write the man pages to target/man, and those of gpush-sim to target/man-sim
    Man(generate::Arguments),
    /// Write gpushctl's shell completions to target/completions
    Completions(generate::Arguments),
    /// Check dependencies of crates and modules, forbidden content of files, and links of documents
    Arrows(arrows::Arguments),
}

/// Prints the summary of a finished task.
fn reported(sentence: anyhow::Result<String>) -> anyhow::Result<bool> {
    println!("{}", sentence?);
    Ok(true)
}

fn main() -> ExitCode {
    let done = match Task::parse() {
        Task::Demo(arguments) => demo::run(&arguments),
        Task::Test(arguments) => test::run(&arguments),
        Task::Bench(arguments) => bench::run(&arguments),
        Task::Soak(arguments) => soak::run(&arguments),
        Task::Package(arguments) => package::run(&arguments),
        Task::Openapi(arguments) => reported(generate::openapi(&arguments)),
        Task::ReleaseBaseline => reported(compatibility::write()),
        Task::Man(arguments) => reported(generate::man(&arguments)),
        Task::Completions(arguments) => reported(generate::completions(&arguments)),
        Task::Arrows(arguments) => arrows::run(&arguments).and_then(|arrows| {
            println!("{arrows}\ntree is clean: {}\n{}\n{}", tree::check()?, links::check()?, names::check()?);
            Ok(true)
        }),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
