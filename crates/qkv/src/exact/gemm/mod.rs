//! The products of a tile, in the arithmetic that its numbers and the CPU give.
//!
//! Everything is made in the type of sums; or, where the inputs are bf16 and the CPU multiplies pairs of them, the operands stay bf16
//! and only sums are f32; or, where sums are f32 and the CPU has a unit for bf16 that is fast enough, the operands are the three bf16
//! that make up each number. A tile of scores is rows of f32 (or f64) in all of them, so whatever happens between two products does
//! not know which it is.

use super::extent::Extent;
use super::not_finite::{clear_what_is_not_finite, mend};
use super::operand::Operand;
use super::order::TileKeys;
use crate::problem::Problem;
use crate::score::Score;
use crate::scratch::{Buffer, Scratch};
use crate::select::Select;
use crate::tuning::{GATHERED_TILES, KEYS, PAIR_ROWS, QUERIES};
use half::bf16;
use qkv_simd::pairs::{self, DEPTH, Left, Pairs, Right, SIDE, deep, halves, halves_mut, singles, singles_of};
use qkv_simd::thirds::{self, Thirds};
use qkv_simd::tile::{Exponential, Running, dots, softmax, to_panels};
use qkv_simd::{Element, Isa, Matrix, Panels, Real, Target, padded, product, product_skipping_zeros};

/// How products are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    /// In the type of sums.
    Sums,
    /// From pairs of bf16, summed in f32.
    Pairs,
    /// From the three bf16 that make up an f32, summed in f32.
    Thirds,
}

impl Arithmetic {
    /// Where rows are compared as they are and go through a softmax: pairs of bf16, or thirds where sums are f32, if the CPU multiplies
    /// them. What a projection made is not rounded again, and what selects keys reads values as they are.
    pub fn of<T: Element>(problem: &Problem<'_, T>, isa: Isa) -> Arithmetic {
        let as_they_are = matches!(problem.attention.score, Score::Dot | Score::ScaledDot);
        let single = size_of::<T::Acc>() == size_of::<f32>();
        if !as_they_are || problem.attention.select != Select::Soft {
            Arithmetic::Sums
        } else if T::NAME == bf16::NAME && Pairs::possible(isa) {
            Arithmetic::Pairs
        } else if single && Thirds::possible(isa) {
            Arithmetic::Thirds
        } else {
            Arithmetic::Sums
        }
    }

    /// What gradients are made in, where scores are made in this. Of thirds only the scores: five products for two would have gradients
    /// feel the moods of the tile unit too much.
    pub fn of_gradients(self) -> Arithmetic {
        if self == Arithmetic::Thirds { Arithmetic::Sums } else { self }
    }

    /// The numbers of sums that a row takes as a left operand.
    pub fn left_row<A: Real>(self, width: usize) -> usize {
        match self {
            Arithmetic::Sums => padded::<A>(width),
            Arithmetic::Pairs => deep(width) / 2,
            Arithmetic::Thirds => thirds::left_len(width) / 2,
        }
    }

    /// The numbers of sums that `rows` rows take as the columns of a right operand.
    pub fn columns_len<A: Real>(self, rows: usize, width: usize) -> usize {
        match self {
            Arithmetic::Sums => padded::<A>(rows) * width,
            Arithmetic::Pairs => pairs::right_len(width, rows) / 2,
            Arithmetic::Thirds => thirds::right_len(width, rows) / 2,
        }
    }

    /// The numbers of sums that `rows` rows take as the rows of a right operand.
    pub fn rows_len<A: Real>(self, rows: usize, width: usize) -> usize {
        match self {
            Arithmetic::Sums => rows * padded::<A>(width),
            Arithmetic::Pairs => pairs::right_len(rows, width) / 2,
            Arithmetic::Thirds => thirds::right_len(rows, width) / 2,
        }
    }

    /// Tiles of queries that are packed together for a backward pass.
    pub fn tiles_together(self) -> usize {
        match self {
            Arithmetic::Sums | Arithmetic::Thirds => 1,
            Arithmetic::Pairs => GATHERED_TILES,
        }
    }

    /// Rows of a tile that are taken through all its passes at once.
    pub fn rows_at_once(self) -> usize {
        match self {
            Arithmetic::Sums => QUERIES,
            Arithmetic::Pairs | Arithmetic::Thirds => PAIR_ROWS,
        }
    }
}

/// What a worker packs and multiplies with.
pub(crate) struct Desk<'s, A: Real> {
    pub(super) isa: Isa,
    pub arithmetic: Arithmetic,
    pub(super) pairs: Option<Pairs>,
    pub(super) thirds: Option<Thirds>,
    /// Rows of one tile on their way into an operand.
    pub(super) stage: Buffer<'s, A>,
    /// The last thirds of the weights that were made last.
    low: Buffer<'s, A>,
}

