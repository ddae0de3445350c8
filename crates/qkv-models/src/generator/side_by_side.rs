//! Batched generation: texts are generated side by side, and one that ends makes room for the next prompt. A GPU
//! advances the positions of all sequences and chooses their tokens, so a decoding step is one CUDA graph, whatever the
//! positions. On a CPU every matrix is read once for all texts, and each text has its own cache.

use super::graph_decoder::{GraphDecoder, Reads};
use super::{Finish, Generated, Generation, Generator, StreamDecoder};
use crate::batch::Rows;
use crate::gpt::GptState;
use crate::{Result, finite};
use qkv_nn::{Activation, Machine, Pool, Tape, Usage};
use qkv_simd::logits::top;
use std::time::Instant;

/// One decoding step for all sequences on a CPU.
struct HostDecoder<'a> {
    generator: &'a Generator,
    machine: &'a Machine,
    pool: &'a Pool<f32>,
    /// The state of each place; `None` if the place is empty.
    states: Vec<Option<GptState<f32>>>,
    /// What each place reads next.
    ids: Vec<u32>,
    /// Logits of the last step, `[B, V]`; those of empty places are stale or zero.
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
        let read = logits.value().data();
        self.machine.failed()?;
        finite::check(read, parameters)?;
        let each = logits.value().width();
        self.logits.resize(self.ids.len() * each, 0.0);
        for (&place, row) in places.iter().zip(logits.value().data().chunks_exact(each)) {
            self.logits[place * each..][..each].copy_from_slice(row);
            self.ids[place] = top(self.machine.isa(), row, 1).first().map_or(0, |&(token, _)| token);
        }
        Ok(self.ids.clone())
    }
}

