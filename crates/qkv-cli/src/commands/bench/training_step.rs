//! The hidden `qkv bench-step`: training steps of a model, timed in a process that does nothing else, so that its
//! peak memory is that of training.

use super::timing::Timing;
use crate::arguments::{Argument, Arguments, Kind, Matches};
use crate::command::{Command, Run, Status};
use crate::device;
use crate::failure::Failure;
use crate::memory;
use crate::output::Print;
use qkv::{Attention, Mask};
use qkv_models::{Architecture, Batch, Model, ModelConfig, Rows, SpecialTokens, TransformerConfig};
use qkv_nn::layers::{
    AttentionConfig, Block, BlockConfig, Builder, Embedding, FeedKind, Linear, Norm, NormKind, PositionKind,
};
use qkv_nn::{AdamW, Device, Gradients, Heads, Machine, Moments, Parameters, Pending, Pool, Precision, Tape, Target};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// A model whose training step is timed.
#[derive(Debug)]
pub(crate) struct StepModel {
    pub name: &'static str,
    pub what: &'static str,
    sizes: Sizes,
}

#[derive(Clone, Copy, Debug)]
enum Sizes {
    Gpt(GptSizes),
    /// Pairs of 16 tokens.
    Translator {
        batch: usize,
    },
}

#[derive(Clone, Copy, Debug)]
struct GptSizes {
    vocab: usize,
    width: usize,
    layers: usize,
    heads: usize,
    length: usize,
    batch: usize,
}

const fn gpt_sizes([vocab, width, layers, heads]: [usize; 4], [batch, length]: [usize; 2]) -> Sizes {
    Sizes::Gpt(GptSizes { vocab, width, layers, heads, length, batch })
}

/// The models that a CPU trains.
const ON_CPU: &[StepModel] = &[
    StepModel {
        name: "gpt",
        what: "7.3 M parameters: vocabulary 8,000, width 256, 4 layers, 4 heads; 16 sequences of 128 tokens; GELU, AdamW",
        sizes: gpt_sizes([8000, 256, 4, 4], [16, 128]),
    },
    StepModel {
        name: "translate",
        what: "7.6 M parameters: vocabulary 8,000, width 256, 3 + 3 layers, 4 heads; 128 pairs of 16 tokens; dropout 0.3",
        sizes: Sizes::Translator { batch: 128 },
    },
];

/// The models that a GPU trains: with a tied output layer, gradients clipped to a norm of 1.
const ON_CUDA: &[StepModel] = &[
    StepModel {
        name: "gpt2",
        what: "GPT-2, 124 M parameters, 32 sequences of 1,024 tokens",
        sizes: gpt_sizes([50304, 768, 12, 12], [32, 1024]),
    },
    StepModel {
        name: "gpt2-medium",
        what: "GPT-2, 355 M parameters, 16 sequences of 1,024 tokens",
        sizes: gpt_sizes([50304, 1024, 24, 16], [16, 1024]),
    },
    StepModel {
        name: "long",
        what: "GPT-2, 124 M parameters, 2 sequences of 16,384 tokens",
        sizes: gpt_sizes([50304, 768, 12, 12], [2, 16384]),
    },
    StepModel {
        name: "small",
        what: "5.2 M parameters: vocabulary 8,000, width 256, 4 layers, 4 heads; 256 sequences of 128 tokens",
        sizes: gpt_sizes([8000, 256, 4, 4], [256, 128]),
    },
    StepModel {
        name: "translate",
        what: "7.6 M parameters: vocabulary 8,000, width 256, 3 + 3 layers, 4 heads; 512 pairs of 16 tokens; dropout 0.3",
        sizes: Sizes::Translator { batch: 512 },
    },
];

/// The models that are timed on a device.
pub(crate) fn models(device: Device) -> &'static [StepModel] {
    if device == Device::Cuda { ON_CUDA } else { ON_CPU }
}

pub(crate) const PRECISIONS: [&str; 2] = ["f32", "bf16"];

/// Steps on a GPU that are timed as one group, from idle to idle, on both sides.
const GROUP: usize = 10;

/// The vocabulary of the translator.
const V: usize = 8000;

pub(crate) const COMMAND: Command =
    Command::new("bench-step", "Time training steps, for `qkv bench --train`", ARGUMENTS, |matches| {
        Ok(Box::new(TrainingStep::parse(matches)))
    })
    .hidden();

