//! Captures models that look at images: the places of the image, the tokens written, asked or found, and every
//! attention between them.

use super::{side, to_layer};
use crate::layer::Layer;
use crate::recording::{Recording, Side, Token};
use qkv_models::image::Image;
use qkv_models::{Describer, Detector, Group, ObservedAttention, Result, Vqa};
use qkv_nn::Machine;

/// The places of an image, row by row.
fn places([rows, columns]: [usize; 2]) -> Side {
    let place =
        |at: usize| Token { text: format!("{}·{}", at / columns, at % columns), word: Some(at), ..Token::default() };
    Side { name: "places".into(), tokens: (0..rows * columns).map(place).collect() }
}

/// Layers, named by what they attend from and to: within the image, among the other tokens, and from those to the
/// image.
fn layers(attentions: Vec<ObservedAttention>, own: usize, asking: usize) -> Vec<Layer> {
    let layer = |attended: ObservedAttention| {
        let at = attended.layer;
        let (name, sides) = match attended.group {
            Group::Encoder => (format!("image.layers.{at}.self_attn"), [0, 0]),
            Group::Cross => (format!("layers.{at}.encoder_attn"), [asking, 0]),
            Group::Hops => (format!("hops.{at}"), [2, 0]),
            _ => (format!("layers.{at}.self_attn"), [own, own]),
        };
        to_layer(attended, &name, sides)
    };
    attentions.into_iter().map(layer).collect()
}

/// Captures the description of an image called `name`; with `target`, the model writes that instead.
///
/// # Errors
/// Those of the model.
pub fn description(
    describer: &Describer,
    name: &str,
    image: &Image,
    target: Option<&str>,
    machine: &Machine,
) -> Result<Recording> {
    let tokens = match target {
        Some(target) => describer.tokenizer.encode(target),
        None => {
            let found = describer.describe(std::slice::from_ref(image), &describer.search, machine)?;
            found.into_iter().flatten().next().map(|best| best.tokens).unwrap_or_default()
        }
    };
    let looked = describer.look_at(image, &tokens, machine)?;
    let tokenizer = &describer.tokenizer;
    let read = [&[tokenizer.bos()], &tokens[..]].concat();
    let mut seen = places(looked.grid);
    if describer.config.image.class_token {
        seen.tokens.insert(0, Token { text: "‹image›".into(), word: None, special: true, id: None });
    }
    Ok(Recording {
        text: name.to_owned(),
        output: Some(tokenizer.decode(&tokens)),
        sides: vec![seen, side("read", &read, tokenizer), side("written", &looked.tokens, tokenizer)],
        layers: layers(looked.attentions, 1, 2),
        steps: Vec::new(),
        form: None,
    })
}

/// Captures the answer to a question about an image.
///
/// # Errors
/// Those of the model.
pub fn image_answer(vqa: &Vqa, image: &Image, question: &str, machine: &Machine) -> Result<Recording> {
    let found = vqa.answer(image, question, machine)?;
    let whole = Token { text: "‹question›".into(), word: None, special: true, id: None };
    Ok(Recording {
        text: question.to_owned(),
        output: Some(super::top_class(&found.probabilities, &vqa.config.labels)),
        sides: vec![
            places(found.grid),
            side("words", &found.tokens, &vqa.tokenizer),
            Side { name: "question".into(), tokens: vec![whole] },
        ],
        layers: layers(found.attentions, 1, 1),
        steps: Vec::new(),
        form: None,
    })
}

/// Captures what a detector finds in an image called `name`: one token per query, with the class that it predicts, if
/// any.
///
/// # Errors
/// Those of the model.
pub fn detection(detector: &Detector, name: &str, image: &Image, machine: &Machine) -> Result<Recording> {
    let found = detector.look(image, 0.5, machine)?;
    let query = |at: usize| {
        let said = found.boxes.iter().find(|one| one.query == at).map(|one| detector.config.labels[one.class].as_str());
        Token { text: format!("{at} {}", said.unwrap_or("–")), word: Some(at), ..Token::default() }
    };
    let queries = Side { name: "queries".into(), tokens: (0..found.looked.len()).map(query).collect() };
    Ok(Recording {
        text: name.to_owned(),
        output: Some(format!("{} objects", found.boxes.len())),
        sides: vec![places(found.grid), queries],
        layers: layers(found.attentions, 1, 1),
        steps: Vec::new(),
        form: None,
    })
}
