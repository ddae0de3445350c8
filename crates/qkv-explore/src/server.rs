//! The explorer's HTTP server: the page, and an API that returns weights a tile, a head or a row at a time, recomputed
//! on request.
//!
//! Safe by default: it listens on 127.0.0.1, checks Host and origin of every request, limits headers, bodies, texts and
//! connections in size and time, serves no files but those embedded in the program, and computes on separate threads,
//! so that a slow request does not block others. On any other address every request needs a token.

mod answer;
mod api;
pub mod connections;
mod export;
mod guard;
mod page;
mod runs;
mod tiles;

pub use page::standalone_page;

use crate::observer::Observer;
use crate::recording::Recording;
use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::routing::{get, post};
use connections::Limits;
use guard::Guard;
use qkv_models::{Error, Result};
use qkv_nn::Machine;
use runs::Runs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;

/// A model that the page can run.
#[derive(Debug)]
pub struct ServedModel {
    /// Its name on the page.
    pub name: String,
    /// What it does, in one line.
    pub note: String,
    /// The model.
    pub model: Observer,
}

/// What the server shows, and where it listens.
#[derive(Debug)]
pub struct Settings {
    /// The address; loopback by default.
    pub address: IpAddr,
    /// The port; 0 for any free one.
    pub port: u16,
    /// Models to run.
    pub models: Vec<ServedModel>,
    /// A recording to show first.
    pub recording: Option<Recording>,
    /// Example sentences; the first is run when the server starts, unless there is a recording.
    pub examples: Vec<String>,
    /// The threads that compute.
    pub machine: Machine,
    /// Limits on connections, headers and bodies.
    pub limits: Limits,
}

impl Settings {
    /// Any port on loopback, and nothing to show yet.
    pub fn new(machine: Machine) -> Settings {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Settings {
            address,
            port: 0,
            models: Vec::new(),
            recording: None,
            examples: Vec::new(),
            machine,
            limits: Limits::default(),
        }
    }
}

/// State shared by all requests.
struct AppState {
    guard: Guard,
    models: Vec<ServedModel>,
    examples: Vec<String>,
    machine: Machine,
    runs: Runs,
    /// Permits for exact maps of long sequences.
    heavy: Arc<tokio::sync::Semaphore>,
    /// Permits for all other computations.
    light: Arc<tokio::sync::Semaphore>,
}

/// A server that listens but does not answer yet.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    state: Arc<AppState>,
    address: SocketAddr,
    limits: Limits,
}

impl std::fmt::Debug for AppState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AppState({} models)", self.models.len())
    }
}

/// Concurrent light computations.
const LIGHT: usize = 4;

impl Server {
    /// Binds the address and prepares the run that the page shows first.
    ///
    /// # Errors
    /// If the address is taken, or the first example cannot be run.
    pub fn bind(settings: Settings) -> Result<Server> {
        let Settings { address, port, models, recording, examples, machine, limits } = settings;
        let requested = SocketAddr::new(address, port);
        let refused = |e: std::io::Error| {
            let error = Error::invalid(format!("cannot listen on {requested}: {e}"));
            if e.kind() == std::io::ErrorKind::AddrInUse {
                return error.with_hint("another program uses that port; `--port 0` takes any free one");
            }
            error
        };
        let listener = TcpListener::bind(requested).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let runs = Runs::default();
        match (recording, models.first(), examples.first()) {
            (Some(recording), _, _) => drop(runs.add(recording, None)),
            (None, Some(model), Some(text)) => {
                let recording = model.model.record(text, None, &machine)?;
                runs.add(recording, Some(0));
            }
            _ => return Err(Error::invalid("there is nothing to show").with_hint("give a model or a recording")),
        }
        let [heavy, light] = [1, LIGHT].map(|turns| Arc::new(tokio::sync::Semaphore::new(turns)));
        let guard = Guard::new(address);
        let state = Arc::new(AppState { guard, models, examples, machine, runs, heavy, light });
        Ok(Server { listener, state, address, limits })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL to open in a browser, with the token if one is needed.
    pub fn url(&self) -> String {
        match self.state.guard.token() {
            Some(token) => format!("http://{}/?token={token}", self.address),
            None => format!("http://{}/", self.address),
        }
    }

    /// Answers requests until `stop` completes.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        let Server { listener, state, address, limits } = self;
        let refused = |e: std::io::Error| Error::invalid(format!("cannot serve on {address}: {e}"));
        listener.set_nonblocking(true).map_err(refused)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_io()
            .enable_time()
            .build()
            .map_err(refused)?;
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(listener).map_err(refused)?;
            let first = state.runs.get(0);
            // Log-sum-exps that a recording lacks are computed in the background, so that the page appears at once.
            tokio::task::spawn_blocking(move || {
                for layer in first.iter().flat_map(|run| &run.recording.layers) {
                    // A failure shows when the weights are requested.
                    let _ = layer.prepare();
                }
            });
            tokio::select! {
                () = connections::serve(listener, router(state, limits), limits) => {}
                () = stop => {}
            }
            Ok::<(), Error>(())
        })?;
        // Computations that are still running are abandoned.
        runtime.shutdown_background();
        Ok(())
    }
}

fn router(state: Arc<AppState>, limits: Limits) -> Router {
    let runs = Router::new()
        .route("/tokens", get(api::tokens))
        .route("/weights", get(api::weights))
        .route("/grid", get(api::grid))
        .route("/tile", get(api::tile))
        .route("/pair", get(api::pair))
        .route("/heads", get(api::heads))
        .route("/rollout", get(api::rollout))
        .route("/export", get(export::export));
    Router::new()
        .route("/", get(page::index))
        .route("/page/{name}", get(page::file))
        .route("/api/state", get(api::state))
        .route("/api/run", post(api::new_run))
        .route("/api/runs/{id}", get(api::run))
        .nest("/api/runs/{id}", runs)
        .fallback(answer::not_found)
        .layer(from_fn(move |request: Request, next: Next| connections::read_body(limits, request, next)))
        .layer(from_fn_with_state(state.clone(), guard::check))
        .with_state(state)
}
