//! Texts that are generated side by side; one that ends makes place for the next prompt. A GPU counts the positions of
//! all sequences and takes their likeliest tokens, so a step of decoding is one CUDA graph, whatever the positions. On
//! a CPU every matrix is read once for all texts, and each has a cache of its own.

use super::{Context, Finish, Generated, Generation, Generator, StreamDecoder};
use crate::gpt::{CountedState, GptState};
use crate::{Result, finite};
use qkv_cuda::operations::{Array, Graph, NO_TOKEN, Operations};
use qkv_nn::{Activation, Machine, Pool, Tape, Usage};
use qkv_simd::logits::top;
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
    /// Whether the last step copied nothing from the host.
    is_recordable: bool,
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
        let room = tokens.min(gpt.max_len()).next_multiple_of(ROOM_STEP).min(gpt.max_len());
        let state = gpt.start_counted(operations, operations.decode_batch(sequences, room));
        Some(GraphDecoder {
            generator,
            machine,
            operations,
            pool,
            state,
            logits: None,
            is_recordable: false,
            graph: None,
        })
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
            None => self.step_or_record()?,
        }
        let ids = operations.read_scalars::<u32>(self.state.batch().ids());
        self.machine.check()?;
        match ids.contains(&NO_TOKEN) {
            true => Err(finite::refusal(&self.generator.parameters)),
            false => Ok(ids),
        }
    }

    /// A step, recorded if the one before copied nothing from the host: the first compiles what it needs and may copy
    /// weights, and those that another device holds are copied in every step.
    fn step_or_record(&mut self) -> Result<()> {
        let operations = self.operations;
        if self.is_recordable
            && let Some((graph, logits)) = operations.record(|| self.compute())
        {
            self.logits = Some(logits?);
            operations.launch_graph(&graph);
            self.graph = Some(graph);
            return Ok(());
        }
        let before = operations.bytes_written();
        self.logits = Some(self.compute()?);
        self.is_recordable = operations.bytes_written() == before;
        Ok(())
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

/// One step of decoding for all sequences of a CPU.
struct HostDecoder<'a> {
    generator: &'a Generator,
    machine: &'a Machine,
    pool: &'a Pool<f32>,
    /// Of each place; none where it is empty.
    states: Vec<Option<GptState<f32>>>,
    /// What each place reads next.
    ids: Vec<u32>,
    /// Of the last step, `[B, V]`; zeros where a place is empty.
    logits: Vec<f32>,
}

impl HostDecoder<'_> {
    /// As [`GraphDecoder::step`].
    fn step(&mut self) -> Result<Vec<u32>> {
        let Generator { model, parameters, .. } = self.generator;
        let gpt = model.gpt().expect("checked when it was opened");
        let mut tape = Tape::inference(parameters, self.pool, self.machine);
        let (places, mut states): (Vec<usize>, Vec<_>) =
            (self.states.iter_mut().enumerate()).filter_map(|(place, state)| Some((place, state.as_mut()?))).unzip();
        let ids: Vec<u32> = places.iter().map(|&place| self.ids[place]).collect();
        let hidden = gpt.step_each(&mut tape, &ids, &mut states)?; // [B, 1, C]
        let logits = tape.linear(&hidden, gpt.output(), None, Activation::None, 0.0); // [B, 1, V]
        finite::check(logits.value().data(), parameters)?;
        let each = logits.value().width();
        self.logits.resize(self.ids.len() * each, 0.0);
        for (&place, row) in places.iter().zip(logits.value().data().chunks_exact(each)) {
            self.logits[place * each..][..each].copy_from_slice(row);
            self.ids[place] = top(self.machine.isa(), row, 1).first().map_or(0, |&(token, _)| token);
        }
        Ok(self.ids.clone())
    }
}

