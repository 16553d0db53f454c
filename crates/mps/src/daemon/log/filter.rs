//! Filter for the log of a control daemon. The filter omits the probes of gpushd. A probe has
//! several sessions, and each session consists of queries. A session writes about five lines into
//! the log.
//!
//! ```text
//! Accepting connection…            ┐
//! NEW UI                           │ a session. The filter omits it if it consists of queries with plain replies,
//! Cmd:get_server_list              │ is fast, and is closed
//! 4711                             │
//! UI closed                        ┘
//! NEW CLIENT 4712 from user 1000 …   any other line is an event: shown, with the session around it
//! ```
//!
//! The filter shows every line that it does not know. The filter also shows a session with a pause,
//! because a process may hold the control connection during the pause without sending anything. The
//! filter uses only the times in the log, so the same log always gives the same result.
//!
//! A simpler rule does not work. A control daemon does not log which peer sends a command, so the
//! filter cannot select lines by gpushd's pid. If the filter omitted each known line separately,
//! the filter would hide half-open sessions, and replies to an administrator's commands, such as a
//! pid or a state.

use std::time::Duration;

use jiff::civil::DateTime;

/// Maximum pause within a session of gpushd. Such a session takes milliseconds.
const QUICK: Duration = Duration::from_secs(2);

/// The kind of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    /// The start of a connection: of a client, a server, or a front-end.
    Connects,
    /// The connection is from a front-end.
    Opens,
    Question,
    /// A reply that only queries get.
    Answer,
    Closes,
    /// Anything else.
    Event,
}

/// Maximum number of lines of a session that the filter holds back while it does not yet know
/// whether the session is a probe. If a session has more lines, the filter shows them. The limit is
/// necessary because users can write into the log.
const LONGEST_SESSION: usize = 256;

/// A filter that omits the probes of gpushd, line by line.
#[derive(Debug)]
pub(super) struct Filter {
    /// Whether the input starts at the first line of the log.
    begins: bool,
    lines: usize,
    left_out: usize,
    session: Session,
    /// Time of the previous line.
    before: Option<DateTime>,
}

/// A session: lines that belong together.
#[derive(Debug)]
struct Session {
    /// Number of lines so far.
    lines: usize,
    /// Lines held back while the session may be a probe.
    kept_back: Vec<String>,
    is_open: bool,
    /// Whether the session may be a probe.
    quiet: bool,
    asked: bool,
}

impl Session {
    fn new(quiet: bool) -> Self {
        Self { lines: 0, kept_back: Vec::new(), is_open: false, quiet, asked: false }
    }

    fn add(&mut self, line: String, show: &mut impl FnMut(String)) {
        self.lines += 1;
        self.kept_back.push(line);
        self.quiet &= self.kept_back.len() <= LONGEST_SESSION;
        if !self.quiet {
            self.kept_back.drain(..).for_each(show);
        }
    }

    /// Shows the lines that the filter holds back, unless the session is a probe. Returns the number of omitted lines.
    fn end(&mut self, show: &mut impl FnMut(String)) -> usize {
        if self.quiet {
            return std::mem::take(&mut self.kept_back).len();
        }
        self.kept_back.drain(..).for_each(show);
        0
    }
}

impl Filter {
    /// Creates a filter for a log. `begins` is true if the filter's first line is also the first
    /// line of the log.
    pub(super) fn new(begins: bool) -> Self {
        // If the start of a session is missing, treat the session as open.
        let session = Session { is_open: !begins, quiet: !begins, asked: !begins, ..Session::new(false) };
        Self { begins, lines: 0, left_out: 0, session, before: None }
    }

    /// Handles the next line. Shows this line, and the lines that the filter holds back, as soon as they cannot belong
    /// to a probe.
    pub(super) fn line(&mut self, line: String, mut show: impl FnMut(String)) {
        let is_first = self.lines == 0;
        self.lines += 1;
        let time = parts(&line).0;
        let session = &mut self.session;
        session.quiet &= session.lines == 0 || is_quick(self.before, time);
        self.before = time;
        match classify(&line) {
            Line::Connects => {
                self.left_out += session.end(&mut show);
                *session = Session::new(true);
            }
            // If this is the first line of the input, `Accepting connection...` before it may be missing.
            Line::Opens if session.lines == 1 && !session.is_open || is_first && !self.begins => {
                session.is_open = true;
            }
            Line::Question if session.is_open => session.asked = true,
            Line::Answer if session.asked => {}
            Line::Closes if session.is_open => {
                session.quiet &= session.asked;
                session.add(line, &mut show);
                self.left_out += session.end(&mut show);
                *session = Session::new(false);
                return;
            }
            Line::Opens | Line::Question | Line::Answer | Line::Closes | Line::Event => session.quiet = false,
        }
        session.add(line, &mut show);
    }

