//! The backward pass of every operation against finite differences in f64, and every operation on a device against the
//! CPU in f64: always on the emulated device, and on a GPU if there is one.

use super::devices::there;
use qkv::{Attention, Bias, Features, Mask};
use qkv_cuda::operations::Operations;
use qkv_cuda::{Cuda, Dtype};
use qkv_nn::layers::{AttentionConfig, AttentionPool, Block, BlockConfig, Builder, FeedKind, NormKind, NormPlace};
use qkv_nn::{
    Activation, Angles, AttendOptions, Gate, Gradients, Heads, Init, Machine, Parameters, Pool, Positions,
    ScoreParameters, Tape, Target, Tensor, Var, Windows,
};
use std::sync::OnceLock;

pub fn numbers(shape: &[usize], seed: u64) -> Tensor<f64> {
    Tensor::new(qkv::Tensor::<f64, 1>::randn([shape.iter().product()], seed).into_data(), shape)
}

pub fn parameters(shapes: &[&[usize]]) -> Parameters<f64> {
    let mut parameters = Parameters::new();
    for (at, shape) in shapes.iter().enumerate() {
        parameters.add(&format!("p{at}"), shape, Init::Normal(0.6), 3);
    }
    parameters
}

/// The computation of a test: values whose weighted sum, with fixed weights, is the loss, and any additional loss.
pub type Body<'a> = &'a dyn Fn(&mut Tape<'_, f64>, &[Var<f64>]) -> (Option<Var<f64>>, f64);

fn loss_of(parameters: &Parameters<f64>, inputs: &[Tensor<f64>], body: Body<'_>) -> f64 {
    let (pool, machine, mut gradients) = (Pool::new(), Machine::new(2), Gradients::of(parameters));
    let mut tape = Tape::training(parameters, &mut gradients, &pool, &machine, 5);
    let vars: Vec<_> = inputs.iter().map(|x| tape.input(x.clone())).collect();
    let (out, extra) = body(&mut tape, &vars);
    let weighted = out.map_or(0.0, |out| {
        let weights = numbers(out.shape(), 99);
        out.value().data().iter().zip(weights.data()).map(|(x, w)| x * w).sum()
    });
    weighted + extra + tape.penalty().read()
}

/// The results of a pass: its output, and the gradients of inputs and parameters.
struct Passes {
    out: Vec<f64>,
    of_inputs: Vec<Vec<f64>>,
    gradients: Gradients<f64>,
}

fn passes(parameters: &Parameters<f64>, inputs: &[Tensor<f64>], machine: &Machine, body: Body<'_>) -> Passes {
    let (pool, mut gradients) = (Pool::new(), Gradients::of(parameters));
    let mut tape = Tape::training(parameters, &mut gradients, &pool, machine, 5);
    let vars: Vec<_> = inputs.iter().map(|x| tape.input(x.clone())).collect();
    let (out, extra) = body(&mut tape, &vars);
    let found = out.as_ref().map_or_else(|| vec![extra + tape.penalty().read()], |out| out.value().data().to_vec());
    if let Some(out) = out {
        tape.seed(&out, numbers(out.shape(), 99));
    }
    tape.backward();
    let of_input = |var| tape.gradient(var).map_or_else(Vec::new, |g| g.data().to_vec());
    let of_inputs = vars.iter().map(of_input).collect();
    drop(tape);
    Passes { out: found, of_inputs, gradients }
}

/// The devices of this machine, each with the largest permitted relative error of a tensor.
fn devices() -> &'static [(String, Operations, f64)] {
    static DEVICES: OnceLock<Vec<(String, Operations, f64)>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let devices = [("emulated", Cuda::emulated()), ("GPU", Cuda::new(0))];
        let mut found = Vec::new();
        for (name, cuda) in devices {
            if let Some(cuda) = there(cuda) {
                for (dtype, bound) in [(Dtype::F32, 5e-6), (Dtype::Bf16, 2.5e-2)] {
                    found.push((format!("{name} in {dtype}"), cuda.operations(dtype).unwrap(), bound));
                }
            }
        }
        found
    })
}

