//! A model with its tokenizer, ready to translate: a folder in the Hugging Face layout, read and written.

use crate::batch::{Rows, Specials};
use crate::checkpoint::write_tokenizer;
use crate::files::atomic;
use crate::files::tensors::{Named, Storage, TensorFile, to_bytes};
use crate::files::weights::Weights;
use crate::generator::write_model;
use crate::layout::{Dialect, Layout};
use crate::search::Search;
use crate::text::batches::{Batching, Lengths};
use crate::text::corpus::Pair;
use crate::text::tokenizer::Tokenizer;
use crate::{Batch, Error, Model, Result};
use qkv_nn::{Loss, Machine, Parameters, Pool, Tape};
use std::borrow::Cow;
use std::path::Path;

/// A model that translates.
#[derive(Debug)]
pub struct Translator {
    /// The model.
    pub model: Model,
    /// Its numbers.
    pub parameters: Parameters<f32>,
    /// How text is cut.
    pub tokenizer: Tokenizer,
    /// How sentences are searched for, unless asked otherwise.
    pub search: Search,
}

/// A sentence that was found, as text.
#[derive(Clone, Debug, PartialEq)]
pub struct Translation {
    /// What it says.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// What it was ranked by.
    pub score: f64,
    /// Its log-probability.
    pub log_probability: f64,
}

/// Tokens that go through the model together where only their loss is wanted.
const TOKENS: usize = 4096;

/// The files of a model's folder.
const CONFIG: &str = "config.json";
const MODEL: &str = "model.safetensors";
const TOKENIZER: &str = "tokenizer.json";
const GENERATION: &str = "generation_config.json";

/// Parameters from a file of tensors: all of them, in their shapes, and no others.
pub(crate) fn read_parameters(parameters: &mut Parameters<f32>, file: &TensorFile, path: &Path) -> Result<()> {
    let all: Vec<_> = parameters.all().collect();
    for param in &all {
        let values = file.read_shaped(parameters.name(*param), parameters.shape(*param))?;
        parameters.get_mut(*param).copy_from_slice(&values);
    }
    if let Some(name) = file.names().find(|name| parameters.find(name).is_none()) {
        return Err(Error::format(path, format!("tensor `{name}`"), "the model has no such parameter"));
    }
    Ok(())
}

/// The bytes of a file with all parameters.
pub(crate) fn parameter_bytes(parameters: &Parameters<f32>, storage: Storage) -> Result<Vec<u8>> {
    let named: Vec<Named<'_>> = parameters
        .all()
        .map(|param| Named {
            name: parameters.name(param),
            shape: parameters.shape(param),
            values: parameters.get(param),
        })
        .collect();
    to_bytes(&named, storage)
}

