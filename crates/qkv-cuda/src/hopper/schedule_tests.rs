//! Tests the index arithmetic of the Hopper kernels on the CPU: their own headers, compiled as C++, against brute
//! force. Covers the order of the scheduler, the tiles that each pass visits, the bits of masked columns, and the
//! ranges of segments.

use crate::hopper_params::HopperParams;
use crate::program::hopper_schedule_test;
use libloading::Library;
use std::collections::HashSet;
use std::io::Write;
use std::process::Command;

/// Tile sizes of the tests: kBlockM and kBlockN.
const FORWARD: [usize; 2] = [128, 128];
const BACKWARD: [usize; 2] = [64, 128];
/// Flags of a step, as in `query_tiles.cuh`, for warpgroup 0.
const PARTIAL_FOR: i32 = 2;
const EMPTY_FOR: i32 = 8;

/// The headers compiled with these features; `None`, with a message, if there is no C++ compiler.
pub(super) fn library(forward: bool, features: &[&str]) -> Option<(Library, tempfile::TempDir)> {
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("schedule.cpp"), folder.path().join("schedule.so"));
    std::fs::write(&source, hopper_schedule_test(forward, if forward { FORWARD } else { BACKWARD })).unwrap();
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut command = Command::new(compiler);
    command.args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source);
    let Ok(out) = command.args(features.iter().map(|feature| format!("-D{feature}=1"))).output() else {
        let _ = writeln!(std::io::stderr(), "skipped: no C++ compiler for the Hopper kernels' index arithmetic");
        return None;
    };
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    // SAFETY: it was just built from our source, and its only initializers are those of its own statics.
    Some((unsafe { Library::new(&library) }.unwrap(), folder))
}

/// Calls `test_schedule`: (tile, head, sequence) for each index.
fn schedule(library: &Library, params: &HopperParams, tiles: i32, heads: i32, last_first: bool) -> Vec<[i32; 3]> {
    let count = (tiles * heads * params.batch) as usize;
    let mut out = vec![[-1; 3]; count];
    type Schedule = unsafe extern "C" fn(*const HopperParams, i32, i32, i32, *mut i32);
    // SAFETY: the function writes three numbers per index.
    unsafe {
        let function = library.get::<Schedule>(b"test_schedule\0").unwrap();
        function(params, tiles, heads, i32::from(last_first), out.as_mut_ptr().cast());
    }
    out
}

#[test]
fn the_scheduler_takes_every_tile_of_every_head_once() {
    let Some((plain, _a)) = library(true, &["BAND"]) else { return };
    let Some((listed, _b)) = library(true, &["TILE_LIST"]) else { return };
    let Some((segments, _c)) = library(false, &["SEGMENTS"]) else { return };
    for (batch, heads, tiles) in [(1, 1, 1), (2, 3, 5), (3, 4, 7), (1, 6, 2)] {
        let order: Vec<i32> = (0..batch * tiles).rev().collect();
        for section in [1, 2, 4, 5, 64] {
            for (library, lpt_order) in
                [(&plain, 1), (&listed, 0), (&listed, tiles / 2), (&segments, 0), (&segments, batch * tiles / 4)]
            {
                let params = HopperParams {
                    batch,
                    heads_per_section: section.min(heads * batch),
                    lpt_order,
                    tile_order: order.as_ptr() as u64,
                    ..HopperParams::default()
                };
                let found = schedule(library, &params, tiles, heads, false);
                let all: HashSet<[i32; 3]> = found.iter().copied().collect();
                assert_eq!(
                    all.len(),
                    found.len(),
                    "{batch} {heads} {tiles} in sections of {section}, {lpt_order} first"
                );
                let inside = |[tile, head, b]: &[i32; 3]| {
                    (0..tiles).contains(tile) && (0..heads).contains(head) && (0..batch).contains(b)
                };
                assert!(found.iter().all(inside), "{found:?}");
            }
        }
    }
    // With a band, the last tiles come first; with a list, the first rows of all heads.
    let params = HopperParams { batch: 1, heads_per_section: 1, ..HopperParams::default() };
    assert_eq!(schedule(&plain, &params, 3, 1, true), [[2, 0, 0], [1, 0, 0], [0, 0, 0]]);
    let params = HopperParams { lpt_order: 1, ..params };
    assert_eq!(schedule(&listed, &params, 2, 2, false), [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]);
}

/// Whether a band with lengths lets query i see key j.
fn sees(params: &HopperParams, length: i32, i: i32, j: i32) -> bool {
    let p = i + params.offset;
    p - params.left <= j && j <= p + params.right && j < length
}

