//! The server as seen by a browser and by an attacker: every answer is the library's number, or an error with a
//! message.

use qkv::{Attention, Inputs, Mask, Output, OwnedInputs, Place, Pool, Tensor};
use qkv_explore::server::connections::Limits;
use qkv_explore::server::{Server, Settings, standalone_page};
use qkv_explore::{AttentionCall, Layer, Recording, Side, WeightSource};
use qkv_nn::Machine;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Causal attention over `n` tokens, two heads.
fn recording(n: usize) -> Recording {
    let attention = Attention::scaled_dot().mask(Mask::causal());
    let [q, k] = [1, 2].map(|seed| Tensor::<f32, 4>::randn([1, 2, n, 16], seed));
    let nothing = Tensor::new(Vec::new(), [1, 2, n, 0]).expect("no values");
    let lse = attention.forward(Inputs::new(&q, &k, &nothing)).expect("it holds together").lse;
    let output = Output::of_lse(lse, 0, Place::Start).expect("memory");
    let call = AttentionCall::new(attention, OwnedInputs::new(q, k, nothing), Some(output));
    let weights = WeightSource::Call(Box::new(call));
    let layer =
        Layer { name: "layers.0".into(), group: "layers".into(), queries: 0, keys: 0, weights, importance: None };
    let side = Side::of_words("tokens", (0..n).map(|at| if at == 1 { "</script><b>".into() } else { at.to_string() }));
    Recording {
        text: "</script>".into(),
        output: None,
        sides: vec![side],
        layers: vec![layer],
        steps: Vec::new(),
        form: None,
    }
}

/// A server that is running, and ends with the test.
struct Running {
    address: SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Running {
    fn of(recording: Recording) -> Running {
        Running::with_limits(recording, Limits::default())
    }

    fn with_limits(recording: Recording, limits: Limits) -> Running {
        let settings = Settings { recording: Some(recording), limits, ..Settings::new(Machine::new(2)) };
        let server = Server::bind(settings).expect("a free port");
        let (address, (stop, stopped)) = (server.address(), tokio::sync::oneshot::channel::<()>());
        assert!(address.ip().is_loopback(), "{address}");
        let thread = std::thread::spawn(move || {
            server.run(async move { drop(stopped.await) }).expect("it serves");
        });
        Running { address, stop: Some(stop), thread: Some(thread) }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        stream
    }

    /// Sends these bytes, and reads the response to the end.
    fn raw(&self, request: &[u8]) -> Answer {
        let mut stream = self.connect();
        // A server may answer, and close, before it has read everything.
        let _ = stream.write_all(request);
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        Answer::of(&bytes)
    }

    fn get(&self, path: &str) -> Answer {
        let Running { address, .. } = self;
        self.raw(format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes())
    }

    fn post(&self, path: &str, headers: &str, body: &str) -> Answer {
        let (Running { address, .. }, length) = (self, body.len());
        let head = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {length}");
        self.raw(format!("{head}\r\n{headers}\r\n{body}").as_bytes())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().expect("it was started").join();
        assert!(std::thread::panicking() || ended.is_ok(), "the server panicked");
    }
}

#[derive(Debug)]
struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn of(bytes: &[u8]) -> Answer {
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap_or(bytes.len());
        let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        Answer { status, head, body: bytes[(end + 4).min(bytes.len())..].to_vec() }
    }

    fn numbers(&self) -> Vec<f32> {
        assert_eq!(self.status, 200, "{}", self.text());
        self.body.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().expect("four bytes"))).collect()
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    fn is_sampled(&self) -> bool {
        self.head.contains("qkv-sampled: 1")
    }

    /// An error with this status: JSON with a message, never an empty body.
    fn refused(&self, status: u16) {
        let json: serde_json::Value = serde_json::from_slice(&self.body).unwrap_or_default();
        let has_message = json["error"].as_str().is_some_and(|error| !error.is_empty());
        assert!(self.status == status && has_message, "{status}: {self:?}");
        assert!(!self.head.contains("nonce-"), "errors carry no nonce: {}", self.head);
    }

    /// The nonce of the page's inline scripts.
    fn nonce(&self) -> String {
        let rest = self.head.split("'nonce-").nth(1).expect("the page has a nonce");
        rest.split('\'').next().expect("it ends").to_owned()
    }
}

