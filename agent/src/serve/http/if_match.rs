//! `If-Match`: refuses a request if the desired state has changed since the generation that the caller has seen.

use axum::{
    extract::FromRequestParts,
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::Response,
};
use gpush_api::{ApiError, Code};

use super::failure::Failure;
use crate::state::State;

/// The generation in the header `If-Match`; `None` if the request has no such header.
#[derive(Debug, Clone, Copy)]
pub(super) struct IfMatch(pub(super) Option<u64>);

impl<S: Send + Sync> FromRequestParts<S> for IfMatch {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let Some(value) = parts.headers.get(header::IF_MATCH) else { return Ok(Self(None)) };
        let text = value.to_str().unwrap_or_default().trim();
        if text == "*" {
            return Ok(Self(None));
        }
        let bare = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
        match bare.parse() {
            Ok(generation) => Ok(Self(Some(generation))),
            Err(_) => {
                let error = ApiError::new(Code::BadRequest, "the header If-Match does not contain a generation number");
                Err(error.hint("send the generation that GET /v1/overrides returns, such as `If-Match: 7`").into())
            }
        }
    }
}

impl IfMatch {
    /// Returns the response for an error. The status is 412 if the desired state has a newer generation than the
    /// header.
    pub(super) fn failure(self, state: &State, error: ApiError) -> Failure {
        let other = self.0.is_some_and(|expected| expected != state.now().generation);
        if other && error.code == Code::Conflict {
            return Failure::new(StatusCode::PRECONDITION_FAILED, error);
        }
        error.into()
    }
}

/// Adds the generation of the desired state to a response, as the header `ETag`.
pub(super) fn tagged(mut answer: Response, generation: u64) -> Response {
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{generation}\"")) {
        answer.headers_mut().insert(header::ETAG, tag);
    }
    answer
}
