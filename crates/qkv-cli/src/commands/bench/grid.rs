//! Which cases are measured: the shapes that were typed, or the grid that speed claims are made over.

use super::asked::Asked;
use super::case::{Case, Direction};
use super::shape::Shape;
use crate::number::Precision;

/// Batches of ordinary sequences, long ones, one very long head, wide heads, and many short ones.
const SQUARE: [Shape; 6] = [
    square(8, 8, 512, 64),
    square(1, 8, 2048, 64),
    square(1, 1, 8192, 64),
    square(1, 8, 2048, 128),
    square(1, 2, 8192, 128),
    square(32, 8, 128, 64),
];

/// One new token: of one conversation, of eight, and of one with a very long past.
const DECODE: [Shape; 3] = [
    Shape::new([1, 32, 8, 1, 4096, 128]),
    Shape::new([8, 32, 8, 1, 1024, 128]),
    Shape::new([1, 32, 8, 1, 131_072, 128]),
];

const fn square(b: usize, h: usize, n: usize, d: usize) -> Shape {
    Shape::new([b, h, h, n, n, d])
}

/// The cases that were asked for, in the order in which they are measured.
pub(crate) fn cases(asked: &Asked) -> Vec<Case> {
    let all = asked.shapes.is_empty();
    let precisions = match (&asked.precisions[..], all) {
        ([], true) => &[Precision::F32, Precision::Bf16],
        ([], false) => &[Precision::F32][..],
        (typed, _) => typed,
    };
    let directions = match (&asked.directions[..], all) {
        ([], true) => &Direction::ALL[..],
        ([], false) => &[Direction::Forward],
        (typed, _) => typed,
    };
    let mut cases = Vec::new();
    for &precision in precisions {
        if all {
            for shape in SQUARE {
                for causal in if asked.causal { &[true][..] } else { &[false, true] } {
                    let squares = directions.iter().filter(|&&direction| direction != Direction::Decode);
                    cases.extend(squares.map(|&direction| Case { shape, precision, causal: *causal, direction }));
                }
            }
        } else {
            for &shape in &asked.shapes {
                cases.extend(directions.iter().map(|&direction| Case {
                    shape,
                    precision,
                    causal: asked.causal,
                    direction,
                }));
            }
        }
    }
    if all && directions.contains(&Direction::Decode) {
        // One query sees every key, causal or not.
        let decode = |shape, precision| Case { shape, precision, causal: asked.causal, direction: Direction::Decode };
        cases
            .extend(DECODE.iter().flat_map(|&shape| precisions.iter().map(move |&precision| decode(shape, precision))));
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::asked::Form;

    fn nothing() -> Asked {
        Asked {
            shapes: vec![],
            precisions: vec![],
            causal: false,
            directions: vec![],
            lengths: None,
            train: false,
            on_card: false,
            threads: None,
            seconds: 1.0,
            against: None,
            form: Form::Text,
        }
    }

    #[test]
    fn the_grid_has_every_type_mask_and_direction() {
        let cases = cases(&nothing());
        assert_eq!(cases.len(), 2 * 6 * 2 * 2 + 3 * 2);
        assert!(cases.iter().enumerate().all(|(at, case)| !cases[..at].contains(case)));
        let decode = cases.iter().filter(|case| case.direction == Direction::Decode);
        assert_eq!(decode.count(), 6);
    }

    #[test]
    fn choices_narrow_the_grid() {
        let only = |asked: Asked| cases(&asked).len();
        assert_eq!(only(Asked { causal: true, ..nothing() }), 2 * 6 * 2 + 6);
        assert_eq!(only(Asked { directions: vec![Direction::Decode], ..nothing() }), 6);
        assert_eq!(only(Asked { precisions: vec![Precision::F64], ..nothing() }), 6 * 2 * 2 + 3);
    }

    #[test]
    fn a_shape_alone_is_one_case() {
        let shapes = vec![Shape::new([1, 1, 1, 4, 4, 4])];
        let cases = cases(&Asked { shapes: shapes.clone(), ..nothing() });
        let one = Case { shape: shapes[0], precision: Precision::F32, causal: false, direction: Direction::Forward };
        assert_eq!(cases, [one]);
    }
}
