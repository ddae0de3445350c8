//! Measures of heads on matrices whose results can be computed by hand.

use qkv::Tensor;
use qkv_explore::measures::{self, HeadMeasures, MEASURES};
use qkv_explore::{Layer, Matrix, MatrixOptions, Recording, Side, WeightSource, pharaoh, rollout};

/// A recording of one layer with given weights, from words to themselves.
fn recording(words: &[&str], heads: &[&[&[f32]]]) -> Recording {
    let n = words.len();
    let weights = Tensor::from_fn([heads.len(), n, n], |[h, i, j]| heads[h][i][j]);
    let layer = Layer {
        name: "layers.0".into(),
        group: "layers".into(),
        queries: 0,
        keys: 0,
        weights: WeightSource::Stored(weights),
        importance: None,
    };
    let sides = vec![Side::of_words("tokens", words.iter().copied())];
    Recording { text: String::new(), output: None, sides, layers: vec![layer], steps: Vec::new(), form: None }
}

fn value(measured: &HeadMeasures, id: &str) -> Option<f64> {
    let at = MEASURES.iter().position(|measure| measure.id == id).expect("a measure");
    measured.values[at]
}

fn near(found: Option<f64>, expected: f64) {
    let found = found.expect("it is defined");
    assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
}

#[test]
fn a_head_that_looks_everywhere_alike_has_the_largest_entropy() {
    let row: &[f32] = &[0.25; 4];
    let of = measures::measure(&recording(&["a", "b", "c", "d"], &[&[row; 4]]), 0.1).expect("it has weights");
    near(value(&of[0], "entropy"), 4f64.ln());
    near(value(&of[0], "first"), 0.25);
    near(value(&of[0], "itself"), 0.25);
    near(value(&of[0], "previous"), 0.25);
    // |i − j| over all pairs of four: (0+1+2+3) + (1+0+1+2) + (2+1+0+1) + (3+2+1+0) = 20 quarters, by four rows.
    near(value(&of[0], "distance"), 20.0 * 0.25 / 4.0);
    near(value(&of[0], "above"), 1.0);
    assert_eq!(value(&of[0], "importance"), None);
}

#[test]
fn a_head_that_looks_at_the_token_before_is_told_from_one_that_looks_at_itself() {
    let before: &[&[f32]] = &[&[1.0, 0.0, 0.0], &[1.0, 0.0, 0.0], &[0.0, 1.0, 0.0]];
    let itself: &[&[f32]] = &[&[1.0, 0.0, 0.0], &[0.0, 1.0, 0.0], &[0.0, 0.0, 1.0]];
    let of = measures::measure(&recording(&["a", "b", "c"], &[before, itself]), 0.1).expect("it has weights");
    near(value(&of[0], "previous"), 1.0);
    near(value(&of[0], "itself"), 1.0 / 3.0);
    near(value(&of[0], "entropy"), 0.0);
    near(value(&of[0], "above"), 1.0 / 3.0);
    near(value(&of[1], "itself"), 1.0);
    near(value(&of[1], "previous"), 0.0);
    near(value(&of[1], "distance"), 0.0);
}

#[test]
fn a_head_that_looks_behind_an_earlier_occurrence_is_an_induction_head() {
    // "a b a b": the third token is an `a`, which was followed by the token at 1; the fourth a `b`, followed by that at
    // 2.
    let looks: &[&[f32]] =
        &[&[1.0, 0.0, 0.0, 0.0], &[1.0, 0.0, 0.0, 0.0], &[0.1, 0.7, 0.2, 0.0], &[0.5, 0.0, 0.3, 0.2]];
    let of = measures::measure(&recording(&["a", "b", "a", "b"], &[looks]), 0.1).expect("it has weights");
    near(value(&of[0], "induction"), (0.7 + 0.3) / 2.0);
    let once = measures::measure(&recording(&["a", "b", "c", "d"], &[looks]), 0.1).expect("it has weights");
    assert_eq!(value(&once[0], "induction"), None, "no token comes twice");
}

