use super::*;

/// Every unit of this CPU. Prints which ones a test has to skip.
fn units() -> Vec<(Isa, Bf16Gemm)> {
    for name in ["avx512bf16", "amx"].iter().filter(|name| Isa::named(name).is_none()) {
        println!("skipped: no {name} on this CPU");
    }
    Isa::available().into_iter().filter_map(|isa| Some((isa, Bf16Gemm::new(isa)?))).collect()
}

fn number(i: usize, j: usize) -> f32 {
    ((i * 37 + j * 101) % 61) as f32 / 16.0 - 1.9
}

/// Rows of bf16 with zeros after the width.
fn rows(count: usize, width: usize, row: usize) -> Vec<bf16> {
    let at = |x: usize| if x % row < width { bf16::from_f32(number(x / row, x % row)) } else { bf16::ZERO };
    (0..count * row).map(at).collect()
}

#[test]
fn every_way_to_pack_an_operand_gives_the_same_product() {
    for (isa, gemm) in units() {
        for (m, n, k) in
            [(1, 1, 1), (16, 16, 32), (5, 40, 64), (64, 128, 20), (33, 17, 130), (48, 96, 96), (48, 80, 64)]
        {
            let side = |x: usize| x.div_ceil(SIDE) * SIDE;
            let (a, b) = (rows(side(m), k, padded_depth(k)), rows(n, k, padded_depth(k)));
            let expected = |i: usize, j: usize| -> f32 {
                (0..k).map(|x| a[i * padded_depth(k) + x].to_f32() * b[j * padded_depth(k) + x].to_f32()).sum()
            };
            // B packed from its columns and from its rows.
            let mut columns = vec![bf16::ONE; packed_b_len(k, n)];
            gemm.pack_b_transposed(&b, padded_depth(k), n, padded_depth(k) / DEPTH, &mut columns);
            let turned: Vec<bf16> = (0..k * side(n))
                .map(|x| if x % side(n) < n { b[x % side(n) * padded_depth(k) + x / side(n)] } else { bf16::ZERO })
                .collect();
            let mut straight = vec![bf16::ONE; packed_b_len(k, n)];
            gemm.pack_b(&turned, side(n), k, side(n) / SIDE, &mut straight);
            assert_eq!(columns, straight, "{isa} {m} {n} {k}");
            // From f32.
            let wide: Vec<f32> = turned.iter().map(|x| x.to_f32()).collect();
            let mut narrowed = vec![bf16::ONE; packed_b_len(k, n)];
            gemm.narrow_pack_b(&wide, side(n), k, side(n) / SIDE, &mut narrowed, padded_depth(k) / DEPTH);
            assert_eq!(columns, narrowed, "{isa} {m} {n} {k}");
            // A packed from its columns.
            let across: Vec<bf16> = (0..k * side(m)).map(|x| a[x % side(m) * padded_depth(k) + x / side(m)]).collect();
            let mut left = vec![bf16::ONE; side(m) * padded_depth(k)];
            gemm.pack_a_transposed(&across, side(m), k, side(m) / SIDE, &mut left, padded_depth(k) / DEPTH);
            assert_eq!(a, left, "{isa} {m} {n} {k}");

            let (row, chunks) = (side(n) + 16, padded_depth(k) / DEPTH);
            let mut c = vec![1.0f32; side(m) * row];
            let right = PackedB { data: &columns, chunks, non_temporal: m % 2 == 0 };
            let left = PackedA { data: &a, row: padded_depth(k) };
            gemm.product(Target::accumulate(&mut c, row), left, right, m, 0..side(n) / SIDE, 0..chunks);
            for i in 0..m {
                for j in 0..n {
                    let (found, expected) = (c[i * row + j], expected(i, j) + 1.0);
                    assert!((found - expected).abs() < 1e-3 * (k as f32), "{isa} {i} {j}: {found} {expected}");
                }
                assert_eq!(c[i * row + side(n)..(i + 1) * row], [1.0; 16]);
            }
            // Chunk by chunk and panel by panel, the bits are the same.
            let mut whole = vec![0.0f32; side(m) * row];
            gemm.product(Target::overwrite(&mut whole, row), left, right, m, 0..side(n) / SIDE, 0..chunks);
            let mut parts = vec![7.0f32; side(m) * row];
            for panel in 0..side(n) / SIDE {
                for chunk in 0..chunks {
                    let update = if chunk > 0 { Update::Accumulate } else { Update::Overwrite };
                    gemm.product(
                        Target { data: &mut parts, row, update },
                        left,
                        right,
                        m,
                        panel..panel + 1,
                        chunk..chunk + 1,
                    );
                }
            }
            for i in 0..m {
                assert_eq!(whole[i * row..][..n], parts[i * row..][..n], "{isa} {m} {n} {k}");
            }
        }
    }
}

