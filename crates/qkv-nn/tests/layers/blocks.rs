//! Quantized matrices stay in their blocks on a device; results agree with the matrices' values.

use super::devices::devices;
use super::gradients::{numbers, parameters};
use half::f16;
use qkv_cuda::operations::{BlockMatrix, CacheEnd, FewRowsInput, FewRowsProduct, Kind, MatrixRef, Operations, RowNorm};
use qkv_nn::{Activation, Gate, Machine, Pool, Positions, Tape, Tensor};
use qkv_simd::quantized::{BLOCK, Blocks, Format, QuantizedMatrix};

const FORMATS: [Format; 8] =
    [Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1, Format::Q8_0, Format::Q4K, Format::Q5K, Format::Q6K];

/// A matrix of arbitrary codes and scales.
fn matrix(format: Format, rows: usize, width: usize, seed: usize) -> QuantizedMatrix {
    let numbers = rows * width;
    let noise = |at: usize, salt: usize| (((at + 7) * 2_654_435_761 + (salt + seed) * 40_503) >> 7) % 256;
    let bytes = |count: usize, salt: usize| (0..count).map(|at| noise(at, salt) as u8).collect::<Vec<u8>>();
    let halves = |salt: usize, sign: f32| {
        let half = |at: usize| f16::from_f32(sign * (0.001 + noise(at, salt) as f32 / 65536.0));
        (0..numbers / format.together()).map(half).collect::<Vec<f16>>()
    };
    let (bits, least, parts, least_parts) = match format {
        Format::Q4_0 => (4, Vec::new(), 0, 0),
        Format::Q4_1 => (4, halves(3, -8.0), 0, 0),
        Format::Q5_0 => (5, Vec::new(), 0, 0),
        Format::Q5_1 => (5, halves(3, -16.0), 0, 0),
        Format::Q8_0 => (8, Vec::new(), 0, 0),
        Format::Q4K => (4, halves(3, 8.0), BLOCK, BLOCK),
        Format::Q5K => (5, halves(3, 16.0), BLOCK, BLOCK),
        Format::Q6K => (6, Vec::new(), BLOCK / 2, 0),
    };
    let blocks = Blocks {
        codes: (0..numbers).map(|at| (noise(at, 1) >> (8 - bits)) as u8).collect(),
        scales: halves(2, 1.0),
        least,
        parts: bytes(numbers.checked_div(parts).unwrap_or(0), 4),
        least_parts: bytes(numbers.checked_div(least_parts).unwrap_or(0), 5),
    };
    QuantizedMatrix::new(format, width, &blocks, |row| row).unwrap()
}

/// Widths that the format allows: part of a tile, several tiles and a part, and one more than a thread block stages.
fn widths(format: Format) -> [usize; 3] {
    if format.together() == BLOCK { [96, 160, 1184] } else { [256, 768, 1280] }
}

/// The values of a matrix, each with the magnitude of the terms it is the sum of: scale · code, and the minimum.
fn values(matrix: &QuantizedMatrix) -> Vec<[f64; 2]> {
    let (rows, width) = (matrix.rows(), matrix.width());
    let mut widened = vec![0.0; rows * width];
    matrix.widen(0, &mut widened);
    let sized = |(at, x): (usize, f32)| {
        let block = matrix.block(at / width, at % width / BLOCK);
        let least = f64::from(block.least.to_f32());
        let least = match matrix.format() {
            Format::Q4K | Format::Q5K => least * f64::from(block.parts[1]),
            _ => least,
        };
        [f64::from(x), f64::from(x).abs() + 2.0 * least.abs()]
    };
    widened.into_iter().enumerate().map(sized).collect()
}

fn floats(len: usize, seed: u64) -> Vec<f32> {
    numbers(&[len], seed).data().iter().map(|&x| x as f32).collect()
}

fn product(operations: &Operations, w: &BlockMatrix, x: &[f32], rows: usize, outputs: usize) -> Vec<f32> {
    let (x, y) = (operations.upload_activations(x), operations.activations(rows * outputs));
    let product = FewRowsProduct { w: MatrixRef::Blocks(w), bias: None, y: &y, outputs, residual: None };
    assert!(operations.few_rows(FewRowsInput::Rows(&x), rows, &[product]));
    operations.read(&y)
}

