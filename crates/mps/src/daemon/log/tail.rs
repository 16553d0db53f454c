//! The last lines of the logs of a daemon and its servers, for the API.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom},
    path::Path,
};

use gpush_api::{ApiError, Code, MpsLog, MpsLogs, text};

use super::{CONTROL_LOG, SERVER_LOG, filter::Filter};

/// Maximum number of bytes that are read to find the last lines of a log: the first limit applies without the filter,
/// the second one with the filter.
const MOST: (u64, u64) = (256 << 10, 4 << 20);

/// Maximum length of a shown line in bytes. Users can write into these logs.
const LONGEST_LINE: usize = 4096;

/// Returns the last lines of each log. Omits gpushd's own probes unless `all` is true. Reads line by line, so it needs
/// memory only for the returned lines. Blocks the thread.
#[must_use]
pub fn last(dir: &Path, lines: usize, all: bool) -> MpsLogs {
    let file = |name: &str| {
        let path = dir.join(name);
        let shown = path.display().to_string();
        let filtered = name == CONTROL_LOG && !all;
        match end_of(&path, lines, filtered) {
            Ok(End { lines, left_out }) => MpsLog { path: shown, lines: lines.into(), left_out, error: None },
            // The servers' log does not exist before the first server starts.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                MpsLog { path: shown, lines: Vec::new(), left_out: 0, error: None }
            }
            Err(error) => {
                let error = ApiError::new(Code::Internal, format!("cannot read {shown}")).cause(error.to_string());
                MpsLog { path: shown, lines: Vec::new(), left_out: 0, error: Some(error) }
            }
        }
    };
    MpsLogs { files: vec![file(CONTROL_LOG), file(SERVER_LOG)] }
}

/// The end of a log.
struct End {
    lines: VecDeque<String>,
    left_out: usize,
}

fn end_of(path: &Path, most: usize, filtered: bool) -> io::Result<End> {
    let mut file = File::open(path)?;
    let meta = file.metadata()?;
    let bytes = if filtered { MOST.1 } else { MOST.0 };
    let from = meta.len().saturating_sub(bytes);
    file.seek(SeekFrom::Start(from))?;
    let mut reader = BufReader::new(file.take(bytes));
    let mut last = VecDeque::new();
    let mut show = |line: String| {
        if last.len() == most {
            last.pop_front();
        }
        if most > 0 {
            last.push_back(text::plain(&line));
        }
    };
    // If reading did not begin at the start of the file, the first line is incomplete.
    let begins = from == 0;
    if !begins {
        next_line(&mut reader)?;
    }
    let mut filter = filtered.then(|| Filter::new(begins));
    while let Some(line) = next_line(&mut reader)? {
        match &mut filter {
            Some(filter) => filter.line(line, &mut show),
            None => show(line),
        }
    }
    let silent = meta.modified()?.elapsed().unwrap_or_default();
    let left_out = filter.map_or(0, |filter| filter.end(silent, &mut show));
    Ok(End { lines: last, left_out })
}

/// Reads a line without its line ending; `None` at the end of the file. Skips the part of the line beyond
/// [`LONGEST_LINE`].
fn next_line(reader: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    let mut is_any = false;
    loop {
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() {
            break;
        }
        is_any = true;
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let piece = &buffer[..end.unwrap_or(buffer.len())];
        line.extend(&piece[..piece.len().min(LONGEST_LINE - line.len())]);
        let read = end.map_or(buffer.len(), |end| end + 1);
        reader.consume(read);
        if end.is_some() {
            break;
        }
    }
    if line.last() == Some(&b'\r') {
        line.pop();
    }
    Ok(is_any.then(|| String::from_utf8_lossy(&line).into_owned()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn last_lines_are_shown_without_control_characters() {
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
    fn long_line_is_cut_and_the_next_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(SERVER_LOG), "x".repeat(100 << 10) + "\r\nlast\r\nunfinished").unwrap();
        let lines = last(dir.path(), 5, false).files.remove(1).lines;
        let lengths: Vec<usize> = lines.iter().map(String::len).collect();
        assert_eq!((lengths, lines[1].as_str(), lines[2].as_str()), (vec![LONGEST_LINE, 4, 10], "last", "unfinished"));
        assert_eq!(last(dir.path(), 0, false).files.remove(1).lines.len(), 0);
    }

    #[test]
    fn event_is_found_before_thousands_of_probes() {
        let dir = tempfile::tempdir().unwrap();
        let line = |message: &str| format!("[2026-11-22 08:57:50.000 Control 7] {message}\n");
        let look = ["Accepting connection...", "NEW UI", "Cmd:get_server_list", "4711", "UI closed"].map(line).concat();
        let message = line("NEW CLIENT 5 from user 1: Server already exists") + &look.repeat(9000);
        assert!(message.len() > 1 << 20);
        fs::write(dir.path().join(CONTROL_LOG), message).unwrap();
        let reported = last(dir.path(), 40, false).files.remove(0).lines;
        assert_eq!(reported.len(), 1, "{reported:#?}");
        assert!(reported[0].contains("NEW CLIENT 5"));
        assert_eq!(last(dir.path(), 40, true).files[0].lines.len(), 40);
    }
}
