//! `qkv generate`: a model continues a prompt, or chats, streaming tokens as they come.

mod args;

use crate::atomic_file::OutputPath;
use crate::command::{Command, Run, Status};
use crate::embedded::MODEL_FOLDER;
use crate::failure::Failure;
use crate::lines::{Lines, report};
use crate::output::{Print, note};
use crate::{input, threads};
use args::{ARGUMENTS, EXAMPLES, GenerateArgs};
use qkv_models::chat::Message;
use qkv_models::files::tensors::{NamedTensor, Storage, to_bytes};
use qkv_models::{Finish, Generated, Generation, Generator};
use qkv_nn::{Machine, Usage};
use qkv_simd::{Isa, peak};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Instant;

/// The longest prompt in bytes; it is held in memory as a whole.
const LONGEST: u64 = 1 << 24;

pub(super) const COMMAND: Command =
    Command::new("generate", "Generate text or chat, streaming tokens as they come", ARGUMENTS, |matches| {
        Ok(Box::new(GenerateArgs::parse(matches)))
    })
    .examples(EXAMPLES);

impl Run for GenerateArgs {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        threads::on(self.threads, || {
            let output = self.scores.as_deref().map(|path| OutputPath::new(path, self.input.as_deref())).transpose()?;
            let generator = open(&self.model, self.adapter.as_deref())?;
            let settings = self.apply_to(&generator.generation);
            let machine = self.device.machine()?;
            let mut session = GenerateSession { args: self, generator: &generator, settings, machine, print };
            if self.chat {
                return session.chat().map(|()| Status::Done);
            }
            if self.each_line {
                return session.each_line();
            }
            let prompt = match (&self.text, &self.input) {
                (Some(text), _) => text.clone(),
                (None, Some(path)) => without_line_end(input::read_text(path, LONGEST)?),
                // At a terminal without a prompt, a newline starts the text.
                (None, None) if io::stdin().is_terminal() => "\n".to_owned(),
                (None, None) => without_line_end(input::text_of(io::stdin(), "stdin", LONGEST)?),
            };
            let tokens = generator.tokenizer.encode_prompt(&prompt);
            if let Some(output) = output {
                return session.write_scores(&tokens, &output).map(|()| Status::Done);
            }
            if self.echo && !self.json && !(session.print)(&prompt)? {
                return Ok(Status::Done);
            }
            session.answer(&prompt, &tokens).map(|_| Status::Done)
        })
    }
}

fn open(path: &Path, adapter: Option<&Path>) -> Result<Generator, Failure> {
    if !path.exists() {
        return Err(Failure::new(format!("`{}` does not exist", path.display())).hint(MODEL_FOLDER));
    }
    input::check(path)?;
    Ok(Generator::open_with(path, adapter)?)
}

fn without_line_end(text: String) -> String {
    text.strip_suffix('\n').map(|text| text.strip_suffix('\r').unwrap_or(text)).unwrap_or(&text).to_owned()
}

/// A model, and everything else it takes to answer prompts.
struct GenerateSession<'a, 'p> {
    args: &'a GenerateArgs,
    generator: &'a Generator,
    settings: Generation,
    machine: Machine,
    print: Print<'p>,
}

impl GenerateSession<'_, '_> {
    /// Continues a prompt. Returns the generated text, and whether the reader is still there.
    fn answer(&mut self, prompt: &str, tokens: &[u32]) -> Result<(String, bool), Failure> {
        let longest = self.generator.model.max_len();
        if tokens.len() > longest {
            let (count, read) = (tokens.len(), tokens_read(tokens.len(), longest));
            note(format!(
                "warning: the prompt has {count} tokens, the model takes {longest}: the last {read} are read"
            ));
        }
        let (mut failure, print, json) = (None, &mut *self.print, self.args.json);
        let mut stream = |piece: &str| {
            json || print(piece).unwrap_or_else(|error| {
                failure = Some(error);
                false
            })
        };
        let generated = self.generator.generate(tokens, &self.settings, &self.machine, &mut stream)?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        // The next answer draws different random numbers.
        if let Some(sample) = &mut self.settings.sample {
            sample.before += 1;
        }
        let listens = generated.finish != Finish::Cancelled;
        let listens = match json {
            true => (self.print)(&to_json(prompt, &generated, longest))?,
            false if listens && !generated.text.ends_with('\n') => (self.print)("\n")?,
            false => listens,
        };
        if !self.args.quiet && !json {
            note(speed(&generated, longest));
        }
        if self.args.stats {
            note(stats(&generated, self.machine.threads()));
        }
        Ok((generated.text, listens))
    }

