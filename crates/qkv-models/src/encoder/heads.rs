//! The heads of an encoder: inputs and labels for training, and predictions (a class per text, a tag per word, an
//! answer to a question).

use super::{Encoder, Head};
use crate::batch::{IGNORE, Rows};
use crate::labelled::Question;
use crate::probabilities::probabilities;
use crate::{Error, Result};
use qkv_nn::{Machine, PendingLoss, Tape, Target};

/// The longest answer, in tokens.
const LONGEST_ANSWER: usize = 30;

/// The label of an example.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Label {
    /// A class.
    Class(u32),
    /// A tag per token, or [`IGNORE`].
    Tags(Vec<u32>),
    /// First and last token of the answer.
    Span([u32; 2]),
}

/// A tokenized text with its label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Example {
    pub ids: Vec<u32>,
    pub segments: Vec<u32>,
    pub label: Label,
}

/// A batch of examples.
pub(crate) struct Examples(pub Vec<Example>);

impl Examples {
    /// Number of labels.
    pub fn targets(&self) -> usize {
        let count = |example: &Example| match &example.label {
            Label::Tags(tags) => tags.iter().filter(|&&tag| tag != IGNORE).count(),
            _ => 1,
        };
        self.0.iter().map(count).sum()
    }
}

/// The class of each text, or the tag of each token of padded rows.
fn tags(examples: &Examples, length: usize) -> Vec<u32> {
    let of = |example: &Example| match &example.label {
        Label::Class(class) => vec![*class],
        Label::Tags(tags) => [&tags[..], &vec![IGNORE; length - tags.len()]].concat(),
        Label::Span(_) => Vec::new(),
    };
    examples.0.iter().flat_map(of).collect()
}

/// A predicted answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Index of its first character in the text.
    pub start: usize,
    /// The sum of the logits of its first and last token.
    pub score: f64,
}

/// A question followed by a window of a text.
struct Window {
    ids: Vec<u32>,
    segments: Vec<u32>,
    /// The character range of each token of the text; `None` for other tokens.
    places: Vec<Option<(usize, usize)>>,
}

impl Encoder {
    /// The loss of a batch; the gradient of each label is multiplied by `scale`.
    pub(crate) fn loss(&self, tape: &mut Tape<'_, f32>, examples: &Examples, scale: f64) -> Result<PendingLoss> {
        let pad = self.config.pad_token_id;
        let rows: Vec<Vec<u32>> = examples.0.iter().map(|example| example.ids.clone()).collect();
        let rows = Rows::new(&rows, pad);
        let segments: Vec<Vec<u32>> = examples.0.iter().map(|example| example.segments.clone()).collect();
        let x = self.model.looked_at(tape, &rows, &Rows::new(&segments, 0).ids)?;
        if let Some((masked, table)) = self.model.masked() {
            let activation = self.config.activation.activation();
            let x = masked.transform.activated(tape, &x, activation, 0.0);
            let x = masked.norm.forward(tape, &x);
            let ids = tags(examples, rows.length);
            let target = Target { ids: &ids, ignore: Some(IGNORE), smoothing: 0.0, scale };
            return Ok(tape.cross_entropy(&x, table, Some(masked.bias), target));
        }
        let head = self.model.head().ok_or_else(|| Error::invalid("the model has no head"))?;
        if self.config.head == Head::Span {
            let scores = head.forward(tape, &x); // (B, N, 2)
            let spans: Vec<[u32; 2]> = (examples.0.iter())
                .map(|example| if let Label::Span(span) = example.label { span } else { [0, 0] })
                .collect();
            return Ok(tape.span_loss(&scores, &spans, &rows.lengths, scale));
        }
        let ids = tags(examples, rows.length);
        let target = Target { ids: &ids, ignore: Some(IGNORE), smoothing: 0.0, scale };
        Ok(tape.cross_entropy(&x, head.weight, head.bias, target))
    }

