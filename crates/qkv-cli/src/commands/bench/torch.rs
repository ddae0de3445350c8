//! PyTorch's side: a Python of the user's that runs our script, asked one line of JSON at a time. While it is not asked it
//! waits for the next line, and takes nothing from our side.

use super::case::Case;
use super::timing::Timing;
use crate::failure::Failure;
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

const SCRIPT: &str = include_str!("torch.py");
/// No answer is this long.
const LONGEST_ANSWER: u64 = 1 << 16;

/// What PyTorch computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// `scaled_dot_product_attention`.
    Sdpa,
    /// softmax(QKᵀ)·V as one writes it.
    Formula,
}

/// A Python with PyTorch, waiting to be asked.
pub(crate) struct Anchor {
    python: PathBuf,
    child: Child,
    /// None when it is to end.
    requests: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    /// What it says on stderr.
    words: Option<JoinHandle<String>>,
    version: String,
}

/// What one call takes beyond its inputs, where the system tells.
#[derive(Deserialize)]
pub(crate) struct Memory {
    pub beyond_bytes: Option<u64>,
}

impl Anchor {
    /// Starts it with so many threads.
    pub fn start(python: &Path, threads: usize) -> Result<Anchor, Failure> {
        Anchor::start_on(python, threads, "cpu")
    }

    /// Starts it with so many threads, to compute on this device.
    pub fn start_on(python: &Path, threads: usize, device: &str) -> Result<Anchor, Failure> {
        let mut command = Command::new(python);
        command.args(["-c", SCRIPT]).arg(threads.to_string()).arg(device);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| {
            Failure::in_file(python, format!("this Python cannot be started: {error}"))
                .hint("`--python PATH` names the one that has PyTorch")
        })?;
        let (Some(requests), Some(answers), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            unreachable!("all three were asked for");
        };
        let words = thread::spawn(move || {
            let mut words = Vec::new();
            let _ = BufReader::new(stderr).read_to_end(&mut words);
            String::from_utf8_lossy(&words).into_owned()
        });
        let answers = BufReader::new(answers);
        let (requests, words) = (Some(requests), Some(words));
        let mut anchor = Anchor { python: python.into(), child, requests, answers, words, version: String::new() };
        let ready = anchor.answer()?;
        match (ready["ready"].as_bool(), ready["version"].as_str()) {
            (Some(true), Some(version)) => anchor.version = version.into(),
            _ => return Err(anchor.nonsense(&ready.to_string())),
        }
        Ok(anchor)
    }

    /// Of PyTorch.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Makes the data of a case.
    pub fn prepare(&mut self, case: Case, how: How) -> Result<(), Failure> {
        let answer = self.ask(&about(case, how, "prepare"))?;
        if answer["done"].as_bool() == Some(true) { Ok(()) } else { Err(self.nonsense(&answer.to_string())) }
    }

    /// Times the case that was prepared.
    pub fn measure(&mut self, seconds: f64) -> Result<Timing, Failure> {
        let answer = self.ask(&json!({ "do": "measure", "seconds": seconds }))?;
        match serde_json::from_value(answer.clone()) {
            Ok(timing @ Timing { best_ms, median_ms }) if best_ms > 0.0 && median_ms >= best_ms => Ok(timing),
            _ => Err(self.nonsense(&answer.to_string())),
        }
    }

    /// The most bytes that one call of the case takes beyond its inputs.
    pub fn memory(&mut self, case: Case, how: How) -> Result<Option<u64>, Failure> {
        let answer = self.ask(&about(case, how, "memory"))?;
        match serde_json::from_value(answer.clone()) {
            Ok(Memory { beyond_bytes }) => Ok(beyond_bytes),
            Err(_) => Err(self.nonsense(&answer.to_string())),
        }
    }

    fn ask(&mut self, request: &Value) -> Result<Value, Failure> {
        let requests = self.requests.as_mut().expect("it is to end only when it is dropped");
        // One that cannot be asked has ended, which is what its answer will say.
        let _ = writeln!(requests, "{request}").and_then(|()| requests.flush());
        self.answer()
    }

    /// The next line, which is a JSON object that tells of no error.
    fn answer(&mut self) -> Result<Value, Failure> {
        let mut line = Vec::new();
        let read = (&mut self.answers).take(LONGEST_ANSWER).read_until(b'\n', &mut line);
        if read.unwrap_or(0) == 0 {
            return Err(self.ended());
        }
        let line = String::from_utf8_lossy(&line);
        let Ok(answer @ Value::Object(_)) = serde_json::from_str(&line) else {
            return Err(self.nonsense(line.trim_end()));
        };
        match answer["error"].as_str() {
            None => Ok(answer),
            Some(error) if answer["missing"].as_bool() == Some(true) => {
                Err(Failure::in_file(&self.python, format!("this Python has no PyTorch: {error}"))
                    .hint("`--python PATH` names the one that has, such as that of a virtual environment"))
            }
            Some(error) => Err(Failure::in_file(&self.python, format!("PyTorch failed: {error}"))),
        }
    }

    fn ended(&mut self) -> Failure {
        self.requests = None;
        let how = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        let words = self.words.take().and_then(|words| words.join().ok()).unwrap_or_default();
        let failure = Failure::in_file(&self.python, format!("this Python ended without an answer ({how})"));
        match words.lines().rev().find(|line| !line.trim().is_empty()) {
            Some(last) => failure.hint(format!("the last thing it said: {}", cut(last.trim()))),
            None => failure,
        }
    }

    fn nonsense(&self, said: &str) -> Failure {
        Failure::in_file(&self.python, format!("this Python answered something else than was asked: {}", cut(said)))
            .hint("is it a Python, and does it print nothing of its own?")
    }
}

/// It ends when its input does, or soon after.
impl Drop for Anchor {
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

fn about(case: Case, how: How, what: &str) -> Value {
    let shape = case.shape;
    json!({
        "do": what, "how": if how == How::Sdpa { "sdpa" } else { "formula" },
        "b": shape.b, "hq": shape.hq, "hk": shape.hk, "n": shape.n, "m": shape.m, "d": shape.d,
        "dtype": case.precision.name(), "causal": case.causal, "direction": case.direction.name(),
    })
}

/// As much of a line as a message has room for.
fn cut(line: &str) -> String {
    let mut cut: String = line.chars().take(200).collect();
    if cut.len() < line.len() {
        cut.push('…');
    }
    cut
}
