//! Checkpoint layouts of other programs: names and shapes of the tensors of GPT-2, Llama, Qwen2, Gemma 3, BERT and ViT
//! in the Hugging Face layout, and of decoders in GGUF. A layout is a table that serves for reading and for writing:
//! each foreign tensor is one of our parameters or several of them stacked, possibly transposed or with the rows of its
//! heads permuted.
//!
//! | module | owns |
//! | --- | --- |
//! | `config` | fields of a foreign `config.json`, with errors that name them |
//! | `gpt2`, `llama` (and Qwen2), `gemma`, `bert`, `vit`, `latex_ocr`, `pix2tex` | table and configuration of each |
//! | `gguf` | tables and configurations of decoders in GGUF |
//! | `formulas` | whether a folder is of `latex_ocr` or `pix2tex` |

pub(crate) mod bert;
pub(crate) mod config;
pub(crate) mod formulas;
pub(crate) mod gemma;
pub(crate) mod gguf;
pub(crate) mod gpt2;
mod latex_ocr;
pub(crate) mod llama;
mod pix2tex;
pub(crate) mod vit;

use crate::files::tensors::{self, NamedTensor, Storage};
use crate::files::weights::Weights;
use crate::{Architecture, Error, ModelConfig, Result};
use qkv_formats::numbers::{self, transposed};
use qkv_nn::{HalfMatrix, Param, Parameters};
use qkv_simd::panels::PackedMatrix;
use qkv_simd::quantized::QuantizedMatrix;
use rayon::prelude::*;
use serde_json::Value;
use std::borrow::Cow;
use std::path::Path;

/// A tensor's shape and its values, borrowed from the parameter if they are the same.
pub(crate) type ShapedValues<'p> = (Vec<usize>, Cow<'p, [f32]>);

/// How a foreign tensor is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Like ours, `[outputs, inputs]`.
    Plain,
    /// `[inputs, outputs]`.
    Transposed,
    /// Rows of this many heads permuted: the two rows that rotary positions rotate together are adjacent.
    Paired(usize),
    /// The gain of a norm, minus 1.
    LessOne,
    /// The same values with these axes; leading zeros are not axes.
    Axes([usize; 4]),
    /// A 2D convolution, `[outputs, inputs, height, width]`; ours has channels last.
    Kernels([usize; 4]),
}

/// A foreign tensor and the parameters that are stacked in it.
#[derive(Clone, Debug)]
pub(crate) struct Mapped {
    pub name: String,
    pub parts: Vec<String>,
    pub form: Form,
}

impl Mapped {
    pub fn plain(name: impl Into<String>, part: impl Into<String>) -> Mapped {
        Mapped { name: name.into(), parts: vec![part.into()], form: Form::Plain }
    }
}

/// A table of tensors.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Prefix of all names.
    pub prefix: &'static str,
    pub tensors: Vec<Mapped>,
    /// Suffixes, or prefixes after a `^`, of tensors that are not parameters: masks, tied copies, other heads.
    pub ignored: &'static [&'static str],
}

/// Whose configuration format and tensor names a model's folder follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// Ours.
    Own,
    /// `GPT2LMHeadModel`.
    Gpt2,
    /// `LlamaForCausalLM`.
    Llama,
    /// `Qwen2ForCausalLM`.
    Qwen2,
    /// `Gemma3ForCausalLM`.
    Gemma3,
}

impl Dialect {
    /// The dialect that can describe a model completely.
    pub fn of(config: &ModelConfig) -> Dialect {
        match &config.architecture {
            Architecture::Gpt(sizes) if gpt2::fits(sizes) => Dialect::Gpt2,
            Architecture::Gpt(sizes) if llama::fits(sizes) => Dialect::Llama,
            Architecture::Gpt(sizes) if llama::fits_qwen2(sizes) => Dialect::Qwen2,
            Architecture::Gpt(sizes) if gemma::fits(sizes) => Dialect::Gemma3,
            _ => Dialect::Own,
        }
    }

