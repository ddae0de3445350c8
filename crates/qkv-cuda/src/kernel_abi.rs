//! What host and kernels share: constants and the layout of parameter blocks, each defined once, in Rust. The C++ side
//! is generated from these definitions and prepended to every program, with a `static_assert` on the size of each block
//! and the offset of each member. `kernels/generated/` holds a copy of the generated text for readers and for the
//! scripts in `kernels/dev/`; a test keeps it up to date (`QKV_BLESS=1 cargo test -p qkv-cuda` rewrites it).

use std::fmt::Write as _;

macro_rules! constants {
    ($($(#[doc = $doc:literal])* $name:ident: $ty:ident = $value:expr;)*) => {
        $($(#[doc = $doc])* pub(crate) const $name: $ty = $value;)*
        /// The constants as C++ macros.
        pub(crate) fn constants() -> String {
            let mut text = String::from(OFFSET_OF);
            $(
                $(let _ = writeln!(text, "//{}", $doc);)*
                let _ = writeln!(text, "#define {} {}", stringify!($name), literal($name as i64, stringify!($ty)));
            )*
            text
        }
    };
}

/// `offsetof` for NVRTC, which has no `<stddef.h>`, and for other compilers.
const OFFSET_OF: &str = "#ifdef __CUDACC_RTC__
#define OFFSET_OF(type, member) __INTADDR__(&((type*)0)->member)
#else
#define OFFSET_OF(type, member) __builtin_offsetof(type, member)
#endif
";

fn literal(value: i64, ty: &str) -> String {
    if ty == "u32" { format!("{value}u") } else { value.to_string() }
}

constants! {
    /// Keys per split when the keys of a few queries are divided among blocks (Flash-Decoding). It must not depend on
    /// the device or the batch, because it determines the order in which a row is summed.
    SPLIT_KEYS: usize = 512;
    /// Rows of the tiles that Hopper's kernels mark for recomputation by the general kernels.
    RECOMPUTE_ROWS: usize = 64;
    /// Per-row statistics of the backward pass are padded to this many rows.
    ROW_STATS_PAD: usize = 128;
    /// Bits of `tma_stores`: which results TMA can write.
    STORE_OUT: u32 = 1;
    STORE_DK: u32 = 2;
    STORE_DV: u32 = 4;
    STORE_DQ: u32 = 8;
    /// Tile list entry, first word: the tile is partially masked; the second word is the index of its bits.
    PARTIAL_TILE: u32 = 1 << 31;
    /// Tile list entry, first word, shifted by the warpgroup: its 64 rows have no visible pair in the partial tile.
    EMPTY_GROUP: u32 = 1 << 28;
    /// Tile list entry, second word: the tile is full and has no bits.
    NO_BITS: u32 = u32::MAX;
    /// Tile list row, fourth word: bit positions of a split's index and of its row's number of splits.
    SPLIT_INDEX_SHIFT: u32 = 16;
    SPLIT_COUNT_SHIFT: u32 = 24;
}

/// Up to this many queries, the keys of a row are split among blocks. Like [`SPLIT_KEYS`], it fixes the summation
/// order.
pub(crate) const FEW_QUERIES: usize = 16;

/// A member of a parameter block, or several of one type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    pub cpp_type: &'static str,
    pub names: &'static [&'static str],
    pub doc: &'static str,
    pub offset: usize,
    pub bytes: usize,
}

/// Declares a `#[repr(C)]` struct and its C++ counterpart. A field is `rust: type = "C++ type" [C++ names]`.
macro_rules! parameter_block {
    (
        $(#[$meta:meta])*
        struct $name:ident {
            $($(#[doc = $doc:literal])* $field:ident: $ty:ty = $cpp:literal [$($member:literal),+];)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub(crate) struct $name {
            $($(#[doc = $doc])* pub $field: $ty,)*
        }

        impl $name {
            pub(crate) const MEMBERS: &'static [$crate::kernel_abi::Member] = &[$($crate::kernel_abi::Member {
                cpp_type: $cpp,
                names: &[$($member),+],
                doc: concat!("" $(, $doc)*),
                offset: std::mem::offset_of!($name, $field),
                bytes: size_of::<$ty>(),
            }),*];

            /// The struct in C++, with assertions on its layout.
            pub(crate) fn cpp() -> String {
                $crate::kernel_abi::cpp_struct(stringify!($name), size_of::<$name>(), $name::MEMBERS)
            }
        }

        impl Default for $name {
            fn default() -> $name {
                // SAFETY: every field is a number, a null address or an array of these, so all zeros is a valid value.
                unsafe { std::mem::zeroed() }
            }
        }
    };
}
pub(crate) use parameter_block;

pub(crate) fn cpp_struct(name: &str, bytes: usize, members: &[Member]) -> String {
    let mut text = format!("struct {name} {{\n");
    for member in members {
        let comment = if member.doc.is_empty() { String::new() } else { format!(" //{}", member.doc) };
        let _ = writeln!(text, "    {} {};{comment}", member.cpp_type, member.names.join(", "));
    }
    let _ = writeln!(text, "}};\nstatic_assert(sizeof({name}) == {bytes}, \"size of {name}\");");
    for member in members {
        let each = member.bytes / member.names.len();
        for (at, field) in member.names.iter().enumerate() {
            let (field, offset) = (field.split('[').next().unwrap_or(field), member.offset + at * each);
            let _ = writeln!(text, "static_assert(OFFSET_OF({name}, {field}) == {offset}, \"{field}\");");
        }
    }
    text
}