#[test]
fn the_page_comes_with_its_first_run_and_a_strict_policy() {
    let server = Running::of(recording(6));
    let page = server.get("/");
    assert_eq!(page.status, 200);
    assert!(page.text().contains("id=\"qkv-first\"") && page.text().contains("\"importmap\""));
    assert!(page.head.contains("content-security-policy: default-src 'none'"), "{}", page.head);
    assert!(page.head.contains("x-content-type-options: nosniff"));
    // Text of a recording cannot break out of its script element.
    assert!(!page.text().contains("</script><b>"));
    for name in ["style.css", "main.js"] {
        assert_eq!(server.get(&format!("/page/{name}")).status, 200, "{name}");
    }
    let run: serde_json::Value = serde_json::from_slice(&server.get("/api/runs/0").body).expect("JSON");
    assert_eq!((run["layers"][0]["n"].as_u64(), run["layers"][0]["causal"].as_bool()), (Some(6), Some(true)));
}

#[test]
fn every_number_is_the_librarys() {
    let recording = recording(40);
    let layer = recording.layers[0].clone();
    let server = Running::of(recording);
    let weights = server.get("/api/runs/0/weights?layer=0&head=1&rows=3..9&cols=1..40").numbers();
    assert_eq!(weights, layer.rectangle(1, 3..9, 1..40).expect("weights").into_data());
    let grid = server.get("/api/runs/0/grid?size=16&pool=mean").numbers();
    assert_eq!(grid[256..], layer.pooled(1, [16, 16], Pool::Mean).expect("a picture").into_data());
    let pair: serde_json::Value =
        serde_json::from_slice(&server.get("/api/runs/0/pair?layer=0&head=0&query=5&key=2").body).expect("JSON");
    let weight = layer.rectangle(0, 5..6, 2..3).expect("a weight")[[0, 0]];
    assert_eq!(pair["weight"].as_f64().map(|weight| weight as f32), Some(weight));
    // The scaled sum of the parts, minus the log-sum-exp, is the logarithm of the weight.
    let sum: f64 = pair["parts"]["values"].as_array().expect("parts").iter().filter_map(|part| part.as_f64()).sum();
    let lse = pair["terms"].as_array().expect("terms").iter().find(|term| term["name"] == "log-sum-exp of the row");
    let score = sum / 4.0 - lse.expect("a term")["value"].as_f64().expect("a number");
    assert!((score.exp() - f64::from(weight)).abs() < 1e-6);
    let heads: serde_json::Value = serde_json::from_slice(&server.get("/api/runs/0/heads").body).expect("JSON");
    assert_eq!(heads["rows"].as_array().map(Vec::len), Some(2));
    let rollout = server.get("/api/runs/0/rollout?group=layers&rows=4..5").numbers();
    assert!((rollout.iter().sum::<f32>() - 1.0).abs() < 1e-5);
}

#[test]
fn tiles_of_a_map_fit_together_at_every_level() {
    let recording = recording(600);
    let layer = recording.layers[0].clone();
    let server = Running::of(recording);
    // 600 tokens: level 0 has four weights per cell each way, level 2 has one.
    let whole = server.get("/api/runs/0/tile?layer=0&head=0&zoom=0&x=0&y=0&pool=max").numbers();
    let expected = layer.map(0, 0..600, 0..600, [4, 4], Pool::Max, None).expect("a picture");
    for (y, x) in [(0, 0), (149, 3), (149, 149), (70, 71)] {
        assert_eq!(whole[y * 256 + x], expected[[y, x]]);
    }
    assert!(whole[150].is_nan() && whole[150 * 256].is_nan(), "outside the matrix");
    let deep = server.get("/api/runs/0/tile?layer=0&head=0&zoom=2&x=1&y=2").numbers();
    assert_eq!(deep[10 * 256 + 20], layer.rectangle(0, 522..523, 276..277).expect("a weight")[[0, 0]]);
}

