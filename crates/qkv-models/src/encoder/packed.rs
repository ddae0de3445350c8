//! Packed sequences for inference: texts are concatenated instead of padded.

use qkv_nn::{Float, Machine, Tape, Tensor, Var};

/// Tokens per part: enough to keep the cores busy without overflowing their caches.
const TOKENS: usize = 2048;
/// The same on a device, which needs more to be busy.
const TOKENS_ON_DEVICE: usize = 1 << 14;

/// Concatenated texts, sorted by length.
pub(crate) struct Packed {
    pub ids: Vec<u32>,
    /// The segment of each token within its text.
    pub segments: Vec<u32>,
    pub lengths: Vec<usize>,
    /// The index of each text in the original list.
    pub order: Vec<usize>,
}

impl Packed {
    /// Splits texts into parts of a size that suits the machine.
    pub fn parts(texts: &[(Vec<u32>, Vec<u32>)], machine: &Machine) -> Vec<Packed> {
        let tokens = if machine.cuda().is_some() { TOKENS_ON_DEVICE } else { TOKENS };
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|&at| (texts[at].0.len(), at));
        let mut parts: Vec<Packed> = Vec::new();
        for at in order {
            let (ids, segments) = &texts[at];
            if parts.last().is_none_or(|part| part.ids.len() + ids.len() > tokens) {
                let (ids, segments) = (Vec::new(), Vec::new());
                parts.push(Packed { ids, segments, lengths: Vec::new(), order: Vec::new() });
            }
            let part = parts.last_mut().expect("just made, if there was none");
            part.ids.extend(ids);
            part.segments.extend(segments);
            part.lengths.push(ids.len());
            part.order.push(at);
        }
        parts
    }

    /// The position of each token in its text.
    pub fn places(&self) -> Vec<u32> {
        self.lengths.iter().flat_map(|&length| 0..length as u32).collect()
    }

    /// The rows of each text in `x [1, T, C]`.
    pub fn rows<'x, T: Float>(&self, x: &'x Var<T>) -> Vec<&'x [T]> {
        let (width, mut rest) = (x.value().width(), x.value().data());
        let next = |&length: &usize| {
            let (rows, later) = rest.split_at(length * width);
            rest = later;
            rows
        };
        self.lengths.iter().map(next).collect()
    }

    /// The first row of each text, `[B, 1, C]`.
    pub fn firsts<T: Float>(&self, tape: &Tape<'_, T>, x: &Var<T>) -> Var<T> {
        let width = x.value().width();
        let rows = self.rows(x).into_iter().flat_map(|rows| rows[..width].to_vec()).collect();
        tape.constant(Tensor::new(rows, &[self.lengths.len(), 1, width]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_is_in_one_part_and_parts_are_bounded() {
        let lengths = [3, 1, 2000, 3, 2500, 40, 8, 1];
        let texts: Vec<_> = lengths.iter().map(|&n| (vec![n as u32; n], vec![0; n])).collect();
        let parts = Packed::parts(&texts, &Machine::new(1));
        let mut found: Vec<usize> = parts.iter().flat_map(|part| part.order.clone()).collect();
        found.sort();
        assert_eq!(found, (0..lengths.len()).collect::<Vec<_>>());
        for part in &parts {
            assert!(part.ids.len() <= TOKENS || part.lengths.len() == 1);
            assert!(part.lengths.is_sorted() && part.ids.len() == part.segments.len());
            assert_eq!(part.places().len(), part.ids.len());
        }
    }
}