    /// Ends the log. `silent` is the time since its last line was written. Returns the number of omitted lines.
    pub(super) fn end(mut self, silent: Duration, mut show: impl FnMut(String)) -> usize {
        // The last session may still be open. If it has been silent for too long, it is not a probe.
        self.session.quiet &= silent < QUICK;
        self.left_out + self.session.end(&mut show)
    }
}

/// Splits a line into its time and its text.
fn parts(line: &str) -> (Option<DateTime>, &str) {
    let Some((stamp, message)) = line.strip_prefix('[').and_then(|rest| rest.split_once("] ")) else {
        return (None, line);
    };
    // A line begins with its time, for example `2026-11-22 08:57:50.177 Control 26733`.
    let time = stamp.find(" Control").and_then(|end| stamp[..end].parse().ok());
    (time, message.trim_end())
}

fn is_quick(before: Option<DateTime>, now: Option<DateTime>) -> bool {
    // If the clock was set back, the duration is negative. The session is then not considered fast.
    before.zip(now).is_some_and(|(before, now)| {
        Duration::try_from(now.duration_since(before)).is_ok_and(|between| between < QUICK)
    })
}

fn classify(line: &str) -> Line {
    let (_, message) = parts(line);
    match message {
        "Accepting connection..." => Line::Connects,
        "NEW UI" => Line::Opens,
        "UI closed" => Line::Closes,
        _ => match message.strip_prefix("Cmd:") {
            Some(command) if is_question(command) => Line::Question,
            Some(_) => Line::Event,
            None if is_answer(message) => Line::Answer,
            None => Line::Event,
        },
    }
}

fn is_question(command: &str) -> bool {
    let word = command.split_whitespace().next().unwrap_or_default();
    word == "ps" || word.starts_with("get_")
}

