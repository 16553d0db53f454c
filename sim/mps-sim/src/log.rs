//! The log: a FIFO in the pipe directory. The daemon and the servers write records into it. A
//! thread of the daemon prints them as lines.
//!
//! A record has a header of 48 bytes and a text. The header contains a mark, whose last byte is the
//! kind of the writer. The other fields are the writer's pid, the local time as eight numbers, and
//! the length of the text. As with the real daemon, any user may write into the FIFO, invalid data
//! stops the log, and the daemon blocks when the FIFO is full.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// The mark at the start of a record, without the kind of the writer.
const MARK: u32 = 0xabcd_e000;
const HEADER: usize = 48;

/// The writer of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Control,
    Server,
}

impl Source {
    fn number(self) -> u32 {
        match self {
            Self::Control => 0,
            Self::Server => 1,
        }
    }
}

/// Writes log records for one program.
#[derive(Debug)]
pub(crate) struct Log {
    fifo: Option<File>,
    source: Source,
}

impl Log {
    /// Opens the FIFO of a pipe directory. If the FIFO does not exist, records are discarded.
    pub(crate) fn of(pipe: &Path, source: Source) -> Self {
        let fifo = OpenOptions::new().write(true).custom_flags(nix::libc::O_NONBLOCK).open(pipe.join("log"));
        if let Ok(fifo) = &fifo {
            // `open` must not wait for a reader, but `write` may wait. So make the FIFO blocking
            // only after it is open.
            let _as_it_is = nix::fcntl::fcntl(fifo, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty()));
        }
        Self { fifo: fifo.ok(), source }
    }

    pub(crate) fn say(&self, text: &str) {
        let Some(mut fifo) = self.fifo.as_ref() else { return };
        let now = jiff::Zoned::now();
        let numbers = [
            MARK + self.source.number(),
            std::process::id(),
            i32::from(now.year()).cast_unsigned(),
            i32::from(now.month()).cast_unsigned(),
            i32::from(now.day()).cast_unsigned(),
            0,
            i32::from(now.hour()).cast_unsigned(),
            i32::from(now.minute()).cast_unsigned(),
            i32::from(now.second()).cast_unsigned(),
            i32::from(now.millisecond()).cast_unsigned(),
        ];
        let mut record: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        record.extend((text.len() as u64).to_le_bytes());
        record.extend(text.as_bytes());
        // Ignore an error: the program must continue without its log.
        let _lost = fifo.write_all(&record);
    }
}

/// The destination of the log lines.
#[derive(Debug)]
pub(crate) enum Lines {
    /// Standard output, for a daemon in the foreground.
    Output,
    /// The files `control.log` and `server.log` in a directory. If these files cannot be written,
    /// the lines are discarded.
    Directory(PathBuf),
}

/// Creates the FIFO and starts the thread that reads it.
pub(crate) fn open(pipe: &Path, lines: &Lines) -> io::Result<()> {
    let fifo = pipe.join("log");
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o777);
    match nix::unistd::mkfifo(&fifo, mode) {
        Err(nix::errno::Errno::EEXIST) | Ok(()) => {}
        Err(errno) => return Err(errno.into()),
    }
    std::fs::set_permissions(&fifo, std::os::unix::fs::PermissionsExt::from_mode(0o777))?;
    // Open the FIFO for reading and writing. With a writer, a read never reaches the end of the
    // file.
    let mut from = OpenOptions::new().read(true).write(true).open(&fifo)?;
    let append = |dir: &Path, name: &str| OpenOptions::new().create(true).append(true).open(dir.join(name)).ok();
    let (mut control, mut server) = match lines {
        Lines::Output => (None, None),
        Lines::Directory(dir) => (append(dir, "control.log"), append(dir, "server.log")),
    };
    let to_output = matches!(lines, Lines::Output);
    std::thread::spawn(move || {
        while let Ok((source, line)) = record(&mut from) {
            let _lost = match (to_output, source == Source::Server.number()) {
                (true, _) => io::stdout().lock().write_all(line.as_bytes()),
                (false, true) => server.as_mut().map_or(Ok(()), |file| file.write_all(line.as_bytes())),
                (false, false) => control.as_mut().map_or(Ok(()), |file| file.write_all(line.as_bytes())),
            };
        }
    });
    Ok(())
}

fn record(from: &mut File) -> io::Result<(u32, String)> {
    let mut header = [0; HEADER];
    from.read_exact(&mut header)?;
    let word = |at: usize| header[at * 4..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    let length = header.last_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let mut text = Vec::new();
    from.take(length).read_to_end(&mut text)?;
    let source = word(0).wrapping_sub(MARK);
    let name = match source {
        0 => "Control",
        1 => "Server",
        2 => "Client",
        3 => "Other",
        _ => "Legacy Server",
    };
    let line = format!(
        "[{}-{:02}-{:02} {:02}:{:02}:{:02}.{:03} {name} {:5}] {}\n",
        word(2),
        word(3),
        word(4),
        word(6),
        word(7),
        word(8),
        word(9),
        word(1),
        String::from_utf8_lossy(&text).trim_end_matches('\n')
    );
    Ok((source, line))
}
