//! The kernels of attention as text: which files make up a program, its defines and tile sizes, and the shared memory a
//! block needs. [`Driver::module`](crate::driver::Driver::module) compiles them; plans choose among them. Those of the
//! operations of models are in [`operation_programs`](crate::operation_programs).

use crate::driver::Source;
use crate::general_params::{GeneralParams, MaskOp, Tensor};
use crate::hopper_params::HopperParams;
use crate::kernel_abi::constants;
use crate::memory::Dtype;
use qkv::engine::mask_constants;
use std::fmt::Write as _;

macro_rules! kernel {
    ($file:literal) => {
        include_str!(concat!("../kernels/", $file))
    };
}
pub(crate) use kernel;

/// The header that turns a kernel into C++, for [`emulated`](crate::emulated).
pub(crate) const EMULATION_HEADER: &str = kernel!("emulated.h");

const BACKWARD: &str = kernel!("general/backward.cu");
const PARAMETER_GRADIENTS: &str = kernel!("general/parameter_gradients.cu");
const GENERATED: &str = "// Generated from src/kernel_abi.rs and the parameter blocks in src: do not edit.\n";

/// What a program of the general kernels computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Forward,
    /// All queries and keys of a head in one block.
    ShortForward,
    /// The same, for all three gradients.
    ShortBackward,
    /// One query per head, keys loaded by `cp.async`.
    Decode,
    /// The same, keys loaded by TMA.
    DecodeTma,
    /// By TMA, for a query that sees all keys or the first ones by scaled products: `heads` times eight query heads of
    /// a group.
    DecodePlain {
        heads: usize,
    },
    /// Row sums of `dO ∘ O`, and reductions over rows.
    Delta,
    /// dQ.
    Queries,
    /// dK, dV or both.
    Keys {
        k: bool,
        v: bool,
    },
    Bias,
    Table,
    Weights,
    /// Copies to aligned strides, and conversions of sinks.
    Convert,
    /// The verdict of a mask on every tile, and the bits of partial ones.
    TileList,
}

