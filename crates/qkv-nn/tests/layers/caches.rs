//! A cache in f16 agrees with one in f32 up to the rounding of keys, values and queries.

use super::gradients::numbers;
use qkv::{Attention, Bias, Mask};
use qkv_nn::layers::KvCache;
use qkv_nn::{AttendOptions, Heads, Machine, Parameters, Pool, Tape, Tensor};

const HEADS: Heads = Heads { query: 6, key: 2 };
const WIDTH: usize = 16;

fn floats(shape: &[usize], seed: u64) -> Tensor<f32> {
    Tensor::new(numbers(shape, seed).data().iter().map(|&x| x as f32).collect(), shape)
}

/// The outputs of three steps after a prompt of `prompt` tokens, with keys times `scale`.
fn steps(attention: &Attention, prompt: usize, scale: f32, half: bool, copied: bool) -> Vec<f32> {
    let (parameters, pool, machine) = (Parameters::<f32>::new(), Pool::new(), Machine::new(2));
    let mut cache = KvCache::new(1, HEADS, [WIDTH; 2]);
    if half {
        cache.keep_half();
    }
    let mut tape = Tape::inference(&parameters, &pool, &machine);
    let mut out = Vec::new();
    for (at, new) in [prompt, 1, 1, 1].into_iter().enumerate() {
        let shape = [1, new, HEADS.key * WIDTH];
        let [mut k, v] = [1, 2].map(|seed| floats(&shape, seed + 10 * at as u64));
        k.data_mut().iter_mut().for_each(|x| *x *= scale);
        cache.append(&k, &v).unwrap();
        if copied && at == 1 {
            cache.select(&[0, 0]);
            cache.select(&[1]);
        }
        if at > 0 {
            let mut q = floats(&[1, 1, HEADS.query * WIDTH], 3 + 10 * at as u64);
            q.data_mut().iter_mut().for_each(|x| *x /= scale);
            let start = cache.len() - 1;
            let options = AttendOptions { heads: HEADS, start, ..AttendOptions::new(attention) };
            let q = tape.constant(q);
            out.extend_from_slice(tape.attend_cached(&q, &cache, &options).unwrap().value().data());
        }
    }
    out
}

/// The largest difference, and the largest magnitude in `b`.
fn apart(a: &[f32], b: &[f32]) -> (f32, f32) {
    let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    (apart, b.iter().fold(0.0, |most, x| most.max(x.abs())))
}

#[test]
fn a_cache_in_f16_differs_by_its_rounding() {
    let causal = || Attention::scaled_dot().mask(Mask::causal());
    for attention in [causal(), causal().mask(Mask::window(40, 0)).softcap(5.0), causal().bias(Bias::alibi())] {
        for prompt in [1, 63, 900] {
            let whole = steps(&attention, prompt, 1.0, false, false);
            for copied in [false, true] {
                let (apart, most) = apart(&steps(&attention, prompt, 1.0, true, copied), &whole);
                // A number is rounded by 2⁻¹², a score of width 16 by a few times that, and its exponential likewise.
                assert!(apart <= most * 2e-3, "{prompt} tokens, {attention:?}: {apart} of {most}");
                assert!(apart > 0.0, "nothing was rounded");
            }
        }
    }
}

#[test]
fn keys_beyond_f16_are_kept_in_f32() {
    let attention = Attention::scaled_dot().mask(Mask::causal());
    let whole = steps(&attention, 70, 1e6, false, false);
    assert_eq!(steps(&attention, 70, 1e6, true, false), whole, "the first key is too large");
    let (_, most) = apart(&whole, &whole);
    assert!(most > 0.0 && most.is_finite());
}
