//! The data of a run, tokenized once, and its batches: pairs, plain text, labelled texts, or images.

use super::augmentation::Augmentation;
use super::image_data::{ClassedImages, ImageData};
use super::pair_data::PairData;
use super::picture_data::{PictureBatch, PictureData};
use super::voice_data::VoiceData;
use crate::architecture::Architecture;
use crate::batch::IGNORE;
use crate::batch::{Batch, SpecialTokens};
use crate::chat::{self, Message, Template};
use crate::draws::Draws;
use crate::encoder::{Example, Examples, Label};
use crate::files::packed;
use crate::labelled::{self, LabelledTexts};
use crate::recipe::{Data, Objective, TokenizerSource};
use crate::tasks;
use crate::text::batches::{Batching, Lengths};
use crate::text::corpus::{Corpus, Pair};
use crate::text::sentences::sentences;
use crate::text::tokenizer::Tokenizer;
use crate::voice::SpokenText;
use crate::{Document, Encoder, Error, Han, Recipe, Result, Vit};
use std::path::Path;

/// Training and validation data.
pub(super) enum Dataset {
    Pairs(PairData),
    Text(TextStream),
    Chat(ChatData),
    Masked(MaskedText),
    Labelled(LabelledData),
    Images(ImageData),
    Pictures(PictureData),
    Speaker(VoiceData),
}

/// The data of one batch.
pub(super) enum TrainBatch {
    Text(Batch),
    Examples(Examples),
    Documents(Vec<(Document, u32)>),
    Images(ClassedImages),
    Pictures(PictureBatch),
    Spoken(Vec<SpokenText>),
}

impl TrainBatch {
    /// Number of target tokens or labels.
    pub fn targets(&self) -> usize {
        match self {
            TrainBatch::Text(batch) => batch.tokens(),
            TrainBatch::Examples(examples) => examples.targets(),
            TrainBatch::Documents(documents) => documents.len(),
            TrainBatch::Images(batch) => batch.images.len(),
            TrainBatch::Pictures(batch) => batch.targets(),
            TrainBatch::Spoken(spoken) => spoken.iter().map(|one| one.count).sum(),
        }
    }
}

/// Conversations, tokenized with the model's template, and flags for the tokens of answers, which the model learns.
pub(super) struct ChatData {
    train: Vec<(Vec<u32>, Vec<bool>)>,
    lengths: Vec<Lengths>,
    /// Validation conversations.
    pub dev: Vec<(Vec<u32>, Vec<bool>)>,
    batching: Batching,
    pub pad: u32,
    pack: bool,
}

impl ChatData {
    /// Reads and tokenizes conversations.
    pub fn read(recipe: &Recipe, template: &Template, tokenizer: &Tokenizer, specials: SpecialTokens) -> Result<Self> {
        let Data::Chat { chat, dev, .. } = &recipe.data else {
            return Err(Error::invalid("the recipe names no conversations"));
        };
        let read = |path: &Path| {
            let tokens = |said: &Vec<Message>| template.encode_answers(said, tokenizer, [specials.bos, specials.eos]);
            let found: Vec<_> = chat::conversations(path)?.iter().map(tokens).collect::<Result<_>>()?;
            if found.is_empty() {
                return Err(Error::format(path, "conversations", "there are none"));
            }
            match found.iter().position(|(ids, answers)| ids.len() < 2 || !answers[1..].contains(&true)) {
                Some(at) => {
                    let part = format!("conversation {}", at + 1);
                    Err(Error::format(path, part, "the chat template renders no answer"))
                }
                None => Ok(found),
            }
        };
        let (train, dev) = (read(chat)?, read(dev)?);
        let lengths = train.iter().map(|(ids, _)| Lengths { source: ids.len(), target: ids.len() }).collect();
        let batching = Batching { tokens: recipe.train.tokens, longest: recipe.train.longest };
        Ok(ChatData { train, lengths, dev, batching, pad: specials.pad, pack: recipe.train.pack })
    }

