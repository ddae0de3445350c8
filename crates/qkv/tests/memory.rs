//! Promise 2: memory is linear in the sequence. Each mechanism has a bound of about twice what it holds on two threads
//! beyond inputs and results; a matrix of n × n numbers would be 16 MiB at the
//! shortest of these lengths and a gigabyte at the longest.

use qkv::{Attention, Bias, BigBird, Features, Inputs, Mask, Pool, Scratch, Tensor, Upstream};
use qkv_simd::Isa;
use qkv_simd::counting::Counting;
use std::sync::Mutex;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const KIB: usize = 1 << 10;

/// What is held depends on how many tasks run at once.
const THREADS: usize = 2;

/// The count is the process's, so one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Holds a forward and a backward pass of one head to these bounds in KiB.
fn holds(name: &str, attention: &Attention, [n, width]: [usize; 2], bounds: [usize; 2]) {
    let _guard = ONE_AT_A_TIME.lock();
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 1, n, width], seed));
    let inputs = Inputs::new(&q, &k, &v);
    let (out, forward) =
        ALLOCATOR.beyond(|| attention.forward_with(inputs, &Scratch::new(), THREADS).expect("a forward pass"));
    let (_, backward) = ALLOCATOR.beyond(|| {
        let upstream = Upstream::new(&d_out);
        attention.backward_with(inputs, &out, upstream, &Scratch::new(), THREADS).expect("a backward pass")
    });
    println!("{name}: forward {} KiB, backward {} KiB", forward / KIB, backward / KIB);
    for (pass, held, bound) in [("forward", forward, bounds[0]), ("backward", backward, bounds[1])] {
        assert!(held <= bound * KIB, "{name}, {pass}: held {} KiB of {bound}", held / KIB);
    }
}

#[test]
fn memory_of_a_dense_head_is_linear() {
    holds("full", &Attention::scaled_dot(), [4096, 32], [2400, 3600]);
    holds("causal", &Attention::scaled_dot().mask(Mask::causal()), [4096, 32], [2400, 3600]);
    holds("ALiBi", &Attention::scaled_dot().bias(Bias::alibi()), [4096, 32], [2400, 3600]);
}

#[test]
fn memory_of_sparse_masks_is_linear() {
    let attention = |mask| Attention::scaled_dot().mask(mask);
    holds("window", &attention(Mask::window(100, 100)), [16_384, 16], [4400, 6700]);
    holds("strided", &attention(Mask::causal() & Mask::strided(181)), [16_384, 16], [11600, 17800]);
    holds("fixed", &attention(Mask::fixed(128, 4)), [16_384, 16], [7000, 15200]);
    holds("Longformer", &attention(Mask::longformer(128, [0, 1, 2, 3])), [16_384, 16], [4400, 6700]);
    let bigbird = BigBird { block: 64, window: 3, globals: 2, random: 3, seed: 1 };
    holds("BigBird", &attention(Mask::bigbird(bigbird)), [16_384, 16], [4400, 6700]);
}

#[test]
fn memory_of_other_scores_and_selections_is_linear() {
    holds("cosine", &Attention::cosine(), [2048, 32], [2300, 4000]);
    holds("distance", &Attention::distance(), [2048, 16], [720, 1150]);
    holds("hard", &Attention::scaled_dot().hard(), [2048, 16], [2800, 1400]);
    holds("top-k", &Attention::scaled_dot().top_k(8), [2048, 16], [3000, 1400]);
    holds("sparsemax", &Attention::scaled_dot().sparsemax(), [2048, 16], [2800, 1400]);
}

#[test]
fn memory_of_linear_attention_is_a_state_for_each_span() {
    holds("linear", &Attention::linear(Features::Elu), [16_384, 16], [800, 800]);
    holds("causal linear", &Attention::linear(Features::Elu).mask(Mask::causal()), [16_384, 16], [800, 800]);
}

#[test]
fn memory_of_pooled_weights_is_their_grid_and_sides() {
    let _guard = ONE_AT_A_TIME.lock();
    let x = Tensor::<f32, 4>::randn([1, 4, 16_384, 16], 1);
    let attention = Attention::scaled_dot().mask(Mask::window(300, 300));
    let inputs = || Inputs::new(&x, &x, &x);
    let out = attention.forward(inputs()).unwrap();
    let weights = attention.weights(inputs(), &out).unwrap();
    let all = 0..16_384;
    let (pooled, held) = ALLOCATOR.beyond(|| weights.pooled(0, 2, all.clone(), all, [64, 64], Pool::Max).unwrap());
    assert_eq!(pooled.shape(), [64, 64]);
    println!("pooled: {} KiB", held / KIB);
    // On AMX the packed keys are three bf16 terms of each number, over a depth of whole tiles.
    let bound = if Isa::best().name() == "amx" { 6600 } else { 2600 };
    assert!(held <= bound * KIB, "pooling held {} KiB", held / KIB);
}
