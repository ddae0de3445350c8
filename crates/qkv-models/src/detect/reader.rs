//! A detector with its parameters: its folder, its loss, what it finds in images, and where each query looked.

use super::matching::cheapest;
use super::{DetectConfig, DetectNetwork, Said};
use crate::batch::{IGNORE, SpecialTokens};
use crate::files::tensors::Storage;
use crate::image::Image;
use crate::layout::{Inspected, Layout};
use crate::metrics::detection::ScoredBox;
use crate::model::{AttentionSite, Group};
use crate::observed_attention::{ObservedAttention, observed};
use crate::own_folder::{self, OwnFolder};
use crate::probabilities::probabilities;
use crate::provenance::Provenance;
use crate::start::Start;
use crate::{Architecture, ModelConfig, Result, finite};
use qkv_nn::layers::Builder;
use qkv_nn::{BoxTarget, Loss, Machine, Parameters, PendingLoss, Pool, Tape, Target, edges, generalized_iou};
use rayon::prelude::*;
use std::path::Path;

/// Images per batch.
const TOGETHER: usize = 8;
/// The largest number of boxes reported per image.
const MOST: usize = 100;

/// A model that finds objects in images.
#[derive(Debug)]
pub struct Detector {
    /// Its configuration.
    pub config: DetectConfig,
    /// Its parameters.
    pub parameters: Parameters<f32>,
    network: DetectNetwork,
}

/// An object found in an image.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundBox {
    /// Its class, an index of [`labels`](DetectConfig::labels).
    pub class: usize,
    /// Its probability.
    pub probability: f32,
    /// Left, top, right and bottom, as fractions of the image.
    pub edges: [f64; 4],
    /// The query that found it.
    pub query: usize,
}

/// The objects found in an image, and where each query looked.
#[derive(Clone, Debug)]
pub struct Detected {
    /// The image, as the model saw it.
    pub image: Image,
    /// Rows and columns of places.
    pub grid: [usize; 2],
    /// The objects, most probable first.
    pub boxes: Vec<FoundBox>,
    /// For each query, the weight of each place: the mean over heads of the last layer.
    pub looked: Vec<Vec<f32>>,
    /// All attentions: of the image encoder, between queries, and of queries to the image.
    pub attentions: Vec<ObservedAttention>,
}

/// Prepared images with their objects: class and box, the latter as center, width and height in fractions of the image.
pub(crate) struct BoxedImages {
    pub images: Vec<Image>,
    pub boxes: Vec<Vec<(usize, [f64; 4])>>,
}

/// The folder of a detector.
fn found(folder: &Path) -> Result<OwnFolder<DetectConfig, DetectNetwork>> {
    let config = |found| if let Architecture::Detect(config) = found { Some(config) } else { None };
    OwnFolder::open(folder, "detect", config, |at, config, _| DetectNetwork::new(at, config))
}

/// Description, number of parameters, mismatches and weights of a folder.
pub(crate) fn inspect(folder: &Path) -> Result<Inspected> {
    let found = found(folder)?;
    let config = &found.config;
    let ([rows, columns], image) = (config.queries(), &config.image);
    let words = format!(
        "detect: images of {} × {} in {} places, {} layers; {} queries, {} layers, width {}, {} classes",
        image.width,
        image.height,
        image.places(),
        image.layers,
        rows * columns,
        config.decoder_layers,
        config.d_model,
        config.labels.len()
    );
    Ok(found.inspected(words))
}

impl Detector {
    /// Reads a folder.
    ///
    /// # Errors
    /// Names the file, and the field or tensor that is wrong.
    pub fn open(folder: impl AsRef<Path>) -> Result<Detector> {
        let (config, network, parameters) = found(folder.as_ref())?.fill()?;
        Ok(Detector { config, parameters, network })
    }

    /// A new model with parameters drawn from the seed.
    ///
    /// ```
    /// use qkv_models::image::Image;
    /// use qkv_models::{DetectConfig, Detector, ImageEncoderConfig};
    /// let image = ImageEncoderConfig { height: 16, width: 32, patch_size: 8, layers: 1, ..Default::default() };
    /// let labels = vec!["cell".into()];
    /// let config = DetectConfig { image, d_model: 16, ffn_dim: 16, labels, ..Default::default() };
    /// let detector = Detector::new(&config, 1)?;
    /// let photograph = Image::new(64, 32, 3, vec![90; 64 * 32 * 3])?;
    /// let found = detector.detect(&[photograph], 0.0, &qkv_nn::Machine::new(1))?;
    /// assert_eq!(found[0].len(), 8, "each of 2 × 4 queries says something");
    /// # Ok::<(), qkv_models::Error>(())
    /// ```
    ///
    /// # Errors
    /// If sizes do not fit together.
    pub fn new(config: &DetectConfig, seed: u64) -> Result<Detector> {
        let mut parameters = Parameters::new();
        let network = DetectNetwork::new(&mut Builder::new(&mut parameters, seed), config)?;
        Ok(Detector { config: config.clone(), parameters, network })
    }

