//! A **recording** of one run of a model, captured or read from a file: tokens, and for every attention layer the
//! tensors from which its weights are recomputed. Nothing as large as the weights is stored, unless a file brings them.

use crate::layer::Layer;
use serde::{Deserialize, Serialize};

/// One recorded run.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// The input text.
    pub text: String,
    /// The output text, if the model writes any.
    pub output: Option<String>,
    /// The sequences that rows and columns stand for.
    pub sides: Vec<Side>,
    /// The attention layers in reading order; layers of a group are adjacent.
    pub layers: Vec<Layer>,
    /// Decoding steps with their candidates, if the model writes text.
    pub steps: Vec<Step>,
    /// Structure beyond a sequence: a document, an image or a sound.
    pub form: Option<Form>,
}

/// Structure of the input beyond a sequence of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Form {
    /// A document: its sentences attend to their words, and the document to its sentences.
    Document {
        /// The layer whose queries are sentences and whose keys are words, grouped by sentence.
        words: usize,
        /// The layer whose one query is the document and whose keys are sentences.
        sentences: usize,
        /// Words per sentence.
        lengths: Vec<usize>,
    },
    /// An image: a class token, then a token per patch in row-major order.
    Image {
        /// Patches down and across.
        grid: [usize; 2],
        /// Width in pixels.
        width: usize,
        /// Height in pixels.
        height: usize,
        /// RGB of each pixel in row-major order.
        points: Vec<u8>,
    },
    /// A sound; the tokens of its transcript attend to its positions.
    Sound {
        /// The side of the sound's positions; those past its end are silence.
        side: usize,
        /// Milliseconds per position.
        step: usize,
        /// Frames of the spectrogram, up to the end of the sound.
        frames: usize,
        /// Milliseconds per frame.
        frame: usize,
        /// Brightness of each band of each frame, the lowest band first.
        points: Vec<u8>,
        /// Its words, in order.
        words: Vec<HeardWord>,
        /// The heads that follow the sound, each as a layer of the recording and a head.
        heads: Vec<[usize; 2]>,
    },
}

/// A word of a sound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeardWord {
    /// Its text.
    pub text: String,
    /// When it begins, in milliseconds.
    pub start: usize,
    /// When it ends, in milliseconds.
    pub end: usize,
    /// Its first query.
    pub from: usize,
    /// The query after its last.
    pub to: usize,
}

impl Form {
    /// Checks that it fits the layers of a recording.
    pub(crate) fn check(&self, recording: &Recording) -> Result<(), String> {
        match self {
            Form::Document { words, sentences, lengths } => {
                let size = |layer: usize| recording.layers.get(layer).map(crate::Layer::size);
                let (Some([n, m]), Some([1, k])) = (size(*words), size(*sentences)) else {
                    return Err(format!(
                        "the document refers to layers {words} and {sentences}, which do not hold words and sentences"
                    ));
                };
                let total = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
                if (n, Some(m), k) != (lengths.len(), total, lengths.len()) {
                    return Err("the sentences of the document do not fit its layers".into());
                }
            }
            Form::Image { grid: [down, across], width, height, points } => {
                let count = |a: usize, b: usize| a.checked_mul(b).and_then(|all| all.checked_add(0));
                let tokens = count(*down, *across).and_then(|all| all.checked_add(1));
                let places = count(*width, *height).and_then(|all| all.checked_mul(3));
                let first = recording.layers.first().map(crate::Layer::size);
                if places != Some(points.len()) || first.map(|[n, _]| n) != tokens || points.is_empty() {
                    return Err(
                        "the image does not have the size it claims, or its patches do not fit its layers".into()
                    );
                }
            }
            Form::Sound { side, step, frames, frame, points, words, heads } => {
                let layers = recording.layers.iter().filter(|layer| layer.keys == *side).map(crate::Layer::size);
                let queries = layers.map(|[n, _]| n).min();
                let bands = points.len().checked_div(*frames).unwrap_or(0);
                let whole = bands > 0 && bands.checked_mul(*frames) == Some(points.len()) && *step > 0 && *frame > 0;
                let fits = |word: &HeardWord| {
                    word.start <= word.end && word.from < word.to && queries.is_some_and(|queries| word.to <= queries)
                };
                let follows = |&[layer, head]: &[usize; 2]| {
                    recording.layers.get(layer).is_some_and(|layer| layer.keys == *side && head < layer.heads())
                };
                if !whole || !words.iter().all(fits) || !heads.iter().all(follows) {
                    return Err("the sound does not have the size it claims, or its words do not fit its layers".into());
                }
            }
        }
        Ok(())
    }
}

/// The sequence of tokens behind the queries or keys of a layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// Its name: `source`, `read`, `written`, `tokens`.
    pub name: String,
    /// Its tokens.
    pub tokens: Vec<Token>,
}

/// A token in readable form.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// Its text.
    pub text: String,
    /// Index of its word; `None` for special tokens.
    pub word: Option<usize>,
    /// Whether it stands for no text: start, end, padding.
    pub special: bool,
    /// Its id in the vocabulary, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u32>,
}

/// One decoding step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The token that was written.
    pub text: String,
    /// Its probability.
    pub probability: f64,
    /// The most probable tokens.
    pub candidates: Vec<Candidate>,
}

/// A token that could have been written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its text.
    pub text: String,
    /// Its probability.
    pub probability: f64,
}

/// The layers of one part of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// Its name: `encoder`, `decoder`, `cross`.
    pub name: String,
    /// Indices of its layers, from first to last.
    pub layers: Vec<usize>,
}

impl Side {
    /// A side without token texts: tokens are named by their index.
    pub fn numbered(name: &str, count: usize) -> Side {
        let token = |at: usize| Token { text: at.to_string(), word: Some(at), ..Token::default() };
        Side { name: name.into(), tokens: (0..count).map(token).collect() }
    }

    /// A side of one token per word.
    pub fn of_words<S: Into<String>>(name: &str, words: impl IntoIterator<Item = S>) -> Side {
        let token = |(at, text): (usize, S)| Token { text: text.into(), word: Some(at), ..Token::default() };
        Side { name: name.into(), tokens: words.into_iter().enumerate().map(token).collect() }
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

impl Recording {
    /// The groups, in the order of their first layers.
    pub fn groups(&self) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for (at, layer) in self.layers.iter().enumerate() {
            match groups.iter_mut().find(|group| group.name == layer.group) {
                Some(group) => group.layers.push(at),
                None => groups.push(Group { name: layer.group.clone(), layers: vec![at] }),
            }
        }
        groups
    }

    /// The layer to show first. For translations that is the second to last cross-attention layer, which aligns words
    /// best; otherwise the first layer.
    pub fn default_layer(&self) -> usize {
        let cross = self.groups().into_iter().find(|group| group.name == "cross");
        cross.map_or(0, |group| group.layers[group.layers.len().saturating_sub(2)])
    }

    /// The side of the rows of a layer.
    pub fn queries(&self, layer: usize) -> &Side {
        &self.sides[self.layers[layer].queries]
    }

    /// The side of its columns.
    pub fn keys(&self, layer: usize) -> &Side {
        &self.sides[self.layers[layer].keys]
    }

    /// Whether rows and columns of a layer are the same tokens.
    pub fn is_self_attention(&self, layer: usize) -> bool {
        self.layers[layer].queries == self.layers[layer].keys
    }
}
