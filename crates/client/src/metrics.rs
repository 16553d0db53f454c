//! `GET /metrics`: the metrics of gpushd as text.

use gpush_api::{ApiError, Code};
use hyper::{body::Bytes, header, http::response::Parts};

use crate::{
    attempts::Answer,
    client::Client,
    error::{Error, Kind},
    failures,
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
        let (head, body) = self.get_text(&Question::get(path).accepting(accept)).await?;
        let content_type = head.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        match content_type {
            Some(content_type) => Ok(MetricsText { content_type: content_type.to_owned(), text: body }),
            None => {
                let error = ApiError::new(Code::Unreachable, "gpushd answered GET /metrics without a content type");
                Err(Error::new(Kind::Foreign, error))
            }
        }
    }

    /// Returns the head and the body of an answer that is not JSON, on a separate connection.
    pub(crate) async fn get_text(&mut self, question: &Question<'_>) -> Result<(Parts, Bytes), Error> {
        let (head, body) = self.wire.fetch(question, self.answer_deadline()).await?.into_parts();
        if head.status.is_success() {
            return Ok((head, body));
        }
        let answer = Answer { status: head.status, body };
        // Decoding an unsuccessful answer returns the error in the answer.
        let decoded = self.decode::<serde_json::Value>(question, &answer).await;
        Err(decoded.err().unwrap_or_else(|| failures::not_http(&self.wire.socket)))
    }
}
