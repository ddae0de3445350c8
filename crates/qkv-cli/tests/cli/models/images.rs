//! `qkv train` and `qkv classify --image` with a model that sees: trained here in seconds, on images that are light on
//! one side.

use crate::models::pictures::refuses_what_is_no_image;
use crate::models::program::{Folder, json};
use png::{BitDepth, ColorType, Encoder};

pub const RECIPE: &str = "name = 'tiny'
[data]
images = 'images.idx'
labels = 'labels.idx'
dev_images = 'images.idx'
dev_labels = 'labels.idx'
names = ['left', 'right']
[model]
kind = 'vit'
patch_size = 2
d_model = 16
ffn_dim = 32
heads = 2
layers = 2
dropout = 0.0
[train]
steps = 60
tokens = 170
lr = 5e-3
warmup = 10
shift = 1
smoothing = 0.0
average = 0.0
metric = 'exact'
validate = 30
save = 20
";

/// An image of 8 × 8 that is light on one side.
fn points(right: bool, noise: usize) -> Vec<u8> {
    (0..64)
        .map(|at| if (at % 8 >= 4) == right { 200 + (at * noise % 50) as u8 } else { (at * noise % 50) as u8 })
        .collect()
}

/// Files of images and their classes as MNIST has them.
fn idx() -> (Vec<u8>, Vec<u8>) {
    let header = |axes: &[u32]| {
        let mut bytes = vec![0, 0, 8, axes.len() as u8];
        axes.iter().for_each(|axis| bytes.extend(axis.to_be_bytes()));
        bytes
    };
    let (mut images, mut labels) = (header(&[60, 8, 8]), header(&[60]));
    for at in 0..60 {
        images.extend(points(at % 2 == 1, at));
        labels.push((at % 2) as u8);
    }
    (images, labels)
}

fn png(width: u32, points: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, width, points.len() as u32 / width);
    encoder.set_color(ColorType::Grayscale);
    encoder.set_depth(BitDepth::Eight);
    encoder.write_header().unwrap().write_image_data(points).unwrap();
    bytes
}

/// A folder with a model `m` that knows left from right, and an image of each.
pub fn trained() -> (Folder, String) {
    let folder = Folder::new();
    let (images, labels) = idx();
    folder.put("r.toml", RECIPE.as_bytes());
    folder.put("images.idx", &images);
    folder.put("labels.idx", &labels);
    folder.put("left.png", &png(8, &points(false, 3)));
    folder.put("right.png", &png(8, &points(true, 5)));
    let ran = folder.qkv("train r.toml --out m --log-format plain --threads 2");
    let log = ran.err.clone();
    assert!(ran.well().contains("best     accuracy 100.00 % on the dev set"), "{log}");
    (folder, log)
}

#[test]
fn images_are_learnt_and_told() {
    let (folder, log) = trained();
    assert!(log.contains("60 images with 2 labels") && log.contains("model    vit"), "{log}");
    let out = folder.qkv("classify --model m --image left.png --image right.png").quietly();
    let said: Vec<Vec<&str>> = out.lines().map(|line| line.split('\t').collect()).collect();
    assert_eq!((said[0][..2].to_vec(), said[1][..2].to_vec()), (vec!["left.png", "left"], vec!["right.png", "right"]));
    assert!(folder.qkv("classify --model m --image right.png").quietly().starts_with("right\t"));
    // A JPEG, of another size and shape: dark on the left, light on the right.
    let jpeg = include_bytes!("../../../../qkv-formats/tests/images/grey.jpg");
    folder.put("photo", jpeg);
    let told = json(&folder.qkv("classify --model m --image photo --json --weights").quietly());
    assert_eq!((&told[0]["image"], &told[0]["label"]), (&"photo".into(), &"right".into()));
    let patches = told[0]["patches"].as_array().unwrap();
    let sum: f64 = patches.iter().flat_map(|row| row.as_array().unwrap()).map(|w| w.as_f64().unwrap()).sum();
    assert!(patches.len() == 4 && (sum - 1.0).abs() < 1e-4, "{}", told[0]);
    let drawn = folder.qkv("classify --model m --image left.png --weights").quietly();
    assert!(drawn.lines().count() == 6 && drawn.contains('█'), "{drawn}");
    assert!(folder.qkv("inspect m").quietly().contains("vit.embeddings.cls_token"));

    // A resumed run ends the same.
    folder.qkv("train r.toml --out parts --quiet --threads 2 --set train.steps=20").quietly();
    folder.qkv("train --resume parts --quiet --threads 1 --set train.steps=60").quietly();
    let weights = "checkpoints/00000060/weights.safetensors";
    assert!(folder.bytes(&format!("parts/{weights}")) == folder.bytes(&format!("m/{weights}")), "{weights}");
}

#[test]
fn a_trained_compact_convolutional_transformer_comes_back_from_its_folder() {
    let (folder, _) = trained();
    let recipe =
        RECIPE.replace("patch_size = 2", "patch_size = 4\nstem = 'conv'\nstem_channels = 8\nstem_blocks = [0, 1]");
    folder.put("cct.toml", recipe.as_bytes());
    let said = folder.qkv("train cct.toml --out cct --log-format plain --threads 2").well();
    assert!(said.contains("accuracy 100.00 %"), "{said}");
    let all = "classify --image left.png --image right.png --json";
    let told = folder.qkv(&format!("{all} --model cct")).quietly();
    assert_eq!((&json(&told)[0]["label"], &json(&told)[1]["label"]), (&"left".into(), &"right".into()));
    // After a round trip, and with another number of threads, all bytes and all logits are the same.
    folder.comes_back("cct");
    assert_eq!(folder.qkv(&format!("{all} --model again --threads 1")).quietly(), told);
}

#[test]
fn what_is_no_image_is_refused_by_its_name() {
    let (folder, _) = trained();
    folder.put("cut.png", &png(8, &points(true, 5))[..60]);
    let with = "classify --model m --image left.png --image";
    folder.qkv(&format!("{with} cut.png")).fails(&["cut.png", "the PNG is broken", "hint: "]);
    refuses_what_is_no_image(&folder, with);
    folder.qkv_on("classify --model m", "a text\n").fails(&["takes images", "hint: name one with `--image FILE`"]);
    folder.qkv("explore --model m").fails(&["takes images", "hint: name one with `--image FILE`"]);
    folder.qkv("explore --image left.png").misused(&["`--image` requires `--model`"]);
    let (images, labels) = idx();
    folder.put("labels.idx", &labels[..20]);
    folder.qkv("train r.toml --out a").fails(&["labels.idx", "it says [60], and 12 bytes follow"]);
    folder.put("labels.idx", &labels);
    folder.put("images.idx", &images[..images.len() - 1]);
    folder.qkv("train r.toml --out a").fails(&["images.idx", "bytes follow"]);
    folder.put("images.idx", &images);
    folder.qkv("train r.toml --out a --set model.patch_size=3").fails(&["patches of 3 do not fill"]);
    folder.qkv("train r.toml --out b --set data.names=['left']").fails(&["`data.names` has 1 names"]);
    let (data, train) = (RECIPE.split("[model]").next().unwrap(), RECIPE.split("[train]").nth(1).unwrap());
    folder.put("h.toml", format!("{data}[model]\nkind = 'han'\n[train]{train}").as_bytes());
    folder.qkv("train h.toml --out c").fails(&["a han sees no images", "hint: set `model.kind` to `vit`"]);
}
