//! Helper programs that do not run, for tests of programs that run helper units.

use std::fmt;

use super::{Ended, Job};

/// The helper programs of a host, in a script.
pub trait ScriptedPrograms: fmt::Debug + Send + Sync {
    /// Runs a program. May block.
    fn run(&self, job: &Job) -> Ended;
}