#[test]
fn what_is_between_two_sequences_has_no_distance_and_no_diagonal() {
    let mut of = recording(&["a", "b"], &[&[&[0.5, 0.5], &[0.25, 0.75]]]);
    of.sides.push(Side::of_words("others", ["x", "y"]));
    of.layers[0].keys = 1;
    let measured = measures::measure(&of, 0.3).expect("it has weights");
    for id in ["previous", "itself", "induction", "distance"] {
        assert_eq!(value(&measured[0], id), None, "{id}");
    }
    near(value(&measured[0], "first"), 0.375);
    near(value(&measured[0], "above"), 0.75);
}

#[test]
fn rollout_through_two_layers_is_the_product_of_their_mixtures() {
    let one: &[&[f32]] = &[&[1.0, 0.0], &[0.5, 0.5]];
    let mut of = recording(&["a", "b"], &[one, &[&[0.0, 1.0], &[1.0, 0.0]]]);
    let second = Layer { name: "layers.1".into(), ..recording(&["a", "b"], &[one]).layers.remove(0) };
    of.layers.push(second);
    // A₁ = ½ I + ½ mean = [[.5, .5], [.75, .25]] halves with the identity: [[.75, .25], [.375, .625]].
    let first = rollout(&of, &[0], 0..2).expect("from a sequence to itself");
    assert_eq!(first.data(), [0.75, 0.25, 0.375, 0.625]);
    // A₂ = ½ I + ½ one = [[1, 0], [.25, .75]]; A₂ A₁.
    let both = rollout(&of, &[0, 1], 0..2).expect("from a sequence to itself");
    let expected = [0.75, 0.25, 0.25 * 0.75 + 0.75 * 0.375, 0.25 * 0.25 + 0.75 * 0.625];
    both.data()
        .iter()
        .zip(expected)
        .for_each(|(&found, expected): (&f32, f32)| assert!((found - expected).abs() < 1e-6));
    let row = rollout(&of, &[0, 1], 1..2).expect("one row of it");
    assert_eq!(row.data(), &both.data()[2..]);
    for row in both.data().chunks(2) {
        assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }
}

#[test]
fn links_agree_with_a_reference_as_far_as_they_are_the_same() {
    let of = recording(&["a", "b", "c"], &[&[&[0.9, 0.1, 0.0], &[0.35, 0.0, 0.65], &[0.0, 1.0, 0.0]]]);
    let matrix =
        Matrix::of(&of, 0, &MatrixOptions { head: Some(0), ..MatrixOptions::default() }).expect("it has weights");
    assert_eq!(matrix.pharaoh(), "0-0 0-1 1-2 2-1");
    let agreement = matrix.agreement(&pharaoh("0-0 1-2 2-2").expect("links"));
    assert_eq!((agreement.precision, agreement.recall), (0.5, 2.0 / 3.0));
    assert!((agreement.error_rate - (1.0 - 4.0 / 7.0)).abs() < 1e-12);
    assert!(pharaoh("0-0 1:2").expect_err("no link").to_string().contains("`1:2`"));
}

#[test]
fn pieces_of_a_word_are_summed_as_columns_and_averaged_as_rows() {
    let mut of = recording(&["re", "cord", "it"], &[&[&[0.5, 0.25, 0.25], &[0.1, 0.3, 0.6], &[0.2, 0.2, 0.6]]]);
    for (at, word) in [0, 0, 1].into_iter().enumerate() {
        of.sides[0].tokens[at].word = Some(word);
    }
    let matrix =
        Matrix::of(&of, 0, &MatrixOptions { words: true, ..MatrixOptions::default() }).expect("it has weights");
    assert_eq!((matrix.rows.join(" "), matrix.columns.join(" ")), ("record it".into(), "record it".into()));
    let expected = [[(0.75 + 0.4) / 2.0, (0.25 + 0.6) / 2.0], [0.4, 0.6]];
    for (found, expected) in matrix.weights.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < 1e-6, "{:?}", matrix.weights);
    }
}
