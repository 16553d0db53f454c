//! An error response: the API's error with its HTTP status.

use axum::{
    http::{HeaderValue, Method, StatusCode, header},
    response::{IntoResponse, Response},
};
use gpush_api::{ApiError, Code};
use gpush_core::quote::Quoted;

use super::head::MOST_BYTES;

/// Maximum length of a path in a message, in bytes. Every path of the API with a UUID is shorter.
const LONGEST_PATH: usize = 200;

/// Returns the beginning of a path, to show it in a message. A path is ASCII.
pub(super) fn shown(path: &str) -> &str {
    path.get(..LONGEST_PATH).unwrap_or(path)
}

/// An error as a response.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    status: StatusCode,
    error: Box<ApiError>,
}

impl Failure {
    /// Creates an error response whose HTTP status is more specific than the status of the error's
    /// code.
    pub(crate) fn new(status: StatusCode, error: ApiError) -> Self {
        Self { status, error: Box::new(error) }
    }

    /// Creates the error for a malformed request.
    pub(crate) fn bad_request(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, ApiError::new(Code::BadRequest, message))
    }

    /// Creates the error for a caller with too many connections.
    pub(crate) fn busy(why: String) -> Self {
        ApiError::new(Code::Unavailable, why)
            .hint("close connections that are not needed, then try again")
            .retryable()
            .into()
    }

    /// Creates the error for a bug of gpushd.
    pub(crate) fn internal() -> Self {
        ApiError::internal("gpushd could not answer because of an internal error").into()
    }

    /// Creates the error for a request head that hyper refuses with `status`, because the head is
    /// not HTTP/1.1 or is too large.
    pub(crate) fn refused_head(status: StatusCode) -> Self {
        let (message, hint) = match status {
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => (
                format!("the head of the request is larger than {MOST_BYTES} bytes, or has more than 100 headers"),
                "send fewer or shorter headers",
            ),
            StatusCode::URI_TOO_LONG => {
                ("the path of the request is too long".to_owned(), "GET /v1/openapi.json describes the paths")
            }
            _ => ("the request is not HTTP/1.1".to_owned(), "GET /v1/openapi.json describes the requests"),
        };
        Self::bad_request(status, message).hint(hint)
    }

    pub(super) fn no_such_path(path: &str) -> Self {
        ApiError::new(Code::NotFound, format!("this API has no path {:?}", shown(path)))
            .hint("GET /v1/openapi.json describes the paths")
            .into()
    }

    /// Creates the error for query parameters on a route that takes none.
    pub(super) fn unknown_parameters(path: &str, query: &str) -> Self {
        let name = query.split(['=', '&']).next().unwrap_or_default();
        let message = format!("{} takes no query parameters: unknown parameter {}", shown(path), Quoted(name));
        Self::bad_request(StatusCode::BAD_REQUEST, message).hint("GET /v1/openapi.json describes the parameters")
    }

    pub(super) fn no_such_method(method: &Method, path: &str) -> Self {
        let error = ApiError::new(Code::BadRequest, format!("{} does not support {method}", shown(path)))
            .hint("GET /v1/openapi.json describes the paths");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, error)
    }

    /// Adds a hint.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.error = Box::new(self.error.hint(hint));
        self
    }

    fn body(&self) -> Vec<u8> {
        // Cannot fail: the type can always be serialized.
        serde_json::to_vec(&self.error).unwrap_or_default()
    }

    /// Returns the complete HTTP response as bytes, for a connection that gpushd closes without
    /// handling a request.
    pub(crate) fn as_http(&self) -> Vec<u8> {
        let body = self.body();
        let mut answer = format!(
            "HTTP/1.1 {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            self.status,
            body.len()
        )
        .into_bytes();
        answer.extend(body);
        answer
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        Self::new(status, error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let json = HeaderValue::from_static("application/json");
        (self.status, [(header::CONTENT_TYPE, json)], self.body()).into_response()
    }
}

impl From<Failure> for Response {
    fn from(failure: Failure) -> Self {
        failure.into_response()
    }
}
