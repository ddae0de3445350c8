//! Runs a model and captures a [`Recording`]: readable tokens, and every attention call.

mod listening;
mod looking;
mod speaking;

pub use listening::hearing;
pub use looking::{description, detection, image_answer};
pub use speaking::speech;

use crate::layer::{AttentionCall, Layer, WeightSource};
use crate::recording::{Candidate, Form, Recording, Side, Step, Token};
use qkv_models::image::Image;
use qkv_models::text::tokenizer::{Piece, Tokenizer};
use qkv_models::{
    Document, Encoder, Error, Generation, Generator, Group, Han, Observed, ObservedAttention, ObservedDocument,
    ObservedImage, Result, Translator, Vit,
};
use qkv_nn::Machine;

/// Candidate tokens recorded per decoding step.
const CANDIDATES: usize = 8;

/// Indices of the sides of a translation.
const SOURCE: usize = 0;
const READ: usize = 1;
const WRITTEN: usize = 2;

/// Captures the translation of a text. With `target`, the model is run over that translation instead of its own.
///
/// # Errors
/// If the text is empty or too long for the model.
pub fn translation(translator: &Translator, text: &str, target: Option<&str>, machine: &Machine) -> Result<Recording> {
    let source = translator.tokenizer.encode(text);
    if source.is_empty() {
        return Err(Error::invalid("the text is empty").with_hint("give a sentence"));
    }
    let target = match target {
        Some(target) => translator.tokenizer.encode(target),
        None => {
            let found = translator.translate(&[text], &translator.search, machine)?;
            found.into_iter().flatten().next().map(|best| best.tokens).unwrap_or_default()
        }
    };
    let observed = translator.observe(&source, &target, machine)?;
    let tokenizer = &translator.tokenizer;
    let recurrent = observed.attentions.iter().all(|attended| attended.group == Group::Cross);
    Ok(Recording {
        text: text.to_owned(),
        output: Some(tokenizer.decode(&target)),
        steps: steps(&observed, tokenizer),
        form: None,
        sides: vec![
            side("source", &observed.source, tokenizer),
            side("read", &observed.decoder_input, tokenizer),
            side("written", &observed.targets, tokenizer),
        ],
        layers: observed.attentions.into_iter().map(|attended| translation_layer(attended, recurrent)).collect(),
    })
}

/// Captures the generation of text after a prompt. With `target`, the model reads that continuation instead of its own.
///
/// # Errors
/// If the text is empty or too long for the model.
pub fn continuation(
    generator: &Generator,
    text: &str,
    target: Option<&str>,
    how: &Generation,
    machine: &Machine,
) -> Result<Recording> {
    let prompt = generator.tokenizer.encode_prompt(text);
    if text.is_empty() {
        return Err(Error::invalid("the text is empty").with_hint("give a sentence"));
    }
    let (continuation, output) = match target {
        Some(target) => (generator.tokenizer.encode(target), target.to_owned()),
        None => {
            let found = generator.generate(&prompt, how, machine, &mut |_| true)?;
            (found.tokens, found.text)
        }
    };
    let mut tokens = [prompt, continuation].concat();
    tokens.truncate(generator.model.max_len());
    let observed = generator.observe(&tokens, machine)?;
    Ok(one_sequence(text, Some(output), &tokens, observed.attentions, &generator.tokenizer))
}

/// Captures an encoder over one text, or over a pair of texts.
///
/// # Errors
/// If the text is empty.
pub fn reading(encoder: &Encoder, first: &str, second: Option<&str>, machine: &Machine) -> Result<Recording> {
    if first.trim().is_empty() {
        return Err(Error::invalid("the text is empty").with_hint("give a sentence"));
    }
    let observed = encoder.observe(first, second, machine)?;
    Ok(one_sequence(first, None, &observed.source, observed.attentions, &encoder.tokenizer))
}

/// A recording over one sequence.
fn one_sequence(
    text: &str,
    output: Option<String>,
    tokens: &[u32],
    attentions: Vec<ObservedAttention>,
    tokenizer: &Tokenizer,
) -> Recording {
    let layers = attentions.into_iter().map(self_attention_layer);
    Recording {
        text: text.to_owned(),
        output,
        sides: vec![side("tokens", tokens, tokenizer)],
        layers: layers.collect(),
        steps: Vec::new(),
        form: None,
    }
}

