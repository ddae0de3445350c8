//! The hidden `qkv bench-step`: training steps of two models, timed in a process that does nothing else, so that its
//! peak memory is that of training.

use super::timing::Timing;
use crate::arguments::{Argument, Arguments, Kind, Matches};
use crate::command::{Command, Run, Status};
use crate::failure::Failure;
use crate::memory;
use crate::output::Print;
use qkv::{Attention, Mask};
use qkv_models::{Architecture, Batch, Model, ModelConfig, Rows, SpecialTokens, TransformerConfig};
use qkv_nn::layers::{
    AttentionConfig, Block, BlockConfig, Builder, Embedding, FeedKind, Linear, Norm, NormKind, PositionKind,
};
use qkv_nn::{AdamW, Gradients, Heads, Machine, Moments, Parameters, Pool, Precision, Tape, Target};
use serde::{Deserialize, Serialize};

/// The models: a GPT of 7.3 M parameters and a translator of 7.6 M.
pub(crate) const MODELS: [(&str, &str); 2] = [
    (
        "gpt",
        "7.3 M parameters: vocabulary 8,000, width 256, 4 layers, 4 heads; 16 sequences of 128 tokens; GELU, AdamW",
    ),
    (
        "translate",
        "7.6 M parameters: vocabulary 8,000, width 256, 3 + 3 layers, 4 heads; 128 pairs of 16 tokens; dropout 0.3",
    ),
];
pub(crate) const PRECISIONS: [&str; 2] = ["f32", "bf16"];

/// Vocabulary, width and heads of both.
const V: usize = 8000;
const C: usize = 256;
const HEADS: Heads = Heads { query: 4, key: 4 };

pub(crate) const COMMAND: Command =
    Command::new("bench-step", "Time training steps, for `qkv bench --train`", ARGUMENTS, |matches| {
        Ok(Box::new(TrainingStep::parse(matches)))
    })
    .hidden();

const ARGUMENTS: Arguments = &[(
    "Step",
    &[
        Argument::new("model", Kind::Word, "Model").values(&[("gpt", ""), ("translate", "")]).positional().required(),
        Argument::new("precision", Kind::Word, "Precision")
            .values(&[("f32", ""), ("bf16", "")])
            .positional()
            .required(),
        Argument::new("threads", Kind::Integer(1, 1024), "Number of threads").value("THREADS").positional().required(),
        Argument::new("seconds", Kind::Positive, "Seconds").value("SECONDS").positional().required(),
    ],
)];

impl Run for TrainingStep {
    fn run(&self, print: Print<'_>) -> Result<Status, Failure> {
        print(&self.measure()?).map(|_| Status::Done)
    }
}

/// What is timed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrainingStep {
    pub model: &'static str,
    pub precision: &'static str,
    pub threads: usize,
    pub seconds: f64,
}

/// The time and memory of a step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct StepTiming {
    pub best_ms: f64,
    pub median_ms: f64,
    /// Of the process, where the system tells.
    pub peak_bytes: Option<u64>,
}

impl TrainingStep {
    fn parse(matches: &Matches<'_>) -> TrainingStep {
        let word = |name: &str, words: &[&'static str]| {
            let typed = matches.word(name);
            words.iter().copied().find(|&word| Some(word) == typed).unwrap_or(words[0])
        };
        TrainingStep {
            model: word("model", &MODELS.map(|(name, _)| name)),
            precision: word("precision", &PRECISIONS),
            threads: matches.count("threads").unwrap_or(1),
            seconds: matches.number("seconds").unwrap_or(1.0),
        }
    }

