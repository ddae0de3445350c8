//! Parameters that are frozen, quantized or adapted, and segments that are computed twice.

use half::{bf16, f16};
use qkv::{Attention, Mask};
use qkv_nn::layers::{AttentionConfig, Block, BlockConfig, Builder, FeedKind};
use qkv_nn::{
    Activation, AdamW, Gradients, HalfMatrix, Heads, Init, Machine, Moments, Param, Parameters, Pool, Tape, Target,
    Tensor,
};
use qkv_simd::panels::PackedMatrix;
use qkv_simd::quantized::QuantizedMatrix;

fn numbers<T: qkv_nn::Float>(shape: &[usize], seed: u64) -> Tensor<T> {
    let data = qkv::Tensor::<f64, 1>::randn([shape.iter().product()], seed).into_data();
    Tensor::new(data.into_iter().map(T::of_f64).collect(), shape)
}

/// The loss of two adapted layers and a frozen one in between.
fn loss(parameters: &Parameters<f64>, gradients: &mut Gradients<f64>, [first, middle, head]: [Param; 3]) -> f64 {
    let (pool, machine) = (Pool::new(), Machine::new(2));
    let mut tape = Tape::training(parameters, gradients, &pool, &machine, 5);
    let x = tape.constant(numbers(&[2, 3, 6], 4));
    let x = tape.linear(&x, first, None, Activation::Gelu, 0.2);
    let x = tape.linear(&x, middle, None, Activation::Tanh, 0.0);
    let ids = [0, 3, 1, 2, 2, 0];
    let found = tape.cross_entropy(&x, head, None, Target { ids: &ids, ignore: None, smoothing: 0.1, scale: 1.0 });
    tape.backward();
    found.read().smoothed
}

#[test]
fn adapters_have_the_gradients_of_their_definition_and_what_is_frozen_has_none() {
    let mut parameters = Parameters::<f64>::new();
    let handles = [("a.weight", [5, 6]), ("b.weight", [5, 5]), ("c.weight", [4, 5])]
        .map(|(name, shape)| parameters.add(name, &shape, Init::Normal(0.5), 1));
    let adapters = [parameters.adapt(handles[0], 2, 1.5, 0.0, 7), parameters.adapt(handles[1], 3, 0.5, 0.3, 8)];
    for adapter in adapters {
        parameters.redraw(adapter.b, Init::Normal(0.4), 9);
    }
    parameters.freeze(handles[2]);
    let mut gradients = Gradients::of(&parameters);
    loss(&parameters, &mut gradients, handles);
    for frozen in handles {
        assert!(gradients.get(frozen).is_empty());
    }
    for param in adapters.iter().flat_map(|adapter| [adapter.a, adapter.b]) {
        for at in 0..parameters.get(param).len() {
            let mut moved = |by: f64| {
                parameters.get_mut(param)[at] += by;
                let mut ignored = Gradients::of(&parameters);
                let found = loss(&parameters, &mut ignored, handles);
                parameters.get_mut(param)[at] -= by;
                found
            };
            let expected = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            let found = gradients.get(param)[at];
            assert!((found - expected).abs() < 1e-7 + 2e-6 * expected.abs(), "{param:?}[{at}]: {found} {expected}");
        }
    }
}

#[test]
fn a_merged_matrix_computes_what_it_did_with_its_adapter() {
    let mut parameters = Parameters::<f64>::new();
    let w = parameters.add("w.weight", &[4, 6], Init::Xavier, 1);
    let adapter = parameters.adapt(w, 2, 2.0, 0.5, 3);
    parameters.redraw(adapter.b, Init::Normal(1.0), 2);
    let (pool, machine) = (Pool::new(), Machine::new(1));
    let forward = |parameters: &Parameters<f64>| {
        let mut tape = Tape::inference(parameters, &pool, &machine);
        let x = tape.constant(numbers(&[3, 6], 1));
        tape.linear(&x, w, None, Activation::Relu, 0.0).value().data().to_vec()
    };
    let before = forward(&parameters);
    parameters.merge(w);
    assert_eq!((parameters.adapter(w), parameters.trained_count()), (None, 0));
    for (x, y) in before.iter().zip(forward(&parameters)) {
        assert!((x - y).abs() < 1e-12, "{x} {y}");
    }
}

