//! `qkv train`, `describe`, `answer --image` and `detect` with models that look, trained here in seconds on pictures
//! that the program draws.

use crate::models::program::{Folder, json};
use png::{BitDepth, ColorType, Encoder};
use qkv_models::tasks;

fn recipe(task: &str, kind: &str) -> String {
    format!(
        "name = 'tiny'
[data]
shapes = '{task}'
scenes = 4
dev_scenes = 2
[tokenizer]
kind = 'bpe'
size = 300
[model]
kind = '{kind}'
d_model = 16
ffn_dim = 16
heads = 2
image = {{ height = 32, width = 32, patch_size = 8, stem_channels = 8, layers = 1 }}
[train]
steps = 4
tokens = 1000
metric = 'exact'
validate = 4
save = 2
"
    )
}

/// A picture of the synthetic task.
fn picture(folder: &Folder, name: &str) {
    let scene = tasks::scenes(5, 1, 0).0.remove(0);
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, tasks::SIDE as u32, tasks::SIDE as u32);
    encoder.set_color(ColorType::Rgb);
    encoder.set_depth(BitDepth::Eight);
    encoder.write_header().unwrap().write_image_data(scene.image.points()).unwrap();
    folder.put(name, &bytes);
}

/// A folder with a model `run` and a picture `a.png`.
fn trained(task: &str, kind: &str) -> Folder {
    let folder = Folder::new();
    folder.put("tiny.toml", recipe(task, kind).as_bytes());
    picture(&folder, "a.png");
    folder.qkv("train tiny.toml --out run --quiet --threads 2").quietly();
    folder
}

/// A PNG whose header says that it has 50,000 × 50,000 pixels.
fn huge() -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
    bytes.extend([50_000u32, 50_000].iter().flat_map(|side| side.to_be_bytes()));
    bytes.extend([8, 2, 0, 0, 0]);
    let crc = !bytes[12..].iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    });
    bytes.extend(crc.to_be_bytes());
    bytes.extend(b"\0\0\0\0IDAT\x35\xaf\x06\x1e\0\0\0\0IEND\xae\x42\x60\x82");
    bytes
}

/// A command whose last argument is an image refuses files that are not images, each by name and with a one-line
/// reason.
pub fn refuses_what_is_no_image(folder: &Folder, command: &str) {
    let jpeg = include_bytes!("../../../../qkv-formats/tests/images/colour.jpg");
    folder.put("empty.png", b"");
    folder.put("text.png", b"hello");
    folder.put("cut.jpg", &jpeg[..jpeg.len() - jpeg.len() / 3]);
    folder.put("huge.png", &huge());
    folder.put("inside/other.png", b"");
    let mut cases = vec![
        ("empty.png", "the file is empty"),
        ("text.png", "it is none of PNG, JPEG, WebP and BMP"),
        ("cut.jpg", "the JPEG is broken: it is cut off\nhint: "),
        ("huge.png", "it is 50000 × 50000, at most 16384 each way"),
        ("inside", "it is a folder"),
        ("none.png", "hint: "),
    ];
    if cfg!(unix) {
        let made = std::process::Command::new("mkfifo").arg(folder.path().join("fifo.png")).status();
        assert!(made.is_ok_and(|status| status.success()), "`mkfifo` is part of every Unix");
        cases.push(("fifo.png", "not a regular file"));
    }
    for (image, why) in cases {
        folder.qkv(&format!("{command} {image}")).fails(&[image, why]);
    }
}

#[test]
fn an_image_is_described_with_where_each_token_looked() {
    let folder = trained("captions", "describe");
    let out = folder.qkv("describe --model run a.png --json --weights --beam 2 --out looks.svg").quietly();
    let found = &json(&out)[0];
    assert_eq!((&found["image"], &found["grid"]), (&"a.png".into(), &serde_json::json!([4, 4])));
    let tokens = found["tokens"].as_array().unwrap();
    assert!(tokens.iter().all(|token| token["weights"].as_array().unwrap().len() == 16));
    assert!(folder.text("looks.svg").starts_with("<svg"));
    assert_eq!(folder.qkv("describe --model run a.png a.png --greedy").quietly().lines().count(), 2);
    refuses_what_is_no_image(&folder, "describe --model run");
    folder.comes_back("run");
    folder.qkv("describe --model run").misused(&["name an IMAGE"]);
    folder.qkv_on("translate --model run", "x\n").fails(&["writes about images alone"]);
    assert!(folder.qkv("inspect run").quietly().contains("describe: images of 32 × 32"));
}

#[test]
fn a_question_about_an_image_is_answered() {
    let folder = trained("questions", "vqa");
    let asked = "answer --model run how --image a.png";
    let found = &json(&folder.qkv(&format!("{asked} --json --weights --out looks.png")).quietly())[0];
    assert_eq!(found["question"], "how");
    assert!(found["looked"].as_array().unwrap().iter().any(|map| map["text"] == "hop 2"));
    assert!(folder.bytes("looks.png").starts_with(b"\x89PNG"));
    assert_eq!(folder.qkv(asked).quietly().lines().count(), 1);
    refuses_what_is_no_image(&folder, "answer --model run how --image");
    folder.comes_back("run");
    folder.qkv("answer --model run how").misused(&["requires `--context TEXT`, `--input FILE` or `--image FILE`"]);
}

#[test]
fn boxes_are_found_and_drawn() {
    let folder = trained("boxes", "detect");
    let out = folder.qkv("detect --model run a.png --threshold 0 --json --weights --out boxes.svg").quietly();
    let boxes = json(&out)[0]["boxes"].as_array().unwrap().clone();
    assert_eq!((boxes.len(), boxes[0]["weights"].as_array().unwrap().len()), (16, 16));
    let inside = |x: &serde_json::Value| (0.0..=64.0).contains(&x.as_f64().unwrap());
    assert!(boxes.iter().all(|one| one["box"].as_array().unwrap().iter().all(inside)));
    assert!(folder.text("boxes.svg").starts_with("<svg"));
    let lines = folder.qkv("detect --model run a.png --threshold 0").quietly();
    assert!(lines.lines().all(|line| line.split('\t').count() == 6), "{lines}");
    refuses_what_is_no_image(&folder, "detect --model run");
    folder.comes_back("run");

    // A resumed run ends the same.
    folder.qkv("train tiny.toml --out parts --quiet --threads 2 --set train.steps=2").quietly();
    folder.qkv("train --resume parts --quiet --threads 1 --set train.steps=4").quietly();
    let weights = "checkpoints/00000004/weights.safetensors";
    assert!(folder.bytes(&format!("parts/{weights}")) == folder.bytes(&format!("run/{weights}")), "{weights}");
}
