//! Word alignments as JSON, the same for `qkv translate` and `qkv train`.

use qkv_explore::Matrix;
use serde::Serialize;

/// The weights from target words to source words.
#[derive(Debug, Serialize)]
pub(crate) struct AlignmentJson<'a> {
    /// Source words; a Han character or a punctuation mark is a word.
    source: &'a [String],
    target: &'a [String],
    /// One row per target word, one weight per source word. A row sums to less than 1 if the end-of-source token took
    /// the rest.
    weights: &'a [Vec<f32>],
    #[serde(skip_serializing_if = "Option::is_none")]
    pharaoh: Option<String>,
}

impl<'a> AlignmentJson<'a> {
    pub fn new(matrix: &'a Matrix) -> AlignmentJson<'a> {
        AlignmentJson { source: &matrix.columns, target: &matrix.rows, weights: &matrix.weights, pharaoh: None }
    }

    /// With the links in Pharaoh format.
    pub fn with_links(matrix: &'a Matrix) -> AlignmentJson<'a> {
        AlignmentJson { pharaoh: Some(matrix.pharaoh()), ..AlignmentJson::new(matrix) }
    }
}