/// The L2 error of a tensor relative to its norm.
fn error_of(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let square = |x: f64| x * x;
    let error: f64 = found.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let length: f64 = expected.iter().map(|&x| square(x)).sum();
    if error == 0.0 { 0.0 } else { (error / length.max(1e-12)).sqrt() }
}

fn check_devices(name: &str, parameters: &Parameters<f64>, inputs: &[Tensor<f64>], body: Body<'_>, there: &Passes) {
    for (device, operations, bound) in devices() {
        let machine = Machine::new(1).on_cuda(operations.clone()).recompute_from(1);
        // Deep copies, so that a device's changes do not leak out.
        let (parameters, inputs) = (parameters.rounded::<f64>(), inputs.to_vec());
        let found = passes(&parameters, &inputs, &machine, body);
        operations.check().unwrap_or_else(|error| panic!("{name} on {device}: {error}"));
        let compare = |what: &str, found: &[f64], there: &[f64]| {
            let error = error_of(found, there);
            assert!(error <= *bound, "{name} on {device}: the error of {what} is {error}, of {bound}");
        };
        compare("the output", &found.out, &there.out);
        for (at, (found, there)) in found.of_inputs.iter().zip(&there.of_inputs).enumerate() {
            compare(&format!("the gradient of input {at}"), found, there);
        }
        for param in parameters.all() {
            compare(parameters.name(param), found.gradients.get(param), there.gradients.get(param));
        }
    }
}

pub fn check(name: &str, parameters: &Parameters<f64>, inputs: &[Tensor<f64>], body: Body<'_>) {
    let there = passes(parameters, inputs, &Machine::new(2), body);
    check_devices(name, parameters, inputs, body, &there);
    let Passes { of_inputs, gradients, .. } = there;
    let (step, mut checked) = (1e-5, 0);
    let mut compare = |what: &str, at: usize, found: f64, up: f64, down: f64| {
        let expected = (up - down) / (2.0 * step);
        assert!(
            (found - expected).abs() <= 1e-7 + 2e-6 * expected.abs(),
            "{name}: gradient of {what}[{at}] is {found}, differences say {expected}"
        );
        checked += 1;
    };
    for (x, found) in of_inputs.iter().enumerate() {
        for at in (0..found.len()).step_by((found.len() / 40).max(1)) {
            let moved = |by: f64| {
                let mut inputs = inputs.to_vec();
                inputs[x].data_mut()[at] += by;
                loss_of(parameters, &inputs, body)
            };
            compare(&format!("input {x}"), at, found[at], moved(step), moved(-step));
        }
    }
    for param in parameters.all() {
        let found = gradients.get(param);
        for at in (0..found.len()).step_by((found.len() / 40).max(1)) {
            let moved = |by: f64| {
                let mut parameters = parameters.clone();
                parameters.get_mut(param)[at] += by;
                loss_of(&parameters, inputs, body)
            };
            compare(parameters.name(param), at, found[at], moved(step), moved(-step));
        }
    }
    assert!(checked > 0);
}

#[test]
fn linear_maps_with_every_activation_and_dropout() {
    let p = parameters(&[&[7, 5], &[7]]);
    let [w, b] = [p.find("p0").unwrap(), p.find("p1").unwrap()];
    for activation in [
        Activation::None,
        Activation::Relu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::Tanh,
        Activation::Sigmoid,
    ] {
        for dropout in [0.0, 0.4] {
            check(&format!("{activation:?} {dropout}"), &p, &[numbers(&[2, 3, 5], 1)], &|tape, x| {
                (Some(tape.linear(&x[0], w, Some(b), activation, dropout)), 0.0)
            });
        }
    }
}