impl<'s, A: Real> Desk<'s, A> {
    /// For operands of up to `width` numbers a row.
    pub fn new(scratch: &'s Scratch<A>, isa: Isa, arithmetic: Arithmetic, width: usize) -> Self {
        let pairs = if arithmetic == Arithmetic::Pairs { Pairs::new(isa) } else { None };
        let thirds = if arithmetic == Arithmetic::Thirds { Thirds::new(isa) } else { None };
        let low = scratch.take(if thirds.is_some() { QUERIES * KEYS / 2 } else { 0 });
        // Rows of a tile, or its weights rounded.
        let rows = KEYS.max(QUERIES) * arithmetic.left_row::<A>(width);
        let stage = scratch.take(rows.max(pairs::right_len(QUERIES, KEYS) / 2));
        Desk { isa, arithmetic, pairs, thirds, stage, low }
    }

    /// The unit that multiplies pairs, in that arithmetic.
    pub(super) fn pairs(&self) -> &Pairs {
        self.pairs.as_ref().expect("made with the desk of this arithmetic")
    }

    /// The unit that multiplies thirds, in that arithmetic.
    pub(super) fn thirds(&self) -> &Thirds {
        self.thirds.as_ref().expect("made with the desk of this arithmetic")
    }

    /// Copies rows as a left operand, and says whether all are finite; of thirds, whether [`scores`](Desk::scores) are surely what
    /// products make of them.
    pub fn load_left<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
        out: &mut [A],
    ) -> bool {
        if self.arithmetic != Arithmetic::Thirds {
            return load_left(self.arithmetic, self.pairs.as_ref(), from, rows, out);
        }
        let (width, row, count) = (from.width(), padded::<A>(from.width()), rows.clone().count());
        load(Arithmetic::Sums, from, rows, &mut self.stage);
        self.thirds().left(singles_of(&self.stage), row, count, width, halves_mut(out))
    }

    /// The sums of products of up to [`QUERIES`] pairs of rows, of which the first were loaded as a left operand, by the very sums that
    /// [`scores`](Desk::scores) makes: where two are equal in exact arithmetic term by term, they are equal to the last bit.
    pub fn dots<T: Element<Acc = A>>(
        &mut self,
        loaded: &[A],
        of: Operand<'_, T>,
        rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
        out: &mut [A],
    ) {
        let row = self.arithmetic.left_row::<A>(of.width());
        let (right, rest) = self.stage.split_at_mut(QUERIES * row);
        load_left(self.arithmetic, self.pairs.as_ref(), of, rows, right);
        match &self.pairs {
            None => dots(self.isa, loaded, right, row, out),
            Some(pairs) => {
                let (columns, sums) = rest.split_at_mut(SIDE * row);
                let chunks = 2 * row / DEPTH;
                for (at, out) in out.chunks_mut(SIDE).enumerate() {
                    let right = &halves(right)[at * SIDE * 2 * row..];
                    pairs.right_of_columns(right, 2 * row, out.len(), chunks, halves_mut(columns));
                    let left = Left { data: &halves(loaded)[at * SIDE * 2 * row..], row: 2 * row };
                    let right = Right { data: halves(columns), chunks, passing: false };
                    pairs.product(Target::anew(singles(sums), SIDE), left, right, SIDE, 0..1, 0..chunks);
                    out.iter_mut().enumerate().for_each(|(r, out)| *out = sums[r * SIDE + r]);
                }
            }
        }
    }

    /// Packs keys as the columns of a right operand, and says whether their [`scores`](Desk::scores) are surely what products make of them.
    pub fn load_columns<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        (b, h): (usize, usize),
        keys: &TileKeys<'_>,
        out: &mut [A],
    ) -> bool {
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
                    self.pairs().right_of_columns(rows, row, keys.len, chunks, out);
                } else {
                    self.stage_rows(from, (b, h), keys);
                    self.pairs().right_of_columns(halves(&self.stage), 2 * row, keys.len, chunks, out);
                }
            }
            Arithmetic::Thirds => {
                self.stage_rows(from, (b, h), keys);
                let rows = singles_of(&self.stage);
                return self.thirds().right_of_columns(rows, padded::<A>(width), keys.len, width, halves_mut(out));
            }
        }
        true
    }

    /// Packs keys as the rows of a right operand, and says whether all are finite. In pairs and thirds, what is not becomes zero: see
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
                if let Some((rows, row)) = lying(&from, (b, h), keys).filter(|_| from.width() == panels * SIDE)
                    && self.pairs().right_of_rows(rows, row, keys.len, panels, out)
                {
                    return true;
                }
                let row = 2 * self.arithmetic.left_row::<A>(from.width());
                let finite = self.stage_rows(from, (b, h), keys);
                if !finite {
                    clear_what_is_not_finite(&mut halves_mut(&mut self.stage)[..keys.len * row]);
                }
                self.pairs().right_of_rows(halves(&self.stage), row, keys.len, panels, out);
                finite
            }
            Arithmetic::Thirds => {
                let row = padded::<A>(from.width());
                let finite = self.stage_rows(from, (b, h), keys);
                if !finite {
                    clear_what_is_not_finite(&mut self.stage[..keys.len * row]);
                }
                self.thirds().right_of_rows(singles_of(&self.stage), row, keys.len, row / SIDE, halves_mut(out));
                finite
            }
        }
    }

    /// Packs keys as the columns of one right operand and the rows of another, and says whether all are finite.
    pub fn load_columns_and_rows<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        at: (usize, usize),
        keys: &TileKeys<'_>,
        (columns, rows): (&mut [A], &mut [A]),
    ) -> bool {
        let finite = self.load_rows(from, at, keys, rows);
        match self.arithmetic {
            // Rows of sums lie as they are turned.
            Arithmetic::Sums => to_panels(self.isa, rows, padded::<A>(from.width()), keys.len, from.width(), columns),
            Arithmetic::Pairs | Arithmetic::Thirds => {
                self.load_columns(from, at, keys, columns);
            }
        }
        finite
    }

    fn stage_rows<T: Element<Acc = A>>(
        &mut self,
        from: Operand<'_, T>,
        (b, h): (usize, usize),
        keys: &TileKeys<'_>,
    ) -> bool {
        let arithmetic = if self.arithmetic == Arithmetic::Pairs { Arithmetic::Pairs } else { Arithmetic::Sums };
        load(arithmetic, from, (0..keys.len).map(|at| (b, h, keys.index(at))), &mut self.stage)
    }

    /// Raw scores, rows of [`KEYS`]: left rows against the columns of a tile of keys, whole panels, where the rows' spans are. `surely`
    /// is what was said when they were loaded: that products make them.
    #[allow(clippy::too_many_arguments)]
    pub fn scores(
        &self,
        left: &[A],
        rows: usize,
        columns: &[A],
        width: usize,
        extent: Extent<'_>,
        surely: bool,
        out: &mut [A],
    ) {
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
                Arithmetic::Thirds => {
                    let chunks = deep(width) / DEPTH;
                    let (left, right) = (halves(left), thirds::Right { data: halves(columns), chunks });
                    let (to, of) = (Target::anew(singles(out), KEYS), thirds::Left::rows(left, width));
                    self.thirds().product(to, of, right, strip.len(), panels.clone(), 0..chunks);
                    if !surely {
                        mend(left, right, width, strip.len(), panels, singles(out));
                    }
                }
            }
        }
    }

    /// Turns finished scores, rows of [`KEYS`], into weights for [`weigh`](Desk::weigh), and brings the state of their rows
    /// forward; `modulate` is what comes between, if anything does.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)]
    pub fn soften(
        &mut self,
        scores: &mut [A],
        rows: usize,
        keys: usize,
        how: Exponential<'_, A>,
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
                self.pairs().softmax(singles(scores), KEYS, rows, width, how, running);
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

    /// Rounds rows of [`KEYS`] where they lie, or takes them apart, as [`weigh`](Desk::weigh) takes them.
    pub fn round(&mut self, weights: &mut [A], rows: usize, keys: usize) {
        let (weights, width) = (&mut weights[..], padded::<A>(keys));
        match self.arithmetic {
            Arithmetic::Sums => {}
            Arithmetic::Pairs => self.pairs().narrow_rows(singles(weights), KEYS, rows, width),
            Arithmetic::Thirds => {
                let Desk { thirds, low, .. } = self;
                let thirds = thirds.as_ref().expect("made with the desk of this arithmetic");
                thirds.split_rows(singles(weights), KEYS, rows, width, halves_mut(low), KEYS);
            }
        }
    }

    /// Adds weights, rows of [`KEYS`], times the rows of a tile of keys, or begins with them anew. In pairs the weights are rounded
    /// already, in thirds taken apart: those that were last.
    ///
    /// A weight of zero means that the pair is absent, whatever its row holds.
    pub fn weigh<T: Element<Acc = A>>(
        &mut self,
        weights: &[A],
        rows: usize,
        of: Weighed<'_, T>,
        extent: Extent<'_>,
        out: &mut [A],
        anew: bool,
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
                    let out = if anew { Target::anew(out, row) } else { Target::plus(out, row) };
                    multiply(self.isa, out, weights, rows, strip.len(), panels, end - start);
                }
                Arithmetic::Pairs => {
                    let chunks = of.keys.len.div_ceil(DEPTH);
                    let some = span.start as usize * SIDE / DEPTH..(span.end as usize * SIDE).div_ceil(DEPTH);
                    let right = Right { data: halves(of.rows), chunks, passing: true };
                    let left = Left { data: halves(weights), row: 2 * KEYS };
                    let sums = singles(out);
                    let sums = if anew { Target::anew(sums, row) } else { Target::onto(sums, row) };
                    self.pairs().product(sums, left, right, strip.len(), 0..panels, some);
                    if !of.finite {
                        self.add_what_is_not_finite(weights, strip.len(), &of, out);
                    }
                }
                Arithmetic::Thirds => {
                    let chunks = of.keys.len.div_ceil(DEPTH);
                    let some = span.start as usize * SIDE / DEPTH..(span.end as usize * SIDE).div_ceil(DEPTH);
                    let right = thirds::Right { data: halves(of.rows), chunks };
                    let low = &halves(&self.low)[strip.start * KEYS..];
                    let left = thirds::Left { high: halves(weights), row: 2 * KEYS, low, low_row: KEYS };
                    let sums = singles(out);
                    let sums = if anew { Target::anew(sums, row) } else { Target::plus(sums, row) };
                    self.thirds().product(sums, left, right, strip.len(), 0..panels, some);
                    if !of.finite {
                        self.add_what_is_not_finite(weights, strip.len(), &of, out);
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

/// The first of some rows and how many there are, if they follow one another in one head.
fn consecutive(mut rows: impl Iterator<Item = (usize, usize, usize)>) -> Option<((usize, usize, usize), usize)> {
    let (b, h, first) = rows.next()?;
    let mut count = 1;
    for row in rows {
        if row != (b, h, first + count) {
            return None;
        }
        count += 1;
    }
    Some(((b, h, first), count))
}

/// Rows of whole chunks as bf16 where they lie, if they follow one another in one head: one slice, the distance between them,
/// and how many there are.
fn run<'b, T: Element>(
    from: &'b Operand<'_, T>,
    rows: impl Iterator<Item = (usize, usize, usize)>,
) -> Option<(&'b [bf16], usize, usize)> {
    let Operand::Given(source) = from else { return None };
    let ((b, h, first), count) = consecutive(rows).filter(|_| from.width() == deep(from.width()))?;
    let (rows, row) = source.slab(b, h, first, count)?;
    Some((T::as_bf16(rows)?, row, count))
}

/// Copies rows as a left operand, and says whether all are finite.
fn load_left<T: Element>(
    arithmetic: Arithmetic,
    pairs: Option<&Pairs>,
    from: Operand<'_, T>,
    rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
    out: &mut [T::Acc],
) -> bool {
    let Some((pairs, (lying, row, count))) = pairs.zip(run(&from, rows.clone())) else {
        return load(arithmetic, from, rows, out);
    };
    let (width, out) = (from.width(), halves_mut(out));
    if row == width {
        return pairs.copy(lying, &mut out[..count * width]);
    }
    let rows = out.chunks_exact_mut(width).zip(lying.chunks(row));
    rows.fold(true, |finite, (to, from)| pairs.copy(&from[..width], to) && finite)
}

/// Copies rows one after the other, and says whether all are finite.
fn load<T: Element>(
    arithmetic: Arithmetic,
    from: Operand<'_, T>,
    rows: impl Iterator<Item = (usize, usize, usize)> + Clone,
    out: &mut [T::Acc],
) -> bool {
    let row = arithmetic.left_row::<T::Acc>(from.width());
    match (arithmetic, consecutive(rows.clone())) {
        (Arithmetic::Sums, Some(((b, h, first), count))) => from.load_rows(b, h, first, &mut out[..count * row], row),
        (Arithmetic::Sums, None) => each(rows, row, out, |(b, h, i), out| from.load_row(b, h, i, out)),
        (Arithmetic::Pairs, _) => each(rows, row, out, |(b, h, i), out| from.load_halves(b, h, i, halves_mut(out))),
        (Arithmetic::Thirds, _) => unreachable!("rows are taken apart after they were loaded"),
    }
}

/// Loads rows one by one, and says whether all are finite.
fn each<A>(
    rows: impl Iterator<Item = (usize, usize, usize)>,
    row: usize,
    out: &mut [A],
    load: impl Fn((usize, usize, usize), &mut [A]) -> bool,
) -> bool {
    rows.zip(out.chunks_exact_mut(row.max(1))).fold(true, |finite, (at, out)| load(at, out) && finite)
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
