//! A translated line as text, columns or JSON, with scores, alternatives and alignment.

use super::args::{AlignFormat, TranslateArgs};
use crate::alignment::AlignmentJson;
use crate::failure::Failure;
use crate::lines::Line;
use crate::terminal::TerminalStyle;
use qkv_explore::{Matrix, draw};
use qkv_models::{Translation, Translator};
use qkv_nn::Machine;
use serde::Serialize;

/// A line and its translations, best first.
pub(crate) struct TranslatedLine<'a> {
    translator: &'a Translator,
    line: &'a Line,
    source: &'a [u32],
    found: &'a [Translation],
    /// The word alignment of the best translation.
    alignment: Option<Matrix>,
}

/// The JSON of a line.
#[derive(Serialize)]
struct TranslationJson<'a> {
    line: usize,
    source: &'a str,
    translation: &'a str,
    score: f64,
    log_probability: f64,
    source_tokens: Vec<String>,
    target_tokens: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    alternatives: Vec<Alternative<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    alignment: Option<AlignmentJson<'a>>,
}

#[derive(Serialize)]
struct Alternative<'a> {
    translation: &'a str,
    score: f64,
    log_probability: f64,
    tokens: Vec<String>,
}

impl<'a> TranslatedLine<'a> {
    pub fn new(
        translator: &'a Translator,
        line: &'a Line,
        source: &'a [u32],
        found: &'a [Translation],
        align: AlignFormat,
        machine: &Machine,
    ) -> Result<Self, Failure> {
        let alignment = match found.first() {
            Some(best) if align != AlignFormat::None && !source.is_empty() => {
                let alignment = translator.align(source, &best.tokens, machine)?;
                Some(Matrix::aligned(&alignment, &translator.tokenizer)?)
            }
            _ => None,
        };
        Ok(TranslatedLine { translator, line, source, found, alignment })
    }

    /// One JSON object, on one line.
    pub fn to_json(&self, n_best: usize) -> String {
        let none = Translation { text: String::new(), tokens: Vec::new(), score: 0.0, log_probability: 0.0 };
        let first = self.found.first().unwrap_or(&none);
        let object = TranslationJson {
            line: self.line.number,
            source: &self.line.text,
            translation: &first.text,
            score: first.score,
            log_probability: first.log_probability,
            source_tokens: self.pieces(self.source),
            target_tokens: self.pieces(&first.tokens),
            alternatives: (self.found.iter().take(n_best).skip(1))
                .map(|found| Alternative {
                    translation: &found.text,
                    score: found.score,
                    log_probability: found.log_probability,
                    tokens: self.pieces(&found.tokens),
                })
                .collect(),
            alignment: self.alignment.as_ref().map(AlignmentJson::with_links),
        };
        serde_json::to_string(&object).expect("plain data") + "\n"
    }

    fn pieces(&self, tokens: &[u32]) -> Vec<String> {
        self.translator.tokenizer.pieces(tokens).into_iter().map(|piece| piece.text).collect()
    }

    /// Columns separated by tabs: the line number with `--n-best`, the score with `--n-best` or `--scores`, the text,
    /// and links with `--align=pharaoh`. A drawing goes below.
    pub fn to_text(&self, args: &TranslateArgs, style: TerminalStyle) -> String {
        let mut text = String::new();
        let empty = self.source.is_empty();
        let count = if empty { 1 } else { args.n_best };
        for (at, found) in self.found.iter().take(count).enumerate() {
            if args.n_best > 1 {
                text += &format!("{}\t", self.line.number);
            }
            if args.scores || args.n_best > 1 {
                text += &format!("{:.4}\t", found.score);
            }
            // A line stays one line, whatever the model generates.
            text += &found.text.replace(['\n', '\r', '\t'], " ");
            if args.align == Some(AlignFormat::Pharaoh) {
                text.push('\t');
                text += &self.alignment.as_ref().filter(|_| at == 0).map(Matrix::pharaoh).unwrap_or_default();
            }
            text.push('\n');
        }
        if self.found.is_empty() {
            text.push('\n');
        }
        match &self.alignment {
            Some(alignment) if args.align != Some(AlignFormat::Pharaoh) => {
                text + "\n" + &draw::alignment(alignment, style.width, style.color) + "\n"
            }
            _ => text,
        }
    }
}
