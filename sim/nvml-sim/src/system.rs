//! Start and end of a client's session, versions, and error texts.

use std::ffi::c_char;

use silicon::Return;

use crate::caller::Ptr;
use crate::entry::{exports, guard};
use crate::{error_text, events, gpm, session};

/// Begins a session, or adds one user to the open session. Since R319, `nvmlInit` is the same as
/// `nvmlInit_v2`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlInit() -> u32 {
    guard(|| session::open("nvmlInit"))
}

/// Begins a session, or adds one user to the open session.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlInit_v2() -> u32 {
    guard(|| session::open("nvmlInit_v2"))
}

/// Does the same as `nvmlInit_v2`. The flags (no GPUs needed, attach no GPU) have no effect,
/// because a simulated session attaches no GPU.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlInitWithFlags(_flags: u32) -> u32 {
    guard(|| session::open("nvmlInitWithFlags"))
}

/// Removes one user from the session. If that was the last user, ends the session. If no session is
/// open, does nothing.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlShutdown() -> u32 {
    guard(|| {
        session::close(|| {
            events::forget_all();
            gpm::forget_all();
        })
    })
}

/// Returns the version of this library, such as `12.550.163.01`. Works without a session.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn nvmlSystemGetNVMLVersion(version: Ptr<c_char>, length: u32) -> u32 {
    guard(|| version.put_text(length, &session::library_version()))
}

exports! {
    /// Returns the driver version, such as `550.163.01`.
    fn nvmlSystemGetDriverVersion(version: Ptr<c_char>, length: u32) |call| {
        let text = call.host(|m| Ok(m.hardware().driver.to_string()))?;
        version.put_text(length, &text)
    }

    /// Returns the CUDA version that the driver supports, as `major * 1000 + minor * 10`.
    fn nvmlSystemGetCudaDriverVersion(version: Ptr<i32>) |call| {
        let cuda = call.host(|m| Ok(m.hardware().cuda))?;
        version.put(i32::try_from(cuda).map_err(|_| Return::Unknown)?)
    }

    /// Returns the same as the function without `_v2`. On real hosts, `_v2` queries the CUDA
    /// driver.
    fn nvmlSystemGetCudaDriverVersion_v2(version: Ptr<i32>) |call| {
        let cuda = call.host(|m| Ok(m.hardware().cuda))?;
        version.put(i32::try_from(cuda).map_err(|_| Return::Unknown)?)
    }

    /// Returns the program of a process, truncated to the length of the buffer.
    fn nvmlSystemGetProcessName(pid: u32, name: Ptr<c_char>, length: u32) |call| {
        name.required()?;
        if length == 0 {
            return Err(Return::InvalidArgument);
        }
        call.host(|_| Ok(()))?;
        let mut text = program_of(pid).ok_or(Return::NotFound)?;
        let mut room = (length as usize - 1).min(text.len());
        while !text.is_char_boundary(room) {
            room -= 1;
        }
        text.truncate(room);
        name.put_text(length, &text)
    }
}

/// Returns the first word of a process's command line. If the command line is empty, returns the
/// process name.
fn program_of(pid: u32) -> Option<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
    if first.is_empty() {
        let short = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        return Some(short.trim_end().to_owned());
    }
    Some(String::from_utf8_lossy(first).into_owned())
}

/// Returns the text of a return code. Works without a session, and never returns NULL.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvmlErrorString(result: u32) -> *const c_char {
    error_text::of(result).as_ptr()
}

/// Returns the version of this crate. The real library has no such symbol, so programs recognise a
/// simulated library by this symbol.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpush_sim() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
