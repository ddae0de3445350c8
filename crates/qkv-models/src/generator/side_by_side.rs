//! Texts that a GPU generates side by side. The device counts the positions of all sequences and takes their likeliest
//! tokens, so a step of decoding is one CUDA graph, whatever the positions; a text that ends makes place for the next
//! prompt.

use super::{Finish, Generated, Generation, Generator, StreamDecoder};
use crate::gpt::CountedState;
use crate::{Result, finite};
use qkv_cuda::operations::{Array, Graph, NO_TOKEN, Operations};
use qkv_nn::{Activation, Machine, Pool, Tape, Usage};
use std::time::Instant;

/// Tokens of a sequence are given room in multiples of this.
const ROOM_STEP: usize = 64;

/// One step of decoding for all sequences of a device.
pub(super) struct GraphDecoder<'a> {
    generator: &'a Generator,
    machine: &'a Machine,
    operations: &'a Operations,
    pool: &'a Pool<f32>,
    pub state: CountedState<f32>,
    /// Of the last step, `[B, V]`.
    logits: Option<Array>,
    graph: Option<Graph>,
}

impl<'a> GraphDecoder<'a> {
    /// For this many sequences of at most `tokens` tokens; `None` on a CPU, and where the attention runs only there.
    pub fn new(
        generator: &'a Generator,
        machine: &'a Machine,
        pool: &'a Pool<f32>,
        sequences: usize,
        tokens: usize,
    ) -> Option<Self> {
        let gpt = generator.model.gpt()?;
        let operations = machine.cuda().filter(|_| gpt.runs_on_gpu())?;
        let room = tokens.next_multiple_of(ROOM_STEP).min(gpt.max_len());
        let state = gpt.start_counted(operations, operations.decode_batch(sequences, room));
        Some(GraphDecoder { generator, machine, operations, pool, state, logits: None, graph: None })
    }

    /// Tokens that a sequence has room for.
    pub fn room(&self) -> usize {
        self.state.batch().room()
    }

    /// Sets what each sequence reads next, and its position.
    pub fn set(&self, ids: &[u32], positions: &[u32]) {
        self.operations.set_decode_batch(self.state.batch(), ids, positions);
    }

    /// Replaces the tokens that were taken.
    pub fn set_ids(&self, ids: &[u32]) {
        self.operations.write(self.state.batch().ids(), ids);
    }

    /// Reads a token of each sequence and takes the likeliest next one, which is what it reads next: those.
    ///
    /// # Errors
    /// Where the model computes NaN, or the device fails.
    pub fn step(&mut self) -> Result<Vec<u32>> {
        let operations = self.operations;
        match &self.graph {
            Some(graph) => operations.launch_graph(graph),
            // The first step compiles what it needs, the second one is recorded.
            None if self.logits.is_none() => self.logits = Some(self.compute()?),
            None => match operations.record(|| self.compute()) {
                Some((graph, logits)) => {
                    self.logits = Some(logits?);
                    operations.launch_graph(&graph);
                    self.graph = Some(graph);
                }
                None => self.logits = Some(self.compute()?),
            },
        }
        let ids = operations.read_scalars::<u32>(self.state.batch().ids());
        self.machine.check()?;
        match ids.contains(&NO_TOKEN) {
            true => Err(finite::refusal(&self.generator.parameters)),
            false => Ok(ids),
        }
    }

    fn compute(&mut self) -> Result<Array> {
        let gpt = self.generator.model.gpt().expect("checked when it was made");
        let mut tape = Tape::inference(&self.generator.parameters, self.pool, self.machine);
        let hidden = gpt.step_counted(&mut tape, &mut self.state)?; // [B, 1, C]
        let logits = tape.linear(&hidden, gpt.output(), None, Activation::None, 0.0); // [B, 1, V]
        Ok(tape.take_likeliest(&logits, self.state.batch()))
    }

    /// The logits of the last step, `[B, V]`.
    pub fn logits(&self) -> Vec<f32> {
        self.logits.as_ref().map_or(Vec::new(), |logits| self.operations.read(logits))
    }
}

/// A text that is being generated.
struct Growing<'g> {
    /// Which of the prompts.
    number: usize,
    tokens: Vec<u32>,
    prompt: usize,
    decoder: StreamDecoder<'g>,
    started: Instant,
    prompt_seconds: f64,
}

impl<'g> Growing<'g> {
    /// Adds a token; says why the text ends with it, if it does.
    fn push(
        &mut self,
        token: Option<u32>,
        generator: &Generator,
        settings: &Generation,
        room: usize,
    ) -> Option<Finish> {
        // Every token would repeat an n-gram.
        let Some(token) = token else { return Some(Finish::Length) };
        self.tokens.push(token);
        if generator.end_tokens.contains(&token) {
            return Some(Finish::Eos);
        }
        if self.decoder.push(token) {
            return Some(Finish::Stop);
        }
        let written = self.tokens.len() - self.prompt;
        (written >= settings.max_tokens || self.tokens.len() >= room).then_some(Finish::Length)
    }

    fn finish(mut self, finish: Finish) -> (usize, Generated) {
        self.decoder.finish(&mut |_| true);
        let generated = Generated {
            text: self.decoder.text,
            tokens: self.tokens.split_off(self.prompt),
            prompt: self.prompt,
            prompt_dropped: 0,
            prompt_seconds: self.prompt_seconds,
            seconds: self.started.elapsed().as_secs_f64() - self.prompt_seconds,
            usage: Usage::default(),
            finish,
        };
        (self.number, generated)
    }
}

