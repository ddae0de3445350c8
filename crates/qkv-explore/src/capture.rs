//! From a run of a model to a [`Recording`]: the tokens as a person reads them, and every attention that was computed.

use crate::layer::{Computed, Layer, Seen};
use crate::recording::{Candidate, Form, Recording, Side, Step, Token};
use qkv_models::image::Image;
use qkv_models::text::tokenizer::{Piece, Tokenizer};
use qkv_models::{
    Document, Encoder, Error, Generation, Generator, Group, Han, Observed, ObservedAttention, ObservedDocument,
    ObservedImage, Result, Translator, Vit,
};
use qkv_nn::Machine;

/// How many tokens that might have been written are kept for each step.
const CANDIDATES: usize = 8;

/// Where the sides of a translation stand.
const SOURCE: usize = 0;
const READ: usize = 1;
const WRITTEN: usize = 2;

/// Translates a text, or takes the translation that is given, and records what the model attended to on the way.
///
/// # Errors
/// Where there is nothing to translate, or more than the model takes.
pub fn translation(translator: &Translator, text: &str, target: Option<&str>, machine: &Machine) -> Result<Recording> {
    let source = translator.tokenizer.encode(text);
    if source.is_empty() {
        return Err(Error::invalid("there is no text to look at").with_hint("give a sentence"));
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
    let recurrent = observed.attentions.iter().all(|seen| seen.group == Group::Cross);
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
        layers: observed.attentions.into_iter().map(|seen| layer(seen, recurrent)).collect(),
    })
}

/// Goes on with a text, or takes what is said to have come after it, and records what each token attended to.
///
/// # Errors
/// Where there is no text, or more than the model takes.
pub fn continuation(
    generator: &Generator,
    text: &str,
    target: Option<&str>,
    how: &Generation,
    machine: &Machine,
) -> Result<Recording> {
    let prompt = generator.tokenizer.encode_text(text);
    if prompt.is_empty() {
        return Err(Error::invalid("there is no text to look at").with_hint("give a sentence"));
    }
    let (said, output) = match target {
        Some(target) => (generator.tokenizer.encode(target), target.to_owned()),
        None => {
            let found = generator.generate(&prompt, how, machine, &mut |_| true)?;
            (found.tokens, found.text)
        }
    };
    let mut tokens = [prompt, said].concat();
    tokens.truncate(generator.model.max_len());
    let observed = generator.observe(&tokens, machine)?;
    Ok(alone(text, Some(output), &tokens, observed.attentions, &generator.tokenizer))
}

/// Reads a text, or two, and records what each token attended to.
///
/// # Errors
/// Where there is no text.
pub fn reading(encoder: &Encoder, first: &str, second: Option<&str>, machine: &Machine) -> Result<Recording> {
    if first.trim().is_empty() {
        return Err(Error::invalid("there is no text to look at").with_hint("give a sentence"));
    }
    let observed = encoder.observe(first, second, machine)?;
    Ok(alone(first, None, &observed.source, observed.attentions, &encoder.tokenizer))
}

/// A run over one sequence.
fn alone(
    text: &str,
    output: Option<String>,
    tokens: &[u32],
    attentions: Vec<ObservedAttention>,
    tokenizer: &Tokenizer,
) -> Recording {
    let layers = attentions.into_iter().map(|seen| {
        let name = format!("layers.{}.self_attn", seen.layer);
        kept(seen, &name, [0, 0])
    });
    Recording {
        text: text.to_owned(),
        output,
        sides: vec![side("tokens", tokens, tokenizer)],
        layers: layers.collect(),
        steps: Vec::new(),
        form: None,
    }
}

/// Reads a document, and records what it attended to: its sentences, and each sentence its words.
///
/// # Errors
/// Where there is no text.
pub fn document(han: &Han, text: &str, machine: &Machine) -> Result<Recording> {
    let ObservedDocument { document, probabilities, attentions } = han.observe(text, machine)?;
    let Some([of_words, of_sentences]) = attentions else {
        return Err(Error::invalid("there is no text to look at").with_hint("give a document of one or more sentences"));
    };
    let reading = Shown { document: &document, text };
    let whole = Token { text: "‹document›".into(), word: None, special: true, id: None };
    Ok(Recording {
        text: text.to_owned(),
        output: Some(likeliest(&probabilities, &han.config.labels)),
        sides: vec![
            Side { name: "document".into(), tokens: vec![whole] },
            Side::of_words("sentences", reading.sentences()),
            Side { name: "words".into(), tokens: reading.words() },
        ],
        layers: vec![kept(of_sentences, "sentences.attention", [0, 1]), kept(of_words, "words.attention", [1, 2])],
        steps: Vec::new(),
        form: Some(Form::Document { sentences: 0, words: 1, lengths: document.lengths() }),
    })
}

