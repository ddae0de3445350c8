//! What goes back: numbers as bytes, JSON, and refusals in one sentence with a hint.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use qkv_models::Error;
use serde_json::json;

/// Why a request was turned down.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    what: String,
    hint: Option<String>,
}

/// What a handler gives.
pub(super) type Answer<T = Response> = Result<T, Refusal>;

impl Refusal {
    pub fn new(status: StatusCode, what: impl Into<String>) -> Refusal {
        Refusal { status, what: what.into(), hint: None }
    }

    /// Something that was asked makes no sense.
    pub fn bad(what: impl Into<String>) -> Refusal {
        Refusal::new(StatusCode::BAD_REQUEST, what)
    }

    /// Something that was asked for is not there.
    pub fn missing(what: impl Into<String>) -> Refusal {
        Refusal::new(StatusCode::NOT_FOUND, what)
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Refusal {
        self.hint = Some(hint.into());
        self
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal { status: StatusCode::BAD_REQUEST, what: error.to_string(), hint: error.hint() }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, Json(json!({ "error": self.what, "hint": self.hint }))).into_response()
    }
}

/// Nothing is served by path but what the program knows.
pub(super) async fn missing() -> Refusal {
    Refusal::missing("there is no such page")
}

/// Numbers as bytes, and whether they were made from some of the rows only.
pub(super) fn numbers(values: &[f32], sampled: bool) -> Response {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut response = ([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response();
    if sampled {
        response.headers_mut().insert(HeaderName::from_static("qkv-sampled"), HeaderValue::from_static("1"));
    }
    response
}

/// A file to keep.
pub(super) fn download(name: &str, kind: &'static str, bytes: Vec<u8>) -> Response {
    let disposition = format!("attachment; filename=\"{name}\"");
    ([(header::CONTENT_TYPE, kind.to_owned()), (header::CONTENT_DISPOSITION, disposition)], bytes).into_response()
}
