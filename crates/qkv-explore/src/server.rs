//! The page that shows what a model attends to, served on loopback: the program's own files, and the numbers that the page asks
//! for, a tile, a head or a row at a time, recomputed when they are asked for.
//!
//! Safe by default: it listens on 127.0.0.1, answers only requests whose Host is its own, takes small bodies and texts, serves
//! nothing by path but the files that are part of the program, and computes in threads of its own, so that a slow request stops
//! no other. On any other address every request has to bring a token.

mod answer;
mod api;
mod export;
mod guard;
mod page;
mod runs;
mod tiles;

pub use page::stand_alone;

use crate::observer::Observer;
use crate::recording::Recording;
use axum::Router;
use axum::routing::{get, post};
use guard::Guard;
use qkv_models::{Error, Result};
use qkv_nn::Machine;
use runs::Runs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;

/// A model that can be asked.
#[derive(Debug)]
pub struct Served {
    /// What the page calls it.
    pub name: String,
    /// What it does, in a line.
    pub note: String,
    /// The model.
    pub model: Observer,
}

/// What is shown, and where.
#[derive(Debug)]
pub struct Settings {
    /// The address; loopback unless someone asks for more.
    pub address: IpAddr,
    /// The port; 0 for any that is free.
    pub port: u16,
    /// Models that take text.
    pub models: Vec<Served>,
    /// A recording that was opened.
    pub recording: Option<Recording>,
    /// Sentences to start from: the first is shown at once.
    pub examples: Vec<String>,
    /// Threads that compute.
    pub machine: Machine,
}

impl Settings {
    /// On loopback, any port, with nothing to show yet.
    pub fn new(machine: Machine) -> Settings {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Settings { address, port: 0, models: Vec::new(), recording: None, examples: Vec::new(), machine }
    }
}

/// What every request sees.
struct State {
    guard: Guard,
    models: Vec<Served>,
    examples: Vec<String>,
    machine: Machine,
    runs: Runs,
    /// Whole matrices of long sequences, one at a time.
    heavy: Arc<tokio::sync::Semaphore>,
    /// Everything else that computes.
    light: Arc<tokio::sync::Semaphore>,
}

/// A server that is bound and has not started to answer.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    state: Arc<State>,
    address: SocketAddr,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "State({} models)", self.models.len())
    }
}

/// Light requests that compute at a time.
const LIGHT: usize = 4;

impl Server {
    /// Binds, and makes the first run: what the page shows at once.
    ///
    /// # Errors
    /// Where the address is taken, or the first example cannot be run.
    pub fn bind(settings: Settings) -> Result<Server> {
        let Settings { address, port, models, recording, examples, machine } = settings;
        let wanted = SocketAddr::new(address, port);
        let refused = |e: std::io::Error| {
            let error = Error::invalid(format!("cannot listen on {wanted}: {e}"));
            if e.kind() == std::io::ErrorKind::AddrInUse {
                return error.with_hint("another program has that port; `--port 0` takes any that is free");
            }
            error
        };
        let listener = TcpListener::bind(wanted).map_err(refused)?;
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
        let state = Arc::new(State { guard, models, examples, machine, runs, heavy, light });
        Ok(Server { listener, state, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What to open in a browser: with the token, where one is needed.
    pub fn url(&self) -> String {
        match self.state.guard.token() {
            Some(token) => format!("http://{}/?token={token}", self.address),
            None => format!("http://{}/", self.address),
        }
    }

    /// Answers until the process ends, or `stop` is done.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        let Server { listener, state, address } = self;
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
            tokio::select! {
                served = async { axum::serve(listener, router(state)).await } => served.map_err(refused),
                () = stop => Ok(()),
            }
        })?;
        // A tile that is still being computed is not waited for.
        runtime.shutdown_background();
        Ok(())
    }
}

fn router(state: Arc<State>) -> Router {
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
        .fallback(answer::missing)
        .layer(axum::extract::DefaultBodyLimit::max(guard::BODY))
        .layer(axum::middleware::from_fn_with_state(state.clone(), guard::check))
        .with_state(state)
}
