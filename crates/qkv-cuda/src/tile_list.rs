//! Tile lists: the tiles of a mask that keep any pair, for kernels that visit only those (a block mask). A mask that
//! does not depend on the data is classified once, on the device, when a plan is made; here the tiles are ordered by
//! row. Partial tiles have bits, and tiles with equal bits share them.

use crate::call::position_of_query_0;
use crate::device::Stream;
use crate::driver::Driver;
use crate::error::Result;
use crate::general_params::{GeneralParams, mask_program};
use crate::kernel_abi::{EMPTY_GROUP, NO_BITS, PARTIAL_TILE, SPLIT_COUNT_SHIFT, SPLIT_INDEX_SHIFT};
use crate::memory::{Buffer, Dtype};
use crate::program::{Kind, Program};
use qkv::Place;
use qkv::engine::CompiledMask;
use std::collections::HashMap;
use std::sync::Arc;

/// The most tiles of a list: a quarter of a million tokens against as many.
const MAX_TILES: usize = 1 << 22;
/// The most bytes of bits of a list.
const MAX_BITS: usize = 256 << 20;
/// For a row that is split: the fewest tokens per split, and the most splits.
const MIN_SPLIT_TOKENS: usize = 1024;
const MAX_SPLITS: usize = 64;
/// The number of multiprocessors assumed when deciding whether a row is worth splitting. The device's actual number and
/// the batch do not count: the order in which a row is summed must not depend on them.
const PROCESSORS: usize = 132;
const EMPTY: [u64; 2] = [0; 2];
const FULL: [u64; 2] = [u64::MAX; 2];

/// A tile list on the device, in the layout of `INTERFACE.md`.
#[derive(Debug)]
pub(crate) struct TileList {
    pub rows: Buffer,
    pub entries: Buffer,
    pub bits: Buffer,
    /// Rows of the list; a tile that is split has several.
    pub row_count: usize,
    /// Tiles that keep any pair.
    pub kept: usize,
    /// Leading rows that are long: all heads begin them before other rows.
    pub long_rows: usize,
    /// Splits of all rows: each head keeps this many partial results.
    pub split_slots: usize,
}

impl TileList {
    /// The list of a mask that does not depend on the data, in tiles of `[queries, keys]`: one row per query tile or,
    /// if `by_keys`, per key tile. `heads` heads of a sequence walk it. `None` if it would be too long.
    pub fn new(
        driver: &Arc<dyn Driver>,
        mask: &CompiledMask,
        place: Place,
        [n, m]: [usize; 2],
        [queries, keys]: [usize; 2],
        heads: usize,
        by_keys: bool,
    ) -> Result<Option<TileList>> {
        let [query_tiles, key_tiles] = [n.div_ceil(queries), m.div_ceil(keys)];
        if query_tiles.saturating_mul(key_tiles) > MAX_TILES || query_tiles > 65_535 {
            return Ok(None);
        }
        let steps = mask_program(mask)?;
        let constants = Buffer::from_slice(driver, &steps.data, Stream(0))?;
        let offset = position_of_query_0(place, n, m);
        let verdicts = Buffer::new(driver, query_tiles * key_tiles * 24)?;
        let [count, others] = [n as i32, m as i32];
        let mut params = GeneralParams { n: count, m: others, offset, ..GeneralParams::default() };
        params.set_mask(&steps, constants.ptr());
        (params.batch, params.heads, params.key_heads, params.group) = (1, 1, 1, 1);
        params.result = verdicts.ptr();
        let program = Program::fixed(Kind::TileList, Dtype::Bf16, 64, [queries, keys]);
        let module = driver.module(&program.source())?;
        let launch = |name, grid: [usize; 2], params: &GeneralParams| {
            let kernel = driver.kernel(&module, name, program.threads(), program.shared())?;
            let grid = grid.map(|axis| axis as u32);
            // SAFETY: these kernels take this block, and every buffer in it is as large as they write.
            unsafe { driver.launch(&kernel, grid, Stream(0), &[(&raw const *params).cast()]) }
        };
        launch("classify", [key_tiles, query_tiles], &params)?;
        let words = verdicts.read::<u64>(query_tiles * key_tiles * 3, Stream(0))?;
        let found: Vec<Verdict> =
            words.chunks_exact(3).map(|three| Verdict { bits: [three[0], three[1]], blocks: three[2] }).collect();
        let list = List::of(&found, [query_tiles, key_tiles], [queries / 64, keys / 64], by_keys)
            .split(heads, MIN_SPLIT_TOKENS / if by_keys { queries } else { keys });
        let words = list.distinct.len() * queries * keys / 32;
        if words * 4 > MAX_BITS {
            return Ok(None);
        }
        let bits = Buffer::new(driver, words.max(1) * 4)?;
        if !list.distinct.is_empty() {
            let listed = Buffer::from_slice(driver, &list.distinct.concat(), Stream(0))?;
            (params.result, params.pooled_columns) = (bits.ptr(), listed.ptr());
            launch(if by_keys { "fill_keys" } else { "fill_queries" }, [list.distinct.len(), 1], &params)?;
            driver.wait(Stream(0))?;
        }
        // An empty list still needs an address.
        let entries = if list.entries.is_empty() { vec![0; 4] } else { list.entries.concat() };
        let rows = Buffer::from_slice(driver, &list.rows.concat(), Stream(0))?;
        let entries = Buffer::from_slice(driver, &entries, Stream(0))?;
        driver.wait(Stream(0))?;
        let (row_count, kept) = (list.rows.len(), list.entries.len());
        let (long_rows, split_slots) = (list.long_rows(), list.split_slots);
        Ok(Some(TileList { rows, entries, bits, row_count, kept, long_rows, split_slots }))
    }
}

