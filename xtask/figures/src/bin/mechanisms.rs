//! Measures every mechanism at several lengths and prints the page `docs/mechanisms.md`: `cargo xtask mechanisms`.
//!
//! One head of width 64 in f32, random queries, keys and values, forward pass. The error is the relative error of the
//! output against full softmax attention on the same inputs. With random inputs, every key matters a little, so it
//! measures how much a mechanism leaves out, not how well a model trained with it would do.

use qkv::{Attention, Bias, BigBird, Features, Inputs, Lsh, Mask, Output, Tensor};
use qkv_simd::counting::Counting;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const D: usize = 64;

/// The inputs of one length, including those that only some mechanisms need.
struct Given {
    n: usize,
    q: Tensor<f32, 4>,
    k: Tensor<f32, 4>,
    v: Tensor<f32, 4>,
    w: Tensor<f32, 2>,
    w_a: Tensor<f32, 2>,
    v_score: Vec<f32>,
    center: Vec<f32>,
}

impl Given {
    fn new(n: usize) -> Given {
        let [q, k, v] = [1, 2, 3].map(|seed| Tensor::randn([1, 1, n, D], seed));
        let small = |rows: usize, seed| Tensor::<f32, 2>::randn([rows, D], seed).map(|x| x / (D as f32).sqrt());
        let center = (0..n).map(|i| i as f32 + 0.25).collect();
        Given { n, q, k, v, w: small(D, 4), w_a: small(16, 5), v_score: vec![0.25; 16], center }
    }

    /// Runs a mechanism once and returns its output, milliseconds, bytes allocated beyond inputs and outputs, and the
    /// fraction of tiles touched.
    fn run(&self, attention: &Attention) -> qkv::Result<(Output<f32>, f64, usize, f64)> {
        let start = Instant::now();
        let (result, memory) = ALLOCATOR.beyond(|| {
            let mut inputs = Inputs::new(&self.q, &self.k, &self.v).seed(1);
            let mut buckets = None;
            match attention.score {
                qkv::Score::General => inputs = inputs.w(&self.w),
                qkv::Score::Additive => inputs = inputs.w_q(&self.w_a).w_k(&self.w_a).v_score(&self.v_score),
                _ => {}
            }
            if attention.local.is_some() {
                inputs = inputs.center(&self.center);
            }
            if let Mask::Lsh(lsh) = attention.mask {
                buckets = Some((lsh.hash(&self.q)?, lsh.hash(&self.k)?));
            }
            if let Some((queries, keys)) = &buckets {
                inputs = inputs.buckets(queries, keys);
            }
            let out = attention.forward(inputs)?;
            let milliseconds = start.elapsed().as_secs_f64() * 1e3;
            let tiles = attention.tiles(inputs)?;
            let touched = (tiles.partial + tiles.full) as f64;
            Ok::<_, qkv::Error>((out, milliseconds, touched / (touched + tiles.empty as f64)))
        });
        let (out, milliseconds, touched) = result?;
        Ok((out, milliseconds, memory, touched))
    }
}

/// Every mechanism with its kind and name, for a sequence of length `n`.
fn mechanisms(n: usize) -> Vec<(&'static str, &'static str, Attention)> {
    let stride = (n as f64).sqrt() as usize;
    let plain = Attention::scaled_dot;
    let bigbird = BigBird { block: 64, window: 3, globals: 1, random: 3, seed: 1 };
    vec![
        ("score", "scaled dot", plain()),
        ("score", "general", Attention::general()),
        ("score", "additive, A = 16", Attention::additive()),
        ("score", "cosine, scale 8", Attention::cosine().scale(8.0)),
        ("score", "distance, scale 1/16", Attention::distance().scale(1.0 / 16.0)),
        ("bias", "ALiBi", plain().bias(Bias::alibi())),
        ("mask", "causal", plain().mask(Mask::causal())),
        ("mask", "window 256 + 256", plain().mask(Mask::window(256, 256))),
        ("mask", "strided √n", plain().mask(Mask::strided(stride))),
        ("mask", "fixed √n, 4", plain().mask(Mask::fixed(stride, 4))),
        ("mask", "Longformer 512, 16 global", plain().mask(Mask::longformer(512, 0..16))),
        ("mask", "BigBird 64, 3, 1, 3", plain().mask(Mask::bigbird(bigbird))),
        ("mask", "LSH, buckets of 64, 2 rounds", plain().mask(Mask::lsh(Lsh { buckets: n / 64, rounds: 2, seed: 1 }))),
        ("select", "hard", plain().hard()),
        ("select", "sampled", plain().sample()),
        ("select", "top-k 32", plain().top_k(32)),
        ("select", "sparsemax", plain().sparsemax()),
        ("local", "predictive, D = 256", plain().local(256)),
        ("linear", "elu + 1", Attention::linear(Features::Elu)),
        ("linear", "elu + 1, causal", Attention::linear(Features::Elu).mask(Mask::causal())),
        ("linear", "FAVOR+ of 256", Attention::linear(Features::Favor { count: 256, seed: 1 })),
    ]
}

fn relative_error(out: &Output<f32>, truth: &Output<f32>) -> f64 {
    let square = |x: f64| x * x;
    let pairs = || out.values.data().iter().zip(truth.values.data());
    let apart: f64 = pairs().map(|(a, b)| square(f64::from(a - b))).sum();
    let size: f64 = pairs().map(|(_, b)| square(f64::from(*b))).sum();
    (apart / size).sqrt()
}

fn main() -> qkv::Result<()> {
    println!("# Every mechanism against length\n");
    println!(
        "Generated by `cargo xtask mechanisms`: {} threads, {}. One head, d = {D}, f32, forward.",
        rayon::current_num_threads(),
        qkv::Isa::best()
    );
    println!(
        "Memory is what the call allocated beyond inputs and outputs. *Touched* is the share of tiles that were computed."
    );
    println!(
        "The error is the output's relative error against full softmax attention (scaled dot) on the same random inputs."
    );
    println!(
        "With random inputs every key matters a little, so it measures how much a mechanism leaves out or changes, not how"
    );
    println!(
        "well a model trained with it does. Other scores and biases are different attentions and have no error.\n"
    );
    println!("| | mechanism | n | ms | MiB | touched | error |");
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: |");
    let lengths = [1024, 4096, 16_384, 65_536];
    let mut rows: Vec<Vec<String>> = vec![Vec::new(); mechanisms(1024).len()];
    for n in lengths {
        let given = Given::new(n);
        let mut truth = None;
        for (at, (kind, name, attention)) in mechanisms(n).into_iter().enumerate() {
            let mut best = given.run(&attention)?;
            // Short runs are noisy, so take the best of a few.
            for _ in 0..if n <= 4096 { 3 } else { 0 } {
                let again = given.run(&attention)?;
                if again.1 < best.1 {
                    best = again;
                }
            }
            let (out, milliseconds, memory, touched) = best;
            let error = match (&truth, kind) {
                (None, _) => "0.00".into(),
                (Some(_), "score" | "bias") => "—".into(),
                (Some(truth), _) => format!("{:.2}", relative_error(&out, truth)),
            };
            rows[at].push(format!(
                "| {kind} | {name} | {} | {milliseconds:.1} | {:.1} | {} | {error} |",
                given.n,
                memory as f64 / (1 << 20) as f64,
                if touched.is_nan() { "no tiles".into() } else { format!("{:.1} %", 100.0 * touched) }
            ));
            truth.get_or_insert(out);
            eprintln!("{}", rows[at].last().expect("just pushed"));
        }
    }
    rows.iter().flatten().for_each(|row| println!("{row}"));
    Ok(())
}