/// What computes a step.
enum StepDecoder<'a> {
    Graph(Box<GraphDecoder<'a>>),
    Host(HostDecoder<'a>),
}

/// Texts side by side on a CPU: more would share little, and each has a cache.
const MOST_ON_HOST: usize = 16;

impl<'a> StepDecoder<'a> {
    /// For this many sequences of at most `tokens` tokens; `None` where one after the other is as good, or attention
    /// runs only on a CPU.
    fn new(
        generator: &'a Generator,
        machine: &'a Machine,
        pool: &'a Pool<f32>,
        sequences: usize,
        tokens: usize,
    ) -> Option<Self> {
        if machine.cuda().is_some() {
            return GraphDecoder::new(generator, machine, pool, sequences, tokens)
                .map(|decoder| StepDecoder::Graph(Box::new(decoder)));
        }
        let places = Some(sequences.min(MOST_ON_HOST)).filter(|&places| places > 1)?;
        let (states, ids) = ((0..places).map(|_| None).collect(), vec![0; places]);
        Some(StepDecoder::Host(HostDecoder { generator, machine, pool, states, ids, logits: Vec::new() }))
    }

    /// The number of sequences.
    fn places(&self) -> usize {
        match self {
            StepDecoder::Graph(decoder) => decoder.state.batch().len(),
            StepDecoder::Host(decoder) => decoder.ids.len(),
        }
    }

    /// Tokens that a sequence has room for.
    fn room(&self) -> usize {
        match self {
            StepDecoder::Graph(decoder) => decoder.room(),
            StepDecoder::Host(decoder) => decoder.generator.model.max_len(),
        }
    }

    fn pool(&self) -> &'a Pool<f32> {
        match self {
            StepDecoder::Graph(decoder) => decoder.pool,
            StepDecoder::Host(decoder) => decoder.pool,
        }
    }

    fn machine(&self) -> &'a Machine {
        match self {
            StepDecoder::Graph(decoder) => decoder.machine,
            StepDecoder::Host(decoder) => decoder.machine,
        }
    }

    /// Takes over the cache of a text.
    fn put(&mut self, place: usize, state: GptState<f32>) {
        match self {
            StepDecoder::Graph(decoder) => decoder.state.put(place, &state),
            StepDecoder::Host(decoder) => decoder.states[place] = Some(state),
        }
    }

    /// Forgets the text of a place.
    fn clear(&mut self, place: usize) {
        if let StepDecoder::Host(decoder) = self {
            decoder.states[place] = None;
        }
    }

    /// Sets what each sequence reads next, and its position.
    fn set(&mut self, ids: &[u32], positions: &[u32]) {
        match self {
            StepDecoder::Graph(decoder) => decoder.set(ids, positions),
            StepDecoder::Host(decoder) => decoder.ids.copy_from_slice(ids),
        }
    }

    /// Replaces the tokens that were taken.
    fn set_ids(&mut self, ids: &[u32]) {
        match self {
            StepDecoder::Graph(decoder) => decoder.set_ids(ids),
            StepDecoder::Host(decoder) => decoder.ids.copy_from_slice(ids),
        }
    }

    fn step(&mut self) -> Result<Vec<u32>> {
        match self {
            StepDecoder::Graph(decoder) => decoder.step(),
            StepDecoder::Host(decoder) => decoder.step(),
        }
    }

    /// The logits of the last step, `[B, V]`.
    fn logits(&self) -> Vec<f32> {
        match self {
            StepDecoder::Graph(decoder) => decoder.logits(),
            StepDecoder::Host(decoder) => decoder.logits.clone(),
        }
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

impl Growing<'_> {
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

/// The texts that are generated side by side, each in a place of the decoder.
struct Places<'g> {
    generator: &'g Generator,
    settings: &'g Generation,
    decoder: StepDecoder<'g>,
    texts: Vec<Option<Growing<'g>>>,
    /// What each place reads next, and at which position.
    next: Vec<u32>,
    positions: Vec<u32>,
}

impl<'g> Places<'g> {
    /// Puts the next prompts into empty places; returns texts that end with their first token.
    fn fill<'p>(
        &mut self,
        waiting: &mut impl Iterator<Item = (usize, &'p Vec<u32>)>,
    ) -> Result<Vec<(usize, Generated)>> {
        let (mut ended, mut is_changed) = (Vec::new(), false);
        for place in 0..self.texts.len() {
            while self.texts[place].is_none() {
                let Some((number, prompt)) = waiting.next() else { break };
                let (text, finish) = self.begin(number, prompt, place)?;
                is_changed = true;
                self.next[place] = text.tokens.last().copied().unwrap_or(0);
                self.positions[place] = text.tokens.len() as u32 - 1;
                match finish {
                    Some(finish) => {
                        self.decoder.clear(place);
                        ended.push(text.finish(finish));
                    }
                    None => self.texts[place] = Some(text),
                }
            }
        }
        if is_changed {
            self.decoder.set(&self.next, &self.positions);
        }
        Ok(ended)
    }

