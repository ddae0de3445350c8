//! A small ResNet in the TensorFlow.js layout, against its definition in plain loops, and malformed files.

use qkv_models::ResNet;
use qkv_models::draws::Draws;
use qkv_models::image::Image;
use qkv_nn::Machine;
use std::collections::BTreeMap;
use std::path::Path;

/// Shape and values by name.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

pub fn write(folder: &Path, tensors: &Tensors) {
    let weights: Vec<_> = (tensors.iter())
        .map(|(name, (shape, _))| serde_json::json!({ "name": name, "shape": shape, "dtype": "float32" }))
        .collect();
    let bytes: Vec<u8> = tensors.values().flat_map(|(_, values)| values).flat_map(|x| x.to_le_bytes()).collect();
    let (first, second) = bytes.split_at(bytes.len() / 3);
    std::fs::write(folder.join("a.bin"), first).unwrap();
    std::fs::write(folder.join("b.bin"), second).unwrap();
    let layers = [serde_json::json!({ "config": { "name": "bn2a_branch1", "epsilon": 0.5 } })];
    let model = serde_json::json!({
        "modelTopology": { "model_config": { "config": { "layers": layers } } },
        "weightsManifest": [{ "paths": ["a.bin", "b.bin"], "weights": weights }],
    });
    std::fs::write(folder.join("model.json"), model.to_string()).unwrap();
}

/// A ResNet with one block per stage, two in the first.
fn small() -> Tensors {
    seeing(5)
}

/// The same with `features` features.
pub fn seeing(features: usize) -> Tensors {
    let mut draws = Draws::new(5, [1, 2, 3]);
    let mut tensors = Tensors::new();
    let mut conv = |name: &str, norm: &str, kernel: usize, inputs: usize, outputs: usize| {
        let mut some = |count: usize, scale: f64, start: f64| -> Vec<f32> {
            (0..count).map(|_| ((draws.unit() - 0.5) * scale + start) as f32).collect()
        };
        let inner = kernel * kernel * inputs;
        let kernels = some(inner * outputs, 3.0 / (inner as f64).sqrt(), 0.0);
        tensors.insert(format!("{name}/kernel"), (vec![kernel, kernel, inputs, outputs], kernels));
        tensors.insert(format!("{name}/bias"), (vec![outputs], some(outputs, 1.0, 0.0)));
        for (end, start) in [("gamma", 1.0), ("beta", 0.0), ("moving_mean", 0.0), ("moving_variance", 1.0)] {
            tensors.insert(format!("{norm}/{end}"), (vec![outputs], some(outputs, 0.5, start)));
        }
    };
    conv("conv1", "bn_conv1", 7, 3, 4);
    let mut width = 4;
    for (block, inner, outputs) in [("2a", 2, 6), ("2b", 3, 6), ("3a", 3, 8), ("4a", 2, 8), ("5a", 3, features)] {
        let name = |branch: &str| (format!("res{block}_branch{branch}"), format!("bn{block}_branch{branch}"));
        let mut add = |branch: &str, kernel: usize, inputs: usize, outputs: usize| {
            let (name, norm) = name(branch);
            conv(&name, &norm, kernel, inputs, outputs);
        };
        add("2a", 1, width, inner);
        add("2b", 3, inner, inner);
        add("2c", 1, inner, outputs);
        if block.ends_with('a') {
            add("1", 1, width, outputs);
        }
        width = outputs;
    }
    let head = (0..3 * features).map(|x| x as f32 / (3 * features) as f32).collect();
    tensors.insert("fc1000/kernel".into(), (vec![features, 3], head));
    tensors.insert("fc1000/bias".into(), (vec![3], vec![0.5, 0.0, -0.5]));
    tensors
}

/// An image, row by row, channels side by side.
struct Plane {
    height: usize,
    width: usize,
    channels: usize,
    data: Vec<f64>,
}

impl Plane {
    fn at(&self, y: isize, x: isize, c: usize) -> Option<f64> {
        let (y, x) = (usize::try_from(y).ok()?, usize::try_from(x).ok()?);
        (y < self.height && x < self.width).then(|| self.data[(y * self.width + x) * self.channels + c])
    }

    /// Evaluates `value(y, x, channel)` for each window, whose first pixel is `(y, x)`.
    fn windows(
        &self,
        [kernel, stride, padding]: [usize; 3],
        channels: usize,
        value: impl Fn(isize, isize, usize) -> f64,
    ) -> Plane {
        let count = |size: usize| (size + 2 * padding - kernel) / stride + 1;
        let (height, width) = (count(self.height), count(self.width));
        let start = |at: usize| (at * stride) as isize - padding as isize;
        let place = |at: usize| value(start(at / channels / width), start(at / channels % width), at % channels);
        Plane { height, width, channels, data: (0..height * width * channels).map(place).collect() }
    }

