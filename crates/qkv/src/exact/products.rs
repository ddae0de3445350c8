//! The products of a tile, in the arithmetic that its numbers and the CPU give.
//!
//! Either everything is made in the type of sums, or, where the inputs are bf16 and the CPU multiplies pairs of them, the
//! operands stay bf16 and only sums are f32. A tile of scores is rows of f32 (or f64) in both, so whatever happens between
//! two products does not know which it is.

use super::operand::Operand;
use super::order::TileKeys;
use super::tile::RowAt;
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::{Buffer, Scratch};
use crate::select::Select;
use crate::tuning::{GATHERED, GATHERED_TILES, KEYS, PAIR_ROWS, QUERIES, SPAN_ROWS};
use half::bf16;
use qkv_simd::pairs::{self, Blocks, DEPTH, Left, Pairs, Right, SIDE, deep, halves, halves_mut, singles, singles_of};
use qkv_simd::tile::{Exponential, RowGradient, Running, Span, dots, softmax, to_panels, transpose};
use qkv_simd::{Element, Isa, Matrix, Panels, Real, Target, padded, product, product_skipping_zeros};
use std::ops::Range;

/// How products are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    /// In the type of sums.
    Sums,
    /// From pairs of bf16, summed in f32.
    Pairs,
}

impl Arithmetic {
    /// Pairs where rows of bf16 are compared as they are; what a projection made is not rounded again.
    pub fn of<T: Element>(problem: &Problem<'_, T>, isa: Isa) -> Arithmetic {
        let as_they_are = matches!(problem.attention.score, Score::Dot | Score::ScaledDot);
        let bf16 = T::NAME == bf16::NAME;
        if bf16 && as_they_are && problem.attention.select == Select::Soft && Pairs::possible(isa) {
            Arithmetic::Pairs
        } else {
            Arithmetic::Sums
        }
    }

    /// The numbers of sums that a row takes as a left operand.
    pub fn left_row<A: Real>(self, width: usize) -> usize {
        match self {
            Arithmetic::Sums => padded::<A>(width),
            Arithmetic::Pairs => deep(width) / 2,
        }
    }

    /// The numbers of sums that `rows` rows take as the columns of a right operand.
    pub fn columns_len<A: Real>(self, rows: usize, width: usize) -> usize {
        match self {
            Arithmetic::Sums => padded::<A>(rows) * width,
            Arithmetic::Pairs => pairs::right_len(width, rows) / 2,
        }
    }

    /// The numbers of sums that `rows` rows take as the rows of a right operand.
    pub fn rows_len<A: Real>(self, rows: usize, width: usize) -> usize {
        match self {
            Arithmetic::Sums => rows * padded::<A>(width),
            Arithmetic::Pairs => pairs::right_len(rows, width) / 2,
        }
    }

    /// Tiles of queries that are packed together for a backward pass.
    pub fn tiles_together(self) -> usize {
        match self {
            Arithmetic::Sums => 1,
            Arithmetic::Pairs => GATHERED_TILES,
        }
    }

    /// Rows of a tile that are taken through all its passes at once.
    pub fn rows_at_once(self) -> usize {
        match self {
            Arithmetic::Sums => QUERIES,
            Arithmetic::Pairs => PAIR_ROWS,
        }
    }
}

/// What a worker packs and multiplies with.
pub(crate) struct Desk<'s, A: Real> {
    isa: Isa,
    pub arithmetic: Arithmetic,
    pairs: Option<Pairs>,
    /// Rows of one tile on their way into an operand.
    stage: Buffer<'s, A>,
}

impl<'s, A: Real> Desk<'s, A> {
    /// For operands of up to `width` numbers a row.
    pub fn new(scratch: &'s Scratch<A>, isa: Isa, arithmetic: Arithmetic, width: usize) -> Self {
        let pairs = if arithmetic == Arithmetic::Pairs { Pairs::new(isa) } else { None };
        // Rows of a tile, or its weights rounded.
        let rows = KEYS.max(QUERIES) * arithmetic.left_row::<A>(width);
        Desk { isa, arithmetic, pairs, stage: scratch.take(rows.max(pairs::right_len(QUERIES, KEYS) / 2)) }
    }