#[test]
fn windows_of_convolutions() {
    let p = parameters(&[&[4, 9], &[4]]);
    let [w, b] = [p.find("p0").unwrap(), p.find("p1").unwrap()];
    for (kernel, stride, padding, length) in [(3, 1, 1, 5), (3, 2, 1, 6), (3, 2, 0, 7), (3, 4, 2, 5), (3, 1, 2, 1)] {
        let windows = Windows { kernel, stride, padding };
        check(&format!("{windows:?}"), &p, &[numbers(&[2, length, 3], 1)], &|tape, x| {
            let unfolded = tape.unfold(&x[0], windows);
            (Some(tape.linear(&unfolded, w, Some(b), Activation::Gelu, 0.0)), 0.0)
        });
    }
}

#[test]
fn a_convolution_is_its_definition() {
    let p = parameters(&[]);
    let (pool, machine) = (Pool::new(), Machine::new(1));
    let x = numbers(&[1, 6, 2], 1);
    for (kernel, stride, padding) in [(3, 1, 1), (3, 2, 1), (2, 3, 0), (5, 1, 4)] {
        let mut tape = Tape::inference(&p, &pool, &machine);
        let var = tape.constant(x.clone());
        let y = tape.unfold(&var, Windows { kernel, stride, padding });
        assert_eq!(y.shape(), [1, (6 + 2 * padding - kernel) / stride + 1, kernel * 2]);
        for (at, row) in y.value().data().chunks_exact(kernel * 2).enumerate() {
            for (place, &found) in row.iter().enumerate() {
                let token = (at * stride + place / 2).checked_sub(padding).filter(|&token| token < 6);
                assert_eq!(found, token.map_or(0.0, |token| x.data()[token * 2 + place % 2]));
            }
        }
    }
}

#[test]
fn an_activation_between_two_maps_may_be_computed_again() {
    let p = parameters(&[&[16, 5], &[16], &[3, 16]]);
    let [w, b, v] = ["p0", "p1", "p2"].map(|name| p.find(name).unwrap());
    for activation in [Activation::Gelu, Activation::GeluTanh] {
        for dropout in [0.0, 0.4] {
            check(&format!("{activation:?} {dropout}"), &p, &[numbers(&[2, 3, 5], 1)], &|tape, x| {
                let y = tape.linear(&x[0], w, Some(b), activation, dropout);
                (Some(tape.linear(&y, v, None, Activation::None, 0.0)), 0.0)
            });
        }
    }
}

#[test]
fn a_linear_map_without_bias_used_twice() {
    let p = parameters(&[&[5, 5]]);
    let w = p.find("p0").unwrap();
    check("twice", &p, &[numbers(&[4, 5], 1)], &|tape, x| {
        let y = tape.linear(&x[0], w, None, Activation::Tanh, 0.0);
        let z = tape.linear(&y, w, None, Activation::None, 0.0);
        (Some(tape.residual(&y, z, 0.3)), 0.0)
    });
}

#[test]
fn a_linear_map_that_is_added_to_what_is_there() {
    let p = parameters(&[&[16, 24], &[16], &[24, 16]]);
    let [w, b, v] = ["p0", "p1", "p2"].map(|name| p.find(name).unwrap());
    // Numbers of rows with specialized kernels on a device, and more; a residual that is used again.
    for rows in [1, 3, 8, 9] {
        for (bias, dropout) in [(None, 0.0), (Some(b), 0.0), (Some(b), 0.3)] {
            let inputs = [numbers(&[rows, 24], 1), numbers(&[rows, 16], 2)];
            check(&format!("{rows} rows, {bias:?}, {dropout}"), &p, &inputs, &|tape, x| {
                let y = tape.linear_residual(&x[0], w, bias, &x[1], dropout);
                (Some(tape.linear_residual(&y, v, None, &x[0], 0.0)), 0.0)
            });
        }
    }
}

