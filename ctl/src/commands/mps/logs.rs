//! `gpushctl mps logs`: prints the last lines of a daemon's logs, and new lines.

use std::time::Duration;

use gpush_api::{MpsLog, MpsLogs};
use gpush_client::Client;

use crate::{
    exit::{Failure, Outcome},
    output::Output,
    render::mps::change,
};

/// Pause between two polls.
const LOOK: Duration = Duration::from_secs(1);

/// Maximum number of lines per poll. If a daemon writes more lines between two polls, the excess
/// lines are not shown.
const WINDOW: usize = 500;

pub(super) async fn last(
    client: &mut Client,
    target: &str,
    lines: usize,
    all: bool,
    out: &Output,
) -> Result<(), Failure> {
    let logs = client.mps_logs(target, lines, all).await?;
    out.show(&logs, |look| change::logs(&logs, look))
}

pub(super) async fn follow(client: &mut Client, target: &str, lines: usize, all: bool, out: &Output) -> Outcome {
    // Use the short name from now on, because the index may belong to another GPU at the next poll.
    let target = client.mps_daemon(target).await?.target;
    let mut seen = client.mps_logs(&target, lines, all).await?;
    tell(&seen, &seen, out)?;
    let mut away = false;
    loop {
        tokio::time::sleep(LOOK).await;
        let now = match client.mps_logs(&target, WINDOW.max(lines), all).await {
            Ok(now) => now,
            // A restart of gpushd must not end the command, so wait for gpushd.
            Err(error) if super::super::events::may_pass(&error) => {
                if !away {
                    out.remark("gpushd does not answer; waiting until gpushd is back\n");
                }
                away = true;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        if away {
            out.remark("gpushd is back\n");
            away = false;
        }
        tell(&news(&seen, &now), &now, out)?;
        seen = now;
    }
}

/// Prints the new lines, if there are any. `all` determines whether the output needs file names.
fn tell(new: &MpsLogs, all: &MpsLogs, out: &Output) -> Result<(), Failure> {
    if new.files.is_empty() {
        return Ok(());
    }
    if out.json { out.json_line(new) } else { out.text(&change::more_logs(new, all.files.len() > 1, &out.look)) }
}

/// Returns the lines of `now` that are not in `seen`. Files without new lines are left out.
fn news(seen: &MpsLogs, now: &MpsLogs) -> MpsLogs {
    let files = now.files.iter().filter_map(|file| {
        let before = seen.files.iter().find(|old| old.path == file.path);
        let lines = before.map_or(&file.lines[..], |old| added(&old.lines, &file.lines));
        let failed = file.error.is_some() && before.is_none_or(|old| old.error != file.error);
        (!lines.is_empty() || failed).then(|| MpsLog {
            path: file.path.clone(),
            lines: lines.to_vec(),
            left_out: file.left_out,
            error: file.error.clone().filter(|_| failed),
        })
    });
    MpsLogs { files: files.collect() }
}

/// Returns the lines of `now` after the best match for the end of `seen`. Without a match, as in a new log, returns all
/// lines.
fn added<'a>(seen: &[String], now: &'a [String]) -> &'a [String] {
    let overlap = |end: usize| {
        let both = std::iter::zip(seen.iter().rev(), now[..end].iter().rev());
        let same = both.take_while(|(old, new)| old == new).count();
        // All lines of the overlap must match. One matching line is not enough.
        if same == seen.len().min(end) { same } else { 0 }
    };
    let best = (1..=now.len()).rev().max_by_key(|end| overlap(*end)).filter(|end| overlap(*end) > 0);
    &now[best.unwrap_or(0)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_log_lines_are_printed() {
        let lines = |text: &str| text.chars().map(String::from).collect::<Vec<_>>();
        let new = |seen: &str, now: &str| added(&lines(seen), &lines(now)).concat();
        assert_eq!(new("", "ab"), "ab");
        assert_eq!(new("ab", "ab"), "");
        assert_eq!(new("ab", "abc"), "c");
        // The first poll requested fewer lines than the later ones.
        assert_eq!(new("cd", "abcdef"), "ef");
        // Older lines are no longer in the window.
        assert_eq!(new("abcd", "cdef"), "ef");
        // The same line again is a new line.
        assert_eq!(new("aa", "aaa"), "a");
        assert_eq!(new("ab", "abab"), "ab");
        // A new log with the same name.
        assert_eq!(new("abc", "xc"), "xc");
        assert_eq!(new("abc", ""), "");
    }
}