    fn pairs(&self) -> &Pairs {
        self.pairs.as_ref().expect("made with the desk of this arithmetic")
    }

    /// Copies rows as a left operand, and says whether all are finite.
    pub fn load_left<T: Element<Acc = A>>(
        &self,
        from: Operand<'_, T>,
        rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
        out: &mut [A],
    ) -> bool {
        if let Some(pairs) = &self.pairs
            && let Some((lying, row, count)) = run(&from, rows.clone())
        {
            let (width, out) = (from.width(), halves_mut(out));
            if row == width {
                out[..count * width].copy_from_slice(lying);
            } else {
                for (to, from) in out.chunks_exact_mut(width).zip(lying.chunks(row)) {
                    to.copy_from_slice(&from[..width]);
                }
            }
            return pairs.finite(&out[..count * width]);
        }
        load(self.arithmetic, from, rows, out)
    }

    /// The sums of products of up to [`QUERIES`] pairs of rows, by the very sums that [`scores`](Desk::scores) makes: where two
    /// are equal in exact arithmetic term by term, they are equal to the last bit.
    pub fn dots<T: Element<Acc = A>>(
        &self,
        a: Operand<'_, T>,
        b: Operand<'_, T>,
        rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
        room: &mut [A],
        out: &mut [A],
    ) {
        let row = self.arithmetic.left_row::<A>(a.width());
        let (left, rest) = room.split_at_mut(QUERIES * row);
        let (right, rest) = rest.split_at_mut(QUERIES * row);
        self.load_left(a, rows.clone(), left);
        self.load_left(b, rows, right);
        match self.arithmetic {
            Arithmetic::Sums => dots(self.isa, left, right, row, out),
            Arithmetic::Pairs => {
                let (columns, sums) = rest.split_at_mut(SIDE * row);
                let (pairs, chunks) = (self.pairs(), 2 * row / DEPTH);
                for (at, out) in out.chunks_mut(SIDE).enumerate() {
                    pairs.right_of_columns(
                        &halves(right)[at * SIDE * 2 * row..],
                        2 * row,
                        out.len(),
                        chunks,
                        halves_mut(columns),
                    );
                    let left = Left { data: &halves(left)[at * SIDE * 2 * row..], row: 2 * row };
                    let right = Right { data: halves(columns), chunks, passing: false };
                    pairs.product(Target::anew(singles(sums), SIDE), left, right, SIDE, 0..1, 0..chunks);
                    out.iter_mut().enumerate().for_each(|(r, out)| *out = sums[r * SIDE + r]);
                }
            }
        }
    }

    /// The room that [`dots`](Desk::dots) needs.
    pub fn dots_len(arithmetic: Arithmetic, width: usize) -> usize {
        (2 * QUERIES + SIDE) * arithmetic.left_row::<A>(width) + SIDE * SIDE
    }

    /// The largest length, as a vector, of rows that were loaded as a left operand, where that is of use; ∞ otherwise.
    pub fn longest_row(&self, rows: &[A], count: usize, width: usize) -> A {
        let of = |pairs: &Pairs| pairs.longest_row(halves(rows), deep(width), count, deep(width) / DEPTH);
        self.pairs.as_ref().map_or(A::INFINITY, |pairs| A::of_f64(of(pairs).into()))
    }

    /// The same of keys that were packed as columns.
    pub fn longest_column(&self, columns: &[A], count: usize, width: usize) -> A {
        let of = |pairs: &Pairs| pairs.longest_column(halves(columns), count, deep(width) / DEPTH);
        self.pairs.as_ref().map_or(A::INFINITY, |pairs| A::of_f64(of(pairs).into()))
    }

