//! `qkv answer`: the words of a text that answer a question, or the answer to a question about an image.

use crate::arguments::{ADAPTER, Argument, Arguments, Kind, Matches, THREADS};
use crate::command::{Command, Run, Status};
use crate::device::{BATCH_INVARIANT, DEVICE, InferenceDevice};
use crate::failure::Failure;
use crate::lines::{Line, Lines, for_each_line};
use crate::output::Print;
use crate::terminal::TerminalStyle;
use crate::{input, threads};
use qkv_explore::draw::{self, Shaded, Style};
use qkv_models::image::Image;
use qkv_models::{Encoder, ImageAnswer, Vqa};
use qkv_nn::Machine;
use serde_json::json;
use std::path::{Path, PathBuf};

/// The longest text in bytes; it is held in memory as a whole.
const LONGEST: u64 = 1 << 26;
/// Maximum number of answers about an image that are listed with their probabilities.
const MOST_ANSWERS: usize = 10;

pub(super) const COMMAND: Command =
    Command::new("answer", "Answer a question from a text, or about an image", ARGUMENTS, |matches| {
        Ok(Box::new(AnswerArgs::parse(matches)?))
    })
    .examples(&[
        ("qkv answer --model runs/answers 'Where did Ada fly?' --context 'Ada flew to Oslo'", "One question"),
        ("qkv answer --model runs/answers --json < questions.tsv", "Lines of `question⇥text`"),
        ("qkv answer --model runs/vqa 'what color is the circle' --image picture.png", "About an image"),
    ]);

const ARGUMENTS: Arguments = &[
    (
        "Question, text and model",
        &[
            Argument::new("question", Kind::Text, "Question; lines of `question⇥text` from stdin by default")
                .value("QUESTION")
                .positional(),
            Argument::new("model", Kind::Path, "Folder of the model, in the Hugging Face layout")
                .value("DIR")
                .required(),
            ADAPTER,
            Argument::new("input", Kind::Path, "Read the text from this file").value("FILE").conflicts(&["context"]),
            Argument::new("context", Kind::Text, "The text").value("TEXT").requires(&["question"]),
            Argument::new("image", Kind::Path, "Image that the question is about: PNG, JPEG, WebP or BMP")
                .value("FILE")
                .requires(&["question"])
                .conflicts(&["context", "input", "adapter"]),
        ],
    ),
    (
        "Output: one answer per line",
        &[
            Argument::new("weights", Kind::Switch, "Show where in the image each word and each hop looked")
                .requires(&["image"]),
            Argument::new("out", Kind::Path, "Save a picture of where they looked to this file (`.svg` or `.png`)")
                .value("FILE")
                .requires(&["image"]),
            Argument::new("json", Kind::Switch, "One JSON object for each question, with position and score"),
        ],
    ),
    ("Computation", &[DEVICE, BATCH_INVARIANT, THREADS]),
];

struct AnswerArgs {
    question: Option<String>,
    model: PathBuf,
    adapter: Option<PathBuf>,
    input: Option<PathBuf>,
    context: Option<String>,
    image: Option<PathBuf>,
    weights: bool,
    out: Option<PathBuf>,
    json: bool,
    threads: Option<usize>,
    device: InferenceDevice,
}

impl AnswerArgs {
    fn parse(matches: &Matches<'_>) -> Result<AnswerArgs, String> {
        let args = AnswerArgs {
            question: matches.text("question"),
            model: matches.required_path("model"),
            adapter: matches.path("adapter"),
            input: matches.path("input"),
            context: matches.text("context"),
            image: matches.path("image"),
            weights: matches.switch("weights"),
            out: matches.path("out"),
            json: matches.switch("json"),
            threads: matches.count("threads"),
            device: InferenceDevice::parse(matches),
        };
        match (&args.question, &args.context, &args.input) {
            (Some(_), None, None) if args.image.is_none() => {
                Err("a QUESTION requires `--context TEXT`, `--input FILE` or `--image FILE`".into())
            }
            (None, _, Some(_)) => Err("`--input` requires a QUESTION".into()),
            _ => Ok(args),
        }
    }

