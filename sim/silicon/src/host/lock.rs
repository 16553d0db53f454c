//! The host's lock, which excludes other processes and other threads.
//!
//! A file lock excludes other processes, but not threads that share the file descriptor. If a
//! forked child unlocks an inherited descriptor, it releases the lock of its parent. So a thread
//! first locks a mutex of its process. Then it locks a descriptor that this process itself has
//! opened. All data of one process is in [`PerProcess`], which is created again after a fork.
#![allow(unsafe_code)] // One atomic pointer, swapped once after a fork.

use std::fs::File;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::HostError;
use gpush_locked::Locked;

/// A value of which each process has a separate copy, also after a fork.
#[derive(Debug)]
pub(super) struct PerProcess<T> {
    at: AtomicPtr<Owned<T>>,
}

#[derive(Debug)]
struct Owned<T> {
    pid: u32,
    value: T,
}

impl<T> PerProcess<T> {
    pub(super) fn new(value: T) -> Self {
        let owned = Owned { pid: std::process::id(), value };
        Self { at: AtomicPtr::new(Box::into_raw(Box::new(owned))) }
    }

    /// Returns the value of this process. After a fork, the present value belongs to the parent,
    /// and `make` creates a new value. The parent's value is not changed, because a thread that
    /// does not exist in this process may have locked one of its mutexes.
    pub(super) fn get(&self, make: impl FnOnce() -> Result<T, HostError>) -> Result<&T, HostError> {
        let pid = std::process::id();
        let found = self.at.load(Ordering::Acquire);
        // SAFETY: the pointer comes from `Box::into_raw` and is freed only in `drop`, which needs
        // `&mut self`; a replaced value is leaked intentionally.
        let owned = unsafe { &*found };
        if owned.pid == pid {
            return Ok(&owned.value);
        }
        let fresh = Box::into_raw(Box::new(Owned { pid, value: make()? }));
        match self.at.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: as above. `fresh` is shared from now on, and is freed only in `drop`.
            Ok(_) => Ok(unsafe { &(*fresh).value }),
            Err(theirs) => {
                // SAFETY: `fresh` was never shared, because another thread of this process stored
                // its own value first.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: `theirs` is the value that another thread of this process stored. It is
                // freed only in `drop`.
                Ok(unsafe { &(*theirs).value })
            }
        }
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        let at = *self.at.get_mut();
        // SAFETY: the pointer comes from `Box::into_raw`, and `&mut self` proves exclusive access.
        let owned = unsafe { Box::from_raw(at) };
        if owned.pid != std::process::id() {
            // After a fork, this value is a copy of the parent's value. Its locks may stay locked
            // forever, so do not drop it.
            std::mem::forget(owned);
        }
    }
}

/// The lock of a simulated host, as the threads of one process use it.
#[derive(Debug)]
pub(super) struct Lock {
    file: Locked<File>,
}

/// A guard of the host's lock. Dropping the guard releases the lock.
pub(super) struct Held<'l> {
    file: MutexGuard<'l, File>,
}

impl Lock {
    /// Opens the lock file. Like all files that std opens, it has close-on-exec set.
    pub(super) fn open(path: &Path) -> Result<Self, HostError> {
        let file = File::open(path).map_err(|cause| HostError::io("cannot open", path, cause))?;
        Ok(Self { file: Locked::new(file) })
    }

    pub(super) fn hold(&self) -> Result<Held<'_>, HostError> {
        let file = self.file.lock();
        loop {
            match file.lock() {
                Ok(()) => return Ok(Held { file }),
                Err(cause) if cause.kind() == std::io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(HostError::io("cannot lock", Path::new("state"), cause)),
            }
        }
    }
}

impl Deref for Held<'_> {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let released = self.file.unlock();
        debug_assert!(released.is_ok(), "fd {}", self.file.as_raw_fd());
    }
}