    /// Packs keys as the columns of a right operand.
    pub fn load_columns<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        (b, h): (usize, usize),
        keys: &TileKeys<'_>,
        out: &mut [A],
    ) {
        let width = from.width();
        let row = self.arithmetic.left_row::<A>(width);
        match self.arithmetic {
            Arithmetic::Sums => {
                self.stage_rows(from, (b, h), keys);
                to_panels(self.isa, &self.stage, row, keys.len, width, out);
            }
            Arithmetic::Pairs => {
                let (chunks, out) = (deep(width) / DEPTH, halves_mut(out));
                // Rows of whole chunks that lie one after the other are read where they lie.
                if let Some((rows, row)) = lying(&from, (b, h), keys).filter(|_| width == deep(width)) {
                    return self.pairs().right_of_columns(rows, row, keys.len, chunks, out);
                }
                self.stage_rows(from, (b, h), keys);
                self.pairs().right_of_columns(halves(&self.stage), 2 * row, keys.len, chunks, out);
            }
        }
    }

    /// Packs keys as the rows of a right operand, and says whether all are finite. In pairs, what is not becomes zero: see
    /// [`weigh`](Desk::weigh).
    pub fn load_rows<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        (b, h): (usize, usize),
        keys: &TileKeys<'_>,
        out: &mut [A],
    ) -> bool {
        match self.arithmetic {
            Arithmetic::Sums => self.load_left(from, (0..keys.len).map(|at| (b, h, keys.index(at))), out),
            Arithmetic::Pairs => {
                let (panels, out) = (from.width().div_ceil(SIDE), halves_mut(out));
                let whole = |&(rows, row): &(&[bf16], usize)| {
                    panels * SIDE == row && row == from.width() && self.pairs().finite(rows)
                };
                if let Some((rows, row)) = lying(&from, (b, h), keys).filter(whole) {
                    self.pairs().right_of_rows(rows, row, keys.len, panels, out);
                    return true;
                }
                let row = 2 * self.arithmetic.left_row::<A>(from.width());
                let finite = self.stage_rows(from, (b, h), keys);
                if !finite {
                    clear_what_is_not_finite(halves_mut(&mut self.stage), keys.len * row);
                }
                self.pairs().right_of_rows(halves(&self.stage), row, keys.len, panels, out);
                finite
            }
        }
    }

    fn stage_rows<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        (b, h): (usize, usize),
        keys: &TileKeys<'_>,
    ) -> bool {
        load(self.arithmetic, from, (0..keys.len).map(|at| (b, h, keys.index(at))), &mut self.stage)
    }

    /// Raw scores, rows of [`KEYS`]: left rows against the columns of a tile of keys, whole panels, where the rows' spans are.
    pub fn scores(&self, left: &[A], rows: usize, columns: &[A], width: usize, extent: Extent<'_>, out: &mut [A]) {
        let row = self.arithmetic.left_row::<A>(width);
        for (strip, span) in extent.strips(rows, self.arithmetic) {
            let (left, out) = (&left[strip.start * row..], &mut out[strip.start * KEYS..]);
            let (start, panels) = (span.start as usize, span.start as usize..span.end as usize);
            match self.arithmetic {
                Arithmetic::Sums => {
                    let columns = Panels::packed(&columns[start * width * A::LANES..], width);
                    let out = Target::anew(&mut out[start * A::LANES..], KEYS);
                    product(self.isa, out, Matrix::rows(left, row), columns, strip.len(), panels.len(), width);
                }
                Arithmetic::Pairs => {
                    let chunks = deep(width) / DEPTH;
                    let (left, right) = (
                        Left { data: halves(left), row: 2 * row },
                        Right { data: halves(columns), chunks, passing: true },
                    );
                    self.pairs().product(Target::anew(singles(out), KEYS), left, right, strip.len(), panels, 0..chunks);
                }
            }
        }
    }

    /// Turns finished scores, rows of [`KEYS`], into weights for [`weigh`](Desk::weigh), and brings the state of their rows
    /// forward. No score is above `furthest`; `modulate` is what comes between, if anything does.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub fn soften(
        &self,
        scores: &mut [A],
        rows: usize,
        keys: usize,
        how: Exponential<'_, A>,
        furthest: A,
        running: Running<'_, A>,
        modulate: Option<impl FnOnce(&mut [A])>,
    ) {
        let width = padded::<A>(keys);
        match (self.arithmetic, modulate) {
            (Arithmetic::Pairs, None) => {
                let Running { max, sum, moment, factor } = running;
                let how = Exponential { scale: how.scale.to_f64() as f32, spans: how.spans, sharp: how.sharp };
                let [max, sum, moment, factor] = [max, sum, moment, factor].map(|of| singles(of));
                let running = Running { max, sum, moment, factor };
                let furthest = furthest.to_f64() as f32;
                self.pairs().softmax(singles(scores), KEYS, rows, width, how, running, furthest);
            }
            (_, modulate) => {
                softmax(self.isa, scores, KEYS, rows, width, how, running);
                if let Some(modulate) = modulate {
                    modulate(scores);
                }
                self.round(scores, rows, keys);
            }
        }
    }

    /// Rounds rows of [`KEYS`] where they lie, as [`weigh`](Desk::weigh) takes them.
    pub fn round(&self, weights: &mut [A], rows: usize, keys: usize) {
        if self.arithmetic == Arithmetic::Pairs {
            self.pairs().narrow_rows(singles(weights), KEYS, rows, padded::<A>(keys));
        }
    }

    /// Adds weights, rows of [`KEYS`], times the rows of a tile of keys. In pairs the weights are rounded already.
    ///
    /// A weight of zero means that the pair is absent, whatever its row holds.
    pub fn weigh<T: Element<Acc = A>>(
        &mut self,
        weights: &[A],
        rows: usize,
        of: Weighed<'_, T>,
        extent: Extent<'_>,
        out: &mut [A],
    ) {
        let row = padded::<A>(of.from.width());
        let panels = row / A::LANES;
        for (strip, span) in extent.strips(rows, self.arithmetic) {
            let (weights, out) = (&weights[strip.start * KEYS..], &mut out[strip.start * row..]);
            match self.arithmetic {
                Arithmetic::Sums => {
                    let (start, end) =
                        (span.start as usize * A::LANES, (span.end as usize * A::LANES).min(of.keys.len));
                    let multiply = if of.finite { product } else { product_skipping_zeros };
                    let (weights, rows) =
                        (Matrix::rows(&weights[start..], KEYS), Panels::rows(&of.rows[start * row..], row));
                    multiply(self.isa, Target::plus(out, row), weights, rows, strip.len(), panels, end - start);
                }
                Arithmetic::Pairs => {
                    let chunks = of.keys.len.div_ceil(DEPTH);
                    let some = span.start as usize * SIDE / DEPTH..(span.end as usize * SIDE).div_ceil(DEPTH);
                    let right = Right { data: halves(of.rows), chunks, passing: true };
                    let left = Left { data: halves(weights), row: 2 * KEYS };
                    self.pairs().product(Target::onto(singles(out), row), left, right, strip.len(), 0..panels, some);
                    if !of.finite {
                        self.add_what_is_not_finite(weights, strip.len(), &of, out);
                    }
                }
            }
        }
    }

    /// Packs the rows of some tiles of queries for a backward pass: as a left operand, and, where that cannot be read both ways, as
    /// one whose columns they are. Says whether all are finite; in the latter, what is not becomes zero.
    pub fn load_both_ways<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        rows: impl ExactSizeIterator<Item = (usize, usize, usize)> + Clone,
        out: &mut [A],
    ) -> bool {
        let (count, row) = (rows.len(), self.arithmetic.left_row::<A>(from.width()));
        let (to, across) = out.split_at_mut(self.arithmetic.tiles_together() * QUERIES * row);
        let finite = self.load_left(from, rows, to);
        if self.arithmetic == Arithmetic::Pairs {
            let (panels, chunks) = (from.width().div_ceil(SIDE), count.div_ceil(DEPTH));
            for start in (0..count).step_by(QUERIES) {
                let (count, mut rows) = (QUERIES.min(count - start), &to[start * row..][..QUERIES * row]);
                if !finite {
                    self.stage[..rows.len()].copy_from_slice(rows);
                    clear_what_is_not_finite(halves_mut(&mut self.stage), count * 2 * row);
                    rows = &self.stage[..rows.len()];
                }
                let out = &mut halves_mut(across)[start..];
                self.pairs().left_of_columns(halves(rows), 2 * row, count, panels, out, chunks);
            }
        }
        finite
    }

    /// The memory of [`load_both_ways`](Desk::load_both_ways).
    pub fn both_ways_len(arithmetic: Arithmetic, width: usize) -> usize {
        let rows = arithmetic.tiles_together() * QUERIES;
        let across = if arithmetic == Arithmetic::Pairs { pairs::right_len(rows, width) / 2 } else { 0 };
        rows * arithmetic.left_row::<A>(width) + across
    }

    /// Turns finished scores and gradients of weights, up to [`PAIR_ROWS`] rows of [`KEYS`], into the operands of the products that
    /// are left: both by key, as [`turn`](Desk::turn) would leave them, the first row of them at `first` of the rows that are packed
    /// together, and the gradients as [`round`](Desk::round) would.
    #[allow(clippy::too_many_arguments)]
    pub fn soften_back(
        &self,
        scores: &[A],
        grads: &mut [A],
        (rows, keys): (usize, usize),
        how: Exponential<'_, A>,
        of: RowGradient<'_, A>,
        (first, together): (usize, usize),
        [weights, turned]: [&mut [A]; 2],
    ) {
        let single = |x: A| x.to_f64() as f32;
        let how = Exponential { scale: single(how.scale), spans: how.spans, sharp: how.sharp };
        let of = RowGradient {
            lse: singles_of(of.lse),
            delta: singles_of(of.delta),
            entropy: singles_of(of.entropy),
            scale: single(of.scale),
        };
        let (chunks, chunk) = (together.div_ceil(DEPTH), first / DEPTH);
        let into = Blocks { weights: halves_mut(weights), grads: halves_mut(turned), chunks, chunk };
        let width = padded::<A>(keys);
        self.pairs().softmax_gradient(singles_of(scores), singles(grads), KEYS, rows, width, how, of, into);
    }

    /// The memory of weights that are turned.
    pub fn turned_len(arithmetic: Arithmetic) -> usize {
        let rows = arithmetic.tiles_together() * QUERIES;
        if arithmetic == Arithmetic::Pairs { pairs::right_len(rows, KEYS) / 2 } else { 0 }
    }

    /// Rounds weights, rows of [`KEYS`], by key, as [`gather`](Desk::gather) takes them in pairs: the first row at `first` of the rows
    /// that are packed together.
    pub fn turn(
        &self,
        weights: &[A],
        rows: usize,
        extent: Extent<'_>,
        (first, together): (usize, usize),
        out: &mut [A],
    ) {
        if self.arithmetic == Arithmetic::Pairs {
            let (panels, chunks) = (extent.whole(rows).end as usize, together.div_ceil(DEPTH));
            let out = &mut halves_mut(out)[first * SIDE..];
            self.pairs().narrow_right(singles_of(weights), KEYS, rows, panels, out, chunks);
        }
    }

    /// Adds the transpose of weights, rows of [`KEYS`], times rows of queries that were loaded both ways, to sums for each
    /// key. In pairs the weights are taken from what was `turned`, and the sums lie transposed until
    /// [`key_rows`](Desk::key_rows) turns them.
    ///
    /// A weight of zero means that the pair is absent, whatever the query's row holds.
    pub fn gather<T: Element<Acc = A>>(
        &mut self,
        (weights, turned): (&[A], &[A]),
        of: Gathering<'_, T>,
        extent: Extent<'_>,
        out: &mut [A],
    ) {
        let (width, count) = (of.from.width(), of.rows.len());
        let row = padded::<A>(width);
        match self.arithmetic {
            Arithmetic::Sums => {
                let multiply = if of.packed.finite { product } else { product_skipping_zeros };
                for (keys, queries) in extent.columns::<A>(count, of.keys) {
                    let mut start = queries.start;
                    while start < queries.end {
                        let end = (start / GATHERED * GATHERED + GATHERED).min(queries.end);
                        let weights = Matrix::transposed(&weights[start * KEYS + keys.start..], KEYS);
                        let rows = Panels::rows(&of.packed.rows[start * row..], row);
                        let out = Target::plus(&mut out[keys.start * row..], row);
                        multiply(self.isa, out, weights, rows, keys.len(), row / A::LANES, end - start);
                        start = end;
                    }
                }
            }
            Arithmetic::Pairs => {
                for (strip, span) in extent.strips(count, self.arithmetic) {
                    let rows = of.packed.first + strip.start..of.packed.first + strip.end;
                    self.gather_rows(turned, of.packed, rows, span, width, out);
                }
                if !of.packed.finite {
                    self.gather_what_is_not_finite(weights, &of, out);
                }
            }
        }
    }

    /// Of what is packed together, [`gather`](Desk::gather)s some rows: in pairs, and whole chunks.
    pub fn gather_rows(
        &self,
        turned: &[A],
        packed: Packed<'_, A>,
        rows: Range<usize>,
        span: Span,
        width: usize,
        out: &mut [A],
    ) {
        let left = Left { data: halves(packed.across), row: deep(packed.together) };
        let right = Right { data: halves(turned), chunks: packed.together.div_ceil(DEPTH), passing: false };
        let (panels, chunks) = (span.start as usize..span.end as usize, rows.start / DEPTH..rows.end.div_ceil(DEPTH));
        self.pairs().product(Target::onto(singles(out), KEYS), left, right, width, panels, chunks);
    }

    /// Adds what was left out when queries were loaded both ways.
    fn gather_what_is_not_finite<T: Element<Acc = A>>(&mut self, weights: &[A], of: &Gathering<'_, T>, out: &mut [A]) {
        let row = padded::<A>(of.from.width());
        for (r, at) in of.rows.iter().enumerate() {
            if of.from.load_row(at.b, at.h, at.i, &mut self.stage[..row]) {
                continue;
            }
            for (x, &value) in self.stage[..row].iter().enumerate().filter(|(_, x)| !x.is_finite()) {
                for key in (0..of.keys).filter(|key| weights[r * KEYS + key] != A::ZERO) {
                    out[x * KEYS + key] += weights[r * KEYS + key] * value;
                }
            }
        }
    }

    /// What was gathered, as padded rows, one a key.
    pub fn key_rows<'b>(&self, gathered: &'b [A], width: usize, room: &'b mut [A]) -> &'b [A] {
        match self.arithmetic {
            Arithmetic::Sums => gathered,
            Arithmetic::Pairs => {
                let row = padded::<A>(width);
                transpose(self.isa, gathered, KEYS, row, KEYS / A::LANES, room, row);
                room
            }
        }
    }

    /// Adds what [`load_rows`](Desk::load_rows) left out: numbers that are not finite, where their weight is not zero.
    fn add_what_is_not_finite<T: Element<Acc = A>>(
        &mut self,
        weights: &[A],
        rows: usize,
        of: &Weighed<'_, T>,
        out: &mut [A],
    ) {
        let row = padded::<A>(of.from.width());
        for at in 0..of.keys.len {
            if of.from.load_row(of.b, of.h, of.keys.index(at), &mut self.stage[..row]) {
                continue;
            }
            for r in 0..rows {
                let weight = A::of_f64(halves(&weights[r * KEYS..])[at].to_f64());
                if weight != A::ZERO {
                    for (out, &x) in out[r * row..].iter_mut().zip(&self.stage[..row]).filter(|(_, x)| !x.is_finite()) {
                        *out += weight * x;
                    }
                }
            }
        }
    }
}