/// Computes decoding steps, on a device or on the CPU.
enum StepDecoder<'a> {
    Graph(Box<GraphDecoder<'a>>),
    Host(HostDecoder<'a>),
}

/// The most texts side by side on a CPU: more would share little, and each has its own cache.
const MOST_ON_HOST: usize = 16;

impl<'a> StepDecoder<'a> {
    /// For this many sequences of at most `tokens` tokens; `None` if one after the other is just as good, or if a GPU
    /// cannot run the attention.
    fn new(
        generator: &'a Generator,
        settings: &Generation,
        machine: &'a Machine,
        pool: &'a Pool<f32>,
        sequences: usize,
        tokens: usize,
    ) -> Option<Self> {
        if machine.cuda().is_some() {
            return GraphDecoder::new(generator, settings, machine, pool, sequences, tokens)
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

    /// Number of tokens that a sequence has room for.
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

    /// The most prompt tokens that are read in one pass. A CPU reads prompts one by one, since each has its own cache.
    fn tokens_together(&self) -> usize {
        match self {
            StepDecoder::Graph(_) => 1 << 14,
            StepDecoder::Host(_) => 0,
        }
    }

    /// Takes over the caches of texts of these lengths.
    fn put(&mut self, places: &[usize], lengths: &[usize], state: GptState<f32>) {
        match self {
            StepDecoder::Graph(decoder) => {
                for (row, (&place, &length)) in places.iter().zip(lengths).enumerate() {
                    decoder.state.put(place, &state, row, length);
                }
            }
            StepDecoder::Host(decoder) => decoder.states[places[0]] = Some(state),
        }
    }

    /// Drops the text of a place.
    fn clear(&mut self, place: usize) {
        if let StepDecoder::Host(decoder) = self {
            decoder.states[place] = None;
        }
    }

    /// Sets what each sequence reads next.
    fn set(&mut self, reads: &[Reads]) {
        match self {
            StepDecoder::Graph(decoder) => decoder.set(reads),
            StepDecoder::Host(decoder) => decoder.ids = reads.iter().map(|reads| reads.token).collect(),
        }
    }

    /// Whether the step itself samples tokens.
    fn draws(&self) -> bool {
        matches!(self, StepDecoder::Graph(decoder) if decoder.draws.is_some())
    }

    /// Replaces the tokens that were chosen.
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

    /// The logits of a place in the last step, `[V]`.
    fn logits(&self, place: usize) -> Vec<f32> {
        match self {
            StepDecoder::Graph(decoder) => decoder.logits(place),
            StepDecoder::Host(decoder) => {
                let each = decoder.logits.len() / decoder.ids.len();
                decoder.logits[place * each..][..each].to_vec()
            }
        }
    }
}

/// A text in progress.
struct Growing<'g> {
    /// Index of the prompt.
    number: usize,
    tokens: Vec<u32>,
    prompt: usize,
    decoder: StreamDecoder<'g>,
    started: Instant,
    prompt_seconds: f64,
}

impl Growing<'_> {
    /// Adds a token; returns why the text ends with it, if it does.
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

/// A prompt, and the place of the decoder that it is assigned to.
struct Prompt {
    place: usize,
    /// Index of the prompt.
    number: usize,
    tokens: Vec<u32>,
}

/// The texts that are generated side by side, each in a place (a row of the batch) of the decoder.
struct Places<'g> {
    generator: &'g Generator,
    settings: &'g Generation,
    decoder: StepDecoder<'g>,
    texts: Vec<Option<Growing<'g>>>,
    /// What each place reads next.
    next: Vec<Reads>,
}

impl<'g> Places<'g> {
    /// Puts the next prompts into empty places; returns texts that end with their first token.
    fn fill<'p>(
        &mut self,
        waiting: &mut impl Iterator<Item = (usize, &'p Vec<u32>)>,
    ) -> Result<Vec<(usize, Generated)>> {
        let (mut ended, mut is_changed) = (Vec::new(), false);
        loop {
            let empty = (0..self.texts.len()).filter(|&place| self.texts[place].is_none());
            let mut prompts: Vec<Prompt> =
                empty.zip(&mut *waiting).map(|(place, next)| self.prompt(place, next)).collect();
            if prompts.is_empty() {
                break;
            }
            is_changed = true;
            // Prompts of similar length are read together.
            prompts.sort_by_key(|prompt| prompt.tokens.len());
            let mut rest = &prompts[..];
            while let Some(first) = rest.first() {
                let fits = |at: usize| (at + 1) * rest[at].tokens.len() <= self.decoder.tokens_together();
                let mut count = 1;
                while count < rest.len() && fits(count) && rest[count].tokens.len() <= 2 * first.tokens.len() + 8 {
                    count += 1;
                }
                let (now, later) = rest.split_at(count);
                self.begin(now, &mut ended)?;
                rest = later;
            }
        }
        if is_changed {
            self.decoder.set(&self.next);
        }
        Ok(ended)
    }

    fn prompt(&self, place: usize, (number, tokens): (usize, &Vec<u32>)) -> Prompt {
        let start = self.generator.model.config().bos_token_id;
        Prompt { place, number, tokens: if tokens.is_empty() { vec![start] } else { tokens.clone() } }
    }

    /// Reads prompts, chooses the first token after each, and hands their caches to the decoder. Texts that end with
    /// that token are added to `ended`.
    fn begin(&mut self, prompts: &[Prompt], ended: &mut Vec<(usize, Generated)>) -> Result<()> {
        let (generator, settings) = (self.generator, self.settings);
        let (machine, pool, started) = (self.decoder.machine(), self.decoder.pool(), Instant::now());
        let tokens: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt.tokens[..]).collect();
        let (state, logits) = generator.read_prompts(&tokens, machine, pool)?;
        let places: Vec<usize> = prompts.iter().map(|prompt| prompt.place).collect();
        let lengths: Vec<usize> = tokens.iter().map(|tokens| tokens.len()).collect();
        self.decoder.put(&places, &lengths, state);
        for (prompt, mut scores) in prompts.iter().zip(logits) {
            let Prompt { place, number, ref tokens } = *prompt;
            let first = generator.choose(&mut scores, tokens, tokens.len(), &settings.of_text(number), machine);
            let decoder = StreamDecoder::new(&generator.tokenizer, &settings.stop);
            let (tokens, prompt, prompt_seconds) = (tokens.clone(), tokens.len(), started.elapsed().as_secs_f64());
            let mut text = Growing { number, tokens, prompt, decoder, started, prompt_seconds };
            let finish = text.push(first, generator, settings, self.decoder.room());
            self.next[place] = Reads {
                token: text.tokens.last().copied().unwrap_or(0),
                position: text.tokens.len() as u32 - 1,
                text: settings.first_draw() + number as u32,
                drawn: (text.tokens.len() - text.prompt) as u32,
            };
            match finish {
                Some(finish) => {
                    self.decoder.clear(place);
                    ended.push(text.finish(finish));
                }
                None => self.texts[place] = Some(text),
            }
        }
        Ok(())
    }

    /// Generates a token of each text; returns those that end with it.
    fn step(&mut self) -> Result<Vec<(usize, Generated)>> {
        let mut tokens: Vec<Option<u32>> = self.decoder.step()?.into_iter().map(Some).collect();
        if !self.settings.is_greedy() && !self.decoder.draws() {
            self.choose(&mut tokens);
            self.decoder.set_ids(&tokens.iter().map(|token| token.unwrap_or(0)).collect::<Vec<_>>());
        }
        let mut ended = Vec::new();
        for (place, token) in tokens.into_iter().enumerate() {
            let Some(text) = &mut self.texts[place] else { continue };
            let next = &mut self.next[place];
            next.token = token.unwrap_or(0);
            next.position += 1;
            next.drawn += 1;
            if let Some(finish) = text.push(token, self.generator, self.settings, self.decoder.room()) {
                ended.extend(self.texts[place].take().map(|text| text.finish(finish)));
                // Empty places are computed too, and must stay within their room.
                self.next[place] = Reads::default();
                self.decoder.clear(place);
            }
        }
        Ok(ended)
    }

    /// Chooses tokens from the logits of the last step.
    fn choose(&self, tokens: &mut [Option<u32>]) {
        for (place, (text, token)) in self.texts.iter().zip(tokens).enumerate() {
            let Some(text) = text else { continue };
            let (settings, mut scores) = (&self.settings.of_text(text.number), self.decoder.logits(place));
            *token = self.generator.choose(&mut scores, &text.tokens, text.prompt, settings, self.decoder.machine());
        }
    }
}

