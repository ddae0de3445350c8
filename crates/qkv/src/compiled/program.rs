//! The postfix program of a compiled mask, for engines that cannot run Rust: steps of a fixed layout, the sets and
//! tables that they read, and the constants of both as C++.
//! [`crate::engine`] documents the layout.

use super::predicate::{Predicate, Side};
use super::{CompiledMask, Expr};
use crate::error::{Error, Result};
use crate::mask::{BigBird, clamp};
use crate::place::Place;
use std::fmt::Write as _;

macro_rules! opcodes {
    ($($code:ident = $value:literal, $name:literal: $doc:literal;)*) => {
        /// What a [`Step`] does. The operands are fields of the step.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(i32)]
        #[non_exhaustive]
        pub enum Opcode {
            $(#[doc = $doc] $code = $value,)*
        }

        /// Every opcode with its C++ name and its meaning.
        const OPCODES: &[(Opcode, &str, &str)] = &[$((Opcode::$code, $name, $doc),)*];
    };
}

opcodes! {
    All = 0, "OP_ALL": "every pair";
    Band = 1, "OP_BAND": "p − x ≤ j ≤ p + y";
    Lengths = 2, "OP_LENGTHS": "j is below the length of the sequence";
    Segments = 3, "OP_SEGMENTS": "the same segment";
    Bits = 4, "OP_BITS": "the bit of the pair";
    Residue = 5, "OP_RESIDUE": "(p − j) mod x = 0";
    SameBlock = 6, "OP_SAME_BLOCK": "⌊p / x⌋ = ⌊j / x⌋";
    Summary = 7, "OP_SUMMARY": "j mod x ≥ x − y";
    KeyIn = 8, "OP_KEY_IN": "j is one of `count` positions";
    QueryIn = 9, "OP_QUERY_IN": "p is one of `count` positions";
    BigBird = 10, "OP_BIGBIRD": "blocks of x: a window of y blocks each way, `size` global blocks, drawn blocks";
    Blocks = 11, "OP_BLOCKS": "the bit of (i / x, j / x) in a table of `count` columns";
    Buckets = 12, "OP_BUCKETS": "the same hash bucket in any of `size` rounds";
    And = 13, "OP_AND": "both of the two on top";
    Or = 14, "OP_OR": "either of the two on top";
    Not = 15, "OP_NOT": "not the one on top";
}

/// The maximum number of steps of a program.
pub const MAX_STEPS: usize = 32;

/// The maximum number of blocks per row that BigBird draws in a program: kernels draw rows beyond the list into
/// registers.
pub const MAX_DRAWN: usize = 64;

/// The rows of BigBird that a program lists; rows beyond these are few, and drawn by the kernel.
const MAX_LISTED: usize = 1 << 20;

/// The opcodes, limits and verdicts as C++ `#define`s, for kernels that interpret a [`MaskProgram`].
///
/// ```
/// let header = qkv::engine::mask_constants();
/// assert!(header.contains("#define OP_BAND 1 // p − x ≤ j ≤ p + y\n"));
/// ```
pub fn mask_constants() -> String {
    let mut header = String::from("// Generated from qkv's table of opcodes (qkv::engine::mask_constants).\n");
    for (code, name, doc) in OPCODES {
        writeln!(header, "#define {name} {} // {doc}", *code as i32).expect("a string takes everything");
    }
    for (name, value) in [("MAX_MASK_STEPS", MAX_STEPS), ("MAX_BIGBIRD_DRAWN", MAX_DRAWN)] {
        writeln!(header, "#define {name} {value}").expect("a string takes everything");
    }
    for (name, verdict) in
        [("EMPTY", super::Verdict::Empty), ("PARTIAL", super::Verdict::Partial), ("FULL", super::Verdict::Full)]
    {
        writeln!(header, "#define {name} {}", verdict as i32).expect("a string takes everything");
    }
    header
}

/// One step of a [`MaskProgram`]: an [`Opcode`] and its operands, laid out for a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Step {
    /// The [`Opcode`].
    pub code: i32,
    /// A small operand.
    pub size: i32,
    /// The first operand.
    pub x: i64,
    /// The second operand.
    pub y: i64,
    /// An offset into the program's data, or an address.
    pub data: u64,
    /// The number of entries that `data` points to, or of columns.
    pub count: i64,
}

/// A mask as steps in postfix order, with the data that they read. See the [module](crate::engine#compiled-masks).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MaskProgram {
    /// The steps, with `data` as an offset into the data below.
    pub steps: Vec<Step>,
    /// Sets and tables, each at a multiple of 16 bytes, little-endian.
    pub data: Vec<u8>,
    /// Which steps read data.
    reads: Vec<bool>,
}

impl MaskProgram {
    /// The steps with addresses, once the data lies at `address`.
    pub fn steps_at(&self, address: u64) -> Vec<Step> {
        let placed =
            |(step, reads): (&Step, &bool)| Step { data: if *reads { address + step.data } else { 0 }, ..*step };
        self.steps.iter().zip(&self.reads).map(placed).collect()
    }

