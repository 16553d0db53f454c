//! Lines on the terminals of a user's processes.
//!
//! ```text
//! process ──/proc/PID/stat──► device number ──► /dev/pts/N, opened with O_NONBLOCK and O_NOCTTY
//!    on the descriptor: is it this device? does it belong to the user? is it open to messages (`mesg y`)? ──► one write
//! ```
//!
//! Everything is checked on the open descriptor, because another terminal may have got the same path meanwhile. A
//! terminal is full if its output is stopped or no program reads it: then the line is lost, and gpushd does not wait.

use std::{fmt, io, path::PathBuf};

use rustix::fs::{FileType, Mode, OFlags};

use crate::proc::{self, AnyPid};

/// Major device number of pseudo terminals (`UNIX98_PTY_SLAVE_MAJOR` of the kernel).
const PSEUDO_TERMINAL: u32 = 136;

/// A terminal, by its device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Terminal {
    major: u32,
    minor: u32,
}

/// Why a line was not shown on a terminal.
#[derive(Debug)]
pub enum NotShown {
    /// gpushd writes only to pseudo terminals. Its unit permits no other terminals.
    OtherDevice,
    /// The terminal belongs to another user.
    OtherUser,
    /// The user has closed the terminal to messages (`mesg n`).
    Closed,
    /// The output of the terminal is stopped, or no program reads it.
    Full,
    /// The terminal can't be opened or written.
    Unwritable(io::Error),
}

impl fmt::Display for NotShown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherDevice => f.write_str("it is no pseudo terminal"),
            Self::OtherUser => f.write_str("it belongs to another user"),
            Self::Closed => f.write_str("its user has closed it to messages (`mesg n`)"),
            Self::Full => f.write_str("its output is stopped, or no program reads it"),
            Self::Unwritable(error) => write!(f, "it can't be written: {error}"),
        }
    }
}

impl std::error::Error for NotShown {}

impl fmt::Display for Terminal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path() {
            Some(path) => write!(f, "{}", path.display()),
            None => write!(f, "device {}:{}", self.major, self.minor),
        }
    }
}

impl Terminal {
    /// Returns the controlling terminal of a process; `None` if it has none, or has ended.
    pub fn of(pid: impl AnyPid) -> Option<Self> {
        let (major, minor) = proc::terminal(pid)?;
        Some(Self { major, minor })
    }

    fn path(self) -> Option<PathBuf> {
        (self.major == PSEUDO_TERMINAL).then(|| format!("/dev/pts/{}", self.minor).into())
    }

    /// Shows a line on the terminal, if it belongs to the user `owner`. Never waits. `text` must not contain control
    /// characters.
    ///
    /// # Errors
    /// The line was not shown, or not completely.
    pub fn show(self, owner: u32, text: &str) -> Result<(), NotShown> {
        let path = self.path().ok_or(NotShown::OtherDevice)?;
        let failed = |error: rustix::io::Errno| NotShown::Unwritable(error.into());
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(&path, flags, Mode::empty()).map_err(failed)?;
        let found = rustix::fs::fstat(&file).map_err(failed)?;
        let device = (rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev));
        if FileType::from_raw_mode(found.st_mode) != FileType::CharacterDevice || device != (self.major, self.minor) {
            return Err(NotShown::OtherDevice);
        }
        if found.st_uid != owner {
            return Err(NotShown::OtherUser);
        }
        // `mesg n` removes the write permission of the group.
        if !Mode::from_raw_mode(found.st_mode).contains(Mode::WGRP) {
            return Err(NotShown::Closed);
        }
        // A program may have set the terminal to raw mode, so write the carriage returns too.
        let line = format!("\r\n{text}\r\n");
        match rustix::io::write(&file, line.as_bytes()) {
            Ok(written) if written == line.len() => Ok(()),
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Err(NotShown::Full),
            Err(error) => Err(failed(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{BufRead, BufReader},
        os::fd::OwnedFd,
        process::{Command, Stdio},
    };

    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;

    /// A pseudo terminal that is open to messages.
    struct Pty {
        screen: OwnedFd,
        terminal: Terminal,
        path: PathBuf,
    }

    impl Pty {
        fn open() -> Self {
            let screen = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
            grantpt(&screen).unwrap();
            unlockpt(&screen).unwrap();
            let path = PathBuf::from(ptsname(&screen, Vec::new()).unwrap().into_string().unwrap());
            let number = path.file_name().unwrap().to_string_lossy().parse().unwrap();
            let pty = Self { screen, terminal: Terminal { major: PSEUDO_TERMINAL, minor: number }, path };
            pty.set_mode(0o620);
            pty
        }

        fn set_mode(&self, mode: u32) {
            rustix::fs::chmod(&self.path, Mode::from_raw_mode(mode)).unwrap();
        }

        fn owner(&self) -> u32 {
            rustix::fs::stat(&self.path).unwrap().st_uid
        }
    }

    #[test]
    fn line_is_shown_on_a_terminal_of_the_user_only() {
        let pty = Pty::open();
        // Keep the terminal open: without a process, its output is discarded.
        let _user = File::options().read(true).write(true).open(&pty.path).unwrap();
        pty.terminal.show(pty.owner(), "gpush: lease L21 ends in 10m").unwrap();
        let mut lines = BufReader::new(File::from(pty.screen.try_clone().unwrap())).lines();
        assert_eq!(lines.next().unwrap().unwrap().trim(), "");
        assert_eq!(lines.next().unwrap().unwrap().trim(), "gpush: lease L21 ends in 10m");
        assert!(matches!(pty.terminal.show(pty.owner() + 1, "x"), Err(NotShown::OtherUser)));
    }

    #[test]
    fn terminal_that_is_closed_to_messages_stays_silent() {
        let pty = Pty::open();
        pty.set_mode(0o600);
        assert!(matches!(pty.terminal.show(pty.owner(), "x"), Err(NotShown::Closed)));
    }

    /// A user stops the output with Ctrl-S. The notice must not wait.
    #[test]
    fn terminal_that_no_program_reads_is_full_at_some_time() {
        let pty = Pty::open();
        let _user = File::options().read(true).write(true).open(&pty.path).unwrap();
        let text = "x".repeat(4000);
        let end = (0..1000).find_map(|_| pty.terminal.show(pty.owner(), &text).err());
        assert!(matches!(end, Some(NotShown::Full)), "{end:?}");
    }

    #[test]
    fn device_that_is_no_terminal_is_refused() {
        for (major, minor) in [(1, 3), (4, 1), (5, 0)] {
            assert!(matches!(Terminal { major, minor }.show(0, "x"), Err(NotShown::OtherDevice)), "{major}:{minor}");
        }
        let gone = Terminal { major: PSEUDO_TERMINAL, minor: 1_000_000 };
        assert!(matches!(gone.show(0, "x"), Err(NotShown::Unwritable(_))));
    }

    #[test]
    fn process_without_a_terminal_has_none() {
        let mut command = Command::new("setsid");
        command.args(["sh", "-c", "echo ready; cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!((line.trim(), Terminal::of(child.id())), ("ready", None));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(Terminal::of(child.id()), None);
        assert_eq!(Terminal::of(0), None);
    }
}
