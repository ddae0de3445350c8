//! The kernels as text: which files make a program, with which tile sizes and for which type, and what shared memory a
//! block of it takes. Compiling is `card`'s, choosing is the plans'.

use crate::memory::Dtype;
use std::fmt::Write as _;

macro_rules! kernel {
    ($file:literal) => {
        include_str!(concat!("../kernels/", $file))
    };
}

/// What makes C++ of a kernel.
pub(crate) const EMULATED: &str = kernel!("emulated.h");

const PRELUDE: [&str; 5] = [
    kernel!("general/element.cuh"),
    kernel!("general/job.cuh"),
    kernel!("general/mask.cuh"),
    kernel!("general/tile.cuh"),
    kernel!("general/score.cuh"),
];
const BACKWARD: &str = kernel!("general/backward.cu");
const PARAMETERS: &str = kernel!("general/parameters.cu");

/// What a general program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum General {
    Forward,
    Decode,
    /// The same by Hopper's copy engine.
    DecodeHopper,
    /// Where every key is seen and a score is a scaled product: for so many query heads of a group, in eights.
    DecodePlain {
        heads: usize,
    },
    /// What backward needs of each row, and sums over rows.
    Rows,
    Queries,
    /// Which of the gradients of keys and of values.
    Keys {
        k: bool,
        v: bool,
    },
    Bias,
    Table,
    Weights,
    /// Copies and conversions.
    Border,
    /// What a mask keeps of each tile.
    Tiles,
}

