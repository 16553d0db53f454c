//! Output: results go to stdout; errors and progress go to stderr. With `--json`, stdout has exactly one document, and
//! stderr is empty.

use std::{
    borrow::Cow,
    io::{IsTerminal, Write},
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::ExitCode,
};

use anstream::{AutoStream, ColorChoice};
use gpush_api::{ApiError, Code, Gpu, Lease, OverrideEnded};
use gpush_core::lease::environment;
use serde::Serialize;

use crate::{
    args::{Color, Format, Global},
    exit::{self, Failure, Outcome},
    render::{Appearance, Charset, listing::Listing, trouble},
    socket,
};

/// Width of the output in columns, if the width of the terminal is not known.
const USUAL_WIDTH: usize = 80;

/// What a command prints. This determines the permitted formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prints {
    /// A list.
    List,
    /// The environment of a lease.
    Environment,
    /// Something else.
    Other,
}

/// The output settings of this run.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) json: bool,
    pub(crate) look: Appearance,
    format: Format,
    color: ColorChoice,
    /// The typed command with `--wait`, as a hint.
    waiting: Option<String>,
}

/// The `--json` document for an error: `{"error": {"code": …}}`.
#[derive(Serialize)]
pub(crate) struct ErrorDocument<'a> {
    pub(crate) error: &'a ApiError,
}

/// The `--json` document of a command that changes something: the fields of `result`, and `changed`.
#[derive(Serialize)]
pub(crate) struct ChangeDocument<'a, T> {
    /// Whether the command has changed something. If false, everything was as requested before.
    pub(crate) changed: bool,
    #[serde(flatten)]
    pub(crate) result: &'a T,
}

/// The GPUs that a command changed.
#[derive(Serialize)]
pub(crate) struct ChangedGpus<'a> {
    pub(crate) gpus: &'a [Gpu],
}

/// The leases that a command changed.
#[derive(Serialize)]
pub(crate) struct ChangedLeases<'a> {
    pub(crate) leases: &'a [Lease],
}

/// The overrides that a command ended.
#[derive(Serialize)]
pub(crate) struct EndedOverrides<'a> {
    pub(crate) ended_overrides: &'a [OverrideEnded],
}

impl Output {
    /// Prints the error of a command, if any, and returns the exit status of the process.
    pub(crate) fn finish(&self, outcome: Outcome) -> ExitCode {
        match outcome {
            Ok(status) => ExitCode::from(status),
            Err(Failure::BrokenPipe) => ExitCode::SUCCESS,
            Err(Failure::Error(error)) => {
                self.error(&error);
                ExitCode::from(error.code.exit_status())
            }
        }
    }

    pub(crate) fn new(global: &Global) -> Self {
        let color = match global.color {
            Color::Auto => ColorChoice::Auto,
            Color::Always => ColorChoice::Always,
            Color::Never => ColorChoice::Never,
        };
        let charset = if global.ascii || !locale_is_utf8(|name| std::env::var(name).ok()) {
            Charset::Ascii
        } else {
            Charset::Utf8
        };
        let format = if global.json { Format::Json } else { global.output.unwrap_or(Format::Table) };
        let look = Appearance {
            width: width(),
            wraps: format == Format::Table && std::io::stdout().is_terminal(),
            headings: !global.no_headers,
            wide: format == Format::Wide,
            exact: format == Format::Csv,
            charset,
            is_administrator: is_administrator(&socket::chosen(global).path),
            now: jiff::Timestamp::now(),
        };
        Self { json: format == Format::Json, look, format, color, waiting: None }
    }

    /// Adds this hint to temporary errors.
    pub(crate) fn with_waiting_hint(self, hint: Option<String>) -> Self {
        Self { waiting: hint, ..self }
    }

    /// Prints text for users.
    pub(crate) fn text(&self, text: &str) -> Result<(), Failure> {
        let text = self.look.for_reader(text);
        let text = self.dressed(&text, &std::io::stdout());
        self.verbatim(text.as_bytes())
    }