    /// Parses the `config.json` of a model that generates text.
    pub(crate) fn read(bytes: &[u8], path: &Path) -> Result<(ModelConfig, Dialect)> {
        let wrong = |e: serde_json::Error| Error::line(path, e.line().max(1), e.to_string());
        let json: Value = serde_json::from_slice(bytes).map_err(wrong)?;
        match json.get("model_type").and_then(Value::as_str) {
            Some("gpt2") => Ok((gpt2::config(&json, path)?, Dialect::Gpt2)),
            Some("llama") => Ok((llama::config(&json, path)?, Dialect::Llama)),
            Some("qwen2") => Ok((llama::config(&json, path)?, Dialect::Qwen2)),
            Some("gemma3_text") => Ok((gemma::config(&json, path)?, Dialect::Gemma3)),
            Some(kind @ ("bert" | bert::OWN | "vit" | vit::WITH_STEM)) => {
                Err(Error::format(path, "field `model_type`", format!("a `{kind}` makes no text")))
            }
            Some("qkv") | None => Ok((serde_json::from_slice(bytes).map_err(wrong)?, Dialect::Own)),
            Some(other) => {
                let what = format!(
                    "it is `{other}`, expected `gpt2`, `llama`, `qwen2`, `gemma3_text`, `bert`, `vit` or `qkv`"
                );
                Err(Error::format(path, "field `model_type`", what))
            }
        }
    }

    /// The `config.json` of a model.
    pub(crate) fn write(self, config: &ModelConfig) -> Value {
        match (&config.architecture, self) {
            (Architecture::Gpt(sizes), Dialect::Gpt2) => gpt2::json(config, sizes),
            (Architecture::Gpt(sizes), Dialect::Llama | Dialect::Qwen2) => llama::json(config, sizes),
            (Architecture::Gpt(sizes), Dialect::Gemma3) => gemma::json(config, sizes),
            _ => serde_json::to_value(config).expect("plain values"),
        }
    }

    /// The table of a model; `None` if names are our own.
    pub(crate) fn layout(self, config: &ModelConfig) -> Option<Layout> {
        match (&config.architecture, self) {
            (Architecture::Gpt(sizes), Dialect::Gpt2) => Some(gpt2::layout(sizes)),
            (Architecture::Gpt(sizes), Dialect::Llama | Dialect::Qwen2) => Some(llama::layout(sizes)),
            (Architecture::Gpt(sizes), Dialect::Gemma3) => Some(gemma::layout(sizes)),
            _ => None,
        }
    }
}

impl Layout {
    /// The layout in which parameters keep their names.
    pub fn own(parameters: &Parameters<f32>) -> Layout {
        let tensors = parameters.all().filter(|&param| !parameters.is_of_adapter(param)).map(|param| {
            let name = parameters.name(param);
            Mapped::plain(name, name)
        });
        Layout { prefix: "", tensors: tensors.collect(), ignored: &[] }
    }

