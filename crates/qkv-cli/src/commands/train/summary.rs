//! The summary of a finished run: its best score, where the model is, how to use it, and one translated example.

use crate::alignment::AlignmentJson;
use crate::failure::Failure;
use crate::terminal::TerminalStyle;
use qkv_explore::{Matrix, draw};
use qkv_models::tasks::ShapesTask;
use qkv_models::train::{Outcome, Run};
use qkv_models::{Data, Metric, Translator};
use qkv_nn::Machine;
use serde::{Serialize, Serializer};

/// The most tokens of a sentence whose alignment fits a screen.
const SHORT: usize = 24;

/// How a run ended.
#[derive(Debug, Serialize)]
pub(crate) struct TrainSummary {
    /// `finished`, or `no better` after early stopping.
    outcome: &'static str,
    step: u64,
    metric: Metric,
    best: Option<f64>,
    best_step: Option<u64>,
    model: String,
    /// On several ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    ranks: Option<TrainRanks>,
    /// The command that uses the model.
    #[serde(skip)]
    command: &'static str,
    /// Whether it answers questions about images.
    #[serde(skip)]
    seen: bool,
    /// A sentence of the dev set.
    example: Option<TranslatedExample>,
}

/// How much the first of several ranks sent, and how long it waited, validation and checkpoints included.
#[derive(Debug, Serialize)]
struct TrainRanks {
    count: usize,
    sent_bytes: u64,
    waited_seconds: f64,
}

#[derive(Debug, Serialize)]
struct TranslatedExample {
    source: String,
    translation: String,
    reference: String,
    #[serde(serialize_with = "aligned")]
    alignment: Matrix,
}

fn aligned<S: Serializer>(matrix: &Matrix, to: S) -> Result<S::Ok, S::Error> {
    AlignmentJson::new(matrix).serialize(to)
}

impl TrainSummary {
    /// Summarizes a run, with the model in its folder.
    pub fn new(run: &Run, outcome: Outcome) -> Result<TrainSummary, Failure> {
        let metric = run.recipe().train.metric;
        let best = run.best().map(|(score, _)| if metric == Metric::Loss { -score } else { score });
        let example = match run.dev() {
            [] => None,
            pairs => {
                let translator = Translator::open(run.folder())?;
                let fits = |text: &str| (2..=SHORT).contains(&translator.tokenizer.encode(text).len());
                let pair = pairs.iter().find(|pair| fits(&pair.source)).unwrap_or(&pairs[0]);
                Some(TranslatedExample::new(&translator, &pair.source, &pair.target)?)
            }
        };
        let (count, traffic) = (run.ranks().size(), run.ranks().traffic());
        let ranks = (count > 1).then(|| {
            let waited_seconds = traffic.waited.as_secs_f64();
            TrainRanks { count, sent_bytes: traffic.sent, waited_seconds }
        });
        Ok(TrainSummary {
            outcome: if outcome == Outcome::NoBetter { "no better" } else { "finished" },
            step: run.step(),
            metric,
            best,
            best_step: run.best().map(|(_, step)| step),
            model: run.folder().display().to_string(),
            ranks,
            command: match run.recipe().data {
                Data::Files { .. } | Data::Task { .. } => "translate",
                Data::Text { .. } | Data::Chat { .. } => "generate",
                Data::Classes { .. } | Data::Needles { .. } | Data::Images { .. } => "classify",
                Data::Tags { .. } => "tag",
                Data::Spoken { .. } | Data::Tones { .. } => "speak",
                Data::Boxes { .. } | Data::Shapes { shapes: ShapesTask::Boxes, .. } => "detect",
                Data::Captions { .. } | Data::Shapes { shapes: ShapesTask::Captions, .. } => "describe",
                Data::Answers { .. } | Data::Stories { .. } | Data::Questions { .. } | Data::Shapes { .. } => "answer",
            },
            seen: run.kind() == "vqa",
            example,
        })
    }

    /// One JSON object, on one line.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data") + "\n"
    }

    /// A few lines.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        if let (Some(best), Some(step)) = (self.best, self.best_step) {
            let best = match self.metric {
                Metric::Bleu => format!("BLEU {best:.2}"),
                Metric::Chrf => format!("chrF {best:.2}"),
                Metric::Exact if self.command == "classify" => format!("accuracy {best:.2} %"),
                Metric::Exact if self.seen => format!("accuracy {best:.2} %"),
                Metric::Exact if self.command == "detect" => format!("AP50 {best:.2}"),
                Metric::Exact => format!("exact match {best:.2} %"),
                Metric::F1 if self.command == "detect" => format!("AP {best:.2}"),
                Metric::F1 if self.command == "describe" => format!("edit similarity {best:.2} %"),
                Metric::F1 => format!("F1 {best:.2}"),
                Metric::Loss => format!("loss {best:.4}"),
            };
            text += &format!("best     {best} on the dev set, at step {step}");
            text += if self.outcome == "no better" { "; stopped early, no better since\n" } else { "\n" };
        }
        text += &format!("model    {}\n", self.model);
        if let Some(TrainRanks { count, sent_bytes, waited_seconds }) = self.ranks {
            let sent = sent_bytes as f64 / f64::from(1 << 20);
            text += &format!("ranks    {count}; the first sent {sent:.1} MiB and waited {waited_seconds:.1} s\n");
        }
        let Some(example) = &self.example else {
            let option = if self.command == "speak" { "voice" } else { "model" };
            return text + &format!("try      qkv {} --{option} {}\n", self.command, self.model);
        };
        let quoted = example.source.replace('\'', r"'\''");
        text += &format!("try      qkv translate --model {} '{quoted}'\n\n", self.model);
        let style = TerminalStyle::of_stdout();
        let drawn = draw::alignment(&example.alignment, style.width, style.color);
        text + &format!("{} → {}\n\n{drawn}", example.source, example.translation)
    }
}

impl TranslatedExample {
    fn new(translator: &Translator, source: &str, reference: &str) -> Result<TranslatedExample, Failure> {
        let machine = Machine::new(rayon::current_num_threads());
        let found = translator.translate(&[source], &translator.search, &machine)?;
        let best = found.into_iter().next().and_then(|found| found.into_iter().next());
        let (translation, tokens) = best.map_or_else(Default::default, |best| (best.text, best.tokens));
        let alignment = translator.align(&translator.tokenizer.encode(source), &tokens, &machine)?;
        Ok(TranslatedExample {
            source: source.to_owned(),
            translation,
            reference: reference.to_owned(),
            alignment: Matrix::aligned(&alignment, &translator.tokenizer)?,
        })
    }
}
