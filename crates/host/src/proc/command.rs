//! Command line and name of a process.
//!
//! Reading a command line reads the memory of the process. That may block for as long as the process decides: its
//! owner can place the words on a file system that does not answer. Use [`crate::users`] on async threads.

use std::{fs::File, io::Read, path::Path};

use gpush_api::text;

use super::{AnyPid, open, read};

/// Characters of a command line that are kept for display.
const SHOWN: usize = 256;

/// Bytes of a command line that are read for display: [`SHOWN`] characters have at most four bytes each.
const READ: u64 = 4 * SHOWN as u64;

/// Returns the first words of a process's command line, at most [`super::LIMIT`] bytes.
pub fn words(pid: impl AnyPid) -> Option<Vec<Vec<u8>>> {
    let bytes = read::up_to_limit(open(pid)?.open_relative("cmdline").ok()?).ok()?;
    let words = bytes.strip_suffix(b"\0").unwrap_or(&bytes).split(|byte| *byte == 0);
    Some(words.map(<[u8]>::to_vec).collect())
}

/// Returns the command line of a process for display: cleaned by the rule of [`text`] and cut. A process without one,
/// such as a kernel thread or a zombie, gives its name. `proc` is `/proc`, or that of a simulated host.
pub fn command_line(proc: &Path, pid: u32) -> Option<String> {
    let dir = proc.join(pid.to_string());
    let mut bytes = Vec::new();
    File::open(dir.join("cmdline")).ok()?.take(READ).read_to_end(&mut bytes).ok()?;
    let line = String::from_utf8_lossy(&bytes).replace('\0', " ");
    shown(&line).or_else(|| shown(&read::text(File::open(dir.join("comm")).ok()?).ok()?))
}

/// Returns the name that the kernel keeps for a process (`comm`), cleaned for display; empty when there is none.
pub fn name(pid: impl AnyPid) -> String {
    let file = open(pid).and_then(|process| process.open_relative("comm").ok());
    let name = file.and_then(|file| read::text(file).ok()).unwrap_or_default();
    text::plain(name.trim_end())
}

/// Cleans a command line for display and cuts it; `None` when nothing is left.
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

    /// `prctl(PR_SET_MM_MAP)` lets any user make a command line as long as its memory.
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
