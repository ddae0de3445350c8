//! Access control: only pages of this server may send requests.
//!
//! Rejects a Host that is not the server's own (DNS rebinding) and requests from scripts of other origins. A server
//! that listens beyond loopback also requires a token. Sets the security headers of every response.

use super::AppState;
use super::answer::{ApiError, errors_as_json};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::SocketAddr;
use std::sync::Arc;

/// The Content-Security-Policy of responses without inline scripts, errors among them.
const POLICY: &str = "default-src 'none'; frame-ancestors 'none'";

/// Address and token of the server.
pub(super) struct Guard {
    address: SocketAddr,
    token: Option<String>,
    /// Name of the cookie that holds the token, `=` included. Cookies ignore ports, so the port is part of the name.
    cookie: String,
}

/// 128 random bits from the operating system, in hexadecimal.
pub(super) fn random_token() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The policy of a page whose inline scripts carry `nonce`.
pub(super) fn page_policy(nonce: &str) -> String {
    format!(
        "default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self'; img-src 'self' data: blob:; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}

impl Guard {
    pub fn new(address: SocketAddr) -> Guard {
        let token = (!address.ip().is_loopback()).then(random_token);
        Guard { address, token, cookie: format!("qkv-token-{}=", address.port()) }
    }

    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// Whether a Host header names this server. With a token any name will do: the token is the proof.
    fn is_own_host(&self, host: &str) -> bool {
        let port = self.address.port();
        let mut names = vec![self.address.to_string()];
        if self.address.ip().is_loopback() {
            names.extend([format!("localhost:{port}"), format!("127.0.0.1:{port}"), format!("[::1]:{port}")]);
        }
        // Browsers leave out the default port.
        if port == 80 {
            names.extend(["localhost", "127.0.0.1", "[::1]"].map(String::from));
        }
        self.token.is_some() || names.iter().any(|name| name.eq_ignore_ascii_case(host))
    }

    /// Whether the request carries the token: in the URL the first time, in the cookie afterwards.
    fn is_authorized(&self, query: Option<&str>, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else { return true };
        let same = |found: &str| {
            // Constant time: all characters are compared.
            let differ = found.bytes().zip(token.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
            found.len() == token.len() && differ == 0
        };
        let in_query = query.unwrap_or("").split('&').filter_map(|pair| pair.strip_prefix("token=")).any(same);
        let cookies = headers.get(header::COOKIE).and_then(|value| value.to_str().ok()).unwrap_or("");
        in_query || cookies.split(';').filter_map(|pair| pair.trim().strip_prefix(&self.cookie[..])).any(same)
    }
}

/// Whether a request comes from a page of this server, as far as the browser reports it.
fn is_same_origin(headers: &HeaderMap, host: &str) -> bool {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let site = text(HeaderName::from_static("sec-fetch-site"));
    let origin = text(header::ORIGIN);
    site.is_none_or(|site| matches!(site, "same-origin" | "none"))
        && origin.is_none_or(|origin| origin == format!("http://{host}"))
}

/// Middleware: rejects requests that are not allowed, and sets the security headers of every response.
pub(super) async fn check(
    axum::extract::State(state): axum::extract::State<Arc<AppState>>,
    request: Request,
    next: Next,
) -> Response {
    let guard = &state.guard;
    let headers = request.headers();
    let hosts: Vec<_> = headers.get_all(header::HOST).iter().collect();
    let host = match hosts[..] {
        [host] => host.to_str().unwrap_or("").to_owned(),
        _ => String::new(),
    };
    // A link on another site may open the page, and nothing else.
    let opens_page = request.uri().path() == "/" && request.method() == axum::http::Method::GET;
    let response = if !guard.is_own_host(&host) {
        ApiError::new(StatusCode::FORBIDDEN, format!("this server is not `{host}`")).into_response()
    } else if !guard.is_authorized(request.uri().query(), headers) {
        let hint = "open the address that the program printed, with its token";
        ApiError::new(StatusCode::UNAUTHORIZED, "the token is missing or wrong").hint(hint).into_response()
    } else if !opens_page && !is_same_origin(headers, &host) {
        ApiError::new(StatusCode::FORBIDDEN, "the request comes from another site").into_response()
    } else {
        next.run(request).await
    };
    let mut response = errors_as_json(response).await;
    let opened = opens_page && response.status().is_success();
    let mut set = |name: HeaderName, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            response.headers_mut().entry(name).or_insert(value);
        }
    };
    // The page has set its own policy.
    set(header::CONTENT_SECURITY_POLICY, POLICY);
    set(header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(header::REFERRER_POLICY, "no-referrer");
    set(HeaderName::from_static("cross-origin-resource-policy"), "same-origin");
    if let Some(token) = guard.token().filter(|_| opened) {
        set(header::SET_COOKIE, &format!("{}{token}; HttpOnly; SameSite=Strict; Path=/", guard.cookie));
    }
    response
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Guard({})", self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_loopback_every_request_needs_the_token() {
        let guard = Guard::new("192.0.2.7:8000".parse().expect("an address"));
        let token = guard.token().expect("a token").to_owned();
        let with = |cookie: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::COOKIE, HeaderValue::from_str(cookie).expect("plain"));
            headers
        };
        assert!(guard.is_authorized(Some(&format!("a=1&token={token}")), &HeaderMap::new()));
        assert!(guard.is_authorized(None, &with(&format!("other=1; qkv-token-8000={token}"))));
        assert!(!guard.is_authorized(None, &HeaderMap::new()));
        assert!(!guard.is_authorized(Some("token="), &with(&format!("qkv-token-9000={token}"))));
        assert!(!guard.is_authorized(Some(&format!("token={token}0")), &HeaderMap::new()));
        assert_ne!(Guard::new("192.0.2.7:8000".parse().expect("an address")).token(), Some(&token[..]));
        assert_eq!(Guard::new("127.0.0.1:8000".parse().expect("an address")).token(), None);
    }

    #[test]
    fn on_loopback_only_its_own_names_are_accepted() {
        let guard = Guard::new("127.0.0.1:80".parse().expect("an address"));
        assert!(guard.is_own_host("127.0.0.1") && guard.is_own_host("LOCALHOST:80") && guard.is_own_host("[::1]:80"));
        assert!(!guard.is_own_host("evil.example") && !guard.is_own_host("127.0.0.1:81") && !guard.is_own_host(""));
    }
}