/// A program: one module of kernels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Program {
    /// General kernels for a type, a padded head width, and tiles of `rows` × `cols`.
    General { kind: Kind, dtype: Dtype, width: usize, rows: usize, cols: usize },
    /// Hopper's forward or backward kernels with their defines.
    Hopper { forward: bool, defines: Vec<(&'static str, u32)> },
}

/// Tile sizes in the order they are tried: the first that fits the device's shared memory is used.
const TILES: [(usize, usize); 6] = [(64, 64), (64, 32), (32, 32), (32, 16), (16, 16), (16, 16)];

impl Program {
    /// The largest tiles that fit `shared` bytes, for widths `d` and `dv` and at most `lengths` queries and keys. None
    /// if they are too wide.
    pub fn general(
        kind: Kind,
        dtype: Dtype,
        [d, dv]: [usize; 2],
        lengths: [usize; 2],
        shared: usize,
    ) -> Option<Program> {
        let width = [32, 64, 128, 256].into_iter().find(|&width| width >= d.max(dv))?;
        // Accumulators of wide rows need the registers that more columns would take.
        let max_cols =
            if width >= 256 || matches!(kind, Kind::Keys { k: true, v: true }) && width >= 128 { 32 } else { 64 };
        let fits = TILES.into_iter().filter(|&(_, cols)| cols <= max_cols);
        let [queries, keys] = lengths.map(|length| length.clamp(16, 64).next_power_of_two());
        let [most_rows, most_cols] = if matches!(kind, Kind::Keys { .. }) { [keys, queries] } else { [queries, keys] };
        let mut programs = fits.map(|(rows, cols)| {
            let (rows, cols) = (rows.min(most_rows), cols.min(most_cols));
            Program::General { kind, dtype, width, rows, cols }
        });
        programs.find(|program| program.shared() as usize <= shared)
    }

    /// A general program whose tile sizes do not depend on the device.
    pub fn fixed(kind: Kind, dtype: Dtype, width: usize, [rows, cols]: [usize; 2]) -> Program {
        Program::General { kind, dtype, width, rows, cols }
    }

    /// Threads per block. Hopper's modules report theirs.
    pub fn threads(&self) -> u32 {
        match self {
            Program::General { kind: Kind::Decode | Kind::TileList, .. } => 128,
            Program::General { kind: Kind::DecodeTma | Kind::DecodePlain { .. }, .. } => 160,
            Program::General { kind: Kind::ShortForward | Kind::ShortBackward, rows, cols, .. } => {
                2 * *rows.max(cols) as u32
            }
            Program::General { rows, .. } => 2 * *rows as u32,
            Program::Hopper { .. } => 0,
        }
    }

    /// Bytes of shared memory per block. Hopper's modules report theirs.
    pub fn shared(&self) -> u32 {
        let Program::General { kind, dtype, width, rows, cols } = *self else { return 0 };
        let size = dtype.size();
        let pad = 16 / size;
        let (row, weights) = ((width + pad) * size, rows * (cols + pad) * size);
        let floats = rows * (cols + 1) * 4;
        let bytes = match kind {
            Kind::Forward | Kind::ShortForward => (rows + 2 * cols) * row + weights,
            Kind::ShortBackward => (3 * rows + 2 * cols) * row + 2 * cols * (rows + pad) * size,
            // Four warps' rings of copies in flight; afterwards their partial results.
            Kind::Decode => {
                let stages = if width >= 256 {
                    2
                } else if width >= 128 {
                    3
                } else {
                    4
                };
                (4 * stages * (width / 8) * 512).max(3 * 64 * 4 + 64 * (width + 4) * 4)
            }
            // Stages of 64 keys and values, sums of 16 rows, three numbers per row and warp, two barriers per stage.
            Kind::DecodeTma => {
                let stages = if width >= 128 { 3 } else { 5 };
                stages * 256 * width + 16 * (width + 4) * 4 + 3 * 64 * 4 + 16 * stages + 1024
            }
            // The same with two numbers per row and warp; sized for two blocks per multiprocessor.
            Kind::DecodePlain { heads } => {
                let stages = if width >= 128 { 3 } else { 6 };
                stages * 256 * width + 8 * heads * ((width + 4) * 4 + 32) + 16 * stages + 1024
            }
            Kind::Delta => 2 * rows * row,
            Kind::Queries => 2 * (rows + cols) * row + weights,
            Kind::Keys { .. } => 2 * (rows + cols) * row + weights + cols * (12 + 8) + 16,
            Kind::Bias => 2 * (rows + cols) * row + floats,
            Kind::Table => 2 * (rows + cols) * row + floats + rows * (4 + 4 + 8) + 16,
            Kind::Weights => (rows + cols) * row + floats,
            Kind::Convert => 0,
            // Two checksums and a word per thread.
            Kind::TileList => 128 * (16 + 4),
        };
        bytes as u32
    }

    /// Rows of the query tiles and of the key tiles that the mask classifies.
    pub fn tiles(&self) -> (usize, usize) {
        match *self {
            Program::General { kind: Kind::Keys { .. }, rows, cols, .. } => (cols, rows),
            Program::General { rows, cols, .. } => (rows, cols),
            Program::Hopper { .. } => (0, 0),
        }
    }

    /// The entry points.
    fn kernels(&self) -> &'static [&'static str] {
        match self {
            Program::General { kind, .. } => match kind {
                Kind::Forward => &["forward", "merge", "segment_extents"],
                Kind::ShortForward => &["short_forward"],
                Kind::ShortBackward => &["short_backward"],
                Kind::Decode | Kind::DecodeTma | Kind::DecodePlain { .. } => &["decode", "merge"],
                Kind::Delta => &["compute_delta", "reduce_scale", "reduce_sinks"],
                Kind::Queries => &["backward_queries", "segment_extents"],
                Kind::Keys { .. } => &["backward_keys", "segment_extents"],
                Kind::Bias => &["backward_bias", "segment_extents"],
                Kind::Table => &["backward_table", "reduce_table", "segment_extents"],
                Kind::Weights => &["weights", "weights_columns", "weights_cells"],
                Kind::Convert => &["pack", "widen_sinks", "narrow_sinks"],
                Kind::TileList => &["classify", "fill_queries", "fill_keys"],
            },
            Program::Hopper { forward: true, .. } => &["attention_forward"],
            Program::Hopper { .. } => {
                &["attention_backward_preprocess", "attention_backward_overlapped_prep", "attention_backward"]
            }
        }
    }

    fn cache_prefix(&self) -> &'static str {
        match self {
            Program::Hopper { forward: true, .. } => "hopper-forward",
            Program::Hopper { .. } => "hopper-backward",
            Program::General { kind: Kind::Decode | Kind::DecodeTma | Kind::DecodePlain { .. }, .. } => "decode",
            Program::General { .. } => "general",
        }
    }

    /// A name, unique among programs.
    pub fn name(&self) -> String {
        match self {
            Program::General { kind, dtype, width, rows, cols } => {
                let kind = match kind {
                    Kind::Keys { k: true, v: true } => "keys and values".into(),
                    Kind::Keys { k: true, .. } => "keys".into(),
                    Kind::Keys { .. } => "values".into(),
                    Kind::DecodePlain { heads } => format!("plain decode by TMA for {} heads", 8 * heads),
                    Kind::DecodeTma => "decode by TMA".into(),
                    Kind::TileList => "tile list".into(),
                    Kind::ShortForward => "short forward".into(),
                    Kind::ShortBackward => "short backward".into(),
                    kind => format!("{kind:?}").to_lowercase(),
                };
                format!("general {kind} {dtype} width {width} tiles {rows}×{cols}")
            }
            Program::Hopper { forward, defines } => {
                let mut name = String::from(if *forward { "hopper forward" } else { "hopper backward" });
                for (define, value) in defines {
                    let _ = write!(name, " {define}={value}");
                }
                name
            }
        }
    }

    /// Compiler options.
    fn options(&self) -> Vec<String> {
        let mut options = vec!["-std=c++17".to_string()];
        match self {
            Program::General { kind, dtype, width, rows, cols } => {
                let (query_tile, key_tile) = self.tiles();
                let mut define = |name: &str, value: usize| options.push(format!("-D{name}={value}"));
                define("ELEMENT", element(*dtype));
                define("WIDTH", *width);
                define("ROWS", *rows);
                define("COLS", *cols);
                define("QUERY_TILE", query_tile);
                define("KEY_TILE", key_tile);
                match kind {
                    Kind::ShortForward | Kind::ShortBackward => {
                        define(if *kind == Kind::ShortForward { "SHORT_FORWARD" } else { "SHORT_BACKWARD" }, 1);
                        define("THREADS", self.threads() as usize);
                    }
                    Kind::Delta => define("BACKWARD_DELTA", 1),
                    Kind::Queries => define("BACKWARD_QUERIES", 1),
                    Kind::Keys { k, v } => {
                        define("BACKWARD_KEYS", 1);
                        define("FOR_K", usize::from(*k));
                        define("FOR_V", usize::from(*v));
                    }
                    Kind::DecodePlain { heads } => define("HEADS", *heads),
                    Kind::Bias => define("BACKWARD_BIAS", 1),
                    Kind::Table => define("BACKWARD_TABLE", 1),
                    Kind::Forward | Kind::Decode | Kind::DecodeTma | Kind::Weights | Kind::Convert | Kind::TileList => {
                    }
                }
            }
            Program::Hopper { defines, .. } => {
                options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
            }
        }
        options
    }

    /// What the driver compiles.
    pub fn source(&self) -> Source {
        Source {
            name: self.name(),
            cache_prefix: self.cache_prefix(),
            text: self.text(),
            options: self.options(),
            kernels: self.kernels(),
        }
    }

    fn text(&self) -> String {
        let kind = match self {
            Program::General { kind, .. } => kind,
            Program::Hopper { forward, .. } => return hopper_text(*forward),
        };
        let parts: &[&str] = match kind {
            Kind::Forward => &[kernel!("general/forward.cu"), kernel!("general/merge.cu")],
            Kind::ShortForward | Kind::ShortBackward => &[kernel!("general/short.cu")],
            Kind::Decode => &[kernel!("decode.cu"), kernel!("general/merge.cu")],
            Kind::DecodeTma => &[
                kernel!("general/decode_scores.cuh"),
                kernel!("hopper/decode_tma.cuh"),
                kernel!("hopper/decode.cu"),
                kernel!("general/merge.cu"),
            ],
            Kind::DecodePlain { .. } => {
                &[kernel!("hopper/decode_tma.cuh"), kernel!("hopper/decode_plain.cu"), kernel!("general/merge.cu")]
            }
            Kind::Weights => &[kernel!("general/weights.cu")],
            Kind::Convert => &[kernel!("general/convert.cu")],
            Kind::TileList => &[kernel!("general/tile_list.cu")],
            Kind::Queries | Kind::Keys { .. } => &[BACKWARD],
            Kind::Delta | Kind::Bias | Kind::Table => &[BACKWARD, PARAMETER_GRADIENTS],
        };
        let mut text = String::from(kernel!("general/element.cuh"));
        text.push_str(&general_header());
        text.extend([
            kernel!("general/philox.cuh"),
            kernel!("general/mask.cuh"),
            kernel!("general/tile.cuh"),
            kernel!("general/score.cuh"),
        ]);
        text.extend(parts.iter().copied());
        text
    }
}

