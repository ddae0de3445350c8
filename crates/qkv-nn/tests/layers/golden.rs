//! Layers compared with PyTorch's on the same weights: outputs and gradients, in f64. `tests/golden/make.py` computed
//! the values.

use qkv::{Attention, Mask};
use qkv_nn::layers::{
    AttentionConfig, Block, BlockConfig, Builder, FeedKind, Gru, MultiHead, NormKind, NormPlace, RecurrentAttention,
};
use qkv_nn::{
    Activation, AdamW, Angles, Gradients, Heads, Init, Machine, Moments, Parameters, Pool, Tape, Target, Tensor, Var,
};
use serde_json::Value;
use std::sync::LazyLock;

static CASES: LazyLock<Value> = LazyLock::new(|| {
    let file: Value = serde_json::from_str(include_str!("../golden/values.json")).expect("the file is JSON");
    file["cases"].clone()
});

/// As in `make.py`.
fn number(seed: u32, at: u32) -> f64 {
    let mut h = at.wrapping_mul(2654435761).wrapping_add(seed.wrapping_mul(2246822519)).wrapping_add(374761393);
    h ^= h >> 15;
    h = h.wrapping_mul(2246822507);
    h ^= h >> 13;
    h = h.wrapping_mul(3266489909);
    h ^= h >> 16;
    f64::from(h >> 16) / 16384.0 - 2.0
}

/// The seed of a name: the low half of its CRC-32, computed bit by bit.
fn seed_of(name: &str) -> u32 {
    let mut crc = u32::MAX;
    for byte in name.bytes() {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    !crc & 0xffff
}

fn made(name: &str, shape: &[usize], scale: f64) -> Vec<f64> {
    let seed = seed_of(name);
    (0..shape.iter().product::<usize>() as u32).map(|at| number(seed, at) * scale).collect()
}

fn tensor(name: &str, shape: &[usize]) -> Tensor<f64> {
    Tensor::new(made(name, shape, 1.0), shape)
}

fn filled(mut parameters: Parameters<f64>) -> Parameters<f64> {
    for param in parameters.all() {
        let values = made(parameters.name(param), parameters.shape(param), 0.3);
        parameters.get_mut(param).copy_from_slice(&values);
    }
    parameters
}

fn close(what: &str, found: &[f64], expected: &Value) {
    let expected: Vec<f64> = expected.as_array().expect(what).iter().map(|x| x.as_f64().expect(what)).collect();
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(
            (found - expected).abs() < 1e-10 * (1.0 + expected.abs()),
            "{what}[{at}]: {found}, PyTorch has {expected}"
        );
    }
}