    /// Measures in this process.
    fn measure(self) -> Result<String, Failure> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build();
        let pool = pool.map_err(|error| Failure::new(format!("cannot start threads: {error}")))?;
        let timing = pool.install(|| match self.model {
            "gpt" => gpt(self),
            _ => translator(self),
        })?;
        let timing = StepTiming { best_ms: timing.best_ms, median_ms: timing.median_ms, peak_bytes: memory::peak() };
        Ok(serde_json::to_string(&timing).expect("plain numbers") + "\n")
    }

    fn machine(self) -> Machine {
        let precision = if self.precision == "bf16" { Precision::Bf16 } else { Precision::F32 };
        Machine::new(self.threads).precision(precision)
    }

    /// Times whole steps: zeroed gradients, forward, backward, Adam.
    fn time(
        self,
        parameters: &mut Parameters<f32>,
        adam: AdamW,
        mut loss: impl FnMut(&mut Tape<'_, f32>) -> Result<(), Failure>,
    ) -> Result<Timing, Failure> {
        let (pool, machine) = (Pool::new(), self.machine());
        let (mut gradients, mut moments) = (Gradients::of(parameters), Moments::of(parameters));
        let (mut seed, mut outcome) = (0, Ok(()));
        let timing = Timing::of(self.seconds, || {
            seed += 1;
            gradients.clear(&machine);
            let mut tape = Tape::training(parameters, &mut gradients, &pool, &machine, seed);
            if let Err(failure) = loss(&mut tape) {
                outcome = Err(failure);
            }
            tape.backward();
            drop(tape);
            adam.step(parameters, &gradients, &mut moments, 1e-3, 1.0, &machine);
        });
        outcome.map(|()| timing)
    }
}

fn refused(error: impl std::fmt::Display) -> Failure {
    Failure::new(format!("the model is invalid: {error}"))
}

/// Varied token ids, the same as PyTorch's side makes.
fn tokens(count: usize, step: usize, first: usize) -> Vec<u32> {
    (0..count).map(|at| ((at * step + first) % V) as u32).collect()
}

fn gpt(step: TrainingStep) -> Result<Timing, Failure> {
    let (batch, length, layers) = (16, 128, 4);
    let mut parameters = Parameters::new();
    let mut at = Builder::new(&mut parameters, 1);
    let embedding = Embedding::new(&mut at.at("tok"), V, C, PositionKind::Learned, length).unscaled();
    let own = AttentionConfig::new(Attention::scaled_dot().mask(Mask::causal()), HEADS);
    let config = BlockConfig { feed: FeedKind::Gelu, ..BlockConfig::new(C, 4 * C, own) };
    let blocks: qkv::Result<Vec<Block>> =
        (0..layers).map(|layer| Block::new(&mut at.at(&format!("layers.{layer}")), &config)).collect();
    let blocks = blocks.map_err(refused)?;
    let norm = Norm::new(&mut at.at("norm"), C, NormKind::Layer, Norm::EPSILON);
    let head = Linear::new(&mut at.at("head"), C, V, false);
    let (decoder_input, targets) = (tokens(batch * length, 7919, 13), tokens(batch * length, 104_729, 7));
    let adam = AdamW { beta2: 0.999, epsilon: 1e-8, decay: 0.01, ..AdamW::default() };
    step.time(&mut parameters, adam, |tape| {
        let mut x = embedding.forward(tape, &decoder_input, length, 0); // (B, N, C)
        for block in &blocks {
            x = block.forward(tape, x, None, None, None).map_err(refused)?;
        }
        let x = norm.forward(tape, &x);
        let target = Target { ids: &targets, ignore: None, smoothing: 0.0, scale: 1.0 / targets.len() as f64 };
        tape.cross_entropy(&x, head.weight, None, target);
        Ok(())
    })
}

fn translator(step: TrainingStep) -> Result<Timing, Failure> {
    let (batch, length) = (128, 16);
    let sizes = TransformerConfig { dropout: 0.3, attention_dropout: 0.3, ffn_dropout: 0.3, ..Default::default() };
    // No token of the data is padding: all of them count.
    let specials = SpecialTokens { pad: V as u32, bos: 1, eos: 2 };
    let config = ModelConfig::new(Architecture::Transformer(sizes), V + 1, specials);
    let (model, mut parameters) = Model::new(&config, 1).map_err(refused)?;
    let rows = |step, first| {
        let ids = tokens(batch * length, step, first);
        Rows { ids, lengths: vec![length; batch], length }
    };
    let batch = Batch {
        source: rows(7919, 13),
        decoder_input: rows(104_729, 7),
        targets: rows(15_485_863, 5).ids,
        packed: Vec::new(),
    };
    let scale = 1.0 / batch.targets.len() as f64;
    step.time(&mut parameters, AdamW::default(), |tape| model.loss(tape, &batch, 0.1, scale).map(drop).map_err(refused))
}