    /// Continues each line, several at a time, and prints one object per line, in order. A bad line is reported and
    /// skipped.
    fn each_line(&mut self) -> Result<Status, Failure> {
        let mut lines = Lines::new(&[], self.args.input.as_deref())?;
        let (mut prompts, mut failed) = (Vec::new(), 0);
        while let Some(line) = lines.next(1)?.into_iter().next() {
            match line {
                Ok(line) => prompts.push(line.text),
                Err(failure) => {
                    failed += 1;
                    report(&failure);
                }
            }
        }
        let tokens: Vec<Vec<u32>> = prompts.iter().map(|text| self.generator.tokenizer.encode_prompt(text)).collect();
        let (longest, start) = (self.generator.model.max_len(), Instant::now());
        let (mut waiting, mut printed, mut count) = (BTreeMap::new(), 0, 0);
        let (mut failure, print) = (None, &mut *self.print);
        let mut receive = |number: usize, generated: Generated| {
            count += generated.tokens.len();
            waiting.insert(number, to_json(&prompts[number], &generated, longest));
            while let Some(object) = waiting.remove(&printed) {
                printed += 1;
                match print(&object) {
                    Ok(true) => {}
                    Ok(false) => return false,
                    Err(error) => {
                        failure = Some(error);
                        return false;
                    }
                }
            }
            true
        };
        let together = self.args.together;
        self.generator.generate_all(&tokens, &self.settings, together, &self.machine, &mut receive)?;
        if let Some(failure) = failure {
            return Err(failure);
        }
        if !self.args.quiet {
            let seconds = start.elapsed().as_secs_f64();
            note(format!("[{count} tokens in {seconds:.2} s: {:.1} tokens/s]", count as f64 / seconds.max(1e-9)));
        }
        if failed == 0 { Ok(Status::Done) } else { Err(Failure::new(format!("{failed} lines could not be read"))) }
    }

    /// Chats: one message from the command line, or each line as it is entered. A bad line is reported and skipped.
    fn chat(&mut self) -> Result<(), Failure> {
        let mut messages: Vec<Message> = Vec::new();
        messages.extend(self.args.system.as_ref().map(|text| Message::new("system", text.as_str())));
        let terminal = io::stdin().is_terminal() && self.args.text.is_none() && self.args.input.is_none();
        let mut lines = Lines::new(self.args.text.as_slice(), self.args.input.as_deref())?;
        // A model without a template is refused before anyone types.
        self.generator.conversation(&[Message::new("user", "")])?;
        let mut failed = 0;
        loop {
            if terminal {
                let _ = write!(io::stderr(), "> ").and_then(|()| io::stderr().flush());
            }
            let line = match lines.next(1)?.into_iter().next() {
                None => break,
                Some(Ok(line)) if line.text.trim().is_empty() => continue,
                Some(Ok(line)) => line,
                Some(Err(failure)) => {
                    failed += 1;
                    report(&failure);
                    continue;
                }
            };
            messages.push(Message::new("user", line.text.as_str()));
            let tokens = self.generator.conversation(&messages)?;
            let (text, listens) = self.answer(&line.text, &tokens)?;
            if !listens {
                return Ok(());
            }
            messages.push(Message::new("assistant", text));
        }
        if failed == 0 { Ok(()) } else { Err(Failure::new(format!("{failed} lines could not be read"))) }
    }