impl TileList {
    /// Device memory.
    pub fn bytes(&self) -> usize {
        self.rows.bytes() + self.entries.bytes() + self.bits.bytes()
    }
}

/// The verdict of the mask on a tile.
#[derive(Clone, Copy, Debug)]
struct Verdict {
    /// [`EMPTY`], [`FULL`], or a checksum of the bits of a partial tile.
    bits: [u64; 2],
    /// For a partial tile: a bit for each block of 64 queries × 64 keys that keeps any pair.
    blocks: u64,
}

impl Verdict {
    /// Flags of the groups of 64 rows (queries or, if `by_keys`, keys) that keep no pair of the tile.
    fn empty_groups(&self, [queries, keys]: [usize; 2], by_keys: bool) -> u32 {
        let nothing = |own: &usize| match by_keys {
            true => (0..queries).all(|i| self.blocks >> (i * keys + own) & 1 == 0),
            false => (0..keys).all(|j| self.blocks >> (own * keys + j) & 1 == 0),
        };
        (0..if by_keys { keys } else { queries }).filter(nothing).map(|own| EMPTY_GROUP << own).sum()
    }
}

/// A list on the host.
#[derive(Debug)]
struct List {
    /// First entry, count, tile, split: splits first, then the longest rows.
    rows: Vec<[u32; 4]>,
    /// The other tile, ascending, with flags; the index of its bits; 0, 0.
    entries: Vec<[u32; 4]>,
    /// A query tile and a key tile for each distinct set of bits.
    distinct: Vec<[i32; 2]>,
    /// Splits of all rows.
    split_slots: usize,
}

impl List {
    /// `blocks`: how many blocks of 64 queries, and of 64 keys, a tile has.
    fn of(found: &[Verdict], [query_tiles, key_tiles]: [usize; 2], blocks: [usize; 2], by_keys: bool) -> List {
        let mut known: HashMap<[u64; 2], u32> = HashMap::new();
        let (rows, others) = if by_keys { (key_tiles, query_tiles) } else { (query_tiles, key_tiles) };
        let mut list = List { rows: Vec::new(), entries: Vec::new(), distinct: Vec::new(), split_slots: 0 };
        for row in 0..rows {
            let first = list.entries.len();
            for other in 0..others {
                let (i, j) = if by_keys { (other, row) } else { (row, other) };
                let tile = found[i * key_tiles + j];
                let entry = match tile.bits {
                    EMPTY => continue,
                    FULL => [other as u32, NO_BITS, 0, 0],
                    bits => {
                        let next = list.distinct.len() as u32;
                        let at = *known.entry(bits).or_insert(next);
                        if at == next {
                            list.distinct.push([i as i32, j as i32]);
                        }
                        [other as u32 | PARTIAL_TILE | tile.empty_groups(blocks, by_keys), at, 0, 0]
                    }
                };
                list.entries.push(entry);
            }
            list.rows.push([first as u32, (list.entries.len() - first) as u32, row as u32, 0]);
        }
        list.rows.sort_by_key(|row| std::cmp::Reverse(row[1]));
        list
    }