impl Generator {
    /// Generates a text after each prompt, `together` of them at a time (at most 16 on a CPU), or one after the other
    /// if a prompt fills the context. `receive` gets the index of a prompt and its text once that is complete, in any
    /// order, and returns `false` to stop. The tokens of a text do not depend on the texts beside it; on a GPU this
    /// holds up to rounding in the matrix products: those of up to eight rows have one order of summation, larger ones
    /// have cuBLASLt's. Texts side by side end at the end of the model's context.
    ///
    /// # Errors
    /// If a setting is out of range, or the model computes NaN.
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

    /// Reads prompts in one pass, padded at their ends. Returns the caches of all, and the logits of the token after
    /// each, `[V]`. Causal attention does not see the padding.
    fn read_prompts(
        &self,
        prompts: &[&[u32]],
        machine: &Machine,
        pool: &Pool<f32>,
    ) -> Result<(GptState<f32>, Vec<Vec<f32>>)> {
        let gpt = self.model.gpt().expect("checked when it was opened");
        let rows = Rows::new(&prompts.iter().map(|tokens| tokens.to_vec()).collect::<Vec<_>>(), 0);
        let mut tape = Tape::inference(&self.parameters, pool, machine);
        let mut state = gpt.start(&mut tape, prompts.len())?;
        let hidden = gpt.step(&mut tape, &rows.ids, rows.length, &mut state)?; // [B, L, C]
        let last = rows.lengths.iter().enumerate().map(|(row, length)| Some(row * rows.length + length - 1));
        let last = tape.gather(&[&hidden], &last.collect::<Vec<_>>(), [prompts.len(), 1]); // [B, 1, C]
        let logits = tape.linear(&last, gpt.output(), None, Activation::None, 0.0); // [B, 1, V]
        let read = logits.value().data();
        machine.failed()?;
        finite::check(read, &self.parameters)?;
        let logits = logits.value().data().chunks_exact(logits.value().width()).map(<[f32]>::to_vec).collect();
        Ok((state, logits))
    }

    /// Empty places for texts side by side; `None` if the texts are to be generated one after the other.
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
        let tokens = longest.saturating_add(settings.max_tokens);
        let decoder = StepDecoder::new(self, settings, machine, pool, count, tokens)?;
        let count = decoder.places();
        let texts = (0..count).map(|_| None).collect();
        Some(Places { generator: self, settings, decoder, texts, next: vec![Reads::default(); count] })
    }
}