/// The number of a type, `ELEMENT` of `element.cuh`.
pub(crate) fn element(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

/// Constants and parameter blocks of the general kernels: `kernels/generated/general.cuh`.
pub(crate) fn general_header() -> String {
    [GENERATED.into(), constants(), mask_constants(), Tensor::cpp(), MaskOp::cpp(), GeneralParams::cpp()].concat()
}

/// Constants and the parameter block of Hopper's kernels: `kernels/generated/hopper.cuh`.
pub(crate) fn hopper_header() -> String {
    [GENERATED.into(), constants(), HopperParams::cpp()].concat()
}

/// A program for Hopper, with its headers pasted where they are included: NVRTC has no files to search.
fn hopper_text(forward: bool) -> String {
    let text = if forward { kernel!("hopper/forward.cu") } else { kernel!("hopper/backward.cu") };
    // NVRTC has this constant under another name.
    let infinity = "#define __builtin_huge_valf() __builtin_bit_cast(float, 0x7f800000)\n";
    format!("{infinity}{}", with_headers(text))
}

fn with_headers(text: &str) -> String {
    let header = hopper_header();
    let headers = [
        ("params.cuh", kernel!("hopper/params.cuh")),
        ("ptx.cuh", kernel!("hopper/ptx.cuh")),
        ("generated/hopper.cuh", &header),
        ("segment_ranges.cuh", kernel!("hopper/segment_ranges.cuh")),
        ("key_tiles.cuh", kernel!("hopper/key_tiles.cuh")),
        ("backward_producer.cuh", kernel!("hopper/backward_producer.cuh")),
        ("query_tiles.cuh", kernel!("hopper/query_tiles.cuh")),
        ("dq_accumulate.cuh", kernel!("hopper/dq_accumulate.cuh")),
        ("backward_tile.cuh", kernel!("hopper/backward_tile.cuh")),
        ("dq_scale.cuh", kernel!("hopper/dq_scale.cuh")),
        ("preprocess.cuh", kernel!("hopper/preprocess.cuh")),
        ("overlapped_prep.cuh", kernel!("hopper/overlapped_prep.cuh")),
    ];
    headers.into_iter().fold(text.to_string(), |text, (name, header)| {
        text.replace(&format!("#include \"{name}\""), &header.replace("#pragma once", ""))
    })
}

/// The index arithmetic of Hopper's kernels as C++, with tiles of these sizes, for tests on the CPU.
#[cfg(test)]
pub(crate) fn hopper_schedule_test(forward: bool, [block_m, block_n]: [usize; 2]) -> String {
    let sizes = format!("constexpr int kBlockM = {block_m}, kBlockN = {block_n}, CONSUMER_GROUPS = 2;\n");
    let tiles = match forward {
        true => "#define TEST_FORWARD 1\n#include \"key_tiles.cuh\"\n",
        false => "constexpr bool SPLIT_WIDTH = false;\n#include \"query_tiles.cuh\"\n#include \"dq_scale.cuh\"\n",
    };
    let text = with_headers(&format!("#include \"params.cuh\"\n{sizes}{tiles}"));
    [EMULATION_HEADER, kernel!("hopper/emulated.h"), &text, kernel!("hopper/schedule_test.cpp")].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvrtc::Compiler;
    use crate::operation_programs::{block_operations, operations};
    use std::io::Write as _;
    use std::path::Path;

    const SHARED: usize = 166_912; // of an A100
    /// Queries and keys that limit no tile.
    const LONG: [usize; 2] = [usize::MAX; 2];
    const ALL: [Kind; 10] = [
        Kind::Forward,
        Kind::Delta,
        Kind::Queries,
        Kind::Keys { k: true, v: true },
        Kind::Keys { k: false, v: true },
        Kind::Bias,
        Kind::Table,
        Kind::Weights,
        Kind::Convert,
        Kind::TileList,
    ];

    #[test]
    fn tiles_shrink_until_they_fit_and_no_further() {
        let tiles =
            |width, shared| Program::general(Kind::Queries, Dtype::F32, [width; 2], LONG, shared).map(|p| p.tiles());
        assert_eq!(tiles(64, SHARED), Some((64, 64)));
        assert_eq!(tiles(256, 232_448), Some((64, 32)));
        assert_eq!(tiles(256, SHARED), Some((32, 32)));
        assert_eq!(tiles(256, 101_376), Some((16, 16)));
        assert_eq!(tiles(257, SHARED), None);
        let short = |kind, lengths| Program::general(kind, Dtype::Bf16, [64; 2], lengths, SHARED).map(|p| p.tiles());
        assert_eq!(short(Kind::Queries, [16, 40]), Some((16, 64)));
        assert_eq!(short(Kind::Keys { k: true, v: true }, [17, 3]), Some((32, 16)));
        for width in [1, 64, 100, 256] {
            for kind in ALL {
                let program = Program::general(kind, Dtype::F32, [width, 1], LONG, SHARED).unwrap();
                assert!(program.shared() as usize <= SHARED, "{}", program.name());
            }
        }
    }

    #[test]
    fn recomputed_tiles_have_64_rows() {
        let of = |kind, width| Program::general(kind, Dtype::Bf16, [width; 2], LONG, 232_448).unwrap().tiles();
        for width in [16, 64, 128, 256] {
            assert_eq!((of(Kind::Forward, width).0, of(Kind::Queries, width).0), (64, 64));
            let (k, v) = (true, width <= 128);
            assert_eq!(of(Kind::Keys { k, v }, width).1, crate::kernel_abi::RECOMPUTE_ROWS);
        }
    }

    #[test]
    fn every_program_defines_the_kernels_it_names() {
        for kind in ALL {
            let source = Program::general(kind, Dtype::Bf16, [64; 2], LONG, SHARED).unwrap().source();
            for kernel in source.kernels {
                let defined = format!(" {kernel}(const __grid_constant__ GeneralParams params)");
                assert!(source.text.contains(&defined), "{kernel}");
            }
        }
    }

    #[test]
    fn headers_are_pasted_where_they_are_included() {
        for forward in [true, false] {
            let text = hopper_text(forward);
            assert!(!text.contains("#include \"") && !text.contains("#pragma once"));
            assert!(text.contains("struct HopperParams"));
        }
    }

    /// With NVRTC from PyPI or a toolkit, every program compiles for the oldest supported GPU and for Hopper: one type
    /// and width of each, with the fewest optimizations that the compiler offers, which takes a sixth of the time; with
    /// `QKV_EVERY_CASE=1` all of them, optimized as they run. `QKV_CUBINS` names a folder for the machine code and the
    /// sources, which `kernels/dev/sass.py` compares. Without NVRTC the test says that it was skipped.
    #[test]
    fn every_program_compiles_where_there_is_a_compiler() {
        let compiler = match Compiler::find() {
            Ok(compiler) => compiler,
            // The harness captures `eprintln!` of tests that pass, but not this.
            Err(error) => return drop(writeln!(std::io::stderr(), "skipped: {error}")),
        };
        let every = std::env::var_os("QKV_EVERY_CASE").is_some();
        let mut programs = Vec::new();
        for (dtype, width) in
            [(Dtype::Bf16, 128), (Dtype::F32, 64), (Dtype::F16, 256), (Dtype::F32, 256), (Dtype::Bf16, 32)]
        {
            programs.extend(ALL.map(|kind| Program::general(kind, dtype, [width; 2], LONG, SHARED).unwrap()));
            if !every {
                break;
            }
        }
        programs.extend([64, 128, 256].map(|width| Program::fixed(Kind::Decode, Dtype::Bf16, width, [64, 64])));
        let mut jobs: Vec<(Program, &str)> =
            programs.into_iter().flat_map(|program| ["sm_80", "sm_90a"].map(|at| (program.clone(), at))).collect();
        for (width, heads) in [(64, 1), (128, 2), (128, 0), (256, 1)] {
            let kind = if heads > 0 { Kind::DecodePlain { heads } } else { Kind::DecodeTma };
            jobs.push((Program::fixed(kind, Dtype::Bf16, width, [64, 64]), "sm_90a"));
        }
        let features = ["BAND", "LENGTHS", "SOFTCAP", "ALIBI", "BIAS", "SINKS", "DROPOUT"];
        let mut hopper =
            vec![vec![("ELEMENT", 0), ("HEAD_DIM", 128)], vec![("ELEMENT", 1), ("HEAD_DIM", 64), ("BAND", 1)]];
        if every {
            hopper.extend([64, 128, 256].map(|width| vec![("ELEMENT", 0), ("HEAD_DIM", width), ("BAND", 1)]));
            hopper.push(vec![("ELEMENT", 0), ("HEAD_DIM", 128), ("BAND", 1), ("SEGMENTS", 1)]);
            hopper.push(vec![("ELEMENT", 0), ("HEAD_DIM", 64), ("TILE_LIST", 1), ("LENGTHS", 1)]);
            hopper.extend(features.map(|feature| vec![("ELEMENT", 0), ("HEAD_DIM", 128), (feature, 1)]));
        }
        for defines in hopper {
            jobs.extend([true, false].map(|forward| (Program::Hopper { forward, defines: defines.clone() }, "sm_90a")));
        }
        let folder = std::env::var_os("QKV_CUBINS").map(std::path::PathBuf::from);
        let quickly = !every && folder.is_none() && compiler.version() >= (13, 0);
        let jobs = jobs.into_iter().map(|(program, architecture)| (program.source(), architecture));
        let models = [Dtype::Bf16, Dtype::F32].into_iter().zip(["sm_90a", "sm_80"]);
        let models = models.flat_map(|(dtype, architecture)| {
            [operations(dtype), block_operations(dtype)].map(|source| (source, architecture))
        });
        let jobs = std::sync::Mutex::new(jobs.chain(models));
        let compile_all = || {
            let next = || jobs.lock().unwrap().next();
            while let Some((Source { name, text, mut options, .. }, architecture)) = next() {
                options.extend(quickly.then(|| "--Ofast-compile=max".into()));
                let code = compiler.compile(&name, &text, architecture, &options).unwrap();
                assert!(code.starts_with(b"\x7fELF"), "{name} for {architecture}");
                if let Some(folder) = &folder {
                    let path = folder.join(format!("{name} {architecture}").replace(' ', "_"));
                    std::fs::write(path.with_extension("cubin"), code).unwrap();
                }
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(compile_all))));
    }

    /// Members follow each other without holes that the C++ compiler might fill differently: each begins where its
    /// alignment puts it after the one before.
    #[test]
    fn members_cover_their_blocks() {
        for (members, bytes) in
            [(GeneralParams::MEMBERS, size_of::<GeneralParams>()), (HopperParams::MEMBERS, size_of::<HopperParams>())]
        {
            let mut end = 0;
            for member in members {
                assert!(member.offset >= end && member.offset - end < 8, "{member:?}");
                end = member.offset + member.bytes;
            }
            assert!(bytes - end < 8);
            assert!(bytes <= 4096, "kernel parameters are at most 4 KB");
        }
    }

    #[test]
    fn the_header_in_the_repository_is_the_one_that_is_generated() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/generated");
        for (file, text) in [("general.cuh", general_header()), ("hopper.cuh", hopper_header())] {
            let path = folder.join(file);
            if std::env::var_os("QKV_BLESS").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(&path, &text).unwrap();
            }
            let found = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(found == text, "`{}` is out of date: QKV_BLESS=1 cargo test -p qkv-cuda", path.display());
        }
    }

    /// The C++ compiler of this machine, if there is one, agrees with every offset; a wrong one is an error.
    #[test]
    fn a_cpp_compiler_agrees_with_the_offsets() {
        let types = "typedef unsigned char u8; typedef unsigned short u16; typedef unsigned u32; typedef float T;\n\
                     typedef unsigned long long u64; typedef long long i64;\n\
                     struct uint4; struct int2; struct int4; struct float2;\n";
        let compiles = |text: &str| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("layout.cpp");
            std::fs::write(&path, text).unwrap();
            let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
            let run = std::process::Command::new(compiler).args(["-std=c++17", "-fsyntax-only"]).arg(&path).output();
            run.ok().map(|out| (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned()))
        };
        for header in [general_header(), hopper_header()] {
            let text = format!("{types}{header}");
            let Some((agrees, log)) = compiles(&text) else { return };
            assert!(agrees, "{log}");
            // Two members of one type change places: the sizes stay, the assertions do not hold.
            let swapped = text.replacen("* lse;", "* swapped;", 1).replacen("* lengths;", "* lse;", 1);
            let swapped = swapped.replacen("* swapped;", "* lengths;", 1);
            assert!(swapped != text && !compiles(&swapped).unwrap().0, "a swap goes unnoticed");
        }
    }
}
