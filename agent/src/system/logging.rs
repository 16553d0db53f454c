//! Logging that never blocks gpushd.
//!
//! Writing to the log blocks if journald has stopped or a pipe is full. So gpushd copies events into a queue, and a
//! separate thread writes them. If the queue is full, gpushd drops and counts events, and logs the count later.
//!
//! ```text
//! tracing event ─► QueueLayer ─► queue (1024) ─► writer thread ─► journald, or standard error
//!                     └─ full: dropped + 1
//! ```
//!
//! If standard error is the journal, events go to journald, otherwise to standard error as text. In the journal, the
//! fields in [`OBJECTS`] are fields of the entry, with the prefix `GPUSH_`: `journalctl GPUSH_GPU=GPU-…`. Other fields
//! follow the message as text. `CODE_FILE`, `CODE_LINE` and `TARGET` are those of the original event.

use std::{
    fmt::Write as _,
    io::IsTerminal,
    os::unix::fs::MetadataExt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::Duration,
};

use gpush_core::{config::LogLevel, nearest::nearest};
use tracing::{
    Dispatch, Event, Metadata, Subscriber,
    field::{DisplayValue, Field, Value, Visit, display},
};
use tracing_subscriber::{
    Layer, Registry,
    filter::{LevelFilter, Targets},
    layer::{Context, SubscriberExt},
    reload,
};

/// Fields that name the object of an event. In the journal, each becomes a field of the entry.
const OBJECTS: [&str; 6] = ["gpu", "mig", "lease", "operation", "uid", "mps"];

/// Maximum number of queued events.
const QUEUE: usize = 1024;

/// Maximum time that gpushd waits at exit until the last lines are written.
const FLUSH: Duration = Duration::from_millis(200);

/// The log. Dropping this value writes the events that are still queued.
#[derive(Debug)]
pub(crate) struct Log {
    tx: SyncSender<Item>,
    filter: reload::Handle<Targets, Registry>,
}

enum Item {
    Line(Line),
    Flush(SyncSender<()>),
}

/// A copy of an event.
#[derive(Debug)]
struct Line {
    /// The source of the event, and the names of its fields.
    metadata: &'static Metadata<'static>,
    /// The values of the event's fields, in the order of the metadata. `None` if a field has no value.
    values: Vec<Option<LoggedValue>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum LoggedValue {
    /// A text, which the log shows in quotes.
    Text(String),
    /// A number or another value, which the log shows without quotes.
    Plain(String),
}

/// Starts logging for the whole process.
pub(crate) fn start(filter: &str) -> Result<Log, String> {
    let filter = parse_filter(filter)?;
    let (tx, rx) = sync_channel(QUEUE);
    let dropped = Arc::new(AtomicU64::new(0));
    let forward = QueueLayer { tx: tx.clone(), dropped: Arc::clone(&dropped) };
    let (filter, handle) = reload::Layer::new(filter);
    let front = tracing_subscriber::registry().with(filter).with(forward);
    tracing::subscriber::set_global_default(front).map_err(|error| error.to_string())?;
    thread::Builder::new()
        .name("log".to_owned())
        .spawn(move || write(&rx, &dropped))
        .map_err(|error| format!("the thread that writes the log can't be started: {error}"))?;
    Ok(Log { tx, filter: handle })
}

/// Parses a filter such as `info,gpushd::operations::apply=debug`. Refuses a word that is neither a level nor a
/// module: `Targets` would treat it as a module, and log nothing.
fn parse_filter(filter: &str) -> Result<Targets, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let is_level = |word: &str| LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level)) || is_number(word);
    let words: Vec<&str> = filter.split(',').map(str::trim).filter(|word| !word.is_empty()).collect();
    for word in &words {
        let (module, level) = match word.split_once('=') {
            Some((module, level)) => (Some(module), Some(level)),
            None if word.starts_with("gpush") || word.contains("::") => (Some(*word), None),
            None => (None, Some(*word)),
        };
        if let Some(module) = module.filter(|module| !is_module(module)) {
            return Err(format!(
                "the log filter {filter:?}: `{module}` is not a module; to set the level of one module, write \
                 `gpushd::operations::apply=debug`"
            ));
        }
        if let Some(level) = level.filter(|level| !is_level(level)) {
            let meant = nearest(level, LEVELS).map_or_else(String::new, |meant| format!(" (did you mean {meant}?)"));
            return Err(format!(
                "the log filter {filter:?}: `{level}` is not a log level{meant}; the levels are {}; to set the level \
                 of one module, write `gpushd::operations::apply=debug`",
                LEVELS.join(", ")
            ));
        }
    }
    words.join(",").parse().map_err(|error| format!("the log filter {filter:?} is not valid: {error}"))
}