#[test]
fn rounding_a_gradient_in_the_same_pass_equals_rounding_it_afterwards() {
    use crate::tile::{Span, softmax_gradient};
    for (isa, gemm) in units() {
        for (rows, width) in [(32, 128), (31, 96), (1, 16), (18, 112), (7, 48)] {
            let (row, chunks, chunk) = (128, 3, 1);
            let mut scores: Vec<f32> = (0..32 * row).map(|x| number(x / row, x % row)).collect();
            scores[5] = f32::NEG_INFINITY;
            let mut grads: Vec<f32> = (0..32 * row).map(|x| number(x % row, x / row + 3)).collect();
            grads[5] = f32::NAN;
            let lse: Vec<f32> = (0..rows).map(|r| 3.0 + number(r, 1)).collect();
            let delta: Vec<f32> = (0..rows).map(|r| number(r, 2)).collect();
            let spans: Vec<Span> =
                (0..rows as u16).map(|r| Span { start: r % 2, end: (width as u16 / 16 - r % 3).max(1) }).collect();
            for spans in [&[], &spans[..]] {
                let how = Exponential { scale: 0.7, spans, accurate_exp: true };
                let of = RowGradient { lse: &lse, delta: &delta, entropy: &[], scale: 0.3 };
                let (mut later_scores, mut later) = (scores.clone(), grads.clone());
                softmax_gradient(isa, &mut later_scores, &mut later, row, rows, width, how, of);
                let mut made = [(); 2].map(|()| vec![bf16::ONE; chunks * BLOCK * width / SIDE]);
                let mut expected = made.clone();
                let [weights, turned] = &mut made;
                let mut grads = grads.clone();
                let into = GradientOperands { weights, grads: turned, chunks, chunk };
                gemm.softmax_gradient(&scores, &mut grads, row, rows, width, how, of, into);
                for (tile, expected) in [&later_scores, &later].into_iter().zip(&mut expected) {
                    let out = &mut expected[chunk * BLOCK..];
                    gemm.narrow_pack_b(tile, row, rows, width / SIDE, out, chunks);
                }
                gemm.narrow_rows(&mut later, row, rows, width);
                // Both exponentials are accurate to more than twice the bits of a bf16.
                let near = |a: bf16, b: bf16| (a.to_f32() - b.to_f32()).abs() <= b.to_f32().abs() / 120.0;
                for (made, expected) in made.iter().zip(&expected) {
                    assert!(made.iter().zip(expected).all(|(&a, &b)| near(a, b)), "{isa} {rows} {width}");
                }
                for r in 0..rows {
                    let [a, b] = [&grads, &later].map(|tile| &as_bf16(&tile[r * row..])[..padded_depth(width)]);
                    assert!(a.iter().zip(b).all(|(&a, &b)| near(a, b)), "{isa} {rows} {width}");
                }
            }
        }
    }
}

#[test]
fn a_row_whose_log_sum_exp_is_nan_has_nan_weights_whatever_the_payload() {
    for (_, gemm) in units() {
        let (scores, mut grads) = (vec![1.0f32; 2 * 32], vec![1.0f32; 2 * 32]);
        let [mut weights, mut turned] = [(); 2].map(|()| vec![bf16::ZERO; 2 * BLOCK]);
        let how = Exponential { scale: 1.0, spans: &[], accurate_exp: false };
        let lse = [f32::from_bits(0x7fff_ffff), 1.0];
        let of = RowGradient { lse: &lse, delta: &[0.0; 2], entropy: &[], scale: 1.0 };
        let into = GradientOperands { weights: &mut weights, grads: &mut turned, chunks: 1, chunk: 0 };
        gemm.softmax_gradient(&scores, &mut grads, 32, 2, 32, how, of, into);
        assert!(weights[..DEPTH].chunks_exact(2).all(|two| two[0].is_nan() && two[1] == bf16::ONE));
        assert!(turned[..DEPTH].chunks_exact(2).all(|two| two[0].is_nan() && two[1] == bf16::ONE));
    }
}

