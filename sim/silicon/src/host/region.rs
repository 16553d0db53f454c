//! The mapped file: a header and two slots, one of which is published.
//!
//! ```text
//!  header: magic, layout version, length, slot length, fingerprint, published generation
//!  slot 0: generation, length, checksum, bytes      (even generations)
//!  slot 1: generation, length, checksum, bytes      (odd generations)
//! ```
//!
//! A writer holds the host's lock. It fills the slot that is not published, and then stores the new
//! generation in one atomic operation. If the writer is killed before that operation, the published
//! state is unchanged.
//!
//! A reader needs no lock. It copies the published slot. Meanwhile, the writer after the next one
//! may overwrite the slot. So the reader accepts the copy only if the generation and the checksum
//! are right.
//!
//! All code accesses the mapping only through atomics and raw pointers. Other processes write the
//! same memory, so a reference to plain data must never point into it. The file is never shortened,
//! because that would cause a SIGBUS in every process that has mapped it.
#![allow(unsafe_code)] // Maps shared memory and reads it as atomics.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

use super::HostError;

/// `gpushsil` in ASCII.
const MAGIC: u64 = u64::from_be_bytes(*b"gpushsil");
/// Layout version of the header, the slots and the encoded state. Every incompatible change
/// increments this version.
const LAYOUT: u64 = 2;
/// Header length in bytes: one page.
const HEADER: usize = 4096;
/// Maximum duration of a single wait. A writer may be killed before it wakes the waiting processes,
/// so every wait has a timeout.
const MISSED: Duration = Duration::from_secs(1);
/// Number of words at the start of a slot, before its bytes.
const SLOT_WORDS: usize = 3;

/// Positions of the words in the header.
mod word {
    pub(super) const MAGIC: usize = 0;
    pub(super) const LAYOUT: usize = 1;
    pub(super) const LENGTH: usize = 2;
    pub(super) const SLOT: usize = 3;
    pub(super) const FINGERPRINT: usize = 4;
    pub(super) const PUBLISHED: usize = 5;
}

/// The mapped file of one host.
#[derive(Debug)]
pub(super) struct Region {
    base: NonNull<u64>,
    length: usize,
    slot: usize,
}

// SAFETY: the memory behind `base` is only accessed as `AtomicU64`.
unsafe impl Send for Region {}
// SAFETY: the memory behind `base` is only accessed as `AtomicU64`.
unsafe impl Sync for Region {}

/// Computes the checksum of a slot from its generation, its length and its words.
fn checksum(generation: u64, length: u64, words: impl Iterator<Item = u64>) -> u64 {
    let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    words.fold(mix(mix(0x6a09_e667_f3bc_c908, generation), length), mix)
}

