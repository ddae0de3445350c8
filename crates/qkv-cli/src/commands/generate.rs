//! The command `qkv generate`: a model goes on with a text, or answers in a conversation, and is heard as it speaks.
//!
//! | module | owns |
//! | --- | --- |
//! | `asked` | the choices of the command, and what was chosen |

mod asked;

pub(crate) use asked::{Asked, CHOICES, after_help};

use crate::failure::Failure;
use crate::say::Say;
use crate::threads;
use crate::translate::Lines;
use qkv_models::chat::Message;
use qkv_models::files::tensors::{NamedTensor, Storage, write};
use qkv_models::{Finish, Generated, Generation, Generator};
use qkv_nn::Machine;
use serde_json::json;
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;

/// The longest prompt: more is no prompt, and would be held in memory whole.
const LONGEST: u64 = 1 << 24;

/// Generates what was asked.
pub(crate) fn generate(asked: &Asked, say: Say<'_>) -> Result<(), Failure> {
    threads::on(asked.threads, || {
        let generator = opened(&asked.model)?;
        let how = asked.over(&generator.generation);
        let machine = Machine::new(rayon::current_num_threads());
        let mut desk = Desk { asked, generator: &generator, how, machine, say };
        if asked.chat {
            return desk.talk();
        }
        let prompt = match (&asked.text, &asked.input) {
            (Some(text), _) => text.clone(),
            (None, Some(path)) => {
                let file = std::fs::File::open(path).map_err(|e| qkv_models::Error::file("open", path, e))?;
                whole(Box::new(file), &path.display().to_string())?
            }
            // Whoever types nothing wants to see something: a new line is where texts begin.
            (None, None) if io::stdin().is_terminal() => "\n".to_owned(),
            (None, None) => whole(Box::new(io::stdin()), "stdin")?,
        };
        let tokens = generator.tokenizer.encode_text(&prompt);
        if let Some(path) = &asked.scores {
            return desk.scores(&tokens, path);
        }
        if asked.echo && !asked.json && !(desk.say)(&prompt)? {
            return Ok(());
        }
        desk.answer(&prompt, &tokens).map(drop)
    })
}

/// A model that continues text.
fn opened(path: &Path) -> Result<Generator, Failure> {
    if !path.exists() {
        return Err(Failure::new(format!("`{}` is not there", path.display())).hint(
            "a model is a folder with `config.json`, `tokenizer.json` and `model.safetensors`, or a `.gguf` file",
        ));
    }
    Ok(Generator::open(path)?)
}

/// All of a text, the end of its last line aside.
fn whole(from: Box<dyn Read>, name: &str) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let wrong = |what: String| Failure::new(format!("`{name}`: {what}"));
    from.take(LONGEST + 1).read_to_end(&mut bytes).map_err(|e| wrong(format!("cannot be read: {e}")))?;
    if bytes.len() as u64 > LONGEST {
        return Err(wrong(format!("it is longer than {LONGEST} bytes")));
    }
    let text = String::from_utf8(bytes).map_err(|_| wrong("it is not UTF-8".into()))?;
    Ok(text.strip_suffix('\n').map(|text| text.strip_suffix('\r').unwrap_or(text)).unwrap_or(&text).to_owned())
}

/// A model with all that a prompt needs.
struct Desk<'a, 's> {
    asked: &'a Asked,
    generator: &'a Generator,
    how: Generation,
    machine: Machine,
    say: Say<'s>,
}