#[test]
fn the_largest_score_so_far_has_a_weight_of_exactly_one_in_any_tile() {
    for (isa, gemm) in units() {
        for (rows, width) in [(32, 128), (32, 96), (21, 128)] {
            let mut max = vec![f32::NEG_INFINITY; rows];
            let [mut sum, mut factor] = [(); 2].map(|()| vec![0.0f32; rows]);
            for tile in 0..4 {
                // Every third row has its largest score in the second tile, the others in the last.
                let score = |r: usize, j: usize| {
                    number(r, j) + if r.is_multiple_of(3) && tile == 1 { 9.0 } else { tile as f32 * 0.4 }
                };
                let mut scores: Vec<f32> = (0..rows * 128).map(|x| score(x / 128, x % 128)).collect();
                let before = max.clone();
                let running = Running { max: &mut max, sum: &mut sum, entropy_acc: &mut [], factor: &mut factor };
                let how = Exponential { scale: 1.0, spans: &[], accurate_exp: false };
                gemm.softmax(&mut scores, 128, rows, width, how, running);
                for r in 0..rows {
                    let most = (0..width).map(|j| score(r, j)).fold(f32::NEG_INFINITY, f32::max);
                    assert_eq!(max[r], most.max(before[r]), "{isa} {rows} {width} {tile} {r}");
                    let heaviest = as_bf16(&scores[r * 128..])[..width].iter().map(|x| x.to_f32()).fold(0.0, f32::max);
                    assert!(if most >= before[r] { heaviest == 1.0 } else { heaviest <= 1.0 }, "{isa} {heaviest}");
                    let shrink = if tile == 0 { 0.0 } else { (before[r] - max[r]).exp() };
                    assert!((factor[r] - shrink).abs() <= 1e-6, "{isa} {} {shrink}", factor[r]);
                }
            }
        }
    }
}

#[test]
fn negligible_weights_are_zero_and_change_no_sum() {
    for (isa, gemm) in units() {
        let (rows, width) = (32, 128);
        // From the largest weight down to less than the smallest f32, in every panel.
        let score = |r: usize, j: usize| -((r + 5 * j) as f32 % 131.0) * (1.0 + r as f32 / 16.0);
        let mut scores: Vec<f32> = (0..rows * width).map(|x| score(x / width, x % width)).collect();
        let [mut max, mut sum, mut factor] = [f32::NEG_INFINITY, 0.0, 1.0].map(|x| vec![x; rows]);
        let running = Running { max: &mut max, sum: &mut sum, entropy_acc: &mut [], factor: &mut factor };
        let how = Exponential { scale: 1.0, spans: &[], accurate_exp: false };
        gemm.softmax(&mut scores, width, rows, width, how, running);
        for r in 0..rows {
            let truth = |j: usize| f64::from(score(r, j) - max[r]).exp();
            for (j, weight) in as_bf16(&scores[r * width..])[..width].iter().enumerate() {
                let (weight, truth) = (f64::from(weight.to_f32()), truth(j));
                let fits = (weight - truth).abs() <= truth / 200.0;
                assert!(fits || weight == 0.0 && truth < 2f64.powi(-99), "{isa} {r} {j}: {weight} {truth}");
            }
            let all: f64 = (0..width).map(truth).sum();
            assert!((f64::from(sum[r]) - all).abs() <= all * 1e-5, "{isa} {r}: {} {all}", sum[r]);
        }
    }
}

#[test]
fn rows_are_rounded_in_place() {
    for (_, gemm) in units() {
        let mut tile: Vec<f32> = (0..3 * 64).map(|x| 1.0 + x as f32 * 1.1).collect();
        let before = tile.clone();
        gemm.narrow_rows(&mut tile, 64, 3, 48);
        for r in 0..3 {
            let row = &as_bf16(&tile[r * 64..])[..64];
            for x in 0..48 {
                assert_eq!(row[x], bf16::from_f32(before[r * 64 + x]));
            }
            assert_eq!(row[48..], [bf16::ZERO; 16]);
        }
    }
}