    /// The batches of an epoch: by length, or, if packed, in random order up to the budget.
    fn epoch(&self, seed: u64, epoch: u64) -> Result<Vec<Vec<usize>>> {
        let batches = self.batching.epoch(&self.lengths, seed, epoch)?.batches;
        if !self.pack {
            return Ok(batches);
        }
        let mut order: Vec<usize> = batches.concat();
        order.sort_unstable();
        Draws::new(seed, [PACKS, epoch as u32, (epoch >> 32) as u32]).shuffle(&mut order);
        let (mut packs, mut size) = (vec![Vec::new()], 0);
        for at in order {
            let length = self.lengths[at].source;
            if size + length > self.batching.tokens && size > 0 {
                packs.push(Vec::new());
                size = 0;
            }
            size += length;
            packs.last_mut().expect("there is one").push(at);
        }
        Ok(packs)
    }

    fn batch(&self, entries: &[usize]) -> Batch {
        let rows = entries.iter().map(|&at| (&self.train[at].0[..], &self.train[at].1[..]));
        let batch = Batch::of_answers(rows, self.pad);
        if self.pack { batch.in_one_row() } else { batch }
    }
}

/// A text for an encoder: each row of a batch starts at a random position, is framed by special tokens, and has some
/// tokens masked.
pub(super) struct MaskedText {
    stream: TextStream,
    /// Special tokens around a row.
    frame: [u32; 2],
    mask: u32,
    vocabulary: usize,
}

/// Share of tokens that are predicted; of those, the shares that are masked and that are replaced by another token.
const MASKED: f64 = 0.15;
const HIDDEN: f64 = 0.8;
const REPLACED: f64 = 0.1;

impl MaskedText {
    fn new(recipe: &Recipe, tokenizer: Option<Tokenizer>, train: &Path, dev: &Path) -> Result<(Self, Tokenizer)> {
        let (Dataset::Text(stream), mut tokenizer) = Dataset::text(recipe, tokenizer, train, dev)? else {
            return Err(Error::invalid("the recipe names no text"));
        };
        if tokenizer.encode_framed("", None).0.len() < 2 {
            tokenizer = tokenizer.framed()?;
        }
        let ids = tokenizer.encode_framed("", None).0;
        let (Some(&first), Some(&last)) = (ids.first(), ids.last()) else {
            return Err(Error::invalid("the tokenizer has no tokens that start and end a text"));
        };
        let named = tokenizer.specials().into_iter().find(|(name, _)| ["[MASK]", "<mask>"].contains(&&name[..]));
        let mask = named.map(|(_, id)| id).or(tokenizer.unk()).unwrap_or(tokenizer.pad());
        let vocabulary = tokenizer.len();
        Ok((MaskedText { stream, frame: [first, last], mask, vocabulary }, tokenizer))
    }

    /// A row of tokens, some of them masked.
    fn example(&self, tokens: &[u32], draws: &mut Draws) -> Example {
        let [first, last] = self.frame;
        let (mut ids, mut targets) = (vec![first], vec![IGNORE]);
        for &token in tokens {
            let predicted = draws.unit() < MASKED;
            let how = if predicted { draws.unit() } else { 1.0 };
            ids.push(match how {
                _ if how < HIDDEN => self.mask,
                _ if how < HIDDEN + REPLACED => draws.below(self.vocabulary) as u32,
                _ => token,
            });
            targets.push(if predicted { token } else { IGNORE });
        }
        ids.push(last);
        targets.push(IGNORE);
        Example { segments: vec![0; ids.len()], ids, label: Label::Tags(targets) }
    }

    /// Tokens of a row, without the special ones.
    fn row(&self) -> usize {
        self.stream.block.saturating_sub(2).max(1)
    }

    /// The dev text in consecutive rows, masked the same way every time.
    pub fn dev_examples(&self) -> Vec<Example> {
        let rows = self.stream.dev.chunks_exact(self.row()).enumerate();
        rows.map(|(at, row)| self.example(row, &mut Draws::new(0, [DEV_MASKS, at as u32, 0]))).collect()
    }
}

/// Labelled texts.
pub(super) struct LabelledData {
    pub train: LabelledTexts,
    /// Validation texts.
    pub dev: LabelledTexts,
    /// Training texts, tokenized by [`tokenize`](Dataset::tokenize) once the model exists.
    cut: TokenizedTexts,
    lengths: Vec<Lengths>,
    batching: Batching,
    /// Id of the unknown token.
    unknown: u32,
}

