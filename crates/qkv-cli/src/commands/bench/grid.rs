//! The cases that are measured: the shapes that were typed, or the grid behind every speed claim.

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

/// The cases, in the order of measurement.
pub(crate) fn cases(args: &BenchArgs) -> Vec<Case> {
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
            precisions: vec![],
            causal: false,
            directions: vec![],
            lengths: None,
            train: false,
            on_device: false,
            threads: None,
            ranks: None,
            rank_timeout: std::time::Duration::from_secs(30),
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
    fn a_shape_alone_is_one_case() {
        let shapes = vec![Shape::new([1, 1, 1, 4, 4, 4])];
        let cases = cases(&BenchArgs { shapes: shapes.clone(), ..no_args() });
        let one = Case { shape: shapes[0], precision: Precision::F32, causal: false, direction: Direction::Forward };
        assert_eq!(cases, [one]);
    }
}