impl Generator {
    /// Generates a text after each prompt, `together` of them at a time where a GPU computes; on a CPU one after the
    /// other. `receive` gets the number of a prompt and its text when that is complete, in any order, and returns
    /// `false` to stop. The tokens of a text do not depend on what else is generated beside it, up to rounding of the
    /// matrix products: eight rows and fewer have one order of summation, more have cuBLASLt's.
    ///
    /// On a GPU a text ends where the model's context does; prompts longer than that are refused.
    ///
    /// # Errors
    /// Where a setting is out of range, a prompt too long, or the model computes NaN.
    pub fn generate_all(
        &self,
        prompts: &[Vec<u32>],
        settings: &Generation,
        together: usize,
        machine: &Machine,
        receive: &mut (dyn FnMut(usize, Generated) -> bool + Send),
    ) -> Result<()> {
        settings.check()?;
        rayon::scope(|_| self.generate_all_in_pool(prompts, settings, together, machine, receive))
    }

    fn generate_all_in_pool(
        &self,
        prompts: &[Vec<u32>],
        settings: &Generation,
        together: usize,
        machine: &Machine,
        receive: &mut (dyn FnMut(usize, Generated) -> bool + Send),
    ) -> Result<()> {
        let pool = Pool::new();
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let places = together.clamp(1, prompts.len().max(1));
        let fits = longest < self.model.max_len();
        let decoder = match fits && settings.cache && settings.max_tokens > 0 {
            true => GraphDecoder::new(self, machine, &pool, places, longest.saturating_add(settings.max_tokens)),
            false => None,
        };
        let Some(mut decoder) = decoder else {
            for (number, prompt) in prompts.iter().enumerate() {
                let settings = &settings.of_text(number);
                let generated = self.generate_in_pool(prompt, settings, machine, &mut |_| true)?;
                if !receive(number, generated) {
                    break;
                }
            }
            return Ok(());
        };
        let mut texts: Vec<Option<Growing<'_>>> = (0..places).map(|_| None).collect();
        let (mut waiting, mut positions) = (prompts.iter().enumerate(), vec![0; places]);
        let mut next = vec![0; places];
        loop {
            let mut is_changed = false;
            for place in 0..places {
                while texts[place].is_none() {
                    let Some((number, prompt)) = waiting.next() else { break };
                    let (text, ended) = self.begin(number, prompt, settings, &mut decoder, place)?;
                    is_changed = true;
                    (next[place], positions[place]) = (*text.tokens.last().unwrap_or(&0), text.tokens.len() as u32 - 1);
                    match ended {
                        Some(finish) => {
                            let (number, generated) = text.finish(finish);
                            if !receive(number, generated) {
                                return Ok(());
                            }
                        }
                        None => texts[place] = Some(text),
                    }
                }
            }
            if texts.iter().all(Option::is_none) {
                return Ok(());
            }
            if is_changed {
                decoder.set(&next, &positions);
            }
            next = decoder.step()?;
            if !settings.is_greedy() {
                let mut logits = decoder.logits();
                let each = logits.len() / places;
                for ((text, next), scores) in texts.iter().zip(&mut next).zip(logits.chunks_exact_mut(each)) {
                    let Some(text) = text else { continue };
                    let settings = &settings.of_text(text.number);
                    *next = self.choose(scores, &text.tokens, text.prompt, settings, machine).unwrap_or(NO_TOKEN);
                }
                decoder.set_ids(&next.iter().map(|&id| if id == NO_TOKEN { 0 } else { id }).collect::<Vec<_>>());
            }
            for place in 0..places {
                let Some(text) = &mut texts[place] else { continue };
                positions[place] += 1;
                let token = Some(next[place]).filter(|&id| id != NO_TOKEN);
                if let Some(finish) = text.push(token, self, settings, decoder.room()) {
                    let (number, generated) = texts[place].take().expect("just seen").finish(finish);
                    // What stands in an empty place is computed too, and must stay within its room.
                    (next[place], positions[place]) = (0, 0);
                    if !receive(number, generated) {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Reads a prompt, takes the first token after it, and puts its cache where the decoder finds it.
    fn begin<'g>(
        &'g self,
        number: usize,
        prompt: &[u32],
        settings: &'g Generation,
        decoder: &mut GraphDecoder<'_>,
        place: usize,
    ) -> Result<(Growing<'g>, Option<Finish>)> {
        let started = Instant::now();
        let tokens = if prompt.is_empty() { vec![self.model.config().bos_token_id] } else { prompt.to_vec() };
        let prompt = tokens.len();
        let mut context = super::Context::empty();
        let mut scores = context.scores(self, &tokens, true, decoder.machine, decoder.pool)?;
        finite::check(&scores, &self.parameters)?;
        decoder.state.put(place, context.state.as_ref().expect("just filled"));
        let first = self.choose(&mut scores, &tokens, prompt, &settings.of_text(number), decoder.machine);
        let stream = StreamDecoder::new(&self.tokenizer, &settings.stop);
        let prompt_seconds = started.elapsed().as_secs_f64();
        let mut text = Growing { number, tokens, prompt, decoder: stream, started, prompt_seconds };
        let ended = text.push(first, self, settings, decoder.room());
        Ok((text, ended))
    }
}