/// The keys of a tile as bf16 where they lie: one slice, and the distance between rows.
fn lying<'b, T: Element>(
    from: &'b Operand<'_, T>,
    (b, h): (usize, usize),
    keys: &TileKeys<'_>,
) -> Option<(&'b [bf16], usize)> {
    let Operand::Given(source) = from else { return None };
    let (rows, row) = source.slab(b, h, keys.natural()?, keys.len)?;
    Some((T::as_bf16(rows)?, row))
}

/// Rows of whole chunks as bf16 where they lie, if they follow one another in one head: one slice, the distance between them,
/// and how many there are.
fn run<'b, T: Element>(
    from: &'b Operand<'_, T>,
    mut rows: impl Iterator<Item = (usize, usize, usize)>,
) -> Option<(&'b [bf16], usize, usize)> {
    let Operand::Given(source) = from else { return None };
    let (b, h, first) = rows.next().filter(|_| from.width() == deep(from.width()))?;
    let mut count = 1;
    for row in rows {
        if row != (b, h, first + count) {
            return None;
        }
        count += 1;
    }
    let (rows, row) = source.slab(b, h, first, count)?;
    Some((T::as_bf16(rows)?, row, count))
}

/// Copies rows one after the other, and says whether all are finite.
fn load<T: Element>(
    arithmetic: Arithmetic,
    from: Operand<'_, T>,
    rows: impl Iterator<Item = (usize, usize, usize)>,
    out: &mut [T::Acc],
) -> bool {
    let row = arithmetic.left_row::<T::Acc>(from.width());
    let mut finite = true;
    for ((b, h, i), out) in rows.zip(out.chunks_exact_mut(row.max(1))) {
        finite &= match arithmetic {
            Arithmetic::Sums => from.load_row(b, h, i, out),
            Arithmetic::Pairs => from.load_halves(b, h, i, halves_mut(out)),
        };
    }
    finite
}

