//! What is told of a line: its translation, with scores, alternatives and alignment where they were asked for.

use super::asked::{Align, Asked};
use super::lines::Line;
use crate::aligned::Aligned;
use crate::failure::Failure;
use crate::terminal::Paper;
use qkv_explore::{Matrix, draw};
use qkv_models::{Translation, Translator};
use qkv_nn::Machine;
use serde::Serialize;

/// A line and what was found for it.
pub(crate) struct Answer<'a> {
    translator: &'a Translator,
    line: &'a Line,
    source: &'a [u32],
    found: &'a [Translation],
    /// Where the best looked, if that was asked for.
    words: Option<Matrix>,
}

/// The same as JSON.
#[derive(Serialize)]
struct Object<'a> {
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
    alignment: Option<Aligned<'a>>,
}

#[derive(Serialize)]
struct Alternative<'a> {
    translation: &'a str,
    score: f64,
    log_probability: f64,
    tokens: Vec<String>,
}

impl<'a> Answer<'a> {
    pub fn new(
        translator: &'a Translator,
        line: &'a Line,
        source: &'a [u32],
        found: &'a [Translation],
        align: Align,
        machine: &Machine,
    ) -> Result<Self, Failure> {
        let words = match found.first() {
            Some(best) if align != Align::None && !source.is_empty() => {
                let alignment = translator.align(source, &best.tokens, machine)?;
                Some(Matrix::aligned(&alignment, &translator.tokenizer)?)
            }
            _ => None,
        };
        Ok(Answer { translator, line, source, found, words })
    }

    /// One JSON object on a line.
    pub fn json(&self, best: usize) -> String {
        let none = Translation { text: String::new(), tokens: Vec::new(), score: 0.0, log_probability: 0.0 };
        let first = self.found.first().unwrap_or(&none);
        let object = Object {
            line: self.line.number,
            source: &self.line.text,
            translation: &first.text,
            score: first.score,
            log_probability: first.log_probability,
            source_tokens: self.pieces(self.source),
            target_tokens: self.pieces(&first.tokens),
            alternatives: (self.found.iter().take(best).skip(1))
                .map(|found| Alternative {
                    translation: &found.text,
                    score: found.score,
                    log_probability: found.log_probability,
                    tokens: self.pieces(&found.tokens),
                })
                .collect(),
            alignment: self.words.as_ref().map(Aligned::linked),
        };
        serde_json::to_string(&object).expect("plain data") + "\n"
    }

    fn pieces(&self, tokens: &[u32]) -> Vec<String> {
        self.translator.tokenizer.pieces(tokens).into_iter().map(|piece| piece.text).collect()
    }

    /// Columns with tabs between them: the number of the line with `--n-best`, the score with it or with `--scores`, the text,
    /// and links with `--align=pharaoh`; a drawing under it.
    pub fn text(&self, asked: &Asked, paper: Paper) -> String {
        let mut told = String::new();
        let empty = self.source.is_empty();
        let count = if empty { 1 } else { asked.n_best };
        for (at, found) in self.found.iter().take(count).enumerate() {
            if asked.n_best > 1 {
                told += &format!("{}\t", self.line.number);
            }
            if asked.scores || asked.n_best > 1 {
                told += &format!("{:.4}\t", found.score);
            }
            // A line stays a line, whatever a model says.
            told += &found.text.replace(['\n', '\r', '\t'], " ");
            if asked.align == Some(Align::Pharaoh) {
                told.push('\t');
                told += &self.words.as_ref().filter(|_| at == 0).map(Matrix::pharaoh).unwrap_or_default();
            }
            told.push('\n');
        }
        if self.found.is_empty() {
            told.push('\n');
        }
        match &self.words {
            Some(words) if asked.align != Some(Align::Pharaoh) => {
                told + "\n" + &draw::alignment(words, paper.width, paper.colour) + "\n"
            }
            _ => told,
        }
    }
}
