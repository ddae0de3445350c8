//! The table `[model]` of a recipe: the kind and sizes of a new model, or `from`, a trained model to start from.

use crate::architecture::Architecture;
use crate::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::path::PathBuf;

/// The model of a recipe.
#[derive(Clone, Debug, PartialEq)]
// There is one per process and much code reads it; a box would only be in the way.
#[allow(clippy::large_enum_variant)]
pub enum ModelSource {
    /// A new one, with weights initialized from the seed.
    New(Architecture),
    /// A trained one: fine-tuning.
    From(Pretrained),
}

/// A trained model that a run starts from. Kind, sizes and tokenizer are the model's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pretrained {
    /// A folder in the Hugging Face layout, written by qkv or by others, or a GGUF file.
    pub from: PathBuf,
    /// Dropout, if not the model's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// Dropout of attention weights, if not the model's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_dropout: Option<f64>,
    /// Whether an encoder classifies through BERT's pooler, if not as the model does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pooler: Option<bool>,
}

impl ModelSource {
    /// The kind of a new model; `from` otherwise.
    pub fn name(&self) -> &'static str {
        match self {
            ModelSource::New(architecture) => architecture.name(),
            ModelSource::From(_) => "from",
        }
    }

    /// The trained model to start from, if any.
    pub fn pretrained(&self) -> Option<&Pretrained> {
        match self {
            ModelSource::New(_) => None,
            ModelSource::From(pretrained) => Some(pretrained),
        }
    }

    pub(super) fn check(&self) -> Result<()> {
        let Some(Pretrained { dropout, attention_dropout, .. }) = self.pretrained() else { return Ok(()) };
        for (name, found) in [("dropout", dropout), ("attention_dropout", attention_dropout)] {
            if let Some(found) = found.filter(|found| !(0.0..1.0).contains(found)) {
                return Err(Error::invalid(format!("`model.{name}` is {found}, expected at least 0 and less than 1")));
            }
        }
        Ok(())
    }
}

impl Serialize for ModelSource {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            ModelSource::New(architecture) => architecture.serialize(to),
            ModelSource::From(pretrained) => pretrained.serialize(to),
        }
    }
}

impl<'de> Deserialize<'de> for ModelSource {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let table = toml::Table::deserialize(from)?;
        let wrong = |e: toml::de::Error| de::Error::custom(e.message());
        if !table.contains_key("from") {
            return table.try_into().map(ModelSource::New).map_err(wrong);
        }
        if table.contains_key("kind") {
            return Err(de::Error::custom("`kind` cannot be set beside `from`: the model has one"));
        }
        table.try_into().map(ModelSource::From).map_err(wrong)
    }
}