impl Desk<'_, '_> {
    /// Goes on with a prompt; what was said, and whether anyone listens still.
    fn answer(&mut self, prompt: &str, tokens: &[u32]) -> Result<(String, bool), Failure> {
        let (mut failure, say, json) = (None, &mut *self.say, self.asked.json);
        let mut told = |piece: &str| {
            json || say(piece).unwrap_or_else(|error| {
                failure = Some(error);
                false
            })
        };
        let found = self.generator.generate(tokens, &self.how, &self.machine, &mut told)?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        // What comes next draws other numbers.
        if let Some(sample) = &mut self.how.sample {
            sample.before += 1;
        }
        let listens = found.finish != Finish::Cancelled;
        let listens = match json {
            true => (self.say)(&object(prompt, &found))?,
            false if listens && !found.text.ends_with('\n') => (self.say)("\n")?,
            false => listens,
        };
        if !self.asked.quiet && !json {
            let _ = writeln!(io::stderr(), "{}", told_speed(&found));
        }
        Ok((found.text, listens))
    }

    /// A conversation: the text that was given, or each line as it is entered.
    fn talk(&mut self) -> Result<(), Failure> {
        let mut messages: Vec<Message> = Vec::new();
        messages.extend(self.asked.system.as_ref().map(|text| Message::new("system", text.as_str())));
        let terminal = io::stdin().is_terminal() && self.asked.text.is_none() && self.asked.input.is_none();
        let mut lines = match (&self.asked.text, &self.asked.input) {
            (Some(text), _) => Lines::given(std::slice::from_ref(text)),
            (None, Some(path)) => Lines::open(path)?,
            (None, None) => Lines::stdin(),
        };
        // A model without a template is refused before anyone has typed.
        self.generator.conversation(&[Message::new("user", "")])?;
        loop {
            if terminal {
                let _ = write!(io::stderr(), "> ").and_then(|()| io::stderr().flush());
            }
            let Some(line) = lines.next(1)?.into_iter().next() else { return Ok(()) };
            if line.text.trim().is_empty() {
                continue;
            }
            messages.push(Message::new("user", line.text.as_str()));
            let tokens = self.generator.conversation(&messages)?;
            let (text, listens) = self.answer(&line.text, &tokens)?;
            if !listens {
                return Ok(());
            }
            messages.push(Message::new("assistant", text));
        }
    }

    /// Scores after every token of the prompt, into a file.
    fn scores(&mut self, tokens: &[u32], path: &Path) -> Result<(), Failure> {
        if tokens.is_empty() {
            return Err(Failure::new("an empty prompt has no scores"));
        }
        let scores = match self.asked.one_by_one {
            true => self.generator.scores_one_by_one(tokens, &self.machine)?,
            false => self.generator.scores(tokens, &self.machine)?,
        };
        let ids: Vec<f32> = tokens.iter().map(|&id| id as f32).collect();
        let shape = [tokens.len(), scores.len() / tokens.len()];
        let named = [
            NamedTensor { name: "ids", shape: &shape[..1], values: &ids },
            NamedTensor { name: "scores", shape: &shape, values: &scores },
        ];
        write(path, &named, Storage::F32)?;
        (self.say)(&format!("written  {}, scores {shape:?}\n", path.display())).map(drop)
    }
}

/// Tokens a second, for a person.
fn told_speed(found: &Generated) -> String {
    let Generated { prompt, prompt_seconds, seconds, tokens, .. } = found;
    let after = tokens.len().saturating_sub(1);
    format!(
        "[{prompt} tokens read and the first said in {prompt_seconds:.2} s, {after} more in {seconds:.2} s: {:.1} tokens/s]",
        after as f64 / seconds.max(1e-9)
    )
}

fn object(prompt: &str, found: &Generated) -> String {
    let ended = match found.finish {
        Finish::Eos => "end",
        Finish::Stop => "stop",
        Finish::Length => "most",
        Finish::Cancelled => "unheard",
    };
    let after = found.tokens.len().saturating_sub(1);
    let told = json!({
        "prompt": prompt, "text": found.text, "tokens": found.tokens, "prompt_tokens": found.prompt, "ended": ended,
        "prompt_seconds": found.prompt_seconds, "seconds": found.seconds,
        "tokens_per_second": after as f64 / found.seconds.max(1e-9),
    });
    format!("{told}\n")
}