/// Tokenized texts with their labels.
enum TokenizedTexts {
    Examples(Vec<Example>),
    Documents(Vec<(Document, u32)>),
}

impl TokenizedTexts {
    fn len(&self) -> usize {
        match self {
            TokenizedTexts::Examples(examples) => examples.len(),
            TokenizedTexts::Documents(documents) => documents.len(),
        }
    }
}

/// A text; each row of a batch starts at a random position.
pub(super) struct TextStream {
    train: Vec<u32>,
    /// Validation text.
    pub dev: Vec<u32>,
    /// Tokens per row.
    pub block: usize,
    /// Rows per batch.
    pub rows: usize,
}

/// Separates the data of synthetic tasks from other uses of the seed.
const TASK: u64 = 0x7461_736b;
/// Purposes of random draws: positions in a text, packing, and masks.
const PLACES: u32 = 5;
const PACKS: u32 = 8;
const DEV_MASKS: u32 = 9;

impl Dataset {
    /// Reads or generates the data, and reads or trains the tokenizer unless one is passed.
    pub fn new(
        recipe: &Recipe,
        model: &Architecture,
        tokenizer: Option<Tokenizer>,
    ) -> Result<(Dataset, Option<Tokenizer>)> {
        if PictureData::is_of_boxes(&recipe.data) {
            let Architecture::Detect(config) = model else {
                return Err(Error::invalid(format!("a {} does not find boxes in images", model.name()))
                    .with_hint("set `model.kind` to `detect`"));
            };
            return Ok((Dataset::Pictures(PictureData::read_boxes(recipe, &config.image)?), None));
        }
        if let Data::Images { .. } = recipe.data {
            return Ok((Dataset::Images(ImageData::read(recipe)?), None));
        }
        if PictureData::is_named(&recipe.data) {
            let image = match model {
                Architecture::Describe(config) => &config.image,
                Architecture::Vqa(config) => &config.image,
                _ => {
                    return Err(Error::invalid(format!("a {} does not look at images with texts", model.name()))
                        .with_hint("`model.kind` is `describe` for captions, `vqa` for questions"));
                }
            };
            let (data, tokenizer) = PictureData::read(recipe, image, |texts| found(recipe, tokenizer, || texts))?;
            return Ok((Dataset::Pictures(data), Some(tokenizer)));
        }
        if VoiceData::is_named(&recipe.data) {
            let Architecture::Speaker(config) = model else {
                return Err(Error::invalid(format!("a {} does not speak", model.name()))
                    .with_hint("set `model.kind` to `voice`"));
            };
            let (data, tokenizer) = VoiceData::read(recipe, config, |texts| found(recipe, tokenizer, || texts))?;
            return Ok((Dataset::Speaker(data), Some(tokenizer)));
        }
        Dataset::of_text(recipe, model, tokenizer).map(|(data, tokenizer)| (data, Some(tokenizer)))
    }

