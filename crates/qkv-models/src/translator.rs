//! Translation from text to text: a model with its parameters and tokenizer. Beam search is in
//! [`search`](crate::search), files are in [`checkpoint`](crate::checkpoint).

use crate::batch::{Batch, Rows, SpecialTokens, with_eos};
use crate::checkpoint::{write_model, write_tokenizer};
use crate::files::folder::{self, CONFIG, GENERATION_CONFIG, TOKENIZER, WEIGHTS};
use crate::files::input;
use crate::files::tensors::{Storage, TensorFile};
use crate::files::weights::Weights;
use crate::layout::{Dialect, Layout};
use crate::search::{Hypothesis, Search};
use crate::text::batches::{Batching, Lengths};
use crate::text::corpus::Pair;
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Model, Result};
use qkv_nn::{Loss, Machine, Parameters, Pool, Tape};
use rayon::prelude::*;
use std::borrow::Cow;
use std::path::Path;

/// A model that translates, with its parameters and tokenizer.
#[derive(Debug)]
pub struct Translator {
    /// The model.
    pub model: Model,
    /// Its parameters.
    pub parameters: Parameters<f32>,
    /// Its tokenizer, for both languages.
    pub tokenizer: Tokenizer,
    /// Default settings of the search.
    pub search: Search,
}

/// A translation as text.
#[derive(Clone, Debug, PartialEq)]
pub struct Translation {
    /// The text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The score it was ranked by.
    pub score: f64,
    /// Its log-probability.
    pub log_probability: f64,
}

/// Tokens per batch when only the loss is computed.
const BATCH_TOKENS: usize = 4096;

