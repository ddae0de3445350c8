//! The map of a long matrix, in tiles: 256 × 256 cells, each the largest or the mean of the weights that it covers. Level 0 is
//! one tile for the whole; each level halves what a cell covers, down to one weight a cell.
//!
//! A tile that looks at few enough pairs is computed at once. A larger one comes first from some of its rows, marked as sampled,
//! and exactly when it is asked for again: in bands of rows, so that others get a turn between them. What was computed is kept.

use crate::layer::Layer;
use qkv::Pool;
use qkv_models::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Cells of a tile, each way.
pub(super) const SIDE: usize = 256;
/// Pairs that are computed without asking whether the page can wait: up to about a second on two cores.
const AT_ONCE: usize = 1 << 30;
/// Pairs of a sampled tile.
const SAMPLED: usize = 1 << 26;
/// Pairs between two chances for others.
const BAND: usize = 1 << 29;
/// Tiles that are kept of a run: 32 MiB.
const KEPT: usize = 128;

/// Which tile of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    pub layer: usize,
    pub head: usize,
    pub zoom: u32,
    pub x: usize,
    pub y: usize,
    pub mean: bool,
}

/// The tiles of a run that were computed.
#[derive(Debug, Default)]
pub(super) struct Tiles(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    tiles: HashMap<Tile, Cells>,
    used: u64,
}

/// A tile that was computed.
#[derive(Debug)]
struct Cells {
    cells: Arc<[f32]>,
    used: u64,
    /// It took long, and stays.
    dear: bool,
}

impl Tiles {
    pub fn get(&self, tile: &Tile) -> Option<Arc<[f32]>> {
        let mut kept = self.0.lock().expect("nobody panics while holding it");
        kept.used += 1;
        let now = kept.used;
        kept.tiles.get_mut(tile).map(|kept| {
            kept.used = now;
            kept.cells.clone()
        })
    }

    /// Keeps a tile; a dear one goes only after all others.
    pub fn keep(&self, tile: Tile, cells: Arc<[f32]>, dear: bool) {
        let mut kept = self.0.lock().expect("nobody panics while holding it");
        kept.used += 1;
        let now = kept.used;
        let oldest = kept.tiles.iter().min_by_key(|(_, kept)| (kept.dear, kept.used));
        if kept.tiles.len() >= KEPT
            && let Some(oldest) = oldest.map(|(tile, _)| *tile)
        {
            kept.tiles.remove(&oldest);
        }
        kept.tiles.insert(tile, Cells { cells, used: now, dear });
    }
}

/// The deepest level of a map: one weight a cell.
pub(super) fn deepest([n, m]: [usize; 2]) -> u32 {
    n.max(m).div_ceil(SIDE).next_power_of_two().trailing_zeros()
}

/// What a tile covers: rows, columns, and how many weights a cell has each way.
struct Cover {
    rows: std::ops::Range<usize>,
    cols: std::ops::Range<usize>,
    each: usize,
}

impl Tile {
    fn cover(&self, layer: &Layer) -> Result<Cover> {
        let [n, m] = layer.size();
        let deepest = deepest([n, m]);
        if self.zoom > deepest {
            return Err(Error::invalid(format!("there is no level {}: the deepest is {deepest}", self.zoom)));
        }
        if self.head >= layer.heads() {
            return Err(Error::invalid(format!("there is no head {}, only {} from 0", self.head, layer.heads())));
        }
        let each = 1usize << (deepest - self.zoom);
        let across = 1usize << self.zoom;
        if self.x >= across || self.y >= across {
            let Tile { zoom, x, y, .. } = self;
            return Err(Error::invalid(format!("level {zoom} has {across} tiles each way, none at {x}, {y}")));
        }
        let range = |at: usize, limit: usize| (at * SIDE * each).min(limit)..((at + 1) * SIDE * each).min(limit);
        Ok(Cover { rows: range(self.y, n), cols: range(self.x, m), each })
    }

    fn pool(&self) -> Pool {
        if self.mean { Pool::Mean } else { Pool::Max }
    }

    /// Whether it is computed exactly at once.
    ///
    /// # Errors
    /// Where there is no such tile.
    pub fn is_quick(&self, layer: &Layer) -> Result<bool> {
        let Cover { rows, cols, .. } = self.cover(layer)?;
        Ok(rows.len().saturating_mul(cols.len()) <= AT_ONCE)
    }

    /// From some of its rows.
    pub fn sampled(&self, layer: &Layer) -> Result<Vec<f32>> {
        let Cover { rows, cols, each } = self.cover(layer)?;
        let most = SAMPLED / (SIDE * cols.len().max(1)).max(1);
        let cells = layer.map(self.head, rows, cols, [each, each], self.pool(), Some(most.max(1)))?;
        Ok(placed(cells))
    }

    /// From all of them, as long as someone waits.
    pub fn exact(&self, layer: &Layer, waits: &dyn Fn() -> bool) -> Result<Vec<f32>> {
        let Cover { rows, cols, each } = self.cover(layer)?;
        // Whole cells.
        let band = (BAND / cols.len().max(1) / each).max(1) * each;
        let mut all = vec![f32::NAN; SIDE * SIDE];
        for start in rows.clone().step_by(band) {
            if !waits() {
                return Err(Error::invalid("nobody waits for this tile any more"));
            }
            let part = start..(start + band).min(rows.end);
            let cells = layer.map(self.head, part, cols.clone(), [each, each], self.pool(), None)?;
            let [height, width] = cells.shape();
            let first = (start - rows.start) / each;
            for y in 0..height {
                all[(first + y) * SIDE..][..width].copy_from_slice(&cells.data()[y * width..][..width]);
            }
        }
        Ok(all)
    }
}

/// Cells in the corner of a tile; what is outside the matrix is not a number.
fn placed(cells: qkv::Tensor<f32, 2>) -> Vec<f32> {
    let [height, width] = cells.shape();
    let mut all = vec![f32::NAN; SIDE * SIDE];
    for y in 0..height {
        all[y * SIDE..][..width].copy_from_slice(&cells.data()[y * width..][..width]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deepest_level_has_one_weight_a_cell_and_the_first_all_of_them() {
        for (size, levels) in [(1, 0), (256, 0), (257, 1), (512, 1), (513, 2), (100_000, 9)] {
            assert_eq!(deepest([size, 1]), levels, "{size}");
            assert!(SIDE << levels >= size);
        }
    }
}