    fn of_text(recipe: &Recipe, model: &Architecture, tokenizer: Option<Tokenizer>) -> Result<(Dataset, Tokenizer)> {
        let (train, dev) = match &recipe.data {
            Data::Task { task, pairs, dev_pairs } => task.split(recipe.seed ^ TASK, *pairs, *dev_pairs),
            Data::Files { train, dev } => (Corpus::read(train)?, Corpus::read(dev)?),
            Data::Text { text, dev } if recipe.train.objective == Some(Objective::Mlm) => {
                let (text, tokenizer) = MaskedText::new(recipe, tokenizer, text, dev)?;
                return Ok((Dataset::Masked(text), tokenizer));
            }
            Data::Text { text, dev } => return Dataset::text(recipe, tokenizer, text, dev),
            Data::Classes { classes, dev } => {
                let read = |path: &Path| labelled::classes(path).map(LabelledTexts::Classes);
                return Dataset::labelled(recipe, model, tokenizer, read(classes)?, read(dev)?);
            }
            Data::Tags { tags, dev } => {
                let read = |path: &Path| labelled::tags(path).map(LabelledTexts::Tags);
                return Dataset::labelled(recipe, model, tokenizer, read(tags)?, read(dev)?);
            }
            Data::Needles { needles, times, texts, dev_texts } => {
                let (train, dev) = tasks::needles(recipe.seed ^ TASK, *needles, *times, *texts, *dev_texts);
                let [train, dev] = [train, dev].map(LabelledTexts::Classes);
                return Dataset::labelled(recipe, model, tokenizer, train, dev);
            }
            Data::Stories { stories, dev_stories } => {
                let (train, dev) = tasks::stories(recipe.seed ^ TASK, *stories, *dev_stories);
                let [train, dev] = [train, dev].map(LabelledTexts::Answers);
                return Dataset::labelled(recipe, model, tokenizer, train, dev);
            }
            Data::Answers { answers, dev } => {
                let read = |path: &Path| labelled::answers(path).map(LabelledTexts::Answers);
                return Dataset::labelled(recipe, model, tokenizer, read(answers)?, read(dev)?);
            }
            Data::Images { .. }
            | Data::Captions { .. }
            | Data::Questions { .. }
            | Data::Boxes { .. }
            | Data::Spoken { .. }
            | Data::Tones { .. }
            | Data::Shapes { .. } => {
                unreachable!("images and sounds are no text")
            }
            Data::Chat { .. } => {
                return Err(Error::invalid("conversations are for a model that was trained before")
                    .with_hint("set `model.from` to one that has a chat template"));
            }
        };
        let texts = || train.iter().flat_map(|pair| [&pair.source, &pair.target]);
        let tokenizer = found(recipe, tokenizer, texts)?;
        // A decoder-only model reads both sides as one sequence.
        let one = matches!(model, Architecture::Gpt(_));
        let pairs = PairData::new(recipe, &tokenizer, &train, dev, one)?;
        Ok((Dataset::Pairs(pairs), tokenizer))
    }

    fn text(recipe: &Recipe, tokenizer: Option<Tokenizer>, train: &Path, dev: &Path) -> Result<(Self, Tokenizer)> {
        let (train_text, dev_text) = (packed::text(train)?, packed::text(dev)?);
        let tokenizer = found(recipe, tokenizer, || train_text.split_inclusive('\n'))?;
        let block = recipe.train.longest;
        let cut = |text: &str, path: &Path| {
            let tokens = tokenizer.encode_text(text);
            let few = || Error::invalid(format!("`{}` has {} tokens", path.display(), tokens.len()));
            if tokens.len() < block + 2 {
                return Err(few().with_hint(format!("a row takes {} of them: lower `train.longest`", block + 1)));
            }
            Ok(tokens)
        };
        let (train, dev) = (cut(&train_text, train)?, cut(&dev_text, dev)?);
        let rows = (recipe.train.tokens / block).max(1);
        Ok((Dataset::Text(TextStream { train, dev, block, rows }), tokenizer))
    }

    fn labelled(
        recipe: &Recipe,
        model: &Architecture,
        tokenizer: Option<Tokenizer>,
        train: LabelledTexts,
        dev: LabelledTexts,
    ) -> Result<(Self, Tokenizer)> {
        if train.len() == 0 || dev.len() == 0 {
            return Err(Error::invalid("there is nothing to learn from, or nothing to measure on"));
        }
        let sentences = |text: String| sentences(&text).into_iter().map(|range| text[range].to_owned()).collect();
        let in_sentences = matches!(model, Architecture::Han(_));
        let texts =
            || train.texts().into_iter().flat_map(|text| if in_sentences { sentences(text) } else { vec![text] });
        let mut tokenizer = found(recipe, tokenizer, texts)?;
        if !in_sentences && tokenizer.encode_framed("", None).0.len() < 2 {
            tokenizer = tokenizer.framed()?;
        }
        let batching = Batching { tokens: recipe.train.tokens, longest: usize::MAX };
        let unknown = tokenizer.unk().unwrap_or(tokenizer.pad());
        let (cut, lengths) = (TokenizedTexts::Examples(Vec::new()), Vec::new());
        Ok((Dataset::Labelled(LabelledData { train, dev, cut, lengths, batching, unknown }), tokenizer))
    }

