//! An encoder with its parameters and tokenizer: reading and writing its folder in the Hugging Face layout, and
//! sentence vectors.

use super::packed::Packed;
use super::{Bert, EncoderConfig, Head};
use crate::adapters;
use crate::checkpoint::{Blank, write_tokenizer};
use crate::files::folder::{CONFIG, TOKENIZER, WEIGHTS, read_json, read_json_if_present, write_json};
use crate::files::tensors::Storage;
use crate::files::weights::Weights;
use crate::layout::{self, Inspected, Layout, bert};
use crate::provenance::Provenance;
use crate::start::Start;
use crate::text::tokenizer::Tokenizer;
use crate::{Architecture, Error, Result, finite};
use qkv_nn::layers::Builder;
use qkv_nn::{Machine, Parameters, Pool, Tape};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

/// The fewest texts that are worth a task of their own when they are tokenized.
const MIN_TEXTS: usize = 16;

/// How the hidden states of a text are pooled into a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pooling {
    /// Whether to take the mean of all rows instead of the first row.
    pub mean: bool,
    /// Whether the vector is scaled to length 1.
    pub normalised: bool,
    /// Longer texts are truncated to this many tokens.
    pub longest: usize,
}

/// An encoder with its parameters and tokenizer.
#[derive(Debug)]
pub struct Encoder {
    /// Its configuration.
    pub config: EncoderConfig,
    /// Its parameters.
    pub parameters: Parameters<f32>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// How texts are pooled to vectors.
    pub pooling: Pooling,
    pub(crate) model: Bert,
}

/// The configuration in a `config.json`, BERT's or ours.
pub(crate) fn settings(json: &Value, path: &Path, weights: &Weights) -> Result<EncoderConfig> {
    if json.get("model_type").and_then(Value::as_str) != Some(bert::OWN) {
        return bert::config(json, path, weights);
    }
    let ours = json.get("encoder").cloned().unwrap_or_default();
    serde_json::from_value(ours).map_err(|e| Error::format(path, "field `encoder`", e.to_string()))
}

/// The layout of an encoder's tensors and its `config.json`.
fn written(config: &EncoderConfig, parameters: &Parameters<f32>) -> (Layout, Value) {
    match bert::fits(config) {
        true => (bert::layout(config), bert::json(config)),
        false => (Layout::own(parameters), json!({ "model_type": bert::OWN, "encoder": config })),
    }
}

/// Configuration and weights of a folder, and the model with zeroed parameters if it can be built.
fn found(folder: &Path) -> Result<(EncoderConfig, Weights, Result<Blank<Bert>>)> {
    let path = folder.join(CONFIG);
    let json: Value = read_json(&path)?;
    let weights = Weights::of_folder(folder)?;
    let config = settings(&json, &path, &weights)?;
    let built = || {
        if config.least() > weights.numbers() {
            let (least, there) = (config.least(), weights.numbers());
            let what = format!("the configuration asks for {least} numbers or more, the file has {there}");
            return Err(Error::format(&path, "settings", what));
        }
        let mut parameters = Parameters::new();
        let model = Bert::new(&mut Builder::blank(&mut parameters), &config).map_err(|e| e.in_file(&path))?;
        let (layout, _) = written(&config, &parameters);
        Ok((model, parameters, layout))
    };
    let built = built();
    Ok((config, weights, built))
}

/// Description, number of parameters, mismatches and weights of an encoder's folder.
pub(crate) fn inspect(folder: &Path) -> Result<Inspected> {
    let (config, weights, built) = found(folder)?;
    let EncoderConfig { layers, d_model, heads, ffn_dim, max_positions, vocab_size, .. } = config;
    let sizes = format!("{layers} layers, width {d_model}, {heads} heads, feed-forward {ffn_dim}");
    let name = if bert::fits(&config) { "bert" } else { bert::OWN };
    let words = format!("{name}: {sizes}, {max_positions} positions, vocabulary {vocab_size}");
    Ok(layout::inspected(words, built, weights))
}