    fn push(&mut self, code: Opcode, step: Step) {
        self.steps.push(Step { code: code as i32, ..step });
        self.reads.push(false);
    }

    fn push_reading(&mut self, code: Opcode, step: Step, bytes: impl IntoIterator<Item = u8>) {
        let at = self.data.len() as u64;
        self.data.extend(bytes);
        self.data.resize(self.data.len().next_multiple_of(16), 0);
        self.steps.push(Step { code: code as i32, data: at, ..step });
        self.reads.push(true);
    }
}

impl CompiledMask {
    /// The mask as a postfix program.
    ///
    /// # Errors
    /// If it has more than [`MAX_STEPS`] steps, or BigBird draws more than [`MAX_DRAWN`] blocks per row.
    pub fn program(&self) -> Result<MaskProgram> {
        let mut program = MaskProgram::default();
        if self.expr != Expr::All {
            self.emit(&self.expr, &mut program)?;
        }
        match program.steps.len() {
            steps if steps <= MAX_STEPS => Ok(program),
            steps => Err(Error::value("mask", format!("a program of {steps} steps"), format!("at most {MAX_STEPS}"))),
        }
    }

    fn emit(&self, expr: &Expr, to: &mut MaskProgram) -> Result<()> {
        let (children, joint) = match expr {
            Expr::All => {
                to.push(Opcode::All, Step::default());
                return Ok(());
            }
            Expr::Leaf(predicate) => return self.emit_predicate(predicate, to),
            Expr::Not(inner) => {
                self.emit(inner, to)?;
                to.push(Opcode::Not, Step::default());
                return Ok(());
            }
            Expr::And(children) => (children, Opcode::And),
            Expr::Or(children) => (children, Opcode::Or),
        };
        for (at, child) in children.iter().enumerate() {
            self.emit(child, to)?;
            if at > 0 {
                to.push(joint, Step::default());
            }
        }
        Ok(())
    }

    fn emit_predicate(&self, predicate: &Predicate, to: &mut MaskProgram) -> Result<()> {
        let none = Step::default();
        match predicate {
            Predicate::Band { left, right } => to.push(Opcode::Band, Step { x: *left, y: *right, ..none }),
            Predicate::Lengths => to.push(Opcode::Lengths, none),
            Predicate::Segments => to.push(Opcode::Segments, none),
            Predicate::Bits => to.push(Opcode::Bits, none),
            Predicate::Residue { stride } => to.push(Opcode::Residue, Step { x: *stride, ..none }),
            Predicate::SameBlock { size } => to.push(Opcode::SameBlock, Step { x: *size, ..none }),
            Predicate::Summary { stride, summary } => {
                to.push(Opcode::Summary, Step { x: *stride, y: *summary, ..none })
            }
            Predicate::OneOf { side, set } => {
                let code = if *side == Side::Keys { Opcode::KeyIn } else { Opcode::QueryIn };
                let step = Step { count: set.len() as i64, ..none };
                to.push_reading(code, step, set.iter().flat_map(|at| at.to_le_bytes()));
            }
            Predicate::BigBird { pattern, .. } => self.emit_bigbird(pattern, to)?,
            Predicate::Blocks(blocks) => {
                let cols = blocks.seen.iter().map(Vec::len).min().unwrap_or(0);
                let bits = blocks.seen.iter().flat_map(|row| row[..cols].iter().map(|&seen| u8::from(seen)));
                to.push_reading(Opcode::Blocks, Step { x: clamp(blocks.size), count: cols as i64, ..none }, bits);
            }
            Predicate::AnyBucket { rounds } => to.push(Opcode::Buckets, Step { size: *rounds as i32, ..none }),
            Predicate::Bucket { .. } | Predicate::Around { .. } => {
                return Err(Error::value("mask", "a predicate of the CPU engine", "a mask"));
            }
        }
        Ok(())
    }

