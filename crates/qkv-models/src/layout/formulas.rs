//! Formula readers of other projects: which of them a folder belongs to, and what is read from it.

use super::{Layout, latex_ocr, pix2tex};
use crate::describe::DescribeConfig;
use crate::files::folder::CONFIG;
use crate::files::weights::Weights;
use crate::text::tokenizer::Tokenizer;
use crate::{ModelConfig, Result};
use qkv_nn::Parameters;
use std::path::Path;

/// A program that reads formulas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FormulaReader {
    /// `latex-ocr-junia`.
    LatexOcr,
    /// pix2tex.
    Pix2tex,
}

impl FormulaReader {
    /// Whose model a folder holds; `None` if it has a `config.json`.
    pub fn of(folder: &Path) -> Option<FormulaReader> {
        match folder {
            _ if folder.join(CONFIG).exists() => None,
            _ if latex_ocr::is_in(folder) => Some(FormulaReader::LatexOcr),
            _ if pix2tex::is_in(folder) => Some(FormulaReader::Pix2tex),
            _ => None,
        }
    }

    pub fn config(self, folder: &Path) -> Result<ModelConfig> {
        match self {
            FormulaReader::LatexOcr => latex_ocr::config(folder),
            FormulaReader::Pix2tex => pix2tex::config(folder),
        }
    }

    pub fn tokenizer(self, folder: &Path) -> Result<Tokenizer> {
        match self {
            FormulaReader::LatexOcr => latex_ocr::tokenizer(folder),
            FormulaReader::Pix2tex => pix2tex::tokenizer(folder),
        }
    }

    pub fn weights(self, folder: &Path) -> Result<Weights> {
        match self {
            FormulaReader::LatexOcr => latex_ocr::weights(folder),
            FormulaReader::Pix2tex => pix2tex::weights(folder),
        }
    }

    pub fn layout(self, config: &DescribeConfig) -> Layout {
        match self {
            FormulaReader::LatexOcr => latex_ocr::layout(config),
            FormulaReader::Pix2tex => pix2tex::layout(config),
        }
    }

    /// Converts the tensors that were read to our parameters.
    pub fn finish(self, parameters: &mut Parameters<f32>, config: &DescribeConfig) {
        match self {
            FormulaReader::LatexOcr => latex_ocr::unscale(parameters, config.d_model),
            FormulaReader::Pix2tex => pix2tex::finish(parameters, config),
        }
    }
}