    /// A model on the layers of a trained one, with a new class head if the classes differ.
    pub(crate) fn from_start(config: &DetectConfig, start: &Start, seed: u64) -> Result<(Detector, Provenance)> {
        let mut detector = Detector::new(config, seed)?;
        let same_head = matches!(&start.architecture, Architecture::Detect(from) if from.labels == config.labels);
        let fresh = |name: &str| name.starts_with("class.") && !same_head;
        let layout = Layout::own(&detector.parameters);
        let found = layout.fill_from(&mut detector.parameters, &start.weights, fresh, seed)?;
        Ok((detector, found))
    }

    /// Writes its folder.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>, storage: Storage) -> Result<()> {
        // It has no vocabulary.
        let specials = SpecialTokens { pad: 0, bos: 0, eos: 0 };
        let config = ModelConfig::new(Architecture::Detect(self.config.clone()), 0, specials);
        own_folder::write(folder.as_ref(), &config, &self.parameters, None, storage)
    }

    /// The query matched with each object of an image, by the probability of its class and by its box, with the weights
    /// of the loss.
    fn matched(&self, shares: &[Vec<f32>], logits: &[f32], objects: &[(usize, [f64; 4])]) -> Vec<usize> {
        let queries = shares.len();
        let mut costs = Vec::with_capacity(objects.len() * queries);
        for (class, expected) in objects {
            for (share, logits) in shares.iter().zip(logits.chunks_exact(4)) {
                let found = sigmoid(logits);
                let apart: f64 = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).sum();
                let (overlap, _) = generalized_iou(edges(found), edges(*expected));
                costs.push(self.config.distance * apart - self.config.overlap * overlap - f64::from(share[*class]));
            }
        }
        cheapest(&costs, objects.len(), queries)
    }

    /// The loss of prepared images; the gradient of each object is multiplied by `scale`.
    pub(crate) fn loss(
        &self,
        tape: &mut Tape<'_, f32>,
        batch: &BoxedImages,
        smoothing: f64,
        scale: f64,
    ) -> Result<PendingLoss> {
        let said = self.network.forward(tape, self.config.image.pixels(&batch.images), false)?;
        let (head, nothing) = (self.network.class(), self.config.labels.len());
        let layers = said.len() as f64;
        let mut losses = Vec::with_capacity(said.len());
        for Said { states, boxes } in &said {
            let queries = states.shape()[1];
            // The matching is discrete and has no gradient.
            let scores = head.forward(tape, states);
            let shares = probabilities(scores.value().data(), nothing + 1);
            let logits = boxes.value().data();
            let found: Vec<Vec<usize>> = (batch.boxes.par_iter().enumerate())
                .map(|(at, objects)| {
                    // Objects beyond the number of queries are ignored.
                    let objects = &objects[..objects.len().min(queries)];
                    let rows = at * queries..(at + 1) * queries;
                    self.matched(&shares[rows.clone()], &logits[4 * rows.start..4 * rows.end], objects)
                })
                .collect();
            let mut classes = vec![nothing as u32; shares.len()];
            let mut expected = Vec::new();
            for (at, (objects, found)) in batch.boxes.iter().zip(found).enumerate() {
                for ((class, edges), query) in objects.iter().zip(found) {
                    classes[at * queries + query] = *class as u32;
                    expected.push((at * queries + query, *edges));
                }
            }
            let some = |keep: bool| -> Vec<u32> {
                classes.iter().map(|&class| if (class == nothing as u32) == keep { IGNORE } else { class }).collect()
            };
            let scale = scale / layers;
            let mut entropy = |ids: &[u32], scale: f64| {
                let target = Target { ids, ignore: Some(IGNORE), smoothing, scale };
                tape.cross_entropy(states, head.weight, head.bias, target)
            };
            let no_object = self.config.no_object;
            let (there, nowhere) = (entropy(&some(true), scale), entropy(&some(false), scale * no_object));
            let DetectConfig { distance, overlap, .. } = self.config;
            let of_boxes = tape.box_loss(boxes, BoxTarget { boxes: &expected, distance, overlap, scale });
            losses.push((there, nowhere, of_boxes, expected.len()));
        }
        // The losses are read only after all work has been submitted to the device.
        let mut loss = Loss::default();
        for (there, nowhere, of_boxes, rows) in losses {
            let (there, nowhere, no_object) = (there.read(), nowhere.read(), self.config.no_object);
            loss.smoothed += (there.smoothed + no_object * nowhere.smoothed + of_boxes) / layers;
            loss.nll += (there.nll + no_object * nowhere.nll + of_boxes) / layers;
            (loss.rows, loss.right) = (rows, there.right);
        }
        Ok(loss.into())
    }

    /// The boxes of one image, most probable first.
    fn boxes(&self, shares: &[Vec<f32>], logits: &[f32], threshold: f32) -> Vec<FoundBox> {
        let mut found: Vec<FoundBox> = Vec::new();
        for (query, (share, logits)) in shares.iter().zip(logits.chunks_exact(4)).enumerate() {
            let classes = &share[..self.config.labels.len()];
            let class = (0..classes.len()).reduce(|best, at| if classes[at] > classes[best] { at } else { best });
            let Some(class) = class.filter(|&class| classes[class] >= threshold) else { continue };
            let edges = edges(sigmoid(logits)).map(|edge| edge.clamp(0.0, 1.0));
            found.push(FoundBox { class, probability: classes[class], edges, query });
        }
        found.sort_by(|a, b| b.probability.total_cmp(&a.probability));
        found.truncate(MOST);
        found
    }

    /// The objects in images that have at least this probability, most probable first.
    ///
    /// # Errors
    /// If the model computes NaN.
    pub fn detect(&self, images: &[Image], threshold: f32, machine: &Machine) -> Result<Vec<Vec<FoundBox>>> {
        let images = images.iter().map(|image| self.config.image.prepared(image)).collect::<Result<Vec<_>>>()?;
        rayon::scope(|_| {
            let (pool, mut all) = (Pool::new(), Vec::with_capacity(images.len()));
            for images in images.chunks(TOGETHER) {
                let mut tape = Tape::inference(&self.parameters, &pool, machine);
                let said = self.network.forward(&mut tape, self.config.image.pixels(images), true)?;
                let Said { states, boxes } = said.last().expect("there is a layer");
                let scores = self.network.class().forward(&mut tape, states);
                finite::check(scores.value().data(), &self.parameters)?;
                let shares = probabilities(scores.value().data(), self.config.labels.len() + 1);
                let queries = states.shape()[1];
                for (shares, logits) in shares.chunks(queries).zip(boxes.value().data().chunks(4 * queries)) {
                    all.push(self.boxes(shares, logits, threshold));
                }
            }
            Ok(all)
        })
    }

    /// The same for one image, with where each query looked.
    ///
    /// # Errors
    /// As [`detect`](Detector::detect).
    pub fn look(&self, image: &Image, threshold: f32, machine: &Machine) -> Result<Detected> {
        let boxes = self.detect(std::slice::from_ref(image), threshold, machine)?.remove(0);
        let image = self.config.image.prepared(image)?;
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        tape.capture();
        self.network.forward(&mut tape, self.config.image.pixels(std::slice::from_ref(&image)), true)?;
        let captured = tape.captured();
        let [of_image, of_queries] = self.network.depths();
        let stack = |group, layers: usize, before: &'static str, name: &'static str| {
            (0..layers).map(move |layer| AttentionSite {
                group,
                layer,
                label: format!("{before}layers.{layer}.{name}"),
            })
        };
        let sites = stack(Group::Encoder, of_image, "image.", "self_attn")
            .chain(stack(Group::Decoder, of_queries, "decoder.", "self_attn"))
            .chain(stack(Group::Cross, of_queries, "decoder.", "encoder_attn"));
        let attentions = sites.map(|site| observed(&site, &site.calls(&captured), &self.parameters));
        let attentions = attentions.collect::<Result<Vec<_>>>()?;
        let looked = attentions.last().map_or(Ok(Vec::new()), ObservedAttention::mean_over_heads)?;
        Ok(Detected { image, grid: self.config.image.grid(), boxes, looked, attentions })
    }
}

/// The sigmoids of four logits.
fn sigmoid(logits: &[f32]) -> [f64; 4] {
    std::array::from_fn(|at| 1.0 / (1.0 + (-f64::from(logits[at])).exp()))
}

impl From<&FoundBox> for ScoredBox {
    fn from(found: &FoundBox) -> ScoredBox {
        ScoredBox { class: found.class, score: f64::from(found.probability), edges: found.edges }
    }
}
