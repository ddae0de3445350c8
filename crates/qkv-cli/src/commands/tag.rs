//! The commands that read: `qkv classify`, `qkv tag` and `qkv answer`, each a model that was trained for it and lines of text. What
//! a class is told with is in `classes`.

use crate::choices::{Choice, Kind, Table};
use crate::classes::classify;
use crate::failure::Failure;
use crate::say::Say;
use crate::threads;
use crate::translate::Lines;
use clap::ArgMatches;
use qkv_models::Encoder;
use qkv_models::text::corpus::Corpus;
use qkv_nn::Machine;
use serde_json::json;
use std::path::PathBuf;

/// The model.
const MODEL: Choice = Choice::new("model", Kind::Path, "The model: a folder in the Hugging Face layout").value("DIR");
/// How many threads.
const THREADS: Choice = Choice::new("threads", Kind::Threads, "Use N threads; left out, every core").value("N");
/// For programs.
const JSON: Choice = Choice::new("json", Kind::Switch, "One JSON object for each text");

/// Every choice of `qkv classify`.
pub(crate) const CLASSIFY: Table = &[
    (
        "What is read, and by which model",
        &[
            Choice::new("text", Kind::Text, "Read this; left out, the lines of `--input`, or else of stdin")
                .value("TEXT")
                .bare()
                .many()
                .clashes(&["input", "image"]),
            MODEL,
            Choice::new("input", Kind::Path, "Read lines from here").value("FILE").clashes(&["image"]),
            Choice::new("image", Kind::Path, "See this image, PNG or JPEG").value("FILE").many(),
        ],
    ),
    (
        "What is told: `LABEL⇥PROBABILITY` for each line or image",
        &[
            Choice::new(
                "weights",
                Kind::Switch,
                "And what was attended to: sentences and their words (a model of kind `han`), or patches (`vit`)",
            ),
            JSON,
        ],
    ),
    ("How", &[THREADS]),
];

/// Every choice of `qkv tag`.
pub(crate) const TAG: Table = &[
    (
        "What is read, and by which model",
        &[
            Choice::new(
                "text",
                Kind::Text,
                "Read this, cut at spaces; left out, the lines of `--input`, or else of stdin",
            )
            .value("TEXT")
            .bare()
            .many()
            .clashes(&["input"]),
            MODEL,
            Choice::new("input", Kind::Path, "Read lines from here").value("FILE"),
        ],
    ),
    ("What is told: `WORD⇥TAG` for each word, an empty line after each text", &[JSON]),
    ("How", &[THREADS]),
];

/// Every choice of `qkv answer`.
pub(crate) const ANSWER: Table = &[
    (
        "What is asked, and of which model",
        &[
            Choice::new("question", Kind::Text, "Ask this of the text; left out, lines of `question⇥text` from stdin")
                .value("QUESTION")
                .bare(),
            MODEL,
            Choice::new("input", Kind::Path, "The text that answers it, from this file")
                .value("FILE")
                .clashes(&["context"]),
            Choice::new("context", Kind::Text, "The text that answers it").value("TEXT").needs(&["question"]),
        ],
    ),
    ("What is told: the answer, a line each", &[JSON]),
    ("How", &[THREADS]),
];

/// Which of the three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    Classify,
    Tag,
    Answer,
}

/// What a command that reads was asked.
#[derive(Debug)]
pub(crate) struct Asked {
    pub task: Task,
    pub texts: Vec<String>,
    pub model: PathBuf,
    pub input: Option<PathBuf>,
    pub context: Option<String>,
    pub images: Vec<PathBuf>,
    pub weights: bool,
    pub json: bool,
    pub threads: Option<usize>,
}

impl Asked {
    /// From a command line that holds together; the error says what is missing.
    pub fn read(task: Task, matches: &ArgMatches) -> Result<Asked, String> {
        let path = |name| matches.get_one::<PathBuf>(name).cloned();
        let answer = task == Task::Answer;
        let name = match task {
            Task::Classify => "classify",
            Task::Tag => "tag",
            Task::Answer => "answer",
        };
        let texts: Vec<String> =
            matches.get_many(if answer { "question" } else { "text" }).into_iter().flatten().cloned().collect();
        let context = if answer { matches.get_one::<String>("context").cloned() } else { None };
        let input = path("input");
        if answer && !texts.is_empty() && context.is_none() && input.is_none() {
            return Err("a QUESTION needs `--context TEXT` or `--input FILE`".into());
        }
        if answer && texts.is_empty() && input.is_some() {
            return Err("`--input` needs a QUESTION".into());
        }
        let classify = task == Task::Classify;
        let images =
            if classify { matches.get_many("image").into_iter().flatten().cloned().collect() } else { Vec::new() };
        Ok(Asked {
            task,
            texts,
            images,
            weights: classify && matches.get_flag("weights"),
            model: path("model").ok_or_else(|| format!("`qkv {name}` needs `--model DIR`"))?,
            input,
            context,
            json: matches.get_flag("json"),
            threads: matches.get_one::<u64>("threads").and_then(|&n| usize::try_from(n).ok()),
        })
    }
}

