//! Text generation with a decoder-only model: a prompt in, tokens out one at a time, streamed as text. Choosing a token
//! from logits is left to [`search`](crate::search), and turning tokens into text that can be printed at once to
//! `stream_decoder`.

mod graph_decoder;
mod side_by_side;
mod stream_decoder;

use crate::batch::Rows;
use crate::chat::{Message, Template};
use crate::checkpoint::{Checkpoint, write_model, write_tokenizer};
use crate::files::folder::{self, GENERATION_CONFIG};
use crate::files::tensors::Storage;
use crate::gpt::GptState;
use crate::search::{Sampling, draw, forbid_repeats, penalize};
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Model, Result, finite};
use graph_decoder::{GraphDecoder, Reads};
use qkv_nn::{Activation, Machine, Parameters, Pool, Tape, Tensor, Usage};
use qkv_simd::logits::top;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;
use stream_decoder::StreamDecoder;

/// A decoder-only model with its parameters and tokenizer.
#[derive(Debug)]
pub struct Generator {
    /// The model.
    pub model: Model,
    /// Its parameters.
    pub parameters: Parameters<f32>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, if the model was trained on conversations.
    pub template: Option<Template>,
    /// Default settings.
    pub generation: Generation,
    /// Tokens that end an answer.
    end_tokens: Vec<u32>,
}

/// Settings of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// How tokens are sampled; `None` takes the most probable one.
    pub sample: Option<Sampling>,
    /// Logits of tokens in the prompt or the text are divided by this if positive, multiplied by it if negative.
    pub repetition_penalty: f64,
    /// No n-gram of this many tokens is generated twice; 0 allows any.
    pub no_repeat: usize,
    /// The text ends before the first of these strings.
    pub stop: Vec<String>,
    /// The largest number of tokens to generate.
    pub max_tokens: usize,
    /// Whether keys and values are cached between steps; without a cache every step recomputes the whole sequence.
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
            max_tokens: 256,
            cache: true,
        }
    }
}

/// Why a generation finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model generated an end token.
    Eos,
    /// A stop string was generated.
    Stop,
    /// The largest number of tokens was reached.
    Length,
    /// The receiver of the text returned `false`.
    Cancelled,
}

/// A generated text.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The text, without the prompt and without the stop string.
    pub text: String,
    /// Its tokens, an end token included.
    pub tokens: Vec<u32>,
    /// Number of tokens in the prompt.
    pub prompt: usize,
    /// Tokens at the start of the prompt that the model did not read, because the prompt was longer than its context.
    pub prompt_dropped: usize,
    /// Seconds until the first token.
    pub prompt_seconds: f64,
    /// Seconds for the remaining tokens.
    pub seconds: f64,
    /// Where the time of the remaining tokens went.
    pub usage: Usage,
    /// Why it finished.
    pub finish: Finish,
}

