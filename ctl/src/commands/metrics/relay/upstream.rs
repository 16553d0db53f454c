//! Requests to gpushd. Scrapers that arrive together share one request, so many scrapers cost gpushd no more than one.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_client::{Client, MetricsText, MetricsView, Socket};
use gpush_openmetrics::Format;
use tokio::sync::Mutex;

/// How long an answer of gpushd is used again. gpushd itself keeps its answers as long.
const LASTS: Duration = Duration::from_secs(1);

/// The metrics, or why gpushd did not send them.
pub(super) type Answer = Result<MetricsText, String>;

/// Requests metrics from gpushd, and keeps the last answers. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Upstream(Arc<UpstreamParts>);

#[derive(Debug)]
struct UpstreamParts {
    socket: Socket,
    deadline: Duration,
    /// The last answer for each format and view.
    last: [[Arc<Mutex<Option<LastAnswer>>>; 2]; 2],
}

#[derive(Debug)]
struct LastAnswer {
    at: Instant,
    answer: Answer,
}

impl Upstream {
    /// Creates the handle. `deadline` is the time that gpushd has for an answer.
    pub(super) fn new(socket: Socket, deadline: Duration) -> Self {
        Self(Arc::new(UpstreamParts { socket, deadline, last: Default::default() }))
    }

    /// Returns the metrics, at most [`LASTS`] old. An error is shared and kept in the same way, so that a gpushd that does
    /// not answer delays each scraper at most once.
    pub(super) async fn metrics(&self, format: Format, view: MetricsView) -> Answer {
        let parts = Arc::clone(&self.0);
        // The task continues if the scraper disconnects. Otherwise scrapers that come and go would repeat the request.
        let task = tokio::spawn(async move {
            let last =
                &parts.last[usize::from(format == Format::OpenMetrics)][usize::from(view == MetricsView::Public)];
            let mut last = last.lock().await;
            if let Some(last) = last.as_ref().filter(|last| last.at.elapsed() < LASTS) {
                return last.answer.clone();
            }
            let answer = parts.request(format, view).await;
            *last = Some(LastAnswer { at: Instant::now(), answer: answer.clone() });
            answer
        });
        task.await.unwrap_or_else(|error| Err(format!("the request to gpushd failed: {error}")))
    }
}

impl UpstreamParts {
    async fn request(&self, format: Format, view: MetricsView) -> Answer {
        let client = Client::new(self.socket.clone()).deadline(self.deadline);
        let mut client = client.without_waiting_for_start();
        client.metrics(format.content_type(), view).await.map_err(|error| error.error.message)
    }
}
