//! An encoder with its numbers and its tokenizer: a folder that is read and written in the Hugging Face layout, and what can be
//! asked of it.

use super::{Bert, EncoderConfig, Head};
use crate::batch::Rows;
use crate::checkpoint::{CONFIG, TOKENIZER, bytes, write_tokenizer};
use crate::files::atomic;
use crate::files::tensors::Storage;
use crate::files::weights::{SINGLE, Weights};
use crate::layout::{Layout, bert};
use crate::text::tokenizer::Tokenizer;
use crate::{Error, Result};
use qkv_nn::layers::Builder;
use qkv_nn::{Machine, Parameters, Pool, Tape};
use serde_json::Value;
use std::path::Path;

/// Tokens that go through the model together: enough to fill the machine without filling its caches.
const TOKENS: usize = 2048;

/// How the rows of a text become one vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pooling {
    /// The mean of all rows, or else the first.
    pub mean: bool,
    /// Whether the vector is brought to length 1.
    pub normalised: bool,
    /// Longer texts are cut.
    pub longest: usize,
}

/// An encoder that reads.
#[derive(Debug)]
pub struct Encoder {
    /// What it was made from.
    pub config: EncoderConfig,
    /// Its numbers.
    pub parameters: Parameters<f32>,
    /// How text is cut.
    pub tokenizer: Tokenizer,
    /// How a text becomes a vector.
    pub pooling: Pooling,
    pub(crate) model: Bert,
}

/// A model of zeros, and the table that fills it.
type Blank = (Bert, Parameters<f32>, Layout);

/// The settings, the weights, and a model of zeros with the table that fills it.
fn found(folder: &Path) -> Result<(EncoderConfig, Weights, Result<Blank>)> {
    let path = folder.join(CONFIG);
    let json: Value = serde_json::from_slice(&bytes(folder, CONFIG)?)
        .map_err(|e| Error::line(&path, e.line().max(1), e.to_string()))?;
    let weights = Weights::of_folder(folder)?;
    let config = bert::config(&json, &path, &weights)?;
    let wrong = |error: Error| match error {
        Error::Invalid { .. } | Error::Attention(_) => Error::format(&path, "settings", error.to_string()),
        error => error,
    };
    let built = || {
        if config.least() > weights.numbers() {
            let (least, there) = (config.least(), weights.numbers());
            let what = format!("the configuration asks for {least} numbers or more, the file has {there}");
            return Err(Error::format(&path, "settings", what));
        }
        let mut parameters = Parameters::new();
        let model = Bert::new(&mut Builder::blank(&mut parameters), &config).map_err(wrong)?;
        let layout = bert::layout(&config);
        Ok((model, parameters, layout))
    };
    let built = built();
    Ok((config, weights, built))
}

/// What is told of an encoder's folder: in words, how many parameters, what does not fit, and the tensors.
pub(crate) fn looked_at(folder: &Path) -> Result<(String, Option<usize>, Vec<String>, Weights)> {
    let (config, weights, built) = found(folder)?;
    let EncoderConfig { layers, d_model, heads, ffn_dim, max_positions, vocab_size, .. } = config;
    let sizes = format!("{layers} layers, width {d_model}, {heads} heads, feed-forward {ffn_dim}");
    let words = format!("bert: {sizes}, {max_positions} positions, vocabulary {vocab_size}");
    Ok(match built {
        Ok((_, parameters, layout)) => {
            (words, Some(parameters.count()), layout.misfits(&parameters, &weights), weights)
        }
        Err(error) => (words, None, vec![error.to_string()], weights),
    })
}