impl Generator {
    /// Reads a folder in the Hugging Face layout, or a GGUF file.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, None)
    }

    /// The same with low-rank adapters in PEFT's format.
    ///
    /// # Errors
    /// As [`open`](Generator::open).
    pub fn open_with(path: impl AsRef<Path>, adapter: Option<&Path>) -> Result<Self> {
        let mut generator = Generator::of_checkpoint(Checkpoint::open(path.as_ref(), adapter)?, path.as_ref())?;
        generator.parameters.pack_for_inference();
        Ok(generator)
    }

    /// Merges the adapters into their matrices.
    pub fn merge(&mut self) {
        self.parameters.adapted().into_iter().for_each(|param| self.parameters.merge(param));
    }

    /// From a checkpoint that was read; `path` is for errors.
    pub(crate) fn of_checkpoint(read: Checkpoint, path: &Path) -> Result<Self> {
        let Checkpoint { model, parameters, tokenizer, template, generation } = read;
        if model.gpt().is_none() {
            let what = format!("`{}` holds a {}, which translates", path.display(), model.config().architecture.name());
            return Err(Error::invalid(what).with_hint("use it with `qkv translate --model`"));
        }
        let mut end_tokens = vec![model.config().eos_token_id];
        let mut settings = Generation::default();
        if let Some(json) = &generation {
            settings.read(json, &path.join(GENERATION_CONFIG))?;
            let listed = json.get("eos_token_id").map(|ids| ids.as_array().cloned().unwrap_or(vec![ids.clone()]));
            end_tokens.extend(listed.into_iter().flatten().filter_map(|id| u32::try_from(id.as_u64()?).ok()));
        }
        Ok(Generator { model, parameters, tokenizer, template, generation: settings, end_tokens })
    }

    /// Tokens of a conversation, up to the point where the model answers.
    ///
    /// # Errors
    /// If the model has no chat template, or the template refuses the messages.
    pub fn conversation(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let config = self.model.config();
        match &self.template {
            Some(template) => template.encode(messages, &self.tokenizer, config.bos_token_id, config.eos_token_id),
            None => Err(Error::invalid("the model has no chat template")
                .with_hint("leave out `--chat` to continue a text instead")),
        }
    }

    /// Generates text after a prompt. `receive` gets each piece of text as soon as no later token can change it, and
    /// returns `false` to cancel. When the sequence outgrows the model's context, its older half is dropped.
    ///
    /// # Errors
    /// If a setting is out of range, or the model computes NaN.
    pub fn generate(
        &self,
        prompt: &[u32],
        settings: &Generation,
        machine: &Machine,
        receive: &mut (dyn FnMut(&str) -> bool + Send),
    ) -> Result<Generated> {
        settings.check()?;
        // Runs inside the thread pool: a step spawns dozens of jobs, and from outside each of them would wake a thread.
        rayon::scope(|_| self.generate_in_pool(prompt, settings, machine, receive))
    }

    fn generate_in_pool(
        &self,
        prompt: &[u32],
        settings: &Generation,
        machine: &Machine,
        receive: &mut (dyn FnMut(&str) -> bool + Send),
    ) -> Result<Generated> {
        let start = Instant::now();
        let pool = Pool::new();
        let mut tokens = if prompt.is_empty() { vec![self.model.config().bos_token_id] } else { prompt.to_vec() };
        let prompt = tokens.len();
        let mut context = Context::new(self, settings.cache, machine, &pool);
        let mut decoder = StreamDecoder::new(&self.tokenizer, &settings.stop);
        let (mut first, mut prompt_dropped, mut finish) = (None, 0, Finish::Length);
        let mut usage = machine.usage();
        while tokens.len() - prompt < settings.max_tokens {
            let next = context.next(&tokens, prompt, settings)?;
            if first.is_none() {
                (first, prompt_dropped) = (Some(start.elapsed().as_secs_f64()), context.start);
                usage = machine.usage();
            }
            // Every token would repeat an n-gram.
            let Some(token) = next else { break };
            tokens.push(token);
            if self.end_tokens.contains(&token) {
                finish = Finish::Eos;
                break;
            }
            let stopped = decoder.push(token);
            if !decoder.flush(receive) {
                finish = Finish::Cancelled;
                break;
            }
            if stopped {
                finish = Finish::Stop;
                break;
            }
        }
        decoder.finish(receive);
        let prompt_seconds = first.unwrap_or(0.0);
        Ok(Generated {
            text: decoder.text,
            tokens: tokens.split_off(prompt),
            prompt,
            prompt_dropped,
            prompt_seconds,
            seconds: start.elapsed().as_secs_f64() - prompt_seconds,
            usage: machine.usage() - usage,
            finish,
        })
    }

    /// Chooses the token after `tokens`, the first `prompt` of which are the prompt, from its logits; `None` if every
    /// token would repeat an n-gram.
    fn choose(
        &self,
        scores: &mut [f32],
        tokens: &[u32],
        prompt: usize,
        settings: &Generation,
        machine: &Machine,
    ) -> Option<u32> {
        penalize(scores, tokens, settings.repetition_penalty);
        forbid_repeats(scores, &tokens[prompt..], settings.no_repeat);
        match &settings.sample {
            Some(sample) => draw(scores, sample, [sample.before as u32, 0, (tokens.len() - prompt) as u32]),
            None => top(machine.isa(), scores, 1).first().map(|&(token, _)| token),
        }
    }

    /// Logits after each of these tokens, `[N, V]`, in one pass without a cache.
    ///
    /// # Errors
    /// If there are more tokens than the model accepts.
    pub fn scores(&self, tokens: &[u32], machine: &Machine) -> Result<Vec<f32>> {
        let max_len = self.model.max_len();
        if tokens.len() > max_len {
            return Err(Error::invalid(format!("{} tokens are more than the model's {max_len}", tokens.len())));
        }
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        let input = Rows::new(&[tokens.to_vec()], self.model.config().pad_token_id);
        Ok(self.model.scores(&mut tape, &Rows::none(1), &input)?.value().data().to_vec())
    }

    /// The same logits, computed one token at a time through the cache, as in generation.
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
            let hidden = gpt.step(&mut tape, &[*token], 1, &mut state)?; // [1, 1, C]
            let logits = tape.linear(&hidden, gpt.output(), None, Activation::None, 0.0); // [1, 1, V]
            scores.extend_from_slice(logits.value().data());
        }
        Ok(scores)
    }

    /// Writes a folder in the Hugging Face layout, which `transformers` reads if it knows the architecture.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        self.save_at(folder.as_ref(), storage)
    }

    fn save_at(&self, to: &Path, storage: Storage) -> Result<()> {
        std::fs::create_dir_all(to).map_err(|e| Error::file("write", to, e))?;
        write_model(&self.model, &self.parameters, to, storage)?;
        write_tokenizer(&self.tokenizer, self.template.as_ref(), to)?;
        let config = self.model.config();
        let mut json = json!({ "bos_token_id": config.bos_token_id, "eos_token_id": self.end_tokens });
        if let Some(Sampling { temperature, top_k, top_p, min_p, .. }) = self.generation.sample {
            let sampled = [("temperature", json!(temperature)), ("top_k", json!(top_k)), ("top_p", json!(top_p))];
            sampled.into_iter().for_each(|(name, value)| json[name] = value);
            json["do_sample"] = json!(true);
            json["min_p"] = json!(min_p);
        }
        Ok(folder::write_json(&to.join(GENERATION_CONFIG), &json)?)
    }
}

