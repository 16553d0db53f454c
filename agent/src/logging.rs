//! Logging that never blocks the agent.
//!
//! If journald has stopped or a pipe is full, writing to it blocks. So events are copied into a bounded queue
//! and a separate thread writes them. When the queue is full, events are counted and dropped, and the count is
//! logged once there is room.
//!
//! ```text
//! tracing event ─► QueueLayer ─► queue (1024) ─► writer thread ─► journald, or standard error
//!                     └─ full: dropped + 1
//! ```
//!
//! Events go to journald with fields (`GPUSH_OP`, `GPUSH_GPU`, `GPUSH_UID`) if standard error is the journal;
//! otherwise to standard error as text.

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
    Dispatch, Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    layer::{Context, SubscriberExt},
    reload,
};

/// Maximum number of queued events.
const QUEUE: usize = 1024;

/// Time that the end of the agent waits for the last lines.
const FLUSH: Duration = Duration::from_millis(200);

/// The log; flushed when dropped.
#[derive(Debug)]
pub(crate) struct Log {
    tx: SyncSender<Item>,
    filter: reload::Handle<EnvFilter, Registry>,
}

enum Item {
    Line(Line),
    Flush(SyncSender<()>),
}

/// A copy of an event.
#[derive(Debug)]
struct Line {
    level: Level,
    message: String,
    rest: String,
    op: Option<String>,
    gpu: Option<String>,
    uid: Option<String>,
}

/// Starts logging for the whole process.
pub(crate) fn start(filter: &str) -> Result<Log, String> {
    levels(filter)?;
    let filter = EnvFilter::try_new(filter).map_err(|error| format!("the log filter {filter:?}: {error}"))?;
    let (tx, rx) = sync_channel(QUEUE);
    let dropped = Arc::new(AtomicU64::new(0));
    let forward = QueueLayer { tx: tx.clone(), dropped: Arc::clone(&dropped) };
    let (filter, handle) = reload::Layer::new(filter);
    let front = tracing_subscriber::registry().with(filter).with(forward);
    tracing::subscriber::set_global_default(front).map_err(|error| error.to_string())?;
    thread::Builder::new()
        .name("log".to_owned())
        .spawn(move || write(&rx, &dropped))
        .map_err(|error| format!("the log's thread can't be started: {error}"))?;
    Ok(Log { tx, filter: handle })
}

/// Refuses a word that is not a level: the library would take it for a module's name and log nothing.
fn levels(filter: &str) -> Result<(), String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let level = |word: &str| LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level));
    for word in filter.split(',').map(str::trim) {
        let own = word.starts_with("gpush") || word.contains(['=', ':', '[']);
        if !word.is_empty() && !own && !level(word) && word.parse::<u8>().is_err() {
            let meant = nearest(word, LEVELS).map_or_else(String::new, |meant| format!(" (did you mean {meant}?)"));
            return Err(format!(
                "the log filter {filter:?}: {word} is not a level{meant}; the levels are {}; for one module write \
                gpushd::apply=debug",
                LEVELS.join(", ")
            ));
        }
    }
    Ok(())
}

impl Log {
    /// Changes the level.
    pub(crate) fn set_level(&self, level: LogLevel) {
        // This fails only if the subscriber is gone; then there is no log.
        let _ = self.filter.reload(EnvFilter::new(level.name()));
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

/// The layer that receives all events.
struct QueueLayer {
    tx: SyncSender<Item>,
    dropped: Arc<AtomicU64>,
}

impl<S: Subscriber> Layer<S> for QueueLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut line = Line {
            level: *metadata.level(),
            message: String::new(),
            rest: String::new(),
            op: None,
            gpu: None,
            uid: None,
        };
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
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            "op" => self.op = Some(value.to_owned()),
            "gpu" => self.gpu = Some(value.to_owned()),
            "uid" => self.uid = Some(value.to_owned()),
            name => {
                let _ = write!(self.rest, " {name}={value:?}");
            }
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        match field.name() {
            "message" | "op" | "gpu" | "uid" => self.record_str(field, &format!("{value:?}")),
            name => {
                let _ = write!(self.rest, " {name}={value:?}");
            }
        }
    }
}

fn write(rx: &Receiver<Item>, dropped: &AtomicU64) {
    let output = output();
    tracing::dispatcher::with_default(&output, || {
        while let Ok(item) = rx.recv() {
            match item {
                Item::Line(line) => line.write(),
                Item::Flush(done) => {
                    let _ = done.try_send(());
                }
            }
            let lost = dropped.swap(0, Ordering::Relaxed);
            if lost > 0 {
                tracing::warn!("{lost} log lines were dropped: the reader of the log was too slow");
            }
        }
    });
}

impl Line {
    fn write(self) {
        let Self { level, message, rest, op, gpu, uid } = self;
        let (op, gpu, uid) = (op.as_deref(), gpu.as_deref(), uid.as_deref());
        // Callsites are static, so each level needs one.
        macro_rules! at {
            ($level:ident) => {
                tracing::event!(Level::$level, op, gpu, uid, "{message}{rest}")
            };
        }
        match level {
            Level::ERROR => at!(ERROR),
            Level::WARN => at!(WARN),
            Level::INFO => at!(INFO),
            Level::DEBUG => at!(DEBUG),
            Level::TRACE => at!(TRACE),
        }
    }
}

/// Returns where the writer thread writes.
fn output() -> Dispatch {
    if stderr_is_the_journal()
        && let Ok(journald) = tracing_journald::layer()
    {
        let journald = journald.with_field_prefix(Some("GPUSH".to_owned())).with_syslog_identifier("gpushd".to_owned());
        return Dispatch::new(tracing_subscriber::registry().with(journald));
    }
    let terminal = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let text = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(terminal).with_target(false);
    Dispatch::new(tracing_subscriber::registry().with(text))
}

/// systemd sets the device and inode of the stream that it connected to standard error.
fn stderr_is_the_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let Ok(stat) = std::fs::metadata("/proc/self/fd/2") else { return false };
    stream == format!("{}:{}", stat.dev(), stat.ino())
}

#[cfg(test)]
mod tests {
    use super::levels;

    #[test]
    fn unknown_log_level_is_refused() {
        for right in ["info", "WARN", "", "info,gpushd::apply=debug", "gpushd=trace", "off", "3", "hyper=info, debug"] {
            assert_eq!(levels(right), Ok(()), "{right}");
        }
        assert!(levels("foo").unwrap_err().contains("foo is no level; there are off, error"));
        assert!(levels("info,debg").unwrap_err().contains("did you mean debug?"));
    }
}