    /// Reads a prompt, takes the first token after it, and puts its cache where the decoder finds it.
    fn begin(&mut self, number: usize, prompt: &[u32], place: usize) -> Result<(Growing<'g>, Option<Finish>)> {
        let (generator, settings) = (self.generator, self.settings);
        let (machine, pool) = (self.decoder.machine(), self.decoder.pool());
        let started = Instant::now();
        let tokens = if prompt.is_empty() { vec![generator.model.config().bos_token_id] } else { prompt.to_vec() };
        let prompt = tokens.len();
        let mut context = Context::new(generator, true, machine, pool);
        let mut scores = context.scores(&tokens)?;
        self.decoder.put(place, context.state.take().expect("just filled"));
        let first = generator.choose(&mut scores, &tokens, prompt, &settings.of_text(number), machine);
        let decoder = StreamDecoder::new(&generator.tokenizer, &settings.stop);
        let prompt_seconds = started.elapsed().as_secs_f64();
        let mut text = Growing { number, tokens, prompt, decoder, started, prompt_seconds };
        let finish = text.push(first, generator, settings, self.decoder.room());
        Ok((text, finish))
    }

    /// Generates a token of each text; returns those that end with it.
    fn step(&mut self) -> Result<Vec<(usize, Generated)>> {
        self.next = self.decoder.step()?;
        let mut tokens: Vec<Option<u32>> = self.next.iter().copied().map(Some).collect();
        if !self.settings.is_greedy() {
            self.choose(&mut tokens);
            self.next = tokens.iter().map(|token| token.unwrap_or(0)).collect();
            self.decoder.set_ids(&self.next);
        }
        let mut ended = Vec::new();
        for (place, token) in tokens.into_iter().enumerate() {
            let Some(text) = &mut self.texts[place] else { continue };
            self.positions[place] += 1;
            if let Some(finish) = text.push(token, self.generator, self.settings, self.decoder.room()) {
                ended.extend(self.texts[place].take().map(|text| text.finish(finish)));
                // What stands in an empty place is computed too, and must stay within its room.
                (self.next[place], self.positions[place]) = (0, 0);
                self.decoder.clear(place);
            }
        }
        Ok(ended)
    }

    /// Chooses tokens by the logits of the last step.
    fn choose(&self, tokens: &mut [Option<u32>]) {
        let mut logits = self.decoder.logits();
        let each = logits.len() / tokens.len();
        for ((text, token), scores) in self.texts.iter().zip(tokens).zip(logits.chunks_exact_mut(each)) {
            let Some(text) = text else { continue };
            let settings = &self.settings.of_text(text.number);
            *token = self.generator.choose(scores, &text.tokens, text.prompt, settings, self.decoder.machine());
        }
    }
}

impl Generator {
    /// Generates a text after each prompt, `together` of them at a time, on a CPU at most 16; where a prompt fills the
    /// context, one after the other. `receive` gets the number of a prompt and its text when that is complete, in any
    /// order, and returns `false` to stop. The tokens of a text do not depend on what else is generated beside it; on a
    /// GPU up to rounding of the matrix products: eight rows and fewer have one order of summation, more have
    /// cuBLASLt's. Texts side by side end where the model's context does.
    ///
    /// # Errors
    /// Where a setting is out of range, or the model computes NaN.
    pub fn generate_all(
        &self,
        prompts: &[Vec<u32>],
        settings: &Generation,
        together: usize,
        machine: &Machine,
        receive: &mut (dyn FnMut(usize, Generated) -> bool + Send),
    ) -> Result<()> {
        settings.check()?;
        rayon::scope(|_| {
            let pool = Pool::new();
            let Some(mut places) = self.places(prompts, settings, together, machine, &pool) else {
                for (number, prompt) in prompts.iter().enumerate() {
                    let text = self.generate_in_pool(prompt, &settings.of_text(number), machine, &mut |_| true)?;
                    if !receive(number, text) {
                        break;
                    }
                }
                return Ok(());
            };
            let mut waiting = prompts.iter().enumerate();
            loop {
                let mut ended = places.fill(&mut waiting)?;
                if places.texts.iter().any(Option::is_some) {
                    ended.extend(places.step()?);
                } else if ended.is_empty() {
                    return Ok(());
                }
                if !ended.into_iter().all(|(number, text)| receive(number, text)) {
                    return Ok(());
                }
            }
        })
    }

    /// Empty places for texts side by side; `None` where they are generated one after the other.
    fn places<'g>(
        &'g self,
        prompts: &[Vec<u32>],
        settings: &'g Generation,
        together: usize,
        machine: &'g Machine,
        pool: &'g Pool<f32>,
    ) -> Option<Places<'g>> {
        let longest = prompts.iter().map(Vec::len).max()?.max(1);
        if longest >= self.model.max_len() || !settings.cache || settings.max_tokens == 0 {
            return None;
        }
        let count = together.clamp(1, prompts.len());
        let decoder = StepDecoder::new(self, machine, pool, count, longest.saturating_add(settings.max_tokens))?;
        let count = decoder.places();
        let texts = (0..count).map(|_| None).collect();
        Some(Places { generator: self, settings, decoder, texts, next: vec![0; count], positions: vec![0; count] })
    }
}
