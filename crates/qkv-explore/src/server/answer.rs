//! Responses of the API: arrays of `f32` as bytes, files to download, and errors as JSON with a hint.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use qkv_models::Error;
use serde_json::json;

/// An error of the API: `{"error": "…", "hint": "…"}` with a status.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    hint: Option<String>,
}

/// What a handler returns.
pub(super) type ApiResult<T = Response> = Result<T, ApiError>;

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), hint: None }
    }

    /// The request is invalid.
    pub fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    pub fn not_found(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, message)
    }

    pub fn hint(mut self, hint: impl Into<String>) -> ApiError {
        self.hint = Some(hint.into());
        self
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        ApiError { status: StatusCode::BAD_REQUEST, message: error.to_string(), hint: error.hint() }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(json!({ "error": self.message, "hint": self.hint }))).into_response()
    }
}

/// The fallback route. No file on the machine is served by its path.
pub(super) async fn not_found() -> ApiError {
    ApiError::not_found("there is no such page")
}

/// Turns an error response that is not JSON, such as a rejected query string, into one that is.
pub(super) async fn errors_as_json(response: Response) -> Response {
    let status = response.status();
    let json = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
    if json || !(status.is_client_error() || status.is_server_error()) {
        return response;
    }
    let text = axum::body::to_bytes(response.into_body(), 4 << 10).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let reason = status.canonical_reason().unwrap_or("the request was refused");
    ApiError::new(status, if text.is_empty() { reason } else { &text }).into_response()
}

/// An array of `f32`, little-endian; `sampled` marks values computed from some of the rows only.
pub(super) fn numbers(values: &[f32], sampled: bool) -> Response {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut response = ([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response();
    if sampled {
        response.headers_mut().insert(HeaderName::from_static("qkv-sampled"), HeaderValue::from_static("1"));
    }
    response
}

/// A file to download.
pub(super) fn download(name: &str, content_type: &'static str, bytes: Vec<u8>) -> Response {
    let disposition = format!("attachment; filename=\"{name}\"");
    ([(header::CONTENT_TYPE, content_type.to_owned()), (header::CONTENT_DISPOSITION, disposition)], bytes)
        .into_response()
}