    /// Tokenizes labelled texts for an encoder.
    pub fn tokenize(&mut self, encoder: &Encoder) -> Result<()> {
        let Dataset::Labelled(data) = self else { return Ok(()) };
        let examples: Vec<Example> = match &data.train {
            LabelledTexts::Classes(texts) => {
                texts.iter().filter_map(|text| encoder.classed(&text.text, &text.label)).collect()
            }
            LabelledTexts::Tags(sentences) => sentences.iter().map(|s| encoder.tagged(&s.words, &s.tags)).collect(),
            LabelledTexts::Answers(asked) => {
                let windows = asked.iter().map(|question| encoder.asked(question)).collect::<Result<Vec<_>>>()?;
                windows.into_iter().flatten().collect()
            }
        };
        let length = |example: &Example| Lengths { source: example.ids.len(), target: example.ids.len() };
        data.lengths = examples.iter().map(length).collect();
        data.cut = TokenizedTexts::Examples(examples);
        Ok(())
    }

    /// Tokenizes documents for a HAN.
    pub fn tokenize_documents(&mut self, han: &Han) {
        let Dataset::Labelled(data) = self else { return };
        let LabelledTexts::Classes(texts) = &data.train else { return };
        let documents: Vec<(Document, u32)> =
            texts.iter().filter_map(|text| Some((han.cut(&text.text), han.label(&text.label)?))).collect();
        let length = |(document, _): &(Document, u32)| Lengths { source: document.words(), target: document.words() };
        data.lengths = documents.iter().map(length).collect();
        data.cut = TokenizedTexts::Documents(documents);
    }

    /// Resizes images for a vision model.
    pub fn resize_images(&mut self, vit: &Vit) -> Result<()> {
        let Dataset::Images(data) = self else { return Ok(()) };
        data.resize(vit)
    }

    /// Leaves out pairs or conversations longer than `most` tokens.
    pub fn limit(&mut self, most: usize) {
        if let Dataset::Pairs(PairData { batching, .. }) | Dataset::Chat(ChatData { batching, .. }) = self {
            batching.longest = batching.longest.min(most);
        }
    }

    /// The labelled training texts, if there are any.
    pub fn source(&self) -> Option<&LabelledTexts> {
        match self {
            Dataset::Labelled(data) => Some(&data.train),
            _ => None,
        }
    }

    /// The images, if there are any.
    pub fn images(&self) -> Option<&ImageData> {
        match self {
            Dataset::Images(images) => Some(images),
            _ => None,
        }
    }

    /// The batches of an epoch, each a list of examples or of positions in the text: a function of seed and epoch.
    pub fn epoch(&self, seed: u64, epoch: u64) -> Result<Vec<Vec<usize>>> {
        match self {
            Dataset::Pairs(pairs) => Ok(pairs.batching.epoch(&pairs.lengths, seed, epoch)?.batches),
            Dataset::Labelled(data) => Ok(data.batching.epoch(&data.lengths, seed, epoch)?.batches),
            Dataset::Chat(data) => data.epoch(seed, epoch),
            Dataset::Pictures(data) => data.epoch(seed, epoch),
            Dataset::Speaker(data) => data.epoch(seed, epoch),
            Dataset::Images(data) => Ok(data.epoch(seed, epoch)),
            Dataset::Text(TextStream { train, block, rows, .. })
            | Dataset::Masked(MaskedText { stream: TextStream { train, block, rows, .. }, .. }) => {
                let mut draws = Draws::new(seed, [PLACES, epoch as u32, (epoch >> 32) as u32]);
                let batches = (train.len() / (block * rows)).max(1);
                let mut batch = || (0..*rows).map(|_| draws.below(train.len() - block)).collect();
                Ok((0..batches).map(|_| batch()).collect())
            }
        }
    }

