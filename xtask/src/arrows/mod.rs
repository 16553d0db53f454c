//! `cargo xtask arrows`: compares the dependencies of crates and modules with ARCHITECTURE.md.
//!
//! [`crates`] checks the dependencies between the crates. [`modules`] checks the dependencies
//! between the agent's top-level modules. [`files`] checks that no files of a crate use each other in a cycle.

mod crates;
mod files;
mod modules;
mod source;
mod table;

use anyhow::Result;

/// Whether the command also updates the table.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Update the lists of used modules in ARCHITECTURE.md first; the order of the rows does not
    /// change
    #[arg(long)]
    write: bool,
}

/// Runs the command. Returns the text to print.
pub(crate) fn run(arguments: &Arguments) -> Result<String> {
    if arguments.write {
        modules::write_table()?;
    }
    check()
}

/// Checks the dependencies between the crates, between the agent's modules and between files. Returns a summary.
pub(crate) fn check() -> Result<String> {
    Ok(format!("{}\n{}\n{}", crates::check()?, modules::check()?, files::check()?))
}
