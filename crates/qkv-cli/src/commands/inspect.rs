//! The command `qkv inspect`: what is in a checkpoint, and what does not fit. And `qkv convert`: the same model in another file.

use crate::choices::{Choice, Kind, Table};
use crate::failure::Failure;
use crate::say::Say;
use clap::ArgMatches;
use qkv_models::files::tensors::Storage;
use qkv_models::{Encoder, Generator, Han, Inspection, Vit};
use std::path::PathBuf;

/// Every choice of `qkv inspect`.
pub(crate) const CHOICES: Table = &[(
    "What is looked at",
    &[
        Choice::new("path", Kind::Path, "A model's folder, a `.safetensors` file or a `.gguf` file")
            .value("PATH")
            .bare(),
        Choice::new("json", Kind::Switch, "One JSON object"),
    ],
)];

/// Every choice of `qkv convert`.
pub(crate) const CONVERT: Table = &[(
    "What is written where",
    &[
        Choice::new("path", Kind::Path, "The model: a folder or a `.gguf` file").value("PATH").bare(),
        Choice::new("out", Kind::Path, "The folder, which must not be there yet").value("DIR"),
        Choice::new("storage", Kind::Word, "How numbers are stored").default("f32").values(&[
            ("f32", "as they are"),
            ("f16", "in IEEE half precision"),
            ("bf16", "in bfloat16"),
        ]),
    ],
)];

/// What `qkv inspect` was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    path: PathBuf,
    json: bool,
}

/// What `qkv convert` was asked.
#[derive(Debug)]
pub(crate) struct Conversion {
    path: PathBuf,
    out: PathBuf,
    storage: Storage,
}

impl Asked {
    /// From a command line that holds together; the error says what is missing.
    pub fn read(matches: &ArgMatches) -> Result<Asked, String> {
        let path = matches.get_one::<PathBuf>("path").cloned().ok_or("`qkv inspect` needs a PATH")?;
        Ok(Asked { path, json: matches.get_flag("json") })
    }
}

impl Conversion {
    /// From a command line that holds together; the error says what is missing.
    pub fn read(matches: &ArgMatches) -> Result<Conversion, String> {
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        Ok(Conversion {
            path: path("path").ok_or("`qkv convert` needs a PATH")?,
            out: path("out").ok_or("`qkv convert` needs `--out DIR`")?,
            storage: match matches.get_one::<String>("storage").map(String::as_str) {
                Some("f16") => Storage::F16,
                Some("bf16") => Storage::Bf16,
                _ => Storage::F32,
            },
        })
    }
}

/// Tells what is there.
pub(crate) fn inspect(asked: &Asked, say: Say<'_>) -> Result<(), Failure> {
    let found = Inspection::of(&asked.path)?;
    let told = if asked.json { serde_json::to_string(&found).expect("plain data") + "\n" } else { found.to_string() };
    say(&told).map(drop)
}

/// Writes a model anew.
pub(crate) fn convert(asked: &Conversion, say: Say<'_>) -> Result<(), Failure> {
    if std::fs::read_dir(&asked.out).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Failure::new(format!("`{}` is there already, and not empty", asked.out.display()))
            .hint("choose another `--out`"));
    }
    let kind = if asked.path.is_dir() { qkv_models::kind(&asked.path)? } else { String::new() };
    match kind.as_str() {
        "encoder" => Encoder::open(&asked.path)?.save(&asked.out, asked.storage)?,
        "han" => Han::open(&asked.path)?.save(&asked.out, asked.storage)?,
        "vit" => Vit::open(&asked.path)?.save(&asked.out, asked.storage)?,
        _ => Generator::open(&asked.path)?.save(&asked.out, asked.storage)?,
    }
    say(&format!("written  {}\n", asked.out.display())).map(drop)
}

/// What `qkv inspect --help` says beyond its choices.
pub(crate) fn after_help() -> String {
    crate::arguments::examples(&[
        ("qkv inspect runs/shakespeare", "Tensors, shapes, types, parameters, and what does not fit"),
        ("qkv inspect SmolLM2-135M-Instruct.Q4_1.gguf --json", "For programs"),
    ])
}

/// What `qkv convert --help` says beyond its choices.
pub(crate) fn after_convert_help() -> String {
    crate::arguments::examples(&[(
        "qkv convert SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2",
        "A folder that Python's `transformers` reads",
    )])
}
