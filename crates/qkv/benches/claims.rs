//! The figures that the README claims, measured: `cargo bench -p qkv`. Times are the best of several; memory is what
//! the process allocates beyond inputs and outputs, measured by a counting allocator.

use qkv::reference::Reference;
use qkv::{Attention, Features, Inputs, Lsh, Mask, Output, OutputMut, Scratch, Tensor, Upstream, ViewMut};
use qkv_simd::counting::Counting;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

/// Milliseconds, best of several, and MiB at the peak beyond what was held before and what is returned.
fn measure<R>(rounds: usize, mut f: impl FnMut() -> R) -> (f64, f64) {
    let (mut best, mut beyond) = (f64::INFINITY, 0);
    for _ in 0..rounds {
        let start = Instant::now();
        let (_, held) = ALLOCATOR.beyond(|| {
            let result = f();
            best = best.min(start.elapsed().as_secs_f64() * 1e3);
            result
        });
        beyond = held;
    }
    (best, beyond as f64 / (1 << 20) as f64)
}

fn main() {
    let only = std::env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    let asked = |name: &str| name.contains(&only);
    let x = |n: usize, d: usize, seed| Tensor::<f32, 4>::randn([1, 1, n, d], seed);
    println!("{} threads, {}\n", rayon::current_num_threads(), qkv::Isa::best());

    if asked("gflops") {
        println!("{:<28}{:>12}{:>12}{:>12}{:>12}", "b h n d", "fwd ms", "GFLOP/s", "bwd ms", "GFLOP/s");
        for (b, h, n, d) in [(8, 8, 512, 64), (1, 8, 2048, 64), (1, 1, 8192, 64), (1, 8, 2048, 128), (32, 8, 128, 64)] {
            for causal in [false, true] {
                let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([b, h, n, d], seed));
                let attention = Attention::scaled_dot().mask(if causal { Mask::causal() } else { Mask::full() });
                let inputs = || Inputs::new(&q, &k, &v);
                let out = attention.forward(inputs()).unwrap();
                let (forward, _) = measure(5, || attention.forward(inputs()).unwrap());
                let (backward, _) = measure(3, || attention.backward(inputs(), &out, Upstream::new(&d_out)).unwrap());
                let flop = 4.0 * (b * h * n * n * d) as f64 / if causal { 2.0 } else { 1.0 };
                println!(
                    "{:<28}{forward:>12.2}{:>12.0}{backward:>12.2}{:>12.0}",
                    format!("{b} {h} {n} {d}{}", if causal { " causal" } else { "" }),
                    flop / forward / 1e6,
                    2.5 * flop / backward / 1e6
                );
            }
        }
    }

    if asked("memory") {
        let (n, d) = (32_768, 64);
        let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| x(n, d, seed));
        let attention = Attention::scaled_dot();
        let inputs = || Inputs::new(&q, &k, &v);
        let (forward, forward_memory) = measure(1, || attention.forward(inputs()).unwrap());
        let out = attention.forward(inputs()).unwrap();
        let (backward, backward_memory) =
            measure(1, || attention.backward(inputs(), &out, Upstream::new(&d_out)).unwrap());
        println!("\nn = {n}, one head, d = {d}, f32");
        println!("  forward  {forward:>9.0} ms  {forward_memory:>6.1} MiB beyond inputs and outputs");
        println!("  backward {backward:>9.0} ms  {backward_memory:>6.1} MiB");
    }

    if asked("sparse") {
        println!("\nsparse patterns, one head, d = 64, f32, forward (and backward)");
        let mut last: Option<[f64; 4]> = None;
        for n in [32_768, 65_536] {
            let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| x(n, 64, seed));
            let inputs = || Inputs::new(&q, &k, &v);
            let stride = (n as f64).sqrt() as usize;
            let mut times = [0.0; 4];
            for (at, (name, mask)) in
                [("longformer 512, 16 global", Mask::longformer(512, 0..16)), ("strided √n", Mask::strided(stride))]
                    .into_iter()
                    .enumerate()
            {
                let attention = Attention::scaled_dot().mask(mask);
                let out = attention.forward(inputs()).unwrap();
                let (forward, memory) = measure(5, || attention.forward(inputs()).unwrap());
                let (backward, _) = measure(3, || attention.backward(inputs(), &out, Upstream::new(&d_out)).unwrap());
                times[at * 2] = forward;
                times[at * 2 + 1] = backward;
                println!("  n = {n:<7} {name:<28}{forward:>9.1} ms {memory:>7.1} MiB   backward {backward:>9.1} ms");
            }
            if let Some(last) = last {
                println!(
                    "  twice the length costs: longformer {:.2} (backward {:.2}), strided {:.2} (backward {:.2})",
                    times[0] / last[0],
                    times[1] / last[1],
                    times[2] / last[2],
                    times[3] / last[3]
                );
            } else {
                let full = Attention::scaled_dot();
                // As many rounds as the patterns get: the best of five against a single run would flatter them.
                let (forward, _) = measure(5, || full.forward(inputs()).unwrap());
                println!("  n = {n:<7} {:<28}{forward:>9.1} ms", "full");
                println!("  faster than full: longformer {:.1}, strided {:.1}", forward / times[0], forward / times[2]);
            }
            last = Some(times);
        }
    }

    if asked("selections") {
        let (n, d) = (4096, 64);
        let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| x(n, d, seed));
        let inputs = || Inputs::new(&q, &k, &v).seed(1);
        println!("\nselections at n = {n}, one head, d = {d}, f32");
        let mut soft = [0.0; 2];
        for (name, attention) in [
            ("softmax", Attention::scaled_dot()),
            ("hard", Attention::scaled_dot().hard()),
            ("sampled", Attention::scaled_dot().sample()),
            ("top-k, k = 32", Attention::scaled_dot().top_k(32)),
            ("sparsemax", Attention::scaled_dot().sparsemax()),
        ] {
            let out = attention.forward(inputs()).unwrap();
            let (forward, memory) = measure(3, || attention.forward(inputs()).unwrap());
            let (backward, _) = measure(3, || attention.backward(inputs(), &out, Upstream::new(&d_out)).unwrap());
            if name == "softmax" {
                soft = [forward, backward];
            }
            let times = [forward / soft[0], backward / soft[1]];
            println!(
                "  {name:<16}{forward:>9.1} ms {:>6.2} × softmax {memory:>7.1} MiB   backward {backward:>9.1} ms {:>6.2} ×",
                times[0], times[1]
            );
        }
    }

    if asked("hashing") {
        println!(
            "\nhash buckets of about 64, 2 rounds, one head, d = 64, f32, hashing included, scratch and outputs given"
        );
        let mut first = None;
        for n in [16_384, 65_536, 262_144] {
            let [qk, v] = [1, 2].map(|seed| x(n, 64, seed));
            let lsh = Lsh { buckets: n / 64, rounds: 2, seed: 1 };
            let attention = Attention::scaled_dot().mask(Mask::lsh(lsh));
            let (scratch, mut values, mut lse) = (Scratch::new(), vec![0.0; n * 64], vec![0.0; n]);
            let (time, _) = measure(2_097_152 / n, || {
                let buckets = lsh.hash(&qk).unwrap();
                let into = OutputMut::new(
                    ViewMut::new(&mut values, [1, 1, n, 64]).unwrap(),
                    ViewMut::new(&mut lse, [1, 1, n, 1]).unwrap(),
                );
                let inputs = Inputs::new(&qk, &qk, &v).buckets(&buckets, &buckets);
                attention.forward_into(inputs, into, &scratch, rayon::current_num_threads()).unwrap();
            });
            let buckets = lsh.hash(&qk).unwrap();
            let inputs = || Inputs::new(&qk, &qk, &v).buckets(&buckets, &buckets);
            let (_, memory) = measure(1, || attention.forward(inputs()).unwrap());
            let per_token = time * 1e3 / n as f64;
            let relative = per_token / *first.get_or_insert(per_token);
            println!("  n = {n:<8}{time:>9.1} ms {per_token:>7.2} µs a token ({relative:.2}) {memory:>7.1} MiB");
        }
    }

    if asked("linear") {
        println!(
            "\nlinear attention, one head, d = 64, f32, outputs given: ns a token, and the longer over the shorter"
        );
        for (name, features) in [("elu", Features::Elu), ("favor:64", Features::Favor { count: 64, seed: 1 })] {
            for causal in [false, true] {
                let attention = Attention::linear(features).mask(if causal { Mask::causal() } else { Mask::full() });
                let mut runs = [16_384, 262_144].map(|n| LinearRun::new(&attention, n));
                // In turns, with the same amount of work each, so that neither is favored by chance.
                for _ in 0..12 {
                    for run in &mut runs {
                        run.round(&attention);
                    }
                }
                let [short, long] = runs.map(|run| (run.forward, run.backward, run.memory));
                println!(
                    "  {:<18}forward {:>5.0} → {:>5.0} ({:.2})   backward {:>5.0} → {:>5.0} ({:.2})   {:.1} → {:.1} MiB",
                    format!("{name}{}", if causal { " causal" } else { "" }),
                    short.0,
                    long.0,
                    long.0 / short.0,
                    short.1,
                    long.1,
                    long.1 / short.1,
                    short.2,
                    long.2,
                );
            }
        }
    }

    if asked("formula") {
        let (n, d) = (4096, 64);
        let [q, k, v] = [1, 2, 3].map(|seed| x(n, d, seed));
        let attention = Attention::scaled_dot();
        let (exact, exact_memory) = measure(3, || attention.forward(Inputs::new(&q, &k, &v)).unwrap());
        let (formula, formula_memory) =
            measure(1, || Reference::<f32>::exact().forward(&attention, Inputs::new(&q, &k, &v)).unwrap().output);
        println!(
            "\nn = {n}: exact engine {exact:.1} ms, {exact_memory:.2} MiB; materialized formula {formula:.0} ms, {formula_memory:.0} MiB"
        );
        println!("  {:.0} times faster, {:.0} times less memory", formula / exact, formula_memory / exact_memory);
    }
}