#[test]
fn a_large_tile_comes_sampled_at_once_and_exactly_when_asked_again() {
    // 34,000² pairs are too many to be computed exactly on the first request.
    let server = Running::of(recording(34_000));
    let first = server.get("/api/runs/0/tile?layer=0&head=0&zoom=0&x=0&y=0");
    assert!(first.is_sampled());
    let exact = server.get("/api/runs/0/tile?layer=0&head=0&zoom=0&x=0&y=0&exact=1");
    assert!(!exact.is_sampled());
    let pairs = first.numbers().into_iter().zip(exact.numbers());
    assert!(
        pairs.filter(|(quick, _)| !quick.is_nan()).all(|(quick, exact)| quick <= exact),
        "max of some ≤ max of all"
    );
    let again = server.get("/api/runs/0/tile?layer=0&head=0&zoom=0&x=0&y=0");
    assert!(!again.is_sampled(), "what was computed is kept");
}

#[test]
fn what_is_shown_can_be_kept_in_every_form() {
    let server = Running::of(recording(8));
    for (form, begins) in [
        ("svg", &b"<svg"[..]),
        ("png", b"\x89PNG"),
        ("npy", b"\x93NUMPY"),
        ("csv", b"\"\",\"0\""),
        ("json", b"{\"rows\":"),
        ("pharaoh", b"0-0 "),
        ("html", b"<!doctype html>"),
    ] {
        let file = server.get(&format!("/api/runs/0/export?format={form}&layer=0&head=1&scale=log&theme=dark"));
        assert_eq!(file.status, 200, "{form}: {}", file.text());
        assert!(file.body.starts_with(begins), "{form}: {:?}", &file.body[..20.min(file.body.len())]);
        assert!(file.head.contains("content-disposition: attachment"), "{form}");
    }
    server.get("/api/runs/0/export?format=svg&layer=0&scale=square").refused(400);
    server.get("/api/runs/0/export?format=svg&layer=0&palette=rainbow").refused(400);
    server.get("/api/runs/0/export?format=svg&layer=0&rows=0..9").refused(400);
}

#[test]
fn only_pages_of_this_server_are_answered() {
    let server = Running::of(recording(6));
    let address = server.address;
    let ask =
        |lines: &str| server.raw(format!("GET /api/state HTTP/1.1\r\nConnection: close\r\n{lines}\r\n").as_bytes());
    assert_eq!(ask(&format!("Host: {address}\r\n")).status, 200);
    assert_eq!(ask(&format!("Host: localhost:{}\r\n", address.port())).status, 200);
    ask("Host: evil.example\r\n").refused(403);
    ask(&format!("Host: evil.example:{}\r\n", address.port())).refused(403);
    assert_ne!(ask("").status, 200, "no Host at all");
    assert_ne!(ask(&format!("Host: {address}\r\nHost: evil.example\r\n")).status, 200, "two of them");
    ask(&format!("Host: {address}\r\nOrigin: http://evil.example\r\n")).refused(403);
    ask(&format!("Host: {address}\r\nSec-Fetch-Site: cross-site\r\n")).refused(403);
    assert_eq!(ask(&format!("Host: {address}\r\nOrigin: http://{address}\r\n")).status, 200);
}

#[test]
fn nothing_is_served_by_path() {
    let server = Running::of(recording(6));
    for path in
        ["/../Cargo.toml", "/page/../src/lib.rs", "/page/%2e%2e%2fCargo.toml", "/page/", "/etc/passwd", "/page/x.js"]
    {
        server.get(path).refused(404);
    }
}

