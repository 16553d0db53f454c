//! `cargo xtask arrows`: which part may use which, compared with ARCHITECTURE.md.
//!
//! [`crates`] checks the dependencies between the crates, [`modules`] those between the top-level modules of the
//! agent.

mod crates;
mod modules;
mod source;
mod table;

use anyhow::Result;

/// What to do besides checking.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Update the lists of used modules in ARCHITECTURE.md first; the order of the rows stays
    #[arg(long)]
    write: bool,
    /// Only print the exceptions that the agent's modules need, in the format of xtask/src/arrows/exceptions.txt
    #[arg(long, conflicts_with = "write")]
    exceptions: bool,
}

impl Arguments {
    /// Whether the command prints and checks nothing.
    pub(crate) fn prints_only(&self) -> bool {
        self.exceptions
    }
}

/// Runs the command and returns the text to print.
pub(crate) fn run(arguments: &Arguments) -> Result<String> {
    if arguments.exceptions {
        return modules::needed_exceptions();
    }
    if arguments.write {
        modules::write_table()?;
    }
    check()
}

/// Checks the arrows between crates and between the agent's modules; returns a summary.
pub(crate) fn check() -> Result<String> {
    Ok(format!("{}\n{}", crates::check()?, modules::check()?))
}
