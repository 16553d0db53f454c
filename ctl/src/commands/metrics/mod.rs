//! `gpushctl metrics`: prints the metrics of gpushd, writes them to a file, or serves them over HTTP.
//!
//! | file | subject |
//! |---|---|
//! | `write` | a file for node_exporter |
//! | `relay` | an HTTP server for Prometheus |

mod relay;
mod write;

use std::io::IsTerminal as _;

use gpush_client::{Client, MetricsText, MetricsView};
use gpush_openmetrics::Format;
use serde::Serialize;

#[cfg(test)]
pub(super) use self::{relay::ServedMetrics, write::WrittenMetrics};
use crate::{
    args::{Global, Metrics, MetricsSelection, MetricsShowArgs},
    exit::Outcome,
    output::Output,
};

/// The output of `gpushctl metrics show --json`.
#[derive(Serialize)]
pub(super) struct ShownMetrics<'a> {
    /// Content type, which names the format.
    pub(super) content_type: &'a str,
    /// The metrics.
    pub(super) text: &'a str,
}

pub(super) fn run(global: &Global, command: Metrics, out: &Output) -> Outcome {
    match command {
        Metrics::Show(args) => super::ask(global, async |client| show(client, &args, out).await),
        Metrics::Write(args) => {
            let textfile = write::Textfile::check(&args)?;
            super::ask(global, async |client| textfile.write(client, out).await)
        }
        Metrics::Serve(args) => relay::serve(global, args, out),
    }
}

async fn show(client: &mut Client, args: &MetricsShowArgs, out: &Output) -> Outcome {
    let format = if args.openmetrics { Format::OpenMetrics } else { Format::Classic };
    let MetricsText { content_type, text } = client.metrics(format.content_type(), args.selection.view()).await?;
    let text = String::from_utf8_lossy(&text);
    if out.json {
        out.document(&ShownMetrics { content_type: &content_type, text: &text })?;
    } else if std::io::stdout().is_terminal() {
        // Labels contain text from users, which may contain control characters.
        out.text(&text.lines().map(|line| out.look.clean(line) + "\n").collect::<String>())?;
    } else {
        out.verbatim(text.as_bytes())?;
    }
    Ok(0)
}

impl MetricsSelection {
    fn view(&self) -> MetricsView {
        if self.public { MetricsView::Public } else { MetricsView::Permitted }
    }
}
