//! Typed calls of the API.

use std::time::Duration;

use gpush_api::{
    ApiError, AuditRecord, Code, Gpu, GpuHolders, GpuProfile, Health, MaintenanceRequest, MaintenanceState, MigDevice,
    ReasonRequest, Recovered, Version,
};
use http_body_util::{BodyExt, Limited};
use hyper::body::Bytes;
use jiff::Timestamp;
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    API,
    attempts::Answer,
    connection::Connection,
    error::{Error, Kind},
    events::{EventQuery, EventStream, ReceivedEvent},
    failures,
    notifications::{RestartWait, Slow},
    path_segment::segment,
    question::{Question, RETRY_QUEUED_FOR},
    socket::Socket,
};

/// Default time limit for an answer. The limit suffices for every read, because gpushd limits how
/// long a read waits for the driver.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(10);

/// Minimum time limit for entering maintenance. gpushd waits for driver calls in flight, which have their own
/// deadlines.
const ENTERING: Duration = Duration::from_secs(60);

/// Maximum size in bytes of an error that is returned instead of a stream.
const LARGEST_ERROR: usize = 1 << 20;

/// A selection of audit records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditQuery {
    /// Records after this sequence number, oldest first. `None` selects the last records.
    pub after: Option<u64>,
    /// Maximum number of records, 1 to 1000.
    pub limit: usize,
    /// Only records about this object.
    pub object: Option<String>,
    /// Only records from this time or later.
    pub since: Option<Timestamp>,
}

/// A client of one gpushd. Methods take `&mut self`, because requests run one after the other on
/// one connection. The first request opens the connection.
#[derive(Debug)]
pub struct Client {
    pub(crate) wire: Connection,
    pub(crate) deadline: Duration,
}

impl Client {
    /// Creates a client of the gpushd behind `socket`. Does not connect yet.
    #[must_use]
    pub fn new(socket: Socket) -> Self {
        Self { wire: Connection::new(socket), deadline: DEFAULT_DEADLINE }
    }

    /// Sets the time limit for each answer.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Fails immediately if no gpushd listens. Without this call, the client waits a moment for a
    /// gpushd that is starting.
    #[must_use]
    pub fn without_waiting_for_start(mut self) -> Self {
        self.wire.expect_running();
        self
    }

    /// Calls `tell` with the deadline as soon as an answer takes longer than `after`, so that a
    /// command can explain the delay. Does not count a wait that the caller requested
    /// ([`Client::operation_after`]).
    #[must_use]
    pub fn when_slow(mut self, after: Duration, tell: impl Fn(Duration) + Send + Sync + 'static) -> Self {
        self.wire.slow = Some(Slow { after, tell: Box::new(tell) });
        self
    }

    /// Repeats a change for at most `most` while a stopping gpushd refuses it, in addition to the time limit for the
    /// answer. After `silence`, calls `tell` once. Without this call, the time limit for the answer includes the wait.
    #[must_use]
    pub fn wait_for_restart(
        mut self,
        most: Duration,
        silence: Duration,
        tell: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        self.wire.restart_wait = Some(RestartWait { most, silence, tell: Some(Box::new(tell)) });
        self
    }

    /// Returns the socket.
    #[must_use]
    pub fn socket(&self) -> &Socket {
        &self.wire.socket
    }