impl Region {
    /// Creates the file with an initial state, atomically.
    pub(super) fn create(path: &Path, slot: usize, fingerprint: u64, state: &[u8]) -> Result<(), HostError> {
        let slot = slot.next_multiple_of(HEADER);
        let length = HEADER + 2 * slot;
        let draft = path.with_extension("new");
        let made = || -> io::Result<()> {
            // Every user may open the file, because the permissions of its directory limit the
            // access.
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o666).open(&draft)?;
            file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
            file.set_len(length as u64)?;
            // Allocate the blocks now. Otherwise a full disk would cause a SIGBUS in a client
            // later.
            nix::fcntl::posix_fallocate(&file, 0, length as i64)?;
            let header = [MAGIC, LAYOUT, length as u64, slot as u64, fingerprint, 0];
            let bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
            file.write_all_at(&bytes, 0)
        };
        made().map_err(|cause| HostError::io("cannot make", &draft, cause))?;
        let region = Self::open(&draft, fingerprint)?;
        region.write(state)?;
        drop(region);
        std::fs::rename(&draft, path).map_err(|cause| HostError::io("cannot put in place", path, cause))
    }

    /// Maps the file.
    pub(super) fn open(path: &Path, fingerprint: u64) -> Result<Self, HostError> {
        let file: File = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(|cause| HostError::io("cannot open", path, cause))?;
        let mismatch = |what: &str| HostError::Mismatch { path: path.to_owned(), what: what.to_owned() };
        let mut bytes = [0u8; 48];
        file.read_exact_at(&mut bytes, 0).map_err(|_| mismatch("it is too short for a header"))?;
        let mut header = [0u64; 6];
        for (word, chunk) in header.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_ne_bytes(chunk.try_into().unwrap_or_default());
        }
        if header[word::MAGIC] != MAGIC {
            return Err(mismatch("it is no state of a simulated host"));
        }
        if header[word::LAYOUT] != LAYOUT {
            return Err(mismatch(&format!("its layout is version {}, this build has {LAYOUT}", header[word::LAYOUT])));
        }
        let length = usize::try_from(header[word::LENGTH]).unwrap_or(0);
        let slot = usize::try_from(header[word::SLOT]).unwrap_or(0);
        let on_disk = file.metadata().map_err(|cause| HostError::io("cannot look at", path, cause))?.len();
        if slot == 0
            || slot % 8 != 0
            || length != HEADER.saturating_add(slot.saturating_mul(2))
            || on_disk < length as u64
        {
            return Err(mismatch(&format!("it has {on_disk} bytes and should have {length}")));
        }
        if header[word::FINGERPRINT] != fingerprint {
            return Err(mismatch("it belongs to another description than description.toml in its directory"));
        }
        let size = NonZeroUsize::new(length).ok_or_else(|| mismatch("it is empty"))?;
        // SAFETY: creates a new shared mapping of a file that has at least `length` bytes. No
        // process shortens the file, and no other code uses the address.
        let base = unsafe {
            mmap(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, file.as_fd(), 0)
        }
        .map_err(|errno| HostError::io("cannot map", path, errno.into()))?;
        Ok(Self { base: base.cast(), length, slot })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index * 8 < self.length);
        // SAFETY: the word is within the mapping, because callers stay below the length of the
        // header or slot. It is aligned to 8, because the mapping is page-aligned. Every bit
        // pattern is a valid atomic.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(index)) }
    }

    fn slot(&self, generation: u64) -> usize {
        (HEADER + self.slot * (generation & 1) as usize) / 8
    }

    /// Returns the number of bytes that fit into a slot.
    fn capacity(&self) -> usize {
        self.slot - SLOT_WORDS * 8
    }

    /// Returns the generation of the published state.
    pub(super) fn published(&self) -> u64 {
        self.word(word::PUBLISHED).load(Ordering::Acquire)
    }

    /// Returns the bytes of a generation. Returns `None` if the slot no longer contains the
    /// complete generation.
    fn copy(&self, generation: u64) -> Option<Vec<u8>> {
        let at = self.slot(generation);
        let held = self.word(at).load(Ordering::Relaxed);
        let length = self.word(at + 1).load(Ordering::Relaxed);
        let sum = self.word(at + 2).load(Ordering::Relaxed);
        let bytes = usize::try_from(length).ok().filter(|bytes| *bytes <= self.capacity())?;
        let words: Vec<u64> =
            (0..bytes.div_ceil(8)).map(|i| self.word(at + SLOT_WORDS + i).load(Ordering::Relaxed)).collect();
        fence(Ordering::Acquire);
        if held != generation || sum != checksum(generation, length, words.iter().copied()) {
            return None;
        }
        let mut copied: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        copied.truncate(bytes);
        Some(copied)
    }

    /// Returns the published state and its generation, without the lock. If writers have
    /// overwritten the slot several times in a row, returns `None`. The caller then takes the lock
    /// and tries again.
    pub(super) fn read(&self) -> Option<(u64, Vec<u8>)> {
        (0..8).find_map(|_| {
            let generation = self.published();
            self.copy(generation).map(|bytes| (generation, bytes))
        })
    }

    /// Writes a new state and publishes it. The caller must hold the host's lock.
    pub(super) fn write(&self, state: &[u8]) -> Result<u64, HostError> {
        if state.len() > self.capacity() {
            return Err(HostError::Full { bytes: state.len(), room: self.capacity() });
        }
        let generation = self.published() + 1;
        let at = self.slot(generation);
        let length = state.len() as u64;
        let words = || {
            state.chunks(8).map(|chunk| {
                let mut word = [0u8; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_ne_bytes(word)
            })
        };
        self.word(at).store(generation, Ordering::Relaxed);
        self.word(at + 1).store(length, Ordering::Relaxed);
        self.word(at + 2).store(checksum(generation, length, words()), Ordering::Relaxed);
        for (i, word) in words().enumerate() {
            self.word(at + SLOT_WORDS + i).store(word, Ordering::Relaxed);
        }
        self.word(word::PUBLISHED).store(generation, Ordering::Release);
        self.futex(libc::FUTEX_WAKE, i32::MAX.cast_unsigned(), None);
        Ok(generation)
    }

    /// Waits at most `timeout` until another generation is published. May return early. If a writer
    /// was killed before it woke the waiting processes, may return up to a second late.
    pub(super) fn wait_past(&self, generation: u64, timeout: Duration) {
        let timeout = timeout.min(MISSED);
        // The cast truncates on purpose: the futex compares only the lower half, which does not
        // wrap around during a wait.
        self.futex(libc::FUTEX_WAIT, generation as u32, Some(timeout));
    }

    /// Depending on `operation`, waits for a change of the lower half of the published generation,
    /// or wakes the processes that wait for it. These are other processes, so `FUTEX_PRIVATE_FLAG`
    /// is not set.
    fn futex(&self, operation: i32, value: u32, timeout: Option<Duration>) {
        let half = usize::from(cfg!(target_endian = "big"));
        let timeout = timeout.map(|timeout| libc::timespec {
            tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let until = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let word = self.word(word::PUBLISHED).as_ptr().cast::<u32>();
        // SAFETY: the address is within the mapping and aligned; `until` is null or outlives the
        // call. The result does not matter, because the caller checks the generation again.
        unsafe { libc::syscall(libc::SYS_futex, word.add(half), operation, value, until) };
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `base` and `length` are those of the mapping. A reference from `word` cannot
        // outlive the borrow of `self`, so no reference to the mapping is left.
        let unmapped = unsafe { munmap(self.base.cast(), self.length) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torn_write_keeps_the_published_state() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        Region::create(&path, 8192, 7, b"first").unwrap();
        let region = Region::open(&path, 7).unwrap();
        assert_eq!(region.read().unwrap(), (1, b"first".to_vec()));
        assert_eq!(region.write(b"second, longer").unwrap(), 2);
        assert_eq!(region.read().unwrap().1, b"second, longer");
        // Simulate a writer that is killed while it fills the unpublished slot. Each iteration
        // stores one more word before the writer is killed.
        let at = region.slot(3);
        for torn in 0..5 {
            region.word(at + torn).store(0xdead_beef + torn as u64, Ordering::Relaxed);
            assert_eq!(region.read().unwrap(), (2, b"second, longer".to_vec()));
        }
        // The next writer overwrites the partly written data.
        assert_eq!(region.write(b"third").unwrap(), 3);
        assert_eq!(region.read().unwrap(), (3, b"third".to_vec()));
    }

    #[test]
    fn foreign_state_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        Region::create(&path, 8192, 7, b"x").unwrap();
        let whole = std::fs::read(&path).unwrap();
        let with = |edit: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = whole.clone();
            edit(&mut bytes);
            std::fs::write(&path, bytes).unwrap();
            Region::open(&path, 7).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(with(&|_| ()), "");
        assert!(with(&|bytes| bytes[0] ^= 1).contains("no state of a simulated host"));
        assert!(with(&|bytes| bytes[8] = 99).contains("layout is version 99"));
        assert!(with(&|bytes| bytes.truncate(8192)).contains("has 8192 bytes"));
        assert!(with(&|bytes| bytes.truncate(5)).contains("too short"));
        assert!(with(&|bytes| bytes[16..32].fill(0xff)).contains("should have"));
        assert!(with(&|bytes| bytes[32] = 8).contains("another description"));
    }

    #[test]
    fn oversized_state_is_refused_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        Region::create(&path, 4096, 7, b"x").unwrap();
        let region = Region::open(&path, 7).unwrap();
        assert!(region.write(&[0; 4097]).is_err());
        assert_eq!(region.read().unwrap(), (1, b"x".to_vec()));
        assert_eq!(region.write(&vec![9; region.capacity()]).unwrap(), 2);
        assert_eq!(region.read().unwrap().1.len(), region.capacity());
    }
}