impl Translator {
    /// Reads a folder with `config.json`, `model.safetensors`, `tokenizer.json` and, optionally,
    /// `generation_config.json`.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        Self::open_at(folder.as_ref())
    }

    fn open_at(from: &Path) -> Result<Self> {
        let read = |name: &str, max_len| input::read(&from.join(name), max_len);
        let generation = match from.join(GENERATION_CONFIG).exists() {
            true => Some(read(GENERATION_CONFIG, input::SETTINGS_MAX)?),
            false => None,
        };
        let config = read(CONFIG, input::SETTINGS_MAX)?;
        let tokenizer = read(TOKENIZER, input::TOKENIZER_MAX)?;
        Translator::from_bytes(from, &config, &tokenizer, read(WEIGHTS, u64::MAX)?, generation.as_deref())
    }

    /// The same from the bytes of those files; `from` is only for error messages.
    ///
    /// # Errors
    /// As [`open`](Translator::open).
    pub fn from_bytes(
        from: &Path,
        config: &[u8],
        tokenizer: &[u8],
        weights: impl Into<Cow<'static, [u8]>>,
        generation: Option<&[u8]>,
    ) -> Result<Self> {
        let (config_path, generation_path) = (from.join(CONFIG), from.join(GENERATION_CONFIG));
        let (config, dialect) = Dialect::read(config, &config_path)?;
        let tokenizer = Tokenizer::from_bytes(tokenizer, from.join(TOKENIZER))?;
        let search = match generation {
            // Other programs store sampling settings there, not search settings.
            Some(bytes) if dialect == Dialect::Own => folder::parse_json(bytes, &generation_path)?,
            _ => Search::default(),
        };
        search.check().map_err(|e| e.in_file(&generation_path))?;
        if tokenizer.len() != config.vocab_size || SpecialTokens::of(&tokenizer) != config.specials() {
            let what = format!("`vocab_size` is {}, the tokenizer has {} tokens", config.vocab_size, tokenizer.len());
            return Err(Error::format(config_path, "vocab_size", what));
        }
        let weights = Weights::File(TensorFile::from_bytes(weights, from.join(WEIGHTS))?);
        // A model that claims to be larger than its file is rejected before memory is allocated for it.
        config.check_size(weights.numbers()).map_err(|e| e.in_file(&config_path))?;
        let (model, mut parameters) = Model::blank(&config).map_err(|e| e.in_file(&config_path))?;
        let layout = dialect.layout(&config).unwrap_or_else(|| Layout::own(&parameters));
        layout.fill(&mut parameters, &weights)?;
        parameters.pack_for_inference();
        Ok(Translator { model, parameters, tokenizer, search })
    }

    /// Writes the folder, each file atomically.
    ///
    /// # Errors
    /// I/O errors.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        self.save_at(folder.as_ref(), storage)
    }

    fn save_at(&self, to: &Path, storage: Storage) -> Result<()> {
        std::fs::create_dir_all(to).map_err(|e| Error::file("write", to, e))?;
        self.tokenizer.save(to.join(TOKENIZER))?;
        write_model(&self.model, &self.parameters, to, storage)?;
        if Dialect::of(self.model.config()) != Dialect::Own {
            return write_tokenizer(&self.tokenizer, None, to);
        }
        Ok(folder::write_json(&to.join(GENERATION_CONFIG), &self.search)?)
    }

    /// Translates lines; returns up to `beam` translations of each, best first. An empty line has an empty translation.
    ///
    /// # Errors
    /// If a line is too long for the model, or the model computes NaN.
    pub fn translate<S: AsRef<str> + Sync>(
        &self,
        lines: &[S],
        search: &Search,
        machine: &Machine,
    ) -> Result<Vec<Vec<Translation>>> {
        let sources: Vec<Vec<u32>> = lines.par_iter().map(|line| self.tokenizer.encode(line.as_ref())).collect();
        self.translate_tokens(&sources, search, machine)
    }

    /// The same for lines that are already tokenized, without special tokens.
    ///
    /// # Errors
    /// As [`translate`](Translator::translate).
    pub fn translate_tokens(
        &self,
        sources: &[Vec<u32>],
        search: &Search,
        machine: &Machine,
    ) -> Result<Vec<Vec<Translation>>> {
        let nonempty: Vec<Vec<u32>> = sources.iter().filter(|source| !source.is_empty()).cloned().collect();
        let pool = Pool::new();
        let found = search.run(&self.model, &self.parameters, &pool, machine, &nonempty)?;
        let as_text = |found: Hypothesis| {
            let (text, tokens) = self.decode_until(&search.stop, found.tokens);
            Translation { text, tokens, score: found.score, log_probability: found.log_probability }
        };
        let found: Vec<Vec<Translation>> =
            found.into_par_iter().map(|found| found.into_iter().map(as_text).collect()).collect();
        let mut found = found.into_iter();
        let empty = Translation { text: String::new(), tokens: Vec::new(), score: 0.0, log_probability: 0.0 };
        let translations = sources.iter().map(|source| match source.is_empty() {
            true => vec![empty.clone()],
            false => found.next().unwrap_or_default(),
        });
        Ok(translations.collect())
    }

    /// Decodes tokens up to the first stop string.
    fn decode_until(&self, stop: &[String], mut tokens: Vec<u32>) -> (String, Vec<u32>) {
        let mut text = self.tokenizer.decode(&tokens);
        let stop = stop.iter().filter(|stop| !stop.is_empty());
        if let Some(end) = stop.filter_map(|stop| text.find(stop.as_str())).min() {
            text.truncate(end);
            text.truncate(text.trim_end().len());
            let enough = |&count: &usize| self.tokenizer.decode(&tokens[..count]).len() >= text.len();
            tokens.truncate((0..tokens.len()).find(enough).unwrap_or(tokens.len()));
        }
        (text, tokens)
    }

    /// The loss of reference translations under teacher forcing, without label smoothing.
    ///
    /// # Errors
    /// If a side is too long for the model.
    pub fn loss(&self, pairs: &[Pair], machine: &Machine, pool: &Pool<f32>) -> Result<Loss> {
        let encode = |pair: &Pair| (self.tokenizer.encode(&pair.source), self.tokenizer.encode(&pair.target));
        let pairs: Vec<(Vec<u32>, Vec<u32>)> = pairs.iter().map(encode).collect();
        let lengths: Vec<Lengths> = (pairs.iter())
            .map(|(source, target)| Lengths { source: source.len() + 1, target: target.len() + 1 })
            .collect();
        if let Some(at) = lengths.iter().position(|pair| !self.model.fits(pair.source, pair.target)) {
            let max_len = self.model.max_len() - 1;
            return Err(Error::invalid(format!("pair {} has a side of more than {max_len} tokens", at + 1)));
        }
        let batching = Batching { tokens: BATCH_TOKENS, longest: usize::MAX };
        let mut loss = Loss::default();
        for batch in batching.sorted(&lengths) {
            let sides = batch.iter().map(|&at| (&pairs[at].0[..], &pairs[at].1[..]));
            let batch = Batch::new(sides, self.model.config().specials());
            let mut tape = Tape::inference(&self.parameters, pool, machine);
            loss += self.model.loss(&mut tape, &batch, 0.0, 1.0)?.read();
        }
        Ok(loss)
    }

    /// Source lines as padded rows of tokens, each with its end token.
    pub fn rows<S: AsRef<str>>(&self, lines: &[S]) -> Rows {
        let specials = self.model.config().specials();
        let rows: Vec<Vec<u32>> =
            lines.iter().map(|line| with_eos(&self.tokenizer.encode(line.as_ref()), specials.eos)).collect();
        Rows::new(&rows, specials.pad)
    }
}