impl Translator {
    /// From a folder with `config.json`, `model.safetensors`, `tokenizer.json` and, if it is there, `generation_config.json`.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        Self::open_at(folder.as_ref())
    }

    /// `open` for the one type of path: compiled here, once, and not again by every caller.
    fn open_at(folder: &Path) -> Result<Self> {
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).map_err(|e| Error::file("read", &path, e))
        };
        let generation = if folder.join(GENERATION).exists() { Some(read(GENERATION)?) } else { None };
        Translator::from_bytes(folder, &read(CONFIG)?, &read(TOKENIZER)?, read(MODEL)?, generation.as_deref())
    }

    /// From the bytes of those files; `folder` is for errors.
    ///
    /// # Errors
    /// As [`open`](Translator::open).
    pub fn from_bytes(
        folder: &Path,
        config: &[u8],
        tokenizer: &[u8],
        model: impl Into<Cow<'static, [u8]>>,
        generation: Option<&[u8]>,
    ) -> Result<Self> {
        let json = |name: &str, e: serde_json::Error| Error::line(folder.join(name), e.line().max(1), e.to_string());
        let (config, dialect) = Dialect::read(config, &folder.join(CONFIG))?;
        let tokenizer = Tokenizer::from_bytes(tokenizer, folder.join(TOKENIZER))?;
        let search = match generation {
            // What others write there is not about searching.
            Some(bytes) if dialect == Dialect::Own => serde_json::from_slice(bytes).map_err(|e| json(GENERATION, e))?,
            _ => Search::default(),
        };
        // What is wrong with a number is said with the file that it stands in.
        let in_file = |name: &str, error: Error| match error {
            Error::Invalid { .. } | Error::Attention(_) => {
                Error::format(folder.join(name), "settings", error.to_string())
            }
            error => error,
        };
        search.check().map_err(|e| in_file(GENERATION, e))?;
        if tokenizer.len() != config.vocab_size || Specials::of(&tokenizer) != config.specials() {
            let what = format!("`vocab_size` is {}, the tokenizer has {} tokens", config.vocab_size, tokenizer.len());
            return Err(Error::format(folder.join(CONFIG), "vocab_size", what));
        }
        let path = folder.join(MODEL);
        let file = TensorFile::from_bytes(model, &path)?;
        // The file is there: a model that claims to be larger than it is refused before memory is asked for.
        let numbers: usize =
            file.names().filter_map(|name| file.shape(name)).map(|s| s.iter().product::<usize>()).sum();
        config.check_size(numbers).map_err(|e| in_file(CONFIG, e))?;
        let (model, mut parameters) = Model::blank(&config).map_err(|e| in_file(CONFIG, e))?;
        let layout = dialect.layout(&config).unwrap_or_else(|| Layout::own(&parameters));
        layout.fill(&mut parameters, &Weights::File(file))?;
        Ok(Translator { model, parameters, tokenizer, search })
    }

    /// Writes the folder: each file whole or not at all.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        self.save_at(folder.as_ref(), storage)
    }

    /// `save` for the one type of path: compiled here, once, and not again by every caller.
    fn save_at(&self, folder: &Path, storage: Storage) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(|e| Error::file("write", folder, e))?;
        let json = |value: serde_json::Result<String>| value.expect("plain values") + "\n";
        self.tokenizer.save(folder.join(TOKENIZER))?;
        write_model(&self.model, &self.parameters, folder, storage)?;
        if Dialect::of(self.model.config()) != Dialect::Own {
            return write_tokenizer(&self.tokenizer, None, folder);
        }
        atomic::write(folder.join(GENERATION), json(serde_json::to_string_pretty(&self.search)).as_bytes())
    }

    /// Translates lines: for each, what was found, best first. An empty line has an empty translation.
    ///
    /// # Errors
    /// Where a line is longer than the model takes.
    pub fn translate<S: AsRef<str>>(
        &self,
        lines: &[S],
        search: &Search,
        machine: &Machine,
    ) -> Result<Vec<Vec<Translation>>> {
        let sources: Vec<Vec<u32>> = lines.iter().map(|line| self.tokenizer.encode(line.as_ref())).collect();
        let full: Vec<Vec<u32>> = sources.iter().filter(|source| !source.is_empty()).cloned().collect();
        let pool = Pool::new();
        let mut found = search.run(&self.model, &self.parameters, &pool, machine, &full)?.into_iter();
        let empty = Translation { text: String::new(), tokens: Vec::new(), score: 0.0, log_probability: 0.0 };
        Ok(sources
            .iter()
            .map(|source| match source.is_empty() {
                true => vec![empty.clone()],
                false => (found.next().into_iter().flatten())
                    .map(|found| {
                        let (text, tokens) = self.until(&search.stop, found.tokens);
                        Translation { text, tokens, score: found.score, log_probability: found.log_probability }
                    })
                    .collect(),
            })
            .collect())
    }

    /// Tokens as text, up to the first of the texts that end it.
    fn until(&self, stop: &[String], mut tokens: Vec<u32>) -> (String, Vec<u32>) {
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

    /// The loss of pairs that are given, without label smoothing: what a model that knows the words so far makes of each next
    /// one.
    ///
    /// # Errors
    /// Where a side is longer than the model takes.
    pub fn loss(&self, pairs: &[Pair], machine: &Machine, pool: &Pool<f32>) -> Result<Loss> {
        let encode = |pair: &Pair| (self.tokenizer.encode(&pair.source), self.tokenizer.encode(&pair.target));
        let pairs: Vec<(Vec<u32>, Vec<u32>)> = pairs.iter().map(encode).collect();
        let lengths: Vec<Lengths> = (pairs.iter())
            .map(|(source, target)| Lengths { source: source.len() + 1, target: target.len() + 1 })
            .collect();
        if let Some(at) = lengths.iter().position(|pair| !self.model.takes(pair.source, pair.target)) {
            let most = self.model.most() - 1;
            return Err(Error::invalid(format!("pair {} has a side of more than {most} tokens", at + 1)));
        }
        let batching = Batching { tokens: TOKENS, longest: usize::MAX };
        let mut loss = Loss::default();
        for batch in batching.sorted(&lengths) {
            let sides = batch.iter().map(|&at| (&pairs[at].0[..], &pairs[at].1[..]));
            let batch = Batch::new(sides, self.model.config().specials());
            let mut tape = Tape::inference(&self.parameters, pool, machine);
            loss += self.model.loss(&mut tape, &batch, 0.0, 1.0)?;
        }
        Ok(loss)
    }

    /// What a batch of sources looks like to the model.
    pub fn rows<S: AsRef<str>>(&self, lines: &[S]) -> Rows {
        let specials = self.model.config().specials();
        let rows: Vec<Vec<u32>> =
            lines.iter().map(|line| crate::batch::ended(&self.tokenizer.encode(line.as_ref()), specials.eos)).collect();
        Rows::new(&rows, specials.pad)
    }
}
