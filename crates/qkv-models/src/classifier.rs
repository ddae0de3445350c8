//! One interface to every model that classifies: encoders, hierarchical attention over documents, and vision models.
//! The `config.json` of a folder says which one it holds.

use crate::image::Image;
use crate::kind::kind;
use crate::{Encoder, Error, Han, ResNet, Result, Vit};
use qkv_nn::Machine;
use std::path::Path;

/// A model that classifies texts or images.
#[derive(Debug)]
pub enum Classifier {
    /// Classifies texts.
    Encoder(Box<Encoder>),
    /// Classifies documents.
    Han(Box<Han>),
    /// Classifies images.
    Vit(Box<Vit>),
    /// Classifies photographs, without attention.
    ResNet(Box<ResNet>),
}

impl Classifier {
    /// Reads a folder.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong.
    pub fn open(folder: impl AsRef<Path>) -> Result<Classifier> {
        Classifier::open_with(folder, None)
    }

    /// The same with low-rank adapters in PEFT's format.
    ///
    /// # Errors
    /// As [`open`](Classifier::open), or if there are adapters and the model is not an encoder.
    pub fn open_with(folder: impl AsRef<Path>, adapter: Option<&Path>) -> Result<Classifier> {
        let folder = folder.as_ref();
        let kind = kind(folder)?;
        if kind == "encoder" {
            return Ok(Classifier::Encoder(Box::new(Encoder::open_with(folder, adapter)?)));
        }
        if adapter.is_some() {
            return Err(Error::invalid(format!("`--adapter` is not supported for a `{kind}`: encoders do"))
                .with_hint("`lora.merge = true` in the recipe writes a whole model"));
        }
        match kind.as_str() {
            "han" => Ok(Classifier::Han(Box::new(Han::open(folder)?))),
            "vit" => Ok(Classifier::Vit(Box::new(Vit::open(folder)?))),
            "resnet" => Ok(Classifier::ResNet(Box::new(ResNet::open(folder)?))),
            _ => Ok(Classifier::Encoder(Box::new(Encoder::open(folder)?))),
        }
    }

    /// Names of the classes.
    pub fn labels(&self) -> &[String] {
        match self {
            Classifier::Encoder(encoder) => &encoder.config.labels,
            Classifier::Han(han) => &han.config.labels,
            Classifier::Vit(vit) => &vit.config.labels,
            Classifier::ResNet(resnet) => &resnet.labels,
        }
    }

    /// The probabilities of all classes, for each text.
    ///
    /// # Errors
    /// If the model was not trained for classes, or classifies images.
    pub fn texts<S: AsRef<str>>(&self, texts: &[S], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        match self {
            Classifier::Encoder(encoder) => encoder.classify(texts, machine),
            Classifier::Han(han) => han.classify(texts, machine),
            Classifier::Vit(_) | Classifier::ResNet(_) => {
                Err(Error::invalid("the model sees images and reads no text").with_hint("name one with `--image FILE`"))
            }
        }
    }

    /// The probabilities of all classes, for each image.
    ///
    /// # Errors
    /// If the model classifies texts.
    pub fn images(&self, images: &[Image], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        match self {
            Classifier::Vit(vit) => vit.classify(images, machine),
            Classifier::ResNet(resnet) => resnet.classify(images, machine),
            _ => Err(Error::invalid("the model reads text and sees no images")
                .with_hint("`qkv train recipes/digits.toml` trains one that does")),
        }
    }
}
