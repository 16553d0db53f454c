//! Tests that look at system calls, or fail them, through strace.

use std::process::Command;

/// Whether strace works here; says that `what` is skipped when it does not.
#[must_use]
pub fn works(what: &str) -> bool {
    let traced = Command::new("strace").args(["-o", "/dev/null", "true"]).output();
    let works = traced.is_ok_and(|output| output.status.success());
    if !works {
        println!("SKIPPED {what}: strace is not installed or may not trace here");
    }
    works
}
