//! `/v1/events`: changes as they happen, as server-sent events.
//!
//! ```text
//! id: 8c1f03ab77de-17          value for Last-Event-ID
//! event: gpu                   kind of the event
//! data: {"id": …, "kind": …}   a gpush_api::Event
//! ```
//!
//! The stream begins with an `id:` without an event: the position at which the stream starts. If nothing was sent for
//! 15 s, gpushd sends the current position, which also keeps the connection alive. Otherwise, a client that receives
//! few events could only reconnect at an old position, and gpushd may no longer store the events after that position.
//! Clients of server-sent events do not treat such an id as an event.
//!
//! gpushd sends the next chunk only after the client has read the previous chunk. A client that does not read occupies
//! only its connection. `listen::connection_timer` closes that connection after a time limit.

use std::{
    convert::Infallible,
    fmt::Write as _,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use gpush_api::{ApiError, Code, Event, EventKind, EventPayload, Resync};
use gpush_core::quote::Quoted;
use hyper::body::Frame;
use jiff::Timestamp;
use serde::Deserialize;
use tokio::{sync::mpsc, time::Instant};
use tokio_util::task::AbortOnDropHandle;

use super::{HttpHandles, endless::Endless, extract::Parameters, failure::Failure, response_limiter::ResponseLimiter};
use crate::{
    requests::caller::Caller,
    serve::authorization::Authorization,
    state::{
        self,
        events::{Cursor, Filter, Next},
        redact,
    },
    system::tasks::{TaskFailure, TaskName, Tasks},
};

/// Returns the routes of this module.
pub(super) fn routes() -> Router<HttpHandles> {
    Router::new().route("/v1/events", get(stream))
}

/// After this time without data on a stream, gpushd sends the current position.
const ALIVE: Duration = Duration::from_secs(15);

/// Name of the header with the id of the last event that the client received.
const LAST: &str = "last-event-id";

/// Parameters of `GET /v1/events`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(test, derive(utoipa::IntoParams))]
#[cfg_attr(test, into_params(parameter_in = Query))]
struct EventParameters {
    /// Only these kinds, separated by commas: values of `kind` in `Event`. `resync` is always sent.
    kinds: Option<String>,
    /// Only events of these GPUs: selectors separated by commas.
    gpu: Option<String>,
    /// `false` returns the events that gpushd still has as one JSON list, instead of a stream. With
    /// `Last-Event-ID`, the list has only the events after that event.
    follow: Option<bool>,
}

/// Streams changes as server-sent events, whose `data` is an `Event`.
///
/// With the header `Last-Event-ID`, the stream starts with the events after that event. If gpushd
/// no longer has these events, the stream starts with a `resync`. This request causes no driver
/// call.
#[cfg_attr(test, utoipa::path(
    get, path = "/v1/events", operation_id = "streamEvents", tag = "events",
    params(EventParameters, ("Last-Event-ID" = Option<String>, Header, description = "Id of the last event that the client received")),
    responses((status = 200, description = "The stream", body = Event, content_type = "text/event-stream"), (status = "default", description = "What went wrong", body = gpush_api::ApiError))))]
async fn stream(
    State(state): State<state::State>,
    State(authorization): State<Authorization>,
    State(limiter): State<ResponseLimiter>,
    State(tasks): State<Tasks>,
    caller: Caller,
    headers: HeaderMap,
    Parameters(parameters): Parameters<EventParameters>,
) -> Result<Response, Failure> {
    let filter = Filter {
        kinds: parameters.kinds.as_deref().map(kinds).transpose()?,
        gpus: parameters.gpu.as_deref().map(|text| state.now().named(text)).transpose()?,
    };
    // If the header is not text, treat it as an unknown event id.
    let last = headers.get(LAST).map(|id| id.to_str().unwrap_or_default());
    if parameters.follow == Some(false) {
        let cursor = last.map_or_else(|| state.events().listen_from_oldest(), |id| state.events().listen(Some(id)));
        let of = caller.clone();
        let kept = async move { Ok::<Vec<Event>, Failure>(stored_events(cursor, &filter, &of)) };
        return limiter.answer(&caller, StatusCode::OK, kept).await;
    }
    let cursor = state.events().listen(last);
    // The channel holds one chunk. Later events stay in the ring buffer, which all listeners share.
    let (pieces, taken) = mpsc::channel(1);
    let telling = send_events(authorization, caller, cursor, filter, pieces);
    let telling = tasks.once(TaskName::EventStream, telling).abort_on_drop();
    let mut response = Body::new(EventStream { pieces: taken, _telling: telling }).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    response.extensions_mut().insert(Endless);
    Ok(response)
}

/// Returns the stored events without waiting.
fn stored_events(mut cursor: Cursor, filter: &Filter, caller: &Caller) -> Vec<Event> {
    let mut kept = Vec::new();
    loop {
        match cursor.poll() {
            Next::Events(events) => {
                kept.extend(events.iter().filter(|event| filter.wants(event)).map(|event| shown(event, caller)));
            }
            Next::Resync(reason) => kept.push(resync(&cursor, Resync { reason })),
            Next::Nothing | Next::Closed => return kept,
        }
    }
}