impl Encoder {
    /// From a folder in the Hugging Face layout; how sentences become vectors is read as `sentence-transformers` writes it.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        Self::open_at(folder.as_ref())
    }

    /// `open` for the one type of path: compiled here, once, and not again by every caller.
    fn open_at(folder: &Path) -> Result<Self> {
        let (config, weights, built) = found(folder)?;
        let (model, mut parameters, layout) = built?;
        let tokenizer = Tokenizer::open(folder.join(TOKENIZER))?;
        if tokenizer.len() > config.vocab_size {
            let what = format!("the tokenizer has {} tokens, the model {}", tokenizer.len(), config.vocab_size);
            return Err(Error::format(folder.join(CONFIG), "field `vocab_size`", what));
        }
        layout.fill(&mut parameters, &weights)?;
        let pooling = pooling(folder, model.most())?;
        Ok(Encoder { config, parameters, tokenizer, pooling, model })
    }

    /// A new one, its numbers drawn from the seed; `config` gets the vocabulary of the tokenizer.
    ///
    /// # Errors
    /// Where sizes and choices do not fit.
    pub fn new(config: &EncoderConfig, tokenizer: Tokenizer, seed: u64) -> Result<Self> {
        let config = EncoderConfig { vocab_size: tokenizer.len(), pad_token_id: tokenizer.pad(), ..config.clone() };
        let mut parameters = Parameters::new();
        let model = Bert::new(&mut Builder::new(&mut parameters, seed), &config)?;
        let pooling = Pooling { mean: true, normalised: true, longest: model.most() };
        Ok(Encoder { config, parameters, tokenizer, pooling, model })
    }

    /// Writes a folder that `transformers` reads.
    ///
    /// # Errors
    /// Where the system refuses.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        self.save_at(folder.as_ref(), storage)
    }

    /// `save` for the one type of path: compiled here, once, and not again by every caller.
    fn save_at(&self, folder: &Path, storage: Storage) -> Result<()> {
        std::fs::create_dir_all(folder).map_err(|e| Error::file("write", folder, e))?;
        atomic::write(folder.join(SINGLE), &bert::layout(&self.config).bytes(&self.parameters, storage)?)?;
        write_tokenizer(&self.tokenizer, None, folder)?;
        let json = serde_json::to_string_pretty(&bert::json(&self.config)).expect("plain values") + "\n";
        atomic::write(folder.join(CONFIG), json.as_bytes())
    }

    /// The tokens of a text, or of two, with the special ones around them, cut to what the model takes, and which text each is
    /// of.
    pub fn tokens(&self, first: &str, second: Option<&str>, longest: usize) -> (Vec<u32>, Vec<u32>) {
        let (mut ids, mut segments) = self.tokenizer.encode_framed(first, second);
        let longest = longest.min(self.model.most()).max(1);
        if ids.len() > longest {
            // The last token ends the text, and stays.
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

    /// Runs `body` on texts in batches of about one length; what it gives for each comes back in the order of the texts.
    pub(crate) fn in_batches<R: Send>(
        &self,
        texts: &[(Vec<u32>, Vec<u32>)],
        machine: &Machine,
        body: impl Fn(&mut Tape<'_, f32>, &Rows, &[u32]) -> Result<Vec<R>> + Sync,
    ) -> Result<Vec<R>> {
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|&at| (texts[at].0.len(), at));
        let (pool, mut found, mut rest) = (Pool::new(), Vec::new(), &order[..]);
        while !rest.is_empty() {
            let mut take = 1;
            while take < rest.len() && texts[rest[take]].0.len() * (take + 1) <= TOKENS {
                take += 1;
            }
            let (now, later) = rest.split_at(take);
            rest = later;
            let ids: Vec<Vec<u32>> = now.iter().map(|&at| texts[at].0.clone()).collect();
            let segments: Vec<Vec<u32>> = now.iter().map(|&at| texts[at].1.clone()).collect();
            let rows = Rows::new(&ids, self.config.pad_token_id);
            let mut tape = Tape::inference(&self.parameters, &pool, machine);
            found.extend(now.iter().copied().zip(body(&mut tape, &rows, &Rows::new(&segments, 0).ids)?));
        }
        found.sort_by_key(|&(at, _)| at);
        Ok(found.into_iter().map(|(_, result)| result).collect())
    }

    /// Each text as a vector.
    ///
    /// # Errors
    /// What `qkv` refuses.
    pub fn embed<S: AsRef<str>>(&self, texts: &[S], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        let Pooling { mean, normalised, longest } = self.pooling;
        let tokens: Vec<_> = texts.iter().map(|text| self.tokens(text.as_ref(), None, longest)).collect();
        rayon::scope(|_| {
            self.in_batches(&tokens, machine, |tape, rows, segments| {
                let x = self.model.forward(tape, rows, segments)?;
                let x = if mean { tape.mean(&x, rows.ragged()) } else { tape.step(&x, 0) }; // (B, 1, C)
                let width = x.value().width();
                Ok((x.value().data().chunks_exact(width))
                    .map(|row| {
                        let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
                        let scale = if normalised { 1.0 / length.max(1e-12) } else { 1.0 };
                        row.iter().map(|x| x * scale).collect()
                    })
                    .collect())
            })
        })
    }

    /// What the head gives: for each text a row of scores, or one for each token.
    ///
    /// # Errors
    /// Where there is no head.
    pub(crate) fn scores(&self, texts: &[(Vec<u32>, Vec<u32>)], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        let Some(head) = self.model.head() else {
            return Err(Error::invalid("the model has no head: it was not trained for this")
                .with_hint("`qkv train` trains one from a recipe"));
        };
        rayon::scope(|_| {
            self.in_batches(texts, machine, |tape, rows, segments| {
                let x = self.model.looked_at(tape, rows, segments)?;
                let scores = head.forward(tape, &x); // (B, 1 or N, K)
                let (each, classes) = (scores.shape()[1], scores.value().width());
                Ok((0..rows.len())
                    .map(|b| {
                        let count = if self.config.head == Head::Classes { 1 } else { rows.lengths[b] };
                        scores.value().data()[b * each * classes..][..count * classes].to_vec()
                    })
                    .collect())
            })
        })
    }
}

/// How `sentence-transformers` makes a vector of a text, where the folder says so; else the mean, brought to length 1.
fn pooling(folder: &Path, most: usize) -> Result<Pooling> {
    let read = |name: &str| -> Result<Value> {
        let path = folder.join(name);
        if !path.exists() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&bytes(folder, name)?).map_err(|e| Error::line(&path, e.line().max(1), e.to_string()))
    };
    let how = read("1_Pooling/config.json")?;
    let first = how.get("pooling_mode_cls_token").and_then(Value::as_bool) == Some(true);
    let modules = read("modules.json")?;
    let normalised = modules.as_array().is_none_or(|modules| {
        let kind =
            |module: &Value| module.get("type").and_then(Value::as_str).is_some_and(|t| t.ends_with("Normalize"));
        modules.iter().any(kind)
    });
    let longest = read("sentence_bert_config.json")?.get("max_seq_length").and_then(Value::as_u64);
    let longest = longest.and_then(|x| usize::try_from(x).ok()).unwrap_or(most);
    Ok(Pooling { mean: !first, normalised, longest })
}
