//! Tokenizers: text to token ids and back. A [`Tokenizer`] is a `tokenizer.json` of the Hugging Face library, trained
//! here or read from a file; a translation model has one for both languages. The kinds are described in [`training`];
//! checks of hostile files are in `checks`, display of tokens in [`pieces`].

mod checks;
pub mod merges;
mod of_gguf;
pub mod pieces;
pub mod training;

pub use pieces::Piece;
pub use training::Kind;

use crate::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Special tokens of a tokenizer trained here, in the order of their ids.
const SPECIALS: [&str; 4] = ["<pad>", "<s>", "</s>", "<unk>"];
/// Common names of special tokens, the most specific first. The end token replaces a missing padding or start token.
const PAD: &[&str] = &["<pad>", "[PAD]", "<|pad|>"];
const START: &[&str] = &["<s>", "[CLS]", "<bos>", "<|startoftext|>", "<|im_start|>", "<|begin_of_text|>", "[BOS]"];
const END: &[&str] = &["</s>", "[SEP]", "<eos>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "[EOS]"];
const UNKNOWN: &[&str] = &["<unk>", "[UNK]"];

/// Known tokenizers' normalizers lengthen a text by less than this factor; with them, texts may have any length.
const USUAL_GROWTH: u64 = 128;
/// With other normalizers, the longest normalized text in bytes.
const MAX_NORMALIZED: u64 = 16 << 20;

/// A token with its place in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedToken {
    /// Its id.
    pub id: u32,
    /// Its byte range in the text.
    pub place: std::ops::Range<usize>,
    /// The word it belongs to, counted from 0.
    pub word: usize,
}

/// Tokenizes text and decodes tokens.
///
/// ```
/// use qkv_formats::text::tokenizer::{Kind, Tokenizer};
///
/// let texts = ["好久不见。", "Long time, no see.", "Long ago, a long time."];
/// let tokenizer = Tokenizer::train(texts, Kind::Bpe { size: 320 })?;
/// let ids = tokenizer.encode("好久不见, long time!");
/// assert_eq!(tokenizer.decode(&ids), "好久不见, long time!");
/// assert_eq!((tokenizer.pad(), tokenizer.bos(), tokenizer.eos(), tokenizer.unk()), (0, 1, 2, Some(3)));
/// # Ok::<(), qkv_formats::Error>(())
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
    /// Upper bound on the factor by which the normalizer lengthens a text.
    growth: u64,
    /// The token that the post-processor puts before a text.
    start: Option<u32>,
}

impl Tokenizer {
    /// Trains a tokenizer. The same texts in the same order give the same file, byte for byte.
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

    /// Parses the bytes of a `tokenizer.json`; `path` is only for error messages.
    ///
    /// ```
    /// let error = qkv_formats::text::tokenizer::Tokenizer::from_bytes(b"{}", "my.json").expect_err("it is empty");
    /// assert_eq!(error.to_string(), "`my.json`: field `model`: it is missing");
    /// ```
    pub fn from_bytes(bytes: &[u8], path: impl AsRef<Path>) -> Result<Self> {
        Self::from_bytes_at(bytes, path.as_ref())
    }

    fn from_bytes_at(bytes: &[u8], path: &Path) -> Result<Self> {
        let growth = checks::check(bytes, path)?;
        let whole = |what: String| Error::format(path, "tokenizer", what);
        let text = std::str::from_utf8(bytes).map_err(|e| whole(e.to_string()))?;
        // The checks reject files that are known to make the library panic; any other panic becomes an error here.
        let mut inner = catch_unwind(|| text.parse::<tokenizers::Tokenizer>())
            .map_err(|_| whole("it cannot be built".into()))?
            .map_err(|e| whole(e.to_string()))?;
        // Special tokens in a text are plain text: a sentence that contains `</s>` does not end there.
        inner.set_encode_special_tokens(true);
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| whole(e.to_string()))?;

