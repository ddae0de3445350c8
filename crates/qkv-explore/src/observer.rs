//! Any model that can be looked into: one that translates, one that goes on with text, one that reads. What it is asked with is
//! text; what it gives is a [`Recording`].

use crate::capture;
use crate::recording::Recording;
use qkv_models::{Encoder, Error, Generation, Generator, Result, Translator};
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
        let kind = if path.is_dir() { kind(&path.join("config.json"))? } else { String::new() };
        match kind.as_str() {
            "bert" => Ok(Observer::Encoder(Box::new(Encoder::open(path)?))),
            "transformer" | "recurrent" => Ok(Observer::Translator(Box::new(Translator::open(path)?))),
            _ => Ok(Observer::Generator(Box::new(Generator::open(path)?))),
        }
    }

    /// In a line: what it does.
    pub fn note(&self) -> &'static str {
        match self {
            Observer::Translator(_) => "translates",
            Observer::Generator(_) => "goes on with text",
            Observer::Encoder(_) => "reads text",
        }
    }

    /// Runs the model on a text, and records what it attended to; `target` is what it is to have written, where it writes.
    ///
    /// # Errors
    /// Where there is no text, or more than the model takes.
    pub fn record(&self, text: &str, target: Option<&str>, machine: &Machine) -> Result<Recording> {
        match self {
            Observer::Translator(model) => capture::translation(model, text, target, machine),
            Observer::Generator(model) => {
                let how = Generation { sample: None, most: WRITTEN, ..model.generation.clone() };
                capture::continuation(model, text, target, &how, machine)
            }
            Observer::Encoder(model) => capture::reading(model, text, target, machine),
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

/// What a folder says it holds.
fn kind(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(|e| Error::file("read", path, e))?;
    let json: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|e| Error::line(path, e.line().max(1), e.to_string()))?;
    let ours = json.pointer("/architecture/kind").or_else(|| json.get("model_type"));
    Ok(ours.and_then(|kind| kind.as_str()).unwrap_or_default().to_owned())
}
