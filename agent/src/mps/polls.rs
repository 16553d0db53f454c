//! What of a control daemon's log is only gpushd asking how it is: sessions of nothing but questions, each
//! of which is some five lines there, and a look several sessions.
//!
//! ```text
//! Accepting connection…            ┐
//! NEW UI                           │ a session: left out as a whole when it is of questions and plain
//! Cmd:get_server_list              │ answers alone, quick, and closed
//! 4711                             │
//! UI closed                        ┘
//! NEW CLIENT 4712 from user 1000 …   anything else is an event, and shown; in the middle of a session
//!                                    with all of that
//! ```
//!
//! Nothing is guessed: a line that is not known to be one of these stays. A session that stands still, as when
//! somebody has the daemon's ear and says nothing, is shown too. That is told by the times in the log, so that
//! what was shown once is shown again, and the next look differs by what is new alone.

use std::time::Duration;

use jiff::civil::DateTime;

/// Between two lines of a session, or since its last one: gpushd's own take milliseconds.
const QUICK: Duration = Duration::from_secs(2);

/// What a line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// Somebody connects: a client, a server, or somebody with a question.
    Connects,
    /// That is somebody with a question.
    Opens,
    Question,
    /// What a question is answered with, and nothing else is.
    Answer,
    Closes,
    /// Anything else.
    Event,
}

/// The lines that tell more than that gpushd asked. `begins`: whether the first one is the log's. `silent`: how
/// long ago the last was written.
pub(super) fn without<'a>(lines: &[&'a str], begins: bool, silent: Duration) -> Vec<&'a str> {
    let mut told = Vec::with_capacity(lines.len().min(4096));
    // A session that was cut off before its first line here is taken for one that has been opened.
    let mut session = Session { from: 0, is_open: !begins, quiet: !begins, asked: !begins };
    for (at, line) in lines.iter().enumerate() {
        let what = what(line);
        session.quiet &= at == session.from || at.checked_sub(1).is_some_and(|before| is_quick(lines[before], line));
        match what {
            Line::Connects => {
                session.end(lines, at, &mut told);
                session = Session { from: at, is_open: false, quiet: true, asked: false };
            }
            // A log that is cut may begin there.
            Line::Opens if at == session.from + 1 && !session.is_open || at == 0 && !begins => session.is_open = true,
            Line::Question if session.is_open => session.asked = true,
            Line::Answer if session.asked => {}
            Line::Closes if session.is_open => {
                session.quiet &= session.asked;
                session.end(lines, at + 1, &mut told);
                session = Session { from: at + 1, is_open: false, quiet: false, asked: false };
            }
            Line::Opens | Line::Question | Line::Answer | Line::Closes | Line::Event => session.quiet = false,
        }
    }
    // The one that goes on.
    session.quiet &= silent < QUICK;
    session.end(lines, lines.len(), &mut told);
    told
}

/// Lines that belong together.
#[derive(Debug)]
struct Session {
    from: usize,
    is_open: bool,
    /// Whether it tells nothing, as far as it was read.
    quiet: bool,
    asked: bool,
}

impl Session {
    fn end<'a>(&self, lines: &[&'a str], to: usize, told: &mut Vec<&'a str>) {
        if !self.quiet {
            told.extend(&lines[self.from..to]);
        }
    }
}

/// The time of a line, and what it says.
fn parts(line: &str) -> (Option<DateTime>, &str) {
    let Some((stamp, said)) = line.strip_prefix('[').and_then(|rest| rest.split_once("] ")) else {
        return (None, line);
    };
    // `2026-11-22 08:57:50.177 Control 26733`
    let time = stamp.find(" Control").and_then(|end| stamp[..end].parse().ok());
    (time, said.trim_end())
}

fn is_quick(before: &str, line: &str) -> bool {
    match (parts(before).0, parts(line).0) {
        (Some(before), Some(now)) => {
            let between = now.duration_since(before);
            // A clock that was set back tells nothing.
            Duration::try_from(between).is_ok_and(|between| between < QUICK)
        }
        (Some(_) | None, None) | (None, Some(_)) => false,
    }
}

fn what(line: &str) -> Line {
    let (_, said) = parts(line);
    match said {
        "Accepting connection..." => Line::Connects,
        "NEW UI" => Line::Opens,
        "UI closed" => Line::Closes,
        _ => match said.strip_prefix("Cmd:") {
            Some(command) if is_question(command) => Line::Question,
            Some(_) => Line::Event,
            None if is_answer(said) => Line::Answer,
            None => Line::Event,
        },
    }
}

fn is_question(command: &str) -> bool {
    let word = command.split_whitespace().next().unwrap_or_default();
    word == "ps" || word.starts_with("get_")
}