    /// Returns text with colors if the stream supports them. stdout may be a terminal although stderr is not, so each
    /// stream decides separately.
    ///
    /// Converts the whole text at once, because a stream adapter would write it in small pieces. On a large host, these
    /// writes would take longer than everything else.
    fn dressed<'t>(&self, text: &'t str, stream: &impl anstream::stream::RawStream) -> Cow<'t, str> {
        match self.choice(stream) {
            ColorChoice::Never => Cow::Owned(anstream::adapter::strip_str(text).to_string()),
            ColorChoice::Auto | ColorChoice::AlwaysAnsi | ColorChoice::Always => Cow::Borrowed(text),
        }
    }

    fn choice(&self, stream: &impl anstream::stream::RawStream) -> ColorChoice {
        match self.color {
            ColorChoice::Auto => AutoStream::choice(stream),
            ColorChoice::AlwaysAnsi | ColorChoice::Always | ColorChoice::Never => self.color,
        }
    }

    /// Prints bytes unchanged, such as a script or TOML.
    pub(crate) fn verbatim(&self, bytes: &[u8]) -> Result<(), Failure> {
        let mut stdout = std::io::stdout().lock();
        written(stdout.write_all(bytes).and_then(|()| stdout.flush()))
    }

    /// Prints one JSON document.
    pub(crate) fn document<T: Serialize>(&self, value: &T) -> Result<(), Failure> {
        self.verbatim(&json(value)?)
    }

    /// Prints one of several JSON documents, on one line.
    pub(crate) fn json_line<T: Serialize>(&self, value: &T) -> Result<(), Failure> {
        let mut line = serde_json::to_vec(value).map_err(|e| unwritable(&e))?;
        line.push(b'\n');
        self.verbatim(&line)
    }

    /// Returns the appearance with the present time. The command may have waited long for its answer. With the time at
    /// which the command started, ages would be too short, and remaining times too long.
    fn look_now(&self) -> Appearance {
        Appearance { now: jiff::Timestamp::now(), ..self.look }
    }

    /// Prints a value as JSON, or as the text that `draw` returns.
    pub(crate) fn show<T: Serialize>(
        &self,
        value: &T,
        draw: impl FnOnce(&Appearance) -> String,
    ) -> Result<(), Failure> {
        if self.json { self.document(value) } else { self.text(&draw(&self.look_now())) }
    }

    /// Prints the result of a command that changes something, as JSON or as the text that `draw` returns. The JSON also
    /// says whether the command has changed something.
    pub(crate) fn change<T: Serialize>(
        &self,
        changed: bool,
        result: &T,
        draw: impl FnOnce(&Appearance) -> String,
    ) -> Result<(), Failure> {
        self.show(&ChangeDocument { changed, result }, draw)
    }

    /// Prints a list in the requested format.
    pub(crate) fn list<T: Serialize>(
        &self,
        value: &T,
        listing: impl FnOnce(&Appearance) -> Listing,
    ) -> Result<(), Failure> {
        if self.json {
            return self.document(value);
        }
        let listing = listing(&self.look_now());
        match self.format {
            Format::Json | Format::Table | Format::Wide if self.look.headings => self.text(listing.text()),
            Format::Json | Format::Table | Format::Wide => self.text(listing.text_without_headings()),
            Format::Name => self.verbatim(listing.name_lines().as_bytes()),
            Format::Csv => self.verbatim(listing.csv(self.look.headings).as_bytes()),
            Format::Uuid => match listing.uuid_lines() {
                Some(lines) => self.verbatim(lines.as_bytes()),
                None => {
                    let error = ApiError::new(Code::BadRequest, "the entries of this list have no UUID");
                    Err(error.hint("use `-o name`").into())
                }
            },
            Format::Sh | Format::Fish | Format::Csh | Format::Docker => Err(self.only_for_environments().into()),
        }
    }

    /// Returns the format in which to print the environment of a lease.
    ///
    /// # Errors
    /// If the user requested a format that is only for lists.
    pub(crate) fn environment_format(&self) -> Result<environment::Format, ApiError> {
        Ok(match self.format {
            Format::Table | Format::Wide | Format::Sh => environment::Format::Shell,
            Format::Fish => environment::Format::Fish,
            Format::Csh => environment::Format::Csh,
            Format::Json => environment::Format::Json,
            Format::Docker => environment::Format::Docker,
            Format::Name | Format::Uuid | Format::Csv => {
                let message =
                    format!("`-o {}` is only for lists, but this command prints an environment", self.format.name());
                let error = ApiError::new(Code::BadRequest, message);
                return Err(error.hint("use `-o sh`, `-o json` or `-o docker`"));
            }
        })
    }

    fn only_for_environments(&self) -> ApiError {
        let message = format!("`-o {}` is for `gpushctl lease env` only", self.format.name());
        ApiError::new(Code::BadRequest, message).hint("use `-o table` or `-o json`")
    }

    /// Returns the same output without remarks, for a picture that fills the terminal.
    pub(crate) fn without_remarks(&self) -> Self {
        Self { json: true, look: self.look, format: self.format, color: self.color, waiting: None }
    }

    /// Returns whether text on stdout has colors.
    pub(crate) fn is_colored(&self) -> bool {
        self.choice(&std::io::stdout()) != ColorChoice::Never
    }

    /// Returns whether the output is for users, not for programs.
    pub(crate) fn is_drawn(&self) -> bool {
        matches!(self.format, Format::Table | Format::Wide)
    }

    /// Returns whether the user wants more columns and lines (`-o wide`).
    pub(crate) fn is_wide(&self) -> bool {
        self.format == Format::Wide
    }

    /// Returns the error if the command cannot print in the requested format.
    pub(crate) fn unsupported_format(&self, prints: Prints) -> Option<ApiError> {
        match (self.format, prints) {
            (_, Prints::Environment)
            | (Format::Table | Format::Wide | Format::Json, _)
            | (Format::Name | Format::Uuid | Format::Csv, Prints::List) => None,
            (Format::Name | Format::Uuid | Format::Csv, Prints::Other) => {
                let message =
                    format!("`-o {}` is only for lists, but this command does not print a list", self.format.name());
                Some(ApiError::new(Code::BadRequest, message).hint("use `-o json`"))
            }
            (Format::Sh | Format::Fish | Format::Csh | Format::Docker, Prints::List | Prints::Other) => {
                Some(self.only_for_environments())
            }
        }
    }

    /// Returns whether gpushctl can ask the user a question: stdin and stdout are terminals, and the output is for
    /// users.
    pub(crate) fn can_ask(&self) -> bool {
        self.is_drawn() && std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
    }

    /// Asks the user a question on stderr. Returns whether the answer is yes.
    pub(crate) fn confirmed(&self, question: &str) -> Result<bool, Failure> {
        let answer = self.answer(&format!("{question} [y/N] "))?;
        Ok(answer.is_some_and(|answer| matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes")))
    }

    /// Asks the user a question on stderr. Returns the line that the user types; `None` if stdin has ended.
    pub(crate) fn answer(&self, question: &str) -> Result<Option<String>, Failure> {
        self.remark(question);
        let _ = std::io::stderr().flush();
        let mut answer = String::new();
        let read = std::io::stdin()
            .read_line(&mut answer)
            .map_err(|error| exit::io("cannot read your answer from stdin", &error))?;
        Ok((read > 0).then_some(answer))
    }

    /// Prints an error on stderr. With `--json`, prints it as the document on stdout.
    pub(crate) fn error(&self, error: &ApiError) {
        let error = &with_waiting_hint(error, self.waiting.as_deref());
        if self.json {
            error_document(error);
            return;
        }
        let lines = trouble::lines("error", error, 0, &self.look);
        self.remark(&(lines.join("\n") + "\n"));
    }

    /// Prints a remark on stderr, in addition to the result. Prints nothing with `--json`.
    pub(crate) fn remark(&self, text: &str) {
        if !self.json {
            let mut stderr = std::io::stderr();
            let text = self.look.for_reader(text);
            let text = self.dressed(&text, &stderr);
            let _ = stderr.write_all(text.as_bytes());
        }
    }
}

/// Adds the hint about `--wait` to an error, if waiting may help.
fn with_waiting_hint<'e>(error: &'e ApiError, waiting: Option<&str>) -> Cow<'e, ApiError> {
    let Some(waiting) = waiting.filter(|_| error.is_temporary()) else { return Cow::Borrowed(error) };
    let hint = error.hint.as_ref().map_or_else(|| waiting.to_owned(), |hint| format!("{hint}; {waiting}"));
    Cow::Owned(ApiError { hint: Some(hint), ..error.clone() })
}