    /// The probabilities of all classes, for each text, in the order of [`labels`](super::EncoderConfig::labels).
    ///
    /// # Errors
    /// If the model was not trained for classes, or computes NaN.
    pub fn classify<S: AsRef<str>>(&self, texts: &[S], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        self.is_for(Head::Classes)?;
        let tokens = self.all_tokens(texts, usize::MAX);
        Ok(probabilities(&self.scores(&tokens, machine)?.concat(), self.config.labels.len()))
    }

    /// A tag for each word of each sentence; words beyond the longest sequence are tagged `O`.
    ///
    /// # Errors
    /// If the model was not trained for tags, or computes NaN.
    pub fn tag<S: AsRef<str>>(&self, sentences: &[Vec<S>], machine: &Machine) -> Result<Vec<Vec<String>>> {
        self.is_for(Head::Tags)?;
        let cut: Vec<_> = sentences.iter().map(|words| self.words(words)).collect();
        let tokens: Vec<_> = cut.iter().map(|(ids, _)| (ids.clone(), vec![0; ids.len()])).collect();
        let scores = self.scores(&tokens, machine)?;
        let classes = self.config.labels.len();
        let name = |scores: &[f32], at: usize| self.config.labels[highest(&scores[at * classes..][..classes])].clone();
        let tags = |firsts: &[Option<usize>], scores: &[f32]| {
            firsts.iter().map(|first| first.map_or("O".into(), |at| name(scores, at))).collect()
        };
        Ok(cut.iter().zip(&scores).map(|((_, firsts), scores)| tags(firsts, scores)).collect())
    }

    /// The answer to a question in a text. Long texts are read in overlapping windows.
    ///
    /// # Errors
    /// If the model was not trained for answers, computes NaN, or the question leaves no room for the text.
    pub fn answer(&self, question: &str, context: &str, machine: &Machine) -> Result<Answer> {
        self.is_for(Head::Span)?;
        let windows = self.windows(question, context)?;
        let tokens: Vec<_> = windows.iter().map(|window| (window.ids.clone(), window.segments.clone())).collect();
        let scores = self.scores(&tokens, machine)?;
        let mut best: Option<(f64, usize, usize)> = None;
        for (window, scores) in windows.iter().zip(&scores) {
            for (first, place) in window.places.iter().enumerate() {
                let Some((start, _)) = *place else { continue };
                let lasts = window.places.iter().enumerate().skip(first).take(LONGEST_ANSWER);
                for (last, place) in lasts.filter_map(|(last, place)| place.map(|(_, end)| (last, end))) {
                    let score = f64::from(scores[first * 2]) + f64::from(scores[last * 2 + 1]);
                    if best.is_none_or(|(other, ..)| score > other) {
                        best = Some((score, start, place));
                    }
                }
            }
        }
        let (score, start, end) = best.unwrap_or((f64::NEG_INFINITY, 0, 0));
        let text: String = context.chars().skip(start).take(end.saturating_sub(start)).collect();
        // A token may include the space before its word.
        let start = start + text.chars().take_while(|c| c.is_whitespace()).count();
        Ok(Answer { text: text.trim().to_owned(), start, score })
    }

    fn is_for(&self, head: Head) -> Result<()> {
        if self.config.head == head {
            return Ok(());
        }
        let word = |head| match head {
            Head::None => "vectors alone",
            Head::Classes => "classes",
            Head::Tags => "tags",
            Head::Span => "answers",
            Head::Masked => "masked tokens",
        };
        let what = format!("the model was trained for {}, not for {}", word(self.config.head), word(head));
        Err(Error::invalid(what).with_hint("`qkv train` trains one from a recipe"))
    }

