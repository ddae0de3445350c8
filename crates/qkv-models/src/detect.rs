//! Object detection as in DETR (Carion et al. 2020, arXiv:2005.12872): object queries in a Transformer decoder attend
//! to the output of an image encoder, and each predicts a class and a box, or that there is no object. Training matches
//! each object with one query, by the assignment of least total cost.
//!
//! For small datasets the queries are on a grid: each starts from the encoder's output at its place and from an anchor
//! box there, and predicts how the object's box differs from it (anchors as in Wang et al. 2021, arXiv:2109.07107,
//! initialized from the encoder as in Zhu et al. 2020, arXiv:2010.04159). Every decoder layer is trained to predict.

mod matching;
mod reader;

pub(crate) use reader::{BoxedImages, inspect};
pub use reader::{Detected, Detector, FoundBox};

use crate::image_encoder::{ImageEncoder, ImageEncoderConfig, Widths};
use crate::{Error, Result};
use qkv::Attention;
use qkv_nn::layers::{Block, Builder, Linear, Norm, NormKind};
use qkv_nn::{Activation, Init, Param, Positions, Tape, Tensor, Var};
use serde::{Deserialize, Serialize};

/// Sizes and settings of a detector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DetectConfig {
    /// The image encoder.
    pub image: ImageEncoderConfig,
    /// Model width.
    pub d_model: usize,
    /// Inner width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of heads.
    pub heads: usize,
    /// Layers of the decoder.
    pub decoder_layers: usize,
    /// There is a query for every `query_stride × query_stride` places.
    pub query_stride: usize,
    /// Loss weight of queries that should predict no object.
    pub no_object: f64,
    /// Weight of the coordinate distance, in the loss and the matching.
    pub distance: f64,
    /// Weight of the generalized intersection over union, in the loss and the matching.
    pub overlap: f64,
    /// Dropout of each residual branch.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Names of the classes; in a recipe, they come from the data.
    pub labels: Vec<String>,
}

impl Default for DetectConfig {
    fn default() -> Self {
        DetectConfig {
            image: ImageEncoderConfig::default(),
            d_model: 128,
            ffn_dim: 256,
            heads: 4,
            decoder_layers: 2,
            query_stride: 1,
            no_object: 0.1,
            distance: 5.0,
            overlap: 2.0,
            dropout: 0.0,
            attention_dropout: 0.0,
            labels: Vec::new(),
        }
    }
}

impl DetectConfig {
    fn widths(&self) -> Widths {
        let DetectConfig { d_model, ffn_dim, heads, dropout, attention_dropout, .. } = *self;
        Widths { d_model, ffn_dim, heads, dropout, attention_dropout, epsilon: Norm::EPSILON, embedding_norm: false }
    }

    /// Refuses sizes that are zero or that no machine could hold.
    pub(crate) fn check(&self) -> Result<()> {
        self.image.check()?;
        self.image.check_places_alone()?;
        self.widths().check()?;
        if self.image.eyes.is_some() {
            return Err(Error::invalid("a detector has a stem that is trained with it, not `image.eyes`"));
        }
        for (name, found) in [("decoder_layers", self.decoder_layers), ("query_stride", self.query_stride)] {
            if found == 0 || found > 1 << 8 {
                return Err(Error::invalid(format!("`{name}` is {found}, expected between 1 and 256")));
            }
        }
        for (name, found) in [("no_object", self.no_object), ("distance", self.distance), ("overlap", self.overlap)] {
            if !(0.0..=1e6).contains(&found) {
                return Err(Error::invalid(format!("`{name}` is {found}, expected at least 0")));
            }
        }
        if self.labels.is_empty() {
            return Err(Error::invalid("there are no classes to find"));
        }
        Ok(())
    }

    /// Rows and columns of queries.
    pub fn queries(&self) -> [usize; 2] {
        self.image.grid().map(|places| places.div_ceil(self.query_stride.max(1)))
    }
}

/// The logit of a fraction.
fn logit(fraction: f64) -> f64 {
    let fraction = fraction.clamp(1e-3, 1.0 - 1e-3);
    (fraction / (1.0 - fraction)).ln()
}

/// A detector: handles to its parameters.
#[derive(Clone, Debug)]
pub(crate) struct DetectNetwork {
    image: ImageEncoder,
    queries: Param,
    /// Logits of the anchor box of each query, `[Q, 4]`; constant.
    anchors: Vec<f32>,
    /// The place that each query starts from.
    starts: Vec<usize>,
    places: usize,
    decoder: Vec<Block>,
    norm: Norm,
    class: Linear,
    edges: [Linear; 3],
}

