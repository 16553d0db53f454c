//! The answers of the relay: paths, statuses and the header of the content.

use std::{
    io::Write as _,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use gpush_client::MetricsView;
use gpush_openmetrics::Format;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{self, HeaderValue},
};
use tokio::sync::watch;

use super::{
    passwords::{Passwords, Verdict},
    settings::RelaySettings,
    upstream::Upstream,
};

/// The page at `/`.
const START_PAGE: &str =
    "<!doctype html><title>gpush</title><p>The metrics are at <a href=\"/metrics\">/metrics</a>.\n";

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
const HTML: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");

/// Answers requests of scrapers.
#[derive(Debug)]
pub(super) struct RelayAnswers {
    pub(super) settings: watch::Receiver<Arc<RelaySettings>>,
    pub(super) upstream: Upstream,
    pub(super) passwords: Passwords,
    pub(super) failures: FailureLog,
}

impl RelayAnswers {
    /// Returns the settings in use.
    pub(super) fn settings(&self) -> Arc<RelaySettings> {
        Arc::clone(&self.settings.borrow())
    }

    /// Answers one request.
    pub(super) async fn answer(&self, request: Request<Incoming>, address: IpAddr) -> Response<Full<Bytes>> {
        let settings = self.settings();
        let view = if settings.config.has_password() {
            let authorization = request.headers().get(header::AUTHORIZATION);
            match self.passwords.check(&settings.config, authorization, address).await {
                Verdict::Accepted => MetricsView::Permitted,
                Verdict::Refused => return unauthorized(),
                Verdict::Busy => {
                    let text = "too many passwords are being checked; try again in a few seconds\n";
                    return last(StatusCode::SERVICE_UNAVAILABLE, text);
                }
            }
        } else {
            MetricsView::Public
        };
        if request.method() != Method::GET {
            let mut answer = last(StatusCode::METHOD_NOT_ALLOWED, "only GET is allowed\n");
            answer.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
            return answer;
        }
        match request.uri().path() {
            "/" => response(StatusCode::OK, HTML, START_PAGE),
            "/metrics" => {
                let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
                self.metrics(Format::accepted(accept), view).await
            }
            _ => last(StatusCode::NOT_FOUND, "the metrics are at /metrics\n"),
        }
    }

    async fn metrics(&self, format: Format, view: MetricsView) -> Response<Full<Bytes>> {
        let answer = self.upstream.metrics(format, view).await;
        self.failures.note(answer.as_ref().err());
        match answer {
            Ok(metrics) => {
                let content_type = HeaderValue::try_from(metrics.content_type).unwrap_or(TEXT);
                response(StatusCode::OK, content_type, metrics.text)
            }
            Err(message) => {
                response(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("gpushd sent no metrics: {message}\n"))
            }
        }
    }
}

/// Prints a failure of gpushd when it begins and when it ends, not at each scrape.
#[derive(Debug)]
pub(super) struct FailureLog {
    pub(super) failing: AtomicBool,
    /// Whether stderr is for text: it must be empty with `--json`.
    pub(super) is_printed: bool,
}

impl FailureLog {
    fn note(&self, failure: Option<&String>) {
        let was_failing = self.failing.swap(failure.is_some(), Relaxed);
        let line = match failure {
            Some(message) if !was_failing => format!("gpushd sent no metrics: {message}"),
            None if was_failing => "gpushd sends metrics again".to_owned(),
            Some(_) | None => return,
        };
        if self.is_printed {
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    }
}

fn unauthorized() -> Response<Full<Bytes>> {
    let mut answer = last(StatusCode::UNAUTHORIZED, "a user name and a password are required\n");
    let scheme = HeaderValue::from_static("Basic realm=\"gpush metrics\", charset=\"UTF-8\"");
    answer.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
    answer
}

/// Returns the last response of a connection. A client whose request is refused must not keep a connection.
fn last(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut answer = response(status, TEXT, text);
    answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    answer
}

fn response(status: StatusCode, content_type: HeaderValue, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(header::CONTENT_TYPE, content_type);
    answer
}
