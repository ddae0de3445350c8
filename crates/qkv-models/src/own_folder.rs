//! The folder of a model in qkv's own format, tensor names included: `config.json`, `model.safetensors` and, if the
//! model reads text, its tokenizer. It is shared by the kinds that no other library has. Models that generate text are
//! in [`checkpoint`](crate::checkpoint).

use crate::checkpoint::{Blank, write_tokenizer};
use crate::files::folder::{CONFIG, TOKENIZER, WEIGHTS, read_json, write_json};
use crate::files::tensors::Storage;
use crate::files::weights::Weights;
use crate::layout::{self, Inspected, Layout};
use crate::text::tokenizer::Tokenizer;
use crate::{Architecture, Error, ModelConfig, Result};
use qkv_nn::Parameters;
use qkv_nn::layers::Builder;
use std::path::{Path, PathBuf};

/// An open folder: sizes, tensors that are not read yet, and the network with all parameters zero, or the reason why it
/// could not be built.
pub(crate) struct OwnFolder<C, N> {
    path: PathBuf,
    pub config: C,
    pub vocab_size: usize,
    weights: Weights,
    built: Result<Blank<N>>,
}

impl<C, N> OwnFolder<C, N> {
    /// Opens a folder. `config_of` extracts the sizes if the model is of the expected kind; `build` makes the network
    /// from them and the vocabulary size.
    ///
    /// # Errors
    /// If a file is missing or malformed, or the model is of another kind.
    pub fn open(
        path: &Path,
        kind: &str,
        config_of: impl FnOnce(Architecture) -> Option<C>,
        build: impl FnOnce(&mut Builder<'_, f32>, &C, usize) -> Result<N>,
    ) -> Result<Self> {
        let settings = path.join(CONFIG);
        let model: ModelConfig = read_json(&settings)?;
        let vocab_size = model.vocab_size;
        let Some(config) = config_of(model.architecture.clone()) else {
            let what = format!("it is a {}, expected `{kind}`", model.architecture.name());
            return Err(Error::format(&settings, "field `architecture.kind`", what));
        };
        let weights = Weights::of_folder(path)?;
        // A model that claims to be larger than its file is rejected before memory is allocated for it.
        let built = model.check_size(weights.numbers()).and_then(|()| {
            let mut parameters = Parameters::new();
            let network = build(&mut Builder::blank(&mut parameters), &config, vocab_size)?;
            let layout = Layout::own(&parameters);
            Ok((network, parameters, layout))
        });
        let built = built.map_err(|e| e.in_file(&settings));
        Ok(OwnFolder { path: path.to_owned(), config, vocab_size, weights, built })
    }

    /// Its tokenizer, which has at most as many tokens as the model.
    ///
    /// # Errors
    /// If it is missing or malformed, or has more tokens.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let tokenizer = Tokenizer::open(self.path.join(TOKENIZER))?;
        if tokenizer.len() > self.vocab_size {
            let what = format!("the tokenizer has {} tokens, the model {}", tokenizer.len(), self.vocab_size);
            return Err(Error::format(self.path.join(CONFIG), "field `vocab_size`", what));
        }
        Ok(tokenizer)
    }

    /// The network and its parameters.
    ///
    /// # Errors
    /// If the sizes are inconsistent, or a tensor is missing or has another shape.
    pub fn fill(self) -> Result<(C, N, Parameters<f32>)> {
        let (network, mut parameters, layout) = self.built?;
        layout.fill(&mut parameters, &self.weights)?;
        Ok((self.config, network, parameters))
    }

    /// What `qkv inspect` prints about it, introduced by `words`.
    pub fn inspected(self, words: String) -> Inspected {
        layout::inspected(words, self.built, self.weights)
    }
}

/// Writes such a folder.
///
/// # Errors
/// I/O errors.
pub(crate) fn write(
    path: &Path,
    config: &ModelConfig,
    parameters: &Parameters<f32>,
    tokenizer: Option<&Tokenizer>,
    storage: Storage,
) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|e| Error::file("write", path, e))?;
    Layout::own(parameters).write(&path.join(WEIGHTS), parameters, storage)?;
    write_json(&path.join(CONFIG), config)?;
    tokenizer.map_or(Ok(()), |tokenizer| write_tokenizer(tokenizer, None, path))
}
