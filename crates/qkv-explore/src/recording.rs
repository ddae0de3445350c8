//! A **recording**: what was kept of one run of a model, or read from a file of anyone's. Tokens, and for every attention the
//! few tensors from which any of its weights is recomputed; nothing of the size of the weights, unless a file brought them.

use crate::layer::Layer;
use serde::{Deserialize, Serialize};

/// One run, kept for looking at.
#[derive(Clone, Debug, PartialEq)]
pub struct Recording {
    /// What went in, as text.
    pub text: String,
    /// What came out, as text, where the model writes.
    pub output: Option<String>,
    /// The sequences that rows and columns stand for.
    pub sides: Vec<Side>,
    /// The attentions, in a reader's order; those of one group stand together.
    pub layers: Vec<Layer>,
    /// What was written at each step, and what the model thought of writing, where it writes.
    pub steps: Vec<Step>,
    /// What the tokens are parts of, where that is more than a sequence.
    pub form: Option<Form>,
}

/// What tokens are parts of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Form {
    /// A document: its sentences look at their words, and it looks at its sentences.
    Document {
        /// The layer whose queries are sentences and whose keys are words, those of each sentence together.
        words: usize,
        /// The layer whose one query is the document and whose keys are sentences.
        sentences: usize,
        /// How many words each sentence has.
        lengths: Vec<usize>,
    },
    /// An image: a token for the whole, then a token for each patch, row by row.
    Image {
        /// Patches each way: down, across.
        grid: [usize; 2],
        /// Points across.
        width: usize,
        /// Points down.
        height: usize,
        /// Red, green and blue of each point, row by row.
        points: Vec<u8>,
    },
}

impl Form {
    /// Whether it is about the layers and sides that a recording has; else why not.
    pub(crate) fn fits(&self, recording: &Recording) -> Result<(), String> {
        match self {
            Form::Document { words, sentences, lengths } => {
                let size = |layer: usize| recording.layers.get(layer).map(crate::Layer::size);
                let (Some([n, m]), Some([1, k])) = (size(*words), size(*sentences)) else {
                    return Err(format!("a document has no layers {words} and {sentences} of words and sentences"));
                };
                let total = lengths.iter().try_fold(0usize, |sum, &length| sum.checked_add(length));
                if (n, Some(m), k) != (lengths.len(), total, lengths.len()) {
                    return Err("the sentences of the document are not those of its layers".into());
                }
            }
            Form::Image { grid: [down, across], width, height, points } => {
                let count = |a: usize, b: usize| a.checked_mul(b).and_then(|all| all.checked_add(0));
                let tokens = count(*down, *across).and_then(|all| all.checked_add(1));
                let places = count(*width, *height).and_then(|all| all.checked_mul(3));
                let first = recording.layers.first().map(crate::Layer::size);
                if places != Some(points.len()) || first.map(|[n, _]| n) != tokens || points.is_empty() {
                    return Err("the image is not as large as it says, or has other patches than its layers".into());
                }
            }
        }
        Ok(())
    }
}

/// A sequence of tokens that queries or keys stand for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// What it is: `source`, `read`, `written`, `tokens`.
    pub name: String,
    /// Its tokens.
    pub tokens: Vec<Token>,
}

/// A token, as a person reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// What it says.
    pub text: String,
    /// The word that it is a part of, counted from 0; none for what is no text.
    pub word: Option<usize>,
    /// Whether it stands for no text: a start, an end, filling.
    pub special: bool,
    /// Its number in the vocabulary, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<u32>,
}

/// One step of writing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// What was written.
    pub text: String,
    /// How likely the model held it.
    pub probability: f64,
    /// The likeliest tokens, and how likely each was.
    pub candidates: Vec<Candidate>,
}

/// A token that might have been written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// What it says.
    pub text: String,
    /// How likely it was.
    pub probability: f64,
}

/// The layers of one part of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Group {
    /// Its name: `encoder`, `decoder`, `cross`.
    pub name: String,
    /// Its layers, as places in the recording, from the first to the last.
    pub layers: Vec<usize>,
}

impl Side {
    /// Tokens that nobody gave: their numbers, from 0.
    pub fn numbered(name: &str, count: usize) -> Side {
        let token = |at: usize| Token { text: at.to_string(), word: Some(at), ..Token::default() };
        Side { name: name.into(), tokens: (0..count).map(token).collect() }
    }

    /// Tokens that are words of their own.
    pub fn of_words<S: Into<String>>(name: &str, words: impl IntoIterator<Item = S>) -> Side {
        let token = |(at, text): (usize, S)| Token { text: text.into(), word: Some(at), ..Token::default() };
        Side { name: name.into(), tokens: words.into_iter().enumerate().map(token).collect() }
    }

    /// How many tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

impl Recording {
    /// The parts of the model, in the order of their first layers.
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

    /// The layer that tells the most at first sight: of a translation the one that aligns words best, the last but one from the
    /// target to the source; else the first.
    pub fn first_to_look_at(&self) -> usize {
        let cross = self.groups().into_iter().find(|group| group.name == "cross");
        cross.map_or(0, |group| group.layers[group.layers.len().saturating_sub(2)])
    }

    /// The sequence that the rows of a layer stand for.
    pub fn queries(&self, layer: usize) -> &Side {
        &self.sides[self.layers[layer].queries]
    }

    /// The sequence that its columns stand for.
    pub fn keys(&self, layer: usize) -> &Side {
        &self.sides[self.layers[layer].keys]
    }

    /// Whether the rows and columns of a layer stand for the same tokens.
    pub fn is_own(&self, layer: usize) -> bool {
        self.layers[layer].queries == self.layers[layer].keys
    }
}