/// A program of kernels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Program {
    /// Of the general kernels: for a type, a padded width, and tiles of `rows` against `cols`.
    General { what: General, dtype: Dtype, width: usize, rows: usize, cols: usize },
    /// Of Hopper's: forward or backward, with defines.
    Hopper { forward: bool, defines: Vec<(&'static str, u32)> },
}

/// The sizes of tiles that are tried, largest first; the first whose shared memory the card has is taken.
const TILES: [(usize, usize); 6] = [(64, 64), (64, 32), (32, 32), (32, 16), (16, 16), (16, 16)];

impl Program {
    /// The largest tiles that fit into so much shared memory, for widths of `d` and `dv`. None where they are too wide.
    pub fn general(what: General, dtype: Dtype, d: usize, dv: usize, shared: usize) -> Option<Program> {
        let width = [32, 64, 128, 256].into_iter().find(|&width| width >= d.max(dv))?;
        // Sums of wide rows take the registers: fewer columns leave room for them.
        let most_cols =
            if width >= 256 || matches!(what, General::Keys { k: true, v: true }) && width >= 128 { 32 } else { 64 };
        let fits = TILES.into_iter().filter(|&(_, cols)| cols <= most_cols);
        let mut programs = fits.map(|(rows, cols)| Program::General { what, dtype, width, rows, cols });
        programs.find(|program| program.shared() as usize <= shared)
    }

    /// Threads of a block.
    pub fn threads(&self) -> u32 {
        match self {
            Program::General { what: General::Decode | General::Tiles, .. } => 128,
            Program::General { what: General::DecodeHopper | General::DecodePlain { .. }, .. } => 160,
            Program::General { rows, .. } => 2 * *rows as u32,
            Program::Hopper { .. } => 0, // the module says
        }
    }

    /// Bytes of shared memory of a block.
    pub fn shared(&self) -> u32 {
        let Program::General { what, dtype, width, rows, cols } = *self else { return 0 };
        let size = dtype.size();
        let pad = 16 / size;
        let (row, weights) = ((width + pad) * size, rows * (cols + pad) * size);
        let floats = rows * (cols + 1) * 4;
        let bytes = match what {
            General::Forward => (rows + 2 * cols) * row + weights,
            // Four warps' slots for the copies under way; later room for what the warps found.
            General::Decode => {
                let stages = if width >= 256 {
                    2
                } else if width >= 128 {
                    3
                } else {
                    4
                };
                (4 * stages * (width / 8) * 512).max(3 * 64 * 4 + 64 * (width + 4) * 4)
            }
            // Stages of 64 keys and values, the sums of 16 rows, three numbers a row and warp, two barriers a stage.
            General::DecodeHopper => {
                let stages = if width >= 128 { 3 } else { 5 };
                stages * 256 * width + 16 * (width + 4) * 4 + 3 * 64 * 4 + 16 * stages + 1024
            }
            // Likewise, with two numbers a row and warp, in as many blocks as a multiprocessor is to hold.
            General::DecodePlain { heads } => {
                let stages = if width >= 128 { 3 } else { 6 };
                stages * 256 * width + 8 * heads * ((width + 4) * 4 + 32) + 16 * stages + 1024
            }
            General::Rows => 2 * rows * row,
            General::Queries => 2 * (rows + cols) * row + weights,
            General::Keys { .. } => 2 * (rows + cols) * row + weights + cols * (12 + 8) + 16,
            General::Bias => 2 * (rows + cols) * row + floats,
            General::Table => 2 * (rows + cols) * row + floats + rows * (4 + 4 + 8) + 16,
            General::Weights => (rows + cols) * row + floats,
            General::Border => 0,
            // Two sums and a word for each thread.
            General::Tiles => 128 * (16 + 4),
        };
        bytes as u32
    }

    /// Tiles of queries and of keys, as the mask sees them.
    pub fn tiles(&self) -> (usize, usize) {
        match *self {
            Program::General { what: General::Keys { .. }, rows, cols, .. } => (cols, rows),
            Program::General { rows, cols, .. } => (rows, cols),
            Program::Hopper { .. } => (0, 0),
        }
    }

    /// Its kernels.
    pub fn kernels(&self) -> &'static [&'static str] {
        match self {
            Program::General { what, .. } => match what {
                General::Forward => &["forward", "merge", "segment_extents"],
                General::Decode | General::DecodeHopper | General::DecodePlain { .. } => &["decode", "merge"],
                General::Rows => &["row_terms", "reduce_scale", "reduce_sinks"],
                General::Queries => &["backward_queries", "segment_extents"],
                General::Keys { .. } => &["backward_keys", "segment_extents"],
                General::Bias => &["backward_bias", "segment_extents"],
                General::Table => &["backward_table", "reduce_table", "segment_extents"],
                General::Weights => &["weights", "weights_columns", "weights_cells"],
                General::Border => &["pack", "widen_sinks", "narrow_sinks"],
                General::Tiles => &["classify", "fill_queries", "fill_keys"],
            },
            Program::Hopper { forward: true, .. } => &["attention_forward"],
            Program::Hopper { .. } => &["attention_backward_prepare", "attention_backward_late", "attention_backward"],
        }
    }

    /// What its entry in the cache is called.
    pub fn file(&self) -> &'static str {
        match self {
            Program::Hopper { forward: true, .. } => "hopper-forward",
            Program::Hopper { .. } => "hopper-backward",
            Program::General {
                what: General::Decode | General::DecodeHopper | General::DecodePlain { .. }, ..
            } => "decode",
            Program::General { .. } => "general",
        }
    }

    /// One name for each program.
    pub fn name(&self) -> String {
        match self {
            Program::General { what, dtype, width, rows, cols } => {
                let what = match what {
                    General::Keys { k: true, v: true } => "keys and values".into(),
                    General::Keys { k: true, .. } => "keys".into(),
                    General::Keys { .. } => "values".into(),
                    General::DecodePlain { heads } => format!("plain decode by copies for {} heads", 8 * heads),
                    General::DecodeHopper => "decode by copies".into(),
                    what => format!("{what:?}").to_lowercase(),
                };
                format!("general {what} {dtype} width {width} tiles {rows}×{cols}")
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

    /// What the compiler is told.
    pub fn options(&self) -> Vec<String> {
        let mut options = vec!["-std=c++17".to_string()];
        match self {
            Program::General { what, dtype, width, rows, cols } => {
                let (query_tile, key_tile) = self.tiles();
                let element = match dtype {
                    Dtype::F32 => 0,
                    Dtype::Bf16 => 1,
                    Dtype::F16 => 2,
                };
                let mut define = |name: &str, value: usize| options.push(format!("-D{name}={value}"));
                define("ELEMENT", element);
                define("WIDTH", *width);
                define("ROWS", *rows);
                define("COLS", *cols);
                define("QUERY_TILE", query_tile);
                define("KEY_TILE", key_tile);
                match what {
                    General::Rows => define("BACKWARD_ROWS", 1),
                    General::Queries => define("BACKWARD_QUERIES", 1),
                    General::Keys { k, v } => {
                        define("BACKWARD_KEYS", 1);
                        define("FOR_K", usize::from(*k));
                        define("FOR_V", usize::from(*v));
                    }
                    General::DecodePlain { heads } => define("HEADS", *heads),
                    General::Bias => define("BACKWARD_BIAS", 1),
                    General::Table => define("BACKWARD_TABLE", 1),
                    General::Forward
                    | General::Decode
                    | General::DecodeHopper
                    | General::Weights
                    | General::Border
                    | General::Tiles => {}
                }
            }
            Program::Hopper { defines, .. } => {
                options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
            }
        }
        options
    }

    /// Its source, in one piece.
    pub fn source(&self) -> String {
        let mut text = String::new();
        match self {
            Program::General { what, .. } => {
                text.extend(PRELUDE);
                match what {
                    General::Forward => text.extend([kernel!("general/forward.cu"), kernel!("general/merge.cu")]),
                    General::Decode => text.extend([kernel!("decode.cu"), kernel!("general/merge.cu")]),
                    General::DecodeHopper => text.extend([
                        kernel!("general/carefully.cuh"),
                        kernel!("hopper/copies.cuh"),
                        kernel!("hopper/decode.cu"),
                        kernel!("general/merge.cu"),
                    ]),
                    General::DecodePlain { .. } => text.extend([
                        kernel!("hopper/copies.cuh"),
                        kernel!("hopper/decode_plain.cu"),
                        kernel!("general/merge.cu"),
                    ]),
                    General::Weights => text.push_str(kernel!("general/weights.cu")),
                    General::Border => text.push_str(kernel!("general/border.cu")),
                    General::Tiles => text.push_str(kernel!("general/tiles.cu")),
                    General::Queries | General::Keys { .. } => text.push_str(BACKWARD),
                    General::Rows | General::Bias | General::Table => text.extend([BACKWARD, PARAMETERS]),
                }
            }
            Program::Hopper { forward, .. } => text.push_str(&crate::hopper::source(*forward)),
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvrtc::Compiler;

    const SHARED: usize = 166_912; // of an A100
    const ALL: [General; 10] = [
        General::Forward,
        General::Rows,
        General::Queries,
        General::Keys { k: true, v: true },
        General::Keys { k: false, v: true },
        General::Bias,
        General::Table,
        General::Weights,
        General::Border,
        General::Tiles,
    ];

    #[test]
    fn tiles_shrink_until_they_fit_and_no_further() {
        let tiles =
            |width, shared| Program::general(General::Queries, Dtype::F32, width, width, shared).map(|p| p.tiles());
        assert_eq!(tiles(64, SHARED), Some((64, 64)));
        assert_eq!(tiles(256, 232_448), Some((64, 32)));
        assert_eq!(tiles(256, SHARED), Some((32, 32)));
        assert_eq!(tiles(256, 101_376), Some((16, 16)));
        assert_eq!(tiles(257, SHARED), None);
        for width in [1, 64, 100, 256] {
            for what in ALL {
                let program = Program::general(what, Dtype::F32, width, 1, SHARED).unwrap();
                assert!(program.shared() as usize <= SHARED, "{}", program.name());
            }
        }
    }

    #[test]
    fn a_program_without_tiles_of_its_own_kind_names_its_kernels() {
        for what in ALL {
            let program = Program::general(what, Dtype::Bf16, 64, 64, SHARED).unwrap();
            for kernel in program.kernels() {
                assert!(program.source().contains(&format!(" {kernel}(const __grid_constant__ Job job)")), "{kernel}");
            }
        }
    }

    /// With a compiler from PyPI or a toolkit, every program is compiled, for the oldest cards and for Hopper: in one type
    /// and width each, all of them with `QKV_EVERY_CASE=1`. Without one, it says so.
    #[test]
    fn every_program_compiles_where_there_is_a_compiler() {
        let compiler = match Compiler::find() {
            Ok(compiler) => compiler,
            // Past the harness, which keeps back what a passing test prints.
            Err(error) => {
                return drop(std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("skipped: {error}\n")));
            }
        };
        let every = std::env::var_os("QKV_EVERY_CASE").is_some();
        let mut programs = Vec::new();
        for (dtype, width) in
            [(Dtype::Bf16, 128), (Dtype::F32, 64), (Dtype::F16, 256), (Dtype::F32, 256), (Dtype::Bf16, 32)]
        {
            programs.extend(ALL.map(|what| Program::general(what, dtype, width, width, SHARED).unwrap()));
            if !every {
                break;
            }
        }
        for width in [64, 128, 256] {
            programs.push(Program::General { what: General::Decode, dtype: Dtype::Bf16, width, rows: 64, cols: 64 });
        }
        for program in &programs {
            for architecture in ["sm_80", "sm_90a"] {
                let code = compiler.compile(&program.name(), &program.source(), architecture, &program.options());
                assert!(code.is_ok_and(|code| code.starts_with(b"\x7fELF")), "{} for {architecture}", program.name());
            }
        }
        for (width, heads) in [(64, 1), (128, 2), (128, 0), (256, 1)] {
            let what = if heads > 0 { General::DecodePlain { heads } } else { General::DecodeHopper };
            let program = Program::General { what, dtype: Dtype::Bf16, width, rows: 64, cols: 64 };
            compiler.compile(&program.name(), &program.source(), "sm_90a", &program.options()).unwrap();
        }
        let choices = ["BAND", "LENGTHS", "SOFTCAP", "ALIBI", "BIAS", "SINKS", "DROPOUT"];
        let mut hopper =
            vec![vec![("ELEMENT", 0), ("HEAD_DIM", 128)], vec![("ELEMENT", 1), ("HEAD_DIM", 64), ("BAND", 1)]];
        if every {
            hopper.extend([64, 128, 256].map(|width| vec![("ELEMENT", 0), ("HEAD_DIM", width), ("BAND", 1)]));
            hopper.push(vec![("ELEMENT", 0), ("HEAD_DIM", 128), ("BAND", 1), ("SEGMENTS", 1)]);
            hopper.push(vec![("ELEMENT", 0), ("HEAD_DIM", 64), ("PLAN", 1), ("LENGTHS", 1)]);
            hopper.extend(choices.map(|choice| vec![("ELEMENT", 0), ("HEAD_DIM", 128), (choice, 1)]));
        }
        for defines in hopper {
            for forward in [true, false] {
                let program = Program::Hopper { forward, defines: defines.clone() };
                compiler.compile(&program.name(), &program.source(), "sm_90a", &program.options()).unwrap();
            }
        }
    }
}