    /// The prefix in these weights: checkpoints with and without a head differ.
    pub(crate) fn prefix_in(&self, weights: &Weights) -> &'static str {
        let Some(first) = self.tensors.first() else { return "" };
        let found = |prefix: &&&str| weights.has(&format!("{prefix}{}", first.name));
        ["", "transformer.", "model.", "bert.", "vit."].iter().find(found).copied().unwrap_or(self.prefix)
    }

    /// The full name of a tensor; heads have no prefix.
    pub(crate) fn full(prefix: &str, name: &str) -> String {
        let head = ["lm_head.", "classifier.", "qa_outputs.", "cls."].iter().any(|head| name.starts_with(head));
        if head { name.to_owned() } else { format!("{prefix}{name}") }
    }

    /// Fills all parameters; the shapes must match. A tensor that is not in the table is an error.
    pub fn fill(&self, parameters: &mut Parameters<f32>, weights: &Weights) -> Result<()> {
        let prefix = self.prefix_in(weights);
        let name = |mapped: &Mapped| Layout::full(prefix, &mapped.name);
        // All threads pack tensors in parallel: there may be billions of numbers.
        let quantized = |mapped: &Mapped| self.quantized(parameters, weights, mapped, &name(mapped));
        let quantized: Vec<_> = self.tensors.par_iter().map(quantized).collect();
        for (mapped, quantized) in self.tensors.iter().zip(quantized) {
            match quantized? {
                Some((param, quantized)) => parameters.set_quantized(param, quantized),
                None => self.fill_plain(parameters, weights, mapped, &name(mapped))?,
            }
        }
        match self.strangers(weights).first() {
            Some(name) => Err(weights.wrong(name, "the model has no such parameter").into()),
            None => Ok(()),
        }
    }

    /// Fills the parameters of one tensor, which has this name in the file.
    pub(crate) fn fill_one(
        &self,
        parameters: &mut Parameters<f32>,
        weights: &Weights,
        mapped: &Mapped,
        name: &str,
    ) -> Result<()> {
        match self.quantized(parameters, weights, mapped, name)? {
            Some((param, quantized)) => parameters.set_quantized(param, quantized),
            None => self.fill_plain(parameters, weights, mapped, name)?,
        }
        Ok(())
    }

    /// The matrix of a tensor in its quantized blocks, which decoding reads; `None` if it is not stored in such blocks.
    fn quantized(
        &self,
        parameters: &Parameters<f32>,
        weights: &Weights,
        mapped: &Mapped,
        name: &str,
    ) -> Result<Option<(Param, QuantizedMatrix)>> {
        let parts = self.parts(parameters, mapped)?;
        let (shape, rows, _) = shape_of(parameters, &parts, mapped.form);
        let &[param] = &parts[..] else { return Ok(None) };
        // Another shape becomes an error when values are read.
        if weights.shape(name) != Some(&shape[..]) {
            return Ok(None);
        }
        let quantized = match mapped.form {
            Form::Plain => weights.quantized(name, |row| row),
            Form::Paired(heads) => weights.quantized(name, unpaired_row(rows, heads)),
            _ => None,
        };
        Ok(quantized.map(|quantized| (param, quantized)))
    }

    /// Fills the parameters of a tensor with its values.
    fn fill_plain(
        &self,
        parameters: &mut Parameters<f32>,
        weights: &Weights,
        mapped: &Mapped,
        name: &str,
    ) -> Result<()> {
        self.fill_values(parameters, mapped, |shape| Ok(weights.read_shaped(name, shape)?))?;
        let parts = self.parts(parameters, mapped)?;
        let storage = weights.storage(name);
        for &part in &parts {
            let (values, &[_, width]) = (parameters.get(part), parameters.shape(part)) else { continue };
            // Values that a file stores in 16 bits lose nothing when they are kept in 16 bits.
            let half = match storage.as_deref() {
                Some("BF16") => HalfMatrix::Bf16(PackedMatrix::new(&numbers::to_bf16(values), width)),
                Some("F16") => HalfMatrix::F16(PackedMatrix::new(&numbers::to_f16(values), width)),
                _ => continue,
            };
            parameters.set_half(part, half);
        }
        Ok(())
    }

    /// Fills the parameters of one tensor from values of the shape that it has in files.
    pub(crate) fn fill_values(
        &self,
        parameters: &mut Parameters<f32>,
        mapped: &Mapped,
        read: impl FnOnce(&[usize]) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let parts = self.parts(parameters, mapped)?;
        let (shape, rows, width) = shape_of(parameters, &parts, mapped.form);
        let mut values = read(&shape)?;
        match mapped.form {
            Form::Plain | Form::Axes(_) => {}
            Form::LessOne => numbers::add_to_each(&mut values, 1.0),
            Form::Transposed => values = transposed(&values, width, rows),
            Form::Kernels([_, inputs, high, wide]) => values = transposed(&values, inputs, high * wide),
            Form::Paired(heads) => values = unpaired(&values, rows, width, heads),
        }
        if let [one] = parts[..] {
            parameters.set(one, values);
            return Ok(());
        }
        let mut rest = &values[..];
        for &part in &parts {
            let to = parameters.get_mut(part);
            let (now, later) = rest.split_at(to.len());
            to.copy_from_slice(now);
            rest = later;
        }
        Ok(())
    }

    /// Shape and values of one tensor as in files.
    pub(crate) fn tensor<'p>(&self, parameters: &'p Parameters<f32>, mapped: &Mapped) -> Result<ShapedValues<'p>> {
        let parts = self.parts(parameters, mapped)?;
        let (shape, rows, width) = shape_of(parameters, &parts, mapped.form);
        let values: Cow<'p, [f32]> = match parts[..] {
            [one] => parameters.values(one),
            _ => parts.iter().map(|&part| parameters.values(part)).collect::<Vec<_>>().concat().into(),
        };
        Ok(match mapped.form {
            Form::Transposed => (shape, transposed(&values, rows, width).into()),
            Form::Kernels([_, inputs, high, wide]) => (shape, transposed(&values, high * wide, inputs).into()),
            Form::LessOne => {
                let mut values = values.into_owned();
                numbers::add_to_each(&mut values, -1.0);
                (shape, values.into())
            }
            _ => (shape, values),
        })
    }

    /// Tensors that are not in the table.
    pub fn strangers<'w>(&self, weights: &'w Weights) -> Vec<&'w str> {
        let prefix = self.prefix_in(weights);
        let known: std::collections::HashSet<String> =
            self.tensors.iter().map(|mapped| Layout::full(prefix, &mapped.name)).collect();
        let ignored = |name: &str| {
            self.ignored.iter().any(|part| match part.strip_prefix('^') {
                Some(start) => name.starts_with(start),
                None => name.ends_with(part),
            })
        };
        weights.names().into_iter().filter(|name| !known.contains(*name) && !ignored(name)).collect()
    }

    /// Tensors that are missing, have another shape, or are not in the table, in words.
    pub fn misfits(&self, parameters: &Parameters<f32>, weights: &Weights) -> Vec<String> {
        let prefix = self.prefix_in(weights);
        let misfit = |mapped: &Mapped| {
            let name = Layout::full(prefix, &mapped.name);
            let parts = self.parts(parameters, mapped).ok()?;
            let (expected, ..) = shape_of(parameters, &parts, mapped.form);
            match weights.shape(&name) {
                None => Some(format!("tensor `{name}` is missing, expected {expected:?}")),
                Some(found) if found != expected => {
                    Some(format!("tensor `{name}` has shape {found:?}, expected {expected:?}"))
                }
                Some(_) => None,
            }
        };
        let strangers = self.strangers(weights);
        let missing = self.tensors.iter().filter_map(misfit);
        missing.chain(strangers.iter().map(|name| format!("tensor `{name}` has no place in the model"))).collect()
    }

    pub(crate) fn parts(&self, parameters: &Parameters<f32>, mapped: &Mapped) -> Result<Vec<Param>> {
        let find = |part: &String| {
            let missing = || Error::invalid(format!("the model has no parameter `{part}` for `{}`", mapped.name));
            parameters.find(part).ok_or_else(missing)
        };
        mapped.parts.iter().map(find).collect()
    }

    /// Writes a file with all parameters in this layout.
    pub fn write(&self, path: &Path, parameters: &Parameters<f32>, storage: Storage) -> Result<()> {
        let mut found = Vec::with_capacity(self.tensors.len());
        for mapped in &self.tensors {
            let (shape, values) = self.tensor(parameters, mapped)?;
            found.push((Layout::full(self.prefix, &mapped.name), shape, values));
        }
        let named: Vec<NamedTensor<'_>> =
            found.iter().map(|(name, shape, values)| NamedTensor { name, shape, values }).collect();
        Ok(tensors::write(path, &named, storage)?)
    }
}

