//! Any model that can be looked into: one that translates, one that goes on with text, one that reads, one that sees. What it is
//! asked with is text, or the name of an image that it was given; what it gives is a [`Recording`].

use crate::capture;
use crate::recording::Recording;
use qkv_models::image::Image;
use qkv_models::{Data, Encoder, Error, Generation, Generator, Han, Recipe, Result, Translator, Vit};
use qkv_nn::Machine;
use std::path::Path;

/// Tokens that a model goes on with, where its own are looked at.
const WRITTEN: usize = 32;

/// A model that can be looked into.
#[derive(Debug)]
pub enum Observer {
    /// It writes one text for another.
    Translator(Box<Translator>),
    /// It goes on with a text.
    Generator(Box<Generator>),
    /// It reads a text.
    Encoder(Box<Encoder>),
    /// It reads a document, sentence by sentence.
    Han(Box<Han>),
    /// It sees images: these, by their names.
    Vit(Box<Vit>, Vec<(String, Image)>),
}

/// The longest text of a model that reads sentence after sentence, and of any other, in characters.
const DOCUMENT: usize = 50_000;
const TEXT: usize = 2000;

/// Whether the run in this folder learned from pairs.
fn of_pairs(folder: &Path) -> bool {
    let recipe = Recipe::read(folder.join("recipe.toml"), &[]);
    recipe.is_ok_and(|recipe| matches!(recipe.data, Data::Files { .. } | Data::Task { .. }))
}

impl From<Translator> for Observer {
    fn from(translator: Translator) -> Observer {
        Observer::Translator(Box::new(translator))
    }
}

impl Observer {
    /// The model of a folder, ours or in the Hugging Face layout, or of a GGUF file.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong.
    pub fn open(path: &Path) -> Result<Observer> {
        let kind = if path.is_dir() { qkv_models::kind(path)? } else { String::new() };
        match kind.as_str() {
            "han" => Ok(Observer::Han(Box::new(Han::open(path)?))),
            "vit" => Ok(Observer::Vit(Box::new(Vit::open(path)?), Vec::new())),
            "encoder" => Ok(Observer::Encoder(Box::new(Encoder::open(path)?))),
            "transformer" | "recurrent" => Ok(Observer::Translator(Box::new(Translator::open(path)?))),
            // A decoder alone is what it was trained for: a run that learned from pairs writes one text for another.
            _ if of_pairs(path) => Ok(Observer::Translator(Box::new(Translator::open(path)?))),
            _ => Ok(Observer::Generator(Box::new(Generator::open(path)?))),
        }
    }

    /// In a line: what it does.
    pub fn note(&self) -> &'static str {
        match self {
            Observer::Translator(_) => "translates",
            Observer::Generator(_) => "goes on with text",
            Observer::Encoder(_) => "reads text",
            Observer::Han(_) => "reads documents",
            Observer::Vit(..) => "sees images",
        }
    }

    /// The same with images to look at, each by a name of its own.
    ///
    /// # Errors
    /// Where the model sees none.
    pub fn with_images(self, images: Vec<(String, Image)>) -> Result<Observer> {
        match self {
            Observer::Vit(model, _) => Ok(Observer::Vit(model, images)),
            _ if images.is_empty() => Ok(self),
            _ => Err(Error::invalid("the model reads text and sees no images").with_hint("leave out `--image`")),
        }
    }

    /// The names of the images that it can be asked about; none where it takes text.
    pub fn images(&self) -> Vec<&str> {
        match self {
            Observer::Vit(_, images) => images.iter().map(|(name, _)| name.as_str()).collect(),
            _ => Vec::new(),
        }
    }

    /// The longest text that it is asked with, in characters.
    pub fn longest(&self) -> usize {
        if matches!(self, Observer::Han(_)) { DOCUMENT } else { TEXT }
    }

    /// Runs the model on a text, and records what it attended to; `target` is what it is to have written, where it writes.
    ///
    /// # Errors
    /// Where there is no text, or more than the model takes.
    pub fn record(&self, text: &str, target: Option<&str>, machine: &Machine) -> Result<Recording> {
        match self {
            Observer::Translator(model) => capture::translation(model, text, target, machine),
            Observer::Generator(model) => {
                let how = Generation { sample: None, max_tokens: WRITTEN, ..model.generation.clone() };
                capture::continuation(model, text, target, &how, machine)
            }
            Observer::Encoder(model) => capture::reading(model, text, target, machine),
            Observer::Han(model) => capture::document(model, text, machine),
            Observer::Vit(model, images) => {
                let missing =
                    || Error::invalid(format!("there is no image `{text}`")).with_hint("name one with `--image FILE`");
                let (name, image) = images.iter().find(|(name, _)| name == text).ok_or_else(missing)?;
                capture::image(model, name, image, machine)
            }
        }
    }

    /// How much the loss of what was recorded depends on each head, where the model has one.
    ///
    /// # Errors
    /// As [`capture::importance`].
    pub fn importance(&self, recording: &Recording, machine: &Machine) -> Result<Option<Vec<Vec<f64>>>> {
        match self {
            Observer::Translator(model) => capture::importance(model, recording, machine).map(Some),
            _ => Ok(None),
        }
    }
}