/// Returns whether a word is the number of a level.
fn is_number(word: &str) -> bool {
    word.parse::<u8>().is_ok_and(|number| number <= 5)
}

/// Returns whether a word can be the path of a module.
fn is_module(word: &str) -> bool {
    !word.is_empty() && word.chars().all(|letter| letter.is_ascii_alphanumeric() || "_:-".contains(letter))
}

impl Log {
    /// Changes the level.
    pub(crate) fn set_level(&self, level: LogLevel) {
        // This fails only if the subscriber no longer exists, and then there is no log.
        let _ = self.filter.reload(Targets::new().with_default(level_filter(level)));
    }
}

fn level_filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let (done, wait) = sync_channel(1);
        if self.tx.try_send(Item::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(FLUSH);
        }
    }
}

/// The layer that receives all events and queues them.
struct QueueLayer {
    tx: SyncSender<Item>,
    dropped: Arc<AtomicU64>,
}

impl<S: Subscriber> Layer<S> for QueueLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut line = Line { metadata, values: vec![None; metadata.fields().len()] };
        event.record(&mut line);
        match self.tx.try_send(Item::Line(line)) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        if let Some(slot) = self.values.get_mut(field.index()) {
            *slot = Some(LoggedValue::Text(value.to_owned()));
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if let Some(slot) = self.values.get_mut(field.index()) {
            *slot = Some(LoggedValue::Plain(format!("{value:?}")));
        }
    }
}

fn write(rx: &Receiver<Item>, dropped: &AtomicU64) {
    let is_journal = stderr_is_the_journal();
    let output = output(is_journal);
    tracing::dispatcher::with_default(&output, || {
        while let Ok(item) = rx.recv() {
            match item {
                Item::Line(line) if is_journal => line.for_journal().write(&output),
                Item::Line(line) => line.write(&output),
                Item::Flush(done) => {
                    let _ = done.try_send(());
                }
            }
            let lost = dropped.swap(0, Ordering::Relaxed);
            if lost > 0 {
                tracing::warn!("{lost} log lines were dropped, because the reader of the log was too slow");
            }
        }
    });
}

impl LoggedValue {
    /// Returns the text in a form that the log shows without quotes.
    fn plain(&self) -> DisplayValue<&str> {
        let (Self::Text(text) | Self::Plain(text)) = self;
        display(text.as_str())
    }
}

impl Line {
    /// Moves the fields that do not name an object into the message.
    fn for_journal(mut self) -> Self {
        let mut text = String::new();
        let mut message = None;
        for field in self.metadata.fields() {
            let Some(value) = self.values.get_mut(field.index()) else { continue };
            match field.name() {
                "message" => message = Some(field.index()),
                name if OBJECTS.contains(&name) => {}
                name => {
                    let _ = match value.take() {
                        Some(LoggedValue::Text(value)) => write!(text, " {name}={value:?}"),
                        Some(LoggedValue::Plain(value)) => write!(text, " {name}={value}"),
                        None => Ok(()),
                    };
                }
            }
        }
        if let Some(message) = message.and_then(|at| self.values.get_mut(at)) {
            let (LoggedValue::Text(message) | LoggedValue::Plain(message)) =
                message.get_or_insert_with(|| LoggedValue::Text(String::new()));
            message.push_str(&text);
        }
        self
    }

