//! Access to the caller's memory and handles.
//!
//! Every pointer from a client arrives as a [`Ptr`]:
//! - For NULL, the result is always `INVALID_ARGUMENT`.
//! - For a text buffer that is too small, the result is always `INSUFFICIENT_SIZE`.
//! - Unaligned structs are safe.
//!
//! This crate never creates a `Ptr` itself: a `Ptr` is always an argument of a C function. The
//! caller of that function guarantees that the pointer is valid.

#![allow(unsafe_code)] // the C ABI passes raw pointers, and this module dereferences them

use std::ffi::{CStr, c_char};

use silicon::Return;
use silicon::machine::Handle;

/// The result of a C function's body.
pub(crate) type Outcome<T = ()> = Result<T, Return>;

/// A pointer argument of a C function.
#[repr(transparent)]
pub(crate) struct Ptr<T>(*mut T);

impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Ptr<T> {}

impl<T> Ptr<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Casts the pointer to another struct. The version word of the caller selects the struct.
    pub(crate) fn cast<U>(self) -> Ptr<U> {
        Ptr(self.0.cast())
    }

    fn not_null(self) -> Outcome<*mut T> {
        if self.0.is_null() { Err(Return::InvalidArgument) } else { Ok(self.0) }
    }

    /// Returns an error if the caller passed NULL. Functions call this before they change anything.
    pub(crate) fn required(self) -> Outcome {
        self.not_null().map(|_| ())
    }

    /// Writes one value.
    pub(crate) fn put(self, value: T) -> Outcome {
        let to = self.not_null()?;
        // SAFETY: the pointer is not NULL, and the caller of the C function guarantees that it
        // points to space for a T.
        unsafe { to.write_unaligned(value) };
        Ok(())
    }

    /// Reads one value.
    pub(crate) fn get(self) -> Outcome<T>
    where
        T: Copy,
    {
        let from = self.not_null()?;
        // SAFETY: the pointer is not NULL, and the caller of the C function guarantees that it
        // points to a T.
        Ok(unsafe { from.read_unaligned() })
    }

    /// Returns a pointer to one entry of a caller's array. The caller guarantees that the array is
    /// long enough.
    pub(crate) fn at(self, index: usize) -> Outcome<Ptr<T>> {
        let first = self.not_null()?;
        // SAFETY: the result is within the array that the caller guarantees.
        Ok(Ptr(unsafe { first.add(index) }))
    }

    /// Writes values one after the other into a caller's array. The caller guarantees that the
    /// array is long enough.
    pub(crate) fn put_all(self, values: Vec<T>) -> Outcome {
        self.required()?;
        for (index, value) in values.into_iter().enumerate() {
            self.at(index)?.put(value)?;
        }
        Ok(())
    }

    /// Fills a list whose length the caller does not know. On entry, `count` is the capacity of the
    /// array; on return, it is the number of entries. If the capacity is too small, returns
    /// `INSUFFICIENT_SIZE`. So a caller can pass a capacity of 0 to get the number.
    pub(crate) fn put_list(self, count: Ptr<u32>, values: Vec<T>) -> Outcome {
        let capacity = count.get()? as usize;
        count.put(u32::try_from(values.len()).map_err(|_| Return::Unknown)?)?;
        match values.len() {
            0 => Ok(()),
            wanted if capacity < wanted => Err(Return::InsufficientSize),
            _ => self.put_all(values),
        }
    }
}

impl Ptr<c_char> {
    /// Writes a text with its terminating zero byte into a buffer of `length` bytes.
    pub(crate) fn put_text(self, length: u32, text: &str) -> Outcome {
        let to = self.not_null()?;
        if text.len() >= length as usize {
            return Err(Return::InsufficientSize);
        }
        // SAFETY: the caller guarantees `length` bytes. The text and its terminator fit in them.
        unsafe {
            to.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
            to.add(text.len()).write(0);
        }
        Ok(())
    }

    /// Reads a text from the caller. Returns `INVALID_ARGUMENT` for a text that is not UTF-8,
    /// because all valid names are UTF-8.
    pub(crate) fn text(self) -> Outcome<String> {
        let from = self.not_null()?;
        // SAFETY: the caller guarantees a zero-terminated string that remains valid during the
        // call.
        let text = unsafe { CStr::from_ptr(from) };
        text.to_str().map(str::to_owned).map_err(|_| Return::InvalidArgument)
    }
}

/// A handle argument: `nvmlDevice_t`, `nvmlGpuInstance_t` or `nvmlComputeInstance_t`. In C, a
/// handle is a pointer. Here, the pointer contains a packed [`Handle`] and is never dereferenced.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Opaque(usize);

impl Opaque {
    /// Returns the packed handle. Returns `INVALID_ARGUMENT` for NULL and for any other value that
    /// is not a handle.
    pub(crate) fn open(self) -> Outcome<Handle> {
        Handle::unpack(self.0 as u64).ok_or(Return::InvalidArgument)
    }

    /// Packs a handle for the caller.
    pub(crate) fn of(handle: Handle) -> Self {
        #[allow(clippy::cast_possible_truncation)] // 64-bit hosts only, as with NVIDIA's driver
        Self(handle.pack() as usize)
    }

    /// Returns the handle as the pointer type of a struct's field.
    pub(crate) fn pointer<T>(self) -> *mut T {
        std::ptr::without_provenance_mut(self.0)
    }
}

/// Returns a text as a fixed-size field of a struct, truncated and zero-terminated.
pub(crate) fn text_field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (slot, byte) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *slot = c_char::from_ne_bytes([byte]);
    }
    field
}

/// Returns the version word of a struct: the size of the struct, with the version in the top byte.
pub(crate) const fn version_word<T>(version: u32) -> u32 {
    #[allow(clippy::cast_possible_truncation)] // structs of a few hundred bytes
    let size = size_of::<T>() as u32;
    size | version << 24
}