const ARGUMENTS: Arguments = &[(
    "Step",
    &[
        Argument::new("model", Kind::Text, "Model").value("MODEL").positional().required(),
        Argument::new("precision", Kind::Word, "Precision")
            .values(&[("f32", ""), ("bf16", "")])
            .positional()
            .required(),
        Argument::new("threads", Kind::Integer(1, 1024), "Number of threads").value("THREADS").positional().required(),
        Argument::new("seconds", Kind::Positive, "Seconds").value("SECONDS").positional().required(),
        Argument::new("device", Kind::Word, "Device").values(&[("cpu", ""), ("cuda", "")]).positional().required(),
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
    pub model: &'static StepModel,
    pub precision: &'static str,
    pub threads: usize,
    pub seconds: f64,
    pub device: Device,
}

/// The time and memory of a step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct StepTiming {
    pub best_ms: f64,
    pub median_ms: f64,
    /// Peak memory of the process, if the system reports it; on a GPU, peak memory of the GPU.
    pub peak_bytes: Option<u64>,
    /// The shortest time until all forward and backward work was submitted to a GPU.
    pub submitted_ms: Option<f64>,
}

impl TrainingStep {
    fn parse(matches: &Matches<'_>) -> TrainingStep {
        let device = device::parse(matches);
        let models = models(device);
        let typed = |name: &str| matches.texts(name).first().cloned();
        let model = models.iter().find(|model| typed("model").as_deref() == Some(model.name));
        let precision = PRECISIONS.into_iter().find(|&word| matches.word("precision") == Some(word));
        TrainingStep {
            model: model.unwrap_or(&models[0]),
            precision: precision.unwrap_or(PRECISIONS[0]),
            threads: matches.count("threads").unwrap_or(1),
            seconds: matches.number("seconds").unwrap_or(1.0),
            device,
        }
    }

    /// Measures in this process.
    fn measure(self) -> Result<String, Failure> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build();
        let pool = pool.map_err(|error| Failure::new(format!("cannot start threads: {error}")))?;
        let machine = self.machine()?;
        let (timing, submitted_ms) = pool.install(|| self.time(&machine, self.model.task(self.device, 1)?))?;
        machine.check().map_err(qkv_models::Error::from)?;
        let peak_bytes = match machine.cuda() {
            Some(operations) => Some(operations.memory_use()[1] as u64),
            None => memory::peak(),
        };
        let submitted_ms = machine.cuda().map(|_| submitted_ms);
        let timing = StepTiming { best_ms: timing.best_ms, median_ms: timing.median_ms, peak_bytes, submitted_ms };
        Ok(serde_json::to_string(&timing).expect("plain numbers") + "\n")
    }

    fn machine(self) -> Result<Machine, Failure> {
        let precision = if self.precision == "bf16" { Precision::Bf16 } else { Precision::F32 };
        Ok(Machine::on(self.device, self.threads, precision).map_err(qkv_models::Error::from)?)
    }

    /// Times whole steps: zeroing gradients, forward, backward, Adam; on a GPU with gradients clipped to a norm of 1.
    /// Also returns the shortest time of forward and backward by themselves, which on a GPU is the time to submit them.
    fn time(
        self,
        machine: &Machine,
        StepTask { mut parameters, adam, loss }: StepTask,
    ) -> Result<(Timing, f64), Failure> {
        let pool = Pool::new();
        let (mut gradients, mut moments) = (Gradients::of(&parameters), Moments::of(&parameters));
        let parameters = &mut parameters;
        let (mut seed, mut outcome, mut submitted_ms) = (0, Ok(()), f64::INFINITY);
        let mut before = None;
        let step = || {
            let start = Instant::now();
            seed += 1;
            gradients.clear(machine);
            let mut tape = Tape::training(parameters, &mut gradients, &pool, machine, seed);
            if let Err(failure) = loss(&mut tape) {
                outcome = Err(failure);
            }
            tape.backward();
            drop(tape);
            submitted_ms = submitted_ms.min(start.elapsed().as_secs_f64() * 1e3);
            if self.device == Device::Cuda {
                // As in a run, the norm of a step is read only after the next step is submitted.
                let norm = adam.step_clipped(parameters, &mut gradients, &mut moments, 1e-3, 1.0, machine);
                before.replace(norm).map(Pending::read);
            } else {
                adam.step(parameters, &mut gradients, &mut moments, 1e-3, machine);
            }
        };
        let timing = match self.device {
            Device::Cuda => Timing::of_groups(self.seconds, GROUP, step, || drop(machine.check())),
            _ => Timing::of(self.seconds, step),
        };
        outcome.map(|()| (timing, submitted_ms))
    }
}

