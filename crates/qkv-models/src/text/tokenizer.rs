//! Text as numbers and back. A [`Tokenizer`] is a `tokenizer.json`, the format of the Hugging Face library, trained here from
//! a corpus or read from anyone's file; one serves both languages of a model. How the text is cut is said in
//! [`training`], what a hostile file is refused for in `checks`, and how pieces are shown in [`pieces`].

mod checks;
mod of_gguf;
pub mod pieces;
pub mod training;

pub use pieces::Piece;
pub use training::Kind;

use crate::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Names of the special tokens, in the order of their numbers in a tokenizer that was trained here.
const SPECIALS: [&str; 4] = ["<pad>", "<s>", "</s>", "<unk>"];
/// What others call them, most telling first. A tokenizer without padding pads with its end, one without a start begins
/// with its end.
const PAD: &[&str] = &["<pad>", "[PAD]", "<|pad|>"];
const START: &[&str] = &["<s>", "[CLS]", "<bos>", "<|startoftext|>", "<|im_start|>", "<|begin_of_text|>"];
const END: &[&str] = &["</s>", "[SEP]", "<eos>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>"];
const UNKNOWN: &[&str] = &["<unk>", "[UNK]"];

/// A piece of a text, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedToken {
    /// Its number.
    pub id: u32,
    /// Its bytes in the text.
    pub place: std::ops::Range<usize>,
    /// The word that it is a part of, counted from 0.
    pub word: usize,
}

/// Cuts text into pieces with numbers, and puts it together again.
///
/// ```
/// use qkv_models::text::tokenizer::{Kind, Tokenizer};
///
/// let texts = ["好久不见。", "Long time, no see.", "Long ago, a long time."];
/// let tokenizer = Tokenizer::train(texts, Kind::Bpe { size: 320 })?;
/// let ids = tokenizer.encode("好久不见, long time!");
/// assert_eq!(tokenizer.decode(&ids), "好久不见, long time!");
/// assert_eq!((tokenizer.pad(), tokenizer.bos(), tokenizer.eos(), tokenizer.unk()), (0, 1, 2, Some(3)));
/// # Ok::<(), qkv_models::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    len: usize,
    pad: u32,
    bos: u32,
    eos: u32,
    unk: Option<u32>,
    marks: pieces::Marks,
}

impl Tokenizer {
    /// Trains a tokenizer: the same texts in the same order give the same file, byte for byte.
    pub fn train<S: AsRef<str>>(texts: impl IntoIterator<Item = S>, kind: Kind) -> Result<Self> {
        let json = training::train(texts, kind)?;
        Tokenizer::from_bytes(json.as_bytes(), "tokenizer.json")
    }