/// Returns whether a text is a pid, a percentage, a priority, an amount of memory, or the state of
/// a healthy server. Such a text is only an answer to a query. A fault of a server, or a missing
/// server, is not an answer but an event.
fn is_answer(message: &str) -> bool {
    let is_number = |text: &str| {
        let digits = text.strip_prefix('-').unwrap_or(text);
        !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit() || c == '.')
    };
    let amount = message.trim_end_matches(['B', 'K', 'M', 'G', 'T']);
    let states = ["ACTIVE", "INITIALIZING"];
    let none = ["No default pinned memory limit set for the device!", "Unknown command \"get_server_status\""];
    is_number(amount) || states.contains(&message) || none.contains(&message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn without(lines: &[&str], begins: bool, silent: Duration) -> Vec<String> {
        let mut reported = Vec::new();
        let mut filter = Filter::new(begins);
        lines.iter().for_each(|line| filter.line((*line).to_owned(), |line| reported.push(line)));
        let left_out = filter.end(silent, |line| reported.push(line));
        assert_eq!(reported.len() + left_out, lines.len());
        reported
    }

    #[test]
    fn endless_query_session_is_shown() {
        let mut filter = Filter::new(true);
        let mut shown = 0;
        let session = ["Accepting connection...", "NEW UI"].into_iter().chain(std::iter::repeat("Cmd:get_server_list"));
        for message in session.take(100_000) {
            filter.line(format!("[2026-11-22 08:57:50.000 Control 7] {message}"), |_| shown += 1);
            assert!(filter.session.kept_back.len() <= LONGEST_SESSION);
        }
        assert_eq!((filter.end(NOW, |_| shown += 1), shown), (0, 100_000));
    }

    /// Creates a log with one millisecond between lines. A `~` before a line means ten seconds.
    fn log(message: &[&str]) -> Vec<String> {
        let mut ms = 0;
        let mut line = |message: &&str| {
            ms += if message.starts_with('~') { 10_000 } else { 1 };
            let message = message.trim_start_matches('~');
            format!("[2026-11-22 08:57:{:02}.{:03} Control 26733] {message}", ms / 1000, ms % 1000)
        };
        message.iter().map(&mut line).collect()
    }

    fn filtered(message: &[&str], begins: bool, silent: Duration) -> Vec<String> {
        let log = log(message);
        let lines: Vec<&str> = log.iter().map(String::as_str).collect();
        without(&lines, begins, silent).into_iter().map(|line| parts(&line).1.to_owned()).collect()
    }

    const ASKED: [&str; 5] = ["Accepting connection...", "NEW UI", "Cmd:get_server_list", "4711", "UI closed"];

    fn with(before: &[&'static str], after: &[&'static str]) -> Vec<&'static str> {
        [before, &ASKED, &ASKED, after].concat()
    }

    #[test]
    fn probes_are_left_out_and_events_between_them_stay() {
        assert_eq!(filtered(&ASKED, true, NOW), [""; 0]);
        let events = [
            "Accepting connection...",
            "NEW CLIENT 5 from user 0: Server already exists",
            "4711",
            "Server 4711 exited with status 1",
        ];
        assert_eq!(filtered(&with(&[&ASKED[..], &events].concat(), &[]), true, NOW), events);
        assert_eq!(
            filtered(&with(&["Starting control daemon"], &["~Server 4711 exited with status 1"]), true, NOW),
            ["Starting control daemon", "Server 4711 exited with status 1"]
        );
    }

    #[test]
    fn session_with_a_change_or_an_unknown_reply_is_shown() {
        for line in [
            "Cmd:set_default_active_thread_percentage 5",
            "Cmd:quit",
            "Server 4711 not found",
            "FAULT",
            "Insufficient privileges for UID 5",
        ] {
            let session = ["Accepting connection...", "NEW UI", "Cmd:get_server_list", line, "UI closed"];
            assert_eq!(filtered(&with(&session, &[]), true, NOW), session, "{line}");
        }
        // A session without a command is shown.
        let silent = ["Accepting connection...", "NEW UI", "UI closed"];
        assert_eq!(filtered(&with(&silent, &[]), true, NOW), silent);
        // A session in an unknown form is shown.
        assert_eq!(without(&["x", "NEW UI", "Cmd:get_server_list"], true, NOW).len(), 3);
    }

    #[test]
    fn open_session_is_shown_after_a_pause_and_stays_shown() {
        let open = ["Accepting connection...", "NEW UI"];
        assert_eq!(filtered(&with(&[], &open), true, NOW), [""; 0]);
        assert_eq!(filtered(&with(&[], &open), true, QUICK), open);
        let then = ["Accepting connection...", "NEW UI", "~Cmd:get_server_list", "UI closed"];
        let shown = then.map(|line| line.trim_start_matches('~'));
        assert_eq!(filtered(&with(&[], &then), true, NOW), shown);
        assert_eq!(filtered(&with(&then, &[]), true, NOW), shown);
    }

    #[test]
    fn cut_log_may_begin_anywhere() {
        for from in 0..ASKED.len() {
            let end = ["Accepting connection...", "NEW SERVER 4711: Ready"];
            let message = [&ASKED[from..], &ASKED, &end].concat();
            assert_eq!(filtered(&message, false, NOW), end, "from {from}");
        }
        assert_eq!(filtered(&["Server 7 exited with status 1"], false, NOW).len(), 1);
    }

    /// Checks every possible log of up to five lines.
    #[test]
    fn filter_shows_every_event() {
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
        let events = |message: &[&str]| message.iter().filter(|one| ["Cmd:quit", "NEW CLIENT 5"].contains(one)).count();
        for length in 0..=5u32 {
            for mut number in 0..2 * kinds.len().pow(length) {
                let mut message = Vec::new();
                for _ in 0..length {
                    message.push(kinds[number % kinds.len()]);
                    number /= kinds.len();
                }
                let shown = filtered(&message, number == 0, NOW);
                let shown: Vec<&str> = shown.iter().map(String::as_str).collect();
                assert_eq!(events(&shown), events(&message), "{message:?}");
            }
        }
    }
}