/// Bands over `n` queries and `m` keys.
fn bands() -> Vec<HopperParams> {
    let mut all = Vec::new();
    for (n, m) in [(1, 1), (100, 300), (300, 100), (257, 640)] {
        for (left, right, offset) in
            [(1 << 29, 0, 0), (64, 0, m - n), (40, 9, 0), (0, 0, -20), (5, 200, 90), (1 << 29, 1 << 29, 0)]
        {
            let (batch, heads_q, heads_k) = (2, 2, 1);
            all.push(HopperParams { batch, heads_q, heads_k, n, m, left, right, offset, ..HopperParams::default() });
        }
    }
    all
}

#[test]
fn forward_visits_the_key_tiles_that_a_band_touches() {
    let Some((library, _folder)) = library(true, &["BAND", "LENGTHS"]) else { return };
    type KeyTiles = unsafe extern "C" fn(*const HopperParams, i32, i32, *mut i32) -> i32;
    let [block_m, block_n] = FORWARD.map(|size| size as i32);
    for params in bands() {
        let lengths = [params.m, params.m * 2 / 3];
        let params = HopperParams { lengths: lengths.as_ptr() as u64, ..params };
        for (b, tile) in (0..2).flat_map(|b| (0..(params.n + block_m - 1) / block_m).map(move |tile| (b, tile))) {
            let mut out = [0; 64];
            // SAFETY: a row has at most as many tiles as there are.
            let count =
                // SAFETY: the library was compiled from the source above, with functions of these signatures.
                unsafe { library.get::<KeyTiles>(b"test_key_tiles\0").unwrap()(&params, b, tile, out.as_mut_ptr()) };
            let visited = &out[..count as usize];
            assert!(visited.windows(2).all(|two| two[0] > two[1]), "not descending: {visited:?}");
            let rows = tile * block_m..(tile * block_m + block_m).min(params.n);
            for key_tile in 0..(params.m + block_n - 1) / block_n {
                let keys = key_tile * block_n..key_tile * block_n + block_n;
                let touched = rows.clone().any(|i| keys.clone().any(|j| sees(&params, lengths[b as usize], i, j)));
                assert!(!touched || visited.contains(&key_tile), "{params:?}: {key_tile} of {tile} is left out");
            }
        }
    }
}

#[test]
fn backward_walks_the_query_tiles_that_a_band_touches_and_flags_them() {
    let Some((library, _folder)) = library(false, &["BAND", "LENGTHS"]) else { return };
    type QueryTiles = unsafe extern "C" fn(*const HopperParams, i32, i32, i32, *mut i32) -> i32;
    let [block_m, block_n] = BACKWARD.map(|size| size as i32);
    for params in bands() {
        let lengths = [params.m, params.m * 2 / 3];
        let params = HopperParams { lengths: lengths.as_ptr() as u64, ..params };
        for (b, key_tile) in (0..2).flat_map(|b| (0..(params.m + block_n - 1) / block_n).map(move |tile| (b, tile))) {
            let mut out = [[0; 3]; 64];
            // SAFETY: the library was compiled from the source above, with functions of these signatures.
            let function = unsafe { library.get::<QueryTiles>(b"test_query_tiles\0") }.unwrap();
            // SAFETY: two heads have at most as many tiles as there are.
            let count = unsafe { function(&params, b, 0, key_tile, out.as_mut_ptr().cast()) };
            let steps = &out[..count as usize];
            let distinct: HashSet<[i32; 2]> = steps.iter().map(|step| [step[0], step[1]]).collect();
            assert_eq!(distinct.len(), steps.len(), "a tile is walked twice: {steps:?}");
            let length = lengths[b as usize];
            for (head, tile) in (0..2).flat_map(|h| (0..(params.n + block_m - 1) / block_m).map(move |t| (h, t))) {
                // Rows beyond the end are zeros: only pairs inside count as visible, all count as masked.
                let rows = tile * block_m..(tile * block_m + block_m).min(params.n);
                let seen = |keys: std::ops::Range<i32>| {
                    rows.clone().map(|i| keys.clone().filter(|&j| sees(&params, length, i, j)).count()).sum::<usize>()
                };
                let tile_keys = key_tile * block_n..key_tile * block_n + block_n;
                let step = steps.iter().find(|step| step[..2] == [head, tile]);
                assert!(seen(tile_keys) == 0 || step.is_some(), "{params:?}: query tile {tile} is left out");
                let Some(step) = step else { continue };
                for group in 0..2 {
                    let first = key_tile * block_n + group * 64;
                    let (found, all) = (seen(first..first + 64), rows.len() * 64);
                    assert!(step[2] & EMPTY_FOR << group == 0 || found == 0, "{params:?}: {step:?} has pairs");
                    assert!(step[2] & PARTIAL_FOR << group != 0 || found == all, "{params:?}: {step:?} is masked");
                }
            }
        }
    }
}

