//! The logs of a daemon and its servers: rotated, since NVIDIA's never are, and their ends shown.
//!
//! They are written to by append, so a copy and a cut lose nothing but what is said in between.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

use gpush_api::{ApiError, Code, MpsLog, MpsLogs, text};

use super::exec::CONTROL_LOG;

/// What servers say.
const SERVER_LOG: &str = "server.log";

/// Most of a log that is looked at for its last lines, bytes.
const MOST: u64 = 256 << 10;

/// Cuts logs that are larger than this, and keeps one that was before.
pub(super) fn rotate(dir: &Path, larger_than: u64) {
    for name in [CONTROL_LOG, SERVER_LOG] {
        let path = dir.join(name);
        let rotated = || -> io::Result<()> {
            if fs::metadata(&path)?.len() <= larger_than {
                return Ok(());
            }
            let copied = fs::copy(&path, dir.join(format!("{name}.1")));
            // With the disk full the copy fails, and a log that is cut is better than none that can grow.
            OpenOptions::new().write(true).open(&path)?.set_len(0)?;
            copied.map(|_| ())
        };
        match rotated() {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("{} can't be rotated: {error}", path.display());
            }
            Ok(()) | Err(_) => {}
        }
    }
}

/// The last lines of each.
pub(super) fn last(dir: &Path, lines: usize) -> MpsLogs {
    let file = |name: &str| {
        let path = dir.join(name);
        let shown = path.display().to_string();
        match end_of(&path) {
            Ok(said) => {
                let all: Vec<String> = said.lines().map(text::plain).collect();
                MpsLog { path: shown, lines: all[all.len().saturating_sub(lines)..].to_vec(), error: None }
            }
            // Servers have said nothing yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                MpsLog { path: shown, lines: Vec::new(), error: None }
            }
            Err(error) => {
                let error = ApiError::new(Code::Internal, format!("{shown} can't be read")).cause(error.to_string());
                MpsLog { path: shown, lines: Vec::new(), error: Some(error) }
            }
        }
    };
    MpsLogs { files: vec![file(CONTROL_LOG), file(SERVER_LOG)] }
}

fn end_of(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let from = length.saturating_sub(MOST);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(MOST).read_to_end(&mut bytes)?;
    let said = String::from_utf8_lossy(&bytes).into_owned();
    // The first line is cut where it was not read from its beginning.
    Ok(if from == 0 { said } else { said.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_owned()) })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_log_is_cut_when_it_is_large_and_goes_on_where_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CONTROL_LOG);
        let mut log = OpenOptions::new().append(true).create(true).open(&path).unwrap();
        writeln!(log, "one\ntwo").unwrap();
        rotate(dir.path(), 8);
        assert_eq!(fs::metadata(&path).unwrap().len(), 8, "it is not larger");
        rotate(dir.path(), 7);
        writeln!(log, "three").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        assert_eq!(fs::read_to_string(dir.path().join("control.log.1")).unwrap(), "one\ntwo\n");
    }

    #[test]
    fn the_last_lines_are_shown_and_nothing_that_a_terminal_obeys() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CONTROL_LOG), "a\nb\n\u{1b}[2Jc\n").unwrap();
        let logs = last(dir.path(), 2);
        assert_eq!(logs.files[0].lines, ["b", "?[2Jc"]);
        assert_eq!((logs.files[1].lines.len(), &logs.files[1].error), (0, &None));
        fs::write(dir.path().join(SERVER_LOG), "x".repeat(300 << 10) + "\nlast\n").unwrap();
        assert_eq!(last(dir.path(), 5).files[1].lines, ["last"]);
    }
}
