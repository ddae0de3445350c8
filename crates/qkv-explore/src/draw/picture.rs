//! A picture: weights and how they are drawn. Checks and pools the matrix; the files beside this one render it.

use super::palette::{Palette, Theme};
use super::scale::{Scale, Scaled};
use crate::words::Matrix;
use qkv_models::{Error, Result};

/// Weights with everything needed to draw them.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// The weights.
    pub matrix: Matrix,
    /// The title above it.
    pub title: Option<String>,
    /// How weights map to levels.
    pub scale: Scale,
    /// The color map.
    pub palette: Palette,
    /// The background.
    pub theme: Theme,
}

impl From<Matrix> for Picture {
    fn from(matrix: Matrix) -> Picture {
        Picture { matrix, title: None, scale: Scale::default(), palette: Palette::default(), theme: Theme::default() }
    }
}

/// A max-pooled matrix.
#[derive(Clone, Debug)]
pub(crate) struct Pooled {
    pub matrix: Matrix,
    /// Rows and columns per cell; `[1, 1]` if nothing was pooled.
    pub covers: [usize; 2],
}

impl Pooled {
    /// Pools to at most `rows` × `columns` cells.
    pub fn of(matrix: &Matrix, [rows, columns]: [usize; 2]) -> Pooled {
        let covers =
            [matrix.rows.len().div_ceil(rows.max(1)).max(1), matrix.columns.len().div_ceil(columns.max(1)).max(1)];
        let [down, across] = covers;
        if covers == [1, 1] {
            return Pooled { matrix: matrix.clone(), covers };
        }
        let largest = |rows: &[Vec<f32>], from: usize| {
            let cells = rows.iter().flat_map(|row| &row[from..(from + across).min(row.len())]);
            cells.copied().fold(f32::NEG_INFINITY, f32::max)
        };
        let starts = || (0..matrix.columns.len()).step_by(across);
        let pooled = Matrix {
            rows: matrix.rows.iter().step_by(down).cloned().collect(),
            columns: matrix.columns.iter().step_by(across).cloned().collect(),
            weights: matrix.weights.chunks(down).map(|rows| starts().map(|at| largest(rows, at)).collect()).collect(),
        };
        Pooled { matrix: pooled, covers }
    }

    /// A note about the pooling, if there was any.
    pub fn note(&self) -> Option<String> {
        let [down, across] = self.covers;
        (down * across > 1).then(|| format!("each cell is the largest of {down} × {across} weights"))
    }
}

impl Picture {
    /// Checks that the matrix is not empty and has one weight per row and column.
    pub(crate) fn check(&self) -> Result<()> {
        let Matrix { rows, columns, weights } = &self.matrix;
        if rows.is_empty() || columns.is_empty() {
            return Err(Error::invalid("there are no weights to draw"));
        }
        if weights.len() != rows.len() || weights.iter().any(|row| row.len() != columns.len()) {
            let (n, m) = (rows.len(), columns.len());
            return Err(Error::invalid(format!("the number of weights does not match their {n} × {m} labels")));
        }
        Ok(())
    }

    /// Its scale over all weights.
    pub(crate) fn scaled(&self) -> Scaled {
        Scaled::of(&self.matrix, self.scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(rows: usize, columns: usize) -> Matrix {
        Matrix {
            rows: (0..rows).map(|at| at.to_string()).collect(),
            columns: (0..columns).map(|at| at.to_string()).collect(),
            weights: (0..rows).map(|i| (0..columns).map(|j| (i * columns + j) as f32).collect()).collect(),
        }
    }

    #[test]
    fn a_cell_is_the_largest_of_what_it_covers() {
        let pooled = Pooled::of(&counted(5, 4), [2, 2]);
        assert_eq!(pooled.covers, [3, 2]);
        assert_eq!(pooled.matrix.weights, [[9.0, 11.0], [17.0, 19.0]]);
        assert_eq!(
            (pooled.matrix.rows, pooled.matrix.columns),
            (vec!["0".into(), "3".into()], vec!["0".into(), "2".into()])
        );
    }

    #[test]
    fn a_matrix_that_fits_is_not_pooled() {
        let pooled = Pooled::of(&counted(5, 4), [5, 4]);
        assert_eq!((pooled.matrix, pooled.covers), (counted(5, 4), [1, 1]));
    }

    #[test]
    fn weights_without_labels_are_refused() {
        let mut picture = Picture::from(counted(2, 2));
        picture.matrix.weights[1].pop();
        assert!(picture.check().unwrap_err().to_string().contains("2 × 2 labels"));
        assert!(Picture::from(counted(0, 2)).check().is_err());
    }
}