/// Output of a decoder layer: states of the queries, which the class head reads, and logits of boxes.
pub(crate) struct Said {
    /// `[B, Q, C]`.
    pub states: Var<f32>,
    /// `[B, Q, 4]`.
    pub boxes: Var<f32>,
}

impl DetectNetwork {
    /// Adds its parameters: `image`, `queries`, `decoder.layers.N`, `norm`, `class`, `boxes.N`.
    pub fn new(at: &mut Builder<'_, f32>, config: &DetectConfig) -> Result<DetectNetwork> {
        config.check()?;
        let d_model = config.d_model;
        let image = ImageEncoder::new(&mut at.at("image"), &config.image, config.widths())?;
        let ([rows, columns], [down, across]) = (config.queries(), config.image.grid());
        let queries = at.add("queries.weight", &[rows * columns, d_model], Init::Normal(0.02));
        let stride = config.query_stride;
        let (mut anchors, mut starts) = (Vec::new(), Vec::new());
        for query in 0..rows * columns {
            let middle = |at: usize, all: usize| (at * stride + (stride - 1) / 2).min(all - 1);
            let (y, x) = (middle(query / columns, down), middle(query % columns, across));
            starts.push(y * across + x);
            let center = [(x as f64 + 0.5) / across as f64, (y as f64 + 0.5) / down as f64];
            // Anchor boxes are two query strides wide and high, at most half the image.
            let size = [2.0 * stride as f64 / across as f64, 2.0 * stride as f64 / down as f64];
            anchors.extend(center.into_iter().chain(size.map(|side| side.min(0.5))).map(|x| logit(x) as f32));
        }
        let block = config.widths().block(Attention::scaled_dot(), Some(Attention::scaled_dot()));
        let layer = |layer: usize, at: &mut Builder<'_, f32>| {
            Block::new(&mut at.at(&format!("decoder.layers.{layer}")), &block)
        };
        let decoder = (0..config.decoder_layers).map(|n| Ok(layer(n, at)?)).collect::<Result<_>>()?;
        let norm = Norm::new(&mut at.at("norm"), d_model, NormKind::Layer, Norm::EPSILON);
        let class = Linear::new(&mut at.at("class"), d_model, config.labels.len() + 1, true);
        let edges = [
            Linear::new(&mut at.at("boxes.0"), d_model, d_model, true),
            Linear::new(&mut at.at("boxes.1"), d_model, d_model, true),
            Linear::with_init(&mut at.at("boxes.2"), d_model, 4, true, Init::Normal(0.01)),
        ];
        let places = config.image.places();
        Ok(DetectNetwork { image, queries, anchors, starts, places, decoder, norm, class, edges })
    }

    /// The linear layer of the classes; the last class is no object.
    pub fn class(&self) -> Linear {
        self.class
    }

    /// Number of layers of the image encoder and of the decoder.
    pub fn depths(&self) -> [usize; 2] {
        [self.image.layers(), self.decoder.len()]
    }

    /// Outputs of all decoder layers for pixels `[B, H, W, C]`; with `last`, only of the last one.
    pub fn forward(&self, tape: &mut Tape<'_, f32>, pixels: Tensor<f32>, last: bool) -> Result<Vec<Said>> {
        let (batch, count) = (pixels.shape()[0], self.starts.len());
        let places = self.image.forward(tape, pixels)?; // (B, P, C)
        let ids: Vec<u32> = (0..batch).flat_map(|_| 0..count as u32).collect();
        let own = tape.embedding(&ids, count, self.queries, 1.0, Positions::None, 0);
        let starts = (0..batch).flat_map(|b| self.starts.iter().map(move |at| Some(b * self.places + at)));
        let seen = tape.gather(&[&places], &starts.collect::<Vec<_>>(), [batch, count]);
        let mut x = tape.add(&seen, own); // (B, Q, C)
        let mut said = Vec::new();
        for (layer, block) in self.decoder.iter().enumerate() {
            x = block.forward(tape, x, None, None, Some((&places, None)))?;
            if last && layer + 1 < self.decoder.len() {
                continue;
            }
            let states = self.norm.forward(tape, &x);
            let [first, second, third] = &self.edges;
            let y = first.activated(tape, &states, Activation::Relu, 0.0);
            let y = second.activated(tape, &y, Activation::Relu, 0.0);
            let y = third.forward(tape, &y);
            let anchors = tape.constant(Tensor::new(self.anchors.repeat(batch), &[batch, count, 4]));
            said.push(Said { boxes: tape.add(&anchors, y), states });
        }
        Ok(said)
    }
}