#[test]
fn bad_questions_are_refused_in_words() {
    let server = Running::of(recording(300));
    for (path, status) in [
        ("/api/runs/7", 404),
        ("/api/runs/-1", 404),
        ("/api/runs/99999999999999999999999", 404),
        ("/api/runs/0/weights?layer=9&head=0", 404),
        ("/api/runs/0/weights?layer=0&head=2", 400),
        ("/api/runs/0/weights?layer=0&head=0&rows=5..2", 400),
        ("/api/runs/0/weights?layer=0&head=0&rows=0..301", 400),
        ("/api/runs/0/weights?layer=0&head=0&rows=-1..3", 400),
        ("/api/runs/0/weights?layer=0", 400),
        ("/api/runs/0/weights?layer=x&head=0", 400),
        ("/api/runs/0/tile?layer=0&head=0&zoom=2&x=0&y=0", 400),
        ("/api/runs/0/tile?layer=0&head=0&zoom=1&x=2&y=0", 400),
        ("/api/runs/0/tile?layer=0&head=9&zoom=0&x=0&y=0", 400),
        ("/api/runs/0/tile?layer=0&head=0&zoom=4294967296&x=0&y=0", 400),
        ("/api/runs/0/tile?layer=0&head=0&zoom=1&x=18446744073709551615&y=0", 400),
        ("/api/runs/0/tile?layer=0&head=0&zoom=0&x=0&y=0&pool=sum", 400),
        ("/api/runs/0/grid?size=0", 400),
        ("/api/runs/0/grid?size=100000", 400),
        ("/api/runs/0/pair?layer=0&head=0&query=300&key=0", 400),
        ("/api/runs/0/tokens?side=3&from=0&to=1", 404),
        ("/api/runs/0/tokens?side=0&from=5&to=4", 400),
        ("/api/runs/0/rollout?group=nothing", 404),
        ("/api/runs/0/rollout?group=layers&layers=2", 400),
        ("/api/runs/0/export?format=exe&layer=0", 400),
    ] {
        server.get(path).refused(status);
    }
    server.post("/api/run", "Content-Type: application/json\r\n", "{\"text\": 3}").refused(422);
    server.post("/api/run", "Content-Type: application/json\r\n", "{").refused(400);
    server.post("/api/run", "Content-Type: text/plain\r\n", "{\"text\": \"a\"}").refused(415);
    server.post("/api/run", "Content-Type: application/json\r\n", "{\"text\": \"a\"}").refused(404);
    let huge = format!("{{\"text\": \"{}\"}}", "a".repeat(1 << 20));
    server.post("/api/run", "Content-Type: application/json\r\n", &huge).refused(413);
    server.post("/api/state", "", "").refused(405);
    assert_ne!(server.raw(b"\x00\x01\x02\x03\r\n\r\n").status, 200);
    assert_eq!(server.get("/api/state").status, 200, "and it still answers");
}

#[test]
fn many_connections_and_slow_ones_stop_nobody() {
    let server = Running::of(recording(34_000));
    let idle: Vec<TcpStream> = (0..200).map(|_| server.connect()).collect();
    let mut half = server.connect();
    half.write_all(b"GET /api/sta").expect("it takes bytes");
    // A whole matrix is being computed meanwhile.
    let mut slow = server.connect();
    let request = "GET /api/runs/0/tile?layer=0&head=1&zoom=0&x=0&y=0&exact=1&pool=mean HTTP/1.1";
    slow.write_all(format!("{request}\r\nHost: {}\r\nConnection: close\r\n\r\n", server.address).as_bytes())
        .expect("sent");
    assert_eq!(server.get("/api/state").status, 200, "others are answered while it computes");
    assert_eq!(server.get("/").status, 200);
    let mut bytes = Vec::new();
    slow.read_to_end(&mut bytes).expect("it comes in the end");
    assert_eq!(Answer::of(&bytes).status, 200);
    drop((idle, half));
}

