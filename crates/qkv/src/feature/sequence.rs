//! Sequences as prefixes: the keys of each sequence in order, and for each query the length of the prefix that it sees.
//! Full, causal, lengths and segments, and any `&` of these, all have this form.
//!
//! Keys are split into *chunks*, at whose boundaries the state is known, and chunks are grouped into *spans*, whose
//! states are computed in parallel. Queries are split into *pieces*, the tasks of a pass. The splits depend only on
//! shapes and positions.

use crate::compiled::{Band, CompiledMask};
use crate::error::{Error, Result};
use crate::mask::Mask;
use crate::place::Place;
use crate::problem::Problem;
use crate::tuning::{CHUNK, SPAN};
use qkv_simd::Element;
use std::ops::Range;

/// The masks that linear attention supports: each query sees a prefix of its sequence.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PrefixMask {
    pub causal: bool,
    lengths: bool,
    segments: bool,
}

impl PrefixMask {
    /// From the compiled mask.
    ///
    /// # Errors
    /// Names the first part of the mask that does not keep a prefix.
    pub fn new(mask: &Mask) -> Result<PrefixMask> {
        PrefixMask::of(mask).ok_or_else(|| Error::Conflict {
            first: "linear attention",
            second: no_prefix(mask).unwrap_or(mask).name(),
            reason: "only full, causal, lengths, segments and `&` of these let each query see the first keys of a \
                     sequence",
        })
    }

    fn of(mask: &Mask) -> Option<PrefixMask> {
        let Band { limited, left, right, lengths, segments, .. } =
            CompiledMask::new(mask, 0, 0, Place::Start).band()?;
        let prefix = !limited || (left, right) == (Band::UNLIMITED, 0);
        prefix.then_some(PrefixMask { causal: limited, lengths, segments })
    }
}

/// The first operand of nested `&` that does not keep a prefix.
fn no_prefix(mask: &Mask) -> Option<&Mask> {
    match mask {
        Mask::And(a, b) => no_prefix(a).or_else(|| no_prefix(b)),
        mask => PrefixMask::of(mask).is_none().then_some(mask),
    }
}

/// A query, and the number of keys of its sequence that it sees, at least one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Query {
    pub i: usize,
    pub seen: usize,
}

/// The keys of a sequence, in ascending order.
#[derive(Clone, Debug)]
enum Keys {
    First(usize),
    These(Vec<usize>),
}

/// One sequence: a sequence of the batch, or a segment of one.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub b: usize,
    pub causal: bool,
    keys: Keys,
    /// By ascending number of visible keys.
    pub queries: Vec<Query>,
}

impl Sequence {
    /// The number of keys.
    pub fn len(&self) -> usize {
        match &self.keys {
            Keys::First(len) => *len,
            Keys::These(keys) => keys.len(),
        }
    }

    /// The index of its key `at`.
    pub fn key(&self, at: usize) -> usize {
        match &self.keys {
            Keys::First(_) => at,
            Keys::These(keys) => keys[at],
        }
    }

    pub fn chunks(&self) -> usize {
        self.len().div_ceil(CHUNK)
    }

    pub fn spans(&self) -> usize {
        self.chunks().div_ceil(SPAN)
    }

    /// The keys of a chunk.
    pub fn chunk(&self, chunk: usize) -> Range<usize> {
        chunk * CHUNK..((chunk + 1) * CHUNK).min(self.len())
    }

    /// The chunks of a span.
    pub fn span(&self, span: usize) -> Range<usize> {
        span * SPAN..((span + 1) * SPAN).min(self.chunks())
    }

    /// The queries of a causal sequence whose last key lies in one of these chunks.
    pub fn queries_in(&self, chunks: Range<usize>) -> Range<usize> {
        let from = |chunk: usize| self.queries.partition_point(|query| (query.seen - 1) / CHUNK < chunk);
        from(chunks.start)..from(chunks.end)
    }
}

/// A range of queries of a sequence. If it is causal, their last keys lie in one span; otherwise each sees all keys.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub sequence: usize,
    pub span: usize,
    pub queries: Range<usize>,
}