/// Lines that are read together at most.
const TOGETHER: usize = 256;

/// Reads what was asked.
pub(crate) fn read(asked: &Asked, say: Say<'_>) -> Result<(), Failure> {
    threads::on(asked.threads, || {
        let machine = Machine::new(rayon::current_num_threads());
        if asked.task == Task::Classify {
            return classify(asked, &machine, say);
        }
        let encoder = Encoder::open(&asked.model)?;
        if asked.task == Task::Answer {
            return answers(asked, &encoder, &machine, say);
        }
        each_portion(asked, say, |portion| tags(asked, &encoder, &machine, portion))
    })
}

/// Tells what is made of each portion of the lines, from wherever they come.
pub(crate) fn each_portion(
    asked: &Asked,
    say: Say<'_>,
    mut told: impl FnMut(&[String]) -> Result<String, Failure>,
) -> Result<(), Failure> {
    let mut lines = match (&asked.texts[..], &asked.input) {
        ([], None) => Lines::stdin(),
        ([], Some(path)) => Lines::open(path)?,
        (texts, _) => Lines::given(texts),
    };
    loop {
        let portion: Vec<String> = lines.next(TOGETHER)?.into_iter().map(|line| line.text).collect();
        if portion.is_empty() || !say(&told(&portion)?)? {
            return Ok(());
        }
    }
}

fn tags(asked: &Asked, encoder: &Encoder, machine: &Machine, texts: &[String]) -> Result<String, Failure> {
    let words: Vec<Vec<&str>> = texts.iter().map(|text| text.split_whitespace().collect()).collect();
    let mut told = String::new();
    for (words, tags) in words.iter().zip(encoder.tag(&words, machine)?) {
        if asked.json {
            told += &format!("{}\n", json!({ "words": words, "tags": tags }));
            continue;
        }
        told.extend(words.iter().zip(&tags).map(|(word, tag)| format!("{word}\t{tag}\n")));
        told.push('\n');
    }
    Ok(told)
}

fn answers(asked: &Asked, encoder: &Encoder, machine: &Machine, say: Say<'_>) -> Result<(), Failure> {
    let mut told = |question: &str, context: &str| -> Result<bool, Failure> {
        let found = encoder.answer(question, context, machine)?;
        // An answer stays a line.
        let line = found.text.replace(['\n', '\r', '\t'], " ");
        say(&match asked.json {
            true => format!(
                "{}\n",
                json!({ "question": question, "answer": found.text, "start": found.start, "score": found.score })
            ),
            false => format!("{line}\n"),
        })
    };
    if let Some(question) = asked.texts.first() {
        let context = match (&asked.context, &asked.input) {
            (Some(context), _) => context.clone(),
            (None, Some(path)) => {
                std::fs::read_to_string(path).map_err(|e| qkv_models::Error::file("read", path, e))?
            }
            (None, None) => String::new(),
        };
        return told(question, &context).map(drop);
    }
    for pair in Corpus::new(std::io::stdin().lock(), "stdin") {
        let pair = pair?;
        if !told(&pair.source, &pair.target)? {
            return Ok(());
        }
    }
    Ok(())
}

/// What `qkv classify --help` says beyond its choices.
pub(crate) fn after_classify_help() -> String {
    crate::arguments::examples(&[
        ("qkv classify --model runs/reviews 'a film to be seen twice'", "A text"),
        ("qkv classify --model runs/reviews --json < reviews.txt", "A file, line by line, with all probabilities"),
        (
            "qkv classify --model runs/han --weights 'Dull at first. Then it sings.'",
            "With the sentences and words that counted",
        ),
        ("qkv classify --model runs/digits --image seven.png", "An image"),
    ])
}

/// What `qkv tag --help` says beyond its choices.
pub(crate) fn after_tag_help() -> String {
    crate::arguments::examples(&[("qkv tag --model runs/entities 'Ada flew to Oslo'", "A tag for each word")])
}

/// What `qkv answer --help` says beyond its choices.
pub(crate) fn after_answer_help() -> String {
    crate::arguments::examples(&[(
        "qkv answer --model runs/answers 'Where did Ada fly?' --context 'Ada flew to Oslo'",
        "The words of the text that answer",
    )])
}