/// A pid, a percentage, a priority, an amount of memory, or a server's state; a server that met a fault is
/// told, and so is one that is not there.
fn is_answer(said: &str) -> bool {
    let is_number = |text: &str| {
        let digits = text.strip_prefix('-').unwrap_or(text);
        !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit() || c == '.')
    };
    let amount = said.trim_end_matches(['B', 'K', 'M', 'G', 'T']);
    let states = ["ACTIVE", "INITIALIZING"];
    let none = ["No default pinned memory limit set for the device!", "Unknown command \"get_server_status\""];
    is_number(amount) || states.contains(&said) || none.contains(&said)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    /// A log with a millisecond between two lines; `~` before a line: ten seconds.
    fn log(said: &[&str]) -> Vec<String> {
        let mut ms = 0;
        let mut line = |said: &&str| {
            ms += if said.starts_with('~') { 10_000 } else { 1 };
            let said = said.trim_start_matches('~');
            format!("[2026-11-22 08:57:{:02}.{:03} Control 26733] {said}", ms / 1000, ms % 1000)
        };
        said.iter().map(&mut line).collect()
    }

    fn told(said: &[&str], begins: bool, silent: Duration) -> Vec<String> {
        let log = log(said);
        let lines: Vec<&str> = log.iter().map(String::as_str).collect();
        without(&lines, begins, silent).into_iter().map(|line| parts(line).1.to_owned()).collect()
    }

    const ASKED: [&str; 5] = ["Accepting connection...", "NEW UI", "Cmd:get_server_list", "4711", "UI closed"];

    fn with(before: &[&'static str], after: &[&'static str]) -> Vec<&'static str> {
        [before, &ASKED, &ASKED, after].concat()
    }

    #[test]
    fn looks_are_left_out_and_events_between_them_stay() {
        assert_eq!(told(&ASKED, true, NOW), [""; 0]);
        let events = [
            "Accepting connection...",
            "NEW CLIENT 5 from user 0: Server already exists",
            "4711",
            "Server 4711 exited with status 1",
        ];
        assert_eq!(told(&with(&[&ASKED[..], &events].concat(), &[]), true, NOW), events);
        assert_eq!(
            told(&with(&["Starting control daemon"], &["~Server 4711 exited with status 1"]), true, NOW),
            ["Starting control daemon", "Server 4711 exited with status 1"]
        );
    }

    #[test]
    fn what_changes_something_or_is_no_plain_answer_is_shown_with_its_session() {
        for line in [
            "Cmd:set_default_active_thread_percentage 5",
            "Cmd:quit",
            "Server 4711 not found",
            "FAULT",
            "Insufficient privileges for UID 5",
        ] {
            let session = ["Accepting connection...", "NEW UI", "Cmd:get_server_list", line, "UI closed"];
            assert_eq!(told(&with(&session, &[]), true, NOW), session, "{line}");
        }
        // Nobody asked.
        let silent = ["Accepting connection...", "NEW UI", "UI closed"];
        assert_eq!(told(&with(&silent, &[]), true, NOW), silent);
        // Of other forms nothing is known.
        assert_eq!(without(&["x", "NEW UI", "Cmd:get_server_list"], true, NOW).len(), 3);
    }

    #[test]
    fn one_that_goes_on_is_shown_once_it_stands_still_and_then_for_good() {
        let open = ["Accepting connection...", "NEW UI"];
        assert_eq!(told(&with(&[], &open), true, NOW), [""; 0]);
        assert_eq!(told(&with(&[], &open), true, QUICK), open);
        let then = ["Accepting connection...", "NEW UI", "~Cmd:get_server_list", "UI closed"];
        let shown = then.map(|line| line.trim_start_matches('~'));
        assert_eq!(told(&with(&[], &then), true, NOW), shown);
        assert_eq!(told(&with(&then, &[]), true, NOW), shown);
    }

    #[test]
    fn a_log_that_is_cut_begins_anywhere() {
        for from in 0..ASKED.len() {
            let end = ["Accepting connection...", "NEW SERVER 4711: Ready"];
            let said = [&ASKED[from..], &ASKED, &end].concat();
            assert_eq!(told(&said, false, NOW), end, "from {from}");
        }
        assert_eq!(told(&["Server 7 exited with status 1"], false, NOW).len(), 1);
    }

    /// Every line of what is left out, by itself, is one of the few that tell nothing.
    #[test]
    fn no_event_is_ever_left_out() {
        let kinds = [
            "Accepting connection...",
            "NEW UI",
            "Cmd:get_server_list",
            "4711",
            "UI closed",
            "Cmd:quit",
            "NEW CLIENT 5",
            "~NEW UI",
        ];
        let events = |said: &[&str]| said.iter().filter(|one| ["Cmd:quit", "NEW CLIENT 5"].contains(one)).count();
        // All logs of up to six lines.
        for length in 0..=5u32 {
            for mut number in 0..2 * kinds.len().pow(length) {
                let mut said = Vec::new();
                for _ in 0..length {
                    said.push(kinds[number % kinds.len()]);
                    number /= kinds.len();
                }
                let shown = told(&said, number == 0, NOW);
                let shown: Vec<&str> = shown.iter().map(String::as_str).collect();
                assert_eq!(events(&shown), events(&said), "{said:?}");
            }
        }
    }
}
