//! A picture: weights, and how they are painted. What it becomes (a drawing in a terminal, SVG, PNG) is in the files beside this
//! one; here it is checked, and made small enough to be looked at.

use super::palette::{Palette, Theme};
use super::scale::{Scale, Scaled};
use crate::words::Matrix;
use qkv_models::{Error, Result};

/// Weights with all that a drawing of them needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// What is drawn.
    pub matrix: Matrix,
    /// What stands above it.
    pub title: Option<String>,
    /// Which weight is drawn how strongly.
    pub scale: Scale,
    /// In which colours.
    pub palette: Palette,
    /// On which paper.
    pub theme: Theme,
}

impl From<Matrix> for Picture {
    fn from(matrix: Matrix) -> Picture {
        Picture { matrix, title: None, scale: Scale::default(), palette: Palette::default(), theme: Theme::default() }
    }
}

/// A matrix that may be smaller than the one it stands for, each weight the largest of those that it covers.
#[derive(Clone, Debug)]
pub(crate) struct Pooled {
    pub matrix: Matrix,
    /// How many rows and columns one cell covers at most; `[1, 1]` where nothing was pooled.
    pub covers: [usize; 2],
}

impl Pooled {
    /// At most so many rows and columns.
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

    /// What has to be said of it.
    pub fn note(&self) -> Option<String> {
        let [down, across] = self.covers;
        (down * across > 1).then(|| format!("each cell is the largest of {down} × {across} weights"))
    }
}

impl Picture {
    /// Whether there is something to draw, and as many weights as labels.
    pub(crate) fn check(&self) -> Result<()> {
        let Matrix { rows, columns, weights } = &self.matrix;
        if rows.is_empty() || columns.is_empty() {
            return Err(Error::invalid("there are no weights to draw"));
        }
        if weights.len() != rows.len() || weights.iter().any(|row| row.len() != columns.len()) {
            let (n, m) = (rows.len(), columns.len());
            return Err(Error::invalid(format!("the weights are not as many as their {n} × {m} labels")));
        }
        Ok(())
    }

    /// Its scale, over all its weights.
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
    fn what_fits_is_left_alone() {
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
