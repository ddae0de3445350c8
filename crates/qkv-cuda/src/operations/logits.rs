//! What a search reads of logits in device memory, and tokens drawn from them: a few numbers per row are copied to the
//! host instead of the whole vocabulary.

use super::launch::{Argument, count};
use super::{Array, DecodeBatch, Drawing, Kind, Operations};
use Argument::Ptr;
use qkv_simd::logits::Survey;

/// The most logits that [`Operations::survey`] finds per row.
pub const MOST_HIGHEST: usize = 256;

/// Which random numbers the sequences of a [`DecodeBatch`] draw.
#[derive(Clone, Debug)]
pub struct Draws {
    /// The number of each sequence's text, u32.
    texts: Array,
    /// How many of its tokens have been drawn, u32.
    drawn: Array,
}

impl Operations {
    /// Surveys rows of logits for the `most` highest of each, of which at most [`MOST_HIGHEST`] are found.
    ///
    /// # Panics
    /// If the array is too short, or a row is empty.
    pub fn survey(&self, logits: &Array, rows: usize, most: usize) -> Vec<Survey> {
        self.read_surveys(&self.begin_survey(logits, rows, most, None), rows)
    }

    /// The same without waiting: surveys in device memory, to be [read](Operations::read_surveys) later. If sequences
    /// are given, the rows are theirs, and each advances by one position.
    ///
    /// # Panics
    /// As for [`survey`](Operations::survey).
    pub fn begin_survey(&self, logits: &Array, rows: usize, most: usize, of: Option<&DecodeBatch>) -> Array {
        let (classes, most) = (logits.len() / rows.max(1), most.min(MOST_HIGHEST));
        assert!(classes > 0 || rows == 0, "rows of no logits");
        assert!(of.is_none_or(|batch| batch.len() == rows), "a row for each sequence");
        let found = self.empty(Kind::U32, rows * (2 + 2 * most), "the highest logits");
        let counted = of.map_or([0; 3], |of| [of.positions(), of.places(), of.lengths()].map(Array::ptr));
        let logits = logits.expect(self.activation_kind(), rows * classes);
        let pointers = [&[logits, found.ptr()][..], &counted].concat().into_iter().map(Ptr);
        let numbers = [classes, most, of.map_or(0, DecodeBatch::room)].map(count);
        // SAFETY: `survey_logits(const T*, u32* × 2, i64*, i32*, int × 2, u32)`, a block a row.
        unsafe { self.launch("survey_logits", [rows, 1], &pointers.chain(numbers).collect::<Vec<_>>()) };
        found
    }

    /// Reads the surveys of this many rows, after all work.
    pub fn read_surveys(&self, found: &Array, rows: usize) -> Vec<Survey> {
        let of_row = |words: &[u32]| {
            let is_finite = words[0] != super::NO_TOKEN;
            let (pairs, _) = words[2..].as_chunks::<2>();
            let best = pairs.iter().take(if is_finite { words[0] as usize } else { 0 });
            let best = best.map(|&[class, logit]| (class, f32::from_bits(logit))).collect();
            Survey { is_finite, log_sum_exp: f32::from_bits(words[1]), best }
        };
        let width = (found.len() / rows.max(1)).max(2);
        self.read_scalars::<u32>(found).chunks_exact(width).map(of_row).collect()
    }

    /// The draws of this many sequences.
    pub fn draws(&self, sequences: usize) -> Draws {
        let zeros = || self.zeros(Kind::U32, sequences, "numbers of draws");
        Draws { texts: zeros(), drawn: zeros() }
    }

    /// Sets the text of each sequence, and how many of its tokens have been drawn.
    ///
    /// # Panics
    /// If there is not one of each per sequence.
    pub fn set_draws(&self, draws: &Draws, texts: &[u32], drawn: &[u32]) {
        self.write(&draws.texts, texts);
        self.write(&draws.drawn, drawn);
    }

    /// Draws a token for each sequence, by logits `[B, V]`, as the one that it reads next, and advances it by one
    /// position; [`NO_TOKEN`](super::NO_TOKEN) if a logit is not finite.
    ///
    /// # Panics
    /// If an array is too short.
    pub fn draw_token(&self, logits: &Array, batch: &DecodeBatch, draws: &Draws, drawing: Drawing) {
        let (rows, room) = (batch.len(), batch.room());
        let classes = logits.len() / rows.max(1);
        assert!(classes > 0 || rows == 0, "rows of no logits");
        let logits = logits.expect(self.activation_kind(), rows * classes);
        let counted = [batch.ids(), batch.positions(), batch.places(), batch.lengths()].map(Array::ptr);
        let drawn = [&draws.texts, &draws.drawn].map(|array| array.expect(Kind::U32, rows));
        let pointers: Vec<Argument> = [&[logits][..], &counted, &drawn].concat().into_iter().map(Ptr).collect();
        let arguments = [&pointers[..], &[count(classes), count(room), Argument::Drawing(drawing)]].concat();
        // SAFETY: `draw_token(const T*, u32* × 2, i64*, i32*, const u32*, u32*, int, u32, Drawing)`, a block a row.
        unsafe { self.launch("draw_token", [rows, 1], &arguments) };
    }
}
