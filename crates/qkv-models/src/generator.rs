//! Going on with a text: one token after the other, told as they come. How a token is chosen is in [`search`](crate::search)'s
//! scores; how tokens become text that can be told, in `voice`.

mod voice;

use crate::batch::Rows;
use crate::chat::{Message, Template};
use crate::checkpoint::{Checkpoint, GENERATION, write_tokenizer};
use crate::files::atomic;
use crate::files::tensors::Storage;
use crate::files::weights::SINGLE;
use crate::gpt::GptState;
use crate::layout::{Dialect, Layout};
use crate::search::{Sampling, best, draw, forbid_repeats, penalise};
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Model, Result};
use qkv_nn::{Activation, Machine, Parameters, Pool, Tape, Tensor};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;
use voice::Voice;

/// A model that goes on with text.
#[derive(Debug)]
pub struct Generator {
    /// The model.
    pub model: Model,
    /// Its numbers.
    pub parameters: Parameters<f32>,
    /// How text is cut.
    pub tokenizer: Tokenizer,
    /// How conversations are written down, where it was taught to hold them.
    pub template: Option<Template>,
    /// How tokens are chosen, unless asked otherwise.
    pub generation: Generation,
    /// Tokens that end an answer.
    ends: Vec<u32>,
}

/// How tokens are chosen, and when it is enough.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// How they are drawn; `None` takes the likeliest.
    pub sample: Option<Sampling>,
    /// Tokens that were said, or asked, have their score divided (or, below 0, multiplied) by this.
    pub repetition_penalty: f64,
    /// No sequence of so many tokens is said twice; 0 allows any.
    pub no_repeat: usize,
    /// The text ends before the first of these.
    pub stop: Vec<String>,
    /// The most tokens.
    pub most: usize,
    /// Whether keys and values are kept from step to step: without, every step computes everything again.
    pub cache: bool,
}

impl Default for Generation {
    fn default() -> Self {
        let sample = Sampling { temperature: 0.8, top_p: 0.95, ..Sampling::default() };
        Generation {
            sample: Some(sample),
            repetition_penalty: 1.0,
            no_repeat: 0,
            stop: Vec::new(),
            most: 256,
            cache: true,
        }
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The model said so.
    End,
    /// A text that stops it came.
    Stop,
    /// There were as many tokens as were asked for.
    Most,
    /// Whoever listens has gone.
    Unheard,
}

/// What was said.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The text, without the prompt and without what stopped it.
    pub text: String,
    /// Its tokens, an end included.
    pub tokens: Vec<u32>,
    /// How many tokens the prompt had.
    pub prompt: usize,
    /// Seconds until the first token.
    pub prompt_seconds: f64,
    /// Seconds for those after it.
    pub seconds: f64,
    /// Why it ended.
    pub ended: Ended,
}