/// Captures a hierarchical attention network over a document: sentences attend to words, the document to sentences.
///
/// # Errors
/// If the text is empty.
pub fn document(han: &Han, text: &str, machine: &Machine) -> Result<Recording> {
    let ObservedDocument { document, probabilities, attentions } = han.observe(text, machine)?;
    let Some([of_words, of_sentences]) = attentions else {
        return Err(Error::invalid("the text is empty").with_hint("give a document of one or more sentences"));
    };
    let reading = DocumentText { document: &document, text };
    let whole = Token { text: "‹document›".into(), word: None, special: true, id: None };
    Ok(Recording {
        text: text.to_owned(),
        output: Some(top_class(&probabilities, &han.config.labels)),
        sides: vec![
            Side { name: "document".into(), tokens: vec![whole] },
            Side::of_words("sentences", reading.sentences()),
            Side { name: "words".into(), tokens: reading.words() },
        ],
        layers: vec![
            to_layer(of_sentences, "sentences.attention", [0, 1]),
            to_layer(of_words, "words.attention", [1, 2]),
        ],
        steps: Vec::new(),
        form: Some(Form::Document { sentences: 0, words: 1, lengths: document.lengths() }),
    })
}

/// Captures a vision transformer over an image called `name`.
///
/// # Errors
/// Those of the model.
pub fn image(vit: &Vit, name: &str, image: &Image, machine: &Machine) -> Result<Recording> {
    let ObservedImage { image, probabilities, attentions } = vit.observe(image, machine)?;
    let grid = vit.config.grid();
    let patch = |at: usize| Token { text: format!("{}·{}", at / grid, at % grid), word: Some(at), ..Token::default() };
    let class = Token { text: "‹class›".into(), word: None, special: true, id: None };
    let tokens = std::iter::once(class).chain((0..grid * grid).map(patch)).collect();
    Ok(Recording {
        text: name.to_owned(),
        output: Some(top_class(&probabilities, &vit.config.labels)),
        sides: vec![Side { name: "patches".into(), tokens }],
        layers: attentions.into_iter().map(self_attention_layer).collect(),
        steps: Vec::new(),
        form: Some(Form::Image {
            grid: [grid, grid],
            width: image.width(),
            height: image.height(),
            points: image.in_channels(3).points().to_vec(),
        }),
    })
}

/// The most probable class, with its probability.
fn top_class(probabilities: &[f32], labels: &[String]) -> String {
    let best = labels.iter().zip(probabilities).reduce(|best, other| if other.1 > best.1 { other } else { best });
    best.map_or(String::new(), |(label, share)| format!("{label} {share:.4}"))
}

/// A captured attention call as a layer between two sides.
fn to_layer(attended: ObservedAttention, name: &str, [queries, keys]: [usize; 2]) -> Layer {
    let ObservedAttention { group, attention, inputs, output, .. } = attended;
    let weights = WeightSource::Call(Box::new(AttentionCall::new(attention, inputs, Some(output))));
    Layer { name: name.to_owned(), group: group.name().to_owned(), queries, keys, weights, importance: None }
}

/// A layer of self-attention over the only side.
fn self_attention_layer(attended: ObservedAttention) -> Layer {
    let name = format!("layers.{}.self_attn", attended.layer);
    to_layer(attended, &name, [0, 0])
}

/// A split document with its original text.
struct DocumentText<'a> {
    document: &'a Document,
    text: &'a str,
}

impl DocumentText<'_> {
    fn sentences(&self) -> Vec<String> {
        self.document.sentence_ranges().map(|range| self.text[range].trim().to_owned()).collect()
    }

    /// Word pieces, each with the index of its word.
    fn words(&self) -> Vec<Token> {
        let (mut tokens, mut count): (Vec<Token>, usize) = (Vec::new(), 0);
        let mut last = None;
        for (sentence, piece) in self.document.pieces() {
            if last.replace((sentence, piece.word)) != Some((sentence, piece.word)) {
                count += 1;
            }
            let text = self.text[piece.place.clone()].trim().to_owned();
            tokens.push(Token { text, word: Some(count - 1), special: false, id: Some(piece.id) });
        }
        tokens
    }
}