#[test]
fn a_product_with_blocks_is_that_of_their_values_and_a_row_has_the_same_bits_alone() {
    for operations in devices() {
        let kind = operations.activation_kind();
        for (at, format) in FORMATS.into_iter().enumerate() {
            for (width, rows) in widths(format).into_iter().zip([[1, 5], [3, 8], [2, 19]]) {
                let (rows, outputs) = (rows[at % 2], [5, 16, 25][at % 3]);
                let matrix = matrix(format, outputs, width, at);
                let w = operations.upload_blocks(&matrix);
                let x = operations.upload_activations(&floats(rows * width, 3));
                // The inputs as rounded on the device.
                let x = operations.read(&x);
                let found = product(&operations, &w, &x, rows, outputs);
                let values = values(&matrix);
                for (r, x) in x.chunks_exact(width).enumerate() {
                    for (o, values) in values.chunks_exact(width).enumerate() {
                        let terms = values.iter().zip(x);
                        let truth: f64 = terms.clone().map(|(w, &x)| w[0] * f64::from(x)).sum();
                        // One f32 rounding for each term of the sums: 32 columns, the blocks, and eight warps; widening
                        // a value adds two more.
                        let size: f64 = terms.map(|(w, &x)| w[1] * f64::from(x).abs()).sum();
                        let sums = size * (32.0 + (width / BLOCK) as f64 + 12.0) / 16_777_216.0;
                        let rounded = if kind == Kind::F32 { 0.0 } else { truth.abs() / 256.0 };
                        let apart = (f64::from(found[r * outputs + o]) - truth).abs();
                        let what = || format!("{format:?}, {rows} rows of {width} in {kind:?}: {r} {o}");
                        assert!(apart <= sums + rounded + 1e-30, "{} {apart} {sums} {rounded}", what());
                    }
                    let alone = product(&operations, &w, x, 1, outputs);
                    assert_eq!(alone, found[r * outputs..][..outputs], "{format:?}, row {r} of {rows} in {kind:?}");
                }
            }
        }
    }
}

#[test]
fn rows_of_blocks_are_their_values() {
    for operations in devices() {
        let device = Machine::new(1).on_cuda(operations);
        let operations = device.cuda().unwrap();
        let pool = Pool::new();
        for (at, format) in FORMATS.into_iter().enumerate() {
            let width = widths(format)[at % 2];
            let mut p = parameters(&[&[21, width], &[6, width]]).rounded::<f32>();
            let [w, positions] = ["p0", "p1"].map(|name| p.find(name).unwrap());
            let matrix = matrix(format, 21, width, at);
            p.set_quantized(w, matrix.clone());
            let all = values(&matrix);
            let ids = [20, 0, 7, 8, 13, 20];
            let mut tape = Tape::inference(&p, &pool, &device);
            for added in [Positions::None, Positions::Learned(positions)] {
                let y = tape.embedding(&ids, 3, w, 0.5, added, 2);
                for (r, (row, &id)) in y.value().data().chunks_exact(width).zip(&ids).enumerate() {
                    for (c, &found) in row.iter().enumerate() {
                        let [x, size] = all[id as usize * width + c];
                        let place = match added {
                            Positions::Learned(param) => f64::from(p.get(param)[(2 + r % 3) * width + c]),
                            _ => 0.0,
                        };
                        let truth = 0.5 * x + place;
                        let unit = if operations.activation_kind() == Kind::F32 { 0.0 } else { 1.0 / 256.0 };
                        let bound = (size + place.abs()) / 4_194_304.0 + truth.abs() * unit;
                        assert!((f64::from(found) - truth).abs() <= bound, "{format:?} {r} {c}: {found} {truth}");
                    }
                }
            }
        }
    }
}

#[test]
fn more_rows_than_blocks_are_read_for_are_multiplied_with_the_widened_matrix() {
    for operations in devices() {
        let kind = operations.activation_kind();
        let (device, cpu, pool) = (Machine::new(1).on_cuda(operations), Machine::new(1), Pool::new());
        for format in [Format::Q4K, Format::Q6K] {
            let mut p = parameters(&[&[9, 256], &[9]]).rounded::<f32>();
            let [w, b] = ["p0", "p1"].map(|name| p.find(name).unwrap());
            p.set_quantized(w, matrix(format, 9, 256, 3));
            let x = floats(70 * 256, 5);
            let compute = |machine: &Machine, rows: usize| {
                let mut tape = Tape::inference(&p, &pool, machine);
                let x = tape.constant(Tensor::new(x[..rows * 256].to_vec(), &[1, rows, 256]));
                tape.linear(&x, w, Some(b), Activation::None, 0.0).value().data().to_vec()
            };
            let truth = compute(&cpu, 70);
            let most = truth.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            let bound = most * if kind == Kind::F32 { 1e-5 } else { 0.03 };
            for rows in [64, 65, 70] {
                let found = compute(&device, rows);
                assert!(found.iter().zip(&truth).all(|(a, b)| (a - b).abs() <= bound), "{format:?} {rows} {kind:?}");
            }
        }
    }
}

