//! Accepts connections and protects the server from slow clients.
//!
//! A client has [`Limits::header`] to send the head of a request and [`Limits::body`] to send its body. At most
//! [`Limits::connections`] are open: when one more arrives, the connection that has been idle the longest is closed. A
//! connection is idle unless a handler is working on one of its requests; a client that does not read its response is
//! idle, too. What is served does not matter here: [`serve`] takes any [`Router`].

use super::answer::ApiError;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tower_service::Service;

/// How long to wait before asking again for a free slot, or after `accept` has failed.
const RETRY: Duration = Duration::from_millis(50);

/// How much a client may use.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Open connections.
    pub connections: usize,
    /// Time to send the head of a request, counted from the previous response on a connection that is kept alive.
    pub header: Duration,
    /// Time to send the body.
    pub body: Duration,
    /// Size of the body in bytes.
    pub body_size: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        // A browser opens six connections. 96 leave room under the 256 file handles of a modest system.
        let (header, body) = (Duration::from_secs(10), Duration::from_secs(10));
        Limits { connections: 96, header, body, body_size: 256 << 10 }
    }
}

/// One open connection.
#[derive(Debug)]
struct Connection {
    state: Mutex<Activity>,
    close: Notify,
}

#[derive(Debug)]
struct Activity {
    /// Requests that a handler is working on.
    handling: usize,
    idle_since: Instant,
}

impl Connection {
    fn new() -> Arc<Connection> {
        let state = Mutex::new(Activity { handling: 0, idle_since: Instant::now() });
        Arc::new(Connection { state, close: Notify::new() })
    }

    fn idle_since(&self) -> Option<Instant> {
        let state = self.state.lock().expect("not poisoned");
        (state.handling == 0).then_some(state.idle_since)
    }

    fn begin(self: &Arc<Self>) -> Handling {
        self.state.lock().expect("not poisoned").handling += 1;
        Handling(self.clone())
    }
}

/// A request in a handler; ends when dropped, so also when the client leaves.
struct Handling(Arc<Connection>);

impl Drop for Handling {
    fn drop(&mut self) {
        let mut state = self.0.state.lock().expect("not poisoned");
        state.handling -= 1;
        state.idle_since = Instant::now();
    }
}

/// All open connections.
#[derive(Debug, Default)]
struct Open(Mutex<BTreeMap<u64, Arc<Connection>>>);

impl Open {
    fn insert(&self, id: u64, connection: Arc<Connection>) {
        self.0.lock().expect("not poisoned").insert(id, connection);
    }

    fn remove(&self, id: u64) {
        self.0.lock().expect("not poisoned").remove(&id);
    }

    /// Asks the connection that has been idle the longest to close, if any is idle.
    fn close_oldest_idle(&self) {
        let open = self.0.lock().expect("not poisoned");
        let idle = open.values().filter_map(|connection| Some((connection.idle_since()?, connection)));
        if let Some((_, connection)) = idle.min_by_key(|(since, _)| *since) {
            connection.close.notify_one();
        }
    }
}

/// Serves a router on a listener until the future is dropped.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits) {
    let open = Arc::new(Open::default());
    let slots = Arc::new(Semaphore::new(limits.connections));
    for id in 0.. {
        let stream = loop {
            match listener.accept().await {
                Ok((stream, _)) => break stream,
                // The client has left, or the process is out of file handles: closing an idle connection frees one.
                Err(_) => {
                    open.close_oldest_idle();
                    tokio::time::sleep(RETRY).await;
                }
            }
        };
        let slot = loop {
            if let Ok(slot) = slots.clone().try_acquire_owned() {
                break slot;
            }
            open.close_oldest_idle();
            if let Ok(Ok(slot)) = tokio::time::timeout(RETRY, slots.clone().acquire_owned()).await {
                break slot;
            }
        };
        let connection = Connection::new();
        open.insert(id, connection.clone());
        let (open, router) = (open.clone(), router.clone());
        tokio::spawn(async move {
            handle(stream, router, &connection, limits).await;
            open.remove(id);
            drop(slot);
        });
    }
}

/// Answers the requests of one connection until the client is done, too slow, or has to make room.
async fn handle(stream: TcpStream, router: Router, connection: &Arc<Connection>, limits: Limits) {
    let service = hyper::service::service_fn(|request: hyper::Request<Incoming>| {
        let (handling, mut router) = (connection.begin(), router.clone());
        async move {
            let response = router.call(request.map(Body::new)).await;
            drop(handling);
            response
        }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.header);
    let answered = http.serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        // A client that disconnects is not our error.
        _ = answered => {}
        () = connection.close.notified() => {}
    }
}

/// Middleware: reads the whole body within the limits before anything else happens.
pub(super) async fn read_body(limits: Limits, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let too_large = || {
        let most = limits.body_size >> 10;
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body is larger than {most} KiB")).into_response()
    };
    let length = parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > limits.body_size as u64) {
        return too_large();
    }
    match tokio::time::timeout(limits.body, axum::body::to_bytes(body, limits.body_size)).await {
        Ok(Ok(bytes)) => next.run(Request::from_parts(parts, Body::from(bytes))).await,
        Ok(Err(_)) => too_large(),
        Err(_) => {
            let what = format!("the body did not arrive within {} s", limits.body.as_secs());
            let mut response = ApiError::new(StatusCode::REQUEST_TIMEOUT, what).into_response();
            response.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("close"));
            response
        }
    }
}