#[test]
fn sums_and_dropout() {
    let p = parameters(&[]);
    check("sums", &p, &[numbers(&[3, 70], 1), numbers(&[3, 70], 2)], &|tape, x| {
        let sum = tape.add(&x[0], x[1].clone());
        let dropped = tape.dropout(sum, 0.5);
        (Some(tape.residual(&x[0], dropped, 0.2)), 0.0)
    });
}

/// An arbitrary width, widths whose gradients have specialized kernels on a device, and a larger one.
const WIDTHS: [usize; 6] = [37, 48, 264, 520, 1024, 1032];

#[test]
fn layer_norm() {
    for width in WIDTHS {
        let p = parameters(&[&[width], &[width]]);
        let [gain, bias] = [p.find("p0").unwrap(), p.find("p1").unwrap()];
        check(&format!("norm of {width}"), &p, &[numbers(&[19, width], 1)], &|tape, x| {
            let norm = tape.layer_norm(&x[0], gain, bias, 1e-5);
            (Some(tape.add(&x[0], norm)), 0.0)
        });
    }
}

#[test]
fn rms_norm() {
    for width in WIDTHS {
        let p = parameters(&[&[width]]);
        let gain = p.find("p0").unwrap();
        check(&format!("rms norm of {width}"), &p, &[numbers(&[19, width], 1)], &|tape, x| {
            let norm = tape.rms_norm(&x[0], gain, 1e-5);
            (Some(tape.add(&x[0], norm)), 0.0)
        });
    }
}

#[test]
fn rotary_positions() {
    let p = parameters(&[]);
    let angles = Angles::new(6, 50.0, 2, 4);
    check("rotary", &p, &[numbers(&[2, 4, 12], 1)], &|tape, x| (Some(tape.rotary(x[0].clone(), &angles)), 0.0));
}

#[test]
fn rotary_scores_depend_on_the_distance_alone() {
    let (p, pool, machine) = (parameters(&[]), Pool::new(), Machine::new(1));
    let mut tape = Tape::inference(&p, &pool, &machine);
    let mut dot = |at: usize, from: usize| -> f64 {
        let mut turned = |seed, start| {
            let x = tape.constant(numbers(&[1, 1, 8], seed));
            tape.rotary(x, &Angles::new(8, 1e4, start, 1)).value().data().to_vec()
        };
        turned(1, at).iter().zip(turned(2, from)).map(|(a, b)| a * b).sum()
    };
    assert!((dot(7, 3) - dot(104, 100)).abs() < 1e-12);
    assert!((dot(7, 3) - dot(7, 4)).abs() > 1e-3);
}

#[test]
fn gates() {
    let p = parameters(&[]);
    for of in [Gate::Silu, Gate::Gelu, Gate::GeluTanh, Gate::Sigmoid] {
        check("gate", &p, &[numbers(&[3, 70], 1), numbers(&[3, 70], 2)], &|tape, x| {
            let y = tape.gated(&x[0], &x[1], of);
            (Some(tape.gated(&y, &x[0], of)), 0.0)
        });
    }
}

#[test]
fn a_layer_with_norms_on_both_sides_and_of_its_heads() {
    let mask = Mask::causal() & Mask::window(1, 0);
    let own = AttentionConfig {
        bias: false,
        out_bias: false,
        head_width: Some(12),
        head_norm: Some(1e-6),
        ..AttentionConfig::new(Attention::scaled_dot().mask(mask), Heads { query: 2, key: 1 })
    };
    let config = BlockConfig {
        feed: FeedKind::GeGluTanh,
        feed_bias: false,
        norm: NormPlace::Both,
        norm_kind: NormKind::Rms,
        epsilon: 1e-6,
        ..BlockConfig::new(16, 24, own)
    };
    let mut p = Parameters::new();
    let block = Block::new(&mut Builder::new(&mut p, 3), &config).unwrap();
    let names: Vec<&str> = p.all().map(|param| p.name(param)).filter(|name| name.contains("norm")).collect();
    assert_eq!(names.len(), 6, "{names:?}");
    let angles = Angles::new(12, 100.0, 2, 4);
    check("sandwich", &p, &[numbers(&[2, 4, 16], 1)], &|tape, x| {
        (Some(block.forward(tape, x[0].clone(), None, Some(&angles), None).unwrap()), 0.0)
    });
}

