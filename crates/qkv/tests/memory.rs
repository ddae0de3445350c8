//! Promise 2: memory is linear in the sequence. At n = 32,768 a matrix of n × n numbers would be 4 GiB.

use qkv::{Attention, Features, Inputs, Mask, Pool, Tensor, Upstream};
use qkv_simd::counting::Counting;
use std::sync::Mutex;

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const MIB: usize = 1 << 20;

/// The count is the process's, so one test at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn a_long_head_needs_at_most_64_mib_beyond_inputs_and_outputs() {
    let _guard = ONE_AT_A_TIME.lock();
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 1, 32_768, 64], seed));
    let attention = Attention::scaled_dot();
    let inputs = || Inputs::new(&q, &k, &v);
    let (out, forward) = ALLOCATOR.beyond(|| attention.forward(inputs()).unwrap());
    assert!(forward <= 64 * MIB, "forward held {} MiB", forward / MIB);
    let (_, backward) = ALLOCATOR.beyond(|| attention.backward(inputs(), &out, Upstream::new(&d_out)).unwrap());
    assert!(backward <= 64 * MIB, "backward held {} MiB", backward / MIB);
}

#[test]
fn a_full_head_needs_no_more_than_a_windowed_one() {
    let _guard = ONE_AT_A_TIME.lock();
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 1, 8192, 16], seed));
    let inputs = || Inputs::new(&q, &k, &v);
    let held = |attention: Attention| {
        let (out, forward) = ALLOCATOR.beyond(|| attention.forward(inputs()).unwrap());
        let (_, backward) = ALLOCATOR.beyond(|| attention.backward(inputs(), &out, Upstream::new(&d_out)).unwrap());
        (forward, backward)
    };
    let full = held(Attention::scaled_dot());
    let windowed = held(Attention::scaled_dot().mask(Mask::window(100, 100)));
    // Tasks that run at the same time differ a little in what they hold; n × n would be 256 MiB.
    assert!(full.0 <= windowed.0 + MIB && full.1 <= windowed.1 + MIB, "{full:?} {windowed:?}");
}

#[test]
fn gathered_patterns_are_linear_too() {
    let _guard = ONE_AT_A_TIME.lock();
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 1, 32_768, 16], seed));
    let attention = Attention::scaled_dot().mask(Mask::causal() & Mask::strided(181));
    let inputs = || Inputs::new(&q, &k, &v);
    let (out, forward) = ALLOCATOR.beyond(|| attention.forward(inputs()).unwrap());
    let (_, backward) = ALLOCATOR.beyond(|| attention.backward(inputs(), &out, Upstream::new(&d_out)).unwrap());
    assert!(forward.max(backward) <= 64 * MIB, "{} and {} MiB", forward / MIB, backward / MIB);
}

#[test]
fn linear_attention_holds_a_state_for_every_span_and_no_more() {
    let _guard = ONE_AT_A_TIME.lock();
    let [q, k, v, d_out] = [1, 2, 3, 4].map(|seed| Tensor::<f32, 4>::randn([1, 1, 65_536, 16], seed));
    let attention = Attention::linear(Features::Elu).mask(Mask::causal());
    let inputs = || Inputs::new(&q, &k, &v);
    let (out, forward) = ALLOCATOR.beyond(|| attention.forward(inputs()).unwrap());
    let (_, backward) = ALLOCATOR.beyond(|| attention.backward(inputs(), &out, Upstream::new(&d_out)).unwrap());
    assert!(forward.max(backward) <= 16 * MIB, "{} and {} KiB", forward / 1024, backward / 1024);
}

#[test]
fn a_picture_needs_memory_for_its_grid_and_sides_only() {
    let _guard = ONE_AT_A_TIME.lock();
    let x = Tensor::<f32, 4>::randn([1, 4, 16_384, 16], 1);
    let attention = Attention::scaled_dot().mask(Mask::window(300, 300));
    let inputs = || Inputs::new(&x, &x, &x);
    let out = attention.forward(inputs()).unwrap();
    let weights = attention.weights(inputs(), &out).unwrap();
    let all = 0..16_384;
    let (picture, held) = ALLOCATOR.beyond(|| weights.pooled(0, 2, all.clone(), all, [64, 64], Pool::Max).unwrap());
    assert_eq!(picture.shape(), [64, 64]);
    assert!(held <= 8 * MIB, "the picture held {} KiB", held / 1024);
}
