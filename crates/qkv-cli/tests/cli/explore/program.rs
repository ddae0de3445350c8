//! The program as it runs beside a browser: started in a folder, its address read, ended with the test.

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const QKV: &str = env!("CARGO_BIN_EXE_qkv");

/// `qkv explore`, running; it ends with the test.
pub struct Serving {
    child: Child,
    pub url: String,
}

impl Serving {
    /// Runs `qkv explore` with these words, and waits for the address.
    pub fn start(words: &[&str]) -> Serving {
        let mut command = Command::new(QKV);
        command.arg("explore").args(words).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let url = lines.next().expect("the program says where it serves").unwrap();
        assert!(url.starts_with("http://127.0.0.1:"), "{url}");
        Serving { child, url }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file with `q` and `k`, `[1, heads, n, width]`, of fixed pseudorandom numbers.
pub fn queries_and_keys(path: &Path, heads: usize, n: usize, width: usize) {
    let tensor = |seed: u32| -> Vec<u8> {
        let mut state = seed;
        let mut number = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 * 3.0 - 3.0
        };
        (0..heads * n * width).flat_map(|_| number().to_le_bytes()).collect()
    };
    let (q, k) = (tensor(1), tensor(2));
    let view = |bytes| TensorView::new(Dtype::F32, vec![1, heads, n, width], bytes).unwrap();
    let bytes = safetensors::serialize([("q", view(&q)), ("k", view(&k)), ("v", view(&k))], None).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// The weights that `qkv run --weights` writes for such a file: `[heads, n, n]`.
pub fn weights(folder: &Path, input: &str, causal: bool) -> Vec<f32> {
    let mut command = Command::new(QKV);
    command.current_dir(folder).args(["run", "--input", input, "--output", "out.safetensors", "--weights"]);
    if causal {
        command.args(["--causal", "start"]);
    }
    let ran = command.output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let bytes = std::fs::read(folder.join("out.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let weights = file.tensor("weights").unwrap();
    weights.data().chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

/// A weight as the page writes it: six decimals, or an exponent if those would show only zeros.
pub fn shown(weight: f32) -> String {
    let weight = f64::from(weight);
    if weight == 0.0 {
        return "0".into();
    }
    if weight.abs() >= 1e-4 {
        return format!("{weight:.6}");
    }
    format!("{weight:.2e}")
}
