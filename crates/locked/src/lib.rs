//! A mutex that stays usable after a panic.

use std::sync::{Mutex, MutexGuard, TryLockError};

/// A value behind a mutex. Unlike [`Mutex`], it can still be locked after a thread has panicked while it held the lock.
///
/// gpushd restarts a task that panics, so the other tasks must be able to use the value. Code that holds the lock must
/// leave a valid value behind at each point at which it can panic.
#[derive(Debug, Default)]
pub struct Locked<T>(Mutex<T>);

impl<T> Locked<T> {
    /// Puts a value behind a mutex.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// Waits until no other thread holds the lock, and takes the lock.
    #[expect(clippy::disallowed_types, reason = "the only place that handles a poisoned mutex")]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Takes the lock; `None` if another thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(held) => Some(held),
            Err(TryLockError::Poisoned(held)) => Some(held.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_is_usable_after_a_panic_of_its_holder() {
        let value = Locked::new(1);
        let panicked = std::panic::catch_unwind(|| {
            let mut held = value.lock();
            *held = 2;
            panic!("while the lock is held");
        });
        assert!(panicked.is_err());
        assert_eq!(*value.lock(), 2);
        assert_eq!(value.try_lock().as_deref(), Some(&2));
    }

    #[test]
    fn lock_that_is_held_is_not_taken_again() {
        let value = Locked::new(());
        let held = value.lock();
        assert!(value.try_lock().is_none());
        drop(held);
        assert!(value.try_lock().is_some());
    }
}