/// How much the loss of the recorded translation depends on each head of each layer.
///
/// # Errors
/// If the recording is not a translation with token ids.
pub fn importance(translator: &Translator, recording: &Recording, machine: &Machine) -> Result<Vec<Vec<f64>>> {
    let ids = |side: usize| -> Option<Vec<u32>> {
        let tokens = &recording.sides.get(side)?.tokens;
        tokens[..tokens.len().checked_sub(1)?].iter().map(|token| token.id).collect()
    };
    let (Some(source), Some(target)) = (ids(SOURCE), ids(WRITTEN)) else {
        return Err(Error::invalid("head importance needs a translation recorded by this model"));
    };
    translator.importance(&source, &target, machine)
}

fn translation_layer(attended: ObservedAttention, recurrent: bool) -> Layer {
    let layer = attended.layer;
    let (name, sides) = match attended.group {
        Group::Decoder => (format!("decoder.layers.{layer}.self_attn"), [READ, READ]),
        Group::Cross if recurrent => ("decoder.attention".to_owned(), [WRITTEN, SOURCE]),
        Group::Cross => (format!("decoder.layers.{layer}.encoder_attn"), [WRITTEN, SOURCE]),
        _ => (format!("encoder.layers.{layer}.self_attn"), [SOURCE, SOURCE]),
    };
    to_layer(attended, &name, sides)
}

/// A side from token ids: readable text, and the word that each token belongs to.
pub(crate) fn side(name: &str, ids: &[u32], tokenizer: &Tokenizer) -> Side {
    let named = tokenizer.specials();
    let special = |id: u32| {
        [tokenizer.pad(), tokenizer.bos(), tokenizer.eos()].contains(&id) || named.iter().any(|(_, other)| *other == id)
    };
    let text: Vec<u32> = ids.iter().copied().filter(|&id| !special(id)).collect();
    let mut pieces = words(tokenizer.pieces(&text)).into_iter();
    let token = |&id: &u32| match special(id) {
        true => Token { text: special_name(id, tokenizer), word: None, special: true, id: Some(id) },
        false => {
            let (text, word) = pieces.next().unwrap_or_default();
            Token { text, word: Some(word), special: false, id: Some(id) }
        }
    };
    Side { name: name.into(), tokens: ids.iter().map(token).collect() }
}

/// The display name of a special token.
fn special_name(id: u32, tokenizer: &Tokenizer) -> String {
    let named = tokenizer.name(id).unwrap_or_default();
    match named.as_str() {
        "</s>" => "‹end›".into(),
        "<s>" => "‹start›".into(),
        "<pad>" => "‹pad›".into(),
        _ => named,
    }
}

/// The text of each piece and the index of its word. A piece that is only a space belongs to the word after it.
fn words(pieces: Vec<Piece>) -> Vec<(String, usize)> {
    let (mut count, mut empty) = (0, true);
    let place = |Piece { text, begins_word }: Piece| {
        let text = text.trim().to_owned();
        if count == 0 || (begins_word && !empty) {
            (count, empty) = (count + 1, true);
        }
        empty &= text.is_empty();
        (text, count - 1)
    };
    pieces.into_iter().map(place).collect()
}

fn steps(observed: &Observed, tokenizer: &Tokenizer) -> Vec<Step> {
    let [_, width] = observed.log_probabilities.shape();
    let rows = observed.log_probabilities.data().chunks_exact(width.max(1));
    let text_of = |id: u32| match side("", &[id], tokenizer).tokens.pop() {
        Some(token) => token.text,
        None => String::new(),
    };
    let step = |(row, &written): (&[f32], &u32)| {
        let mut order: Vec<u32> = (0..width as u32).collect();
        let likelier = |a: &u32, b: &u32| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b));
        let kept = CANDIDATES.min(width);
        if kept < width {
            order.select_nth_unstable_by(kept, likelier);
        }
        order.truncate(kept);
        order.sort_by(likelier);
        let probability = |id: u32| f64::from(row[id as usize]).exp();
        let candidates =
            order.iter().map(|&id| Candidate { text: text_of(id), probability: probability(id) }).collect();
        Step { text: text_of(written), probability: probability(written), candidates }
    };
    rows.zip(&observed.targets).map(step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_become_words_and_a_space_belongs_to_the_word_behind_it() {
        let pieces =
            [("Nov", true), ("ember", false), (" ", true), ("1", true), ("5", false), ("", true), ("日", false)];
        let pieces = pieces.map(|(text, begins_word)| Piece { text: text.into(), begins_word });
        let words: Vec<usize> = words(pieces.to_vec()).into_iter().map(|(_, word)| word).collect();
        assert_eq!(words, [0, 0, 1, 1, 1, 2, 2]);
    }
}