    /// `GET /v1/version`.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn version(&mut self) -> Result<Version, Error> {
        let version: Version = self.get("/v1/version").await?;
        if version.api != API {
            return Err(other_version(&version));
        }
        Ok(version)
    }

    /// `GET /v1/health`.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn health(&mut self) -> Result<Health, Error> {
        self.get("/v1/health").await
    }

    /// `GET /v1/gpus`, with profiles on request.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn gpus(&mut self, profiles: bool) -> Result<Vec<Gpu>, Error> {
        self.get(if profiles { "/v1/gpus?profiles=true" } else { "/v1/gpus" }).await
    }

    /// `GET /v1/gpus/{index|uuid|pci}`.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn gpu(&mut self, gpu: &str) -> Result<Gpu, Error> {
        self.get(&format!("/v1/gpus/{}", segment(gpu))).await
    }

    /// `GET /v1/gpus/{index|uuid|pci}/profiles`.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn profiles(&mut self, gpu: &str) -> Result<Vec<GpuProfile>, Error> {
        self.get(&format!("/v1/gpus/{}/profiles", segment(gpu))).await
    }

    /// `GET /v1/gpus/{index|uuid|pci}/holders`.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn holders(&mut self, gpu: &str) -> Result<GpuHolders, Error> {
        self.get(&format!("/v1/gpus/{}/holders", segment(gpu))).await
    }

    /// `POST /v1/gpus/{index|uuid|pci}/cordon`. Returns the GPU after the change.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn cordon(&mut self, gpu: &str, why: &ReasonRequest) -> Result<Gpu, Error> {
        self.change(&format!("/v1/gpus/{}/cordon", segment(gpu)), why).await
    }

    /// `POST /v1/gpus/{index|uuid|pci}/uncordon`. Returns the GPU after the change.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn uncordon(&mut self, gpu: &str, why: &ReasonRequest) -> Result<Gpu, Error> {
        self.change(&format!("/v1/gpus/{}/uncordon", segment(gpu)), why).await
    }

    /// `POST /v1/maintenance/enter`. Returns as soon as gpushd has no driver handle open.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn enter_maintenance(&mut self, why: &MaintenanceRequest) -> Result<MaintenanceState, Error> {
        let usual = self.deadline;
        self.deadline = usual.max(ENTERING);
        let entered = self.change("/v1/maintenance/enter", why).await;
        self.deadline = usual;
        entered
    }

    /// `POST /v1/maintenance/leave`.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn leave_maintenance(&mut self, why: &MaintenanceRequest) -> Result<MaintenanceState, Error> {
        self.change("/v1/maintenance/leave", why).await
    }

    /// `POST /v1/recover`. Returns the loss that was accepted.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn recover(&mut self, why: &ReasonRequest) -> Result<Recovered, Error> {
        self.change("/v1/recover", why).await
    }

    /// `GET /v1/mig/devices`. Returns every MIG device with its use.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn mig_devices(&mut self) -> Result<Vec<MigDevice>, Error> {
        self.get("/v1/mig/devices").await
    }

    /// `GET /v1/audit`. Returns one page of records, oldest first.
    ///
    /// # Errors
    /// See [`Kind`]; [`Code::Denied`] for users who are not administrators.
    pub async fn audit(&mut self, query: &AuditQuery) -> Result<Vec<AuditRecord>, Error> {
        let mut parameters = vec![format!("limit={}", query.limit)];
        parameters.extend(query.after.map(|after| format!("after={after}")));
        parameters.extend(query.object.as_ref().map(|object| format!("object={}", segment(object))));
        parameters.extend(query.since.map(|since| format!("since={}", segment(&since.to_string()))));
        self.get(&format!("/v1/audit?{}", parameters.join("&"))).await
    }

    /// `GET /v1/events`, on a separate connection.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn events(&mut self, query: &EventQuery) -> Result<EventStream, Error> {
        let path = query.path(true);
        let question = Question::get(&path).accepting("text/event-stream");
        let response = self.wire.stream(&question, query.after.as_deref(), self.deadline).await?;
        let (head, body) = response.into_parts();
        if head.status.is_success() {
            let socket = self.socket().path.display().to_string();
            return Ok(EventStream::new(body, socket, query.after.clone()));
        }
        let body = match Limited::new(body, LARGEST_ERROR).collect().await {
            Ok(body) => body.to_bytes(),
            Err(_) => Bytes::new(),
        };
        let answer = Answer { status: head.status, body };
        // Decoding an unsuccessful answer returns the error in the answer.
        Err(self
            .decode::<serde_json::Value>(&question, &answer)
            .await
            .err()
            .unwrap_or_else(|| failures::not_http(&self.wire.socket)))
    }

    /// `GET /v1/events?follow=false`. Returns the events that gpushd still stores.
    ///
    /// # Errors
    /// See [`Kind`].
    pub async fn kept_events(&mut self, query: &EventQuery) -> Result<Vec<ReceivedEvent>, Error> {
        let kept: Vec<serde_json::Value> = self.get(&query.path(false)).await?;
        Ok(kept.into_iter().map(ReceivedEvent::of).collect())
    }

    pub(crate) async fn get<T: DeserializeOwned>(&mut self, path: &str) -> Result<T, Error> {
        let question = Question::get(path);
        let answer = self.ask(&question).await?;
        self.decode(&question, &answer).await
    }

    pub(crate) async fn ask(&mut self, question: &Question<'_>) -> Result<Answer, Error> {
        self.wire.ask(question, self.deadline).await
    }

    /// Sends a change with a new idempotency key.
    pub(crate) async fn change<B: Serialize, T: DeserializeOwned>(&mut self, path: &str, body: &B) -> Result<T, Error> {
        self.post(path, body, Some(uuid::Uuid::new_v4().to_string())).await
    }

    /// Sends a change whose answer may take until `deadline`. Never reports the answer as slow,
    /// because the caller has requested the wait.
    pub(crate) async fn change_within<B: Serialize, T: DeserializeOwned>(
        &mut self,
        path: &str,
        body: &B,
        deadline: Duration,
    ) -> Result<T, Error> {
        let body = Bytes::from(json(body)?);
        let key = Some(uuid::Uuid::new_v4().to_string());
        let waits = Question { away: RETRY_QUEUED_FOR, reports_slow: false, ..Question::get(path) };
        let question = Question { method: "POST", body, key, ..waits };
        let answer = self.wire.ask(&question, deadline).await?;
        self.decode(&question, &answer).await
    }

    pub(crate) fn deadline_mut(&mut self) -> &mut Duration {
        &mut self.deadline
    }

    /// Returns the time that an answer may take.
    pub(crate) fn answer_deadline(&self) -> Duration {
        self.deadline
    }

    pub(crate) async fn post<B: Serialize, T: DeserializeOwned>(
        &mut self,
        path: &str,
        body: &B,
        key: Option<String>,
    ) -> Result<T, Error> {
        let question = Question { method: "POST", body: Bytes::from(json(body)?), key, ..Question::get(path) };
        let answer = self.ask(&question).await?;
        self.decode(&question, &answer).await
    }

    pub(crate) async fn decode<T: DeserializeOwned>(
        &mut self,
        question: &Question<'_>,
        answer: &Answer,
    ) -> Result<T, Error> {
        match parsed(answer) {
            Ok(value) => Ok(value),
            Err(Unparsed::Refusal(error)) => Err(error),
            Err(Unparsed::OtherForm(cause)) => {
                let asked = self.wire.ask(&Question::get(VERSION), self.deadline).await;
                Err(other_form(&self.wire.socket, question, asked.ok(), cause))
            }
        }
    }
}

