//! Products of a few rows have kernels of their own on a device: they compute what the others compute.

use super::gradients::{numbers, parameters};
use qkv_cuda::{Cuda, Dtype};
use qkv_nn::{Gate, Machine, Pool, Tape, Tensor};

#[test]
fn a_gated_layer_as_one_launch_has_the_bits_of_three() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let operations = match Cuda::emulated().and_then(|cuda| cuda.operations(dtype)) {
            Ok(operations) => operations,
            Err(error) => return println!("skipped: {error}"),
        };
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
                assert_eq!(one, three, "{rows} rows of {inner} in {dtype}, {of:?}");
                let most = here.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let bound = most * if dtype == Dtype::F32 { 1e-5 } else { 0.03 };
                assert!(here.iter().zip(&one).all(|(a, b)| (a - b).abs() < bound), "{here:?}\n{one:?}");
            }
        }
    }
}