#[test]
fn a_step_leaves_what_is_frozen_and_scales_the_rate_of_the_rest() {
    let mut parameters = Parameters::<f64>::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| parameters.add(name, &[4, 4], Init::Xavier, 1));
    parameters.freeze(a);
    parameters.set_rate(b, 0.5);
    let before = [a, b, c].map(|param| parameters.get(param).to_vec());
    let (pool, machine) = (Pool::new(), Machine::new(2));
    let (mut gradients, mut moments) = (Gradients::of(&parameters), Moments::of(&parameters));
    assert_eq!((moments.first[0].len(), moments.first[1].len()), (0, 16));
    let mut tape = Tape::training(&parameters, &mut gradients, &pool, &machine, 1);
    let x = tape.constant(numbers(&[2, 4], 1));
    let x = [a, b, c].iter().fold(x, |x, &w| tape.linear(&x, w, None, Activation::None, 0.0));
    tape.seed(&x, numbers(&[2, 4], 2));
    tape.backward();
    drop(tape);
    AdamW { decay: 0.1, epsilon: 0.0, ..AdamW::default() }.step(
        &mut parameters,
        &mut gradients,
        &mut moments,
        0.01,
        &machine,
    );
    assert_eq!(parameters.get(a), before[0]);
    // The first step of Adam has the size of the learning rate, whatever the gradient, plus the decay.
    for (param, before, rate) in [(b, &before[1], 0.005), (c, &before[2], 0.01)] {
        for (x, before) in parameters.get(param).iter().zip(before) {
            assert!(((x - before * (1.0 - rate * 0.1)).abs() / rate - 1.0).abs() < 1e-6);
        }
    }
}

#[test]
fn a_matrix_in_fewer_bits_alone_computes_and_passes_gradients_as_its_widened_values() {
    let rounded = |values: &[f32]| values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<bf16>>();
    let halved = |values: &[f32]| values.iter().map(|&x| f16::from_f32(x)).collect::<Vec<f16>>();
    for bits in [4, 8, 16, 17] {
        let mut parameters = Parameters::<f32>::new();
        let w = parameters.add("w.weight", &[40, 64], Init::Normal(0.3), 1);
        let values = parameters.get(w).to_vec();
        match bits {
            4 => parameters.set_quantized(w, QuantizedMatrix::rounded4(64, &values).unwrap()),
            8 => parameters.set_quantized(w, QuantizedMatrix::rounded8(64, &values).unwrap()),
            16 => parameters.set_half(w, HalfMatrix::Bf16(PackedMatrix::new(&rounded(&values), 64))),
            _ => parameters.set_half(w, HalfMatrix::F16(PackedMatrix::new(&halved(&values), 64))),
        }
        parameters.keep_stored(w);
        assert!(parameters.get(w).is_empty() && parameters.count() == 2560 && !parameters.is_trained(w));
        assert!(parameters.values(w).iter().zip(&values).all(|(x, value)| (x - value).abs() < 0.1));
        let mut dense = parameters.clone();
        dense.get_mut(w);
        dense.freeze(w);
        assert_eq!(dense.get(w), &parameters.values(w)[..]);
        let run = |parameters: &Parameters<f32>| {
            let (pool, machine, mut gradients) = (Pool::new(), Machine::new(2), Gradients::of(parameters));
            let mut tape = Tape::training(parameters, &mut gradients, &pool, &machine, 1);
            let x = tape.input(numbers(&[5, 64], 3));
            let y = tape.linear(&x, w, None, Activation::Tanh, 0.0);
            tape.seed(&y, numbers(&[5, 40], 4));
            tape.backward();
            (y.value().data().to_vec(), tape.gradient(&x).unwrap().data().to_vec())
        };
        assert_eq!(run(&parameters), run(&dense));
    }
}

