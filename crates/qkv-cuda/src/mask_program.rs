//! A mask as the kernels read it: a postfix program, and the sets and bits its operations look up, which are copied to
//! the device when a plan is made. `kernels/general/mask.cuh` interprets it.

use crate::error::{Error, Result};
use crate::general_params::MaskOp;
use crate::kernel_abi::{MAX_DRAWN, MAX_MASK_OPS};
use qkv::{BigBird, Mask, Place};

const FULL: i32 = 0;
const NEAR: i32 = 1;
const LENGTHS: i32 = 2;
const SEGMENTS: i32 = 3;
const BITS: i32 = 4;
const STRIDED: i32 = 5;
const FIXED: i32 = 6;
const LONGFORMER: i32 = 7;
const BIGBIRD: i32 = 8;
const BLOCKS: i32 = 9;
const BUCKETS: i32 = 10;
const AND: i32 = 11;
const OR: i32 = 12;
const NOT: i32 = 13;

/// A mask program.
#[derive(Clone, Debug, Default)]
pub(crate) struct MaskProgram {
    /// `data` is an offset into the bytes below, for operations that have data.
    pub ops: Vec<MaskOp>,
    /// Which operations have data.
    with_data: Vec<bool>,
    /// The data of operations, each at a multiple of 16.
    pub data: Vec<u8>,
}

/// A distance, clamped to one beyond any sequence.
fn clamp(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}

impl MaskProgram {
    /// Compiles a mask for `n` queries and `m` keys.
    pub fn of(mask: &Mask, n: usize, m: usize, place: Place) -> Result<MaskProgram> {
        let mut program = MaskProgram::default();
        if *mask != Mask::Full {
            program.push(mask, n, m, place)?;
        }
        if program.ops.len() > MAX_MASK_OPS {
            return Err(Error::cpu_only(format!(
                "a mask of {} operations (at most {MAX_MASK_OPS})",
                program.ops.len()
            )));
        }
        Ok(program)
    }

    /// The operations, with their data at this address.
    pub fn at(&self, address: u64) -> Vec<MaskOp> {
        let placed =
            |(op, with_data): (&MaskOp, &bool)| MaskOp { data: if *with_data { address + op.data } else { 0 }, ..*op };
        self.ops.iter().zip(&self.with_data).map(placed).collect()
    }

    fn push_op(&mut self, op: MaskOp) {
        self.ops.push(op);
        self.with_data.push(false);
    }

    fn push_with(&mut self, op: MaskOp, bytes: impl IntoIterator<Item = u8>) {
        self.ops.push(MaskOp { data: self.data.len() as u64, ..op });
        self.with_data.push(true);
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(16), 0);
    }

    fn push(&mut self, mask: &Mask, n: usize, m: usize, place: Place) -> Result<()> {
        let op = |code| MaskOp { code, ..MaskOp::default() };
        match mask {
            Mask::Full => self.push_op(op(FULL)),
            Mask::Causal => self.push_op(MaskOp { x: clamp(usize::MAX), ..op(NEAR) }),
            Mask::Window { left, right } => self.push_op(MaskOp { x: clamp(*left), y: clamp(*right), ..op(NEAR) }),
            Mask::Lengths => self.push_op(op(LENGTHS)),
            Mask::Segments => self.push_op(op(SEGMENTS)),
            Mask::Bits => self.push_op(op(BITS)),
            Mask::Strided { stride } => self.push_op(MaskOp { x: clamp(*stride), ..op(STRIDED) }),
            Mask::Fixed { stride, summary } => {
                self.push_op(MaskOp { x: clamp(*stride), y: clamp(*summary), ..op(FIXED) })
            }
            Mask::Longformer { window, globals } => {
                let set = globals.iter().flat_map(|&at| clamp(at).to_le_bytes());
                self.push_with(MaskOp { x: clamp(window / 2), count: globals.len() as i64, ..op(LONGFORMER) }, set);
            }
            Mask::BigBird(pattern) => self.bigbird(pattern, n, m, place)?,
            Mask::Blocks(blocks) => {
                let cols = blocks.seen.iter().map(Vec::len).min().unwrap_or(0);
                let bits = blocks.seen.iter().flat_map(|row| row[..cols].iter().map(|&seen| u8::from(seen)));
                self.push_with(MaskOp { x: clamp(blocks.size), count: cols as i64, ..op(BLOCKS) }, bits);
            }
            Mask::Lsh(lsh) => self.push_op(MaskOp { size: lsh.rounds as i32, ..op(BUCKETS) }),
            Mask::And(a, b) | Mask::Or(a, b) => {
                self.push(a, n, m, place)?;
                self.push(b, n, m, place)?;
                self.push_op(op(if matches!(mask, Mask::And(..)) { AND } else { OR }));
            }
            Mask::Not(a) => {
                self.push(a, n, m, place)?;
                self.push_op(op(NOT));
            }
            other => return Err(Error::cpu_only(format!("the mask {other:?}"))),
        }
        Ok(())
    }

    /// BigBird: the blocks drawn for the rows of this call are listed; kernels draw those of other rows themselves.
    fn bigbird(&mut self, pattern: &BigBird, n: usize, m: usize, place: Place) -> Result<()> {
        if pattern.random > MAX_DRAWN {
            let what = format!("BigBird with {} blocks drawn a row (at most {MAX_DRAWN})", pattern.random);
            return Err(Error::cpu_only(what));
        }
        let blocks = m.div_ceil(pattern.block);
        let random = pattern.random.min(blocks);
        let last = match place {
            Place::Start | Place::Given => n,
            Place::End => m,
            Place::Offset(offset) => n.saturating_add(usize::try_from(offset).unwrap_or(0)),
        };
        // Far positions are rare: kernels draw for them.
        let listed = last.max(m).div_ceil(pattern.block).min(1 << 20);
        let header = [blocks as i32, random as i32, listed as i32, pattern.seed as i32, (pattern.seed >> 32) as i32];
        let drawn = (0..listed).flat_map(|row| pattern.drawn(row, blocks)).map(|block| block as i32);
        let bytes: Vec<u8> = header.into_iter().chain(drawn).flat_map(i32::to_le_bytes).collect();
        let op = MaskOp {
            code: BIGBIRD,
            size: pattern.globals.min(i32::MAX as usize) as i32,
            x: clamp(pattern.block),
            y: clamp(pattern.window / 2),
            ..MaskOp::default()
        };
        self.push_with(op, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_becomes_a_program_in_postfix_order() {
        let mask = Mask::causal() & !(Mask::window(3, 0) | Mask::longformer(8, [0, 7]));
        let program = MaskProgram::of(&mask, 10, 10, Place::Start).unwrap();
        let codes: Vec<i32> = program.ops.iter().map(|op| op.code).collect();
        assert_eq!(codes, [NEAR, NEAR, LONGFORMER, OR, NOT, AND]);
        let placed = program.at(4096);
        assert_eq!((placed[2].data, placed[2].count, placed[0].data), (4096, 2, 0));
        assert_eq!(program.data, [0i64.to_le_bytes(), 7i64.to_le_bytes()].concat());
    }

    #[test]
    fn no_mask_is_an_empty_program_and_one_too_long_names_the_cpu() {
        assert!(MaskProgram::of(&Mask::full(), 1, 1, Place::Start).unwrap().ops.is_empty());
        let long = (0..20).fold(Mask::causal(), |mask, at| mask | Mask::window(at, 0));
        let refused = MaskProgram::of(&long, 1, 1, Place::Start).unwrap_err();
        assert!(refused.to_string().contains("CPU"), "{refused}");
    }
}