/// Sees an image, and records what each of its patches attended to; `name` is what it is called.
///
/// # Errors
/// What `qkv` refuses.
pub fn image(vit: &Vit, name: &str, image: &Image, machine: &Machine) -> Result<Recording> {
    let ObservedImage { image, probabilities, attentions } = vit.observe(image, machine)?;
    let grid = vit.config.grid();
    let patch = |at: usize| Token { text: format!("{}·{}", at / grid, at % grid), word: Some(at), ..Token::default() };
    let class = Token { text: "‹class›".into(), word: None, special: true, id: None };
    let tokens = std::iter::once(class).chain((0..grid * grid).map(patch)).collect();
    let named = |seen: ObservedAttention| {
        let name = format!("layers.{}.self_attn", seen.layer);
        kept(seen, &name, [0, 0])
    };
    Ok(Recording {
        text: name.to_owned(),
        output: Some(likeliest(&probabilities, &vit.config.labels)),
        sides: vec![Side { name: "patches".into(), tokens }],
        layers: attentions.into_iter().map(named).collect(),
        steps: Vec::new(),
        form: Some(Form::Image {
            grid: [grid, grid],
            width: image.width(),
            height: image.height(),
            points: image.in_channels(3).points().to_vec(),
        }),
    })
}

/// The likeliest class, and how likely it is.
fn likeliest(probabilities: &[f32], labels: &[String]) -> String {
    let best = labels.iter().zip(probabilities).reduce(|best, other| if other.1 > best.1 { other } else { best });
    best.map_or(String::new(), |(label, share)| format!("{label} {share:.4}"))
}

/// An attention as a layer from one side to another.
fn kept(seen: ObservedAttention, name: &str, [queries, keys]: [usize; 2]) -> Layer {
    let ObservedAttention { group, attention, inputs, output, .. } = seen;
    let seen = Seen::Computed(Box::new(Computed { attention, inputs, output }));
    Layer { name: name.to_owned(), group: group.name().to_owned(), queries, keys, seen, importance: None }
}

/// A document beside the text that it was cut from.
struct Shown<'a> {
    document: &'a Document,
    text: &'a str,
}

impl Shown<'_> {
    fn sentences(&self) -> Vec<String> {
        self.document.sentence_ranges().map(|range| self.text[range].trim().to_owned()).collect()
    }

    /// Pieces, each with the word that it is a part of.
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
/// Where the recording is of no translation with numbered tokens.
pub fn importance(translator: &Translator, recording: &Recording, machine: &Machine) -> Result<Vec<Vec<f64>>> {
    let ids = |side: usize| -> Option<Vec<u32>> {
        let tokens = &recording.sides.get(side)?.tokens;
        tokens[..tokens.len().checked_sub(1)?].iter().map(|token| token.id).collect()
    };
    let (Some(source), Some(target)) = (ids(SOURCE), ids(WRITTEN)) else {
        return Err(Error::invalid("only a translation that was recorded here has the importance of its heads"));
    };
    translator.importance(&source, &target, machine)
}

fn layer(seen: ObservedAttention, recurrent: bool) -> Layer {
    let layer = seen.layer;
    let (name, sides) = match seen.group {
        Group::Decoder => (format!("decoder.layers.{layer}.self_attn"), [READ, READ]),
        Group::Cross if recurrent => ("decoder.attention".to_owned(), [WRITTEN, SOURCE]),
        Group::Cross => (format!("decoder.layers.{layer}.encoder_attn"), [WRITTEN, SOURCE]),
        _ => (format!("encoder.layers.{layer}.self_attn"), [SOURCE, SOURCE]),
    };
    kept(seen, &name, sides)
}

/// Tokens as a person reads them, put together to words.
pub(crate) fn side(name: &str, ids: &[u32], tokenizer: &Tokenizer) -> Side {
    let named = tokenizer.specials();
    let special = |id: u32| {
        [tokenizer.pad(), tokenizer.bos(), tokenizer.eos()].contains(&id) || named.iter().any(|(_, other)| *other == id)
    };
    let text: Vec<u32> = ids.iter().copied().filter(|&id| !special(id)).collect();
    let mut pieces = words(tokenizer.pieces(&text)).into_iter();
    let token = |&id: &u32| match special(id) {
        true => Token { text: name_of(id, tokenizer), word: None, special: true, id: Some(id) },
        false => {
            let (text, word) = pieces.next().unwrap_or_default();
            Token { text, word: Some(word), special: false, id: Some(id) }
        }
    };
    Side { name: name.into(), tokens: ids.iter().map(token).collect() }
}

/// What a token that stands for no text is called: our own in words, others as their makers call them.
fn name_of(id: u32, tokenizer: &Tokenizer) -> String {
    let named = tokenizer.name(id).unwrap_or_default();
    match named.as_str() {
        "</s>" => "‹end›".into(),
        "<s>" => "‹start›".into(),
        "<pad>" => "‹pad›".into(),
        _ => named,
    }
}

/// What each piece says, and which word it belongs to. A piece that is only a space belongs to the word behind it.
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
    let said = |id: u32| match side("", &[id], tokenizer).tokens.pop() {
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
        let candidates = order.iter().map(|&id| Candidate { text: said(id), probability: probability(id) }).collect();
        Step { text: said(written), probability: probability(written), candidates }
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
