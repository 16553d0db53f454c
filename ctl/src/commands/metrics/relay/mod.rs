//! `gpushctl metrics serve`: an unprivileged relay between Prometheus and gpushd. gpushd itself opens no TCP port.
//!
//! ```text
//! scraper ──TCP──► connections ──► answers ──► upstream ──socket──► gpushd
//!                  limits, TLS     passwords   one request for all who ask within a second
//! ```
//!
//! gpushd decides by the peer's uid what the relay may see. Without a password, every local user can reach the relay, so
//! the relay then requests only what every user may see.
//!
//! | file | subject |
//! |---|---|
//! | `settings` | the web config and its files, read again when they change |
//! | `protection` | who can change these files |
//! | `tls` | certificates and keys |
//! | `connections` | the limits of connections |
//! | `response_deadline` | the time limit for a scraper that reads slowly |
//! | `slots` | counters for what runs at the same time, in total and for each address |
//! | `answers` | paths and statuses |
//! | `passwords` | the check of passwords |
//! | `upstream` | requests to gpushd |

mod answers;
mod connections;
mod passwords;
mod protection;
mod response_deadline;
mod settings;
mod slots;
mod tls;
mod upstream;

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use gpush_api::{ApiError, Code};
use gpush_host::notify::{self, Notification};
use serde::Serialize;
use tokio::{
    net::{TcpListener, TcpStream},
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    time::Instant,
};

use self::{
    answers::{FailureLog, RelayAnswers},
    connections::Connections,
    passwords::Passwords,
    settings::{Loaded, RelaySettings, SettingsSource, Stamps},
    upstream::Upstream,
};
use crate::{
    args::{Global, MetricsServeArgs},
    exit::{self, Failure, Outcome},
    output::Output,
    render::trouble,
    socket,
};

/// The output of `gpushctl metrics serve --json`, once the relay serves.
#[derive(Serialize)]
pub(in crate::commands) struct ServedMetrics<'a> {
    /// Where the relay serves.
    pub(in crate::commands) url: &'a str,
    /// Whether a scraper needs a password. If not, the relay serves only what every user may see.
    pub(in crate::commands) has_password: bool,
}

/// Minimum time between two checks whether the files of the web config have changed.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Pause after a connection that could not be accepted, for example because the process has too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub(super) fn serve(global: &Global, args: MetricsServeArgs, out: &Output) -> Outcome {
    let source = SettingsSource { web_config: args.web_config, listen: args.listen };
    let mut stamps = Stamps::default();
    let loaded = source.load(&mut stamps)?;
    crate::commands::runtime()?.block_on(async {
        let signals = Signals::new().map_err(|error| exit::io("cannot receive signals", &error))?;
        let listener = listen(&source).await?;
        let upstream = Upstream::new(socket::chosen(global), global.request_timeout);
        let passwords = Passwords::new()
            .map_err(|_| ApiError::new(Code::Internal, "cannot get random numbers from the operating system"))?;
        let reloader = Reloader::new(source, loaded, stamps, out);
        run(reloader, &listener, signals, upstream, passwords).await?;
        Ok(0)
    })
}

async fn listen(source: &SettingsSource) -> Result<TcpListener, ApiError> {
    TcpListener::bind(source.listen).await.map_err(|error| {
        let port = source.listen.port();
        let hint = match error.kind() {
            std::io::ErrorKind::AddrInUse => format!("`ss -ltnp sport = :{port}` shows which program uses the port"),
            std::io::ErrorKind::PermissionDenied => "use a port above 1023, such as --listen 127.0.0.1:9945".to_owned(),
            _ => "`ip address` lists the addresses of this host".to_owned(),
        };
        exit::io(format!("cannot listen on {}", source.listen), &error).hint(hint)
    })
}

/// The signals to which the relay reacts.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        let [interrupt, terminate, hangup] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        Ok(Self { interrupt: interrupt?, terminate: terminate?, hangup: hangup? })
    }
}

/// Accepts connections until a signal ends the relay.
async fn run(
    mut reloader: Reloader<'_>,
    listener: &TcpListener,
    mut signals: Signals,
    upstream: Upstream,
    passwords: Passwords,
) -> Result<(), Failure> {
    announce(listener, &reloader.current.borrow(), reloader.out)?;
    let answers = RelayAnswers {
        settings: reloader.current.subscribe(),
        upstream,
        passwords,
        failures: FailureLog { failing: AtomicBool::new(false), is_printed: !reloader.out.json },
    };
    let connections = Connections::new(Arc::new(answers));
    notify::send(Notification::Ready);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    reloader.reload_if_changed();
                    // Answers are complete texts, so waiting for more data would only delay them.
                    let _ = TcpStream::set_nodelay(&stream, true);
                    connections.begin(stream, peer.ip());
                }
                // The scraper has already closed the connection, or a limit of the process is reached.
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            },
            _ = signals.hangup.recv() => reloader.reload(),
            _ = signals.terminate.recv() => break,
            _ = signals.interrupt.recv() => break,
        }
    }
    notify::send(Notification::Stopping);
    Ok(())
}

/// Says where the relay serves.
fn announce(listener: &TcpListener, settings: &RelaySettings, out: &Output) -> Result<(), Failure> {
    // Print the port that the system chose for port 0.
    let address = listener.local_addr().map(|address| address.to_string()).unwrap_or_default();
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://{address}/metrics");
    if out.json {
        return out.document(&ServedMetrics { url: &url, has_password: settings.config.has_password() });
    }
    out.remark(&format!("serving metrics at {url}\n"));
    if !settings.config.has_password() {
        out.remark("without a password, only the metrics that every user may see are served\n");
    }
    Ok(())
}

/// Reads the web config again. While its files are invalid, the relay keeps the previous settings, so that an error in a
/// file never removes the protection. Only a restart removes TLS or passwords.
struct Reloader<'o> {
    source: SettingsSource,
    stamps: Stamps,
    checked: Instant,
    current: watch::Sender<Arc<RelaySettings>>,
    out: &'o Output,
}

impl<'o> Reloader<'o> {
    fn new(source: SettingsSource, loaded: Loaded, stamps: Stamps, out: &'o Output) -> Self {
        print_all(out, "warning", &loaded.warnings);
        let current = watch::Sender::new(Arc::new(loaded.settings));
        Self { source, stamps, checked: Instant::now(), current, out }
    }

    fn reload_if_changed(&mut self) {
        if self.checked.elapsed() < CHECK_INTERVAL {
            return;
        }
        self.checked = Instant::now();
        if self.stamps.have_changed() {
            self.reload();
        }
    }

    fn reload(&mut self) {
        let loaded = self.source.load(&mut self.stamps).and_then(|loaded| {
            let lost = self.current.borrow().protection_lost_in(&loaded.settings);
            lost.map_or(Ok(loaded), |lost| Err(self.source.unprotected(lost)))
        });
        match loaded {
            Ok(loaded) => {
                print_all(self.out, "warning", &loaded.warnings);
                self.current.send_replace(Arc::new(loaded.settings));
                self.out.remark("read the web config again\n");
            }
            Err(error) => {
                print_all(self.out, "error", &[error]);
                self.out.remark("the previous settings stay in use\n");
            }
        }
    }
}

fn print_all(out: &Output, word: &str, errors: &[ApiError]) {
    for error in errors {
        out.remark(&(trouble::lines(word, error, 0, &out.look).join("\n") + "\n"));
    }
}