impl Encoder {
    /// Reads a folder in the Hugging Face layout. Pooling is read from the files of `sentence-transformers`.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(folder, None)
    }

    /// The same with low-rank adapters in PEFT's format, and the head that was trained with them.
    ///
    /// # Errors
    /// As [`open`](Encoder::open).
    pub fn open_with(folder: impl AsRef<Path>, adapter: Option<&Path>) -> Result<Self> {
        let (folder, adapter) = adapters::resolve(folder.as_ref(), adapter)?;
        match adapter {
            Some(adapter) => Self::open_adapted(&folder, &adapter),
            None => Self::open_at(&folder),
        }
    }

    fn open_adapted(folder: &Path, adapter: &Path) -> Result<Self> {
        let own = adapter.join(CONFIG);
        let path = if own.exists() { own } else { folder.join(CONFIG) };
        let weights = Weights::of_folder(folder)?;
        let mut config = settings(&read_json(&path)?, &path, &weights)?;
        // `BertForSequenceClassification` always has a pooler.
        config.pooler |= config.head == Head::Classes && bert::fits(&EncoderConfig { pooler: true, ..config.clone() });
        let tokenizer = Tokenizer::open(folder.join(TOKENIZER))?;
        let mut parameters = Parameters::new();
        let model = Bert::new(&mut Builder::blank(&mut parameters), &config).map_err(|e| e.in_file(&path))?;
        let (layout, _) = written(&config, &parameters);
        let found = layout.fill_from(&mut parameters, &weights, |name| name.starts_with("head."), 0)?;
        let whole = adapters::read(adapter, &mut parameters, &layout)?;
        let missing = found.added.iter().find(|name| !whole.iter().any(|other| other.ends_with(&name[..])));
        if let Some(name) = missing {
            let what = format!("neither the model nor its adapters have the tensor `{name}`");
            return Err(Error::format(adapter, "adapters", what));
        }
        let pooling = pooling(folder, model.max_len())?;
        Ok(Encoder { config, parameters, tokenizer, pooling, model })
    }

    /// Merges the adapters into their matrices.
    pub fn merge(&mut self) {
        self.parameters.adapted().into_iter().for_each(|param| self.parameters.merge(param));
    }

    /// The names of its tensors in files.
    pub(crate) fn layout(&self) -> Layout {
        written(&self.config, &self.parameters).0
    }

    /// Writes configuration and tokenizer, without the tensors.
    pub(crate) fn save_settings(&self, folder: &Path) -> Result<()> {
        write_tokenizer(&self.tokenizer, None, folder)?;
        Ok(write_json(&folder.join(CONFIG), &written(&self.config, &self.parameters).1)?)
    }

    fn open_at(folder: &Path) -> Result<Self> {
        let (config, weights, built) = found(folder)?;
        let (model, mut parameters, layout) = built?;
        let tokenizer = Tokenizer::open(folder.join(TOKENIZER))?;
        if tokenizer.len() > config.vocab_size {
            let what = format!("the tokenizer has {} tokens, the model {}", tokenizer.len(), config.vocab_size);
            return Err(Error::format(folder.join(CONFIG), "field `vocab_size`", what));
        }
        layout.fill(&mut parameters, &weights)?;
        let pooling = pooling(folder, model.max_len())?;
        Ok(Encoder { config, parameters, tokenizer, pooling, model })
    }

    /// A new encoder with parameters drawn from the seed; vocabulary and padding are the tokenizer's.
    ///
    /// # Errors
    /// If sizes do not fit together.
    pub fn new(config: &EncoderConfig, tokenizer: Tokenizer, seed: u64) -> Result<Self> {
        let config = EncoderConfig { vocab_size: tokenizer.len(), pad_token_id: tokenizer.pad(), ..config.clone() };
        let mut parameters = Parameters::new();
        let model = Bert::new(&mut Builder::new(&mut parameters, seed), &config)?;
        let pooling = Pooling { mean: true, normalised: true, longest: model.max_len() };
        Ok(Encoder { config, parameters, tokenizer, pooling, model })
    }

    /// An encoder on the layers of a trained one, with a new head unless head and labels are the same.
    pub(crate) fn from_start(
        config: EncoderConfig,
        tokenizer: Tokenizer,
        start: &Start,
        seed: u64,
    ) -> Result<(Self, Provenance)> {
        let mut parameters = Parameters::new();
        let model = Bert::new(&mut Builder::new(&mut parameters, seed), &config)?;
        let (layout, _) = written(&config, &parameters);
        let same_head = matches!(&start.architecture, Architecture::Encoder(from)
            if from.head == config.head && from.labels == config.labels);
        let fresh = |name: &str| name.starts_with("head.") && !same_head;
        let found = layout.fill_from(&mut parameters, &start.weights, fresh, seed)?;
        let pooling = Pooling { mean: true, normalised: true, longest: model.max_len() };
        Ok((Encoder { config, parameters, tokenizer, pooling, model }, found))
    }

    /// Writes a folder that `transformers` reads.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        self.save_at(folder.as_ref(), storage)
    }

    fn save_at(&self, folder: &Path, storage: Storage) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(|e| Error::file("write", folder, e))?;
        let (layout, json) = written(&self.config, &self.parameters);
        layout.write(&folder.join(WEIGHTS), &self.parameters, storage)?;
        write_tokenizer(&self.tokenizer, None, folder)?;
        if self.config.head == Head::None {
            write_pooling(self.pooling, self.config.d_model, folder)?;
        }
        Ok(write_json(&folder.join(CONFIG), &json)?)
    }

    /// Tokens of one or two texts with special tokens, truncated to `longest` and to what the model accepts, and the
    /// segment of each token.
    pub fn tokens(&self, first: &str, second: Option<&str>, longest: usize) -> (Vec<u32>, Vec<u32>) {
        let (mut ids, mut segments) = self.tokenizer.encode_framed(first, second);
        let longest = longest.min(self.model.max_len()).max(1);
        if ids.len() > longest {
            // The last token, which ends the text, stays.
            let last = ids[ids.len() - 1];
            ids.truncate(longest);
            ids[longest - 1] = last;
            segments.truncate(longest);
        }
        if ids.is_empty() {
            (ids, segments) = (vec![self.config.pad_token_id], vec![0]);
        }
        segments.iter_mut().for_each(|segment| *segment = (*segment).min(self.config.segments as u32 - 1));
        (ids, segments)
    }

    /// Tokens and segments of texts, by all threads.
    pub(super) fn all_tokens<S: AsRef<str>>(&self, texts: &[S], longest: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
        let texts: Vec<&str> = texts.iter().map(AsRef::as_ref).collect();
        texts.into_par_iter().with_min_len(MIN_TEXTS).map(|text| self.tokens(text, None, longest)).collect()
    }

    /// Runs `body` on the parts of packed texts; results are returned in the order of the texts.
    fn in_parts<R: Send>(
        &self,
        texts: &[(Vec<u32>, Vec<u32>)],
        machine: &Machine,
        body: impl Fn(&mut Tape<'_, f32>, &Packed) -> Result<Vec<R>> + Sync,
    ) -> Result<Vec<R>> {
        // Runs inside the thread pool: a pass spawns dozens of jobs, and from outside each of them would wake a thread.
        rayon::scope(|_| {
            let (pool, mut found) = (Pool::new(), Vec::new());
            for part in Packed::parts(texts, machine) {
                let mut tape = Tape::inference(&self.parameters, &pool, machine);
                let results = body(&mut tape, &part)?;
                found.extend(part.order.into_iter().zip(results));
            }
            found.sort_by_key(|&(at, _)| at);
            Ok(found.into_iter().map(|(_, result)| result).collect())
        })
    }

    /// Embeds texts as vectors.
    ///
    /// # Errors
    /// If the model computes NaN.
    pub fn embed<S: AsRef<str>>(&self, texts: &[S], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        let Pooling { mean, normalised, longest } = self.pooling;
        let tokens = self.all_tokens(texts, longest);
        self.in_parts(&tokens, machine, |tape, texts| {
            let x = self.model.packed(tape, texts)?; // [1, T, C]
            finite::check(x.value().data(), &self.parameters)?;
            let width = x.value().width();
            let vector = |rows: &[f32]| {
                let mut vector = rows[..width].to_vec();
                if mean {
                    let count = (rows.len() / width) as f32;
                    let rest = rows[width..].chunks_exact(width);
                    rest.for_each(|row| vector.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
                    vector.iter_mut().for_each(|x| *x /= count);
                }
                let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
                let scale = if normalised { 1.0 / length.max(1e-12) } else { 1.0 };
                vector.iter_mut().for_each(|x| *x *= scale);
                vector
            };
            Ok(texts.rows(&x).into_iter().map(vector).collect())
        })
    }

    /// Logits of the head: a row per text, or rows per token.
    ///
    /// # Errors
    /// If there is no head.
    pub(crate) fn scores(&self, texts: &[(Vec<u32>, Vec<u32>)], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        self.in_parts(texts, machine, |tape, texts| {
            let Some(scores) = self.model.scores(tape, texts)? else {
                return Err(Error::invalid("the model has no head: it was not trained for this")
                    .with_hint("`qkv train` trains one from a recipe"));
            };
            finite::check(scores.value().data(), &self.parameters)?;
            Ok(match self.config.head {
                Head::Classes => {
                    scores.value().data().chunks_exact(scores.value().width()).map(<[f32]>::to_vec).collect()
                }
                _ => texts.rows(&scores).into_iter().map(<[f32]>::to_vec).collect(),
            })
        })
    }
}

/// Pooling as `sentence-transformers` stores it; by default the normalized mean.
fn pooling(folder: &Path, max_len: usize) -> Result<Pooling> {
    let read =
        |name: &str| -> Result<Value> { Ok(read_json_if_present::<Value>(&folder.join(name))?.unwrap_or_default()) };
    let how = read("1_Pooling/config.json")?;
    let first = how.get("pooling_mode_cls_token").and_then(Value::as_bool) == Some(true);
    let modules = read("modules.json")?;
    let normalised = modules.as_array().is_none_or(|modules| {
        let kind =
            |module: &Value| module.get("type").and_then(Value::as_str).is_some_and(|t| t.ends_with("Normalize"));
        modules.iter().any(kind)
    });
    let longest = read("sentence_bert_config.json")?.get("max_seq_length").and_then(Value::as_u64);
    let longest = longest.and_then(|x| usize::try_from(x).ok()).unwrap_or(max_len);
    Ok(Pooling { mean: !first, normalised, longest })
}

/// Writes the pooling as [`pooling`] reads it.
fn write_pooling(how: Pooling, width: usize, folder: &Path) -> Result<()> {
    let part = "1_Pooling";
    std::fs::create_dir_all(folder.join(part)).map_err(|e| Error::file("write", folder.join(part), e))?;
    let module = |at: usize, path: &str, kind: &str| {
        let kind = format!("sentence_transformers.models.{kind}");
        json!({ "idx": at, "name": at.to_string(), "path": path, "type": kind })
    };
    let mut modules = vec![module(0, "", "Transformer"), module(1, part, "Pooling")];
    if how.normalised {
        modules.push(module(2, "2_Normalize", "Normalize"));
    }
    for (name, value) in [
        (
            "1_Pooling/config.json",
            json!({
                "word_embedding_dimension": width,
                "pooling_mode_cls_token": !how.mean,
                "pooling_mode_mean_tokens": how.mean,
            }),
        ),
        ("modules.json", json!(modules)),
        ("sentence_bert_config.json", json!({ "max_seq_length": how.longest, "do_lower_case": false })),
    ] {
        write_json(&folder.join(name), &value)?;
    }
    Ok(())
}
