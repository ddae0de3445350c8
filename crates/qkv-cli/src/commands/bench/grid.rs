//! The cases to measure: typed shapes, shapes drawn at random, or the grid behind every speed claim.

use super::args::BenchArgs;
use super::case::{Case, Direction};
use super::shape::Shape;
use crate::dtype::Precision;

/// Batches of ordinary and long sequences, one very long head, wide heads, and many short sequences.
const SQUARE: [Shape; 6] = [
    square(8, 8, 512, 64),
    square(1, 8, 2048, 64),
    square(1, 1, 8192, 64),
    square(1, 8, 2048, 128),
    square(1, 2, 8192, 128),
    square(32, 8, 128, 64),
];

/// One new token: in one sequence, in eight, and in one with a very long cache.
const DECODE: [Shape; 3] = [
    Shape::new([1, 32, 8, 1, 4096, 128]),
    Shape::new([8, 32, 8, 1, 1024, 128]),
    Shape::new([1, 32, 8, 1, 131_072, 128]),
];

const fn square(b: usize, h: usize, n: usize, d: usize) -> Shape {
    Shape::new([b, h, h, n, n, d])
}

/// The number of shapes drawn for a run.
const DRAWN: usize = 24;
/// Floating-point operations of a drawn shape, forward and unmasked: from calls of a fraction of a millisecond to long
/// ones.
const WORK: std::ops::RangeInclusive<f64> = 1e8..=1.5e10;

/// Shapes drawn from a seed, each with whether it is causal: 1 to 64 heads, grouped or not, widths of 40 to 160, 60 to
/// 6,000 queries, and the same number of keys or another one.
fn drawn(seed: u64) -> Vec<(Shape, bool)> {
    let mut state = seed;
    let mut draw = move || {
        // SplitMix64 (Steele et al. 2014).
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ x >> 31) >> 11
    };
    let mut shapes = Vec::new();
    while shapes.len() < DRAWN {
        let mut one_of = |choices: &[usize]| choices[draw() as usize % choices.len()];
        let hq = one_of(&[1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64]);
        let group = one_of(&[1, 1, 1, 2, 4, 8]);
        let d = one_of(&[40, 48, 64, 64, 72, 80, 96, 112, 128, 128, 160]);
        let b = one_of(&[1, 1, 2, 4, 8, 16, 32]);
        let [square, causal] = [(); 2].map(|()| one_of(&[0, 1, 2]) > 0);
        // Logarithmically uniform.
        let mut length = || (60.0 * 100f64.powf(draw() as f64 / (1u64 << 53) as f64)) as usize;
        let n = length();
        let m = if square { n } else { length() };
        let shape = Shape::new([b, hq, if hq.is_multiple_of(group) { hq / group } else { hq }, n, m, d]);
        let case = Case { shape, precision: Precision::F32, causal: false, direction: Direction::Forward };
        if WORK.contains(&case.flops()) {
            shapes.push((shape, square && !causal));
        }
    }
    shapes
}

/// The shapes whose speed-up is measured: calls of a fraction of a millisecond, of a few milliseconds and of many.
const SCALING: [Shape; 3] = [square(16, 8, 96, 64), square(2, 12, 384, 64), square(1, 8, 2048, 64)];

/// The cases of `--scaling`.
pub(crate) fn scaling_cases(args: &BenchArgs) -> Vec<Case> {
    if args.draw.is_some() || !args.shapes.is_empty() {
        return cases(args);
    }
    let precisions = if args.precisions.is_empty() { &[Precision::F32, Precision::Bf16] } else { &args.precisions[..] };
    let directions = if args.directions.is_empty() { &[Direction::Forward] } else { &args.directions[..] };
    let mut cases = Vec::new();
    for &precision in precisions {
        for shape in SCALING {
            let case = |&direction| Case { shape, precision, causal: args.causal, direction };
            cases.extend(directions.iter().map(case));
        }
    }
    cases
}

