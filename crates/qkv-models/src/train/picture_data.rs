//! The data of models that look at images: captions, questions with answers, and boxes, with images at the model's
//! size.

use super::augmentation::{Augmentation, ClassedBoxes};
use crate::batch::Rows;
use crate::describe::Describer;
use crate::detect::BoxedImages;
use crate::draws::Draws;
use crate::image::{Fit, Image};
use crate::labelled::{self, BoxedImage};
use crate::pictures::Pictures;
use crate::recipe::Data;
use crate::tasks::{self, Scene, ShapesTask};
use crate::text::batches::{Batching, Lengths};
use crate::text::tokenizer::Tokenizer;
use crate::vqa::{ImageQuestions, Vqa};
use crate::{Error, ImageEncoderConfig, Recipe, Result};
use std::collections::BTreeSet;
use std::path::Path;

/// Questions per scene of a synthetic task.
const QUESTIONS: usize = 6;

/// Training and validation data of a model that looks at images.
pub(super) enum PictureData {
    Captions(CaptionData),
    Questions(QuestionData),
    Boxes(BoxData),
}

/// Images with boxes.
pub(super) struct BoxData {
    train: Vec<(Image, ClassedBoxes)>,
    pub dev: Vec<(Image, ClassedBoxes)>,
    pub names: Vec<String>,
    /// Images per batch.
    each: usize,
}

/// Images with one or several captions each.
pub(super) struct CaptionData {
    train: Pictures<1>,
    pub dev: Pictures<1>,
    /// The tokens of each caption, set by [`tokenize`](PictureData::tokenize).
    tokens: Vec<Vec<u32>>,
    lengths: Vec<Lengths>,
    batching: Batching,
}

/// Images with questions and answers.
pub(super) struct QuestionData {
    train: Pictures<2>,
    pub dev: Pictures<2>,
    /// The tokens of each question and the class of its answer.
    tokens: Vec<(Vec<u32>, u32)>,
    lengths: Vec<Lengths>,
    batching: Batching,
    pad: u32,
}

/// A batch of images and texts.
pub(super) enum PictureBatch {
    Captions(Vec<Image>, Vec<Vec<u32>>),
    Questions(ImageQuestions),
    Boxes(BoxedImages),
}

impl PictureBatch {
    /// Number of target tokens or answers.
    pub fn targets(&self) -> usize {
        match self {
            PictureBatch::Captions(_, texts) => texts.iter().map(|text| text.len() + 1).sum(),
            PictureBatch::Questions(questions) => questions.answers.len(),
            PictureBatch::Boxes(batch) => batch.boxes.iter().map(Vec::len).sum(),
        }
    }
}

/// Separates synthetic scenes from other uses of the seed.
const SCENES: u64 = 0x7363_656e;
/// Purpose of random draws: the order of images with boxes.
const BOXES: u32 = 10;

impl PictureData {
    /// Whether a recipe's data is of this kind.
    pub fn is_named(data: &Data) -> bool {
        matches!(data, Data::Captions { .. } | Data::Questions { .. } | Data::Shapes { .. })
    }

    /// Whether a recipe's data has boxes, which need no tokenizer.
    pub fn is_of_boxes(data: &Data) -> bool {
        matches!(data, Data::Boxes { .. } | Data::Shapes { shapes: ShapesTask::Boxes, .. })
    }

    /// Reads or draws a recipe's images with boxes, at the size set in `image`.
    pub fn read_boxes(recipe: &Recipe, image: &ImageEncoderConfig) -> Result<PictureData> {
        image.check()?;
        if image.fit != Fit::Stretch {
            return Err(
                Error::invalid("`image.fit` moves what the boxes are around").with_hint("leave it at `stretch`")
            );
        }
        let (train, dev, names) = match &recipe.data {
            Data::Boxes { boxes, dev } => {
                let read = |path: &Path| {
                    let (images, names) = labelled::boxes(path)?;
                    let one = |one: BoxedImage| Ok((image.prepared(&Image::open(&one.path)?)?, one.boxes));
                    Ok::<_, Error>((images.into_iter().map(one).collect::<Result<Vec<_>>>()?, names))
                };
                let ((train, names), (dev, others)) = (read(boxes)?, read(dev)?);
                if names != others {
                    return Err(Error::format(
                        dev_path(&recipe.data),
                        "field `categories`",
                        "they are others in training",
                    ));
                }
                (train, dev, names)
            }
            Data::Shapes { scenes, dev_scenes, .. } => {
                let (train, dev) = tasks::scenes(recipe.seed ^ SCENES, *scenes, *dev_scenes);
                let one = |scene: &Scene| {
                    let side = tasks::SIDE as f64;
                    let boxes = scene.shapes.iter().map(|shape| (shape.kind, shape.edges.map(|x| x as f64 / side)));
                    Ok((image.prepared(&scene.image)?, boxes.collect()))
                };
                let all = |scenes: &[Scene]| scenes.iter().map(one).collect::<Result<Vec<_>>>();
                (all(&train)?, all(&dev)?, tasks::KINDS.map(String::from).to_vec())
            }
            _ => return Err(Error::invalid("the recipe names no images with boxes")),
        };
        if train.iter().all(|(_, boxes)| boxes.is_empty()) {
            return Err(Error::invalid("there is no box in the training images"));
        }
        let each = (recipe.train.tokens / image.places().max(1)).max(1);
        Ok(PictureData::Boxes(BoxData { train, dev, names, each }))
    }