    fn emit_bigbird(&self, pattern: &BigBird, to: &mut MaskProgram) -> Result<()> {
        if pattern.random > MAX_DRAWN {
            let found = format!("{} drawn blocks per row", pattern.random);
            return Err(Error::value("bigbird", found, format!("at most {MAX_DRAWN}")));
        }
        let blocks = self.m.div_ceil(pattern.block);
        let random = pattern.random.min(blocks);
        let last = match self.place {
            Place::Start | Place::Given => self.n,
            Place::End => self.m,
            Place::Offset(offset) => self.n.saturating_add(usize::try_from(offset).unwrap_or(0)),
        };
        let listed = last.max(self.m).div_ceil(pattern.block).min(MAX_LISTED);
        let header = [blocks as i32, random as i32, listed as i32, pattern.seed as i32, (pattern.seed >> 32) as i32];
        let drawn = (0..listed).flat_map(|row| pattern.drawn(row, blocks)).map(|block| block as i32);
        let bytes: Vec<u8> = header.into_iter().chain(drawn).flat_map(i32::to_le_bytes).collect();
        let step = Step {
            size: pattern.globals.min(i32::MAX as usize) as i32,
            x: clamp(pattern.block),
            y: clamp(pattern.window / 2),
            ..Step::default()
        };
        to.push_reading(Opcode::BigBird, step, bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{Mask, MaskData};
    use proptest::prelude::*;

    fn program(mask: &Mask) -> Result<MaskProgram> {
        CompiledMask::new(mask, 10, 10, Place::Start).program()
    }

    #[test]
    fn a_mask_becomes_steps_in_postfix_order() {
        use Opcode::{And, Band, KeyIn, Not, Or, QueryIn};
        let mask = Mask::causal() & !(Mask::window(3, 0) | Mask::longformer(8, [0, 7]));
        let program = program(&mask).unwrap();
        let codes: Vec<i32> = program.steps.iter().map(|step| step.code).collect();
        let expected = [Band, Band, Band, KeyIn, Or, QueryIn, Or, Or, Not, And];
        assert_eq!(codes, expected.map(|code| code as i32));
        let placed = program.steps_at(4096);
        assert_eq!((placed[3].data, placed[3].count, placed[5].data, placed[0].data), (4096, 2, 4112, 0));
        assert_eq!(program.data[..16], [0i64.to_le_bytes(), 7i64.to_le_bytes()].concat());
        assert_eq!(size_of::<Step>(), 40);
    }

    #[test]
    fn no_mask_has_no_steps_and_a_long_one_is_refused() {
        assert!(program(&Mask::full()).unwrap().steps.is_empty());
        let long = (0..20).fold(Mask::causal(), |mask, at| mask | Mask::window(at, 0));
        assert_eq!(program(&long).unwrap_err().to_string(), "`mask` is a program of 41 steps, expected at most 32");
    }

    #[test]
    fn opcodes_are_their_places_in_the_table() {
        for (at, (code, name, _)) in OPCODES.iter().enumerate() {
            assert_eq!(*code as usize, at, "{name}");
        }
    }

    /// Runs the program as a kernel does.
    fn run(program: &MaskProgram, data: &MaskData<'_>, i: usize, j: usize) -> bool {
        let word = |at: u64, index: i64, size: usize| {
            let start = at as usize + index as usize * size;
            &program.data[start..start + size]
        };
        let (p, key) = (data.position(0, i), j as i64);
        let mut stack = Vec::new();
        for (step, reads) in program.steps.iter().zip(&program.reads) {
            let is = |code: Opcode| step.code == code as i32;
            assert!(!reads || step.data % 16 == 0);
            let int = |at: i64| i64::from(i32::from_le_bytes(word(step.data, at, 4).try_into().unwrap()));
            let set =
                |x: i64| (0..step.count).any(|at| i64::from_le_bytes(word(step.data, at, 8).try_into().unwrap()) == x);
            let bit = if is(Opcode::And) || is(Opcode::Or) {
                let (b, a): (bool, bool) = (stack.pop().unwrap(), stack.pop().unwrap());
                if is(Opcode::And) { a && b } else { a || b }
            } else if is(Opcode::Not) {
                !stack.pop().unwrap()
            } else if is(Opcode::All) {
                true
            } else if is(Opcode::Band) {
                p - step.x <= key && key <= p + step.y
            } else if is(Opcode::Residue) {
                (p - key).rem_euclid(step.x) == 0
            } else if is(Opcode::SameBlock) {
                p.div_euclid(step.x) == key.div_euclid(step.x)
            } else if is(Opcode::Summary) {
                key.rem_euclid(step.x) >= step.x - step.y
            } else if is(Opcode::KeyIn) {
                set(key)
            } else if is(Opcode::QueryIn) {
                set(p)
            } else if is(Opcode::Blocks) {
                word(step.data, (i as i64 / step.x) * step.count + key / step.x, 1)[0] != 0
            } else {
                assert!(is(Opcode::BigBird));
                let (row, col, globals) = (p.div_euclid(step.x), key / step.x, i64::from(step.size));
                let listed = row >= 0 && row < int(2);
                assert!(row < 0 || listed, "places of these tests are listed");
                (row - col).abs() <= step.y
                    || (0..globals).contains(&row)
                    || col < globals
                    || listed && (0..int(1)).any(|at| int(5 + row * int(1) + at) == col)
            };
            stack.push(bit);
        }
        assert!(stack.len() <= 1);
        stack.pop().unwrap_or(true)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        #[test]
        fn the_program_says_what_the_definition_says(
            mask in crate::mask::arbitrary::masks(),
            place in crate::mask::arbitrary::places(),
            n in 1usize..120,
            m in 1usize..120,
        ) {
            let data = MaskData::new(n, m).place(place);
            let Ok(program) = CompiledMask::new(&mask, n, m, place).program() else { return Ok(()) };
            for i in (0..n).step_by(7) {
                for j in 0..m {
                    let expected = mask.allows(i, j, &data).unwrap();
                    prop_assert_eq!(run(&program, &data, i, j), expected, "{:?} ({}, {})", mask, i, j);
                }
            }
        }
    }
}
