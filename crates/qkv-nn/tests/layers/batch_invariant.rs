//! Batch-invariant attention: the bits of a query depend neither on the sequences beside its own nor on how far they
//! are padded.

use super::devices::devices;
use super::gradients::numbers;
use qkv::{Attention, Bias, Mask};
use qkv_cuda::operations::{Array, AttentionCall, Kind, Operations};

const HEADS: [usize; 2] = [4, 2];

/// The output of the first sequence, whose first `seen` of `padded` keys are visible, with this many queries; after the
/// queries and keys that are `real` come others, as padding and as a second sequence.
fn first(
    operations: &Operations,
    attention: &Attention,
    width: usize,
    [real, queries, seen, padded, batch]: [usize; 5],
    step: bool,
) -> Vec<f32> {
    let rows = |heads: usize, real: usize, padded: usize, seed: u64| -> Array {
        let own = numbers(&[real, heads * width], seed);
        let mut all = numbers(&[batch, padded, heads * width], seed + 10);
        all.data_mut()[..real * heads * width].copy_from_slice(own.data());
        operations.upload_activations(&all.data().iter().map(|&x| x as f32).collect::<Vec<_>>())
    };
    let mut lengths = vec![padded as i32; batch];
    lengths[0] = seen as i32;
    let call = AttentionCall {
        attention: attention.clone(),
        inputs: [rows(HEADS[0], real, queries, 1), rows(HEADS[1], seen, padded, 2), rows(HEADS[1], seen, padded, 3)],
        batch,
        lengths: [queries, padded],
        heads: HEADS,
        key_lengths: Some(operations.upload(Kind::U32, &lengths, "a test")),
        segments: None,
        positions: None,
        parameters: [None, None, None],
        table_heads: 1,
        seed: None,
        backward: false,
        step,
    };
    let out = operations.attention(&call).unwrap();
    operations.read(&out.values.slice(0..real * HEADS[0] * width))
}

#[test]
fn padding_and_other_sequences_change_no_bit() {
    let lengths = || Attention::scaled_dot().mask(Mask::lengths());
    let near = || Attention::scaled_dot().mask(Mask::window(9, 9) & Mask::lengths());
    for operations in devices() {
        let operations = operations.batch_invariant(true);
        let kind = operations.activation_kind();
        for (width, attention) in [(64, lengths()), (24, near()), (8, lengths().bias(Bias::alibi()))] {
            // A step alone, in a batch, and with room for more keys than a split has.
            let of = |sizes: [usize; 5]| first(&operations, &attention, width, sizes, true);
            let alone = of([1, 1, 40, 40, 1]);
            for sizes in [[1, 1, 40, 130, 2], [1, 1, 40, 600, 1]] {
                assert_eq!(of(sizes), alone, "a step, {kind:?}, {width}, {sizes:?}, {attention:?}");
            }
            // One query and several, fewer and more than a tile has, and more than keys are split for.
            let of = |sizes: [usize; 5]| first(&operations, &attention, width, sizes, false);
            for real in [1, 5] {
                let alone = of([real, real, 17, 17, 1]);
                for sizes in [[real, 12, 17, 70, 2], [real, 7, 17, 600, 1]] {
                    assert_eq!(of(sizes), alone, "{kind:?}, {width}, {sizes:?}, {attention:?}");
                }
            }
        }
    }
}
