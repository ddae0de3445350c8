//! Decoding of one query for each of many sequences with at most a tile of keys, such as the hypotheses of a beam
//! search: preparation takes longer than the products. A task is several sequences with all of their heads: masks are
//! reduced to lengths, one softmax processes all rows, and sequences that share their keys, such as the hypotheses of
//! one source, read them together.
//!
//! Rows go through the steps of the general pass in the same order, so they have the same bits, whatever else is in
//! their task.

use super::DecodePass;
use crate::compiled::tile::bits_of;
use crate::exact::forward::{OutputWriter, RowState};
use crate::mask::RowAt;
use crate::source::Source;
use crate::tuning::{GEMV_ROWS, KEYS};
use qkv_simd::gemv::{RowTable, dots, weighted_sum};
use qkv_simd::shared::for_each_task;
use qkv_simd::tile::{Running, Span, apply_mask, softmax};
use qkv_simd::{Element, Real, padded};
use std::ops::Range;

/// A sequence, and how many of its first keys its query sees.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShortSequence {
    b: usize,
    keys: usize,
}

impl<T: Element> DecodePass<'_, T> {
    /// Takes out the sequences whose query sees the first keys and at most a tile of them.
    pub(super) fn take_short(&mut self) -> Vec<ShortSequence> {
        let (problem, piece) = (self.ops.problem, &self.plan.pieces[0]);
        // Heads of a group that do not share a tile have separate masks.
        let shared = self.tilings[0].heads == problem.heads.group && piece.is_natural();
        if problem.n != 1 || problem.m == 0 || problem.heads.query > GEMV_ROWS || !shared || !self.ops.is_plain() {
            return Vec::new();
        }
        let mut short = Vec::new();
        self.sequences.retain(|&b| {
            let row = RowAt { b, h: 0, i: 0, p: problem.mask_data.position(b, 0) };
            match piece.interval(&problem.mask_data, &row) {
                Some((low, high)) if low <= 0 && high >= 0 && problem.m.min(high as usize + 1) <= KEYS => {
                    short.push(ShortSequence { b, keys: problem.m.min(high as usize + 1) });
                    false
                }
                _ => true,
            }
        });
        short
    }

    /// Computes these sequences and writes their output.
    pub(super) fn run_short(&self, short: &[ShortSequence], writer: &OutputWriter<'_, T>) {
        let problem = self.ops.problem;
        let at_once = GEMV_ROWS / problem.heads.query;
        let worker = || {
            let rows = [padded::<T::Acc>(self.ops.width), KEYS, padded::<T::Acc>(problem.dv)];
            rows.map(|row| self.scratch.take(GEMV_ROWS * row))
        };
        for_each_task(self.threads, short.len().div_ceil(at_once), worker, |buffers, task| {
            let some = &short[task * at_once..short.len().min((task + 1) * at_once)];
            let [queries, scores, values] = buffers;
            self.some_short(some, [queries, scores, values], writer);
        });
    }

    /// Ranges of consecutive sequences of `short` that have the same keys.
    fn sharing(&self, short: &[ShortSequence]) -> impl Iterator<Item = Range<usize>> {
        let (k, v) = (self.ops.problem.inputs.k, self.ops.problem.inputs.v);
        let mut start = 0;
        std::iter::from_fn(move || {
            let first = short.get(start)?;
            let same = |other: &&ShortSequence| {
                let same = |source: Source<'_, T>| source.is_shared(first.b, other.b, first.keys);
                other.keys == first.keys && same(k) && same(v)
            };
            let range = start..start + 1 + short[start + 1..].iter().take_while(same).count();
            start = range.end;
            Some(range)
        })
    }

    fn some_short(
        &self,
        short: &[ShortSequence],
        [queries, scores, values]: [&mut [T::Acc]; 3],
        writer: &OutputWriter<'_, T>,
    ) {
        let (ops, problem) = (self.ops, self.ops.problem);
        let (query_row, value_row) = (padded::<T::Acc>(ops.width), padded::<T::Acc>(problem.dv));
        let (group, count) = (problem.heads.group, short.len() * problem.heads.query);
        let mut table: [&[T]; KEYS] = [&[]; KEYS];
        let mut rows = [RowAt { b: 0, h: 0, i: 0, p: 0 }; GEMV_ROWS];
        let (mut bits, mut spans) = ([[0; 2]; GEMV_ROWS], [Span::default(); GEMV_ROWS]);
        // The rows of one key head are consecutive: those of its query heads, in all sequences that share its keys.
        let mut first = 0;
        for range in self.sharing(short) {
            let (some, keys) = (&short[range.clone()], short[range.start].keys);
            for head in 0..problem.heads.key {
                let start = first;
                for sequence in some {
                    for h in head * group..(head + 1) * group {
                        self.queries.load_row(sequence.b, h, 0, &mut queries[first * query_row..][..query_row]);
                        rows[first] = RowAt { b: sequence.b, h, i: 0, p: 0 };
                        bits[first] = bits_of(0..keys);
                        spans[first] = Span { start: 0, end: keys.div_ceil(T::Acc::LANES) as u16 };
                        first += 1;
                    }
                }
                problem.inputs.k.rows(some[0].b, head, 0, &mut table[..keys]);
                let (scores, queries) = (&mut scores[start * KEYS..], &queries[start * query_row..]);
                let table = RowTable { rows: &table[..keys], len: keys, width: ops.width };
                dots(ops.isa, scores, KEYS, queries, query_row, first - start, table);
            }
        }
        let longest = short.iter().map(|sequence| sequence.keys).max().unwrap_or(0);
        apply_mask(ops.isa, scores, KEYS, &bits[..count], &spans[..count]);
        let (mut max, mut sum) = ([T::Acc::NEG_INFINITY; GEMV_ROWS], [T::Acc::ZERO; GEMV_ROWS]);
        let mut factor = [T::Acc::ONE; GEMV_ROWS];
        let running = Running { max: &mut max, sum: &mut sum, entropy_acc: &mut [], factor: &mut factor };
        let how = ops.exponential_of(ops.scales[0], &spans[..count]);
        softmax(ops.isa, scores, KEYS, count, padded::<T::Acc>(longest), how, running);
        values[..count * value_row].fill(T::Acc::ZERO);
        let mut first = 0;
        for range in self.sharing(short) {
            let (some, keys) = (&short[range.clone()], short[range.start].keys);
            for head in 0..problem.heads.key {
                problem.inputs.v.rows(some[0].b, head, 0, &mut table[..keys]);
                let (values, weights) = (&mut values[first * value_row..], &scores[first * KEYS..]);
                let table = RowTable { rows: &table[..keys], len: keys, width: problem.dv };
                weighted_sum(ops.isa, values, value_row, weights, KEYS, some.len() * group, table);
                first += some.len() * group;
            }
        }
        for (r, row) in rows[..count].iter().enumerate() {
            let values = &mut values[r * value_row..][..value_row];
            writer.write(row, ops.isa, RowState { values, max: max[r], sum: sum[r], entropy_acc: T::Acc::ZERO });
        }
    }
}