#[test]
fn means_of_sequences_that_end() {
    let p = parameters(&[]);
    for lengths in [None, Some(&[4usize, 2, 0][..])] {
        check("mean", &p, &[numbers(&[3, 4, 5], 1)], &|tape, x| (Some(tape.mean(&x[0], lengths)), 0.0));
    }
}

#[test]
fn embeddings_with_learned_positions() {
    let p = parameters(&[&[6, 4], &[9, 4]]);
    let [table, at] = [p.find("p0").unwrap(), p.find("p1").unwrap()];
    check("embedding", &p, &[], &|tape, _| {
        (Some(tape.embedding(&[1, 5, 1, 0, 3, 3], 3, table, 2.0, Positions::Learned(at), 2)), 0.0)
    });
}

#[test]
fn a_tied_embedding_under_cross_entropy() {
    let p = parameters(&[&[11, 6], &[11]]);
    let [table, bias] = [p.find("p0").unwrap(), p.find("p1").unwrap()];
    for smoothing in [0.0, 0.1] {
        check("loss", &p, &[numbers(&[1, 5, 6], 1)], &|tape, x| {
            let seen = tape.embedding(&[4, 9, 4, 2, 7], 5, table, 1.5, Positions::None, 0);
            let x = tape.add(&x[0], seen);
            let target = Target { ids: &[3, 10, 0, 5, 0], ignore: Some(0), smoothing, scale: 0.7 };
            let loss = tape.cross_entropy(&x, table, Some(bias), target).read();
            assert_eq!(loss.rows, 3);
            (None, loss.smoothed * 0.7)
        });
    }
}

#[test]
fn cross_entropy_over_many_classes() {
    for classes in [1001, 8192, 8199] {
        let p = parameters(&[&[classes, 4], &[classes]]);
        let [table, bias] = [p.find("p0").unwrap(), p.find("p1").unwrap()];
        check(&format!("{classes} classes"), &p, &[numbers(&[1, 3, 4], 1)], &|tape, x| {
            let ids = [classes as u32 - 1, 5, 0];
            let target = Target { ids: &ids, ignore: Some(5), smoothing: 0.1, scale: 0.7 };
            (None, tape.cross_entropy(&x[0], table, Some(bias), target).read().smoothed * 0.7)
        });
    }
}

#[test]
fn where_something_begins_and_ends() {
    let p = parameters(&[&[2, 6]]);
    let w = p.find("p0").unwrap();
    check("span", &p, &[numbers(&[2, 5, 6], 1)], &|tape, x| {
        let scores = tape.linear(&x[0], w, None, Activation::None, 0.0);
        let loss = tape.span_loss(&scores, &[[1, 4], [2, 2]], &[5, 3], 0.7).read();
        assert_eq!(loss.rows, 2);
        (None, loss.nll * 0.7)
    });
}

#[test]
fn moving_numbers_about() {
    let p = parameters(&[]);
    check("shapes", &p, &[numbers(&[2, 3, 4], 1), numbers(&[2, 3, 2], 2)], &|tape, x| {
        let both = tape.concat(&[&x[0], &x[1], &x[0]]);
        let steps: Vec<_> = [2, 0, 2, 1].map(|step| tape.step(&both, step)).into();
        let stacked = tape.stack(&steps);
        (Some(tape.scale(stacked, &[0.5, -2.0])), 0.0)
    });
}