#[test]
fn layers_of_the_same_input_together_have_the_bits_of_each_alone() {
    // Matrices of which none, one or both are in fewer bits, of different kinds.
    for [quantized, half] in [[false, false], [true, false], [true, true]] {
        let mut parameters = Parameters::<f32>::new();
        let [w, v] = ["w.weight", "v.weight"].map(|name| parameters.add(name, &[700, 640], Init::Normal(0.3), 1));
        let b = parameters.add("b.bias", &[700], Init::Normal(0.3), 1);
        if quantized {
            let matrix = QuantizedMatrix::rounded8(640, parameters.get(w)).unwrap();
            parameters.set_quantized(w, matrix);
        }
        if half {
            let rounded: Vec<bf16> = parameters.get(v).iter().map(|&x| bf16::from_f32(x)).collect();
            parameters.set_half(v, HalfMatrix::Bf16(PackedMatrix::new(&rounded, 640)));
        }
        let layers = [(w, Some(b)), (v, None)];
        for (training, rows) in [(true, 100), (true, 1), (false, 1), (false, 3), (false, 40)] {
            let run = |together: bool, threads: usize| {
                let (pool, machine, mut gradients) = (Pool::new(), Machine::new(threads), Gradients::of(&parameters));
                let mut tape = match training {
                    true => Tape::training(&parameters, &mut gradients, &pool, &machine, 1),
                    false => Tape::inference(&parameters, &pool, &machine),
                };
                let x = tape.input(numbers(&[rows, 1, 640], 3));
                let ys = match together {
                    true => tape.linear_together(&x, layers),
                    false => layers.map(|(w, b)| tape.linear(&x, w, b, Activation::None, 0.0)),
                };
                let mut found = ys.each_ref().map(|y| y.value().data().to_vec()).to_vec();
                if training {
                    ys.iter().for_each(|y| tape.seed(y, numbers(&[rows, 1, 700], 4)));
                    tape.backward();
                    found.push(tape.gradient(&x).unwrap().data().to_vec());
                    drop(tape);
                    found.extend([w, v, b].map(|param| gradients.get(param).to_vec()));
                }
                found
            };
            let alone = run(false, 1);
            for (together, threads) in [(true, 1), (true, 5), (false, 5)] {
                assert!(run(together, threads) == alone, "{quantized} {half} {training} {rows} {together} {threads}");
            }
        }
    }
}

#[test]
fn segments_that_are_computed_again_have_the_same_gradients_to_the_bit() {
    let mut parameters = Parameters::<f32>::new();
    let attention = Attention::scaled_dot().mask(Mask::causal()).dropout(0.2);
    let heads = Heads { query: 2, key: 2 };
    let config = BlockConfig {
        feed: FeedKind::SwiGlu,
        dropout: 0.1,
        inner_dropout: 0.1,
        ..BlockConfig::new(16, 32, AttentionConfig::new(attention, heads))
    };
    let mut at = Builder::new(&mut parameters, 1);
    let blocks: Vec<Block> =
        (0..3).map(|layer| Block::new(&mut at.at(&format!("layers.{layer}")), &config).unwrap()).collect();
    let run = |again: bool| {
        let (pool, machine, mut gradients) = (Pool::new(), Machine::new(2), Gradients::of(&parameters));
        let mut tape = Tape::training(&parameters, &mut gradients, &pool, &machine, 3);
        let input = tape.input(numbers(&[2, 12, 16], 1));
        let mut x = input.clone();
        for block in &blocks {
            x = match again {
                true => {
                    let block = block.clone();
                    tape.recomputed(x, move |tape, x| block.forward(tape, x, None, None, None)).unwrap()
                }
                false => block.forward(&mut tape, x, None, None, None).unwrap(),
            };
        }
        let out = x.value().data().to_vec();
        tape.seed(&x, numbers(&[2, 12, 16], 2));
        drop(x);
        tape.backward();
        let d_x = tape.gradient(&input).unwrap().data().to_vec();
        drop(tape);
        let all: Vec<Vec<f32>> = parameters.all().map(|param| gradients.get(param).to_vec()).collect();
        (out, d_x, all)
    };
    assert!(run(false) == run(true));
}