/// Path of the version of gpushd.
pub(crate) const VERSION: &str = "/v1/version";

/// Why an answer contains no value.
pub(crate) enum Unparsed {
    /// gpushd answered with an error.
    Refusal(Error),
    /// The answer has another form than those of this version of gpushd. The text says what is wrong.
    OtherForm(String),
}

/// Parses an answer.
pub(crate) fn parsed<T: DeserializeOwned>(answer: &Answer) -> Result<T, Unparsed> {
    if answer.status.is_success() {
        return serde_json::from_slice(&answer.body).map_err(|e| Unparsed::OtherForm(e.to_string()));
    }
    Err(match api_error(&answer.body) {
        Some(error) => Unparsed::Refusal(Error::new(Kind::Answer, error)),
        None => Unparsed::OtherForm(format!(
            "the answer has HTTP status {}, but does not contain an error of the gpushd API",
            answer.status
        )),
    })
}

/// Returns the error for an answer that cannot be parsed. The sender is a gpushd of another version, or another program.
/// `version` is its answer to a request for [`VERSION`].
pub(crate) fn other_form(socket: &Socket, question: &Question<'_>, version: Option<Answer>, cause: String) -> Error {
    let version = version.and_then(|answer| serde_json::from_slice::<Version>(&answer.body).ok());
    let mut error = match version {
        Some(version) if version.api != API => other_version(&version),
        Some(version) => {
            let text = format!(
                "gpushd {} answered {question} in a form that gpushctl {} does not know",
                version.agent,
                env!("CARGO_PKG_VERSION")
            );
            Error::new(Kind::Foreign, ApiError::new(Code::Unreachable, text).hint(SAME_VERSION))
        }
        None => failures::not_http(socket),
    };
    error.error.causes.push(cause);
    error
}

pub(crate) fn json<B: Serialize>(body: &B) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(body).map_err(|e| {
        let error = ApiError::new(Code::Internal, "cannot write the request as JSON");
        Error::new(Kind::Connect, error.cause(e.to_string()))
    })
}

const SAME_VERSION: &str = "install the same version of gpushd and gpushctl, then run `systemctl restart gpushd`";

fn other_version(version: &Version) -> Error {
    let text = format!(
        "gpushd {} uses API {}, but this client (version {}) uses API {API}",
        version.agent,
        version.api,
        env!("CARGO_PKG_VERSION")
    );
    Error::new(Kind::Foreign, ApiError::new(Code::Unreachable, text).hint(SAME_VERSION))
}

/// Parses the error in a body. An error with an unknown code keeps its text.
fn api_error(body: &[u8]) -> Option<ApiError> {
    if let Ok(error) = serde_json::from_slice(body) {
        return Some(error);
    }
    let mut value: serde_json::Value = serde_json::from_slice(body).ok()?;
    value.get("code")?.as_str()?;
    value["code"] = serde_json::to_value(Code::Internal).ok()?;
    serde_json::from_value(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_with_unknown_code_keeps_its_text() {
        let body = br#"{"code":"cordoned","message":"GPU 3 is cordoned","hint":"gpushctl uncordon 3"}"#;
        let error = api_error(body).unwrap();
        assert_eq!(error.code, Code::Internal);
        assert_eq!(error.message, "GPU 3 is cordoned");
        assert_eq!(error.hint.as_deref(), Some("gpushctl uncordon 3"));
        assert!(api_error(b"<html>").is_none());
        assert!(api_error(br#"{"message":"x"}"#).is_none());
        assert!(api_error(br#"{"code":7,"message":"x"}"#).is_none());
    }
}
