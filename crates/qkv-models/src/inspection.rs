//! Inspection of a checkpoint: its tensors with shapes and storage types, and where they do not fit the model that its
//! configuration describes.

use crate::architecture::Generative;
use crate::checkpoint::{ModelFiles, is_gguf};
use crate::files::folder::{CONFIG, WEIGHTS, WEIGHTS_INDEX};
use crate::files::tensors::TensorFile;
use crate::files::torch::TorchFile;
use crate::files::weights::Weights;
use crate::kind::kind;
use crate::layout::formulas::FormulaReader;
use crate::{Architecture, Error, Result, describe, detect, encoder, han, vit, voice, vqa};
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// The contents of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// Its path.
    pub path: String,
    /// The model that its configuration describes, in words.
    pub model: Option<String>,
    /// Its tensors, in alphabetical order.
    pub tensors: Vec<TensorSummary>,
    /// Number of values in all tensors.
    pub numbers: usize,
    /// Number of parameters of the model.
    pub parameters: Option<usize>,
    /// Tensors that do not fit the model, in words.
    pub misfits: Vec<String>,
}

/// Name, shape and storage type of a tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorSummary {
    /// Its name.
    pub name: String,
    /// Its shape, row-major.
    pub shape: Vec<usize>,
    /// Its storage type.
    pub storage: String,
}

impl Inspection {
    /// Inspects a model's folder, or a `.safetensors`, `.gguf`, `.pt` or `.pth` file. Mismatches are listed; a file
    /// that cannot be read is an error.
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn of(path: impl AsRef<Path>) -> Result<Inspection> {
        Self::of_at(path.as_ref())
    }

    fn of_at(path: &Path) -> Result<Inspection> {
        if path.is_file() && !is_gguf(path) {
            let torch = path.extension().is_some_and(|end| end == "pt" || end == "pth");
            let weights = match torch {
                true => Weights::Torch(TorchFile::open(path)?),
                false => Weights::File(TensorFile::open(path)?),
            };
            return Ok(Inspection::listed(path, &weights));
        }
        if path.is_dir() && !path.join(CONFIG).exists() && FormulaReader::of(path).is_none() {
            if !path.join(WEIGHTS).exists() && !path.join(WEIGHTS_INDEX).exists() {
                return Err(Error::invalid(format!("`{}` holds no checkpoint", path.display()))
                    .with_hint("a model is a folder with `config.json` and `model.safetensors`"));
            }
            let mut found = Inspection::listed(path, &Weights::of_folder(path)?);
            found.misfits.push(format!("`{CONFIG}` is missing"));
            return Ok(found);
        }
        let inspected = match path.is_dir().then(|| kind(path)).transpose()?.as_deref() {
            Some("encoder") => Some(encoder::inspect(path)?),
            Some("han") => Some(han::inspect(path)?),
            Some("detect") => Some(detect::inspect(path)?),
            Some("voice") => Some(voice::inspect(path)?),
            Some("vqa") => Some(vqa::inspect(path)?),
            Some("describe") => Some(describe::inspect(path)?),
            Some("vit") => Some(vit::inspect(path)?),
            _ => None,
        };
        if let Some((words, parameters, misfits, weights)) = inspected {
            return Ok(Inspection { model: Some(words), parameters, misfits, ..Inspection::listed(path, &weights) });
        }
        let found = ModelFiles::open(path)?;
        let listed = Inspection::listed(path, &found.weights);
        let model = Some(describe(&found.config.architecture, found.config.vocab_size));
        Ok(match found.build(path) {
            Ok((_, parameters, layout)) => {
                let misfits = layout.misfits(&parameters, &found.weights);
                Inspection { model, parameters: Some(parameters.count()), misfits, ..listed }
            }
            Err(error) => Inspection { model, misfits: vec![error.to_string()], ..listed },
        })
    }

    fn listed(path: &Path, weights: &Weights) -> Inspection {
        let tensors = weights.names().into_iter().map(|name| TensorSummary {
            name: name.to_owned(),
            shape: weights.shape(name).unwrap_or_default().to_vec(),
            storage: weights.storage(name).unwrap_or_default(),
        });
        Inspection {
            path: path.display().to_string(),
            model: None,
            tensors: tensors.collect(),
            numbers: weights.numbers(),
            parameters: None,
            misfits: Vec::new(),
        }
    }
}

/// The sizes of an architecture, in words.
fn describe(architecture: &Architecture, vocabulary: usize) -> String {
    let heads = |query: usize, key: usize| {
        if query == key { format!("{query} heads") } else { format!("{query} query heads, {key} key heads") }
    };
    let sizes = match architecture.generative() {
        Ok(Generative::Gpt(c)) => format!(
            "{} layers, width {}, {}, feed-forward {}, {} positions",
            c.layers,
            c.d_model,
            heads(c.heads, c.key_heads()),
            c.ffn_dim,
            c.max_positions
        ),
        Ok(Generative::Transformer(c)) => format!(
            "{} + {} layers, width {}, {}, feed-forward {}",
            c.encoder_layers,
            c.decoder_layers,
            c.d_model,
            heads(c.heads, c.key_heads.unwrap_or(c.heads)),
            c.ffn_dim
        ),
        Ok(Generative::Recurrent(c)) => format!("{} layers, width {}, states of {}", c.layers, c.d_model, c.hidden),
        Err(_) => "it generates no text".into(),
    };
    format!("{}: {sizes}, vocabulary {vocabulary}", architecture.name())
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "path     {}", self.path)?;
        if let Some(model) = &self.model {
            writeln!(f, "model    {model}")?;
        }
        writeln!(f, "tensors  {} with {} numbers\n", self.tensors.len(), self.numbers)?;
        let wide = |text: fn(&TensorSummary) -> String| self.tensors.iter().map(|t| text(t).len()).max().unwrap_or(0);
        let shape = |listed: &TensorSummary| format!("{:?}", listed.shape);
        let (name, axes) = (wide(|listed| listed.name.clone()), wide(shape));
        for listed in &self.tensors {
            writeln!(f, "  {:name$}  {:axes$}  {}", listed.name, shape(listed), listed.storage)?;
        }
        match self.parameters {
            Some(count) => writeln!(f, "\nparameters  {count}")?,
            None => writeln!(f)?,
        }
        match (&self.misfits[..], &self.model) {
            ([], Some(_)) => writeln!(f, "fits        everything has its place"),
            ([], None) => Ok(()),
            (misfits, _) => misfits.iter().try_for_each(|misfit| writeln!(f, "does not fit: {misfit}")),
        }
    }
}
