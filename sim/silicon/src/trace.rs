//! The trace: a file `DIR/trace` with one line for each call that changes the state. The calls are
//! traced only if this file exists.
//!
//! Format of a line: `pid function gpu arguments -> NAME (code)`. Each process writes a line in one
//! append, so lines of different processes never mix.

use std::fmt::Display;
use std::io::Write;

use crate::host::Host;
use crate::returns::Return;

impl Host {
    /// Appends a line if the file exists. A write error does not make the call fail.
    pub fn trace(&self, function: &str, gpu: Option<u32>, arguments: impl Display, outcome: Return) {
        let path = self.dir().join("trace");
        let Ok(mut file) = std::fs::OpenOptions::new().append(true).open(path) else { return };
        let gpu = gpu.map_or_else(|| "-".to_owned(), |index| index.to_string());
        let line = format!("{} {function} {gpu} {arguments} -> {outcome}\n", std::process::id());
        let _lost = file.write_all(line.as_bytes());
    }
}