/// The part of the sequence that the model attends to, and its cache.
struct Context<'g> {
    generator: &'g Generator,
    machine: &'g Machine,
    pool: &'g Pool<f32>,
    /// Whether keys and values are kept between steps.
    cache: bool,
    /// The first token in the context.
    start: usize,
    state: Option<GptState<f32>>,
    /// Set while a device decodes, which then holds the cache.
    graph: Option<GraphDecoder<'g>>,
}

impl<'g> Context<'g> {
    fn new(generator: &'g Generator, cache: bool, machine: &'g Machine, pool: &'g Pool<f32>) -> Self {
        Context { generator, machine, pool, cache, start: 0, state: None, graph: None }
    }

    /// The token after `tokens`, the first `prompt` of which are the prompt; `None` if every token would repeat an
    /// n-gram.
    fn next(&mut self, tokens: &[u32], prompt: usize, settings: &Generation) -> Result<Option<u32>> {
        let (generator, machine) = (self.generator, self.machine);
        let mut scores = match self.graph(tokens, prompt, settings) {
            Some(graph) if settings.is_by_logits_alone() => return Ok(graph.step()?.first().copied()),
            Some(graph) => {
                graph.set_ids(&tokens[tokens.len() - 1..]);
                graph.step()?;
                graph.logits(0)
            }
            None => self.scores(tokens)?,
        };
        Ok(generator.choose(&mut scores, tokens, prompt, settings, machine))
    }

