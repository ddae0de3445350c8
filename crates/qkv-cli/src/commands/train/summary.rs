//! What is told when a run is done: how good it got, where the model is, how to use it, and what it looks at.

use crate::aligned::Aligned;
use crate::failure::Failure;
use crate::terminal::Paper;
use qkv_explore::{Matrix, draw};
use qkv_models::train::{Outcome, Run};
use qkv_models::{Data, Metric, Translator};
use qkv_nn::Machine;
use serde::{Serialize, Serializer};

/// A sentence that fits on a screen has at most so many tokens.
const SHORT: usize = 24;

/// How a run ended.
#[derive(Debug, Serialize)]
pub(crate) struct End {
    /// Whether it took all its steps, or stopped because nothing got better.
    outcome: &'static str,
    step: u64,
    metric: Metric,
    best: Option<f64>,
    best_step: Option<u64>,
    model: String,
    /// The command that uses it.
    #[serde(skip)]
    command: &'static str,
    /// A sentence of the dev set.
    example: Option<Example>,
}

#[derive(Debug, Serialize)]
struct Example {
    source: String,
    translation: String,
    reference: String,
    #[serde(serialize_with = "aligned")]
    alignment: Matrix,
}

fn aligned<S: Serializer>(matrix: &Matrix, to: S) -> Result<S::Ok, S::Error> {
    Aligned::new(matrix).serialize(to)
}

impl End {
    /// Of the model as it lies in the run's folder.
    pub fn new(run: &Run, outcome: Outcome) -> Result<End, Failure> {
        let metric = run.recipe().train.metric;
        let best = run.best().map(|(score, _)| if metric == Metric::Loss { -score } else { score });
        let example = match run.dev() {
            [] => None,
            pairs => {
                let translator = Translator::open(run.folder())?;
                let fits = |text: &str| (2..=SHORT).contains(&translator.tokenizer.encode(text).len());
                let pair = pairs.iter().find(|pair| fits(&pair.source)).unwrap_or(&pairs[0]);
                Some(Example::new(&translator, &pair.source, &pair.target)?)
            }
        };
        Ok(End {
            outcome: if outcome == Outcome::NoBetter { "no better" } else { "finished" },
            step: run.step(),
            metric,
            best,
            best_step: run.best().map(|(_, step)| step),
            model: run.folder().display().to_string(),
            command: match run.recipe().data {
                Data::Files { .. } | Data::Task { .. } => "translate",
                Data::Text { .. } => "generate",
                Data::Classes { .. } | Data::Needles { .. } | Data::Images { .. } => "classify",
                Data::Tags { .. } => "tag",
                Data::Answers { .. } | Data::Stories { .. } => "answer",
            },
            example,
        })
    }

    /// As one JSON object on a line.
    pub fn json(&self) -> String {
        serde_json::to_string(self).expect("plain data") + "\n"
    }

    /// For a person.
    pub fn told(&self) -> String {
        let mut told = String::new();
        if let (Some(best), Some(step)) = (self.best, self.best_step) {
            let best = match self.metric {
                Metric::Bleu => format!("BLEU {best:.2}"),
                Metric::Chrf => format!("chrF {best:.2}"),
                Metric::Exact if self.command == "classify" => format!("accuracy {best:.2} %"),
                Metric::Exact => format!("exact match {best:.2} %"),
                Metric::F1 => format!("F1 {best:.2}"),
                Metric::Loss => format!("loss {best:.4}"),
            };
            told += &format!("best     {best} on the dev set, at step {step}");
            told += if self.outcome == "no better" { "; nothing got better since\n" } else { "\n" };
        }
        told += &format!("model    {}\n", self.model);
        let Some(example) = &self.example else {
            return told + &format!("try      qkv {} --model {}\n", self.command, self.model);
        };
        let quoted = example.source.replace('\'', r"'\''");
        told += &format!("try      qkv translate --model {} '{quoted}'\n\n", self.model);
        let paper = Paper::of_stdout();
        let drawn = draw::alignment(&example.alignment, paper.width, paper.colour);
        told + &format!("{} → {}\n\n{drawn}", example.source, example.translation)
    }
}

impl Example {
    fn new(translator: &Translator, source: &str, reference: &str) -> Result<Example, Failure> {
        let machine = Machine::new(rayon::current_num_threads());
        let found = translator.translate(&[source], &translator.search, &machine)?;
        let best = found.into_iter().next().and_then(|found| found.into_iter().next());
        let (translation, tokens) = best.map_or_else(Default::default, |best| (best.text, best.tokens));
        let alignment = translator.align(&translator.tokenizer.encode(source), &tokens, &machine)?;
        Ok(Example {
            source: source.to_owned(),
            translation,
            reference: reference.to_owned(),
            alignment: Matrix::aligned(&alignment, &translator.tokenizer)?,
        })
    }
}