/// Returns whether gpushd will certainly treat this user as an administrator. This is true for root, and for the user
/// that gpushd runs as.
fn is_administrator(socket: &Path) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    socket.metadata().is_ok_and(|socket| own == 0 || socket.uid() == own)
}

/// Prints an error as the JSON document. Works even if the command line could not be parsed.
pub(crate) fn error_document(error: &ApiError) {
    if let Ok(bytes) = json(&ErrorDocument { error }) {
        // Ignore an error: if stdout is closed, only the exit status can report a failure.
        let _ = std::io::stdout().lock().write_all(&bytes);
    }
}

fn json<T: Serialize>(value: &T) -> Result<Vec<u8>, ApiError> {
    let mut bytes = serde_json::to_vec_pretty(value).map_err(|e| unwritable(&e))?;
    bytes.push(b'\n');
    Ok(bytes)
}

fn unwritable(cause: &serde_json::Error) -> ApiError {
    ApiError::new(gpush_api::Code::Internal, "cannot write the output as JSON").cause(cause.to_string())
}

fn written(result: std::io::Result<()>) -> Result<(), Failure> {
    match result {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Err(Failure::BrokenPipe),
        Err(e) => Err(crate::exit::io("cannot write to stdout", &e).into()),
    }
}

/// Returns the width of the terminal, or `COLUMNS` if stdout is not a terminal.
fn width() -> usize {
    let stdout = std::io::stdout();
    if stdout.is_terminal()
        && let Some((terminal_size::Width(columns), _)) = terminal_size::terminal_size_of(&stdout)
        && columns > 0
    {
        return usize::from(columns);
    }
    let columns = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    columns.filter(|n| (20..=1000).contains(n)).unwrap_or(USUAL_WIDTH)
}

