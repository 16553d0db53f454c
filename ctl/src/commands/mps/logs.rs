//! `gpushctl mps logs`: prints the last lines of a daemon's logs, and new lines.

use std::time::Duration;

use gpush_api::{MpsLog, MpsLogs};
use gpush_client::Client;

use crate::{
    exit::{Failure, Outcome},
    output::Output,
    render::mps::change,
};

/// Interval at which gpushctl reads the logs.
const LOOK: Duration = Duration::from_secs(1);

/// Maximum number of lines that gpushctl reads at once. If a daemon writes more lines in one interval, gpushctl does
/// not show all of these lines.
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
    // From now on, use the short name: the index may belong to another GPU at the next request.
    let target = client.mps_daemon(target).await?.target;
    let mut seen = client.mps_logs(&target, lines, all).await?;
    tell(&seen, &seen, out)?;
    let mut away = false;
    loop {
        tokio::time::sleep(LOOK).await;
        let now = match client.mps_logs(&target, WINDOW.max(lines), all).await {
            Ok(now) => now,
            // gpushd may be restarting, so wait for it.
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

/// Prints new lines, if there are any. `all` determines whether to print the names of the files.
fn tell(new: &MpsLogs, all: &MpsLogs, out: &Output) -> Result<(), Failure> {
    if new.files.is_empty() {
        return Ok(());
    }
    if out.json { out.json_line(new) } else { out.text(&change::more_logs(new, all.files.len() > 1, &out.look)) }
}

/// Returns the lines of `now` that are not in `seen`. Leaves out files without new lines.
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

/// Finds where `now` continues `seen`, and returns the new lines. If `now` does not continue `seen`, as in a new log,
/// returns all lines.
fn added<'a>(seen: &[String], now: &'a [String]) -> &'a [String] {
    let overlap = |end: usize| {
        let both = std::iter::zip(seen.iter().rev(), now[..end].iter().rev());
        let same = both.take_while(|(old, new)| old == new).count();
        // All overlapping lines must be equal, not only some.
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
        // The first request asked for fewer lines than the second one.
        assert_eq!(new("cd", "abcdef"), "ef");
        // The oldest lines are no longer in the second answer.
        assert_eq!(new("abcd", "cdef"), "ef");
        // The daemon has written the same line again.
        assert_eq!(new("aa", "aaa"), "a");
        assert_eq!(new("ab", "abab"), "ab");
        // The daemon has begun a new log with the same name.
        assert_eq!(new("abc", "xc"), "xc");
        assert_eq!(new("abc", ""), "");
    }
}