    /// Splits rows that one block would still be walking when all others have finished: those more than twice the mean
    /// length and longer than four fifths of a multiprocessor's share of the work. Splits are at most 2/3 of that share
    /// and at least `min_tiles` long; each split costs as much as two or three tiles. If many rows are long, none is
    /// split.
    fn split(mut self, heads: usize, min_tiles: usize) -> List {
        let (count, total, work) = (self.rows.len(), self.entries.len(), self.entries.len().saturating_mul(heads));
        let is_long = |row: &[u32; 4]| {
            let tiles = row[1] as usize;
            tiles * count > 2 * total && 5 * tiles * PROCESSORS > work.saturating_mul(4) && tiles >= 2 * min_tiles
        };
        let parts = |row: &[u32; 4]| {
            let tiles = row[1] as usize;
            (3 * tiles * PROCESSORS).div_ceil(2 * work).min(tiles / min_tiles).min(MAX_SPLITS)
        };
        // Rows are sorted, longest first.
        let long = self.rows.iter().take_while(|row| is_long(row)).count();
        let slots = self.rows[..long].iter().map(parts).sum::<usize>();
        if slots > count.clamp(MAX_SPLITS, 1 << 16) {
            return self;
        }
        let mut splits = Vec::with_capacity(slots);
        for row in self.rows.drain(..long) {
            let parts = parts(&row);
            let at = |part: usize| (part * row[1] as usize / parts) as u32;
            for part in 0..parts {
                let word = (splits.len() | part << SPLIT_INDEX_SHIFT | parts << SPLIT_COUNT_SHIFT) as u32;
                splits.push([row[0] + at(part), at(part + 1) - at(part), row[2], word]);
            }
        }
        self.rows.splice(..0, splits);
        self.split_slots = slots;
        self
    }