#[test]
fn every_page_has_a_nonce_of_its_own() {
    let server = Running::of(recording(6));
    let pages = [server.get("/"), server.get("/")];
    let nonces = pages.each_ref().map(Answer::nonce);
    assert_ne!(nonces[0], nonces[1]);
    for (page, nonce) in pages.iter().zip(&nonces) {
        assert!(nonce.len() >= 32 && page.text().contains(&format!("nonce=\"{nonce}\"")), "{nonce}");
    }
    assert!(!server.get("/page/main.js").head.contains("nonce-"));
}

#[test]
fn a_client_that_does_not_finish_its_request_is_cut_off() {
    let quick = Duration::from_millis(300);
    let server = Running::with_limits(recording(6), Limits { header: quick, body: quick, ..Limits::default() });
    for sent in ["", "GET /api/sta", "GET /api/state HTTP/1.1\r\nHost: x\r\n"] {
        let (mut stream, start, mut bytes) = (server.connect(), Instant::now(), Vec::new());
        stream.write_all(sent.as_bytes()).expect("it takes bytes");
        let _ = stream.read_to_end(&mut bytes);
        assert!(start.elapsed() < Duration::from_secs(30), "{sent:?} was waited for");
    }
    // The head is complete, the body is not.
    let head = format!("POST /api/run HTTP/1.1\r\nHost: {}\r\nContent-Length: 100\r\n\r\n{{", server.address);
    server.raw(head.as_bytes()).refused(408);
    assert_eq!(server.get("/api/state").status, 200);
}

#[test]
fn idle_connections_make_room_for_new_ones() {
    let patient = Duration::from_secs(600);
    let limits = Limits { connections: 4, header: patient, body: patient, ..Limits::default() };
    let server = Running::with_limits(recording(6), limits);
    let mut idle: Vec<TcpStream> = (0..20).map(|_| server.connect()).collect();
    for stream in &mut idle {
        stream.write_all(b"GET /api/sta").expect("it takes bytes");
    }
    for _ in 0..10 {
        assert_eq!(server.get("/api/state").status, 200);
    }
    // The oldest were closed.
    let mut bytes = Vec::new();
    let _ = idle[0].read_to_end(&mut bytes);
    assert!(bytes.is_empty(), "it was never answered");
}

#[test]
fn the_page_is_there_before_a_long_recording_is_computed() {
    let n = 20_000;
    let [q, k] = [1, 2].map(|seed| Tensor::<f32, 4>::randn([1, 1, n, 16], seed));
    let nothing = Tensor::new(Vec::new(), [1, 1, n, 0]).expect("no values");
    let call = AttentionCall::new(Attention::scaled_dot(), OwnedInputs::new(q, k, nothing), None);
    let mut long = recording(2);
    long.sides = vec![Side::numbered("tokens", n)];
    long.layers[0].weights = WeightSource::Call(Box::new(call));
    assert!(long.layers[0].call().expect("a call").known_output().is_none());
    let row = long.layers[0].rows_at(0, &[7]).expect("one row");
    assert!((row.data().iter().sum::<f32>() - 1.0).abs() < 1e-4);
    assert!(long.layers[0].call().expect("a call").known_output().is_none(), "one row needs no other");
    let server = Running::of(long);
    assert_eq!(server.get("/").status, 200);
    assert_eq!(server.get("/api/runs/0/weights?layer=0&head=0&rows=7..8").numbers().len(), n);
}

#[test]
fn a_page_that_stands_alone_asks_for_nothing_from_elsewhere() {
    let page = standalone_page(&recording(12)).expect("it is small");
    for marker in ["src=\"/", "href=\"/page", "http://", "https://", "<!--qkv:"] {
        let found = page.split(marker).nth(1).map(|rest| rest.chars().take(60).collect::<String>());
        assert!(
            found.is_none() || found.as_deref().is_some_and(|rest| rest.starts_with("www.w3.org")),
            "{marker}{found:?}"
        );
    }
    assert!(page.contains("data:text/javascript;base64,") && page.contains("\"standalone\":true"));
    let error = standalone_page(&recording(3_000)).expect_err("nine million weights");
    assert!(error.to_string().contains("at most"), "{error}");
}