    /// Names of the classes of boxes.
    pub fn names(&self) -> Option<&[String]> {
        match self {
            PictureData::Boxes(data) => Some(&data.names),
            _ => None,
        }
    }

    /// Reads or draws a recipe's images, at the size set in `image`; `tokenizer` returns the tokenizer, which it may
    /// train on the texts.
    pub fn read(
        recipe: &Recipe,
        image: &ImageEncoderConfig,
        tokenizer: impl FnOnce(Vec<&str>) -> Result<Tokenizer>,
    ) -> Result<(PictureData, Tokenizer)> {
        image.check()?;
        let fit = |picture: &Image| image.prepared(picture);
        let batching = Batching { tokens: recipe.train.tokens, longest: usize::MAX };
        let scenes = |train: usize, dev: usize| tasks::scenes(recipe.seed ^ SCENES, train, dev);
        let ask = |at: usize, scene: &Scene| {
            (0..QUESTIONS).map(|question| scene.question(at * 7 + question)).map(<[String; 2]>::from).collect()
        };
        let captions = match &recipe.data {
            Data::Captions { captions, dev } => (Pictures::read(captions, fit)?, Pictures::read(dev, fit)?),
            Data::Shapes { shapes: ShapesTask::Captions, scenes: train, dev_scenes } => {
                let (train, dev) = scenes(*train, *dev_scenes);
                let say = |_: usize, scene: &Scene| vec![[scene.caption()]];
                (Pictures::of_scenes(&train, fit, say)?, Pictures::of_scenes(&dev, fit, say)?)
            }
            Data::Questions { .. } | Data::Shapes { .. } => {
                let (train, dev) = match &recipe.data {
                    Data::Questions { questions, dev } => (Pictures::read(questions, fit)?, Pictures::read(dev, fit)?),
                    Data::Shapes { scenes: train, dev_scenes, .. } => {
                        let (train, dev) = scenes(*train, *dev_scenes);
                        (Pictures::of_scenes(&train, fit, ask)?, Pictures::of_scenes(&dev, fit, ask)?)
                    }
                    _ => unreachable!("one of these two"),
                };
                let tokenizer = tokenizer(train.lines.iter().map(|(_, [question, _])| question.as_str()).collect())?;
                let pad = tokenizer.pad();
                let data = QuestionData { train, dev, tokens: Vec::new(), lengths: Vec::new(), batching, pad };
                return Ok((PictureData::Questions(data), tokenizer));
            }
            _ => return Err(Error::invalid("the recipe names no images with texts")),
        };
        let (train, dev) = captions;
        let tokenizer = tokenizer(train.lines.iter().map(|(_, [text])| text.as_str()).collect())?;
        let data = CaptionData { train, dev, tokens: Vec::new(), lengths: Vec::new(), batching };
        Ok((PictureData::Captions(data), tokenizer))
    }

    /// The distinct answers of the training questions, in alphabetical order.
    pub fn answers(&self) -> Vec<String> {
        match self {
            PictureData::Captions(_) | PictureData::Boxes(_) => Vec::new(),
            PictureData::Questions(data) => {
                let all: BTreeSet<&String> = data.train.lines.iter().map(|(_, [_, answer])| answer).collect();
                all.into_iter().cloned().collect()
            }
        }
    }