    /// Tokens of words with special tokens around them, and the first token of each word that fits.
    fn words<S: AsRef<str>>(&self, words: &[S]) -> (Vec<u32>, Vec<Option<usize>>) {
        let (frame, _) = self.tokenizer.encode_framed("", None);
        let (mut ids, end) = match &frame[..] {
            [first, .., last] => (vec![*first], Some(*last)),
            _ => (Vec::new(), None),
        };
        let most = self.model.max_len().saturating_sub(usize::from(end.is_some()));
        let firsts = words.iter().map(|word| {
            let pieces = self.tokenizer.encode(word.as_ref());
            let fits = !pieces.is_empty() && ids.len() + pieces.len() <= most;
            let first = fits.then_some(ids.len());
            ids.extend(pieces.into_iter().filter(|_| fits));
            first
        });
        let firsts = firsts.collect();
        ids.extend(end);
        if ids.is_empty() {
            ids.push(self.config.pad_token_id);
        }
        (ids, firsts)
    }

    /// A training example of a tagged sentence.
    pub(crate) fn tagged(&self, words: &[String], tags: &[String]) -> Example {
        let (ids, firsts) = self.words(words);
        let mut targets = vec![IGNORE; ids.len()];
        for (first, tag) in firsts.iter().zip(tags) {
            if let (Some(first), Some(label)) = (first, self.label(tag)) {
                targets[*first] = label;
            }
        }
        Example { segments: vec![0; ids.len()], ids, label: Label::Tags(targets) }
    }

    /// A training example of a labelled text; `None` if the label is unknown.
    pub(crate) fn classed(&self, text: &str, label: &str) -> Option<Example> {
        let (ids, segments) = self.tokens(text, None, usize::MAX);
        Some(Example { ids, segments, label: Label::Class(self.label(label)?) })
    }

    /// Training examples of a question: the windows that contain its first answer.
    pub(crate) fn asked(&self, question: &Question) -> Result<Vec<Example>> {
        let Some((start, text)) = question.answers.first() else { return Ok(Vec::new()) };
        let (start, end) = (*start, start + text.chars().count());
        let windows = self.windows(&question.question, &question.context)?;
        Ok(windows
            .into_iter()
            .filter_map(|Window { ids, segments, places }| {
                let at =
                    |fits: &dyn Fn((usize, usize)) -> bool| places.iter().position(|place| place.is_some_and(fits));
                let first = at(&|(from, to)| from <= start && start < to)?;
                let last = at(&|(from, to)| from < end && end <= to)?;
                Some(Example { ids, segments, label: Label::Span([first as u32, last as u32]) })
            })
            .collect())
    }

    fn label(&self, name: &str) -> Option<u32> {
        self.config.labels.iter().position(|label| label == name).map(|at| at as u32)
    }

    /// Splits a text into windows that fit after the question.
    fn windows(&self, question: &str, context: &str) -> Result<Vec<Window>> {
        let (ids, segments, places) = self.tokenizer.encode_asked(question, context);
        let first = places.iter().position(Option::is_some).unwrap_or(places.len());
        let last = places.iter().rposition(Option::is_some).map_or(first, |at| at + 1);
        let (before, after) = (first, ids.len() - last);
        let room = self.model.max_len().saturating_sub(before + after);
        if room < 2 {
            return Err(Error::invalid("the question is as long as the text may be").with_hint("ask in fewer words"));
        }
        let mut windows = Vec::new();
        let mut from = first;
        loop {
            let to = (from + room).min(last);
            let part = |all: &[u32]| [&all[..before], &all[from..to], &all[last..]].concat();
            let mut kept = vec![None; before];
            kept.extend_from_slice(&places[from..to]);
            kept.resize(before + to - from + after, None);
            let segments = part(&segments).into_iter().map(|s| s.min(self.config.segments as u32 - 1)).collect();
            windows.push(Window { ids: part(&ids), segments, places: kept });
            if to == last {
                return Ok(windows);
            }
            // Windows overlap by half, so that an answer at the edge of one is whole in the next.
            from += (room / 2).max(1);
        }
    }
}

/// The index of the largest value; of equal ones, the first.
pub(crate) fn highest(scores: &[f32]) -> usize {
    let mut best = 0;
    for (at, score) in scores.iter().enumerate() {
        if *score > scores[best] {
            best = at;
        }
    }
    best
}