    /// Writes the logits after every token of the prompt.
    fn write_scores(&mut self, tokens: &[u32], output: &OutputPath) -> Result<(), Failure> {
        if tokens.is_empty() {
            return Err(Failure::new("an empty prompt has no scores"));
        }
        let scores = match self.args.one_by_one {
            true => self.generator.scores_one_by_one(tokens, &self.machine)?,
            false => self.generator.scores(tokens, &self.machine)?,
        };
        let ids: Vec<f32> = tokens.iter().map(|&id| id as f32).collect();
        let shape = [tokens.len(), scores.len() / tokens.len()]; // [N, V]
        let named = [
            NamedTensor { name: "ids", shape: &shape[..1], values: &ids },
            NamedTensor { name: "scores", shape: &shape, values: &scores },
        ];
        output.write(&to_bytes(&named, Storage::F32)?)?;
        (self.print)(&format!("written  {}, scores {shape:?}\n", output.path().display())).map(drop)
    }
}

/// How many of `prompt` tokens a model with a context of `longest` reads: if they do not fit, as many as leave half of
/// the context for the answer.
fn tokens_read(prompt: usize, longest: usize) -> usize {
    if prompt > longest { longest.div_ceil(2) } else { prompt }
}

/// The speed of an answer, in one line.
fn speed(generated: &Generated, longest: usize) -> String {
    let Generated { prompt, prompt_seconds, seconds, tokens, .. } = generated;
    let more = tokens.len().saturating_sub(1);
    let rate = more as f64 / seconds.max(1e-9);
    let prompt = match *prompt > longest {
        true => format!("the last {} of {prompt} prompt tokens", tokens_read(*prompt, longest)),
        false => format!("{prompt} prompt tokens"),
    };
    format!("[{prompt}, first token after {prompt_seconds:.2} s, then {more} in {seconds:.2} s: {rate:.1} tokens/s]")
}

/// Floats read to measure the memory bandwidth: more than the caches hold.
const BANDWIDTH_FLOATS: usize = 1 << 26;

/// Where the time per token went, and the share of the memory bandwidth that was used.
fn stats(generated: &Generated, threads: usize) -> String {
    let more = generated.tokens.len().saturating_sub(1);
    if more == 0 {
        return "[no token after the first: nothing to measure]".into();
    }
    let Usage { products, product_bytes, attention, attention_bytes } = generated.usage;
    let [total, products, attention] = [generated.seconds, products, attention].map(|s| 1e3 * s / more as f64);
    let [weights, cache] = [product_bytes, attention_bytes].map(|bytes| bytes as f64 / 1e6 / more as f64);
    let peak = peak::read(Isa::best(), &vec![1.0; BANDWIDTH_FLOATS], threads);
    let rate = weights / products.max(1e-9);
    format!(
        "[a token: {total:.2} ms = products {products:.2} + attention {attention:.2} + rest {:.2}; {weights:.1} MB of \
         weights at {rate:.1} GB/s, {:.0} % of the {peak:.1} GB/s that {} read from memory; {cache:.2} MB of keys and \
         values]",
        total - products - attention,
        100.0 * rate / peak,
        threads::count(threads),
    )
}

fn to_json(prompt: &str, generated: &Generated, longest: usize) -> String {
    let ended = match generated.finish {
        Finish::Eos => "end",
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Cancelled => "cancelled",
    };
    let more = generated.tokens.len().saturating_sub(1);
    let object = json!({
        "prompt": prompt, "text": generated.text, "tokens": generated.tokens, "prompt_tokens": generated.prompt,
        "prompt_tokens_read": tokens_read(generated.prompt, longest), "ended": ended,
        "prompt_seconds": generated.prompt_seconds, "seconds": generated.seconds,
        "tokens_per_second": more as f64 / generated.seconds.max(1e-9),
    });
    format!("{object}\n")
}
