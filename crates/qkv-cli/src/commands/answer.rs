//! `qkv answer`: the words of a text that answer a question.

use crate::arguments::{ADAPTER, Argument, Arguments, Kind, Matches, THREADS};
use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::lines::{Line, Lines, for_each_line};
use crate::output::Print;
use crate::{input, threads};
use qkv_models::Encoder;
use qkv_nn::Machine;
use serde_json::json;
use std::path::PathBuf;

/// The longest text in bytes; it is held in memory whole.
const LONGEST: u64 = 1 << 26;

pub(super) const COMMAND: Command =
    Command::new("answer", "Answer a question with words of a text", ARGUMENTS, |matches| {
        Ok(Box::new(AnswerArgs::parse(matches)?))
    })
    .examples(&[
        ("qkv answer --model runs/answers 'Where did Ada fly?' --context 'Ada flew to Oslo'", "One question"),
        ("qkv answer --model runs/answers --json < questions.tsv", "Lines of `question⇥text`"),
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
        ],
    ),
    (
        "Output: one answer per line",
        &[Argument::new("json", Kind::Switch, "One JSON object for each question, with position and score")],
    ),
    ("Computation", &[THREADS]),
];

struct AnswerArgs {
    question: Option<String>,
    model: PathBuf,
    adapter: Option<PathBuf>,
    input: Option<PathBuf>,
    context: Option<String>,
    json: bool,
    threads: Option<usize>,
}

impl AnswerArgs {
    fn parse(matches: &Matches<'_>) -> Result<AnswerArgs, String> {
        let args = AnswerArgs {
            question: matches.text("question"),
            model: matches.required_path("model"),
            adapter: matches.path("adapter"),
            input: matches.path("input"),
            context: matches.text("context"),
            json: matches.switch("json"),
            threads: matches.count("threads"),
        };
        match (&args.question, &args.context, &args.input) {
            (Some(_), None, None) => Err("a QUESTION requires `--context TEXT` or `--input FILE`".into()),
            (None, _, Some(_)) => Err("`--input` requires a QUESTION".into()),
            _ => Ok(args),
        }
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
            let encoder = Encoder::open_with(&self.model, self.adapter.as_deref())?;
            let machine = Machine::new(rayon::current_num_threads());
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