/// Sends the selected events to a client until the client disconnects or there are no further events.
async fn send_events(
    authorization: Authorization,
    mut caller: Caller,
    mut cursor: Cursor,
    filter: Filter,
    pieces: mpsc::Sender<Bytes>,
) {
    let mut text = position_line(&cursor);
    let mut silent_since = Instant::now();
    loop {
        // Take events only when the channel has room. Until then, the events of a slow client stay in the ring buffer.
        let Ok(room) = pieces.reserve().await else { return };
        if !text.is_empty() {
            silent_since = Instant::now();
            room.send(Bytes::from(std::mem::take(&mut text)));
            continue;
        }
        match cursor.next(silent_since + ALIVE).await {
            Next::Events(events) => {
                for event in events {
                    if let EventPayload::Config(_) = event.what {
                        // The new config may have other admin groups, so the caller's rights may have changed.
                        caller = authorization.identify(caller.peer.clone()).await;
                    }
                    if filter.wants(&event) {
                        frame(&mut text, &shown(&event, &caller));
                    }
                }
            }
            Next::Resync(reason) => {
                // The missing events may include a change of the config, and so of the admin groups.
                caller = authorization.identify(caller.peer.clone()).await;
                frame(&mut text, &resync(&cursor, Resync { reason }));
            }
            Next::Nothing => text = position_line(&cursor),
            Next::Closed => return,
        }
        if text.is_empty() && silent_since.elapsed() >= ALIVE {
            text = position_line(&cursor);
        }
    }
}

/// Returns an event as `caller` may see it.
fn shown(event: &Event, caller: &Caller) -> Event {
    let mut event = event.clone();
    redact::event(&mut event.what, caller.viewer);
    event
}

fn resync(cursor: &Cursor, resync: Resync) -> Event {
    Event { id: cursor.id(), at: Timestamp::now(), what: EventPayload::Resync(resync) }
}

fn frame(text: &mut String, event: &Event) {
    // Serialization of this type cannot fail. The JSON has no line breaks.
    let data = serde_json::to_string(event).unwrap_or_default();
    let _ = write!(text, "id: {}\nevent: {}\ndata: {data}\n\n", event.id, event.what.kind().name());
}

fn position_line(cursor: &Cursor) -> String {
    format!("id: {}\n\n", cursor.id())
}

fn kinds(text: &str) -> Result<Vec<EventKind>, ApiError> {
    let kind = |name: &str| {
        EventKind::named(name).ok_or_else(|| {
            ApiError::new(Code::BadRequest, format!("{} is not a kind of event", Quoted(name)))
                .hint(format!("the kinds are: {}", EventKind::names()))
        })
    };
    text.split(',').map(|name| kind(name.trim())).collect()
}

/// Body of a stream.
struct EventStream {
    pieces: mpsc::Receiver<Bytes>,
    /// Aborts the sending task when the client disconnects.
    _telling: AbortOnDropHandle<Result<(), TaskFailure>>,
}

impl hyper::body::Body for EventStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.pieces.poll_recv(context).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

/// The paths of this module, for the description of the API.
#[cfg(test)]
#[derive(utoipa::OpenApi)]
#[openapi(paths(stream))]
pub(super) struct EventPaths;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gpush_api::{GpuIndex, UnleasedChange, UnleasedStep};
    use gpush_core::config::Config;
    use gpush_host::{
        identity::Users,
        peer::Peer,
        users::{Lookups, NameService},
    };
    use gpush_store::{Options, Store};

    use super::*;

    fn unleased() -> EventPayload {
        EventPayload::Unleased(Box::new(UnleasedChange {
            gpu: GpuIndex(0),
            gpu_uuid: "GPU-0".into(),
            device: None,
            pid: Some(4711),
            uid: Some(1001),
            user: Some("bob".to_owned()),
            command: Some("train".to_owned()),
            why: "its user holds no lease".to_owned(),
            step: UnleasedStep::Asked,
        }))
    }

    /// Fault: a stream that fell behind missed the event of a new config, so a former administrator kept the rights.
    #[tokio::test]
    async fn stream_after_resync_has_the_rights_of_the_new_config() {
        let scratch = tempfile::tempdir().unwrap();
        let store = Store::open(scratch.path(), Options::default()).unwrap().store;
        let group = |name: &String| Some((name == "ops").then_some(27));
        let names = NameService::with(Lookups { group: Box::new(group), ..Lookups::empty() }).unwrap();
        let state = state::State::empty();
        let config = |text: &str| Arc::new(Config::parse(text, "c").unwrap());
        state.replace_config(config("[access]\nadmin_groups = [\"ops\"]\n"), 1);
        let authorization = Authorization::new(state.clone(), Users::new(names, 990, scratch.path()), store, 990);
        let peer = Peer { uid: 1000, pid: Some(1), start: None, groups: vec![27], is_on_this_host: true };
        let caller = authorization.identify(peer).await;
        assert!(caller.viewer.is_admin());
        let (cursor, filter) = (state.events().listen(None), Filter { kinds: None, gpus: None });
        let (pieces, mut taken) = mpsc::channel(1);
        state.replace_config(config(""), 2);
        // More events than gpushd stores.
        (0..5000).for_each(|_| state.events().publish(unleased()));
        let sending = tokio::spawn(send_events(authorization, caller, cursor, filter, pieces));
        let mut next = async || String::from_utf8(taken.recv().await.unwrap().to_vec()).unwrap();
        assert!(next().await.starts_with("id: "), "the position");
        assert!(next().await.contains("event: resync"));
        state.events().publish(unleased());
        let event = next().await;
        assert!(event.contains("event: unleased") && !event.contains("4711"), "{event}");
        sending.abort();
    }
}
