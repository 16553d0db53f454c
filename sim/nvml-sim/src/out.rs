//! Reading from and writing to the caller's memory.
//!
//! Every pointer that a client passes goes through here, so that a NULL is always
//! `INVALID_ARGUMENT`, a short text buffer always `INSUFFICIENT_SIZE`, and a struct is written
//! field for field as the version that the caller named.

#![allow(unsafe_code)] // the C ABI hands us raw pointers: this module is where they are followed

use std::ffi::{CStr, c_char};

use crate::ret::{Outcome, Ret};

/// Writes one value for the caller.
pub(crate) fn put<T>(to: *mut T, value: T) -> Outcome {
    if to.is_null() {
        return Err(Ret::INVALID_ARGUMENT);
    }
    // SAFETY: not NULL; the caller of the C function vouches that it points to a T.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Reads one value of the caller's.
pub(crate) fn get<T: Copy>(from: *const T) -> Outcome<T> {
    if from.is_null() {
        return Err(Ret::INVALID_ARGUMENT);
    }
    // SAFETY: not NULL; the caller of the C function vouches that it points to a T.
    Ok(unsafe { from.read_unaligned() })
}

/// Writes a text with its terminator into a buffer of `length` bytes.
pub(crate) fn put_text(to: *mut c_char, length: u32, text: &str) -> Outcome {
    if to.is_null() {
        return Err(Ret::INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(Ret::INSUFFICIENT_SIZE);
    }
    // SAFETY: the caller vouches for `length` bytes, and text.len() + 1 fit in them.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast::<u8>(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// A text of the caller's; `INVALID_ARGUMENT` when it is NULL or not UTF-8.
pub(crate) fn get_text<'a>(from: *const c_char) -> Outcome<&'a str> {
    if from.is_null() {
        return Err(Ret::INVALID_ARGUMENT);
    }
    // SAFETY: the caller vouches for a terminated string that lives through the call.
    unsafe { CStr::from_ptr(from) }.to_str().map_err(|_| Ret::INVALID_ARGUMENT)
}

/// Fills a caller's list under NVML's rule: `count` holds its capacity on entry and the number
/// of entries on return; too small a list (0 asks for the count) gives `short`.
pub(crate) fn put_list<T>(count: *mut u32, to: *mut T, values: Vec<T>, short: Ret) -> Outcome {
    let capacity = get(count)? as usize;
    put(count, u32::try_from(values.len()).map_err(|_| Ret::UNKNOWN)?)?;
    if values.is_empty() {
        return Ok(());
    }
    if capacity < values.len() {
        return Err(short);
    }
    write_all(to, values)
}

/// Writes values one after another; the caller of this vouches for the room.
pub(crate) fn write_all<T>(to: *mut T, values: Vec<T>) -> Outcome {
    if to.is_null() {
        return Err(Ret::INVALID_ARGUMENT);
    }
    for (i, value) in values.into_iter().enumerate() {
        // SAFETY: the caller named a capacity of at least this many entries.
        unsafe { to.add(i).write_unaligned(value) };
    }
    Ok(())
}

/// A fixed-size text field, cut to fit and terminated.
pub(crate) fn text_field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (slot, byte) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *slot = c_char::from_ne_bytes([byte]);
    }
    field
}

/// The version word of a struct: its size, and its version in the top byte.
pub(crate) const fn version_word<T>(version: u32) -> u32 {
    #[allow(clippy::cast_possible_truncation)] // structs of a few hundred bytes
    let size = size_of::<T>() as u32;
    size | version << 24
}
