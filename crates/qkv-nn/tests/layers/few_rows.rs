//! Products of a few rows have kernels of their own on a device: they compute what the others compute.

use super::devices::devices;
use super::gradients::{numbers, parameters};
use qkv_cuda::operations::Kind;
use qkv_nn::{Gate, Machine, Pool, Tape, Tensor};

#[test]
fn a_gated_layer_as_one_launch_has_the_bits_of_three() {
    for operations in devices() {
        let kind = operations.activation_kind();
        let (device, cpu) = (Machine::new(1).on_cuda(operations), Machine::new(1));
        // Rows of one, two, four and eight, and more than there is a kernel for; a width that is staged in parts.
        for (rows, inner, outputs) in [(1, 24, 5), (2, 576, 8), (3, 16, 9), (8, 2072, 17), (9, 24, 5)] {
            let p = parameters(&[&[outputs, inner], &[outputs, inner], &[outputs], &[outputs]]).rounded::<f32>();
            let [w, v, b, c] = ["p0", "p1", "p2", "p3"].map(|name| p.find(name).unwrap());
            let x: Tensor<f64> = numbers(&[rows, inner], 7);
            let x: Vec<f32> = x.data().iter().map(|&x| x as f32).collect();
            let pool = Pool::new();
            for (of, bias) in [(Gate::Silu, true), (Gate::Gelu, false), (Gate::Sigmoid, true)] {
                let layers = [(w, bias.then_some(b)), (v, bias.then_some(c))];
                let compute = |machine: &Machine, together: bool| {
                    let mut tape = Tape::inference(&p, &pool, machine);
                    let x = tape.constant(Tensor::new(x.clone(), &[rows, inner]));
                    let y = match together {
                        true => tape.gated_linear(&x, layers, of),
                        false => {
                            let [gate, up] = tape.linear_together(&x, layers);
                            tape.gated(&gate, &up, of)
                        }
                    };
                    y.value().data().to_vec()
                };
                let (one, three, here) = (compute(&device, true), compute(&device, false), compute(&cpu, true));
                assert_eq!(one, three, "{rows} rows of {inner} in {kind:?}, {of:?}");
                let most = here.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let bound = most * if kind == Kind::F32 { 1e-5 } else { 0.03 };
                assert!(here.iter().zip(&one).all(|(a, b)| (a - b).abs() < bound), "{here:?}\n{one:?}");
            }
        }
    }
}

#[test]
fn a_product_that_normalizes_its_rows_has_the_bits_of_a_norm_before_it() {
    for operations in devices() {
        let kind = operations.activation_kind();
        let device = Machine::new(1).on_cuda(operations);
        // The last two are more than a block stages, and more rows than there is a kernel for.
        for (rows, inner, outputs) in [(1, 24, 5), (1, 576, 8), (3, 264, 9), (8, 1024, 17), (8, 1032, 3), (9, 24, 5)] {
            let shapes: [&[usize]; 4] = [&[outputs, inner], &[outputs, inner], &[inner], &[inner]];
            let p = parameters(&shapes).rounded::<f32>();
            let [w, v, gain, bias] = ["p0", "p1", "p2", "p3"].map(|name| p.find(name).unwrap());
            let x: Tensor<f64> = numbers(&[rows, inner], 7);
            let x: Vec<f32> = x.data().iter().map(|&x| 3.0 * x as f32 + 0.5).collect();
            let pool = Pool::new();
            let compute = |centered: bool, apart: bool| {
                let mut tape = Tape::inference(&p, &pool, &device);
                let x = tape.constant(Tensor::new(x.clone(), &[rows, inner]));
                let normalized = match centered {
                    true => tape.layer_norm(&x, gain, bias, 1e-5),
                    false => tape.rms_norm(&x, gain, 1e-5),
                };
                if apart {
                    // Whoever reads it has it computed.
                    assert!(normalized.value().data().iter().all(|x| x.is_finite()));
                }
                let [a, b] = tape.linear_together(&normalized, [(w, None), (v, None)]);
                let gated = tape.gated_linear(&normalized, [(w, None), (v, None)], Gate::Silu);
                [a, b, gated].map(|y| y.value().data().to_vec())
            };
            for centered in [true, false] {
                let (one, two) = (compute(centered, false), compute(centered, true));
                assert_eq!(one, two, "{rows} rows of {inner} in {kind:?}");
            }
            // Without a norm it is something else.
            assert_ne!(compute(true, false), compute(false, false));
        }
    }
}
