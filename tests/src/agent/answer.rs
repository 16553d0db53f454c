//! HTTP answers, parsed without a library.

use gpush_api::ApiError;
use serde_json::Value;

/// An HTTP answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Head, including the status line.
    pub head: String,
    /// Body.
    pub body: Vec<u8>,
}

impl Answer {
    /// Returns the body as JSON.
    ///
    /// # Panics
    /// If the body is not JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {} {}", self.head, String::from_utf8_lossy(&self.body)))
    }

    /// Returns the body as an API error.
    ///
    /// # Panics
    /// If the body is not an API error.
    #[must_use]
    pub fn error(&self) -> ApiError {
        assert!(self.status >= 400, "not an error: {} {}", self.head, String::from_utf8_lossy(&self.body));
        assert!(self.head.contains("application/json"), "{}", self.head);
        serde_json::from_value(self.json()).unwrap_or_else(|error| panic!("{error}: {}", self.json()))
    }
}

/// Parses an HTTP answer. Returns `None` if the bytes are not an HTTP answer.
#[must_use]
pub fn parse(bytes: &[u8]) -> Option<Answer> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = String::from_utf8(bytes[..end].to_vec()).ok()?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head, body: bytes[end + 4..].to_vec() })
}
