//! An alignment as JSON tells it: source, target and weights, under the names that `qkv translate` gives them.

use qkv_explore::Matrix;
use serde::Serialize;

/// Weights from target words to source words.
#[derive(Debug, Serialize)]
pub(crate) struct Aligned<'a> {
    /// The words of the source: Han characters and signs are words.
    source: &'a [String],
    /// Those of the target.
    target: &'a [String],
    /// One row for each target word, one weight for each source word. What is missing to 1 went to the end of the source.
    weights: &'a [Vec<f32>],
    #[serde(skip_serializing_if = "Option::is_none")]
    pharaoh: Option<String>,
}

impl<'a> Aligned<'a> {
    /// The words alone.
    pub fn new(matrix: &'a Matrix) -> Aligned<'a> {
        Aligned { source: &matrix.columns, target: &matrix.rows, weights: &matrix.weights, pharaoh: None }
    }

    /// With the links that follow from them.
    pub fn linked(matrix: &'a Matrix) -> Aligned<'a> {
        Aligned { pharaoh: Some(matrix.pharaoh()), ..Aligned::new(matrix) }
    }
}
