//! Requests to an in-process gpushd, and its answers.

use std::task::Poll;

use axum::{Router, body::Body, extract::Request};
use gpush_api::{ApiError, Health, Operation, OperationSummary, Reloaded};
use gpush_host::peer::Peer;
use http_body_util::BodyExt;
use hyper::{HeaderMap, Method, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;
use tower_service::Service;

use super::{InProcess, user};

/// An answer.
#[derive(Debug)]
pub(super) struct HttpAnswer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

impl HttpAnswer {
    /// Returns the body as JSON.
    pub(super) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }

    /// Returns the body as a document, or as an error.
    pub(super) fn document<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        if self.status.is_success() {
            return Ok(serde_json::from_value(self.json()).expect("the answer of this path"));
        }
        Err(self.error())
    }

    /// Returns the body as an error.
    pub(super) fn error(&self) -> ApiError {
        assert!(!self.status.is_success(), "{:?}", self.text());
        serde_json::from_value(self.json()).unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A request that a test sends while it does something else. If this value is dropped, the client disconnects.
pub(super) type PendingAnswer = AbortOnDropHandle<HttpAnswer>;

/// Sends a request to a router. Returns the answer with its body as a stream.
pub(super) async fn call(mut router: Router, request: Request) -> axum::response::Response {
    std::future::poll_fn(|context| match Service::<Request>::poll_ready(&mut router, context) {
        Poll::Ready(Ok(())) => Poll::Ready(()),
        Poll::Ready(Err(never)) => match never {},
        Poll::Pending => Poll::Pending,
    })
    .await;
    router.call(request).await.unwrap_or_else(|never| match never {})
}

/// Builds a request.
pub(super) fn request(peer: Peer, method: Method, path: &str, headers: &[(&str, &str)], body: Vec<u8>) -> Request {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut request = request.body(Body::from(body)).expect("a request");
    request.extensions_mut().insert(peer);
    request
}

const JSON: (&str, &str) = ("content-type", "application/json");

impl InProcess {
    /// Begins to send a request.
    pub(super) fn begin_request(&self, request: Request) -> PendingAnswer {
        let router = self.router.clone();
        let answer = self.runtime.as_ref().expect("gpushd runs").spawn(async move {
            let response = call(router, request).await;
            let (status, headers) = (response.status(), response.headers().clone());
            let body = response.into_body().collect().await.expect("a body").to_bytes().to_vec();
            HttpAnswer { status, headers, body }
        });
        AbortOnDropHandle::new(answer)
    }

    /// Sends a request of an administrator with these headers.
    pub(super) async fn request(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Vec<u8>>,
    ) -> HttpAnswer {
        self.begin_request(request(user(0), method, path, headers, body.into())).await.expect("an answer")
    }

    /// Begins to send a changing request.
    pub(super) fn begin_post(&self, peer: Peer, path: &str, body: &Value) -> PendingAnswer {
        self.begin_request(request(peer, Method::POST, path, &[JSON], body.to_string().into_bytes()))
    }

    /// Sends a changing request of an administrator with an idempotency key.
    pub(super) async fn post_with_key(&self, path: &str, key: &str, body: &Value) -> HttpAnswer {
        self.request(Method::POST, path, &[JSON, ("idempotency-key", key)], body.to_string()).await
    }

    /// Sends a request. Returns the status and the body.
    pub(super) async fn send(
        &self,
        peer: Peer,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> (StatusCode, Value) {
        let body = body.map_or_else(Vec::new, |body| body.to_string().into_bytes());
        let answer = self.begin_request(request(peer, method, path, &[JSON], body)).await.expect("an answer");
        (answer.status, serde_json::from_slice(&answer.body).unwrap_or(Value::Null))
    }

    /// Reads a document as an administrator.
    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> T {
        self.get_as(user(0), path).await.expect("an administrator may read everything")
    }

    /// Reads a document.
    pub(super) async fn get_as<T: DeserializeOwned>(&self, peer: Peer, path: &str) -> Result<T, ApiError> {
        self.answer(self.send(peer, Method::GET, path, None).await)
    }

    /// Sends a changing request as an administrator.
    pub(super) async fn post<T: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<T, ApiError> {
        self.post_as(user(0), path, body).await
    }

    /// Sends a changing request.
    pub(super) async fn post_as<T: DeserializeOwned>(
        &self,
        peer: Peer,
        path: &str,
        body: &Value,
    ) -> Result<T, ApiError> {
        self.answer(self.send(peer, Method::POST, path, Some(body)).await)
    }

    /// Deletes something as an administrator.
    pub(super) async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        self.answer(self.send(user(0), Method::DELETE, path, None).await)
    }

    fn answer<T: DeserializeOwned>(&self, (status, body): (StatusCode, Value)) -> Result<T, ApiError> {
        if status.is_success() {
            return Ok(serde_json::from_value(body).expect("the answer of this path"));
        }
        Err(serde_json::from_value(body).expect("an error"))
    }

    /// Returns the health.
    pub(super) async fn health(&self) -> Health {
        self.get("/v1/health").await
    }

    /// Replaces the config file, and reloads it.
    pub(super) async fn reload(&self, config: &str) -> Reloaded {
        self.try_reload(config, &json!({})).await.expect("the config is reloaded")
    }

    /// Replaces the config file, and tries to reload it.
    pub(super) async fn try_reload(&self, config: &str, body: &Value) -> Result<Reloaded, ApiError> {
        self.host.write_config(config);
        self.post("/v1/config/reload", body).await
    }

    /// Sends the body as an apply request.
    pub(super) async fn begin_with(&self, body: &Value) -> Result<Operation, ApiError> {
        self.post("/v1/mig/apply", body).await
    }

    /// Begins to apply a layout, or returns why gpushd refuses it.
    pub(super) async fn begin(
        &self,
        selectors: &[&str],
        entries: &[&str],
        more: &Value,
    ) -> Result<Operation, ApiError> {
        let mut body = json!({ "selectors": selectors, "layout_source": { "entries": entries } });
        if let (Some(body), Some(more)) = (body.as_object_mut(), more.as_object()) {
            body.extend(more.clone());
        }
        self.begin_with(&body).await
    }

    /// Begins to apply a layout as soon as that is possible.
    pub(super) async fn begin_waiting(&self, selectors: &[&str], entries: &[&str]) -> Operation {
        self.begin(selectors, entries, &json!({ "wait_s": 3600 })).await.expect("it waits")
    }

    /// Returns why gpushd refuses to apply a layout.
    pub(super) async fn refused(&self, selectors: &[&str], entries: &[&str]) -> ApiError {
        self.begin(selectors, entries, &json!({})).await.expect_err("it is refused")
    }

    /// Applies a layout, and waits for the end of the operation.
    pub(super) async fn apply(&self, selectors: &[&str], entries: &[&str]) -> Operation {
        let begun = self.begin(selectors, entries, &json!({})).await.expect("the operation begins");
        self.ended(&begun).await
    }

    /// Does the same as [`InProcess::apply`], but creates no override.
    pub(super) async fn apply_once(&self, selectors: &[&str], entries: &[&str]) -> Operation {
        let begun = self.begin(selectors, entries, &json!({ "once": true })).await.expect("the operation begins");
        self.ended(&begun).await
    }

    /// Returns an operation.
    pub(super) async fn operation(&self, id: &str) -> Operation {
        self.get(&format!("/v1/operations/{id}")).await
    }

    /// Returns all operations that this and earlier gpushd have begun, oldest first, when they have ended.
    pub(super) async fn operations(&self) -> Vec<Operation> {
        let all: Vec<OperationSummary> = self.get("/v1/operations?limit=200").await;
        let mut ended = Vec::new();
        for one in all {
            ended.push(self.ended(&self.operation(&one.id).await).await);
        }
        ended
    }

    /// Cancels an operation.
    pub(super) async fn cancel(&self, id: &str) -> Result<Operation, ApiError> {
        self.post(&format!("/v1/operations/{id}/cancel"), &json!({})).await
    }

    /// Waits until gpushd has applied or refused each layout that it must apply at its start.
    pub(super) async fn until_layouts_are_settled(&self) {
        self.until("the layouts at start", async || {
            self.health().await.layouts_at_start.filter(|layouts| layouts.complete).map(drop)
        })
        .await;
    }
}