    /// Sends the event to `to`, with the metadata of the original event.
    fn write(&self, to: &Dispatch) {
        let plain: Vec<_> = self.values.iter().map(|value| value.as_ref().map(LoggedValue::plain)).collect();
        let values: Vec<Option<&dyn Value>> = (self.values.iter().zip(&plain))
            .map(|(value, plain)| match value {
                Some(LoggedValue::Text(text)) => Some(text as &dyn Value),
                Some(LoggedValue::Plain(_)) => plain.as_ref().map(|plain| plain as &dyn Value),
                None => None,
            })
            .collect();
        to.event(&Event::new(self.metadata, &self.metadata.fields().value_set_all(&values)));
    }
}

/// Returns the subscriber that writes events: to the journal, or as text to standard error.
fn output(is_journal: bool) -> Dispatch {
    if is_journal && let Ok(journald) = tracing_journald::layer() {
        let journald = journald.with_field_prefix(Some("GPUSH".to_owned())).with_syslog_identifier("gpushd".to_owned());
        return Dispatch::new(tracing_subscriber::registry().with(journald));
    }
    let terminal = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let text = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(terminal).with_target(false);
    Dispatch::new(tracing_subscriber::registry().with(text))
}

/// Returns whether standard error is connected to the journal. systemd sets `JOURNAL_STREAM` to the device and inode of
/// the stream.
fn stderr_is_the_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stat) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", stat.dev(), stat.ino())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicU64, mpsc::sync_channel};

    use tracing::Level;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::{Item, Line, QueueLayer, parse_filter};

    /// Returns the copy of the event that calling `log` emits.
    fn copied(log: impl FnOnce()) -> Line {
        let (tx, rx) = sync_channel(1);
        let forward = QueueLayer { tx, dropped: Arc::new(AtomicU64::new(0)) };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(forward), log);
        match rx.try_recv() {
            Ok(Item::Line(line)) => line,
            Ok(Item::Flush(_)) | Err(_) => panic!("an event was logged"),
        }
    }

    #[test]
    fn objects_stay_fields_and_the_rest_follows_the_message() {
        let line = copied(|| tracing::warn!(gpu = "GPU-1", pid = 7, lease = %"L17", "cannot {}", "end")).for_journal();
        let value = |name: &str| {
            let field = line.metadata.fields().field(name).expect("a field of the event");
            line.values[field.index()].as_ref().map(|value| value.plain().to_string())
        };
        assert_eq!(value("message").as_deref(), Some("cannot end pid=7"));
        assert_eq!((value("gpu").as_deref(), value("lease").as_deref()), (Some("GPU-1"), Some("L17")));
        assert_eq!(value("pid"), None);
        assert_eq!(line.metadata.target(), module_path!());
        assert!(line.metadata.file().is_some_and(|file| file.ends_with("agent/src/system/logging.rs")));
    }

    #[test]
    fn unknown_log_level_is_refused() {
        for right in [
            "info",
            "WARN",
            "",
            "info,gpushd::operations::apply=debug",
            "gpushd=trace",
            "off",
            "3",
            "hyper=info, debug",
        ] {
            assert!(parse_filter(right).is_ok(), "{right}");
        }
        assert!(parse_filter("foo").unwrap_err().contains("`foo` is not a log level; the levels are off, error"));
        assert!(parse_filter("info,debg").unwrap_err().contains("did you mean debug?"));
        assert!(parse_filter("gpushd::modes::mps=inof").unwrap_err().contains("did you mean info?"));
        for wrong in ["*=debug", "=info", "gpushd[span]=debug", "gpushd=", "7"] {
            assert!(parse_filter(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn filter_sets_the_level_of_a_module() {
        let filter = parse_filter("warn, gpushd::operations::apply=debug").expect("a filter");
        for (target, level, enabled) in [
            ("gpushd::operations::apply::executor", Level::DEBUG, true),
            ("gpushd::operations::apply::executor", Level::TRACE, false),
            ("gpushd::modes::mps", Level::WARN, true),
            ("gpushd::modes::mps", Level::INFO, false),
        ] {
            assert_eq!(filter.would_enable(target, &level), enabled, "{target} {level}");
        }
    }
}
