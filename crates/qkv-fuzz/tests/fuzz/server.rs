//! Nearly valid requests to the explorer's server: each is answered or dropped, no handler panics, and a valid request
//! is still answered at the end.

use qkv::{Attention, Inputs, Mask, Output, OwnedInputs, Place, Tensor};
use qkv_explore::server::{Server, Settings};
use qkv_explore::{AttentionCall, Layer, Recording, Side, WeightSource};
use qkv_fuzz::{Shape, Target, fuzz_few};
use qkv_nn::Machine;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

static PANICS: AtomicUsize = AtomicUsize::new(0);

/// Causal attention over some tokens, two heads.
fn recording() -> Recording {
    let n = 12;
    let attention = Attention::scaled_dot().mask(Mask::causal());
    let [q, k] = [1, 2].map(|seed| Tensor::<f32, 4>::randn([1, 2, n, 8], seed));
    let nothing = Tensor::new(Vec::new(), [1, 2, n, 0]).unwrap();
    let lse = attention.forward(Inputs::new(&q, &k, &nothing)).unwrap().lse;
    let output = Output::of_lse(lse, 0, Place::Start).unwrap();
    let call = AttentionCall::new(attention, OwnedInputs::new(q, k, nothing), Some(output));
    let weights = WeightSource::Call(Box::new(call));
    let layer =
        Layer { name: "layers.0".into(), group: "layers".into(), queries: 0, keys: 0, weights, importance: None };
    let side = Side::of_words("tokens", (0..n).map(|at| at.to_string()));
    Recording {
        text: "text".into(),
        output: None,
        sides: vec![side],
        layers: vec![layer],
        steps: Vec::new(),
        form: None,
    }
}

/// Sends these bytes and reads the whole response: its status, or 0 if none came.
fn sent(address: SocketAddr, request: &[u8], patience: Duration) -> u16 {
    let mut stream = TcpStream::connect(address).expect("it listens");
    // An incomplete request is not answered, so the timeout is short.
    stream.set_read_timeout(Some(patience)).unwrap();
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let head = String::from_utf8_lossy(&answer[..answer.len().min(32)]).into_owned();
    head.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0)
}

#[test]
fn requests() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        // Ignore panics of other tests.
        if std::thread::current().name().is_some_and(|name| name.starts_with("tokio")) {
            PANICS.fetch_add(1, Ordering::Relaxed);
        }
        before(info);
    }));
    let settings = Settings { recording: Some(recording()), ..Settings::new(Machine::new(2)) };
    let server = Server::bind(settings).expect("a free port");
    let (address, (stop, stopped)) = (server.address(), tokio::sync::oneshot::channel::<()>());
    let thread = std::thread::spawn(move || server.run(async move { drop(stopped.await) }).expect("it serves"));
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").into_bytes();
    let right = get("/api/runs/0/weights?layer=0&head=1&rows=3..9&cols=1..10");
    let mut seeds = vec![right.clone()];
    for path in [
        "/",
        "/page/main.js",
        "/api/runs/0",
        "/api/runs/0/grid?size=16&pool=mean",
        "/api/runs/0/tile?layer=0&head=0&zoom=0&x=0&y=0&size=64&pool=max",
        "/api/runs/0/pair?layer=0&head=0&query=3&key=1",
        "/api/runs/0/rollout?row=3",
        "/api/runs/0/heads?layer=0",
        "/api/runs/0/tokens?side=0&from=0&to=5",
        "/api/state",
        "/api/runs/0/export?layer=0&head=0&format=npy",
    ] {
        seeds.push(get(path));
    }
    let body = r#"{"model": 0, "text": "hello", "target": null}"#;
    let head =
        format!("POST /api/run HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json");
    seeds.push(format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes());
    let words = &[
        "Host: evil.example\r\n",
        "Content-Length: 99999999999\r\n",
        "Transfer-Encoding: chunked\r\n",
        "..",
        "%00",
        "%2e%2e/",
        "rows=0..4294967296",
        "head=99",
        "size=18446744073709551615",
        "zoom=64",
        "\r\n\r\n",
        "POST ",
        "layer=-1",
        "&",
        "?",
        "pool=",
    ];
    fuzz_few(&Target { name: "requests", shape: Shape::Text, seeds, words }, 200, |bytes| {
        let status = sent(address, bytes, Duration::from_millis(50));
        assert_eq!(PANICS.load(Ordering::Relaxed), 0, "a handler panicked");
        assert_ne!(status, 500, "a request is never the server's fault");
        ["nothing", "wait", "here", "elsewhere", "refused", "failed"][usize::from(status / 100).min(5)].into()
    });
    assert_eq!(sent(address, &right, Duration::from_secs(20)), 200, "it still answers");
    drop(stop);
    thread.join().expect("the server ends");
}
