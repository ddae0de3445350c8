//! Average precision of the boxes in a file, to compare with `pycocotools` (`dev/detection.py` does so). The file is
//! JSON with `found` and `there`, each a list of images, each image a list of
//! `[class, score, left, top, right, bottom]`.

use qkv_models::metrics::detection::{AveragePrecision, ScoredBox};
use serde_json::Value;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("name a file")?;
    let json: Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let boxes = |name: &str| -> Result<Vec<Vec<ScoredBox>>, Box<dyn std::error::Error>> {
        let images: Vec<Vec<[f64; 6]>> = serde_json::from_value(json[name].clone())?;
        let one = |&[class, score, left, top, right, bottom]: &[f64; 6]| ScoredBox {
            class: class as usize,
            score,
            edges: [left, top, right, bottom],
        };
        Ok(images.iter().map(|boxes| boxes.iter().map(one).collect()).collect())
    };
    let AveragePrecision { at_half, mean, .. } = AveragePrecision::of(&boxes("found")?, &boxes("there")?);
    println!("{at_half} {mean}");
    Ok(())
}
