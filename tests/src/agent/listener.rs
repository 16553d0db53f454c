//! A client of the event stream. It uses no HTTP library, because the tests check the exact bytes.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    time::Instant,
};

use gpush_api::{Event, EventKind, EventPayload, OperationState};

use super::{Agent, PATIENCE};

/// A listener on the event stream.
#[derive(Debug)]
pub struct Listener {
    stream: BufReader<UnixStream>,
    /// The id of the last message received, with or without an event.
    pub place: String,
}

impl Agent {
    /// Opens an event stream with these query parameters (`?kinds=gpu`, or empty). If `last` is an
    /// event id, the stream starts after that event.
    ///
    /// # Panics
    /// If gpushd refuses the request.
    #[must_use]
    pub fn listen(&self, parameters: &str, last: Option<&str>) -> Listener {
        let mut stream = self.connect();
        let last = last.map_or_else(String::new, |id| format!("last-event-id: {id}\r\n"));
        let request = format!("GET /v1/events{parameters} HTTP/1.1\r\nhost: gpush\r\n{last}\r\n");
        stream.write_all(request.as_bytes()).expect("a request can be sent");
        let mut listener = Listener { stream: BufReader::new(stream), place: String::new() };
        let status = listener.line().expect("an answer");
        assert!(status.starts_with("HTTP/1.1 200 "), "{status}");
        while !listener.line().expect("a head").is_empty() {}
        // The first message has no event: the message only names the position at which the stream
        // begins. The listener gets every later event.
        assert_eq!(listener.piece().expect("a place"), None);
        listener
    }
}

impl Listener {
    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line).expect("the stream can be read");
        (read > 0).then(|| line.trim_end().to_owned())
    }

    /// Returns the next message of the stream, with or without an event. Returns `None` at the end
    /// of the stream. Skips the length lines of HTTP chunks, which never look like a line of an
    /// event.
    fn piece(&mut self) -> Option<Option<Event>> {
        let mut event = None;
        let mut begun = false;
        loop {
            let line = self.line()?;
            if line == "0" {
                return None;
            } else if let Some(id) = line.strip_prefix("id: ") {
                self.place = id.to_owned();
                begun = true;
            } else if let Some(data) = line.strip_prefix("data: ") {
                event = Some(serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}")));
            } else if line.is_empty() && begun {
                if let Some(event) = &event {
                    let Event { id, .. } = event;
                    assert_eq!(*id, self.place);
                }
                return Some(event);
            }
        }
    }

    /// Returns the next event, or `None` at the end of the stream.
    pub fn event(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.piece()? {
                return Some(event);
            }
        }
    }

    /// Returns the events up to and including the first event for which `is` returns true.
    ///
    /// # Panics
    /// If the stream ends without such an event, or no such event arrives in time. A read timeout
    /// does not detect a missing event, because gpushd sends keep-alive messages.
    pub fn until(&mut self, is: impl Fn(&Event) -> bool) -> Vec<Event> {
        let mut events = Vec::new();
        let until = Instant::now() + PATIENCE;
        loop {
            let piece = self.piece().unwrap_or_else(|| panic!("the stream ended after {events:?}"));
            assert!(Instant::now() < until, "no such event within {PATIENCE:?}, but {events:?}");
            let Some(event) = piece else { continue };
            let last = is(&event);
            events.push(event);
            if last {
                return events;
            }
        }
    }

    /// Returns the events up to and including the end of an operation.
    pub fn until_end_of(&mut self, id: &str) -> Vec<Event> {
        self.until(|event| state(event).is_some_and(|(of, state)| of == id && state.is_final()))
    }

    /// Returns the next event of a kind.
    ///
    /// # Panics
    /// If the stream ends without such an event.
    pub fn next_of(&mut self, kind: EventKind) -> Event {
        self.until(|event| event.what.kind() == kind).pop().expect("at least one")
    }
}

/// Returns the id of the operation that an event reports, and its state.
#[must_use]
pub fn state(event: &Event) -> Option<(&str, OperationState)> {
    let EventPayload::Operation(change) = &event.what else { return None };
    Some((&change.operation.id, change.operation.state))
}

/// Returns the number of an event, counted from the start of gpushd.
///
/// # Panics
/// If its id has no number.
#[must_use]
pub fn number(event: &Event) -> u64 {
    event.id.rsplit_once('-').and_then(|(_, number)| number.parse().ok()).expect("a number")
}