    /// Builds a batch.
    pub fn batch(&self, entries: &[usize], mut augmentation: Augmentation) -> TrainBatch {
        match self {
            Dataset::Labelled(LabelledData { cut: TokenizedTexts::Examples(examples), .. }) => {
                TrainBatch::Examples(Examples(entries.iter().map(|&at| examples[at].clone()).collect()))
            }
            Dataset::Labelled(LabelledData { cut: TokenizedTexts::Documents(documents), unknown, .. }) => {
                let mut batch: Vec<(Document, u32)> = entries.iter().map(|&at| documents[at].clone()).collect();
                if augmentation.words > 0.0 {
                    for id in batch.iter_mut().flat_map(|(document, _)| document.sentences.iter_mut().flatten()) {
                        if augmentation.draws.unit() < augmentation.words {
                            *id = *unknown;
                        }
                    }
                }
                TrainBatch::Documents(batch)
            }
            Dataset::Images(data) => data.batch(entries, augmentation),
            Dataset::Chat(data) => TrainBatch::Text(data.batch(entries)),
            Dataset::Pictures(data) => TrainBatch::Pictures(data.batch(entries, augmentation)),
            Dataset::Speaker(data) => TrainBatch::Spoken(data.batch(entries)),
            Dataset::Masked(text) => {
                let row = |&at: &usize| text.example(&text.stream.train[at..][..text.row()], &mut augmentation.draws);
                TrainBatch::Examples(Examples(entries.iter().map(row).collect()))
            }
            Dataset::Pairs(pairs) => TrainBatch::Text(pairs.batch(entries, augmentation)),
            Dataset::Text(TextStream { train, block, .. }) => {
                TrainBatch::Text(Batch::of_text(entries.iter().map(|&at| &train[at..at + block + 1])))
            }
        }
    }

    /// The validation pairs; empty for other data.
    pub fn dev(&self) -> &[Pair] {
        match self {
            Dataset::Pairs(pairs) => &pairs.dev,
            _ => &[],
        }
    }

    /// Sizes of the data, in words.
    pub fn summary(&self, vocabulary: usize) -> String {
        match self {
            Dataset::Pairs(PairData { train, lengths, dev, batching, .. }) => {
                let longest = |lengths: &&Lengths| lengths.source.max(lengths.target) > batching.longest;
                let long = lengths.iter().filter(longest).count();
                let left_out = if long > 0 { format!(" ({long} too long are left out)") } else { String::new() };
                let tokens: usize = train.iter().map(|(_, target)| target.len() + 1).sum();
                let (train, dev) = (train.len(), dev.len());
                format!(
                    "{train} training pairs{left_out} with {tokens} target tokens, {dev} to measure on, {vocabulary} pieces"
                )
            }
            Dataset::Chat(ChatData { train, lengths, dev, batching, .. }) => {
                let long =
                    lengths.iter().filter(|lengths| lengths.source > batching.longest.min(batching.tokens)).count();
                let left_out = if long > 0 { format!(" ({long} too long are left out)") } else { String::new() };
                let answers: usize = train.iter().map(|(_, answers)| answers.iter().filter(|&&x| x).count()).sum();
                let (train, dev) = (train.len(), dev.len());
                format!(
                    "{train} conversations{left_out} with {answers} tokens of answers, {dev} to measure on, {vocabulary} pieces"
                )
            }
            Dataset::Labelled(LabelledData { train, dev, cut, .. }) => {
                let labels = match train.labels().len() {
                    0 => String::new(),
                    count => format!(" with {count} labels"),
                };
                let (cut, dev) = (cut.len(), dev.len());
                format!("{} texts{labels}, cut into {cut}, {dev} to measure on, {vocabulary} pieces", train.len())
            }
            Dataset::Pictures(data) => data.summary(vocabulary),
            Dataset::Speaker(data) => data.summary(vocabulary),
            Dataset::Images(data) => data.summary(),
            Dataset::Text(TextStream { train, dev, block, rows })
            | Dataset::Masked(MaskedText { stream: TextStream { train, dev, block, rows }, .. }) => {
                let (train, dev) = (train.len(), dev.len());
                format!("{train} tokens, {dev} to measure on, {vocabulary} pieces; {rows} rows of {block} a batch")
            }
        }
    }
}

/// The tokenizer: the one passed, the recipe's file, or one trained on these texts.
fn found<S: AsRef<str>, I: IntoIterator<Item = S>>(
    recipe: &Recipe,
    given: Option<Tokenizer>,
    texts: impl FnOnce() -> I,
) -> Result<Tokenizer> {
    match (given, &recipe.tokenizer) {
        (Some(tokenizer), _) => Ok(tokenizer),
        (None, TokenizerSource::File { file }) => Ok(Tokenizer::open(file)?),
        (None, TokenizerSource::Extended { .. }) => Err(Error::invalid("there is no tokenizer to extend")),
        (None, TokenizerSource::Train(kind)) => Ok(Tokenizer::train(texts(), *kind)?),
    }
}
