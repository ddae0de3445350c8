//! Any model whose attention can be recorded: translator, generator, encoder, document classifier, vision transformer,
//! a model that describes images, answers questions about them or detects objects in them, a voice, or a speech
//! recognizer. Its input is a text, or the name of an image or a sound; its output is a [`Recording`].

use crate::capture;
use crate::recording::Recording;
use qkv_models::audio::Recording as Sound;
use qkv_models::image::Image;
use qkv_models::{
    Data, Describer, Detector, Encoder, Error, Generation, Generator, Han, Recipe, Recognizer, Result, Speaker,
    Translator, Vit, Vqa,
};
use qkv_nn::Machine;
use std::path::Path;

/// The most tokens that a generator writes after a prompt.
const MAX_NEW_TOKENS: usize = 32;

/// A model whose attention can be recorded.
#[derive(Debug)]
pub enum Observer {
    /// Translates.
    Translator(Box<Translator>),
    /// Generates text after a prompt.
    Generator(Box<Generator>),
    /// Encodes a text.
    Encoder(Box<Encoder>),
    /// Classifies a document, sentence by sentence.
    Han(Box<Han>),
    /// Classifies images: these, by name.
    Vit(Box<Vit>, Vec<(String, Image)>),
    /// Describes images: these, by name.
    Describer(Box<Describer>, Vec<(String, Image)>),
    /// Answers questions about the first of these images.
    Vqa(Box<Vqa>, Vec<(String, Image)>),
    /// Finds objects in images: these, by name.
    Detector(Box<Detector>, Vec<(String, Image)>),
    /// Speaks a text.
    Speaker(Box<Speaker>),
    /// Transcribes sounds: these, by name.
    Recognizer(Box<Recognizer>, Vec<(String, Sound)>),
}

/// Maximum input in characters: of a document, and of any other text.
const MAX_DOCUMENT: usize = 50_000;
const MAX_TEXT: usize = 2000;

/// Whether the run in this folder was trained on pairs of texts.
fn trained_on_pairs(folder: &Path) -> bool {
    let recipe = Recipe::read(folder.join("recipe.toml"), &[]);
    recipe.is_ok_and(|recipe| matches!(recipe.data, Data::Files { .. } | Data::Task { .. }))
}

const NAME_ONE: &str = "name one with `--image FILE`";

/// The image with that name.
fn named<'a>(images: &'a [(String, Image)], text: &str) -> Result<&'a (String, Image)> {
    let found = images.iter().find(|(name, _)| name == text);
    found.ok_or_else(|| Error::invalid(format!("there is no image `{text}`")).with_hint(NAME_ONE))
}

impl From<Translator> for Observer {
    fn from(translator: Translator) -> Observer {
        Observer::Translator(Box::new(translator))
    }
}

impl Observer {
    /// Opens a model: a folder, ours or in the Hugging Face layout, a GGUF file, or a Whisper model.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong.
    pub fn open(path: &Path) -> Result<Observer> {
        if Recognizer::is_at(path) {
            return Ok(Observer::Recognizer(Box::new(Recognizer::open(path)?), Vec::new()));
        }
        let kind = if path.is_dir() { qkv_models::kind(path)? } else { String::new() };
        match kind.as_str() {
            "han" => Ok(Observer::Han(Box::new(Han::open(path)?))),
            "vit" => Ok(Observer::Vit(Box::new(Vit::open(path)?), Vec::new())),
            "describe" => Ok(Observer::Describer(Box::new(Describer::open(path)?), Vec::new())),
            "vqa" => Ok(Observer::Vqa(Box::new(Vqa::open(path)?), Vec::new())),
            "detect" => Ok(Observer::Detector(Box::new(Detector::open(path)?), Vec::new())),
            "voice" => Ok(Observer::Speaker(Box::new(Speaker::open(path)?))),
            "encoder" => Ok(Observer::Encoder(Box::new(Encoder::open(path)?))),
            "transformer" | "recurrent" => Ok(Observer::Translator(Box::new(Translator::open(path)?))),
            // A decoder-only model is whatever it was trained for: one trained on pairs translates.
            _ if trained_on_pairs(path) => Ok(Observer::Translator(Box::new(Translator::open(path)?))),
            _ => Ok(Observer::Generator(Box::new(Generator::open(path)?))),
        }
    }