/// What a training step computes.
pub(crate) struct StepTask {
    pub parameters: Parameters<f32>,
    pub adam: AdamW,
    /// Records the loss of a batch.
    pub loss: LossOf,
}

type LossOf = Box<dyn Fn(&mut Tape<'_, f32>) -> Result<(), Failure>>;

impl StepModel {
    /// The task of a batch, or of one of `parts` micro-batches of it.
    pub fn task(&self, device: Device, parts: usize) -> Result<StepTask, Failure> {
        match self.sizes {
            Sizes::Gpt(sizes) => gpt(device, GptSizes { batch: sizes.batch / parts, ..sizes }),
            Sizes::Translator { batch } => translator(batch / parts),
        }
    }
}

fn refused(error: impl std::fmt::Display) -> Failure {
    Failure::new(format!("the model is invalid: {error}"))
}

/// Varied token ids, the same as on PyTorch's side.
fn tokens(vocab: usize, count: usize, step: usize, first: usize) -> Vec<u32> {
    (0..count).map(|at| ((at * step + first) % vocab) as u32).collect()
}

fn gpt(device: Device, sizes: GptSizes) -> Result<StepTask, Failure> {
    let GptSizes { vocab, width, layers, heads, length, batch } = sizes;
    let on_cuda = device == Device::Cuda;
    let mut parameters = Parameters::new();
    let mut at = Builder::new(&mut parameters, 1);
    let embedding = Embedding::new(&mut at.at("tok"), vocab, width, PositionKind::Learned, length).unscaled();
    let heads = Heads { query: heads, key: heads };
    let own = AttentionConfig::new(Attention::scaled_dot().mask(Mask::causal()), heads);
    let feed = if on_cuda { FeedKind::GeluTanh } else { FeedKind::Gelu };
    let config = BlockConfig { feed, ..BlockConfig::new(width, 4 * width, own) };
    let blocks: qkv::Result<Vec<Block>> =
        (0..layers).map(|layer| Block::new(&mut at.at(&format!("layers.{layer}")), &config)).collect();
    let blocks = blocks.map_err(refused)?;
    let norm = Norm::new(&mut at.at("norm"), width, NormKind::Layer, Norm::EPSILON);
    let head = if on_cuda { embedding.weight } else { Linear::new(&mut at.at("head"), width, vocab, false).weight };
    let count = batch * length;
    let (decoder_input, targets) = (tokens(vocab, count, 7919, 13), tokens(vocab, count, 104_729, 7));
    let adam = match on_cuda {
        true => AdamW { beta2: 0.95, epsilon: 1e-8, decay: 0.1, ..AdamW::default() },
        false => AdamW { beta2: 0.999, epsilon: 1e-8, decay: 0.01, ..AdamW::default() },
    };
    let loss = move |tape: &mut Tape<'_, f32>| -> Result<(), Failure> {
        let mut x = embedding.forward(tape, &decoder_input, length, 0); // (B, N, C)
        for block in &blocks {
            x = block.forward(tape, x, None, None, None).map_err(refused)?;
        }
        let x = norm.forward(tape, &x);
        let target = Target { ids: &targets, ignore: None, smoothing: 0.0, scale: 1.0 / targets.len() as f64 };
        tape.cross_entropy(&x, head, None, target);
        Ok(())
    };
    Ok(StepTask { parameters, adam, loss: Box::new(loss) })
}

fn translator(batch: usize) -> Result<StepTask, Failure> {
    let length = 16;
    let sizes = TransformerConfig { dropout: 0.3, attention_dropout: 0.3, ffn_dropout: 0.3, ..Default::default() };
    // No token of the data is padding: all of them count.
    let specials = SpecialTokens { pad: V as u32, bos: 1, eos: 2 };
    let config = ModelConfig::new(Architecture::Transformer(sizes), V + 1, specials);
    let (model, parameters) = Model::new(&config, 1).map_err(refused)?;
    let rows = |step, first| {
        let ids = tokens(V, batch * length, step, first);
        Rows { ids, lengths: vec![length; batch], length }
    };
    let batch = Batch {
        source: rows(7919, 13),
        decoder_input: rows(104_729, 7),
        targets: rows(15_485_863, 5).ids,
        packed: Vec::new(),
    };
    let scale = 1.0 / batch.targets.len() as f64;
    let loss = move |tape: &mut Tape<'_, f32>| model.loss(tape, &batch, 0.1, scale).map(drop).map_err(refused);
    Ok(StepTask { parameters, adam: AdamW::default(), loss: Box::new(loss) })
}
