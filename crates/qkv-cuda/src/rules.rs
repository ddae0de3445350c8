//! A mask as the kernels take it: a few steps in postfix order, and the sets and bits that they look into, which are put
//! into device memory once, when a plan is made. What each step means is in `kernels/general/mask.cuh`.

use crate::error::{Error, Result};
use crate::job::{MOST_OPS, Op};
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

/// The most blocks that BigBird may draw for a row: what a kernel has room for where it has to draw itself.
const MOST_DRAWN: usize = 64;

/// A mask in steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rules {
    /// With `data` an offset into the bytes below, where there is some.
    pub ops: Vec<Op>,
    /// Which of the steps have data.
    with_data: Vec<bool>,
    /// What the steps look into, each at a multiple of 16.
    pub bytes: Vec<u8>,
}

/// A distance; one beyond any sequence is "without limit".
fn clamp(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}

impl Rules {
    /// Of a mask, for `n` queries that stand so and `m` keys.
    pub fn of(mask: &Mask, n: usize, m: usize, place: Place) -> Result<Rules> {
        let mut rules = Rules::default();
        if *mask != Mask::Full {
            rules.push(mask, n, m, place)?;
        }
        if rules.ops.len() > MOST_OPS {
            return Err(Error::on_the_cpu(format!("a mask of {} steps (at most {MOST_OPS})", rules.ops.len())));
        }
        Ok(rules)
    }

    /// With its data at this address.
    pub fn at(&self, address: u64) -> Vec<Op> {
        let placed = |(op, with_data): (&Op, &bool)| Op { data: if *with_data { address + op.data } else { 0 }, ..*op };
        self.ops.iter().zip(&self.with_data).map(placed).collect()
    }

    fn step(&mut self, op: Op) {
        self.ops.push(op);
        self.with_data.push(false);
    }

    fn step_with(&mut self, op: Op, bytes: impl IntoIterator<Item = u8>) {
        self.ops.push(Op { data: self.bytes.len() as u64, ..op });
        self.with_data.push(true);
        self.bytes.extend(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
    }

    fn push(&mut self, mask: &Mask, n: usize, m: usize, place: Place) -> Result<()> {
        let op = |code| Op { code, ..Op::default() };
        match mask {
            Mask::Full => self.step(op(FULL)),
            Mask::Causal => self.step(Op { x: clamp(usize::MAX), ..op(NEAR) }),
            Mask::Window { left, right } => self.step(Op { x: clamp(*left), y: clamp(*right), ..op(NEAR) }),
            Mask::Lengths => self.step(op(LENGTHS)),
            Mask::Segments => self.step(op(SEGMENTS)),
            Mask::Bits => self.step(op(BITS)),
            Mask::Strided { stride } => self.step(Op { x: clamp(*stride), ..op(STRIDED) }),
            Mask::Fixed { stride, summary } => self.step(Op { x: clamp(*stride), y: clamp(*summary), ..op(FIXED) }),
            Mask::Longformer { window, globals } => {
                let set = globals.iter().flat_map(|&at| clamp(at).to_le_bytes());
                self.step_with(Op { x: clamp(window / 2), count: globals.len() as i64, ..op(LONGFORMER) }, set);
            }
            Mask::BigBird(pattern) => self.bigbird(pattern, n, m, place)?,
            Mask::Blocks(blocks) => {
                let cols = blocks.seen.iter().map(Vec::len).min().unwrap_or(0);
                let bits = blocks.seen.iter().flat_map(|row| row[..cols].iter().map(|&seen| u8::from(seen)));
                self.step_with(Op { x: clamp(blocks.size), count: cols as i64, ..op(BLOCKS) }, bits);
            }
            Mask::Lsh(lsh) => self.step(Op { size: lsh.rounds as i32, ..op(BUCKETS) }),
            Mask::And(a, b) | Mask::Or(a, b) => {
                self.push(a, n, m, place)?;
                self.push(b, n, m, place)?;
                self.step(op(if matches!(mask, Mask::And(..)) { AND } else { OR }));
            }
            Mask::Not(a) => {
                self.push(a, n, m, place)?;
                self.step(op(NOT));
            }
            other => return Err(Error::on_the_cpu(format!("the mask {other:?}"))),
        }
        Ok(())
    }

    /// BigBird: what is drawn for the rows that queries stand on is listed; kernels draw for others themselves.
    fn bigbird(&mut self, pattern: &BigBird, n: usize, m: usize, place: Place) -> Result<()> {
        if pattern.random > MOST_DRAWN {
            let what = format!("BigBird with {} blocks drawn a row (at most {MOST_DRAWN})", pattern.random);
            return Err(Error::on_the_cpu(what));
        }
        let blocks = m.div_ceil(pattern.block);
        let random = pattern.random.min(blocks);
        let last = match place {
            Place::Start | Place::Given => n,
            Place::End => m,
            Place::Offset(offset) => n.saturating_add(usize::try_from(offset).unwrap_or(0)),
        };
        // Far places are few and drawn as they come.
        let listed = last.max(m).div_ceil(pattern.block).min(1 << 20);
        let header = [blocks as i32, random as i32, listed as i32, pattern.seed as i32, (pattern.seed >> 32) as i32];
        let drawn = (0..listed).flat_map(|row| pattern.drawn(row, blocks)).map(|block| block as i32);
        let bytes: Vec<u8> = header.into_iter().chain(drawn).flat_map(i32::to_le_bytes).collect();
        let op = Op {
            code: BIGBIRD,
            size: pattern.globals.min(i32::MAX as usize) as i32,
            x: clamp(pattern.block),
            y: clamp(pattern.window / 2),
            ..Op::default()
        };
        self.step_with(op, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_becomes_steps_in_postfix_order() {
        let mask = Mask::causal() & !(Mask::window(3, 0) | Mask::longformer(8, [0, 7]));
        let rules = Rules::of(&mask, 10, 10, Place::Start).unwrap();
        let codes: Vec<i32> = rules.ops.iter().map(|op| op.code).collect();
        assert_eq!(codes, [NEAR, NEAR, LONGFORMER, OR, NOT, AND]);
        let placed = rules.at(4096);
        assert_eq!((placed[2].data, placed[2].count, placed[0].data), (4096, 2, 0));
        assert_eq!(rules.bytes, [0i64.to_le_bytes(), 7i64.to_le_bytes()].concat());
    }

    #[test]
    fn no_mask_has_no_steps_and_one_that_is_too_long_names_the_cpu() {
        assert!(Rules::of(&Mask::full(), 1, 1, Place::Start).unwrap().ops.is_empty());
        let long = (0..20).fold(Mask::causal(), |mask, at| mask | Mask::window(at, 0));
        let refused = Rules::of(&long, 1, 1, Place::Start).unwrap_err();
        assert!(refused.to_string().contains("CPU"), "{refused}");
    }
}
