//! `/v1/events`: what changes, as it happens, as server-sent events.
//!
//! ```text
//! id: 8c1f03ab77de-17          what Last-Event-ID takes
//! event: gpu                   its kind
//! data: {"id": …, "kind": …}   a gpush_api::Event
//! ```
//!
//! The stream begins with a bare `id:`, the place from which it tells, and repeats that when nothing
//! was told for a while: it keeps the connection alive, and whoever wants only few kinds comes back
//! to a place that is still kept. Bare ids are no events to a client of such streams.
//!
//! A client is given the next piece only when it has taken the one before, so one that does not read
//! holds nothing but its connection, and is hung up on in time (`listen::pace`).

use std::{
    convert::Infallible,
    fmt::Write as _,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use gpush_api::{ApiError, Code, Event, EventKind, Happening, Resync};
use gpush_core::quote::Quoted;
use hyper::body::Frame;
use jiff::Timestamp;
use serde::Deserialize;
use tokio::{sync::mpsc, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use super::{endless::Endless, extract::Parameters, failure::Failure, response_limiter::ResponseLimiter};
use crate::{
    authorization::Authorization,
    caller::Caller,
    state::{
        self,
        events::{Cursor, Filter, Next},
        redact,
    },
};

/// The longest silence of a stream.
const ALIVE: Duration = Duration::from_secs(15);

/// Name of the header in which a client says which event it had last.
const LAST: &str = "last-event-id";

/// Parameters of `GET /v1/events`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
pub(super) struct EventParameters {
    /// Only these kinds, with commas between: `operation`, `gpu`, `config`, `driver`, `xid`, `mps`, `stray`,
    /// `change`, `resync`. The last comes whatever is asked for.
    kinds: Option<String>,
    /// Only what is about one of these GPUs: selectors with commas between.
    gpu: Option<String>,
    /// `false` for the events that are still kept (or those of them after `Last-Event-ID`), as one
    /// JSON list, in place of the stream.
    follow: Option<bool>,
}

/// What changes, as server-sent events whose `data` is an `Event`. With the header `Last-Event-ID` all
/// events after that one come first, or a `resync` if they can't be told any more. Asking causes no
/// driver call.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/events", operation_id = "streamEvents", tag = "events",
    params(EventParameters, ("Last-Event-ID" = Option<String>, Header, description = "Id of the last event that the client has")),
    responses((status = 200, description = "The stream", body = Event, content_type = "text/event-stream"), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
pub(super) async fn stream(
    State(state): State<state::State>,
    State(authorization): State<Authorization>,
    State(limiter): State<ResponseLimiter>,
    caller: Caller,
    headers: HeaderMap,
    Parameters(parameters): Parameters<EventParameters>,
) -> Result<Response, Failure> {
    let filter = Filter {
        kinds: parameters.kinds.as_deref().map(kinds).transpose()?,
        gpus: parameters.gpu.as_deref().map(|text| state.now().named(text)).transpose()?,
    };
    // What is no text is the id of no event of ours.
    let last = headers.get(LAST).map(|id| id.to_str().unwrap_or_default());
    if parameters.follow == Some(false) {
        let cursor = last.map_or_else(|| state.events().listen_to_all_kept(), |id| state.events().listen(Some(id)));
        let of = caller.clone();
        let kept = async move { Ok::<Vec<Event>, Failure>(kept(cursor, &filter, &of)) };
        return limiter.answer(&caller, StatusCode::OK, kept).await;
    }
    let cursor = state.events().listen(last);
    // One piece under way: what comes after it stays where all listeners find it.
    let (pieces, taken) = mpsc::channel(1);
    let telling = AbortOnDropHandle::new(tokio::spawn(tell(authorization, caller, cursor, filter, pieces)));
    let mut response = Body::new(Told { pieces: taken, _telling: telling }).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    response.extensions_mut().insert(Endless);
    Ok(response)
}

/// Events that are kept, without waiting.
fn kept(mut cursor: Cursor, filter: &Filter, caller: &Caller) -> Vec<Event> {
    let mut kept = Vec::new();
    loop {
        match cursor.now() {
            Next::Events(events) => {
                kept.extend(events.iter().filter(|event| filter.wants(event)).map(|event| shown(event, caller)));
            }
            Next::Resync(reason) => kept.push(resync(&cursor, Resync { reason })),
            Next::Nothing | Next::Closed => return kept,
        }
    }
}

/// Tells a client what it wants to hear, until it goes or nothing more comes.
async fn tell(
    authorization: Authorization,
    mut caller: Caller,
    mut cursor: Cursor,
    filter: Filter,
    pieces: mpsc::Sender<Bytes>,
) {
    let mut text = place(&cursor);
    let mut silent_since = Instant::now();
    loop {
        // First the room, then what is to be told: whoever is slow hears what is true by then.
        let Ok(room) = pieces.reserve().await else { return };
        if !text.is_empty() {
            silent_since = Instant::now();
            room.send(Bytes::from(std::mem::take(&mut text)));
            continue;
        }
        match cursor.next(silent_since + ALIVE).await {
            Next::Events(events) => {
                for event in events {
                    if let Happening::Config(_) = event.what {
                        // The config names the admin groups.
                        caller = authorization.identify(caller.peer.clone()).await;
                    }
                    if filter.wants(&event) {
                        frame(&mut text, &shown(&event, &caller));
                    }
                }
            }
            Next::Resync(reason) => frame(&mut text, &resync(&cursor, Resync { reason })),
            Next::Nothing => text = place(&cursor),
            Next::Closed => return,
        }
        if text.is_empty() && silent_since.elapsed() >= ALIVE {
            text = place(&cursor);
        }
    }
}

/// An event as `caller` may see it.
fn shown(event: &Event, caller: &Caller) -> Event {
    let mut event = event.clone();
    redact::event(&mut event.what, caller.viewer);
    event
}

fn resync(cursor: &Cursor, resync: Resync) -> Event {
    Event { id: cursor.id(), at: Timestamp::now(), what: Happening::Resync(resync) }
}

fn frame(text: &mut String, event: &Event) {
    // JSON has no line breaks of its own; the type holds nothing that it can't express.
    let data = serde_json::to_string(event).unwrap_or_default();
    let _ = write!(text, "id: {}\nevent: {}\ndata: {data}\n\n", event.id, event.what.kind().name());
}

fn place(cursor: &Cursor) -> String {
    format!("id: {}\n\n", cursor.id())
}

fn kinds(text: &str) -> Result<Vec<EventKind>, ApiError> {
    let kind = |name: &str| {
        EventKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names: Vec<&str> = EventKind::ALL.iter().map(|kind| kind.name()).collect();
            ApiError::new(Code::BadRequest, format!("there is no kind {} of events", Quoted(name)))
                .hint(format!("these there are: {}", names.join(", ")))
        })
    };
    text.split(',').map(|name| kind(name.trim())).collect()
}

/// The body of a stream.
struct Told {
    pieces: mpsc::Receiver<Bytes>,
    /// Ends when the client is gone.
    _telling: AbortOnDropHandle<()>,
}

impl hyper::body::Body for Told {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.pieces.poll_recv(context).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}
