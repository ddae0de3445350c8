//! The program as a user has it: a folder, files in it, and commands that are typed there.

use half::{bf16, f16};
use qkv::{Element, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};

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
    /// Asserts success, with nothing on stderr.
    pub fn well(self) -> String {
        assert_eq!((self.code, &self.err[..]), (Some(0), ""), "{}", self.out);
        self.out
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
        assert!(self.err.contains("error: "), "{}", self.err);
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in: {}", self.err);
        }
    }
}

impl Folder {
    pub fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    /// Runs `qkv` with these words.
    pub fn qkv(&self, words: &str) -> Ran {
        let ran = self.command(words).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ran { code: ran.status.code(), out: text(ran.stdout), err: text(ran.stderr) }
    }

    /// The same, not started yet.
    pub fn command(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_qkv"));
        command.args(words.split_whitespace()).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    /// `qkv run` from `in.safetensors` to `out.safetensors` with these options, which must succeed. Returns what it
    /// wrote.
    pub fn run(&self, choices: &str) -> Written {
        self.qkv(&format!("run --input in.safetensors --output out.safetensors {choices}")).well();
        self.read("out.safetensors")
    }

    /// The same, which must fail.
    pub fn fails(&self, choices: &str, words: &[&str]) {
        self.qkv(&format!("run --input in.safetensors --output out.safetensors {choices}")).fails(words);
        assert!(!self.0.path().join("out.safetensors").exists(), "a failure writes nothing");
    }

    pub fn put(&self, name: &str, bytes: &[u8]) {
        fs::write(self.0.path().join(name), bytes).unwrap();
    }

    pub fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.0.path().join(name)).unwrap()
    }

    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub fn read(&self, name: &str) -> Written {
        let bytes = self.bytes(name);
        let file = SafeTensors::deserialize(&bytes).unwrap();
        Written(file.tensors().into_iter().map(|(name, view)| (name, Found::new(&view))).collect())
    }
}

/// A tensor that the program wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<f64>,
}

impl Found {
    fn new(view: &TensorView<'_>) -> Found {
        let bytes = view.data();
        let data = match view.dtype() {
            Dtype::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x).into()).collect(),
            Dtype::F64 => bytes.as_chunks().0.iter().map(|x| f64::from_le_bytes(*x)).collect(),
            Dtype::BF16 => bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f64()).collect(),
            Dtype::F16 => bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f64()).collect(),
            Dtype::I64 => bytes.as_chunks().0.iter().map(|x| i64::from_le_bytes(*x) as f64).collect(),
            other => panic!("{other} is not written"),
        };
        Found { dtype: view.dtype(), shape: view.shape().to_vec(), data }
    }

    /// Asserts that it matches the definition, to a tolerance relative to the largest number.
    pub fn is<T: Element>(&self, shape: &[usize], expected: &[T], tolerance: f64) {
        assert_eq!(self.shape, shape);
        assert_eq!(self.data.len(), expected.len());
        let finite = expected.iter().map(|x| x.to_f64().abs()).filter(|x| x.is_finite());
        let largest = finite.fold(1.0, f64::max);
        for (at, (found, expected)) in self.data.iter().zip(expected).enumerate() {
            let expected = expected.to_f64();
            let near = (found - expected).abs() <= tolerance * largest || *found == expected;
            assert!(near, "number {at} is {found}, expected {expected}");
        }
    }
}

/// Everything that the program wrote to a file.
#[derive(Debug, PartialEq)]
pub struct Written(BTreeMap<String, Found>);

impl Written {
    pub fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }
}

impl std::ops::Index<&str> for Written {
    type Output = Found;
    fn index(&self, name: &str) -> &Found {
        self.0.get(name).unwrap_or_else(|| panic!("no `{name}` among {:?}", self.names()))
    }
}

/// An input file for the program.
#[derive(Clone, Default)]
pub struct Input(Vec<(String, Dtype, Vec<usize>, Vec<u8>)>);

/// The bytes of numbers, as a file has them.
pub trait Stored {
    const DTYPE: Dtype;
    fn le(&self) -> Vec<u8>;
}

macro_rules! stored {
    ($($t:ident $dtype:ident),*) => {$(
        impl Stored for $t {
            const DTYPE: Dtype = Dtype::$dtype;
            fn le(&self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
        }
    )*};
}

stored!(f32 F32, f64 F64, bf16 BF16, f16 F16, u8 U8, i8 I8, u16 U16, i16 I16, u32 U32, i32 I32, u64 U64, i64 I64);

impl Input {
    pub fn new() -> Input {
        Input::default()
    }

    /// q, k and v as the library has them.
    pub fn of<T: Stored>(q: &Tensor<T, 4>, k: &Tensor<T, 4>, v: &Tensor<T, 4>) -> Input {
        Input::new().tensor("q", q).tensor("k", k).tensor("v", v)
    }

    pub fn tensor<T: Stored, const R: usize>(self, name: &str, tensor: &Tensor<T, R>) -> Input {
        self.numbers(name, &tensor.shape(), tensor.data())
    }

    pub fn numbers<T: Stored>(self, name: &str, shape: &[usize], data: &[T]) -> Input {
        self.raw(name, T::DTYPE, shape, data.iter().flat_map(Stored::le).collect())
    }

    pub fn raw(mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Input {
        self.0.retain(|(there, ..)| there != name);
        self.0.push((name.into(), dtype, shape.to_vec(), bytes));
        self
    }

    pub fn without(mut self, name: &str) -> Input {
        self.0.retain(|(there, ..)| there != name);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let view = |(name, dtype, shape, bytes): &'_ (String, Dtype, Vec<usize>, Vec<u8>)| {
            (name.clone(), *dtype, shape.clone(), bytes.clone())
        };
        let entries: Vec<_> = self.0.iter().map(view).collect();
        let views = entries
            .iter()
            .map(|(name, dtype, shape, bytes)| (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        safetensors::serialize(views, None).unwrap()
    }

    /// Writes it as `in.safetensors` in a new folder.
    pub fn folder(&self) -> Folder {
        let folder = Folder::new();
        folder.put("in.safetensors", &self.bytes());
        folder
    }
}

/// Normal noise of a shape; the same seed gives the same noise.
pub fn noise<T: Element, const R: usize>(shape: [usize; R], seed: u64) -> Tensor<T, R> {
    Tensor::randn(shape, seed)
}

/// q `[2, 4, 7, 8]`, k and v `[2, 2, 9, 8]`: two sequences, two query heads for each key head.
pub fn qkv<T: Element>() -> [Tensor<T, 4>; 3] {
    [noise([2, 4, 7, 8], 1), noise([2, 2, 9, 8], 2), noise([2, 2, 9, 8], 3)]
}
