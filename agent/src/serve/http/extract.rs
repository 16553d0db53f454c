//! Extractors with the API's errors: JSON bodies, query parameters, path parts.

use std::{fmt, marker::PhantomData, time::Duration};

use axum::{
    Json,
    extract::{FromRef, FromRequest, FromRequestParts, Path, Query, Request, rejection::JsonRejection},
    http::{HeaderValue, StatusCode, request::Parts},
};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, MapAccess, Visitor, value::MapAccessDeserializer},
};

use gpush_host::peer::Peer;

use super::{
    body::{self, BodyError},
    body_text,
    failure::{Failure, shown},
};
use crate::{
    requests::{
        caller::Caller,
        idempotency::{self, Header},
    },
    serve::authorization::Authorization,
};

/// Maximum time until the whole request body has arrived.
const BODY_TIME: Duration = Duration::from_secs(5);

/// A JSON body.
pub(super) struct Body<T>(pub(super) T);

/// A JSON object with named fields. serde alone would also accept an array, and assign its values to the fields in
/// order.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields))
            }
        }

        deserializer.deserialize_map(Fields(PhantomData)).map(Self)
    }
}

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        let path = request.uri().path().to_owned();
        let (parts, body) = request.into_parts();
        let whole = Request::from_parts(parts.clone(), body);
        let Ok(bytes) = tokio::time::timeout(BODY_TIME, body::receive(whole)).await else {
            let message = format!("the body of a request to {path} did not arrive within {}s", BODY_TIME.as_secs());
            return Err(Failure::bad_request(StatusCode::REQUEST_TIMEOUT, message));
        };
        let bytes = bytes.map_err(|error| match error {
            BodyError::TooLarge => {
                Failure::bad_request(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {path} takes"))
                    .hint("docs/api.md lists the limits of requests")
            }
            BodyError::Broken(why) => {
                Failure::bad_request(StatusCode::BAD_REQUEST, format!("the body of the request is broken: {why}"))
            }
        })?;
        if !body_text::has_short_strings(&bytes) {
            let message = format!("a string in the body is longer than {} bytes", body_text::LONGEST);
            return Err(Failure::bad_request(StatusCode::PAYLOAD_TOO_LARGE, message).hint("shorten it"));
        }
        let read = Json::<Object<T>>::from_request(Request::from_parts(parts, bytes.into()), state).await;
        read.map(|Json(Object(body))| Self(body)).map_err(|rejection| {
            let status = rejection.status();
            match rejection {
                JsonRejection::MissingJsonContentType(_) => {
                    Failure::bad_request(status, format!("{path} takes JSON, but the request has another content type"))
                        .hint("send the header `content-type: application/json`")
                }
                // The text of this error names the wrong field and its position.
                JsonRejection::JsonDataError(error) => unfit(&path, &error.body_text()),
                JsonRejection::JsonSyntaxError(error) => unfit(&path, &error.body_text()),
                other => Failure::bad_request(status, other.body_text()),
            }
        })
    }
}

/// Creates the error for a body that is not JSON or does not match the expected type. Removes from `text` the prefix
/// that axum adds.
fn unfit(path: &str, text: &str) -> Failure {
    let detail = detail(text);
    Failure::bad_request(StatusCode::BAD_REQUEST, format!("the body is not valid for {path}: {detail}"))
        .hint("GET /v1/openapi.json describes the body")
}

/// Maximum length of the detail of an error, in characters. It can contain a field name or a value from the request.
const LONGEST_DETAIL: usize = 500;

/// Returns the detail of an error without the prefix that axum adds. Shortens a long detail in its middle, because its end
/// has the position and the known fields.
fn detail(text: &str) -> String {
    let detail = gpush_api::text::plain(text.split_once(": ").map_or(text, |(_, detail)| detail));
    let length = detail.chars().count();
    if length <= LONGEST_DETAIL {
        return detail;
    }
    let half = LONGEST_DETAIL / 2;
    let start: String = detail.chars().take(half).collect();
    start + "…" + &detail.chars().skip(length - half).collect::<String>()
}

/// Query parameters.
pub(super) struct Parameters<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Parameters<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(parameters)) => Ok(Self(parameters)),
            Err(rejection) => {
                let detail = detail(&rejection.body_text());
                let message = format!("{} does not take these parameters: {detail}", shown(parts.uri.path()));
                Err(Failure::bad_request(rejection.status(), message)
                    .hint("GET /v1/openapi.json describes the parameters"))
            }
        }
    }
}

/// The variable part of a request's path, such as the GPU in `/v1/gpus/{gpu}`.
pub(super) struct PathPart(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for PathPart {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(part)) => Ok(Self(part)),
            Err(rejection) => Err(Failure::bad_request(rejection.status(), rejection.body_text())),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Header {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let value = parts.headers.get(idempotency::HEADER).map(HeaderValue::as_bytes);
        Self::parse(value).map_err(Failure::from)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller
where
    Authorization: FromRef<S>,
{
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        // The limiter of changing requests has already identified the caller.
        if let Some(caller) = parts.extensions.get::<Self>() {
            return Ok(caller.clone());
        }
        // The accept loop has added the peer to every request, so a request without a peer is a bug.
        let Some(peer) = parts.extensions.get::<Peer>().cloned() else { return Err(Failure::internal()) };
        Ok(Authorization::from_ref(state).identify(peer).await)
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::MpsActionRequest;

    use super::*;

    #[test]
    fn long_detail_of_an_error_is_shortened_in_its_middle() {
        let read =
            |text: &str| detail(&format!("Failed: {}", serde_json::from_str::<MpsActionRequest>(text).unwrap_err()));
        let long = read(&format!("{{\"{}\": 1}}", "x".repeat(4000)));
        assert!(long.starts_with("unknown field `xxx") && long.ends_with("at line 1 column 4003"), "{long}");
        assert_eq!(long.chars().count(), LONGEST_DETAIL + 1);
        assert!(read("{\"farce\": 1}").contains("`farce`"));
    }

    #[test]
    fn request_body_must_be_an_object_with_known_fields() {
        let read = |text: &str| serde_json::from_str::<Object<MpsActionRequest>>(text).map(|Object(read)| read);
        assert!(read("{\"force\": true}").unwrap().force && !read("{}").unwrap().force);
        for text in ["[true]", "[]", "true", "null", "\"force\""] {
            let reported = read(text).unwrap_err().to_string();
            assert!(reported.contains("expected an object"), "{text}: {reported}");
        }
        let reported = read("{\n \"farce\": true}").unwrap_err().to_string();
        assert!(reported.contains("farce") && reported.contains("line 2"), "{reported}");
    }
}