    /// Reads a `tokenizer.json`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = checks::read(path)?;
        Tokenizer::from_bytes(&bytes, path)
    }

    /// A tokenizer from the bytes of a `tokenizer.json`; `path` is what errors call it.
    ///
    /// ```
    /// let error = qkv_models::text::tokenizer::Tokenizer::from_bytes(b"{}", "my.json").expect_err("it is empty");
    /// assert_eq!(error.to_string(), "`my.json`: field `model`: it is missing");
    /// ```
    pub fn from_bytes(bytes: &[u8], path: impl AsRef<Path>) -> Result<Self> {
        Self::from_bytes_at(bytes, path.as_ref())
    }

    /// `from_bytes` for the one type of path: compiled here, once, and not again by every caller.
    fn from_bytes_at(bytes: &[u8], path: &Path) -> Result<Self> {
        checks::check(bytes, path)?;
        let whole = |what: String| Error::format(path, "tokenizer", what);
        let text = std::str::from_utf8(bytes).map_err(|e| whole(e.to_string()))?;
        // The checks refuse what is known to make the library panic; should there be more, it is still an error.
        let mut inner = catch_unwind(|| text.parse::<tokenizers::Tokenizer>())
            .map_err(|_| whole("it cannot be built".into()))?
            .map_err(|e| whole(e.to_string()))?;
        // Text is text: a sentence that contains `</s>` does not end there.
        inner.set_encode_special_tokens(true);
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| whole(e.to_string()))?;

        let vocabulary = inner.get_vocab(true);
        let highest = vocabulary.values().max().copied().ok_or_else(|| whole("it has no tokens".into()))?;
        if highest as usize >= checks::MOST_TOKENS {
            return Err(whole(format!("a token has number {highest}, expected less than {}", checks::MOST_TOKENS)));
        }
        let find = |names: &[&str]| names.iter().find_map(|&name| vocabulary.get(name).copied());
        let eos = find(END).ok_or_else(|| whole("it has no token that ends a sentence".into()))?;
        let (pad, bos, unk) = (find(PAD).unwrap_or(eos), find(START).unwrap_or(eos), find(UNKNOWN));
        let marks = match inner.get_model() {
            tokenizers::ModelWrapper::WordLevel(_) => pieces::Marks::None,
            _ => pieces::Marks::of(vocabulary.keys()),
        };
        Ok(Tokenizer { inner, len: highest as usize + 1, pad, bos, eos, unk, marks })
    }

    /// The tokenizer inside a GGUF file.
    ///
    /// # Errors
    /// Names the value of the file that is missing or not supported.
    pub fn of_gguf(file: &crate::files::gguf::Gguf) -> Result<Self> {
        Tokenizer::from_bytes(of_gguf::json(file)?.as_bytes(), file.path())
    }

    /// The special tokens, by name, longest first.
    pub fn specials(&self) -> Vec<(String, u32)> {
        let added = self.inner.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special && !token.content.is_empty());
        let mut specials: Vec<(String, u32)> = special.map(|(&id, token)| (token.content.clone(), id)).collect();
        specials.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then_with(|| a.cmp(b)));
        specials
    }

    /// The name of a token.
    pub fn name(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The numbers of one or two texts between the special tokens that the file puts around them, and which of the two each
    /// belongs to: what an encoder reads.
    pub fn encode_framed(&self, first: &str, second: Option<&str>) -> (Vec<u32>, Vec<u32>) {
        let encoded = catch_unwind(AssertUnwindSafe(|| match second {
            Some(second) => self.inner.encode_fast((first, second), true),
            None => self.inner.encode_fast(first, true),
        }));
        match encoded {
            Ok(Ok(encoding)) => (encoding.get_ids().to_vec(), encoding.get_type_ids().to_vec()),
            _ => self.unk.map_or_else(Default::default, |unk| (vec![unk], vec![0])),
        }
    }

    /// A question and a text as one: their numbers, which of the two each belongs to, and where in the text, in characters,
    /// each of the text stands.
    #[allow(clippy::type_complexity)]
    pub fn encode_asked(&self, question: &str, text: &str) -> (Vec<u32>, Vec<u32>, Vec<Option<(usize, usize)>>) {
        let encoded = catch_unwind(AssertUnwindSafe(|| self.inner.encode_char_offsets((question, text), true)));
        let Ok(Ok(encoding)) = encoded else { return Default::default() };
        let sides = encoding.get_sequence_ids();
        let places =
            encoding.get_offsets().iter().zip(&sides).map(|(&place, side)| (*side == Some(1)).then_some(place));
        (encoding.get_ids().to_vec(), encoding.get_type_ids().to_vec(), places.collect())
    }

    /// The numbers of a text's pieces, and where in the text each stands: what is unknown can still be shown.
    ///
    /// ```
    /// # use qkv_models::text::tokenizer::{Kind, Tokenizer};
    /// let tokenizer = Tokenizer::train(["a good film", "a good one"], Kind::Words { size: 100 })?;
    /// let placed = tokenizer.encode_placed("A good opera!");
    /// let said: Vec<&str> = placed.iter().map(|piece| &"A good opera!"[piece.place.clone()]).collect();
    /// assert_eq!(said, ["A", "good", "opera", "!"]);
    /// assert_eq!((Some(placed[2].id), placed[2].word), (tokenizer.unk(), 2));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    pub fn encode_placed(&self, text: &str) -> Vec<PlacedToken> {
        let encoded = catch_unwind(AssertUnwindSafe(|| self.inner.encode(text, false)));
        let Ok(Ok(encoding)) = encoded else {
            let whole = |id| PlacedToken { id, place: 0..text.len(), word: 0 };
            return self.unk.map(whole).into_iter().collect();
        };
        let pieces = encoding.get_ids().iter().zip(encoding.get_offsets()).zip(encoding.get_word_ids());
        let placed = pieces.enumerate().map(|(at, ((&id, &(from, to)), word))| {
            // A mark that stands for a space has no place of its own: what is cut out of a text is text.
            let place = if text.get(from..to).is_some() { from..to } else { 0..0 };
            PlacedToken { id, place, word: word.map_or(at, |word| word as usize) }
        });
        placed.collect()
    }

    /// The same tokenizer, which puts its start and its end around what an encoder reads, and its end between two texts.
    ///
    /// # Errors
    /// Where it has no names for them.
    pub fn framed(&self) -> Result<Self> {
        let name = |id| self.name(id).ok_or_else(|| Error::invalid("the tokenizer does not name its special tokens"));
        let (start, end) = (name(self.bos)?, name(self.eos)?);
        let mut file: serde_json::Value = serde_json::from_str(&self.to_json()).expect("just written");
        let special = |id: &str, text: u32| serde_json::json!({ "SpecialToken": { "id": id, "type_id": text } });
        let all = |id: &str, text: u32| serde_json::json!({ "Sequence": { "id": id, "type_id": text } });
        let named = |name: &str, id: u32| serde_json::json!({ "id": name, "ids": [id], "tokens": [name] });
        file["post_processor"] = serde_json::json!({
            "type": "TemplateProcessing",
            "single": [special(&start, 0), all("A", 0), special(&end, 0)],
            "pair": [special(&start, 0), all("A", 0), special(&end, 0), all("B", 1), special(&end, 1)],
            "special_tokens": { &start: named(&start, self.bos), &end: named(&end, self.eos) },
        });
        Tokenizer::from_bytes(file.to_string().as_bytes(), "tokenizer.json")
    }

    /// The `tokenizer.json` of this tokenizer.
    pub fn to_json(&self) -> String {
        self.inner.to_string(true).expect("a tokenizer is strings and numbers")
    }

    /// Writes the `tokenizer.json`, whole or not at all.
    ///
    /// ```
    /// # use qkv_models::text::tokenizer::{Kind, Tokenizer};
    /// # let folder = tempfile::tempdir().unwrap();
    /// let tokenizer = Tokenizer::train(["3 1 2"], Kind::Characters)?;
    /// tokenizer.save(folder.path().join("tokenizer.json"))?;
    /// let again = Tokenizer::open(folder.path().join("tokenizer.json"))?;
    /// assert_eq!(again.encode("1 2 3"), tokenizer.encode("1 2 3"));
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        crate::files::atomic::write(path, self.to_json().as_bytes())
    }

    /// The numbers of a text's pieces, with no start or end added.
    ///
    /// Special tokens that stand in the text are text. A text that the tokenizer cannot cut, which only a file from
    /// elsewhere can cause, is unknown as a whole.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let encoded = catch_unwind(AssertUnwindSafe(|| self.inner.encode_fast(text, false)));
        match encoded {
            Ok(Ok(encoding)) => encoding.get_ids().to_vec(),
            _ => self.unk.into_iter().collect(),
        }
    }

    /// The numbers of a text of many lines. Where lines are cut alike whatever stands around them they are cut one by one,
    /// which takes time that grows with the text and no faster.
    pub fn encode_text(&self, text: &str) -> Vec<u32> {
        if self.inner.get_pre_tokenizer().is_some() {
            return self.encode(text);
        }
        text.split_inclusive('\n').flat_map(|line| self.encode(line)).collect()
    }

    /// The text of pieces, special tokens left out; numbers that are no token are left out too.
    pub fn decode(&self, ids: &[u32]) -> String {
        catch_unwind(AssertUnwindSafe(|| self.inner.decode(ids, true))).ok().and_then(Result::ok).unwrap_or_default()
    }

    /// The text that `decode(encode(text))` gives back where nothing is unknown: one form for each character (NFC), one
    /// space where there was any white space, none at the ends.
    ///
    /// ```
    /// # use qkv_models::text::tokenizer::{Kind, Tokenizer};
    /// let tokenizer = Tokenizer::train(["a cafe"], Kind::Bpe { size: 300 })?;
    /// assert_eq!(tokenizer.normalise("  a\u{3000}\tcafe\u{301} "), "a café");
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    pub fn normalise(&self, text: &str) -> String {
        use tokenizers::{NormalizedString, Normalizer};
        let mut normalised = NormalizedString::from(text);
        if let Some(normaliser) = self.inner.get_normalizer()
            && normaliser.normalize(&mut normalised).is_err()
        {
            return text.to_owned();
        }
        let text = normalised.get();
        text.strip_prefix(' ').unwrap_or(text).to_owned()
    }

    /// The pieces behind numbers, as a person reads them.
    ///
    /// ```
    /// # use qkv_models::text::tokenizer::{Kind, Tokenizer};
    /// let tokenizer = Tokenizer::train(["no see. no see. 不见"; 2], Kind::Bpe { size: 300 })?;
    /// let pieces = tokenizer.pieces(&tokenizer.encode("no see. 不见"));
    /// let shown: Vec<(&str, bool)> = pieces.iter().map(|p| (p.text.as_str(), p.begins_word)).collect();
    /// assert_eq!(shown, [("no", true), ("see", true), (".", true), ("", true), ("不", false), ("见", true)]);
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    pub fn pieces(&self, ids: &[u32]) -> Vec<Piece> {
        let tokens: Vec<String> = ids.iter().map(|&id| self.inner.id_to_token(id).unwrap_or_default()).collect();
        pieces::pieces(&tokens, self.marks)
    }

    /// How many numbers there are: the rows of an embedding.
    #[expect(clippy::len_without_is_empty, reason = "a tokenizer has at least its special tokens")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The number that fills the end of shorter sentences in a batch.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// The number a sentence begins with.
    pub fn bos(&self) -> u32 {
        self.bos
    }

    /// The number a sentence ends with.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// The number of what has none, where there is such a number: a tokenizer of bytes needs none.
    pub fn unk(&self) -> Option<u32> {
        self.unk
    }
}
