//! Environment of a process, from `/proc/PID/environ`.
//!
//! The owner of a process controls the content and the length of this file, so no permission may depend on the file.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use super::{AnyPid, LIMIT, is_shortage, positive, threads, time_limit};

/// Maximum number of bytes of an environment to read, in pieces of [`LIMIT`]. When the kernel executes a program, it
/// accepts less than 6 MiB of arguments and environment.
const MOST: u64 = 8 << 20;

/// Maximum length of a variable in the form NAME=VALUE, in bytes.
const LONGEST: usize = 4096;

/// The value of one variable in an environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Environment {
    /// The variable has this value.
    Set(Vec<u8>),
    /// The environment was read completely, and does not contain the variable.
    Unset,
    /// The environment cannot be read, is too long, or was overwritten.
    Unknown,
}

/// Looks up a variable in the environment with which a process was executed.
///
/// Reads the memory of the process, with a [time limit](time_limit). Blocks, so call it on a blocking thread.
///
/// # Errors
/// gpushd has no free file descriptor or memory, or the read exceeded the time limit. Other errors give
/// [`Environment::Unknown`], because the owner of the process can cause them.
pub fn environment(pid: impl AnyPid, name: &str) -> io::Result<Environment> {
    let Some(pid) = positive(pid) else { return Ok(Environment::Unknown) };
    let name = name.to_owned();
    time_limit::within_limit(pid, move || of_pid(pid, &name))?
}

fn of_pid(pid: i32, name: &str) -> io::Result<Environment> {
    match of_thread(Path::new(&format!("/proc/{pid}")), name)? {
        Environment::Unknown => {
            let of_other = threads::of_living(pid, |dir| of_thread(dir, name).map(Some))?;
            Ok(of_other.unwrap_or(Environment::Unknown))
        }
        known => Ok(known),
    }
}

/// Looks up a variable in the `environ` file in the directory of a process or thread.
fn of_thread(dir: &Path, name: &str) -> io::Result<Environment> {
    let found = File::open(dir.join("environ")).and_then(|file| search(file, name, MOST));
    match found {
        Err(error) if is_shortage(&error) => Err(error),
        Err(_) => Ok(Environment::Unknown),
        Ok(found) => Ok(found),
    }
}

/// Searches an environment in pieces, so that a long environment needs no more memory than a short
/// one.
fn search(mut file: impl Read, name: &str, most: u64) -> io::Result<Environment> {
    let prefix = format!("{name}=").into_bytes();
    let (mut piece, mut word, mut read) = (vec![0; piece_size()], Vec::new(), 0);
    // Whether all words so far have the form NAME=VALUE, and whether the last word ended with a NUL byte.
    let (mut is_whole, mut is_ended, mut found) = (true, false, None);
    loop {
        let length = match file.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        read += length as u64;
        if read >= most {
            return Ok(Environment::Unknown);
        }
        for byte in &piece[..length] {
            is_ended = *byte == 0;
            if !is_ended {
                if word.len() < LONGEST {
                    word.push(*byte);
                }
                continue;
            }
            is_whole &= word.iter().position(|byte| *byte == b'=').is_some_and(|at| at > 0);
            if found.is_none()
                && let Some(value) = word.strip_prefix(prefix.as_slice())
            {
                // Do not return a truncated value, because it differs from the real value.
                found = Some(if word.len() < LONGEST { value.to_vec() } else { return Ok(Environment::Unknown) });
            }
            word.clear();
        }
    }
    Ok(match found {
        _ if !is_ended => Environment::Unknown,
        Some(value) => Environment::Set(value),
        None if is_whole => Environment::Unset,
        None => Environment::Unknown,
    })
}

fn piece_size() -> usize {
    usize::try_from(LIMIT).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(environment: &[u8]) -> Environment {
        search(environment, "SHARE", 1 << 20).unwrap()
    }

    fn set(value: &[u8]) -> Environment {
        Environment::Set(value.to_vec())
    }

    #[test]
    fn complete_environment_shows_whether_a_variable_is_set() {
        assert_eq!(of(b"HOME=/\0SHARE=s12\0"), set(b"s12"));
        assert_eq!(of(b"HOME=/\0PATH=/bin\0"), Environment::Unset);
        assert_eq!(of(b"XSHARE=1\0SHARED=2\0"), Environment::Unset);
        assert_eq!(of(b"SHARE=a\0SHARE=b\0"), set(b"a"));
    }

    #[test]
    fn variable_is_found_behind_a_long_one() {
        let long = |bytes: usize| [b"X=".to_vec(), vec![b'x'; bytes], b"\0SHARE=s3\0".to_vec()].concat();
        for bytes in [200 << 10, LONGEST, (64 << 10) - 3, (64 << 10) - 10] {
            assert_eq!(of(&long(bytes)), set(b"s3"), "{bytes}");
        }
        assert_eq!(of(&long(1 << 20)), Environment::Unknown, "too long");
    }

    #[test]
    fn overwritten_environment_is_unknown() {
        for damaged in [&b"\0\0\0\0"[..], b"worker 3\0\0PATH=/bin\0", b"HOME=/\0PATH=/b", b"", b"\0", b"=x\0"] {
            assert_eq!(of(damaged), Environment::Unknown, "{damaged:?}");
        }
        let cut = [b"SHARE=".to_vec(), vec![b's'; LONGEST], b"\0".to_vec()].concat();
        assert_eq!(of(&cut), Environment::Unknown);
    }

    #[test]
    fn endless_environment_is_not_read_to_its_end() {
        assert_eq!(search(io::repeat(b'x'), "SHARE", 1 << 20).unwrap(), Environment::Unknown);
        assert_eq!(environment(i32::MAX, "PATH").unwrap(), Environment::Unknown);
    }
}
