//! strace in tests. It shows system calls, or makes them fail.

use std::process::Command;

/// Returns whether strace works on this machine. If not, prints that the test `what` is skipped.
#[must_use]
pub fn works(what: &str) -> bool {
    let traced = Command::new("strace").args(["-o", "/dev/null", "true"]).output();
    let works = traced.is_ok_and(|output| output.status.success());
    if !works {
        println!("SKIPPED {what}: strace is not installed or may not trace here");
    }
    works
}
