//! The zoomable map of a long weight matrix, in tiles of 256 × 256 cells.
//!
//! A cell is the maximum or the mean of the weights it covers. Zoom 0 is one tile for the whole matrix; each zoom level
//! halves what a cell covers, down to one weight per cell. A tile over few enough pairs is computed exactly. A larger
//! one is first computed from a sample of its rows, marked as such, and exactly on a second request: in bands of rows,
//! so that other requests get a turn in between. Exact tiles are cached.

use crate::layer::Layer;
use qkv::Pool;
use qkv_models::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Cells per side of a tile.
pub(super) const SIDE: usize = 256;
/// Pairs up to which a tile is computed exactly on the first request: about a second on two cores.
const QUICK_PAIRS: usize = 1 << 30;
/// Pairs of a sampled tile.
const SAMPLED_PAIRS: usize = 1 << 26;
/// Pairs of a band.
const BAND_PAIRS: usize = 1 << 29;
/// Cached tiles per run: 32 MiB.
const MAX_TILES: usize = 128;

/// A tile of the map of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    pub layer: usize,
    pub head: usize,
    pub zoom: u32,
    pub x: usize,
    pub y: usize,
    pub mean: bool,
}

/// The exact tiles of a run; the least recently used is dropped first, and expensive ones after all others.
#[derive(Debug, Default)]
pub(super) struct TileCache(Mutex<Cached>);

#[derive(Debug, Default)]
struct Cached {
    tiles: HashMap<Tile, CachedTile>,
    clock: u64,
}

#[derive(Debug)]
struct CachedTile {
    cells: Arc<[f32]>,
    used: u64,
    expensive: bool,
}

impl TileCache {
    pub fn get(&self, tile: &Tile) -> Option<Arc<[f32]>> {
        let mut cached = self.0.lock().expect("not poisoned");
        cached.clock += 1;
        let now = cached.clock;
        cached.tiles.get_mut(tile).map(|found| {
            found.used = now;
            found.cells.clone()
        })
    }

    pub fn insert(&self, tile: Tile, cells: Arc<[f32]>, expensive: bool) {
        let mut cached = self.0.lock().expect("not poisoned");
        cached.clock += 1;
        let now = cached.clock;
        let oldest = cached.tiles.iter().min_by_key(|(_, tile)| (tile.expensive, tile.used));
        if cached.tiles.len() >= MAX_TILES
            && let Some(oldest) = oldest.map(|(tile, _)| *tile)
        {
            cached.tiles.remove(&oldest);
        }
        cached.tiles.insert(tile, CachedTile { cells, used: now, expensive });
    }
}

/// The deepest zoom level of a map: one weight per cell.
pub(super) fn max_zoom([n, m]: [usize; 2]) -> u32 {
    n.max(m).div_ceil(SIDE).next_power_of_two().trailing_zeros()
}

/// The weights under a tile; a cell covers `each` × `each` of them.
struct Cover {
    rows: std::ops::Range<usize>,
    cols: std::ops::Range<usize>,
    each: usize,
}

impl Tile {
    fn cover(&self, layer: &Layer) -> Result<Cover> {
        let [n, m] = layer.size();
        let max_zoom = max_zoom([n, m]);
        if self.zoom > max_zoom {
            return Err(Error::invalid(format!("zoom {} is beyond the maximum of {max_zoom}", self.zoom)));
        }
        if self.head >= layer.heads() {
            return Err(Error::invalid(format!(
                "head {} does not exist: the layer has {} heads, counted from 0",
                self.head,
                layer.heads()
            )));
        }
        let each = 1usize << (max_zoom - self.zoom);
        let across = 1usize << self.zoom;
        if self.x >= across || self.y >= across {
            let Tile { zoom, x, y, .. } = self;
            return Err(Error::invalid(format!("zoom {zoom} has {across} × {across} tiles; {x}, {y} is outside")));
        }
        let range = |at: usize, limit: usize| (at * SIDE * each).min(limit)..((at + 1) * SIDE * each).min(limit);
        Ok(Cover { rows: range(self.y, n), cols: range(self.x, m), each })
    }

    fn pool(&self) -> Pool {
        if self.mean { Pool::Mean } else { Pool::Max }
    }

    /// Whether it is computed exactly on the first request.
    ///
    /// # Errors
    /// If there is no such tile.
    pub fn is_quick(&self, layer: &Layer) -> Result<bool> {
        let Cover { rows, cols, .. } = self.cover(layer)?;
        Ok(rows.len().saturating_mul(cols.len()) <= QUICK_PAIRS)
    }

    /// From a sample of its rows.
    pub fn sampled(&self, layer: &Layer) -> Result<Vec<f32>> {
        let Cover { rows, cols, each } = self.cover(layer)?;
        let max_rows = SAMPLED_PAIRS / (SIDE * cols.len().max(1)).max(1);
        let cells = layer.map(self.head, rows, cols, [each, each], self.pool(), Some(max_rows.max(1)))?;
        Ok(padded(cells))
    }

    /// From all its rows, as long as `wanted` is true.
    pub fn exact(&self, layer: &Layer, wanted: &dyn Fn() -> bool) -> Result<Vec<f32>> {
        let Cover { rows, cols, each } = self.cover(layer)?;
        // A band ends at the edge of a cell.
        let band = (BAND_PAIRS / cols.len().max(1) / each).max(1) * each;
        let mut all = vec![f32::NAN; SIDE * SIDE];
        for start in rows.clone().step_by(band) {
            if !wanted() {
                return Err(Error::invalid("the client no longer waits for this tile"));
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

/// A whole tile with `cells` in its top left corner, and NaN outside the matrix.
fn padded(cells: qkv::Tensor<f32, 2>) -> Vec<f32> {
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
    fn the_deepest_zoom_has_one_weight_per_cell_and_the_first_covers_everything() {
        for (size, levels) in [(1, 0), (256, 0), (257, 1), (512, 1), (513, 2), (100_000, 9)] {
            assert_eq!(max_zoom([size, 1]), levels, "{size}");
            assert!(SIDE << levels >= size);
        }
    }
}
