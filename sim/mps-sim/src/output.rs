//! Standard output and standard error of the simulated programs.
//!
//! A reader may close its end early, as in `nvidia-smi -L | true`. The program then continues without output, and keeps
//! its exit code. `println!` would panic.

use std::{
    fmt,
    io::{self, Write},
};

/// Prints to standard output.
#[macro_export]
macro_rules! out {
    ($($text:tt)*) => { $crate::output::print(::core::format_args!($($text)*)) };
}

/// Prints a line to standard output.
#[macro_export]
macro_rules! outln {
    ($($text:tt)*) => { $crate::output::print(::core::format_args!("{}\n", ::core::format_args!($($text)*))) };
}

/// Prints a line to standard error.
#[macro_export]
macro_rules! errln {
    ($($text:tt)*) => { $crate::output::print_error(::core::format_args!("{}\n", ::core::format_args!($($text)*))) };
}

/// Prints to standard output. If the output cannot be written, for example because the disk is full, ends the process.
pub fn print(text: fmt::Arguments<'_>) {
    let mut out = io::stdout().lock();
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            errln!("cannot print: {error}");
            std::process::exit(1);
        }
        Err(_) | Ok(()) => {}
    }
}

/// Prints to standard error. Ignores errors, because there is no other place to report them.
pub fn print_error(text: fmt::Arguments<'_>) {
    let _reader_gone = io::stderr().lock().write_fmt(text);
}
