//! The command `qkv embed`: sentences as vectors, or how near sentences are to each other.

use crate::choices::{Choice, Kind, Table};
use crate::failure::Failure;
use crate::say::Say;
use crate::threads;
use crate::translate::Lines;
use clap::ArgMatches;
use qkv_models::Encoder;
use qkv_models::files::tensors::{NamedTensor, Storage, write};
use qkv_nn::Machine;
use serde_json::json;
use std::path::PathBuf;

/// Every choice of `qkv embed`.
pub(crate) const CHOICES: Table = &[
    (
        "What is read, and by which model",
        &[
            Choice::new("text", Kind::Text, "Read this; left out, the lines of `--input`, or else of stdin")
                .value("TEXT")
                .bare()
                .many()
                .clashes(&["input"]),
            Choice::new("model", Kind::Path, "The model: a folder in the Hugging Face layout").value("DIR"),
            Choice::new("input", Kind::Path, "Read lines from here").value("FILE"),
        ],
    ),
    (
        "What is told: one JSON object for each line",
        &[
            Choice::new(
                "output",
                Kind::Path,
                "Write all vectors to this `.safetensors` file instead, as `embeddings [N, C]`",
            )
            .value("FILE"),
            Choice::new(
                "similarity",
                Kind::Switch,
                "How near each line is to the first, as `COSINE⇥LINE`, nearest first",
            )
            .clashes(&["output"]),
        ],
    ),
    ("How", &[Choice::new("threads", Kind::Threads, "Use N threads; left out, every core").value("N")]),
];

/// What `qkv embed` was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    texts: Vec<String>,
    model: PathBuf,
    input: Option<PathBuf>,
    output: Option<PathBuf>,
    similarity: bool,
    threads: Option<usize>,
}

impl Asked {
    /// From a command line that holds together; the error says what is missing.
    pub fn read(matches: &ArgMatches) -> Result<Asked, String> {
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        Ok(Asked {
            texts: matches.get_many("text").into_iter().flatten().cloned().collect(),
            model: path("model").ok_or("`qkv embed` needs `--model DIR`")?,
            input: path("input"),
            output: path("output"),
            similarity: matches.get_flag("similarity"),
            threads: matches.get_one::<u64>("threads").and_then(|&n| usize::try_from(n).ok()),
        })
    }
}

/// Lines that are read together at most.
const TOGETHER: usize = 1024;

/// Embeds what was asked.
pub(crate) fn embed(asked: &Asked, say: Say<'_>) -> Result<(), Failure> {
    threads::on(asked.threads, || {
        let encoder = Encoder::open(&asked.model)?;
        let machine = Machine::new(rayon::current_num_threads());
        let mut lines = match (&asked.texts[..], &asked.input) {
            ([], None) => Lines::stdin(),
            ([], Some(path)) => Lines::open(path)?,
            (texts, _) => Lines::given(texts),
        };
        let (mut texts, mut vectors): (Vec<String>, Vec<Vec<f32>>) = (Vec::new(), Vec::new());
        loop {
            let portion: Vec<String> = lines.next(TOGETHER)?.into_iter().map(|line| line.text).collect();
            if portion.is_empty() {
                break;
            }
            let found = encoder.embed(&portion, &machine)?;
            if asked.output.is_some() || asked.similarity {
                texts.extend(portion);
                vectors.extend(found);
                continue;
            }
            let line =
                |(text, vector): (&String, &Vec<f32>)| format!("{}\n", json!({ "text": text, "embedding": vector }));
            if !say(&portion.iter().zip(&found).map(line).collect::<String>())? {
                return Ok(());
            }
        }
        if let Some(path) = &asked.output {
            let shape = [vectors.len(), encoder.config.d_model];
            write(path, &[NamedTensor { name: "embeddings", shape: &shape, values: &vectors.concat() }], Storage::F32)?;
            say(&format!("written  {}, embeddings {shape:?}\n", path.display()))?;
        }
        if asked.similarity {
            say(&near(&texts, &vectors))?;
        }
        Ok(())
    })
}

/// How near each text is to the first, nearest first.
fn near(texts: &[String], vectors: &[Vec<f32>]) -> String {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    let cosine = |a: &[f32], b: &[f32]| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(1e-12);
    let Some((first, rest)) = vectors.split_first() else { return String::new() };
    let mut found: Vec<(f64, &str)> =
        rest.iter().zip(&texts[1..]).map(|(vector, text)| (cosine(first, vector), text.as_str())).collect();
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    found.iter().map(|(cosine, text)| format!("{cosine:.4}\t{text}\n")).collect()
}

/// What `qkv embed --help` says beyond its choices.
pub(crate) fn after_help() -> String {
    crate::arguments::examples(&[
        (
            "qkv embed --model all-MiniLM-L6-v2 --similarity 'A cat sleeps' 'A kitten naps' 'Prices rose'",
            "Which is nearer",
        ),
        ("qkv embed --model all-MiniLM-L6-v2 --output vectors.safetensors < lines.txt", "A file of vectors"),
    ])
}