    /// What it does, in one line.
    pub fn note(&self) -> &'static str {
        match self {
            Observer::Translator(_) => "translates",
            Observer::Generator(_) => "generates text",
            Observer::Encoder(_) => "encodes text",
            Observer::Han(_) => "classifies documents",
            Observer::Vit(..) => "classifies images",
            Observer::Describer(..) => "describes images",
            Observer::Vqa(..) => "answers questions about an image",
            Observer::Detector(..) => "finds objects in images",
            Observer::Speaker(_) => "speaks",
            Observer::Recognizer(..) => "writes what is said",
        }
    }

    /// The label of the page's button.
    pub fn verb(&self) -> &'static str {
        match self {
            Observer::Translator(_) => "Translate",
            Observer::Generator(_) => "Generate",
            Observer::Speaker(_) => "Speak",
            Observer::Encoder(_) => "Run",
            Observer::Han(_) | Observer::Vit(..) => "Classify",
            Observer::Describer(..) => "Describe",
            Observer::Vqa(..) => "Answer",
            Observer::Detector(..) => "Detect",
            Observer::Recognizer(..) => "Transcribe",
        }
    }

    /// Whether it can be run over an output other than its own.
    pub fn takes_target(&self) -> bool {
        matches!(
            self,
            Observer::Translator(_) | Observer::Generator(_) | Observer::Encoder(_) | Observer::Describer(..)
        )
    }

    /// The same model with images to choose from, each with its own name.
    ///
    /// # Errors
    /// If the model does not take images.
    pub fn with_images(self, images: Vec<(String, Image)>) -> Result<Observer> {
        match self {
            Observer::Vit(model, _) => Ok(Observer::Vit(model, images)),
            Observer::Describer(model, _) => Ok(Observer::Describer(model, images)),
            Observer::Vqa(model, _) => Ok(Observer::Vqa(model, images)),
            Observer::Detector(model, _) => Ok(Observer::Detector(model, images)),
            _ if images.is_empty() => Ok(self),
            _ => Err(Error::invalid("the model takes text, not images").with_hint("leave out `--image`")),
        }
    }

    /// The same model with sounds to choose from, each with its own name.
    ///
    /// # Errors
    /// If the model does not take sounds.
    pub fn with_sounds(self, sounds: Vec<(String, Sound)>) -> Result<Observer> {
        match self {
            Observer::Recognizer(model, _) => Ok(Observer::Recognizer(model, sounds)),
            _ if sounds.is_empty() => Ok(self),
            _ => Err(Error::invalid("the model does not take sounds").with_hint("leave out `--audio`")),
        }
    }

    /// Whether it takes sounds and has none.
    pub fn lacks_sound(&self) -> bool {
        matches!(self, Observer::Recognizer(_, sounds) if sounds.is_empty())
    }

    /// Whether it looks at images and has none.
    pub fn lacks_image(&self) -> bool {
        match self {
            Observer::Vit(_, images)
            | Observer::Describer(_, images)
            | Observer::Vqa(_, images)
            | Observer::Detector(_, images) => images.is_empty(),
            _ => false,
        }
    }

    /// Names of its images or sounds; empty for models that take text.
    pub fn inputs(&self) -> Vec<&str> {
        match self {
            Observer::Recognizer(_, sounds) => sounds.iter().map(|(name, _)| name.as_str()).collect(),
            Observer::Vit(_, images) | Observer::Describer(_, images) | Observer::Detector(_, images) => {
                images.iter().map(|(name, _)| name.as_str()).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Maximum input text in characters.
    pub fn max_chars(&self) -> usize {
        if matches!(self, Observer::Han(_)) { MAX_DOCUMENT } else { MAX_TEXT }
    }

    /// Runs the model on a text and records its attention. With `target`, the model is run over that output instead of
    /// its own.
    ///
    /// # Errors
    /// If the text is empty or too long for the model, or the model [takes no target](Observer::takes_target).
    pub fn record(&self, text: &str, target: Option<&str>, machine: &Machine) -> Result<Recording> {
        if target.is_some() && !self.takes_target() {
            return Err(Error::invalid("the output of this model cannot be set").with_hint("leave out `target`"));
        }
        match self {
            Observer::Translator(model) => capture::translation(model, text, target, machine),
            Observer::Generator(model) => {
                let how = Generation { sample: None, max_tokens: MAX_NEW_TOKENS, ..model.generation.clone() };
                capture::continuation(model, text, target, &how, machine)
            }
            Observer::Speaker(model) => capture::speech(model, text, machine),
            Observer::Recognizer(model, sounds) => {
                let missing =
                    || Error::invalid(format!("there is no sound `{text}`")).with_hint("name it with `--audio`");
                let (name, sound) = sounds.iter().find(|(name, _)| name == text).ok_or_else(missing)?;
                capture::hearing(model, name, sound, machine)
            }
            Observer::Encoder(model) => capture::reading(model, text, target, machine),
            Observer::Han(model) => capture::document(model, text, machine),
            Observer::Vit(model, images) => {
                let (name, image) = named(images, text)?;
                capture::image(model, name, image, machine)
            }
            Observer::Describer(model, images) => {
                let (name, image) = named(images, text)?;
                capture::description(model, name, image, target, machine)
            }
            Observer::Detector(model, images) => {
                let (name, image) = named(images, text)?;
                capture::detection(model, name, image, machine)
            }
            Observer::Vqa(model, images) => {
                let missing = || Error::invalid("there is no image to ask about").with_hint(NAME_ONE);
                let (_, image) = images.first().ok_or_else(missing)?;
                capture::image_answer(model, image, text, machine)
            }
        }
    }

    /// How much the loss of a recording depends on each head; `None` for models without such a loss.
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