fn clear_what_is_not_finite(stage: &mut [bf16], len: usize) {
    stage[..len].iter_mut().filter(|x| !x.is_finite()).for_each(|x| *x = bf16::ZERO);
}

/// Rows that are weighed and added up: packed, and where they came from.
#[derive(Clone, Copy)]
pub(crate) struct Weighed<'a, T: Element> {
    pub rows: &'a [T::Acc],
    pub finite: bool,
    pub from: Operand<'a, T>,
    pub b: usize,
    pub h: usize,
    pub keys: &'a TileKeys<'a>,
}

/// Rows of queries of a tile, packed both ways together with those of its neighbours.
#[derive(Clone, Copy)]
pub(crate) struct Packed<'a, A> {
    /// The rows of the tile as a left operand.
    pub rows: &'a [A],
    /// All rows as the columns of a left operand, in pairs.
    pub across: &'a [A],
    /// How many lie together, and where among them the tile begins.
    pub together: usize,
    pub first: usize,
    /// Whether all of them are finite.
    pub finite: bool,
}

/// Rows of queries that are gathered by key: packed, and where they came from.
#[derive(Clone, Copy)]
pub(crate) struct Gathering<'a, T: Element> {
    pub packed: Packed<'a, T::Acc>,
    pub from: Operand<'a, T>,
    pub rows: &'a [RowAt],
    /// Keys in the tile.
    pub keys: usize,
}

