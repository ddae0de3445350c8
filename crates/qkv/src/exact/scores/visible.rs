//! The panels of a tile of keys that its rows see.

use crate::exact::gemm::Arithmetic;
use crate::tuning::{BF16_ROWS, SPAN_ROWS};
use qkv_simd::Real;
use qkv_simd::tile::Span;
use std::ops::Range;

/// The panels of a tile, and the span of them that each row sees; without spans, all of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VisiblePanels<'a> {
    pub panels: usize,
    pub spans: &'a [Span],
}

impl<'a> VisiblePanels<'a> {
    /// The span of panels that any row sees.
    pub fn union(self, rows: usize) -> Span {
        let all = Span { start: 0, end: self.panels as u16 };
        if self.spans.is_empty() { all } else { self.spans[..rows].iter().copied().fold(Span::default(), Span::join) }
    }

    /// Strips of keys, each with the range of rows that see any of them.
    pub fn key_strips<A: Real>(
        self,
        rows: usize,
        keys: usize,
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + 'a {
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

    /// Strips of rows, each with the span of panels that any of them sees, which may be empty.
    pub fn row_strips(self, rows: usize, arithmetic: Arithmetic) -> impl Iterator<Item = (Range<usize>, Span)> + 'a {
        let all = Span { start: 0, end: self.panels as u16 };
        let size = match arithmetic {
            _ if self.spans.is_empty() => rows.max(1),
            Arithmetic::Native => SPAN_ROWS,
            Arithmetic::Bf16 | Arithmetic::Bf16x3 => BF16_ROWS,
        };
        (0..rows).step_by(size).map(move |start| {
            let strip = start..(start + size).min(rows);
            let span = match self.spans.get(strip.clone()) {
                Some(spans) => spans.iter().copied().reduce(Span::join).unwrap_or_default(),
                None => all,
            };
            (strip, span)
        })
    }
}