    /// The graph that decodes the next token: created once the prompt has been read, and dropped when the context is
    /// full, so that the remaining text is read again.
    fn graph(&mut self, tokens: &[u32], prompt: usize, settings: &Generation) -> Option<&mut GraphDecoder<'g>> {
        let (position, most) = (tokens.len() - self.start, prompt.saturating_add(settings.max_tokens));
        self.graph.take_if(|graph| position > graph.room());
        if let Some(state) = self.state.take_if(|state| self.cache && state.len() + 1 == position) {
            let made = GraphDecoder::new(self.generator, settings, self.machine, self.pool, 1, most - self.start);
            match made.filter(|graph| position <= graph.room()) {
                Some(mut graph) => {
                    graph.state.put(0, &state, 0, state.len());
                    graph.set(&[Reads {
                        token: tokens[tokens.len() - 1],
                        position: position as u32 - 1,
                        text: settings.first_draw(),
                        drawn: (tokens.len() - prompt) as u32,
                    }]);
                    self.graph = Some(graph);
                }
                None => self.state = Some(state),
            }
        }
        self.graph.as_mut()
    }

    /// Logits of the token after `tokens`, `[V]`.
    ///
    /// # Errors
    /// If the model computes NaN.
    fn scores(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let Generator { model, parameters, .. } = self.generator;
        let gpt = model.gpt().expect("checked when it was opened");
        if tokens.len() - self.start > gpt.max_len() {
            // Half of the context is dropped at a time: the rest is read again at its new positions.
            (self.start, self.state) = (tokens.len() - gpt.max_len().div_ceil(2), None);
        }
        let mut tape = Tape::inference(parameters, self.pool, self.machine);
        if self.state.is_none() || !self.cache {
            self.state = Some(gpt.start(&mut tape, 1)?);
        }
        let state = self.state.as_mut().expect("just set");
        let new = &tokens[self.start + state.len()..];
        let hidden = gpt.step(&mut tape, new, new.len(), state)?; // [1, new, C]
        let width = hidden.value().width();
        let last = hidden.value().data()[(new.len() - 1) * width..].to_vec();
        let last = tape.constant(Tensor::new(last, &[1, 1, width]));
        let scores = tape.linear(&last, gpt.output(), None, Activation::None, 0.0).value().data().to_vec();
        self.machine.failed()?;
        finite::check(&scores, parameters)?;
        Ok(scores)
    }
}

impl Generation {
    /// Whether the most probable token is always chosen, whatever the text so far.
    fn is_greedy(&self) -> bool {
        self.sample.is_none() && self.is_by_logits_alone()
    }

    /// Whether tokens are chosen by their logits alone, whatever the text so far.
    fn is_by_logits_alone(&self) -> bool {
        self.repetition_penalty == 1.0 && self.no_repeat == 0
    }

    /// The number of the first text, which selects the random numbers that are drawn.
    fn first_draw(&self) -> u32 {
        self.sample.map_or(0, |sample| sample.before as u32)
    }

    /// The settings for one of several texts, which draws other random numbers than those before it.
    fn of_text(&self, number: usize) -> Generation {
        let sample = self.sample.map(|sample| Sampling { before: sample.before + number, ..sample });
        Generation { sample, ..self.clone() }
    }

    /// Checks that every setting is in its range.
    ///
    /// # Errors
    /// Names the setting and its range.
    pub fn check(&self) -> Result<()> {
        let search = crate::Search {
            beam: 1,
            sample: self.sample,
            repetition_penalty: self.repetition_penalty,
            ..crate::Search::default()
        };
        search.check()
    }

    /// Adopts the settings of a `generation_config.json`.
    fn read(&mut self, json: &Value, path: &Path) -> Result<()> {
        let number = |name: &str| json.get(name).and_then(Value::as_f64);
        if json.get("do_sample").and_then(Value::as_bool) == Some(true) {
            let defaults = Sampling::default();
            self.sample = Some(Sampling {
                temperature: number("temperature").unwrap_or(defaults.temperature),
                top_k: number("top_k").map_or(defaults.top_k, |k| k as usize),
                top_p: number("top_p").unwrap_or(defaults.top_p),
                min_p: number("min_p").unwrap_or(defaults.min_p),
                ..defaults
            });
        }
        self.repetition_penalty = number("repetition_penalty").unwrap_or(self.repetition_penalty);
        self.check().map_err(|error| Error::format(path, "settings", error.to_string()))
    }
}
