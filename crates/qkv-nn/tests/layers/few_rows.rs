//! Products of a few rows have specialized kernels on a device, which agree with the general ones.

use super::devices::devices;
use super::gradients::{numbers, parameters};
use qkv_cuda::operations::{CacheEnd, FewRowsInput, FewRowsProduct, Kind, RowNorm};
use qkv_nn::{Gate, Machine, Pool, Tape, Tensor};

#[test]
fn a_gated_layer_as_one_launch_has_the_bits_of_three() {
    for operations in devices() {
        let kind = operations.activation_kind();
        let (device, cpu) = (Machine::new(1).on_cuda(operations), Machine::new(1));
        // Numbers of rows for each kernel, and one more than any kernel supports; a width that is staged in parts.
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
        // The last two cases have a width that exceeds what a thread block stages, and more rows than any kernel
        // supports.
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
                    // Reading the values forces the norm to be computed.
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
            // The two norms give different results.
            assert_ne!(compute(true, false), compute(false, false));
        }
    }
}

#[test]
fn queries_keys_and_values_as_one_launch_have_the_bits_of_products_and_an_append() {
    for operations in devices() {
        let kind = operations.activation_kind();
        let some =
            |len: usize, seed: u64| -> Vec<f32> { numbers(&[len], seed).data().iter().map(|&x| x as f32).collect() };
        // Query and key heads, their width, and the cache's capacity.
        for (rows, inner, heads, width, room) in
            [(1, 24, [3, 1], 2, 4), (3, 576, [9, 3], 64, 7), (8, 264, [2, 2], 6, 5)]
        {
            let positions: Vec<u32> = (0..rows).map(|row| (row * (room - 1) / rows.max(2)) as u32).collect();
            let batch = operations.decode_batch(rows, room);
            operations.set_decode_batch(&batch, &vec![0; rows], &positions);
            let outputs = [heads[0] * width, heads[1] * width, heads[1] * width];
            let x = operations.upload_activations(&some(rows * inner, 1));
            let floats = |len: usize, seed: u64| operations.upload(Kind::F32, &some(len, seed), "a test");
            let gain = floats(inner, 2);
            let w = [0, 1, 2].map(|at| operations.upload_activations(&some(outputs[at] * inner, 3 + at as u64)));
            let b = [0, 1, 2].map(|at| operations.upload_activations(&some(outputs[at], 6 + at as u64)));
            let tables = [9, 10].map(|seed| floats(room * width / 2, seed));
            for (turns, bias, normalized) in [(true, true, false), (true, false, true), (false, true, true)] {
                let norm = RowNorm { x: x.clone(), gain: gain.clone(), bias: None, epsilon: 1e-5 };
                let input = if normalized { FewRowsInput::Normalized(&norm) } else { FewRowsInput::Rows(&x) };
                let compute = |together: bool| {
                    let caches = [1, 2].map(|at| operations.zeros(kind, rows * room * outputs[at], "a cache"));
                    let end =
                        CacheEnd { caches: caches.each_ref(), angles: turns.then(|| tables.each_ref()), batch: &batch };
                    let ys = outputs.map(|outputs| operations.activations(rows * outputs));
                    let of = |at: usize| ((&w[at]).into(), bias.then_some(&b[at]));
                    if together {
                        assert!(operations.few_rows_appended(input, [0, 1, 2].map(of), &ys[0], end));
                    } else {
                        let products = [0, 1, 2].map(|at| FewRowsProduct {
                            w: of(at).0,
                            bias: of(at).1,
                            y: &ys[at],
                            outputs: outputs[at],
                            residual: None,
                        });
                        assert!(operations.few_rows(input, rows, &products));
                        operations.append_at(ys.each_ref(), end);
                    }
                    [&ys[0], &caches[0], &caches[1]].map(|array| operations.read(array))
                };
                let found = compute(true);
                assert_eq!(found, compute(false), "{rows} rows of {inner}, {heads:?} heads of {width} in {kind:?}");
                assert!(found.iter().all(|part| part.iter().any(|&x| x != 0.0)));
            }
        }
    }
}