#[test]
fn a_range_of_columns_is_a_run_of_a_threads_bits() {
    let Some((library, _folder)) = library(true, &["BAND"]) else { return };
    // SAFETY: the function takes three numbers.
    let columns = unsafe { library.get::<unsafe extern "C" fn(i32, i32, i32) -> u32>(b"test_columns\0") }.unwrap();
    for thread in 0..4 {
        for (low, high) in [(0, 128), (0, 0), (-40, 5), (3, 4), (17, 90), (100, 300), (60, 20), (-300, -200)] {
            // Bit 2c + e is column 8c + 2·thread + e.
            let expected = (0..32).filter(|bit| (low..high).contains(&(bit / 2 * 8 + 2 * thread + bit % 2)));
            let expected = expected.fold(0u32, |bits, bit| bits | 1 << bit);
            // SAFETY: likewise.
            assert_eq!(unsafe { columns(thread, low, high) }, expected, "thread {thread}, {low}..{high}");
        }
    }
}

#[test]
fn ranges_of_segments_are_the_keys_that_a_query_sees() {
    let Some((library, _folder)) = library(true, &["SEGMENTS", "BAND", "LENGTHS"]) else { return };
    let (n, m, batch) = (300usize, 420usize, 3usize);
    let run = |j: usize| j as i32 / 90;
    let wrapped = |j: usize| if j < 380 { 1 + j as i32 / 70 } else { 0 };
    let mixed = |j: usize| (j as i32 / 10) % 4;
    let ids = |len: usize| -> Vec<i32> {
        (0..len).map(run).chain((0..len).map(wrapped)).chain((0..len).map(mixed)).collect()
    };
    let (segments_q, segments_k, lengths) = (ids(n), ids(m), [310, 260, 420]);
    let tiles = n.div_ceil(64);
    let (mut ranges, mut extents, mut order) =
        (vec![[-1; 2]; batch * n], vec![[0; 4]; batch * tiles], vec![-1; batch * tiles]);
    let (mut counter, mut any, mut marks) = ([0u32; 2], 0u32, vec![0u32; batch * tiles]);
    let params = HopperParams {
        batch: batch as i32,
        heads_q: 1,
        heads_k: 1,
        n: n as i32,
        m: m as i32,
        left: 200,
        right: 30,
        offset: 20,
        segments_q: segments_q.as_ptr() as u64,
        segments_k: segments_k.as_ptr() as u64,
        lengths: lengths.as_ptr() as u64,
        ranges: ranges.as_mut_ptr() as u64,
        range_extents: extents.as_mut_ptr() as u64,
        tile_order: order.as_mut_ptr() as u64,
        scheduler_counter: counter.as_mut_ptr() as u64,
        recompute_any: (&raw mut any) as u64,
        recompute_q: marks.as_mut_ptr() as u64,
        ..HopperParams::default()
    };
    // SAFETY: every array has the size that the kernel writes.
    unsafe {
        let function = library.get::<unsafe extern "C" fn(*const HopperParams, u32)>(b"test_ranges\0").unwrap();
        function(&params, (batch * n.div_ceil(256)) as u32);
    }
    for (b, i) in (0..2).flat_map(|b| (0..n).map(move |i| (b, i))) {
        let visible: Vec<i32> = (0..m)
            .filter(|&j| segments_q[b * n + i] == segments_k[b * m + j])
            .map(|j| j as i32)
            .filter(|&j| sees(&params, lengths[b], i as i32, j))
            .collect();
        let [low, high] = ranges[b * n + i];
        assert_eq!((low..high).collect::<Vec<_>>(), visible, "query {i} of sequence {b}");
    }
    // Segments that are not runs are left to the general kernels entirely.
    assert!(ranges[2 * n..].iter().all(|range| *range == [0, 0]));
    assert_eq!((any, counter), (1, [0, 0]));
    assert_eq!(marks, [vec![0; 2 * tiles], vec![1; tiles]].concat());
    let blocks = n.div_ceil(FORWARD[0]) * batch;
    let mut sorted = order[..blocks].to_vec();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..blocks as i32).collect::<Vec<_>>(), "every tile has one place in the order");
}
