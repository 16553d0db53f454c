//! The caller's memory and handles.
//!
//! Every pointer from a client arrives as a [`Ptr`]. So NULL always returns `INVALID_ARGUMENT`, a text buffer that is
//! too small always returns `INSUFFICIENT_SIZE`, and unaligned structs are safe. This crate never creates a `Ptr`
//! itself. They exist only as arguments of C functions, whose callers guarantee that they are valid.

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

    /// Casts the pointer to the struct that the caller's version word names.
    pub(crate) fn cast<U>(self) -> Ptr<U> {
        Ptr(self.0.cast())
    }

    fn not_null(self) -> Outcome<*mut T> {
        if self.0.is_null() { Err(Return::InvalidArgument) } else { Ok(self.0) }
    }

    /// Returns an error if the caller passed NULL. For checks before any change.
    pub(crate) fn required(self) -> Outcome {
        self.not_null().map(|_| ())
    }

    /// Writes one value.
    pub(crate) fn put(self, value: T) -> Outcome {
        let to = self.not_null()?;
        // SAFETY: not NULL, and the caller of the C function guarantees that it points to space for a T.
        unsafe { to.write_unaligned(value) };
        Ok(())
    }

    /// Reads one value.
    pub(crate) fn get(self) -> Outcome<T>
    where
        T: Copy,
    {
        let from = self.not_null()?;
        // SAFETY: not NULL, and the caller of the C function guarantees that it points to a T.
        Ok(unsafe { from.read_unaligned() })
    }

    /// Returns a pointer to an entry of a caller's array that is known to be long enough.
    pub(crate) fn at(self, index: usize) -> Outcome<Ptr<T>> {
        let first = self.not_null()?;
        // SAFETY: within the array that the caller guarantees.
        Ok(Ptr(unsafe { first.add(index) }))
    }

    /// Writes values in sequence into an array that is known to be long enough.
    pub(crate) fn put_all(self, values: Vec<T>) -> Outcome {
        self.required()?;
        for (index, value) in values.into_iter().enumerate() {
            self.at(index)?.put(value)?;
        }
        Ok(())
    }

    /// Fills a list by NVML's rule for lists of unknown length. `count` is the capacity on entry, and the number of
    /// entries on return. If the capacity is too small, such as 0 to query the number, returns `INSUFFICIENT_SIZE`.
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

    /// Reads a text from the caller. Returns `INVALID_ARGUMENT` if it is not UTF-8, because all names are.
    pub(crate) fn text(self) -> Outcome<String> {
        let from = self.not_null()?;
        // SAFETY: the caller guarantees a terminated string that stays valid during the call.
        let text = unsafe { CStr::from_ptr(from) };
        text.to_str().map(str::to_owned).map_err(|_| Return::InvalidArgument)
    }
}

/// A handle argument: `nvmlDevice_t`, `nvmlGpuInstance_t` or `nvmlComputeInstance_t`. In C it is a pointer, but
/// it contains a packed [`Handle`] and is never dereferenced.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Opaque(usize);

impl Opaque {
    /// Returns the packed handle; `INVALID_ARGUMENT` for NULL and for other pointers of the caller.
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

/// Returns a fixed-size text field of a struct, truncated and terminated.
pub(crate) fn text_field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (slot, byte) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *slot = c_char::from_ne_bytes([byte]);
    }
    field
}

/// Returns the version word of a struct: its size, and its version in the top byte.
pub(crate) const fn version_word<T>(version: u32) -> u32 {
    #[allow(clippy::cast_possible_truncation)] // structs of a few hundred bytes
    let size = size_of::<T>() as u32;
    size | version << 24
}
