//! Weights between words: word pieces are merged, columns by sum, rows by mean.

use crate::recording::{Recording, Side};
use qkv::Tensor;
use qkv_models::Result;
use serde::Serialize;
use std::ops::Range;

/// Weights with labels for rows and columns, in the form in which they are drawn and exported.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Matrix {
    /// Labels of the rows (queries).
    pub rows: Vec<String>,
    /// Labels of the columns (keys).
    pub columns: Vec<String>,
    /// One row per query, one weight per key.
    pub weights: Vec<Vec<f32>>,
}

/// Which weights of a layer a [`Matrix`] holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MatrixOptions {
    /// One head, or the mean of all.
    pub head: Option<usize>,
    /// A range of rows, or all.
    pub rows: Option<Range<usize>>,
    /// A range of columns, or all.
    pub columns: Option<Range<usize>>,
    /// Merge word pieces.
    pub words: bool,
    /// Leave out special tokens.
    pub text_only: bool,
}

impl Matrix {
    /// The weights of a layer.
    ///
    /// # Errors
    /// If there is no such head, row or column.
    pub fn of(recording: &Recording, layer: usize, options: &MatrixOptions) -> Result<Matrix> {
        let of = &recording.layers[layer];
        let [n, m] = of.size();
        let (rows, cols) = (options.rows.clone().unwrap_or(0..n), options.columns.clone().unwrap_or(0..m));
        let weights = match options.head {
            Some(head) => of.rectangle(head, rows.clone(), cols.clone())?,
            None => {
                let mut mean: Tensor<f32, 2> = Tensor::from_fn([rows.len(), cols.len()], |_| 0.0);
                for head in 0..of.heads() {
                    let one = of.rectangle(head, rows.clone(), cols.clone())?;
                    let share = 1.0 / of.heads() as f32;
                    mean.data_mut().iter_mut().zip(one.data()).for_each(|(sum, &w)| *sum += w * share);
                }
                mean
            }
        };
        let (down, across) = (recording.queries(layer), recording.keys(layer));
        let down = Labels::of(down, rows, options);
        let across = Labels::of(across, cols, options);
        Ok(down.merged(&across, &weights))
    }
}

impl Matrix {
    /// A long layer, max-pooled to cells of `each` × `each` weights, of one head or as the mean of all pooled heads. A
    /// cell is labeled by its first token.
    ///
    /// # Errors
    /// If there is no such head.
    pub fn pooled(recording: &Recording, layer: usize, head: Option<usize>, each: usize) -> Result<Matrix> {
        let of = &recording.layers[layer];
        let [n, m] = of.size();
        let each = each.max(1);
        let heads = head.map_or(0..of.heads(), |head| head..head + 1);
        let share = 1.0 / heads.len().max(1) as f32;
        let mut weights = vec![vec![0.0; m.div_ceil(each)]; n.div_ceil(each)];
        for head in heads {
            let cells = of.map(head, 0..n, 0..m, [each, each], qkv::Pool::Max, None)?;
            for (sums, row) in weights.iter_mut().zip(cells.data().chunks_exact(cells.shape()[1].max(1))) {
                sums.iter_mut().zip(row).for_each(|(sum, &w)| *sum += share * w);
            }
        }
        let names = |side: &Side| side.tokens.iter().step_by(each).map(|token| token.text.clone()).collect();
        Ok(Matrix { rows: names(recording.queries(layer)), columns: names(recording.keys(layer)), weights })
    }
}

/// The labels of one axis, and the tokens behind each.
struct Labels {
    names: Vec<String>,
    /// For each token of the range, the index of its label.
    owners: Vec<Option<usize>>,
}

impl Labels {
    fn of(side: &Side, range: Range<usize>, options: &MatrixOptions) -> Labels {
        let (mut names, mut owners): (Vec<String>, Vec<Option<usize>>) = (Vec::new(), Vec::new());
        let mut last = None;
        for token in &side.tokens[range] {
            if token.special && options.text_only {
                owners.push(None);
                continue;
            }
            match token.word.filter(|_| options.words) {
                Some(word) if last == Some(word) => names.last_mut().expect("of this word").push_str(&token.text),
                word => {
                    names.push(token.text.clone());
                    last = word;
                }
            }
            owners.push(Some(names.len() - 1));
        }
        Labels { names, owners }
    }

    /// Merges tokens: columns by sum, rows by mean.
    fn merged(self, across: &Labels, weights: &Tensor<f32, 2>) -> Matrix {
        let mut merged = vec![vec![0.0; across.names.len()]; self.names.len()];
        let mut pieces = vec![0usize; self.names.len()];
        self.owners.iter().flatten().for_each(|&row| pieces[row] += 1);
        for (i, &row) in self.owners.iter().enumerate() {
            let Some(row) = row else { continue };
            for (j, &column) in across.owners.iter().enumerate() {
                if let Some(column) = column {
                    merged[row][column] += weights[[i, j]] / pieces[row] as f32;
                }
            }
        }
        Matrix { rows: self.names, columns: across.names.clone(), weights: merged }
    }
}
