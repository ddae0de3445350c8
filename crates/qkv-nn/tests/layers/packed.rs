//! Each packed sequence gives the same result as alone.

use super::devices::devices;
use qkv::{Attention, Bias, Features, Lsh, Mask};
use qkv_cuda::Dtype;
use qkv_nn::layers::{AttentionConfig, Block, BlockConfig, Builder};
use qkv_nn::{Heads, Machine, Parameters, Pool, Tape, Tensor};

#[test]
fn sequences_of_several_lengths_are_what_each_is_alone() {
    let (width, lengths) = (16, [1usize, 3, 3, 3, 5, 9, 2]);
    for attention in [
        Attention::scaled_dot(),
        Attention::scaled_dot().mask(Mask::longformer(2, [0])),
        Attention::scaled_dot().bias(Bias::relative(2)),
        Attention::linear(Features::Elu),
        Attention::scaled_dot().mask(Mask::lsh(Lsh { buckets: 2, rounds: 1, seed: 1 })),
    ] {
        let mut parameters = Parameters::<f32>::new();
        let heads = Heads { query: 4, key: 2 };
        let config = BlockConfig::new(width, 24, AttentionConfig::new(attention.clone(), heads));
        let block = Block::new(&mut Builder::new(&mut parameters, 7), &config).unwrap();
        let pool = Pool::new();
        let total: usize = lengths.iter().sum();
        let rows: Vec<f32> = (0..total * width).map(|at| ((at * 37 % 101) as f32 - 50.0) / 40.0).collect();
        let on_device = devices().into_iter().map(|operations| Machine::new(1).on_cuda(operations));
        for machine in on_device.chain([Machine::new(2)]) {
            let bound = if machine.cuda().is_some_and(|cuda| cuda.dtype() == Dtype::Bf16) { 0.05 } else { 1e-5 };
            let mut tape = Tape::inference(&parameters, &pool, &machine);
            let x = tape.constant(Tensor::new(rows.clone(), &[1, total, width]));
            let together = block.forward_packed(&mut tape, x, &lengths).unwrap();
            let mut from = 0;
            for length in lengths {
                let part = rows[from * width..][..length * width].to_vec();
                let x = tape.constant(Tensor::new(part, &[1, length, width]));
                let alone = block.forward(&mut tape, x, None, None, None).unwrap();
                let found = &together.value().data()[from * width..][..length * width];
                let apart = found.iter().zip(alone.value().data()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(apart < bound, "{attention:?} {length}, {machine:?}: {apart}");
                from += length;
            }
        }
    }
}
