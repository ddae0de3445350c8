//! PyTorch's side: the user's Python runs `torch.py`, one JSON request per line. Between requests it waits and takes no
//! CPU time from our side.

use super::case::Case;
use super::python;
use super::timing::Timing;
use crate::failure::Failure;
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const SCRIPT: &str = include_str!("torch.py");
/// The longest answer in bytes.
const LONGEST_ANSWER: u64 = 1 << 16;

/// What PyTorch computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TorchKernel {
    /// `scaled_dot_product_attention`.
    Sdpa,
    /// softmax(QKᵀ)·V, written out.
    Formula,
}

/// A Python process with PyTorch, waiting for requests.
pub(crate) struct TorchProcess {
    python: PathBuf,
    child: Child,
    /// Closed and `None` once the process is to end.
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// Its stderr.
    stderr: Option<JoinHandle<String>>,
    version: String,
}

/// The memory of one call beyond its inputs, if the system reports it.
#[derive(Deserialize)]
pub(crate) struct MemoryReply {
    pub beyond_bytes: Option<u64>,
}

impl TorchProcess {
    /// Starts it with a number of threads.
    pub fn start(python: &Path, threads: usize) -> Result<TorchProcess, Failure> {
        TorchProcess::start_on(python, threads, "cpu")
    }

    /// Starts it with a number of threads, to compute on a device.
    pub fn start_on(path: &Path, threads: usize, device: &str) -> Result<TorchProcess, Failure> {
        let mut command = python::running(path, SCRIPT);
        command.arg(threads.to_string()).arg(device);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| python::not_started(path, &error))?;
        let (Some(requests), Some(answers), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            unreachable!("all three are piped");
        };
        let stderr = thread::spawn(move || {
            let mut text = Vec::new();
            let _ = BufReader::new(stderr).read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        let answers = BufReader::new(answers);
        let (requests, stderr) = (Some(requests), Some(stderr));
        let mut torch = TorchProcess { python: path.into(), child, requests, answers, stderr, version: String::new() };
        let ready = torch.answer()?;
        match (ready["ready"].as_bool(), ready["version"].as_str()) {
            (Some(true), Some(version)) => torch.version = version.into(),
            _ => return Err(torch.unexpected(&ready.to_string())),
        }
        Ok(torch)
    }

    /// The version of PyTorch.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Prepares the data of a case.
    pub fn prepare(&mut self, case: Case, kernel: TorchKernel) -> Result<(), Failure> {
        let answer = self.ask(&request(case, kernel, "prepare"))?;
        if answer["done"].as_bool() == Some(true) { Ok(()) } else { Err(self.unexpected(&answer.to_string())) }
    }

    /// Times the prepared case.
    pub fn measure(&mut self, seconds: f64) -> Result<Timing, Failure> {
        let answer = self.ask(&json!({ "do": "measure", "seconds": seconds }))?;
        match serde_json::from_value(answer.clone()) {
            Ok(timing @ Timing { best_ms, median_ms }) if best_ms > 0.0 && median_ms >= best_ms => Ok(timing),
            _ => Err(self.unexpected(&answer.to_string())),
        }
    }

    /// The peak memory of one call beyond its inputs, in bytes.
    pub fn memory(&mut self, case: Case, kernel: TorchKernel) -> Result<Option<u64>, Failure> {
        let answer = self.ask(&request(case, kernel, "memory"))?;
        match serde_json::from_value(answer.clone()) {
            Ok(MemoryReply { beyond_bytes }) => Ok(beyond_bytes),
            Err(_) => Err(self.unexpected(&answer.to_string())),
        }
    }

    fn ask(&mut self, request: &Value) -> Result<Value, Failure> {
        let requests = self.requests.as_mut().expect("it ends only when it is dropped");
        // If the process has ended, reading its answer fails.
        let _ = writeln!(requests, "{request}").and_then(|()| requests.flush());
        self.answer()
    }

    /// The next answer: a JSON object without an error.
    fn answer(&mut self) -> Result<Value, Failure> {
        let mut line = Vec::new();
        let read = (&mut self.answers).take(LONGEST_ANSWER).read_until(b'\n', &mut line);
        if read.unwrap_or(0) == 0 {
            return Err(self.ended());
        }
        let line = String::from_utf8_lossy(&line);
        let Ok(answer @ Value::Object(_)) = serde_json::from_str(&line) else {
            return Err(self.unexpected(line.trim_end()));
        };
        python::refused(&self.python, &answer).map_or(Ok(answer), Err)
    }

    fn ended(&mut self) -> Failure {
        self.requests = None;
        let how = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let stderr = self.stderr.take().and_then(|stderr| stderr.join().ok()).unwrap_or_default();
        let failure = Failure::in_file(&self.python, format!("this Python ended without an answer ({how})"));
        match stderr.lines().rev().find(|line| !line.trim().is_empty()) {
            Some(last) => failure.hint(format!("its last line on stderr: {}", cut(last.trim()))),
            None => failure,
        }
    }

    fn unexpected(&self, answer: &str) -> Failure {
        Failure::in_file(&self.python, format!("unexpected answer of this Python: {}", cut(answer)))
            .hint("does this Python print something at startup?")
    }
}

/// The process ends when its stdin does, or is killed soon after.
impl Drop for TorchProcess {
    fn drop(&mut self) {
        self.requests = None;
        for _ in 0..100 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn request(case: Case, kernel: TorchKernel, action: &str) -> Value {
    let shape = case.shape;
    json!({
        "do": action, "how": if kernel == TorchKernel::Sdpa { "sdpa" } else { "formula" },
        "b": shape.b, "hq": shape.hq, "hk": shape.hk, "n": shape.n, "m": shape.m, "d": shape.d,
        "dtype": case.precision.name(), "causal": case.causal, "direction": case.direction.name(),
    })
}

/// The start of a line, short enough for a message.
fn cut(line: &str) -> String {
    let mut cut: String = line.chars().take(200).collect();
    if cut.len() < line.len() {
        cut.push('…');
    }
    cut
}