    fn conv(&self, tensors: &Tensors, name: &str, norm: &str, stride: usize, relu: bool) -> Plane {
        let (shape, kernel) = &tensors[&format!("{name}/kernel")];
        let (size, outputs) = (shape[0], shape[3]);
        let part = |name: String, at: usize| f64::from(tensors[&name].1[at]);
        let epsilon = if norm == "bn2a_branch1" { 0.5 } else { 1e-3 };
        self.windows([size, stride, size / 2], outputs, |y, x, o| {
            let mut sum = part(format!("{name}/bias"), o);
            for (at, weight) in kernel.chunks_exact(outputs).enumerate() {
                let (c, l, k) = (at % shape[2], at / shape[2] % size, at / shape[2] / size);
                sum += self.at(y + k as isize, x + l as isize, c).unwrap_or(0.0) * f64::from(weight[o]);
            }
            let of = |end: &str| part(format!("{norm}/{end}"), o);
            let sum = (sum - of("moving_mean")) / (of("moving_variance") + epsilon).sqrt() * of("gamma") + of("beta");
            if relu { sum.max(0.0) } else { sum }
        })
    }
}

#[test]
fn a_resnet_is_its_definition() {
    let (folder, tensors) = (tempfile::tempdir().unwrap(), small());
    write(folder.path(), &tensors);
    let resnet = ResNet::open(folder.path()).unwrap();
    assert_eq!((resnet.width(), &resnet.labels[..]), (5, &["0", "1", "2"].map(String::from)[..]));
    let mut draws = Draws::new(9, [1, 2, 3]);
    let points: Vec<u8> = (0..40 * 33 * 3).map(|_| draws.below(256) as u8).collect();
    let image = Image::new(40, 33, 3, points).unwrap();
    let found = resnet.features(&[image.clone(), image.clone()], &Machine::new(2)).unwrap();

    let means = [103.939, 116.779, 123.68];
    let pixels = image.points().chunks_exact(3);
    let data = pixels.flat_map(|rgb| (0..3).map(|c| f64::from(rgb[2 - c]) - means[c])).collect();
    let x = Plane { height: 33, width: 40, channels: 3, data }.conv(&tensors, "conv1", "bn_conv1", 2, true);
    let most = |y: isize, x_: isize, c: usize| {
        let all = (0..9).filter_map(|at| x.at(y + at / 3, x_ + at % 3, c));
        all.fold(f64::NEG_INFINITY, f64::max)
    };
    let mut x = x.windows([3, 2, 1], 4, most);
    for block in ["2a", "2b", "3a", "4a", "5a"] {
        let stride = if block.ends_with('a') && block != "2a" { 2 } else { 1 };
        let conv = |x: &Plane, branch: &str, stride, relu| {
            x.conv(&tensors, &format!("res{block}_branch{branch}"), &format!("bn{block}_branch{branch}"), stride, relu)
        };
        let y = conv(&conv(&conv(&x, "2a", stride, true), "2b", 1, true), "2c", 1, false);
        let skipped = if block.ends_with('a') { conv(&x, "1", stride, false) } else { x };
        let data = y.data.iter().zip(&skipped.data).map(|(a, b)| (a + b).max(0.0)).collect();
        x = Plane { data, ..y };
    }
    assert_eq!(found.shape(), [2, x.height, x.width, 5]);
    let largest = x.data.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    assert!(largest > 0.1);
    for (found, expected) in found.data().iter().zip(x.data.iter().chain(&x.data)) {
        assert!((f64::from(*found) - expected).abs() < 1e-5 * largest, "{found} for {expected}");
    }
    let classes = resnet.classify(&[image], &Machine::new(2)).unwrap();
    assert!((classes[0].iter().sum::<f32>() - 1.0).abs() < 1e-5);
}

#[test]
fn files_of_tensorflow_that_lie_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let said = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = small();
        change(&mut tensors);
        write(folder.path(), &tensors);
        ResNet::open(folder.path()).unwrap_err().to_string()
    };
    assert!(said(&|t| drop(t.remove("bn3a_branch2b/beta"))).contains("tensor `bn3a_branch2b/beta`: it is missing"));
    let wide = said(&|t| t.get_mut("bn_conv1/gamma").unwrap().0 = vec![2, 2]);
    assert!(wide.contains("it is [2, 2], expected [4]"), "{wide}");
    let long = said(&|t| t.get_mut("fc1000/bias").unwrap().0 = vec![1 << 40]);
    assert!(long.contains("larger than any that is read"), "{long}");
    let short = said(&|t| t.get_mut("fc1000/bias").unwrap().0 = vec![30_000]);
    assert!(short.contains("the files have"), "{short}");
    write(folder.path(), &small());
    let path = folder.path().join("model.json");
    let text = std::fs::read_to_string(&path).unwrap().replace("a.bin", "../a.bin");
    std::fs::write(&path, text).unwrap();
    assert!(ResNet::open(folder.path()).unwrap_err().to_string().contains("is no file beside it"));
}