impl Generator {
    /// From a folder in the Hugging Face layout, or a GGUF file.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_at(path.as_ref())
    }

    /// `open` for the one type of path: compiled here, once, and not again by every caller.
    fn open_at(path: &Path) -> Result<Self> {
        let Checkpoint { model, parameters, tokenizer, template, generation } = Checkpoint::open(path)?;
        if model.gpt().is_none() {
            let what = format!("`{}` holds a {}, which translates", path.display(), model.config().architecture.name());
            return Err(Error::invalid(what).with_hint("`qkv translate --model` uses it"));
        }
        let mut ends = vec![model.config().eos_token_id];
        let mut settings = Generation::default();
        if let Some(json) = &generation {
            settings.read(json, &path.join(GENERATION))?;
            let listed = json.get("eos_token_id").map(|ids| ids.as_array().cloned().unwrap_or(vec![ids.clone()]));
            ends.extend(listed.into_iter().flatten().filter_map(|id| u32::try_from(id.as_u64()?).ok()));
        }
        Ok(Generator { model, parameters, tokenizer, template, generation: settings, ends })
    }

    /// A conversation as tokens, up to where the model speaks next.
    ///
    /// # Errors
    /// Where it has no template, or the template refuses.
    pub fn conversation(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let config = self.model.config();
        match &self.template {
            Some(template) => template.encode(messages, &self.tokenizer, config.bos_token_id, config.eos_token_id),
            None => Err(Error::invalid("the model has no chat template")
                .with_hint("leave out `--chat`: it goes on with a text")),
        }
    }

    /// Goes on with a prompt. Each piece of text is told as soon as no later one can change it; who answers `false` has heard
    /// enough. What goes beyond the longest sequence of the model pushes the older half of it out.
    ///
    /// # Errors
    /// Where a setting makes no sense.
    pub fn generate(
        &self,
        prompt: &[u32],
        how: &Generation,
        machine: &Machine,
        told: &mut (dyn FnMut(&str) -> bool + Send),
    ) -> Result<Generated> {
        how.check()?;
        // Inside the pool: a step hands out work dozens of times, and from outside each would wait for a thread to wake.
        rayon::scope(|_| self.go_on(prompt, how, machine, told))
    }

    fn go_on(
        &self,
        prompt: &[u32],
        how: &Generation,
        machine: &Machine,
        told: &mut (dyn FnMut(&str) -> bool + Send),
    ) -> Result<Generated> {
        let start = Instant::now();
        let pool = Pool::new();
        let mut all = if prompt.is_empty() { vec![self.model.config().bos_token_id] } else { prompt.to_vec() };
        let before = all.len();
        let mut context = Context { from: 0, state: None };
        let mut voice = Voice::new(&self.tokenizer, &how.stop);
        let (mut first, mut ended) = (None, Ended::Most);
        while all.len() - before < how.most {
            let mut scores = context.scores(self, &all, how.cache, machine, &pool)?;
            penalise(&mut scores, &all, how.repetition_penalty);
            forbid_repeats(&mut scores, &all[before..], how.no_repeat);
            let place = [how.sample.map_or(0, |sample| sample.before as u32), 0, (all.len() - before) as u32];
            let token = match &how.sample {
                Some(sample) => draw(&scores, sample, place),
                None => best(&scores, 1).first().map(|&(token, _)| token),
            };
            first.get_or_insert_with(|| start.elapsed().as_secs_f64());
            // Where no score is a number there is nothing to say.
            let Some(token) = token else { break };
            all.push(token);
            if self.ends.contains(&token) {
                ended = Ended::End;
                break;
            }
            let stopped = voice.hear(token);
            if !voice.tell(told) {
                ended = Ended::Unheard;
                break;
            }
            if stopped {
                ended = Ended::Stop;
                break;
            }
        }
        voice.finish(told);
        let prompt_seconds = first.unwrap_or(0.0);
        Ok(Generated {
            text: voice.text,
            tokens: all.split_off(before),
            prompt: before,
            prompt_seconds,
            seconds: start.elapsed().as_secs_f64() - prompt_seconds,
            ended,
        })
    }

    /// Scores for what comes after these tokens, `[N, V]` row by row: all of them at once, without a cache.
    ///
    /// # Errors
    /// Where there are more than the model takes.
    pub fn scores(&self, tokens: &[u32], machine: &Machine) -> Result<Vec<f32>> {
        if tokens.len() > self.model.most() {
            let what = format!("{} tokens are more than the {} that the model takes", tokens.len(), self.model.most());
            return Err(Error::invalid(what));
        }
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        let shown = Rows::new(&[tokens.to_vec()], self.model.config().pad_token_id);
        Ok(self.model.scores(&mut tape, &Rows::none(1), &shown)?.value().data().to_vec())
    }

    /// The same, token by token through the cache, as text is written.
    ///
    /// # Errors
    /// As [`scores`](Generator::scores).
    pub fn scores_one_by_one(&self, tokens: &[u32], machine: &Machine) -> Result<Vec<f32>> {
        let pool = Pool::new();
        let gpt = self.model.gpt().expect("checked when it was opened");
        let mut state = gpt.start(&mut Tape::inference(&self.parameters, &pool, machine), 1)?;
        let mut scores = Vec::new();
        for token in tokens {
            let mut tape = Tape::inference(&self.parameters, &pool, machine);
            let given = gpt.step(&mut tape, &[*token], 1, &mut state)?; // (1, 1, C)
            let given = tape.linear(&given, gpt.output(), None, Activation::None, 0.0); // (1, 1, V)
            scores.extend_from_slice(given.value().data());
        }
        Ok(scores)
    }

    /// Writes a folder in the Hugging Face layout that `transformers` reads, where it has a name for such a model.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        self.save_at(folder.as_ref(), storage)
    }

    /// `save` for the one type of path: compiled here, once, and not again by every caller.
    fn save_at(&self, folder: &Path, storage: Storage) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(|e| Error::file("write", folder, e))?;
        write_model(&self.model, &self.parameters, folder, storage)?;
        write_tokenizer(&self.tokenizer, self.template.as_ref(), folder)?;
        let config = self.model.config();
        let mut json = json!({ "bos_token_id": config.bos_token_id, "eos_token_id": self.ends });
        if let Some(Sampling { temperature, top_k, top_p, min_p, .. }) = self.generation.sample {
            let sampled = [("temperature", json!(temperature)), ("top_k", json!(top_k)), ("top_p", json!(top_p))];
            sampled.into_iter().for_each(|(name, value)| json[name] = value);
            json["do_sample"] = json!(true);
            json["min_p"] = json!(min_p);
        }
        let text = serde_json::to_string_pretty(&json).expect("plain values") + "\n";
        atomic::write(folder.join(GENERATION), text.as_bytes())
    }
}

