//! `GET /metrics`: the metrics of gpushd as text.

use gpush_api::{ApiError, Code};
use hyper::{body::Bytes, header};

use crate::{
    attempts::Answer,
    client::Client,
    error::{Error, Kind},
    question::Question,
};

/// Which metrics to request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricsView {
    /// All metrics that the user of this process may see.
    Permitted,
    /// The metrics that every user may see.
    Public,
}

/// Metrics as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsText {
    /// The content type, which names the format.
    pub content_type: String,
    /// The text.
    pub text: Bytes,
}

impl Client {
    /// `GET /metrics`, on a separate connection. `accept` is the header `Accept`, which chooses the format.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn metrics(&mut self, accept: &str, view: MetricsView) -> Result<MetricsText, Error> {
        let path = match view {
            MetricsView::Permitted => "/metrics",
            MetricsView::Public => "/metrics?labels=public",
        };
        let question = Question::get(path).accepting(accept);
        let (head, body) = self.wire.fetch(&question, self.answer_deadline()).await?.into_parts();
        if !head.status.is_success() {
            let answer = Answer { status: head.status, body };
            // Decoding an unsuccessful answer returns the error in the answer.
            let decoded = self.decode::<serde_json::Value>(&question, &answer).await;
            return Err(decoded.err().unwrap_or_else(|| self.wire.not_http()));
        }
        let content_type = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        match content_type {
            Some(content_type) => Ok(MetricsText { content_type: content_type.to_owned(), text: body }),
            None => {
                let error = ApiError::new(Code::Unreachable, "gpushd answered GET /metrics without a content type");
                Err(Error::new(Kind::Foreign, error))
            }
        }
    }
}