/// Which panels of a tile there are, and which of them each row sees; no spans means all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent<'a> {
    pub panels: usize,
    pub spans: &'a [Span],
}

impl<'a> Extent<'a> {
    /// The panels that any row sees.
    fn whole(self, rows: usize) -> Span {
        let all = Span { start: 0, end: self.panels as u16 };
        if self.spans.is_empty() { all } else { self.spans[..rows].iter().copied().fold(Span::default(), Span::join) }
    }

    /// Strips of keys with the rows that any of them is seen by.
    fn columns<A: Real>(self, rows: usize, keys: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + 'a {
        let size = if self.spans.is_empty() { keys.max(1) } else { A::LANES };
        (0..keys).step_by(size).filter_map(move |start| {
            let strip = start..(start + size).min(keys);
            let panel = (start / A::LANES) as u16;
            let sees = |r: &usize| self.spans.is_empty() || (self.spans[*r].start..self.spans[*r].end).contains(&panel);
            let first = (0..rows).find(sees)?;
            let last = (0..rows).rfind(sees)?;
            Some((strip, first..last + 1))
        })
    }

    /// Strips of rows with the panels that any of them sees.
    fn strips(self, rows: usize, arithmetic: Arithmetic) -> impl Iterator<Item = (Range<usize>, Span)> + 'a {
        let all = Span { start: 0, end: self.panels as u16 };
        let size = match arithmetic {
            _ if self.spans.is_empty() => rows.max(1),
            Arithmetic::Sums => SPAN_ROWS,
            Arithmetic::Pairs => PAIR_ROWS,
        };
        (0..rows).step_by(size).filter_map(move |start| {
            let strip = start..(start + size).min(rows);
            let span = match self.spans.get(strip.clone()) {
                Some(spans) => spans.iter().copied().reduce(Span::join).unwrap_or_default(),
                None => all,
            };
            (span.start < span.end).then_some((strip, span))
        })
    }
}