    /// Tokenizes captions for a model that describes.
    pub fn tokenize(&mut self, model: &Describer) {
        let PictureData::Captions(data) = self else { return };
        data.tokens = data.train.lines.iter().map(|(_, [text])| model.tokens(text)).collect();
        let places = model.config.image.places();
        data.lengths = data.tokens.iter().map(|text| Lengths { source: places, target: text.len() + 1 }).collect();
    }

    /// Tokenizes questions for a model that answers.
    pub fn tokenize_questions(&mut self, model: &Vqa) {
        let PictureData::Questions(data) = self else { return };
        let each = data.train.lines.iter();
        let tokens = |(_, [question, answer]): &(usize, [String; 2])| {
            (model.tokens(question), model.class(answer).expect("an answer of the training questions"))
        };
        data.tokens = each.map(tokens).collect();
        let places = model.config.image.places();
        data.lengths = data.tokens.iter().map(|(ids, _)| Lengths { source: places, target: ids.len() }).collect();
    }

    /// The batches of an epoch: a function of seed and epoch.
    pub fn epoch(&self, seed: u64, epoch: u64) -> Result<Vec<Vec<usize>>> {
        match self {
            PictureData::Captions(data) => Ok(data.batching.epoch(&data.lengths, seed, epoch)?.batches),
            PictureData::Questions(data) => Ok(data.batching.epoch(&data.lengths, seed, epoch)?.batches),
            PictureData::Boxes(data) => {
                let mut order: Vec<usize> = (0..data.train.len()).collect();
                Draws::new(seed, [BOXES, epoch as u32, (epoch >> 32) as u32]).shuffle(&mut order);
                Ok(order.chunks(data.each).map(<[usize]>::to_vec).collect())
            }
        }
    }

    /// Builds a batch.
    pub fn batch(&self, entries: &[usize], mut augmentation: Augmentation) -> PictureBatch {
        match self {
            PictureData::Boxes(data) => {
                let changed = augmentation.each(entries, |how, at, draws| {
                    let (image, boxes) = &data.train[at];
                    let (image, boxes) = how.boxed(image, boxes, draws);
                    (image, boxes.into_iter().map(|(class, edges)| (class, centered(edges))).collect())
                });
                let (images, boxes) = changed.into_iter().unzip();
                PictureBatch::Boxes(BoxedImages { images, boxes })
            }
            PictureData::Captions(data) => {
                let image = |at: usize| &data.train.images[data.train.lines[at].0];
                let images = augmentation.each(entries, |how, at, draws| how.written(image(at), draws));
                PictureBatch::Captions(images, entries.iter().map(|&at| data.tokens[at].clone()).collect())
            }
            PictureData::Questions(data) => {
                let images = entries.iter().map(|&at| data.train.images[data.train.lines[at].0].clone()).collect();
                let rows: Vec<Vec<u32>> = entries.iter().map(|&at| data.tokens[at].0.clone()).collect();
                let answers = entries.iter().map(|&at| data.tokens[at].1).collect();
                PictureBatch::Questions(ImageQuestions { images, questions: Rows::new(&rows, data.pad), answers })
            }
        }
    }

    /// Sizes of the data, in words.
    pub fn summary(&self, vocabulary: usize) -> String {
        let (kind, images, lines, dev) = match self {
            PictureData::Boxes(data) => {
                let count = |images: &[(Image, Vec<_>)]| images.iter().map(|(_, boxes)| boxes.len()).sum::<usize>();
                let (boxes, names) = (count(&data.train), data.names.len());
                let (images, dev) = (data.train.len(), data.dev.len());
                return format!("{boxes} boxes of {names} classes in {images} images, {dev} images to measure on");
            }
            PictureData::Captions(data) => {
                ("captions", data.train.images.len(), data.train.lines.len(), data.dev.lines.len())
            }
            PictureData::Questions(data) => {
                ("questions", data.train.images.len(), data.train.lines.len(), data.dev.lines.len())
            }
        };
        format!("{lines} {kind} about {images} images, {dev} to measure on, {vocabulary} pieces")
    }
}

/// The dev file of data with boxes.
fn dev_path(data: &Data) -> &Path {
    match data {
        Data::Boxes { dev, .. } => dev,
        _ => Path::new(""),
    }
}

/// Left, top, right and bottom as center, width and height.
fn centered([left, top, right, bottom]: [f64; 4]) -> [f64; 4] {
    [(left + right) / 2.0, (top + bottom) / 2.0, right - left, bottom - top]
}
