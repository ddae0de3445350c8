//! The program as a user has it: a folder, files in it, and commands that are typed there.

use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

/// A recipe that takes about a second.
pub const RECIPE: &str = "name = 'tiny'
[data]
task = 'copy'
pairs = 400
dev_pairs = 8
[tokenizer]
kind = 'characters'
[model]
kind = 'transformer'
d_model = 32
ffn_dim = 64
heads = 2
encoder_layers = 1
decoder_layers = 1
max_positions = 40
[train]
steps = 40
tokens = 400
lr = 3e-3
warmup = 10
validate = 20
metric = 'loss'
save = 10
log = 10
";

/// A temporary folder, removed after the test.
pub struct Folder(tempfile::TempDir);

/// What a command did.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    /// Asserts success. Returns what it wrote to stdout.
    pub fn well(self) -> String {
        assert_eq!(self.code, Some(0), "{}{}", self.out, self.err);
        self.out
    }

    /// The same, and asserts that stderr is empty.
    pub fn quietly(self) -> String {
        assert_eq!(self.err, "");
        self.well()
    }

    /// Asserts an expected failure whose message holds these words.
    pub fn fails(self, words: &[&str]) {
        self.refused(1, words);
    }

    /// Asserts misuse whose message holds these words.
    pub fn misused(self, words: &[&str]) {
        self.refused(2, words);
    }

    fn refused(self, code: i32, words: &[&str]) {
        assert_eq!((self.code, &self.out[..]), (Some(code), ""), "{}", self.err);
        assert!(self.err.contains("error: ") && !self.err.contains("panicked"), "{}", self.err);
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in: {}", self.err);
        }
    }
}

impl Folder {
    pub fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    /// A folder with the tiny recipe in it.
    pub fn with_recipe() -> Folder {
        let folder = Folder::new();
        folder.put("tiny.toml", RECIPE.as_bytes());
        folder
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Runs `qkv` with these words, split at spaces.
    pub fn qkv(&self, words: &str) -> Ran {
        self.qkv_on(words, "")
    }

    /// The same, with this on stdin.
    pub fn qkv_on(&self, words: &str, stdin: impl AsRef<[u8]>) -> Ran {
        let words: Vec<&str> = words.split_whitespace().collect();
        self.typed(&words, stdin)
    }

    /// The same, with words that contain spaces.
    pub fn typed(&self, words: &[&str], stdin: impl AsRef<[u8]>) -> Ran {
        let mut child = self.command(words).spawn().unwrap();
        let (mut pipe, bytes) = (child.stdin.take().unwrap(), stdin.as_ref().to_vec());
        let writer = std::thread::spawn(move || drop(pipe.write_all(&bytes)));
        let ran = child.wait_with_output().unwrap();
        writer.join().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ran { code: ran.status.code(), out: text(ran.stdout), err: text(ran.stderr) }
    }

    /// The same, not started yet.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_qkv"));
        command.args(words).current_dir(self.path()).env_remove("COLUMNS");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Starts it in the background.
    pub fn start(&self, words: &str) -> Child {
        let words: Vec<&str> = words.split_whitespace().collect();
        let mut command = self.command(&words);
        command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
    }

    pub fn put(&self, name: &str, bytes: &[u8]) {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Asserts that reading and rewriting a model keeps all bytes of its weights.
    pub fn comes_back(&self, model: &str) {
        self.qkv(&format!("convert {model} --out again")).well();
        let weights = |folder: &str| self.bytes(&format!("{folder}/model.safetensors"));
        assert!(weights("again") == weights(model), "{model}");
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path().join(name)).unwrap()
    }

    pub fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path().join(name)).unwrap()
    }

    pub fn has(&self, name: &str) -> bool {
        self.path().join(name).exists()
    }
}

/// A model trained once for all tests. Returns its folder as an argument.
pub fn model() -> &'static str {
    static MODEL: LazyLock<String> = LazyLock::new(|| {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tiny");
        let _ = fs::remove_dir_all(&place);
        let recipe: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tiny.toml");
        fs::write(&recipe, RECIPE).unwrap();
        let place = place.to_str().unwrap();
        let folder = Folder::new();
        folder.typed(&["train", recipe.to_str().unwrap(), "--out", place, "--quiet", "--threads", "2"], "").quietly();
        place.to_owned()
    });
    &MODEL
}

/// The lines of JSON in a text.
pub fn json(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}
