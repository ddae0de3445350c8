//! Tests over the portable lanes that are small enough for Miri. The tests beside each kernel cover sizes and
//! instruction sets; these cover its memory accesses: odd widths, gaps between rows, slices that end with the last row.

use crate::gemv::{RowTable, dots, weighted_sum};
use crate::panels::{self, PackedMatrix};
use crate::quantized::{self, QuantizedMatrix, Vectors};
use crate::shared::{Rows, for_each_task};
use crate::team::Team;
use crate::tile::{self, Exponential, RowGradient, RowOp, Running, Span};
use crate::{Element, Isa, Matrix, Panels, Real, Target, Unwritten, View, padded, product, product_skipping_zeros};
use half::{bf16, f16};

fn portable() -> Isa {
    Isa::named("portable").expect("every CPU has it")
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|x| ((x * 37) % 23) as f32 / 8.0 - 1.0).collect()
}

#[test]
fn products_stay_inside_their_slices() {
    let (rows, depth, lanes) = (3, 5, f32::LANES);
    let (a, b) = (numbers(rows * depth), numbers(2 * depth * lanes));
    for multiply in [product::<f32>, product_skipping_zeros::<f32>] {
        let mut c = vec![0.0; rows * 2 * lanes];
        let (a_rows, panels) = (Matrix::rows(&a, depth), Panels::packed(&b, depth));
        multiply(portable(), Target::overwrite(&mut c, 2 * lanes), a_rows, panels, rows, 2, depth);
        for (at, &found) in c.iter().enumerate() {
            let (i, p, x) = (at / (2 * lanes), at % (2 * lanes) / lanes, at % lanes);
            let expected: f32 = (0..depth).map(|k| a[i * depth + k] * b[(p * depth + k) * lanes + x]).sum();
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }
}

#[test]
fn packing_and_transposing_stay_inside_their_slices() {
    let (count, width, lanes) = (3, 5, f32::LANES);
    let rows = numbers(lanes * lanes);
    let mut panels = vec![f32::NAN; lanes * width];
    tile::pack_panels(portable(), &rows, lanes, count, width, &mut panels);
    for (at, &found) in panels.iter().enumerate() {
        let (x, r) = (at / lanes, at % lanes);
        assert_eq!(found, if r < count { rows[r * lanes + x] } else { 0.0 });
    }
    let mut across = vec![0.0; lanes * lanes];
    tile::transpose(portable(), &rows, lanes, lanes, 1, &mut across, lanes);
    assert!((0..lanes * lanes).all(|at| across[at] == rows[at % lanes * lanes + at / lanes]));
}

#[test]
fn softmax_and_its_gradient_stay_inside_their_slices() {
    let (rows, width, row) = (3, f32::LANES, f32::LANES + 3);
    let mut scores = numbers((rows - 1) * row + width);
    let before = scores.clone();
    let spans = [Span { start: 0, end: 1 }; 3];
    let how = Exponential { scale: 0.5, spans: &spans, accurate_exp: true };
    let [mut max, mut sum, mut entropy_acc, mut factor] = [f32::NEG_INFINITY, 0.0, 0.0, 1.0].map(|x| [x; 3]);
    let running = Running { max: &mut max, sum: &mut sum, entropy_acc: &mut entropy_acc, factor: &mut factor };
    tile::softmax(portable(), &mut scores, row, rows, width, how, running);
    for r in 0..rows {
        let total: f32 = scores[r * row..][..width].iter().sum();
        assert!((total - sum[r]).abs() < 1e-5 * total);
    }
    let lse: Vec<f32> = max.iter().zip(&sum).map(|(max, sum)| max + sum.ln()).collect();
    let (mut weights, mut grads) = (before, numbers((rows - 1) * row + width));
    let of = RowGradient { lse: &lse, delta: &[0.25; 3], entropy: &[], scale: 1.0 };
    tile::softmax_gradient(portable(), &mut weights, &mut grads, row, rows, width, how, of);
    for r in 0..rows {
        assert!((weights[r * row..][..width].iter().sum::<f32>() - 1.0).abs() < 1e-5);
    }
    tile::row_op(portable(), &mut grads[..width], RowOp::Scale(2.0));
}

#[test]
fn products_with_rows_in_place_stay_inside_their_rows() {
    fn run<T: Element<Acc = f32>>() {
        let width = 5;
        let rows: Vec<Vec<T>> = (0..3).map(|_| numbers(width).into_iter().map(T::narrow).collect()).collect();
        let rows: Vec<&[T]> = rows.iter().map(|row| &row[..]).collect();
        let table = RowTable { rows: &rows, len: 3, width };
        let mut query = vec![0.0; padded::<f32>(width)];
        query[..width].copy_from_slice(&numbers(width));
        let mut out = vec![f32::NAN; f32::LANES];
        dots(portable(), &mut out, f32::LANES, &query, query.len(), 1, table);
        assert!(out[0] > 0.0 && out[0] == out[2]);
        let mut sums = vec![0.0; padded::<f32>(width)];
        weighted_sum(portable(), &mut sums, padded::<f32>(width), &out, f32::LANES, 1, table);
        assert!(sums[..width].iter().all(|x| x.is_finite()) && sums[width..].iter().all(|&x| x == 0.0));
    }
    run::<f32>();
    run::<bf16>();
    run::<f16>();
}

#[test]
fn rows_written_by_several_workers_are_all_there() {
    let mut memory = Unwritten::<bf16>::new([1, 2, 3, 5]).unwrap();
    {
        let rows = Rows::new(memory.view());
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        pool.install(|| {
            for_each_task(
                2,
                2,
                || (),
                |(), h| {
                    rows.write(0, h, 2, &[h as f32; 5]);
                    rows.write_scaled(0, h, 0, &[1.0, 2.0], &[1.0; 10], 5);
                },
            );
        });
    }
    let written = memory.written();
    let view = View::new(&written, [1, 2, 3, 5]).unwrap();
    assert_eq!(view.at(0, 1, 2, 4), bf16::ONE);
    assert_eq!(view.at(0, 0, 1, 0).to_f32(), 2.0);
    let mut row = [f32::NAN; 16];
    assert!(view.load_row(0, 1, 1, &mut row) && row[..5] == [2.0; 5] && row[5..] == [0.0; 11]);
}

#[test]
fn products_of_a_team_with_packed_matrices_stay_inside_their_panels() {
    let (out, width, rows, team) = (19, 5, 3, Team::new(2));
    let (weights, x) = (numbers(out * width), numbers(rows * width));
    let (matrix, mut y) = (PackedMatrix::new(&weights, width), vec![f32::NAN; rows * out]);
    panels::products(portable(), &team, &x, &mut [(&matrix, &mut y, crate::finish::Finish::default())]);
    for (at, &found) in y.iter().enumerate() {
        let (r, o) = (at / out, at % out);
        let expected: f32 = (0..width).map(|k| x[r * width + k] * weights[o * width + k]).sum();
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
}

#[test]
fn products_of_a_team_with_quantized_matrices_stay_inside_their_blocks() {
    let (out, width, team) = (17, 32, Team::new(2));
    let (weights, x) = (numbers(out * width), numbers(2 * width));
    for rounded in [QuantizedMatrix::rounded8, QuantizedMatrix::rounded4] {
        let matrix = rounded(width, &weights).expect("whole blocks");
        let mut widened = vec![f32::NAN; out * width];
        matrix.widen(0, &mut widened);
        let mut y = vec![f32::NAN; 2 * out];
        quantized::products(portable(), &team, &Vectors::new(portable(), &x, width), &mut [(&matrix, &mut y)]);
        for (at, &found) in y.iter().enumerate() {
            let (r, o) = (at / out, at % out);
            let expected: f32 = (0..width).map(|k| x[r * width + k] * widened[o * width + k]).sum();
            assert!((found - expected).abs() < 1e-2, "{found} {expected}");
        }
    }
}