/// All sequences of a problem, cut into pieces.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    pub sequences: Vec<Sequence>,
    pub pieces: Vec<Piece>,
    /// Queries that see no key, by sequence of the batch.
    pub blind: Vec<(usize, usize)>,
}

impl Plan {
    pub fn new<T: Element>(problem: &Problem<'_, T>) -> Plan {
        let mask = PrefixMask::new(&problem.attention.mask).expect("checked");
        let (mask_data, &Problem { n, m, .. }) = (&problem.mask_data, problem);
        let mut plan = Plan::default();
        for b in 0..problem.b {
            let length = mask_data.lengths.filter(|_| mask.lengths).map_or(m, |lengths| lengths[b]);
            match mask_data.segments.filter(|_| mask.segments) {
                None => plan.add(problem, mask, b, Keys::First(length), 0..n),
                Some((queries, keys)) => {
                    let (queries, keys) = (&queries[b * n..][..n], &keys[b * m..][..length]);
                    let (queries, keys) = (Gathered::new(queries), Gathered::new(keys));
                    for (id, indices) in queries.segments() {
                        plan.add(problem, mask, b, Keys::These(keys.of(id).to_vec()), indices.iter().copied());
                    }
                }
            }
        }
        let most = (SPAN * CHUNK / problem.heads.group).max(CHUNK);
        for (at, sequence) in plan.sequences.iter().enumerate() {
            let spans = if sequence.causal { sequence.spans() } else { 1 };
            for span in 0..spans {
                let queries =
                    if sequence.causal { sequence.queries_in(sequence.span(span)) } else { 0..sequence.queries.len() };
                for start in queries.clone().step_by(most) {
                    let queries = start..(start + most).min(queries.end);
                    plan.pieces.push(Piece { sequence: at, span, queries });
                }
            }
        }
        plan
    }

    /// The pieces of a sequence.
    pub fn pieces_of(&self, sequence: usize) -> &[Piece] {
        let from = |sequence: usize| self.pieces.partition_point(|piece| piece.sequence < sequence);
        &self.pieces[from(sequence)..from(sequence + 1)]
    }

    fn add<T: Element>(
        &mut self,
        problem: &Problem<'_, T>,
        mask: PrefixMask,
        b: usize,
        keys: Keys,
        queries: impl Iterator<Item = usize>,
    ) {
        let mut sequence = Sequence { b, causal: mask.causal, keys, queries: Vec::new() };
        for i in queries {
            let seen = if mask.causal {
                // Keys at or before the query's position.
                let before = (problem.mask_data.position(b, i) + 1).clamp(0, problem.m as i64) as usize;
                match &sequence.keys {
                    Keys::First(len) => before.min(*len),
                    Keys::These(keys) => keys.partition_point(|&j| j < before),
                }
            } else {
                sequence.len()
            };
            match seen {
                0 => self.blind.push((b, i)),
                seen => sequence.queries.push(Query { i, seen }),
            }
        }
        if !sequence.queries.is_sorted_by_key(|query| query.seen) {
            sequence.queries.sort_by_key(|query| query.seen);
        }
        if !sequence.queries.is_empty() {
            self.sequences.push(sequence);
        }
    }
}

/// Indices in the order of their segments.
struct Gathered<'a> {
    ids: &'a [i32],
    order: Vec<usize>,
}

impl<'a> Gathered<'a> {
    fn new(ids: &'a [i32]) -> Self {
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_by_key(|&at| ids[at]); // stable: ascending within a segment
        Gathered { ids, order }
    }

    fn segments(&self) -> impl Iterator<Item = (i32, &[usize])> {
        self.order.chunk_by(|&a, &b| self.ids[a] == self.ids[b]).map(|chunk| (self.ids[chunk[0]], chunk))
    }

    fn of(&self, id: i32) -> &[usize] {
        let start = self.order.partition_point(|&at| self.ids[at] < id);
        let end = self.order.partition_point(|&at| self.ids[at] <= id);
        &self.order[start..end]
    }
}
