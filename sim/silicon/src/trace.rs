//! The golden log: one line for each mutating call, in `DIR/trace`, if that file exists.
//!
//! `pid function gpu arguments -> NAME (code)`. Lines of concurrent processes never mix: each is
//! one append.

use std::fmt::Display;
use std::io::Write;

use crate::host::Host;
use crate::returns::Return;

impl Host {
    /// Appends a line, if a trace is active. A trace that cannot be written does not fail the call.
    pub fn trace(&self, function: &str, gpu: Option<u32>, arguments: impl Display, outcome: Return) {
        let path = self.dir().join("trace");
        let Ok(mut file) = std::fs::OpenOptions::new().append(true).open(path) else { return };
        let gpu = gpu.map_or_else(|| "-".to_owned(), |index| index.to_string());
        let line = format!("{} {function} {gpu} {arguments} -> {outcome}\n", std::process::id());
        let _lost = file.write_all(line.as_bytes());
    }
}