/// Shape of a foreign tensor, and rows and width of ours.
fn shape_of(parameters: &Parameters<f32>, parts: &[Param], form: Form) -> (Vec<usize>, usize, usize) {
    let rows = parts.iter().map(|&part| parameters.shape(part)[0]).sum();
    match (parameters.shape(parts[0]), form) {
        (_, Form::Kernels(axes)) => (axes.to_vec(), rows, 1),
        (_, Form::Axes(axes)) => (axes.into_iter().filter(|&axis| axis > 0).collect(), rows, 1),
        (&[_, width], Form::Transposed) => (vec![width, rows], rows, width),
        (&[_, width], _) => (vec![rows, width], rows, width),
        _ => (vec![rows], rows, 1),
    }
}

/// Moves rows `(2i, 2i + 1)` of each head to `(i, i + D/2)`.
fn unpaired(values: &[f32], rows: usize, width: usize, heads: usize) -> Vec<f32> {
    let from = unpaired_row(rows, heads);
    let mut found = Vec::with_capacity(values.len());
    (0..rows).for_each(|row| found.extend_from_slice(&values[from(row) * width..][..width]));
    found
}

/// The foreign row of one of our rows.
fn unpaired_row(rows: usize, heads: usize) -> impl Fn(usize) -> usize {
    let each = rows / heads.max(1);
    move |row| {
        let (head, at) = (row / each * each, row % each);
        head + at % (each / 2) * 2 + at / (each / 2)
    }
}

/// The contents of a model's folder: a description, the number of parameters if the model can be built, mismatches, and
/// the weights.
pub(crate) type Inspected = (String, Option<usize>, Vec<String>, Weights);

/// The same, from the result of building the model from its settings.
pub(crate) fn inspected<N>(words: String, built: Result<(N, Parameters<f32>, Layout)>, weights: Weights) -> Inspected {
    match built {
        Ok((_, parameters, layout)) => {
            (words, Some(parameters.count()), layout.misfits(&parameters, &weights), weights)
        }
        Err(error) => (words, None, vec![error.to_string()], weights),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_become_halves() {
        assert_eq!(
            unpaired(&[0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0], 8, 1, 2),
            [0.0, 2.0, 1.0, 3.0, 10.0, 12.0, 11.0, 13.0]
        );
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, 3), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
