//! `qkv tag`: a tag for each word of a text.

use crate::arguments::{ADAPTER, Argument, Arguments, Kind, Matches, THREADS};
use crate::command::{Command, Run, Status};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice};
use crate::failure::Failure;
use crate::lines::{Lines, for_each_line};
use crate::output::Print;
use crate::threads;
use qkv_models::Encoder;
use serde_json::json;
use std::path::PathBuf;

pub(super) const COMMAND: Command =
    Command::new("tag", "Tag each word of a text, such as named entities", ARGUMENTS, |matches| {
        Ok(Box::new(TagArgs::parse(matches)))
    })
    .examples(&[("qkv tag --model runs/entities 'Ada flew to Oslo'", "A tag for each word")]);

const ARGUMENTS: Arguments = &[
    (
        "Input and model",
        &[
            Argument::new("text", Kind::Text, "Text, split at spaces; the lines of `--input` or stdin by default")
                .value("TEXT")
                .positional()
                .repeatable()
                .conflicts(&["input"]),
            Argument::new("model", Kind::Path, "Folder of the model, in the Hugging Face layout")
                .value("DIR")
                .required(),
            ADAPTER,
            Argument::new("input", Kind::Path, "Tag the lines of this file").value("FILE"),
        ],
    ),
    (
        "Output: `WORD⇥TAG` for each word, an empty line after each text",
        &[Argument::new("json", Kind::Switch, "One JSON object for each text")],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, THREADS]),
];

struct TagArgs {
    texts: Vec<String>,
    model: PathBuf,
    adapter: Option<PathBuf>,
    input: Option<PathBuf>,
    json: bool,
    threads: Option<usize>,
    device: InferenceDevice,
}

impl TagArgs {
    fn parse(matches: &Matches<'_>) -> TagArgs {
        TagArgs {
            texts: matches.texts("text"),
            model: matches.required_path("model"),
            adapter: matches.path("adapter"),
            input: matches.path("input"),
            json: matches.switch("json"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
        }
    }

    fn format(&self, words: &[&str], tags: &[String]) -> String {
        if self.json {
            return format!("{}\n", json!({ "words": words, "tags": tags }));
        }
        words.iter().zip(tags).map(|(word, tag)| format!("{word}\t{tag}\n")).collect::<String>() + "\n"
    }
}

/// Maximum number of lines per batch.
const BATCH: usize = 256;

impl Run for TagArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            let encoder = Encoder::open_with(&self.model, self.adapter.as_deref())?;
            let machine = self.device.machine()?;
            for_each_line(
                Lines::new(&self.texts, self.input.as_deref())?,
                BATCH,
                |batch| {
                    let words: Vec<Vec<&str>> =
                        batch.iter().map(|line| line.text.split_whitespace().collect()).collect();
                    let tags = encoder.tag(&words, &machine)?;
                    Ok(words.iter().zip(tags).map(|(words, tags)| Ok(self.format(words, &tags))).collect())
                },
                |batch| {
                    let failed = if self.json { "null\n" } else { "\n" };
                    print(&batch.into_iter().map(|text| text.unwrap_or(failed.into())).collect::<String>())
                },
            )?;
            Ok(Status::Done)
        })
    }
}
