//! The ends of the logs of a daemon and its servers, as they are shown.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
    time::Duration,
};

use gpush_api::{ApiError, Code, MpsLog, MpsLogs, text};

use super::{
    exec::{CONTROL_LOG, SERVER_LOG},
    polls,
};

/// Most of a log that is looked at for its last lines, bytes: as it is, and where most of it is left out.
const MOST: (u64, u64) = (256 << 10, 4 << 20);

/// The last lines of each; without what gpushd's own looks at the daemon leave there, unless `all` are wanted.
pub(super) fn last(dir: &Path, lines: usize, all: bool) -> MpsLogs {
    let file = |name: &str| {
        let path = dir.join(name);
        let shown = path.display().to_string();
        let polled = name == CONTROL_LOG && !all;
        match end_of(&path, if polled { MOST.1 } else { MOST.0 }) {
            Ok(end) => {
                let said: Vec<&str> = end.said.lines().collect();
                let told = if polled { polls::without(&said, end.begins, end.silent) } else { said.clone() };
                let last = &told[told.len().saturating_sub(lines)..];
                let left_out = said.len() - told.len();
                MpsLog {
                    path: shown,
                    lines: last.iter().map(|line| text::plain(line)).collect(),
                    left_out,
                    error: None,
                }
            }
            // Servers have said nothing yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                MpsLog { path: shown, lines: Vec::new(), left_out: 0, error: None }
            }
            Err(error) => {
                let error = ApiError::new(Code::Internal, format!("{shown} can't be read")).cause(error.to_string());
                MpsLog { path: shown, lines: Vec::new(), left_out: 0, error: Some(error) }
            }
        }
    };
    MpsLogs { files: vec![file(CONTROL_LOG), file(SERVER_LOG)] }
}

/// The end of a log.
struct End {
    said: String,
    /// Whether that is all of it.
    begins: bool,
    /// For how long nothing was added.
    silent: Duration,
}

fn end_of(path: &Path, most: u64) -> io::Result<End> {
    let mut file = File::open(path)?;
    let meta = file.metadata()?;
    let from = meta.len().saturating_sub(most);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    let said = String::from_utf8_lossy(&bytes).into_owned();
    // The first line is cut where it was not read from its beginning.
    let begins = from == 0;
    let said = if begins { said } else { said.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_owned()) };
    Ok(End { said, begins, silent: meta.modified()?.elapsed().unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_last_lines_are_shown_and_nothing_that_a_terminal_obeys() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CONTROL_LOG), "a\nb\n\u{1b}[2Jc\n").unwrap();
        for all in [false, true] {
            let logs = last(dir.path(), 2, all);
            assert_eq!(logs.files[0].lines, ["b", "?[2Jc"]);
            assert_eq!((logs.files[1].lines.len(), &logs.files[1].error), (0, &None));
        }
        fs::write(dir.path().join(SERVER_LOG), "x".repeat(300 << 10) + "\nlast\n").unwrap();
        assert_eq!(last(dir.path(), 5, false).files[1].lines, ["last"]);
    }

    #[test]
    fn an_event_is_found_behind_thousands_of_looks() {
        let dir = tempfile::tempdir().unwrap();
        let line = |said: &str| format!("[2026-11-22 08:57:50.000 Control 7] {said}\n");
        let look = ["Accepting connection...", "NEW UI", "Cmd:get_server_list", "4711", "UI closed"].map(line).concat();
        let said = line("NEW CLIENT 5 from user 1: Server already exists") + &look.repeat(9000);
        assert!(said.len() > 1 << 20);
        fs::write(dir.path().join(CONTROL_LOG), said).unwrap();
        let told = last(dir.path(), 40, false).files.remove(0).lines;
        assert_eq!(told.len(), 1, "{told:#?}");
        assert!(told[0].contains("NEW CLIENT 5"));
        assert_eq!(last(dir.path(), 40, true).files[0].lines.len(), 40);
    }
}