#[test]
fn rows_of_several_tensors_in_their_places() {
    let p = parameters(&[]);
    check("gather", &p, &[numbers(&[2, 1, 4], 1), numbers(&[2, 3, 4], 2)], &|tape, x| {
        // A row may be used twice or never; a place may be empty.
        let places = [Some(0), Some(2), None, Some(7), Some(2), Some(5)];
        (Some(tape.gather(&[&x[0], &x[1]], &places, [2, 3])), 0.0)
    });
}

#[test]
fn a_learned_query_that_asks_every_sequence() {
    for attention in [Attention::additive(), Attention::scaled_dot(), Attention::additive().sparsemax()] {
        let mut p = parameters(&[]);
        let spread = if attention.select == qkv::Select::Soft { 0.3 } else { 0.0 };
        let pool = AttentionPool::new(&mut Builder::new(&mut p, 3), &attention, 5, 4).unwrap().penalized(spread);
        for lengths in [None, Some(&[4usize, 2, 0][..])] {
            check("pool", &p, &[numbers(&[3, 4, 5], 1)], &|tape, x| {
                (Some(pool.forward(tape, &x[0], lengths).unwrap()), 0.0)
            });
        }
    }
}

#[test]
fn what_fills_up_a_sequence_changes_nothing_in_its_pool() {
    let mut p = Parameters::<f64>::new();
    let pool = AttentionPool::new(&mut Builder::new(&mut p, 3), &Attention::additive(), 5, 4).unwrap();
    let (memory, machine) = (Pool::new(), Machine::new(1));
    let pooled = |x: Tensor<f64>, lengths: Option<&[usize]>| {
        let mut tape = Tape::inference(&p, &memory, &machine);
        let x = tape.constant(x);
        pool.forward(&mut tape, &x, lengths).unwrap().value().data().to_vec()
    };
    let short = numbers(&[1, 3, 5], 1);
    let mut long = [short.data(), &[f64::NAN; 10]].concat();
    long.extend(numbers(&[1, 5, 5], 2).data());
    let long = pooled(Tensor::new(long, &[2, 5, 5]), Some(&[3, 0]));
    assert_eq!(long[..5], pooled(short, None)[..]);
    assert_eq!(long[5..], [0.0; 5]);
}

#[test]
fn gated_units_in_both_directions_with_sequences_that_end() {
    let p = parameters(&[&[15, 5], &[15]]);
    let [w, b] = [p.find("p0").unwrap(), p.find("p1").unwrap()];
    for reverse in [false, true] {
        for lengths in [None, Some(&[4usize, 2, 0][..])] {
            check(
                &format!("gru {reverse} {lengths:?}"),
                &p,
                &[numbers(&[3, 4, 15], 1), numbers(&[3, 1, 5], 2)],
                &|tape, x| (Some(tape.gru(&x[0], &x[1], w, b, lengths, reverse)), 0.0),
            );
        }
    }
}

