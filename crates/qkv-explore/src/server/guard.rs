//! Who may ask: only pages of this server. A browser that was led here by another site's name, or by another site's script, is
//! turned away; so is anyone without the token, where the server listens beyond this machine.

use super::State;
use super::answer::Refusal;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;

/// The largest body of a request, in bytes.
pub(super) const BODY: usize = 256 << 10;

/// What is known of who may ask.
pub(super) struct Guard {
    address: SocketAddr,
    token: Option<String>,
    /// Cookies know no ports: each server has its own.
    cookie: String,
    /// The scripts that stand in the page itself carry this.
    pub nonce: String,
}

/// Numbers that nobody outside can guess: the seeds of the standard library's hash tables come from the system.
fn secret() -> String {
    let part = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", part(), part())
}

impl Guard {
    pub fn new(address: SocketAddr) -> Guard {
        let token = (!address.ip().is_loopback()).then(secret);
        Guard { address, token, cookie: format!("qkv-token-{}=", address.port()), nonce: secret() }
    }

    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// Whether a Host is this server's: against a name of someone else's that was pointed here.
    fn knows(&self, host: &str) -> bool {
        let port = self.address.port();
        let mut names = vec![self.address.to_string()];
        if self.address.ip().is_loopback() {
            names.extend([format!("localhost:{port}"), format!("127.0.0.1:{port}"), format!("[::1]:{port}")]);
        }
        // Browsers leave out the port that everyone knows.
        if port == 80 {
            names.extend(["localhost", "127.0.0.1", "[::1]"].map(String::from));
        }
        // With a token the name matters no more.
        self.token.is_some() || names.iter().any(|name| name.eq_ignore_ascii_case(host))
    }

    /// Whether the token is there: in the address once, in a cookie afterwards.
    fn admits(&self, query: Option<&str>, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else { return true };
        let same = |found: &str| {
            // Every character is looked at, so that time tells nothing.
            let differ = found.bytes().zip(token.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
            found.len() == token.len() && differ == 0
        };
        let in_query = query.unwrap_or("").split('&').filter_map(|pair| pair.strip_prefix("token=")).any(same);
        let cookies = headers.get(header::COOKIE).and_then(|value| value.to_str().ok()).unwrap_or("");
        in_query || cookies.split(';').filter_map(|pair| pair.trim().strip_prefix(&self.cookie[..])).any(same)
    }
}

/// Whether a request comes from a page of this server, as far as the browser says.
fn is_own(headers: &HeaderMap, host: &str) -> bool {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let site = text(HeaderName::from_static("sec-fetch-site"));
    let origin = text(header::ORIGIN);
    site.is_none_or(|site| matches!(site, "same-origin" | "none"))
        && origin.is_none_or(|origin| origin == format!("http://{host}"))
}

/// Turns away who may not ask, and says with every answer what a page may do.
pub(super) async fn check(
    axum::extract::State(state): axum::extract::State<Arc<State>>,
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
    // A link from elsewhere may open the page; nothing else of another site's may ask for anything.
    let opens = request.uri().path() == "/" && request.method() == axum::http::Method::GET;
    let mut response = if !guard.knows(&host) {
        Refusal::new(StatusCode::FORBIDDEN, format!("this server is not `{host}`")).into_response()
    } else if !guard.admits(request.uri().query(), headers) {
        let hint = "open the address that the program printed, with its token";
        Refusal::new(StatusCode::UNAUTHORIZED, "the token is missing or wrong").hint(hint).into_response()
    } else if !opens && !is_own(headers, &host) {
        Refusal::new(StatusCode::FORBIDDEN, "another site asks").into_response()
    } else {
        next.run(request).await
    };
    let policy = format!(
        "default-src 'none'; script-src 'self' 'nonce-{}'; style-src 'self'; img-src 'self' data: blob:; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        guard.nonce
    );
    let opened = opens && response.status().is_success();
    let mut set = |name: HeaderName, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            response.headers_mut().insert(name, value);
        }
    };
    set(header::CONTENT_SECURITY_POLICY, &policy);
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
    fn beyond_this_machine_every_request_brings_the_token() {
        let guard = Guard::new("192.0.2.7:8000".parse().expect("an address"));
        let token = guard.token().expect("a token").to_owned();
        let with = |cookie: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::COOKIE, HeaderValue::from_str(cookie).expect("plain"));
            headers
        };
        assert!(guard.admits(Some(&format!("a=1&token={token}")), &HeaderMap::new()));
        assert!(guard.admits(None, &with(&format!("other=1; qkv-token-8000={token}"))));
        assert!(!guard.admits(None, &HeaderMap::new()));
        assert!(!guard.admits(Some("token="), &with(&format!("qkv-token-9000={token}"))));
        assert!(!guard.admits(Some(&format!("token={token}0")), &HeaderMap::new()));
        assert_ne!(Guard::new("192.0.2.7:8000".parse().expect("an address")).token(), Some(&token[..]));
        assert_eq!(Guard::new("127.0.0.1:8000".parse().expect("an address")).token(), None);
    }

    #[test]
    fn on_loopback_only_its_own_names_are_known() {
        let guard = Guard::new("127.0.0.1:80".parse().expect("an address"));
        assert!(guard.knows("127.0.0.1") && guard.knows("LOCALHOST:80") && guard.knows("[::1]:80"));
        assert!(!guard.knows("evil.example") && !guard.knows("127.0.0.1:81") && !guard.knows(""));
    }
}
