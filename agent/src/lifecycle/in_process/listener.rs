//! An event stream of an in-process gpushd.

use std::collections::VecDeque;

use axum::body::Body;
use gpush_api::{Event, EventPayload, OperationState};
use http_body_util::BodyExt;
use hyper::{Method, StatusCode};

use super::{
    InProcess, PATIENCE,
    requests::{call, request},
    user,
};

/// A listener on the event stream.
pub(super) struct EventListener {
    body: Body,
    /// What gpushd has sent, without the messages that were already returned.
    received: String,
    messages: VecDeque<(String, Option<Event>)>,
    /// The id of the last message that was returned, with or without an event.
    pub(super) place: String,
}

impl InProcess {
    /// Opens an event stream with these query parameters (`?kinds=gpu`, or empty). If `last` is an event id, the stream
    /// starts after that event.
    pub(super) async fn listen(&self, parameters: &str, last: Option<&str>) -> EventListener {
        let headers: Vec<(&str, &str)> = last.map(|id| ("last-event-id", id)).into_iter().collect();
        let request = request(user(0), Method::GET, &format!("/v1/events{parameters}"), &headers, Vec::new());
        let router = self.router.clone();
        let response = self.runtime.as_ref().expect("gpushd runs").spawn(call(router, request)).await;
        let response = response.expect("an answer");
        assert_eq!(response.status(), StatusCode::OK);
        let (body, received, messages) = (response.into_body(), String::new(), VecDeque::new());
        let mut listener = EventListener { body, received, messages, place: String::new() };
        // The first message has no event: the message only names the position at which the stream begins.
        assert_eq!(listener.message().await, Some(None));
        listener
    }
}

impl EventListener {
    /// Returns the next message, with or without an event, or `None` at the end of the stream.
    async fn message(&mut self) -> Option<Option<Event>> {
        loop {
            if let Some((id, event)) = self.messages.pop_front() {
                self.place = id;
                return Some(event);
            }
            let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await.expect("a message")?;
            let data = frame.expect("the stream can be read").into_data().expect("data");
            self.received.push_str(std::str::from_utf8(&data).expect("text"));
            while let Some((message, rest)) = self.received.split_once("\n\n") {
                let field = |name: &str| message.lines().find_map(|line| line.strip_prefix(name));
                let event = field("data: ").map(|data| serde_json::from_str(data).expect("an event"));
                self.messages.push_back((field("id: ").expect("an id").to_owned(), event));
                self.received = rest.to_owned();
            }
        }
    }

    /// Returns the next event, or `None` at the end of the stream.
    pub(super) async fn event(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.message().await? {
                return Some(event);
            }
        }
    }

    /// Returns the events up to and including the first event for which `is` returns true.
    pub(super) async fn until(&mut self, is: impl Fn(&Event) -> bool) -> Vec<Event> {
        let mut events = Vec::new();
        loop {
            let event = self.event().await.unwrap_or_else(|| panic!("the stream ended after {events:?}"));
            events.push(event);
            if events.last().is_some_and(&is) {
                return events;
            }
        }
    }

    /// Returns the events up to and including the end of an operation.
    pub(super) async fn until_end_of(&mut self, id: &str) -> Vec<Event> {
        self.until(|event| state(event).is_some_and(|(of, state)| of == id && state.is_final())).await
    }
}

/// Returns the id of the operation that an event reports, and its state.
pub(super) fn state(event: &Event) -> Option<(&str, OperationState)> {
    let EventPayload::Operation(change) = &event.what else { return None };
    Some((&change.operation.id, change.operation.state))
}

/// Returns the number of an event, counted from the start of gpushd.
pub(super) fn number(event: &Event) -> u64 {
    event.id.rsplit_once('-').and_then(|(_, number)| number.parse().ok()).expect("a number")
}