#[test]
fn layers_of_blocks_as_one_launch_have_the_bits_of_several() {
    for operations in devices() {
        let kind = operations.activation_kind();
        let device = Machine::new(1).on_cuda(operations);
        let pool = Pool::new();
        // The last case has eight rows of more than a thread block stages, so that their norm is computed separately.
        for (rows, width, outputs, format) in [
            (1, 256, 20, Format::Q4K),
            (3, 96, 9, Format::Q5_1),
            (8, 1024, 17, Format::Q6K),
            (8, 1056, 8, Format::Q4_0),
        ] {
            let shapes: [&[usize]; 5] = [&[outputs, width], &[outputs, width], &[outputs], &[width], &[width]];
            let mut p = parameters(&shapes).rounded::<f32>();
            let [w, v, b, gain, shift] = ["p0", "p1", "p2", "p3", "p4"].map(|name| p.find(name).unwrap());
            [(w, 1), (v, 2)].into_iter().for_each(|(w, seed)| p.set_quantized(w, matrix(format, outputs, width, seed)));
            let x: Vec<f32> = floats(rows * width, 7).into_iter().map(|x| 3.0 * x + 0.5).collect();
            for normalized in [None, Some(true), Some(false)] {
                let compute = |together: bool| {
                    let mut tape = Tape::inference(&p, &pool, &device);
                    let x = tape.constant(Tensor::new(x.clone(), &[rows, width]));
                    let x = match normalized {
                        None => x,
                        Some(true) => tape.layer_norm(&x, gain, shift, 1e-5),
                        Some(false) => tape.rms_norm(&x, gain, 1e-5),
                    };
                    if !together {
                        // Reading the values forces the norm to be computed.
                        assert!(x.value().data().iter().all(|x| x.is_finite()));
                    }
                    let layers = [(w, Some(b)), (v, None)];
                    let gated = if together {
                        tape.gated_linear(&x, layers, Gate::Silu)
                    } else {
                        let [gate, up] = layers.map(|(w, b)| tape.linear(&x, w, b, Activation::None, 0.0));
                        tape.gated(&gate, &up, Gate::Silu)
                    };
                    let [gate, up] = tape.linear_together(&x, layers);
                    let sum = tape.linear_residual(&x, w, Some(b), &up, 0.0);
                    [gated, gate, up, sum].map(|y| y.value().data().to_vec())
                };
                assert_eq!(compute(true), compute(false), "{rows} rows of {width} in {format:?} and {kind:?}");
            }
        }
    }
}

#[test]
fn queries_keys_and_values_of_blocks_as_one_launch_have_the_bits_of_products_and_an_append() {
    for operations in devices() {
        let kind = operations.activation_kind();
        for (rows, inner, heads, width, room) in
            [(1, 256, [3, 1], 16, 4), (3, 768, [4, 2], 32, 7), (8, 256, [2, 2], 48, 5)]
        {
            let positions: Vec<u32> = (0..rows).map(|row| (row * (room - 1) / rows.max(2)) as u32).collect();
            let batch = operations.decode_batch(rows, room);
            operations.set_decode_batch(&batch, &vec![0; rows], &positions);
            let outputs = [heads[0] * width, heads[1] * width, heads[1] * width];
            let x = operations.upload_activations(&floats(rows * inner, 1));
            let upload = |len: usize, seed: u64| operations.upload(Kind::F32, &floats(len, seed), "a test");
            let gain = upload(inner, 2);
            // As in files: the matrix of values has more bits.
            let formats = [Format::Q4K, Format::Q4K, Format::Q6K];
            let w = [0, 1, 2].map(|at| operations.upload_blocks(&matrix(formats[at], outputs[at], inner, at)));
            let b = [0, 1, 2].map(|at| operations.upload_activations(&floats(outputs[at], 6 + at as u64)));
            let tables = [9, 10].map(|seed| upload(room * width / 2, seed));
            for (turns, bias, normalized) in [(true, true, false), (true, false, true), (false, true, true)] {
                let norm = RowNorm { x: x.clone(), gain: gain.clone(), bias: None, epsilon: 1e-5 };
                let input = if normalized { FewRowsInput::Normalized(&norm) } else { FewRowsInput::Rows(&x) };
                let compute = |together: bool| {
                    let caches = [1, 2].map(|at| operations.zeros(kind, rows * room * outputs[at], "a cache"));
                    let end =
                        CacheEnd { caches: caches.each_ref(), angles: turns.then(|| tables.each_ref()), batch: &batch };
                    let ys = outputs.map(|outputs| operations.activations(rows * outputs));
                    let of = |at: usize| (MatrixRef::Blocks(&w[at]), bias.then_some(&b[at]));
                    if together {
                        assert!(operations.few_rows_appended(input, [0, 1, 2].map(of), &ys[0], end));
                    } else {
                        let products = [0, 1, 2].map(|at| {
                            let (w, bias) = of(at);
                            FewRowsProduct { w, bias, y: &ys[at], outputs: outputs[at], residual: None }
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