    /// The answer to a question about an image, and where the model looked.
    fn answer_image(&self, question: &str, path: &Path, machine: &Machine) -> Result<String, Failure> {
        let vqa = Vqa::open(&self.model)?;
        input::check(path)?;
        let found = vqa.answer(&Image::open(path)?, question, machine)?;
        let ImageAnswer { probabilities, image, grid, tokens, words, hops, .. } = &found;
        let mut ranked: Vec<(&String, f32)> = vqa.config.labels.iter().zip(probabilities.iter().copied()).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        let Some(&(answer, probability)) = ranked.first() else {
            return Err(Failure::new("the model has no answers to choose from"));
        };
        let of_words =
            tokens.iter().zip(words).map(|(&id, map)| (super::describe::token_label(&vqa.tokenizer, id), map.clone()));
        let of_hops = hops.iter().enumerate().map(|(hop, map)| (format!("hop {}", hop + 1), map.clone()));
        let maps: Vec<(String, Vec<f32>)> = of_words.chain(of_hops).collect();
        if let Some(out) = &self.out {
            let title = format!("{question} → {answer}");
            let drawing = Shaded::looks(image, *grid, &maps, &title, Style::default())?;
            super::describe::write_drawing(&drawing, out, path)?;
        }
        if self.json {
            let some: serde_json::Map<String, serde_json::Value> =
                ranked.iter().take(MOST_ANSWERS).map(|(answer, share)| ((*answer).clone(), json!(share))).collect();
            let mut object = json!({ "question": question, "answer": answer, "score": probability });
            object["probabilities"] = some.into();
            if self.weights {
                object["grid"] = json!(grid);
                object["looked"] = maps.iter().map(|(label, map)| json!({ "text": label, "weights": map })).collect();
            }
            return Ok(format!("{object}\n"));
        }
        let mut text = format!("{answer}\n");
        for (label, map) in maps.iter().filter(|_| self.weights) {
            let drawing = draw::patches(map, grid[1], TerminalStyle::of_stdout().colors());
            text += &format!("\n{label}\n{drawing}");
        }
        Ok(text)
    }

    fn answer(&self, encoder: &Encoder, machine: &Machine, question: &str, text: &str) -> Result<String, Failure> {
        let found = encoder.answer(question, text, machine)?;
        Ok(match self.json {
            true => {
                let object =
                    json!({ "question": question, "answer": found.text, "start": found.start, "score": found.score });
                format!("{object}\n")
            }
            // An answer stays on one line.
            false => found.text.replace(['\n', '\r', '\t'], " ") + "\n",
        })
    }
}

impl Run for AnswerArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            if let (Some(question), Some(path)) = (&self.question, &self.image) {
                print(&self.answer_image(question, path, &self.device.machine()?)?)?;
                return Ok(Status::Done);
            }
            let encoder = Encoder::open_with(&self.model, self.adapter.as_deref())?;
            let machine = self.device.machine()?;
            if let Some(question) = &self.question {
                let text = match (&self.context, &self.input) {
                    (Some(text), _) => text.clone(),
                    (None, Some(path)) => input::read_text(path, LONGEST)?,
                    (None, None) => String::new(),
                };
                print(&self.answer(&encoder, &machine, question, &text)?)?;
                return Ok(Status::Done);
            }
            let work = |line: &Line| match line.text.split_once('\t') {
                Some((question, text)) => self.answer(&encoder, &machine, question, text),
                None => Err(Failure::new("the line has no tab").hint("each line is a question, a tab and a text")),
            };
            for_each_line(
                Lines::stdin(),
                1,
                |batch| Ok(batch.iter().map(|line| work(line).map_err(|failure| line.failure(failure))).collect()),
                |batch| {
                    let failed = if self.json { "null\n" } else { "\n" };
                    print(&batch.into_iter().map(|answer| answer.unwrap_or(failed.into())).collect::<String>())
                },
            )?;
            Ok(Status::Done)
        })
    }
}
