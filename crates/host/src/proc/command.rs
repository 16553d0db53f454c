//! Command line and name of a process.
//!
//! The kernel reads a command line from the memory of the process. The owner of the process can block this read for any
//! time, by mapping that memory from a file system that does not answer. On async threads, use [`crate::identity`].

use std::{fs::File, io::Read, path::Path};

use gpush_api::text;

use super::{AnyPid, open, read};

/// Maximum number of characters of a command line for display.
const SHOWN: usize = 256;

/// Maximum number of bytes read from a command line for display: [`SHOWN`] characters of at most four bytes.
const READ: u64 = 4 * SHOWN as u64;

/// Returns the words of a process's command line that are within the first [`super::LIMIT`] bytes.
pub fn words(pid: impl AnyPid) -> Option<Vec<Vec<u8>>> {
    let bytes = read::up_to_limit(open(pid)?.open_relative("cmdline").ok()?).ok()?;
    let words = bytes.strip_suffix(b"\0").unwrap_or(&bytes).split(|byte| *byte == 0);
    Some(words.map(<[u8]>::to_vec).collect())
}

/// Returns the command line of a process for display: cleaned as [`text`] defines, and truncated.
/// If the process has no command line (a kernel thread or a zombie), returns its name. `proc` is
/// `/proc`, or the same directory of a simulated host.
pub fn command_line(proc: &Path, pid: u32) -> Option<String> {
    let dir = proc.join(pid.to_string());
    let mut bytes = Vec::new();
    File::open(dir.join("cmdline")).ok()?.take(READ).read_to_end(&mut bytes).ok()?;
    let line = String::from_utf8_lossy(&bytes).replace('\0', " ");
    shown(&line).or_else(|| shown(&read::text(File::open(dir.join("comm")).ok()?).ok()?))
}

/// Returns the kernel's name for a process (`comm`), cleaned for display; empty if there is none.
pub fn name(pid: impl AnyPid) -> String {
    let file = open(pid).and_then(|process| process.open_relative("comm").ok());
    let name = file.and_then(|file| read::text(file).ok()).unwrap_or_default();
    text::plain(name.trim_end())
}

/// Cleans a command line for display and truncates it; `None` if the result is empty.
fn shown(line: &str) -> Option<String> {
    let text: String = line.chars().map(text::plain_char).take(SHOWN).collect();
    let text = text.trim_end();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_cleaned_and_cut() {
        assert_eq!(shown("a\x1b[31m\nb").as_deref(), Some("a?[31m b"));
        assert_eq!(shown("py\u{200b}thon \u{202e}gpj.exe").as_deref(), Some("py?thon ?gpj.exe"));
        assert_eq!(shown(&"é".repeat(300)).unwrap().chars().count(), SHOWN);
        assert_eq!(shown(" \n"), None);
    }

    /// Any user can make a command line as long as the memory of the process, with
    /// `prctl(PR_SET_MM_MAP)`.
    #[test]
    fn endless_command_line_is_cut() {
        let proc = tempfile::tempdir().unwrap();
        let dir = proc.path().join("7");
        std::fs::create_dir(&dir).unwrap();
        std::os::unix::fs::symlink("/dev/zero", dir.join("cmdline")).unwrap();
        std::fs::write(dir.join("comm"), "endless\n").unwrap();
        assert_eq!(command_line(proc.path(), 7).as_deref(), Some("endless"));
    }

    #[test]
    fn own_command_line_and_name_are_known() {
        let me = std::process::id();
        let proc = Path::new("/proc");
        assert!(command_line(proc, me).unwrap().contains("gpush_host"));
        assert!(words(me).unwrap()[0].ends_with(&std::env::args().next().unwrap().into_bytes()));
        assert!(!name(me).is_empty());
        assert_eq!((command_line(proc, u32::MAX), words(i32::MAX), name(i32::MAX)), (None, None, String::new()));
    }
}