/// The cases, in the order of measurement.
pub(crate) fn cases(args: &BenchArgs) -> Vec<Case> {
    if let Some(seed) = args.draw {
        let precisions =
            if args.precisions.is_empty() { &[Precision::F32, Precision::Bf16] } else { &args.precisions[..] };
        let directions =
            if args.directions.is_empty() { &[Direction::Forward, Direction::Backward] } else { &args.directions[..] };
        let mut cases = Vec::new();
        for &precision in precisions {
            for (shape, causal) in drawn(seed) {
                cases.extend(directions.iter().map(|&direction| Case { shape, precision, causal, direction }));
            }
        }
        return cases;
    }
    let all = args.shapes.is_empty();
    let precisions = match (&args.precisions[..], all) {
        ([], true) => &[Precision::F32, Precision::Bf16],
        ([], false) => &[Precision::F32][..],
        (typed, _) => typed,
    };
    let directions = match (&args.directions[..], all) {
        ([], true) => &Direction::ALL[..],
        ([], false) => &[Direction::Forward],
        (typed, _) => typed,
    };
    let mut cases = Vec::new();
    for &precision in precisions {
        if all {
            for shape in SQUARE {
                for causal in if args.causal { &[true][..] } else { &[false, true] } {
                    let squares = directions.iter().filter(|&&direction| direction != Direction::Decode);
                    cases.extend(squares.map(|&direction| Case { shape, precision, causal: *causal, direction }));
                }
            }
        } else {
            for &shape in &args.shapes {
                cases.extend(directions.iter().map(|&direction| Case {
                    shape,
                    precision,
                    causal: args.causal,
                    direction,
                }));
            }
        }
    }
    if all && directions.contains(&Direction::Decode) {
        // A single query at the end sees every key, causal or not.
        let decode = |shape, precision| Case { shape, precision, causal: args.causal, direction: Direction::Decode };
        cases
            .extend(DECODE.iter().flat_map(|&shape| precisions.iter().map(move |&precision| decode(shape, precision))));
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::args::ReportFormat;

    fn no_args() -> BenchArgs {
        BenchArgs {
            shapes: vec![],
            draw: None,
            precisions: vec![],
            causal: false,
            directions: vec![],
            lengths: None,
            scaling: None,
            train: false,
            images: false,
            on_device: false,
            threads: None,
            ranks: None,
            rank_timeout: std::time::Duration::from_secs(30),
            micro_batches: None,
            rank_way: None,
            seconds: 1.0,
            against: None,
            format: ReportFormat::Text,
        }
    }

    #[test]
    fn the_grid_has_every_type_mask_and_direction() {
        let cases = cases(&no_args());
        assert_eq!(cases.len(), 2 * 6 * 2 * 2 + 3 * 2);
        assert!(cases.iter().enumerate().all(|(at, case)| !cases[..at].contains(case)));
        let decode = cases.iter().filter(|case| case.direction == Direction::Decode);
        assert_eq!(decode.count(), 6);
    }

    #[test]
    fn arguments_narrow_the_grid() {
        let only = |args: BenchArgs| cases(&args).len();
        assert_eq!(only(BenchArgs { causal: true, ..no_args() }), 2 * 6 * 2 + 6);
        assert_eq!(only(BenchArgs { directions: vec![Direction::Decode], ..no_args() }), 6);
        assert_eq!(only(BenchArgs { precisions: vec![Precision::F64], ..no_args() }), 6 * 2 * 2 + 3);
    }

    #[test]
    fn shapes_are_drawn_by_their_seed() {
        let drawn = |seed| cases(&BenchArgs { draw: Some(seed), precisions: vec![Precision::F32], ..no_args() });
        let shapes = drawn(1);
        assert_eq!(shapes.len(), 2 * DRAWN);
        assert_eq!(shapes, drawn(1));
        assert_ne!(shapes, drawn(2));
        let any = |of: fn(&Case) -> bool| shapes.iter().any(of);
        assert!(any(|case| case.causal) && any(|case| case.shape.hk < case.shape.hq));
        assert!(any(|case| case.shape.n != case.shape.m) && any(|case| case.shape.n == case.shape.m && !case.causal));
        assert!(
            shapes
                .iter()
                .all(|case| WORK.contains(&Case { causal: false, direction: Direction::Forward, ..*case }.flops()))
        );
    }

    #[test]
    fn a_shape_alone_is_one_case() {
        let shapes = vec![Shape::new([1, 1, 1, 4, 4, 4])];
        let cases = cases(&BenchArgs { shapes: shapes.clone(), ..no_args() });
        let one = Case { shape: shapes[0], precision: Precision::F32, causal: false, direction: Direction::Forward };
        assert_eq!(cases, [one]);
    }
}
