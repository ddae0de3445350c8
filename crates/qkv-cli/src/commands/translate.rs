//! The command `qkv translate`: lines in, lines out. It puts the parts in order: which model, which lines, how they are
//! searched for, what is told of each.
//!
//! | module | owns |
//! | --- | --- |
//! | `asked` | the choices of the command, and what was chosen |
//! | `lines` | where lines come from, in portions that are there |
//! | `answer` | what is told of a line: text, columns or JSON |

mod answer;
mod asked;
mod lines;

pub(crate) use asked::{Asked, CHOICES, after_help};
pub(crate) use lines::{Line, Lines};

use crate::failure::Failure;
use crate::say::{Say, Sink};
use crate::terminal::Paper;
use crate::{embedded, threads};
use answer::Answer;
use asked::Align;
use qkv_models::{Search, Translator};
use qkv_nn::Machine;
use std::io::{self, IsTerminal, Write};

/// Lines that are translated together at most: enough to fill the machine, few enough to see something soon.
const TOGETHER: usize = 256;

/// Translates what was asked, and tells each line as soon as it is done.
pub(crate) fn translate(asked: &Asked, say: Say<'_>) -> Result<(), Failure> {
    threads::on(asked.threads, || {
        let translator = embedded::translator(asked.model.as_deref())?;
        let mut lines = match (&asked.texts[..], &asked.input) {
            ([], None) if io::stdin().is_terminal() => return prompt(asked, &translator, say),
            ([], None) => Lines::stdin(),
            ([], Some(path)) => Lines::open(path)?,
            (texts, _) => Lines::given(texts),
        };
        let mut sink = Sink::new(asked.output.as_deref(), asked.input.as_deref(), say)?;
        let desk = Desk::new(asked, &translator);
        let mut before = 0;
        loop {
            let portion = lines.next(TOGETHER)?;
            if portion.is_empty() {
                return sink.done();
            }
            if !sink.put(&desk.answer(&portion, &mut before)?)? {
                return Ok(());
            }
        }
    })
}

/// A model with all that a line needs.
struct Desk<'a> {
    asked: &'a Asked,
    translator: &'a Translator,
    search: Search,
    machine: Machine,
    paper: Paper,
    align: Align,
}

impl<'a> Desk<'a> {
    fn new(asked: &'a Asked, translator: &'a Translator) -> Self {
        let search = asked.searching.over(&translator.search, asked.n_best);
        // Whoever types a sentence at a terminal sees where the model looked.
        let otherwise =
            asked.texts.is_empty() || asked.json || asked.scores || asked.n_best > 1 || asked.output.is_some();
        let align = asked.align.unwrap_or(match !otherwise && io::stdout().is_terminal() {
            true => Align::Draw,
            false => Align::None,
        });
        let machine = Machine::new(rayon::current_num_threads());
        Desk { asked, translator, search, machine, paper: Paper::of_stdout(), align }
    }

    /// What is told of some lines; `before` counts those that were translated.
    fn answer(&self, lines: &[Line], before: &mut usize) -> Result<String, Failure> {
        let most = self.translator.model.max_len().saturating_sub(1);
        let texts: Vec<&str> = lines.iter().map(|line| line.text.trim()).collect();
        let sources: Vec<Vec<u32>> = texts.iter().map(|text| self.translator.tokenizer.encode(text)).collect();
        if let Some(at) = sources.iter().position(|source| source.len() > most) {
            let count = sources[at].len();
            return Err(Failure::new(format!(
                "{} has {count} tokens, the model takes at most {most}",
                lines[at].place()
            ))
            .hint("split it into sentences"));
        }
        let mut search = self.search.clone();
        if let Some(sample) = &mut search.sample {
            sample.before = *before;
        }
        *before += sources.iter().filter(|source| !source.is_empty()).count();
        let found = self.translator.translate_tokens(&sources, &search, &self.machine)?;
        let mut told = String::new();
        for ((line, source), found) in lines.iter().zip(&sources).zip(&found) {
            let answer = Answer::new(self.translator, line, source, found, self.align, &self.machine)?;
            told += &if self.asked.json { answer.json(self.asked.n_best) } else { answer.text(self.asked, self.paper) };
        }
        Ok(told)
    }
}

/// Translates each line when it is entered.
fn prompt(asked: &Asked, translator: &Translator, say: Say<'_>) -> Result<(), Failure> {
    let desk = Desk::new(asked, translator);
    let mut lines = Lines::stdin();
    let mut sink = Sink::new(asked.output.as_deref(), None, say)?;
    let _ = writeln!(io::stderr(), "A line is translated when it is entered; Ctrl-D ends. `--align` draws alignments.");
    let mut before = 0;
    loop {
        let _ = write!(io::stderr(), "> ");
        let _ = io::stderr().flush();
        let portion = lines.next(1)?;
        if portion.is_empty() {
            let _ = writeln!(io::stderr());
            return sink.done();
        }
        match desk.answer(&portion, &mut before) {
            Ok(told) if sink.put(&told)? => {}
            Ok(_) => return Ok(()),
            // One line that is too long does not end the conversation.
            Err(failure) => drop(write!(io::stderr(), "{failure}")),
        }
    }
}