#[test]
fn attention_with_everything_a_model_gives_it() {
    let p = parameters(&[&[3, 3], &[3], &[1], &[4, 7], &[4]]);
    let named = |name: &str| p.find(name);
    let causal = Attention::scaled_dot().mask(Mask::causal());
    let cases: Vec<(&str, Attention, ScoreParameters)> = vec![
        ("causal", causal.clone(), ScoreParameters::default()),
        ("dropout", causal.clone().dropout(0.3), ScoreParameters::default()),
        ("general", Attention::general(), ScoreParameters { w: named("p0"), ..ScoreParameters::default() }),
        ("additive", Attention::additive(), ScoreParameters { v: named("p1"), ..ScoreParameters::default() }),
        (
            "scale",
            Attention::dot().learned_scale(),
            ScoreParameters { scale: named("p2"), ..ScoreParameters::default() },
        ),
        (
            "table",
            Attention::dot().bias(Bias::relative(3)),
            ScoreParameters { table: named("p3"), ..ScoreParameters::default() },
        ),
        ("sinks", Attention::dot().with_sinks(), ScoreParameters { sinks: named("p4"), ..ScoreParameters::default() }),
        ("linear", Attention::linear(Features::Elu), ScoreParameters::default()),
        ("sparsemax", Attention::scaled_dot().sparsemax(), ScoreParameters::default()),
        ("window", Attention::cosine().mask(Mask::window(1, 1)), ScoreParameters::default()),
    ];
    for (name, attention, scoring) in cases {
        for lengths in [None, Some(&[5usize, 3][..])] {
            let heads = Heads { query: 4, key: if scoring.w.is_some() { 4 } else { 2 } };
            let keys = [2, 5, heads.key * 3];
            let penalized = !matches!(name, "linear" | "sparsemax");
            let inputs = [numbers(&[2, 5, 12], 1), numbers(&keys, 2), numbers(&keys, 3)];
            check(name, &p, &inputs, &|tape, x| {
                let options = AttendOptions {
                    heads,
                    parameters: scoring,
                    key_lengths: lengths,
                    query_lengths: lengths,
                    entropy: if penalized { 0.3 } else { 0.0 },
                    ..AttendOptions::new(&attention)
                };
                (Some(tape.attend(&x[0], &x[1], &x[2], None, &options).unwrap()), 0.0)
            });
        }
    }
}

#[test]
fn predictive_local_attention_moves_its_center() {
    let p = parameters(&[]);
    let attention = Attention::scaled_dot().local(2);
    let center = Tensor::new(vec![1.3, 2.6, 0.4, 3.7], &[2, 2, 1]);
    let inputs = [numbers(&[2, 2, 4], 1), numbers(&[2, 6, 4], 2), numbers(&[2, 6, 4], 3), center];
    check("local", &p, &inputs, &|tape, x| {
        (Some(tape.attend(&x[0], &x[1], &x[2], Some(&x[3]), &AttendOptions::new(&attention)).unwrap()), 0.0)
    });
}

#[test]
fn a_gate_on_a_head_is_a_factor_on_its_values() {
    // A head's output is linear in its values, so changing its gate is the same as scaling them.
    let (attention, parameters) = (Attention::scaled_dot().mask(Mask::causal()), parameters(&[]));
    let options = AttendOptions { heads: Heads { query: 2, key: 2 }, ..AttendOptions::new(&attention) };
    let inputs = [numbers(&[2, 5, 8], 1), numbers(&[2, 5, 8], 2), numbers(&[2, 5, 8], 3)];
    let body = |tape: &mut Tape<'_, f64>, x: &[Var<f64>]| {
        (Some(tape.attend(&x[0], &x[1], &x[2], None, &options).unwrap()), 0.0)
    };
    let (pool, machine, mut gradients) = (Pool::new(), Machine::new(2), Gradients::of(&parameters));
    let mut tape = Tape::training(&parameters, &mut gradients, &pool, &machine, 5).without_noise();
    tape.capture();
    let vars: Vec<_> = inputs.iter().map(|x| tape.input(x.clone())).collect();
    let out = body(&mut tape, &vars).0.unwrap();
    let captured = tape.captured();
    assert!(captured[0].gates().is_none(), "before the backward pass");
    tape.seed(&out, numbers(out.shape(), 99));
    tape.backward();
    for (head, &found) in captured[0].gates().unwrap().iter().enumerate() {
        let turned = |gate: f64| {
            let mut inputs = inputs.clone();
            let scaled = inputs[2].data_mut().iter_mut().enumerate().filter(|(at, _)| at % 8 / 4 == head);
            scaled.for_each(|(_, x)| *x *= gate);
            loss_of(&parameters, &inputs, &body)
        };
        let expected = (turned(1.0 + 1e-5) - turned(1.0 - 1e-5)) / 2e-5;
        assert!((found - expected).abs() < 1e-7, "head {head}: {found}, differences say {expected}");
    }
}
