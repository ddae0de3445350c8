//! The rows of a tape that shares sequences with others ([`ContextParallel`]).

use crate::context::{ContextParallel, SharedContext};
use crate::float::Float;
use crate::tape::Tape;
use std::borrow::Cow;
use std::sync::Arc;

impl<T: Float> Tape<'_, T> {
    /// The same tape holding only some rows of each sequence: see [`ContextParallel`].
    pub fn over(mut self, context: Arc<dyn ContextParallel<T>>) -> Self {
        self.context = Some(SharedContext { with: context, length: 0 });
        self
    }

    /// Begins sequences of `length` and returns the positions of this tape's rows in them: all positions unless it
    /// [shares](Tape::over) the sequences.
    ///
    /// # Errors
    /// If the tape would have no row.
    pub fn places(&mut self, length: usize) -> qkv::Result<Vec<usize>> {
        let Some(context) = &mut self.context else { return Ok((0..length).collect()) };
        context.length = length;
        match context.with.places(length) {
            places if places.is_empty() => Err(qkv::Error::Value {
                name: "length",
                found: length.to_string(),
                expected: "a row for each rank that shares the sequence".into(),
            }),
            places => Ok(places),
        }
    }

    /// This tape's columns of rows of length `length`, such as the token ids or targets of sequences.
    pub fn own<'r, E: Copy>(&self, rows: &'r [E], length: usize) -> Cow<'r, [E]> {
        let Some(context) = &self.context else { return Cow::Borrowed(rows) };
        let places = context.with.places(length);
        rows.chunks_exact(length.max(1))
            .flat_map(|row| places.iter().map(|&place| row[place]))
            .collect::<Vec<E>>()
            .into()
    }

    /// Salt of random draws that are indexed by row: tapes that share sequences have the same stream but different
    /// rows.
    pub(crate) fn salt(&self) -> u64 {
        let part = self.context.as_ref().map_or(0, |context| context.with.part() as u64);
        part.wrapping_mul(0xd1b5_4a32_d192_ed03)
    }
}