/// Runs a layer forward and backward, and compares every result with PyTorch's.
fn check(
    name: &str,
    parameters: &Parameters<f64>,
    inputs: &[(&str, &[usize])],
    body: impl Fn(&mut Tape<'_, f64>, &[Var<f64>]) -> Var<f64>,
) {
    let case = &CASES[name];
    let (pool, machine, mut gradients) = (Pool::new(), Machine::new(2), Gradients::of(parameters));
    let mut tape = Tape::training(parameters, &mut gradients, &pool, &machine, 1);
    let vars: Vec<_> = inputs.iter().map(|(name, shape)| tape.input(tensor(name, shape))).collect();
    let out = body(&mut tape, &vars);
    close(&format!("{name}: out"), out.value().data(), &case["out"]);
    tape.seed(&out, tensor("d_out", out.shape()));
    tape.backward();
    let mut checked = 0;
    for ((input, _), var) in inputs.iter().zip(&vars) {
        if let Some(expected) = case["grad"].get(input) {
            close(&format!("{name}: gradient of {input}"), tape.gradient(var).expect("it flows").data(), expected);
            checked += 1;
        }
    }
    drop(tape);
    for param in parameters.all() {
        let what = format!("{name}: gradient of {}", parameters.name(param));
        close(&what, gradients.get(param), &case["grad"][parameters.name(param)]);
        checked += 1;
    }
    assert_eq!(checked, case["grad"].as_object().expect("gradients").len(), "{name}: every gradient is checked");
}

#[test]
fn multi_head_attention_is_that_of_pytorch() {
    let heads = Heads { query: 3, key: 3 };
    let layer = |attention: Attention| {
        let mut parameters = Parameters::new();
        let config = AttentionConfig::new(attention, heads);
        let layer = MultiHead::new(&mut Builder::new(&mut parameters, 1).at("mha"), 12, &config).unwrap();
        (layer, filled(parameters))
    };
    let (causal, parameters) = layer(Attention::scaled_dot().mask(Mask::causal()));
    check("attention self causal", &parameters, &[("x", &[2, 5, 12])], |tape, x| {
        causal.forward(tape, &x[0], &x[0], None, None, None).unwrap()
    });
    let (cross, parameters) = layer(Attention::scaled_dot());
    check("attention cross padded", &parameters, &[("x", &[2, 4, 12]), ("y", &[2, 6, 12])], |tape, x| {
        cross.forward(tape, &x[0], &x[1], Some(&[6, 3]), None, None).unwrap()
    });
}

#[test]
fn a_decoder_layer_is_that_of_pytorch() {
    for (name, norm, feed) in [
        ("decoder layer pre relu", NormPlace::Pre, FeedKind::Relu),
        ("decoder layer post gelu", NormPlace::Post, FeedKind::Gelu),
    ] {
        let attention = |attention| AttentionConfig::new(attention, Heads { query: 3, key: 3 });
        let own = attention(Attention::scaled_dot().mask(Mask::causal()));
        let cross = Some(attention(Attention::scaled_dot()));
        let config = BlockConfig { feed, norm, cross, ..BlockConfig::new(12, 20, own) };
        let mut parameters = Parameters::new();
        let block = Block::new(&mut Builder::new(&mut parameters, 1).at("b"), &config).unwrap();
        let parameters = filled(parameters);
        check(name, &parameters, &[("x", &[2, 5, 12]), ("y", &[2, 4, 12])], |tape, x| {
            block.forward(tape, x[0].clone(), None, None, Some((&x[1], None))).unwrap()
        });
    }
}

#[test]
fn a_layer_with_rotary_positions_shared_keys_and_a_gate_is_that_of_pytorch() {
    let own = AttentionConfig {
        bias: false,
        out_bias: false,
        ..AttentionConfig::new(Attention::scaled_dot().mask(Mask::causal()), Heads { query: 4, key: 2 })
    };
    let config = BlockConfig {
        feed: FeedKind::SwiGlu,
        feed_bias: false,
        norm_kind: NormKind::Rms,
        epsilon: 1e-6,
        ..BlockConfig::new(16, 20, own)
    };
    let mut parameters = Parameters::new();
    let block = Block::new(&mut Builder::new(&mut parameters, 1).at("b"), &config).unwrap();
    let parameters = filled(parameters);
    check("llama layer", &parameters, &[("x", &[2, 5, 16])], |tape, x| {
        let angles = Angles::new(4, 100.0, 3, 5);
        block.forward(tape, x[0].clone(), None, Some(&angles), None).unwrap()
    });
}

#[test]
fn gelu_by_the_hyperbolic_tangent_is_that_of_pytorch() {
    let mut parameters = Parameters::new();
    let w = parameters.add("l.weight", &[7, 6], Init::Zeros, 1);
    let b = parameters.add("l.bias", &[7], Init::Zeros, 1);
    let parameters = filled(parameters);
    check("gelu tanh", &parameters, &[("x", &[3, 6])], |tape, x| {
        tape.linear(&x[0], w, Some(b), Activation::GeluTanh, 0.0)
    });
}

#[test]
fn gated_units_are_those_of_pytorch() {
    let mut parameters = Parameters::new();
    let gru = Gru::new(&mut Builder::new(&mut parameters, 1).at("rnn"), 5, 4, 2, true, 0.0);
    let parameters = filled(parameters);
    check("gru", &parameters, &[("x", &[3, 6, 5])], |tape, x| {
        let zeros = gru.zeros(tape, 3);
        gru.forward(tape, x[0].clone(), &zeros, Some(&[6, 4, 1]))
    });
}

#[test]
fn attention_of_recurrent_decoders_is_as_the_papers_write_it() {
    for (name, attention) in [("bahdanau", Attention::additive()), ("luong general", Attention::general())] {
        let mut parameters = Parameters::new();
        let mut at = Builder::new(&mut parameters, 1);
        let layer = RecurrentAttention::new(&mut at.at("att"), &attention, 4, 6, 3, 0.0);
        let parameters = filled(parameters);
        check(name, &parameters, &[("q", &[2, 1, 4]), ("k", &[2, 5, 6])], |tape, x| {
            let memory = layer.memory(tape, x[1].clone(), None);
            layer.forward(tape, &x[0], &memory, 0).unwrap()
        });
    }
}

#[test]
fn cross_entropy_is_that_of_pytorch() {
    let mut parameters = Parameters::new();
    let head = parameters.add("head.weight", &[7, 4], Init::Zeros, 1);
    let parameters = filled(parameters);
    let (pool, machine, mut gradients) = (Pool::new(), Machine::new(1), Gradients::of(&parameters));
    let mut tape = Tape::training(&parameters, &mut gradients, &pool, &machine, 1);
    let x = tape.input(tensor("x", &[6, 4]));
    let target = Target { ids: &[3, 0, 6, 2, 0, 1], ignore: Some(0), smoothing: 0.1, scale: 0.25 };
    let loss = tape.cross_entropy(&x, head, None, target).read();
    tape.backward();
    let case = &CASES["cross entropy"];
    close("loss", &[loss.smoothed / 4.0], &case["out"]);
    close("gradient of x", tape.gradient(&x).unwrap().data(), &case["grad"]["x"]);
    drop(tape);
    close("gradient of the matrix", gradients.get(head), &case["grad"]["head.weight"]);
}

#[test]
fn steps_of_adamw_are_those_of_pytorch() {
    let mut parameters = Parameters::new();
    let shapes: [(&str, &[usize]); 2] = [("m.weight", &[3, 4]), ("m.bias", &[3])];
    let [matrix, vector] = shapes.map(|(name, shape)| parameters.add(name, shape, Init::Zeros, 1));
    let mut parameters = filled(parameters);
    let (pool, machine) = (Pool::new(), Machine::new(1));
    let mut moments = Moments::of(&parameters);
    for step in 0..3 {
        // Gradients come from a tape: the gradient of a product's factor is the other factor.
        let mut gradients = Gradients::of(&parameters);
        let mut tape = Tape::training(&parameters, &mut gradients, &pool, &machine, 1);
        let x = tape.constant(Tensor::new((0..16).map(|at| f64::from(u8::from(at % 5 == 0))).collect(), &[4, 4]));
        let y = tape.linear(&x, matrix, None, Activation::None, 0.0); // (4, 3): the matrix, transposed
        let g = made(&format!("g{step}"), &[3, 4], 1.0);
        tape.seed(&y, Tensor::new((0..12).map(|at| g[at % 3 * 4 + at / 3]).collect(), &[4, 3]));
        let zero = tape.constant(Tensor::new(vec![0.0; 4], &[1, 4]));
        let z = tape.linear(&zero, matrix, Some(vector), Activation::None, 0.0);
        tape.seed(&z, Tensor::new(made(&format!("h{step}"), &[3], 1.0), &[1, 3]));
        tape.backward();
        drop(tape);
        let adam = AdamW { decay: 0.1, ..AdamW::default() };
        adam.step(&mut parameters, &mut gradients, &mut moments, 0.05, &machine);
    }
    let found = [parameters.get(matrix), parameters.get(vector)].concat();
    close("parameters", &found, &CASES["adamw"]["out"]);
}
