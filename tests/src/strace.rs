//! strace in tests, which shows system calls or makes them fail.

use std::process::Command;

/// Returns whether strace works here. If not, prints that `what` is skipped.
#[must_use]
pub fn works(what: &str) -> bool {
    let traced = Command::new("strace").args(["-o", "/dev/null", "true"]).output();
    let works = traced.is_ok_and(|output| output.status.success());
    if !works {
        println!("SKIPPED {what}: strace is not installed or may not trace here");
    }
    works
}
