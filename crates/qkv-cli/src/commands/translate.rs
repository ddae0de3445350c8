//! `qkv translate`: lines in, lines out.
//!
//! | module | owns |
//! | --- | --- |
//! | `args` | the arguments |
//! | `format` | a translated line as text, columns or JSON |

mod args;
mod format;

use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::lines::{BatchResult, Line, Lines, for_each_line, report};
use crate::output::{LineOutput, Print, note};
use crate::terminal::TerminalStyle;
use crate::{embedded, threads};
use args::{ARGUMENTS, AlignFormat, EXAMPLES, TranslateArgs};
use format::TranslatedLine;
use qkv_models::{Search, Translator};
use qkv_nn::Machine;
use rayon::prelude::*;
use std::io::{self, IsTerminal, Write};

/// Maximum number of lines per batch: enough to keep the machine busy, few enough to see results soon.
const BATCH: usize = 1024;

pub(super) const COMMAND: Command =
    Command::new("translate", "Translate text line by line, and show the word alignment", ARGUMENTS, |matches| {
        Ok(Box::new(TranslateArgs::parse(matches)))
    })
    .examples(EXAMPLES);

impl Run for TranslateArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            let translator = embedded::translator(self.model.as_deref())?;
            let mut session = TranslateSession::new(self, &translator)?;
            let lines = Lines::new(&self.texts, self.input.as_deref())?;
            let mut output = LineOutput::new(self.output.as_deref(), self.append, self.input.as_deref(), print)?;
            if self.texts.is_empty() && self.input.is_none() && io::stdin().is_terminal() {
                session.prompt(lines, &mut output)?;
                return output.finish().map(|()| Status::Done);
            }
            let (mut number, json) = (0, self.json);
            let ended = for_each_line(
                lines,
                BATCH,
                |batch| session.translate(batch),
                |results| {
                    let mut text = String::new();
                    for result in results {
                        number += 1;
                        text += &result.unwrap_or_else(|| failed_line(number, json));
                    }
                    output.write(&text)
                },
            );
            // Bad lines have been reported; the other translations are kept.
            output.finish()?;
            ended.map(|()| Status::Done)
        })
    }
}

/// The output of a failed line, so that output lines keep matching input lines.
fn failed_line(number: usize, json: bool) -> String {
    if json { format!("{}\n", serde_json::json!({ "line": number, "translation": null })) } else { "\n".into() }
}

/// A model, and everything else it takes to translate lines.
struct TranslateSession<'a> {
    args: &'a TranslateArgs,
    translator: &'a Translator,
    search: Search,
    machine: Machine,
    style: TerminalStyle,
    align: AlignFormat,
    /// Sentences translated so far: sampling draws different random numbers for each.
    translated: usize,
}

impl<'a> TranslateSession<'a> {
    fn new(args: &'a TranslateArgs, translator: &'a Translator) -> Result<Self, Failure> {
        let search = args.search.apply_to(&translator.search, args.n_best);
        let plain = args.texts.is_empty() || args.json || args.scores || args.n_best > 1 || args.output.is_some();
        let align = args.align.unwrap_or(match !plain && io::stdout().is_terminal() {
            true => AlignFormat::Draw,
            false => AlignFormat::None,
        });
        let machine = args.device.machine()?.int8(args.int8);
        let style = TerminalStyle::of_stdout();
        Ok(TranslateSession { args, translator, search, machine, style, align, translated: 0 })
    }

    /// Translates a batch. A line that is too long for the model fails on its own.
    fn translate(&mut self, lines: &[Line]) -> BatchResult<String> {
        let most = self.translator.model.max_len().saturating_sub(1);
        let tokens: Vec<Vec<u32>> =
            lines.par_iter().map(|line| self.translator.tokenizer.encode(line.text.trim())).collect();
        let fits = |tokens: &[u32]| tokens.len() <= most;
        let sources: Vec<Vec<u32>> = tokens.iter().filter(|tokens| fits(tokens)).cloned().collect();
        let mut search = self.search.clone();
        if let Some(sample) = &mut search.sample {
            sample.before = self.translated;
        }
        let mut translations = self.translator.translate_tokens(&sources, &search, &self.machine)?.into_iter();
        self.translated += sources.iter().filter(|source| !source.is_empty()).count();
        let mut results = Vec::with_capacity(lines.len());
        for (line, tokens) in lines.iter().zip(&tokens) {
            if !fits(tokens) {
                let what = format!("the line has {} tokens, the model takes at most {most}", tokens.len());
                results.push(Err(line.failure(Failure::new(what).hint("split it into sentences"))));
                continue;
            }
            let found = translations.next().unwrap_or_default();
            let line = TranslatedLine::new(self.translator, line, tokens, &found, self.align, &self.machine)?;
            results.push(Ok(match self.args.json {
                true => line.to_json(self.args.n_best),
                false => line.to_text(self.args, self.style),
            }));
        }
        Ok(results)
    }

    /// Translates each line as it is entered at a terminal.
    fn prompt(&mut self, mut lines: Lines, output: &mut LineOutput<'_>) -> Result<(), Failure> {
        note("Enter a line to translate it; Ctrl-D ends. `--align` draws alignments.");
        loop {
            let _ = write!(io::stderr(), "> ").and_then(|()| io::stderr().flush());
            let Some(line) = lines.next(1)?.into_iter().next() else {
                note("");
                return Ok(());
            };
            let translated = line.and_then(|line| self.translate(std::slice::from_ref(&line))?.remove(0));
            match translated {
                Ok(text) if !output.write(&text)? => return Ok(()),
                Ok(_) => {}
                // One bad line does not end the session.
                Err(failure) => report(&failure),
            }
        }
    }
}
