//! `qkv embed`: sentences as vectors, or ranked by similarity.

use crate::arguments::{ADAPTER, Argument, Arguments, Kind, Matches, THREADS};
use crate::atomic_file::OutputPath;
use crate::command::{Command, Run, Status};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice};
use crate::failure::Failure;
use crate::lines::{Lines, for_each_line};
use crate::output::Print;
use crate::threads;
use qkv_models::Encoder;
use qkv_models::files::tensors::{NamedTensor, Storage, to_bytes};
use serde_json::json;
use std::path::PathBuf;

pub(super) const COMMAND: Command =
    Command::new("embed", "Embed sentences as vectors", ARGUMENTS, |matches| Ok(Box::new(EmbedArgs::parse(matches))))
        .examples(&[
            (
                "qkv embed --model all-MiniLM-L6-v2 --similarity 'A cat sleeps' 'A kitten naps' 'Prices rose'",
                "Rank sentences by similarity to the first",
            ),
            ("qkv embed --model all-MiniLM-L6-v2 --output vectors.safetensors < lines.txt", "The vectors of a file"),
        ]);

const ARGUMENTS: Arguments = &[
    (
        "Input and model",
        &[
            Argument::new("text", Kind::Text, "Sentence to embed; the lines of `--input` or stdin by default")
                .value("TEXT")
                .positional()
                .repeatable()
                .conflicts(&["input"]),
            Argument::new("model", Kind::Path, "Folder of the model, in the Hugging Face layout")
                .value("DIR")
                .required(),
            ADAPTER,
            Argument::new("input", Kind::Path, "Embed the lines of this file").value("FILE"),
        ],
    ),
    (
        "Output: one JSON object per line by default",
        &[
            Argument::new(
                "output",
                Kind::Path,
                "Write all vectors to this `.safetensors` file as `embeddings [N, C]`; a failed line is a row of NaN",
            )
            .value("FILE"),
            Argument::new("similarity", Kind::Switch, "Rank by cosine similarity to the first line, as `COSINE⇥LINE`")
                .conflicts(&["output"]),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, THREADS]),
];

struct EmbedArgs {
    texts: Vec<String>,
    model: PathBuf,
    adapter: Option<PathBuf>,
    input: Option<PathBuf>,
    output: Option<PathBuf>,
    similarity: bool,
    threads: Option<usize>,
    device: InferenceDevice,
}

impl EmbedArgs {
    fn parse(matches: &Matches<'_>) -> EmbedArgs {
        EmbedArgs {
            texts: matches.texts("text"),
            model: matches.required_path("model"),
            adapter: matches.path("adapter"),
            input: matches.path("input"),
            output: matches.path("output"),
            similarity: matches.switch("similarity"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
        }
    }
}

/// Maximum number of lines per batch.
const BATCH: usize = 1024;

impl Run for EmbedArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            let output = self.output.as_deref().map(|path| OutputPath::new(path, self.input.as_deref())).transpose()?;
            let encoder = Encoder::open_with(&self.model, self.adapter.as_deref())?;
            let machine = self.device.machine()?;
            let lines = Lines::new(&self.texts, self.input.as_deref())?;
            let collects = output.is_some() || self.similarity;
            let mut embedded: Vec<Option<(String, Vec<f32>)>> = Vec::new();
            let ended = for_each_line(
                lines,
                BATCH,
                |batch| {
                    let texts: Vec<&str> = batch.iter().map(|line| line.text.as_str()).collect();
                    let vectors = encoder.embed(&texts, &machine)?;
                    Ok(batch.iter().zip(vectors).map(|(line, vector)| Ok((line.text.clone(), vector))).collect())
                },
                |batch| {
                    if collects {
                        embedded.extend(batch);
                        return Ok(true);
                    }
                    let lines = batch.into_iter().map(|line| match line {
                        Some((text, vector)) => format!("{}\n", json!({ "text": text, "embedding": vector })),
                        None => format!("{}\n", json!({ "embedding": null })),
                    });
                    print(&lines.collect::<String>())
                },
            );
            if let Some(output) = &output {
                let shape = [embedded.len(), encoder.config.d_model]; // [N, C]
                let missing = vec![f32::NAN; encoder.config.d_model];
                let rows = embedded.iter().flat_map(|line| line.as_ref().map_or(&missing, |(_, vector)| vector));
                let values: Vec<f32> = rows.copied().collect();
                let tensor = NamedTensor { name: "embeddings", shape: &shape, values: &values };
                output.write(&to_bytes(&[tensor], Storage::F32)?)?;
                print(&format!("written  {}, embeddings {shape:?}\n", output.path().display()))?;
            }
            if self.similarity {
                print(&ranked(&embedded.iter().flatten().collect::<Vec<_>>()))?;
            }
            ended.map(|()| Status::Done)
        })
    }
}

/// Texts by their similarity to the first, most similar first.
fn ranked(embedded: &[&(String, Vec<f32>)]) -> String {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    let cosine = |a: &[f32], b: &[f32]| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(1e-12);
    let Some(((_, first), rest)) = embedded.split_first() else { return String::new() };
    let mut found: Vec<(f64, &str)> =
        rest.iter().map(|(text, vector)| (cosine(first, vector), text.as_str())).collect();
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    found.iter().map(|(cosine, text)| format!("{cosine:.4}\t{text}\n")).collect()
}