/// Returns whether the locale uses UTF-8. The first variable that is set decides.
fn locale_is_utf8(variable: impl Fn(&str) -> Option<String>) -> bool {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().filter_map(variable).find(|value| !value.is_empty());
    locale.is_some_and(|name| {
        let name = name.to_ascii_lowercase();
        name.contains("utf-8") || name.contains("utf8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hint_about_waiting_is_added_to_temporary_errors_only() {
        let hint = |error: ApiError| with_waiting_hint(&error, Some("wait")).hint.clone();
        let blocked = || ApiError::new(Code::Blocked, "GPU 0 is in use");
        assert_eq!(hint(blocked().retryable()).as_deref(), Some("wait"));
        assert_eq!(hint(blocked().hint("stop pid 7").retryable()).as_deref(), Some("stop pid 7; wait"));
        assert_eq!(hint(blocked()), None);
        assert_eq!(hint(ApiError::new(Code::Unavailable, "gpushd starts").retryable()), None);
    }

    /// Fault: `lease request --for 60` showed an end in 61 seconds, because the period counted from the start of the
    /// command.
    #[test]
    fn output_shows_periods_from_the_present_time() {
        let look = crate::render::fixtures::look(80, Charset::Ascii);
        let out = Output { json: false, look, format: Format::Table, color: ColorChoice::Never, waiting: None };
        let before = jiff::Timestamp::now();
        let drawn = std::cell::Cell::new(look.now);
        let text = |look: &Appearance| {
            drawn.set(look.now);
            String::new()
        };
        out.show(&(), text).unwrap();
        assert!(look.now < before && drawn.get() >= before);
    }

    #[test]
    fn owner_of_the_socket_is_an_administrator() {
        let dir = tempfile::tempdir().unwrap();
        assert!(is_administrator(dir.path()));
        assert!(!is_administrator(&dir.path().join("none")), "there is no agent");
    }

    #[test]
    fn locale_variables_apply_in_the_posix_order() {
        let utf8 = |set: &[(&str, &str)]| {
            locale_is_utf8(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
        };
        assert!(!utf8(&[]), "no locale is the C locale");
        assert!(utf8(&[("LANG", "de_DE.UTF-8")]));
        assert!(utf8(&[("LANG", "C.utf8")]));
        assert!(!utf8(&[("LANG", "de_DE.UTF-8"), ("LC_ALL", "C")]));
        assert!(!utf8(&[("LANG", "en_US.UTF-8"), ("LC_CTYPE", "POSIX")]));
        assert!(utf8(&[("LANG", "C"), ("LC_CTYPE", "C.UTF-8"), ("LC_ALL", "")]));
    }
}