/// Writes `config.json` and `model.safetensors`, in the words of others where they have some.
pub(crate) fn write_model(model: &Model, numbers: &Parameters<f32>, folder: &Path, storage: Storage) -> Result<()> {
    let dialect = Dialect::of(model.config());
    let layout = dialect.layout(model.config()).unwrap_or_else(|| Layout::own(numbers));
    atomic::write(folder.join(SINGLE), &layout.bytes(numbers, storage)?)?;
    let json = serde_json::to_string_pretty(&dialect.write(model.config())).expect("plain values") + "\n";
    atomic::write(folder.join(crate::checkpoint::CONFIG), json.as_bytes())
}

/// The part of the text that the model sees, and what it remembers of it.
struct Context {
    from: usize,
    state: Option<GptState<f32>>,
}

impl Context {
    /// Scores for the token after all of these.
    fn scores(
        &mut self,
        of: &Generator,
        all: &[u32],
        cache: bool,
        machine: &Machine,
        pool: &Pool<f32>,
    ) -> Result<Vec<f32>> {
        let gpt = of.model.gpt().expect("checked when it was opened");
        if all.len() - self.from > gpt.most() {
            // The older half goes: the rest is read again from its new place.
            *self = Context { from: all.len() - gpt.most().div_ceil(2), state: None };
        }
        let mut tape = Tape::inference(&of.parameters, pool, machine);
        if self.state.is_none() || !cache {
            self.state = Some(gpt.start(&mut tape, 1)?);
        }
        let state = self.state.as_mut().expect("just made");
        let new = &all[self.from + state.len()..];
        let given = gpt.step(&mut tape, new, new.len(), state)?; // (1, new, C)
        let width = given.value().width();
        let last = given.value().data()[(new.len() - 1) * width..].to_vec();
        let last = tape.constant(Tensor::new(last, &[1, 1, width]));
        Ok(tape.linear(&last, gpt.output(), None, Activation::None, 0.0).value().data().to_vec())
    }
}

impl Generation {
    /// Refuses numbers that make no sense.
    ///
    /// # Errors
    /// Names the number and what it may be.
    pub fn check(&self) -> Result<()> {
        let search = crate::Search {
            beam: 1,
            sample: self.sample,
            repetition_penalty: self.repetition_penalty,
            ..crate::Search::default()
        };
        search.check()
    }

    /// What a `generation_config.json` says.
    fn read(&mut self, json: &Value, path: &Path) -> Result<()> {
        let number = |name: &str| json.get(name).and_then(Value::as_f64);
        if json.get("do_sample").and_then(Value::as_bool) == Some(true) {
            let plain = Sampling::default();
            self.sample = Some(Sampling {
                temperature: number("temperature").unwrap_or(plain.temperature),
                top_k: number("top_k").map_or(plain.top_k, |k| k as usize),
                top_p: number("top_p").unwrap_or(plain.top_p),
                min_p: number("min_p").unwrap_or(plain.min_p),
                ..plain
            });
        }
        self.repetition_penalty = number("repetition_penalty").unwrap_or(self.repetition_penalty);
        self.check().map_err(|error| Error::format(path, "settings", error.to_string()))
    }
}
