//! The event stream (`GET /v1/events`), parsed incrementally.
//!
//! The stream has a separate connection, which is open as long as the caller listens. The end of
//! the stream is not an error: the caller reconnects with [`EventStream::last_id`].

use std::time::Duration;

use gpush_api::{ApiError, Code, Event, EventKind};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Serialize;
use tokio::time::timeout;

use crate::{
    error::{Error, Kind},
    path_segment::segment,
};

/// Maximum silence of a working stream: three times gpushd's keep-alive interval.
const SILENCE: Duration = Duration::from_secs(45);

/// Maximum size of an event in bytes. Real events are far smaller.
const LARGEST: usize = 4 << 20;

/// A selection of events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventQuery {
    /// Only events of these kinds; if empty, all events.
    pub kinds: Vec<EventKind>,
    /// Only events about these GPUs, given as selectors; if empty, all events.
    pub gpus: Vec<String>,
    /// Id of the last event that the caller has received. Without an id, the stream contains only
    /// new events.
    pub after: Option<String>,
}

impl EventQuery {
    pub(crate) fn path(&self, follow: bool) -> String {
        let mut parameters = vec![format!("follow={follow}")];
        if !self.kinds.is_empty() {
            let kinds: Vec<_> = self.kinds.iter().map(|kind| kind.name()).collect();
            parameters.push(format!("kinds={}", kinds.join(",")));
        }
        if !self.gpus.is_empty() {
            let gpus: Vec<_> = self.gpus.iter().map(|gpu| segment(gpu)).collect();
            parameters.push(format!("gpu={}", gpus.join(",")));
        }
        format!("/v1/events?{}", parameters.join("&"))
    }
}

/// A received event, with its JSON form.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ReceivedEvent {
    /// An event of a kind that this build knows.
    Known(Box<Event>),
    /// An event of a kind that this build does not know.
    Unknown(serde_json::Value),
}

impl ReceivedEvent {
    pub(crate) fn of(value: serde_json::Value) -> Self {
        match serde_json::from_value(value.clone()) {
            Ok(event) => Self::Known(Box::new(event)),
            Err(_) => Self::Unknown(value),
        }
    }
}

/// A stream of events.
#[derive(Debug)]
pub struct EventStream {
    body: Incoming,
    parser: Parser,
    socket: String,
}

impl EventStream {
    pub(crate) fn new(body: Incoming, socket: String, after: Option<String>) -> Self {
        Self { body, parser: Parser { unread: Vec::new(), place: after }, socket }
    }

    /// Returns the id of the last received event, for the next [`EventQuery::after`].
    #[must_use]
    pub fn last_id(&self) -> Option<&str> {
        self.parser.place.as_deref()
    }

    /// Waits for the next event. Returns `None` if a stopping gpushd ends the stream.
    ///
    /// # Errors
    /// [`Kind::Lost`] if the connection broke or was silent too long.
    pub async fn next(&mut self) -> Result<Option<ReceivedEvent>, Error> {
        loop {
            if let Some(reported) = self.parser.next() {
                return Ok(Some(reported));
            }
            let frame = match timeout(SILENCE, self.body.frame()).await {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(cause))) => return Err(self.lost(cause.to_string())),
                Err(_) => return Err(self.lost(format!("gpushd sent nothing for {}s", SILENCE.as_secs()))),
            };
            if let Ok(data) = frame.into_data() {
                self.parser.unread.extend_from_slice(&data);
            }
            if self.parser.unread.len() > LARGEST {
                return Err(self.lost(format!("an event is larger than {} MiB", LARGEST >> 20)));
            }
        }
    }

    fn lost(&self, cause: String) -> Error {
        let message = format!("lost the stream of events from gpushd at {}", self.socket);
        let error = ApiError::new(Code::Unreachable, message).cause(cause);
        Error::new(
            Kind::Lost,
            error
                .hint(
                    "find the cause with `systemctl status gpushd` and `journalctl -u \
            gpushd`",
                )
                .retryable(),
        )
    }
}

/// A parser for server-sent events.
#[derive(Debug)]
struct Parser {
    unread: Vec<u8>,
    place: Option<String>,
}

impl Parser {
    fn next(&mut self) -> Option<ReceivedEvent> {
        loop {
            let end = self.unread.windows(2).position(|pair| pair == b"\n\n")?;
            let rest = self.unread.split_off(end + 2);
            let piece = std::mem::replace(&mut self.unread, rest);
            let mut data = String::new();
            for line in String::from_utf8_lossy(&piece).lines() {
                let (field, value) = line.split_once(':').unwrap_or((line, ""));
                let value = value.strip_prefix(' ').unwrap_or(value);
                match field {
                    "id" => self.place = Some(value.to_owned()),
                    "data" => data += value,
                    // Ignore `event:`, because the data contains the kind of the event too. Ignore
                    // unknown fields.
                    _ => {}
                }
            }
            // An event without data only changes the id of the last event.
            if let Ok(value) = serde_json::from_str(&data) {
                return Some(ReceivedEvent::of(value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_stream_pieces_are_joined_and_positions_kept() {
        let mut parser = Parser { unread: Vec::new(), place: None };
        let xid = r#"{"id":"e-3","at":"2026-01-02T03:04:05Z","kind":"xid","gpu_uuid":"GPU-1","xid":79}"#;
        let young = r#"{"id":"e-4","at":"2026-01-02T03:04:05Z","kind":"weather","sun":true}"#;
        let text = format!(
            "id: e-2\n\n: a comment\n\nid: e-3\nevent: xid\ndata: {xid}\n\nid: e-4\nevent: weather\ndata: {young}\n\nid: e-9\n\nid: e-10\n"
        );
        let mut reported = Vec::new();
        // Parse the stream byte by byte: the result must not depend on how the bytes are divided.
        for byte in text.bytes() {
            parser.unread.push(byte);
            while let Some(one) = parser.next() {
                reported.push((one, parser.place.clone().unwrap()));
            }
        }
        assert_eq!(reported.len(), 2);
        assert!(
            matches!(&reported[0], (ReceivedEvent::Known(event), place) if event.id == "e-3" && place == "e-3"),
            "{reported:?}"
        );
        assert!(matches!(&reported[1], (ReceivedEvent::Unknown(value), _) if value["sun"] == true), "{reported:?}");
        // An incomplete event at the end is ignored.
        assert_eq!(parser.place.as_deref(), Some("e-9"));
    }

    #[test]
    fn event_query_becomes_a_path() {
        assert_eq!(EventQuery::default().path(true), "/v1/events?follow=true");
        let query = EventQuery {
            kinds: vec![EventKind::Gpu, EventKind::Xid],
            gpus: vec!["0-3".to_owned(), "*A100*".to_owned()],
            after: None,
        };
        assert_eq!(query.path(false), "/v1/events?follow=false&kinds=gpu,xid&gpu=0-3,%2AA100%2A");
    }
}
