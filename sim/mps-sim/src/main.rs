//! The programs of this crate, without `gpush-sim`. If a link calls this program, the name of the
//! link selects what it does. Otherwise, the first argument does: the name of an MPS program, or
//! `client`.

use mps_sim::errln;
use std::{path::PathBuf, process::ExitCode};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    let called = arguments.next().map(PathBuf::from).unwrap_or_default();
    let mut rest: Vec<_> = arguments.collect();
    if let Some(ended) = mps_sim::main(&called, &rest) {
        return ended;
    }
    if rest.is_empty() {
        errln!("mps-sim: say which program: {}, or client", mps_sim::PROGRAMS.join(", "));
        return ExitCode::from(2);
    }
    let name = PathBuf::from(rest.remove(0));
    if name.as_os_str() == "client" {
        return mps_sim::client::main();
    }
    mps_sim::main(&name, &rest).unwrap_or_else(|| {
        errln!("mps-sim: {} is none of {}, client", name.display(), mps_sim::PROGRAMS.join(", "));
        ExitCode::from(2)
    })
}