/// Linear attention over one length: its data, and the best ns per token so far.
struct LinearRun {
    n: usize,
    tensors: [Tensor<f32, 4>; 4],
    out: Output<f32>,
    scratch: Scratch<f32>,
    forward: f64,
    backward: f64,
    memory: f64,
}

impl LinearRun {
    fn new(attention: &Attention, n: usize) -> Self {
        let tensors = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 1, n, 64], seed));
        let out = attention.forward(Inputs::new(&tensors[0], &tensors[1], &tensors[2])).unwrap();
        let best = f64::INFINITY;
        LinearRun { n, tensors, out, scratch: Scratch::new(), forward: best, backward: best, memory: 0.0 }
    }

    fn round(&mut self, attention: &Attention) {
        let LinearRun { n, tensors: [q, k, v, d_out], out, scratch, .. } = self;
        let (n, threads) = (*n, rayon::current_num_threads());
        let inputs = || Inputs::new(&*q, &*k, &*v);
        let (forward, memory) = measure(262_144 / n, || {
            let lse = ViewMut::new(out.lse.data_mut(), [1, 1, n, 1]).unwrap();
            let into = OutputMut::new(&mut out.values, lse);
            attention.forward_into(inputs(), into, scratch, threads).unwrap();
        });
        let (backward, _) = measure((65_536 / n).max(1), || {
            attention.backward_with(inputs(), out, Upstream::new(&*d_out), scratch, threads).unwrap()
        });
        self.forward = self.forward.min(forward * 1e6 / n as f64);
        self.backward = self.backward.min(backward * 1e6 / n as f64);
        self.memory = self.memory.max(memory);
    }
}