        let vocabulary = inner.get_vocab(true);
        let highest = vocabulary.values().max().copied().ok_or_else(|| whole("it has no tokens".into()))?;
        if highest as usize >= checks::MAX_TOKENS {
            return Err(whole(format!("a token has number {highest}, expected less than {}", checks::MAX_TOKENS)));
        }
        // Special tokens take precedence: a vocabulary may have `<s>`, HTML's strike-through, as a word.
        let added = inner.get_added_tokens_decoder();
        let special = |id: &u32| added.get(id).is_some_and(|token| token.special);
        let find = |names: &[&str]| {
            let find = |of: &dyn Fn(&u32) -> bool| {
                names.iter().find_map(|&name| vocabulary.get(name).filter(|id| of(id)).copied())
            };
            find(&special).or_else(|| find(&|_| true))
        };
        let eos = find(END).ok_or_else(|| whole("it has no token that ends a sentence".into()))?;
        let (pad, bos, unk) = (find(PAD).unwrap_or(eos), find(START).unwrap_or(eos), find(UNKNOWN));
        let marks = match inner.get_model() {
            tokenizers::ModelWrapper::WordLevel(_) => pieces::Marks::None,
            _ => pieces::Marks::of(vocabulary.keys()),
        };
        let framed = catch_unwind(AssertUnwindSafe(|| inner.encode_fast("", true).map(|of| of.get_ids().to_vec())));
        let first = framed.ok().and_then(Result::ok).and_then(|ids| ids.first().copied());
        let start = first.filter(|&id| id != eos || id == bos);
        Ok(Tokenizer { inner, len: highest as usize + 1, pad, bos, eos, unk, marks, growth, start })
    }

    /// Reads the tokenizer of a GGUF file.
    ///
    /// # Errors
    /// Names the metadata value that is missing or not supported.
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

    /// The string of a token.
    pub fn name(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Ids of one text or two with the post-processor's special tokens, and the segment of each token: the input of an
    /// encoder.
    pub fn encode_framed(&self, first: &str, second: Option<&str>) -> (Vec<u32>, Vec<u32>) {
        if self.is_too_long(first) || second.is_some_and(|second| self.is_too_long(second)) {
            return self.unk.map_or_else(Default::default, |unk| (vec![unk], vec![0]));
        }
        let encoded = catch_unwind(AssertUnwindSafe(|| match second {
            Some(second) => self.inner.encode_fast((first, second), true),
            None => self.inner.encode_fast(first, true),
        }));
        match encoded {
            Ok(Ok(encoding)) => (encoding.get_ids().to_vec(), encoding.get_type_ids().to_vec()),
            _ => self.unk.map_or_else(Default::default, |unk| (vec![unk], vec![0])),
        }
    }

    /// Ids of a question and a text as one sequence, the segment of each token and, for tokens of the text, the
    /// character range in it.
    #[allow(clippy::type_complexity)]
    pub fn encode_asked(&self, question: &str, text: &str) -> (Vec<u32>, Vec<u32>, Vec<Option<(usize, usize)>>) {
        if self.is_too_long(question) || self.is_too_long(text) {
            return Default::default();
        }
        let encoded = catch_unwind(AssertUnwindSafe(|| self.inner.encode_char_offsets((question, text), true)));
        let Ok(Ok(encoding)) = encoded else { return Default::default() };
        let sides = encoding.get_sequence_ids();
        let places =
            encoding.get_offsets().iter().zip(&sides).map(|(&place, side)| (*side == Some(1)).then_some(place));
        (encoding.get_ids().to_vec(), encoding.get_type_ids().to_vec(), places.collect())
    }

    /// Ids of a text, each with its byte range, so that even unknown words can be shown.
    ///
    /// ```
    /// # use qkv_formats::text::tokenizer::{Kind, Tokenizer};
    /// let tokenizer = Tokenizer::train(["a good film", "a good one"], Kind::Words { size: 100 })?;
    /// let placed = tokenizer.encode_placed("A good opera!");
    /// let said: Vec<&str> = placed.iter().map(|piece| &"A good opera!"[piece.place.clone()]).collect();
    /// assert_eq!(said, ["A", "good", "opera", "!"]);
    /// assert_eq!((Some(placed[2].id), placed[2].word), (tokenizer.unk(), 2));
    /// # Ok::<(), qkv_formats::Error>(())
    /// ```
    pub fn encode_placed(&self, text: &str) -> Vec<PlacedToken> {
        let encode = || if self.is_too_long(text) { Err("too long".into()) } else { self.inner.encode(text, false) };
        let encoded = catch_unwind(AssertUnwindSafe(encode));
        let Ok(Ok(encoding)) = encoded else {
            let whole = |id| PlacedToken { id, place: 0..text.len(), word: 0 };
            return self.unk.map(whole).into_iter().collect();
        };
        let pieces = encoding.get_ids().iter().zip(encoding.get_offsets()).zip(encoding.get_word_ids());
        let placed = pieces.enumerate().map(|(at, ((&id, &(from, to)), word))| {
            // The range of a token that only marks a space may split a character.
            let place = if text.get(from..to).is_some() { from..to } else { 0..0 };
            PlacedToken { id, place, word: word.map_or(at, |word| word as usize) }
        });
        placed.collect()
    }

    /// The same tokenizer with a post-processor that adds a start token before a text and an end token after each text.
    ///
    /// # Errors
    /// If the special tokens have no names.
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

    /// The same tokenizer with more special tokens, whose ids follow the existing ones.
    ///
    /// ```
    /// use qkv_formats::text::tokenizer::{Kind, Tokenizer};
    /// let tokenizer = Tokenizer::train(["3 1 2"], Kind::Characters)?;
    /// let more = tokenizer.with_specials(&["<tool>".to_owned()])?;
    /// assert_eq!((more.len(), more.name(tokenizer.len() as u32).as_deref()), (tokenizer.len() + 1, Some("<tool>")));
    /// # Ok::<(), qkv_formats::Error>(())
    /// ```
    ///
    /// # Errors
    /// If a name is empty, or the resulting file cannot be parsed.
    pub fn with_specials(&self, names: &[String]) -> Result<Self> {
        if names.iter().any(|name| name.trim().is_empty()) {
            return Err(Error::invalid("a special token without a name"));
        }
        let mut inner = self.inner.clone();
        let tokens = names.iter().map(|name| tokenizers::AddedToken::from(name.clone(), true));
        inner.add_special_tokens(tokens.collect::<Vec<_>>()).map_err(|e| Error::invalid(e.to_string()))?;
        let json = inner.to_string(true).map_err(|e| Error::invalid(e.to_string()))?;
        Tokenizer::from_bytes(json.as_bytes(), "tokenizer.json")
    }

    /// The `tokenizer.json` of this tokenizer.
    pub fn to_json(&self) -> String {
        self.inner.to_string(true).expect("a tokenizer is strings and numbers")
    }

    /// Writes the `tokenizer.json` atomically.
    ///
    /// ```
    /// # use qkv_formats::text::tokenizer::{Kind, Tokenizer};
    /// # let folder = tempfile::tempdir().unwrap();
    /// let tokenizer = Tokenizer::train(["3 1 2"], Kind::Characters)?;
    /// tokenizer.save(folder.path().join("tokenizer.json"))?;
    /// let again = Tokenizer::open(folder.path().join("tokenizer.json"))?;
    /// assert_eq!(again.encode("1 2 3"), tokenizer.encode("1 2 3"));
    /// # Ok::<(), qkv_formats::Error>(())
    /// ```
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        crate::files::atomic::write(path, self.to_json().as_bytes())
    }

    /// Ids of a text, without special tokens.
    ///
    /// Special tokens that occur in the text are tokenized as text. If the tokenizer fails, which only a foreign file
    /// can cause, the whole text is one unknown token.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        if self.is_too_long(text) {
            return self.unk.into_iter().collect();
        }
        let encoded = catch_unwind(AssertUnwindSafe(|| self.inner.encode_fast(text, false)));
        match encoded {
            Ok(Ok(encoding)) => encoding.get_ids().to_vec(),
            _ => self.unk.into_iter().collect(),
        }
    }

    /// Whether normalizing a text could take unbounded memory, which only a foreign file's rules can cause.
    fn is_too_long(&self, text: &str) -> bool {
        self.growth > USUAL_GROWTH && (text.len() as u64).saturating_mul(self.growth) > MAX_NORMALIZED
    }

    /// Ids of a text of many lines. Without a pre-tokenizer, lines are tokenized one by one, in time linear in the
    /// text.
    pub fn encode_text(&self, text: &str) -> Vec<u32> {
        if self.inner.get_pre_tokenizer().is_some() {
            return self.encode(text);
        }
        text.split_inclusive('\n').flat_map(|line| self.encode(line)).collect()
    }

    /// Ids of a text that a model continues: those of [`encode_text`](Tokenizer::encode_text), after the start token if
    /// the tokenizer puts one before a text.
    pub fn encode_prompt(&self, text: &str) -> Vec<u32> {
        self.start.into_iter().chain(self.encode_text(text)).collect()
    }

    /// The text of tokens, without special and unknown ids.
    pub fn decode(&self, ids: &[u32]) -> String {
        catch_unwind(AssertUnwindSafe(|| self.inner.decode(ids, true))).ok().and_then(Result::ok).unwrap_or_default()
    }

    /// The text that `decode(encode(text))` returns if no token is unknown: NFC, single spaces, none at the ends.
    ///
    /// ```
    /// # use qkv_formats::text::tokenizer::{Kind, Tokenizer};
    /// let tokenizer = Tokenizer::train(["a cafe"], Kind::Bpe { size: 300 })?;
    /// assert_eq!(tokenizer.normalise("  a\u{3000}\tcafe\u{301} "), "a café");
    /// # Ok::<(), qkv_formats::Error>(())
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

    /// Tokens as a reader expects to see them.
    ///
    /// ```
    /// # use qkv_formats::text::tokenizer::{Kind, Tokenizer};
    /// let tokenizer = Tokenizer::train(["no see. no see. 不见"; 2], Kind::Bpe { size: 300 })?;
    /// let pieces = tokenizer.pieces(&tokenizer.encode("no see. 不见"));
    /// let shown: Vec<(&str, bool)> = pieces.iter().map(|p| (p.text.as_str(), p.begins_word)).collect();
    /// assert_eq!(shown, [("no", true), ("see", true), (".", true), ("", true), ("不", false), ("见", true)]);
    /// # Ok::<(), qkv_formats::Error>(())
    /// ```
    pub fn pieces(&self, ids: &[u32]) -> Vec<Piece> {
        let tokens: Vec<String> = ids.iter().map(|&id| self.inner.id_to_token(id).unwrap_or_default()).collect();
        pieces::pieces(&tokens, self.marks)
    }

    /// Number of ids: the rows of an embedding.
    #[expect(clippy::len_without_is_empty, reason = "a tokenizer has at least its special tokens")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Id of the padding token.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// Id of the start token.
    pub fn bos(&self) -> u32 {
        self.bos
    }

    /// Id of the end token.
    pub fn eos(&self) -> u32 {
        self.eos
    }

    /// Id of the unknown token; byte-level tokenizers have none.
    pub fn unk(&self) -> Option<u32> {
        self.unk
    }
}