    /// Splits, and rows more than twice the mean length.
    fn long_rows(&self) -> usize {
        let is_long = |row: &[u32; 4]| row[3] != 0 || row[1] as usize * self.rows.len() > 2 * self.entries.len();
        self.rows.iter().take_while(|row| is_long(row)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulated::EmulatedDriver;
    use qkv::{BigBird, Blocks, Mask};
    use std::io::Write;

    #[test]
    fn tiles_are_listed_longest_row_first_and_share_their_bits() {
        let [e, f, a, b] = [EMPTY, FULL, [3, 4], [5, 6]].map(|bits| Verdict { bits, blocks: 1 });
        let list = List::of(&[a, e, e, f, a, b], [2, 3], [1, 1], false);
        assert_eq!(list.rows, [[1, 3, 1, 0], [0, 1, 0, 0]]);
        assert_eq!(list.entries[0], [PARTIAL_TILE, 0, 0, 0]);
        assert_eq!(list.entries[1..], [[0, NO_BITS, 0, 0], [1 | PARTIAL_TILE, 0, 0, 0], [2 | PARTIAL_TILE, 1, 0, 0]]);
        assert_eq!(list.distinct, [[0, 0], [1, 2]]);
        assert_eq!(list.long_rows(), 0);
        assert_eq!(List::of(&[f, f, f, f, e, e, e, e, f], [3, 3], [1, 1], false).long_rows(), 0);
        assert_eq!(List::of(&[f, f, f, f, e, e, e, e, e, e, e, e, e, e, f], [5, 3], [1, 1], false).long_rows(), 1);
        let turned = List::of(&[a, e, e, f, a, b], [2, 3], [1, 1], true);
        assert_eq!(turned.rows[0], [0, 2, 0, 0]);
        assert_eq!(turned.entries[1], [1, NO_BITS, 0, 0]);
    }

    #[test]
    fn rows_much_longer_than_others_are_split_and_come_first() {
        let [e, f] = [EMPTY, FULL].map(|bits| Verdict { bits, blocks: 1 });
        // Of nine rows the last keeps seven tiles, the others one or two.
        let found: Vec<Verdict> =
            (0..9).flat_map(|i| (0..7).map(move |j| if i == 8 || j == 0 || i == j { f } else { e })).collect();
        let list = || List::of(&found, [9, 7], [1, 1], false);
        let cut = list().split(1, 2);
        assert_eq!((cut.split_slots, cut.long_rows(), cut.rows.len()), (3, 3, 11));
        let from = list().rows[0][0];
        let split = |part: u32| part | part << 16 | 3 << 24;
        assert_eq!(cut.rows[..3], [[from, 2, 8, split(0)], [from + 2, 2, 8, split(1)], [from + 4, 3, 8, split(2)]]);
        assert_eq!(cut.rows[3..], list().rows[1..]);
        // As many heads as make the row one multiprocessor's share: splits of at most 2/3 of it.
        assert_eq!(list().split(45, 2).rows[..2], [[from, 3, 8, 2 << 24], [from + 3, 4, 8, 1 | 1 << 16 | 2 << 24]]);
        // Not split: with more heads, shorter than two splits, or no longer than the mean.
        for whole in
            [list().split(60, 2), list().split(1, 4), List::of(&vec![f; 90], [9, 10], [1, 1], false).split(1, 2)]
        {
            assert_eq!((whole.split_slots, whole.rows.len()), (0, 9));
            assert!(whole.rows.iter().all(|row| row[3] == 0));
        }
        // Not split: a quarter of the rows is long.
        let many: Vec<Verdict> =
            (0..80).flat_map(|i| (0..80).map(move |j| if i < 20 || i == j { f } else { e })).collect();
        assert_eq!(List::of(&many, [80, 80], [1, 1], false).split(1, 4).split_slots, 0);
        // However long, a row has at most MAX_SPLITS splits.
        let endless: Vec<Verdict> =
            (0..3).flat_map(|i| (0..500).map(move |j| if i == 0 || j == 0 { f } else { e })).collect();
        let endless = List::of(&endless, [3, 500], [1, 1], false).split(1, 2);
        assert_eq!(endless.split_slots, MAX_SPLITS);
        assert_eq!(endless.rows[..64].iter().map(|row| row[1]).sum::<u32>(), 500);
    }

    #[test]
    fn warpgroups_that_keep_nothing_of_a_tile_are_marked() {
        // Of 3 × 64 queries and 2 × 64 keys, only the last queries see the first keys.
        let found = [Verdict { bits: [3, 4], blocks: 0b01_00_00 }];
        assert_eq!(
            List::of(&found, [1, 1], [3, 2], false).entries,
            [[PARTIAL_TILE | EMPTY_GROUP | EMPTY_GROUP << 1, 0, 0, 0]]
        );
        assert_eq!(List::of(&found, [1, 1], [3, 2], true).entries, [[PARTIAL_TILE | EMPTY_GROUP << 1, 0, 0, 0]]);
    }

    /// Compares a list with its mask, pair by pair; returns the number of splits.
    fn holds(
        driver: &Arc<dyn Driver>,
        mask: &Mask,
        place: Place,
        [n, m]: [usize; 2],
        [queries, keys]: [usize; 2],
        by_keys: bool,
    ) -> usize {
        let compiled = CompiledMask::new(mask, n, m, place);
        let tiles = TileList::new(driver, &compiled, place, [n, m], [queries, keys], 1, by_keys).unwrap().unwrap();
        let rows = tiles.rows.read::<u32>(tiles.row_count * 4, Stream(0)).unwrap();
        splits_are_complete(&rows, tiles.split_slots);
        let entries = tiles.entries.read::<u32>(tiles.entries.bytes() / 4, Stream(0)).unwrap();
        let bits = tiles.bits.read::<u32>(tiles.bits.bytes() / 4, Stream(0)).unwrap();
        let mut kept = vec![false; n * m];
        for row in rows.chunks_exact(4) {
            for entry in entries[4 * row[0] as usize..].chunks_exact(4).take(row[1] as usize) {
                let [mine, other] = [row[2] as usize, (entry[0] & (EMPTY_GROUP - 1)) as usize];
                let mut busy = vec![false; if by_keys { keys } else { queries } / 64];
                let (query_tile, key_tile) = if by_keys { (other, mine) } else { (mine, other) };
                for (i, j) in (0..queries).flat_map(|i| (0..keys).map(move |j| (i, j))) {
                    let (row, column, columns) = if by_keys { (j, i, queries) } else { (i, j, keys) };
                    let lane = column / 2 % 4 * (columns / 4) + column / 8 * 2 + column % 2;
                    let bit = entry[1] as usize * queries * keys + row * columns + lane;
                    let seen = entry[0] & PARTIAL_TILE == 0 || bits[bit / 32] >> (bit % 32) & 1 == 1;
                    busy[row / 64] |= seen;
                    let (i, j) = (query_tile * queries + i, key_tile * keys + j);
                    assert!(!seen || j < m || i >= n, "a key beyond the last is seen: {mask:?}");
                    if seen && i < n {
                        assert!(!std::mem::replace(&mut kept[i * m + j], true), "a tile is listed twice: {mask:?}");
                    }
                }
                for (at, &busy) in busy.iter().enumerate() {
                    assert_eq!(entry[0] & EMPTY_GROUP << at == 0, busy, "{mask:?}: {at} of {entry:?}");
                }
            }
        }
        let offset = if place == Place::End { m as i64 - n as i64 } else { 0 };
        for (i, j) in (0..n).flat_map(|i| (0..m).map(move |j| (i, j))) {
            let there = allows(mask, i as i64 + offset, i, j, m);
            assert_eq!(kept[i * m + j], there, "{mask:?} at {i}, {j}");
        }
        tiles.split_slots
    }

    /// Every split of a row is listed once, in consecutive slots.
    fn splits_are_complete(rows: &[u32], slots: usize) {
        let mut at = 0;
        for row in rows.chunks_exact(4) {
            let [slot, part, parts] = [row[3] & 0xffff, row[3] >> 16 & 255, row[3] >> 24].map(|x| x as usize);
            if at < slots {
                assert!(parts > 1 && slot == at && part < parts, "{row:?}");
                let first = &rows[4 * (at - part)..][..4];
                assert_eq!((first[2], first[3] >> 16 & 255, first[3] >> 24), (row[2], 0, row[3] >> 24), "{row:?}");
                at += 1;
            } else {
                assert_eq!(row[3], 0, "a row that is not cut");
            }
        }
        assert_eq!(at, slots);
    }

    /// The definition of the masks of this test.
    fn allows(mask: &Mask, p: i64, i: usize, j: usize, m: usize) -> bool {
        let apart = (p - j as i64).unsigned_abs() as usize;
        match mask {
            Mask::Full => true,
            Mask::Causal => j as i64 <= p,
            Mask::Window { left, right } => j as i64 >= p - *left as i64 && j as i64 <= p + *right as i64,
            Mask::Strided { stride } => apart < *stride || apart.is_multiple_of(*stride),
            Mask::Longformer { window, globals } => {
                apart <= window / 2 || globals.contains(&j) || globals.iter().any(|&at| at as i64 == p)
            }
            Mask::BigBird(pattern) => {
                let (row, col) = (p.div_euclid(pattern.block as i64), (j / pattern.block) as i64);
                (row - col).unsigned_abs() as usize <= pattern.window / 2
                    || (0..pattern.globals as i64).contains(&row)
                    || (col as usize) < pattern.globals
                    || row >= 0 && pattern.drawn(row as usize, m.div_ceil(pattern.block)).contains(&(col as usize))
            }
            Mask::Blocks(blocks) => blocks.seen[i / blocks.size][j / blocks.size],
            Mask::And(a, b) => allows(a, p, i, j, m) && allows(b, p, i, j, m),
            Mask::Or(a, b) => allows(a, p, i, j, m) || allows(b, p, i, j, m),
            Mask::Not(a) => !allows(a, p, i, j, m),
            other => panic!("{other:?} is not for this test"),
        }
    }

    #[test]
    fn a_list_keeps_what_its_mask_keeps() {
        let driver: Arc<dyn Driver> = match EmulatedDriver::new((8, 0), 166_912) {
            Ok(driver) => Arc::new(driver),
            Err(error) => return drop(writeln!(std::io::stderr(), "skipped: {error}")),
        };
        let seen = vec![vec![true, false, false], vec![false, true, true], vec![true, true, false]];
        let drawn = BigBird { block: 16, window: 3, globals: 1, random: 2, seed: 7 };
        for (mask, place, sizes) in [
            (Mask::longformer(64, [0, 150]), Place::Start, [200, 200]),
            (Mask::longformer(32, [3]) & Mask::causal(), Place::End, [130, 200]),
            (Mask::strided(24), Place::Start, [150, 190]),
            (Mask::bigbird(drawn), Place::Start, [192, 200]),
            (Mask::blocks(Blocks { size: 64, seen }), Place::Start, [180, 170]),
            (!Mask::window(70, 70) | Mask::causal(), Place::Start, [100, 260]),
        ] {
            for (tile, by_keys) in [([64, 64], false), ([64, 64], true), ([192, 128], false), ([64, 128], true)] {
                holds(&driver, &mask, place, sizes, tile, by_keys);
            }
        }
        // Split rows, of queries and of keys.
        for (sizes, by_keys) in [([140, 4500], false), ([4500, 140], true)] {
            assert_eq!(holds(&driver, &Mask::longformer(64, [1]), Place::Start, sizes, [64, 64], by_keys), 4);
        }
    }
}
