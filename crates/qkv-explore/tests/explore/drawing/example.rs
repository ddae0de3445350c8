//! Matrices to draw, and snapshots of pictures.

use qkv_explore::Matrix;
use std::path::Path;

pub fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

/// A small alignment.
pub fn small() -> Matrix {
    Matrix {
        rows: words("Long time , no see"),
        columns: words("好 久 不 见"),
        weights: vec![
            vec![0.5, 0.2, 0.1, 0.15],
            vec![0.1, 0.4, 0.0, 0.45],
            vec![0.0, 0.0, 0.2, 0.7],
            vec![0.001, 0.0, 0.25, 0.7],
            vec![0.05, 0.15, 0.0, 0.76],
        ],
    }
}

/// A matrix of any size, strongest about its diagonal.
pub fn large(rows: usize, columns: usize) -> Matrix {
    let weight = |i: usize, j: usize| {
        let away = i as f32 / rows as f32 - j as f32 / columns as f32;
        (-300.0 * away * away).exp()
    };
    Matrix {
        rows: (0..rows).map(|i| format!("row{i}")).collect(),
        columns: (0..columns).map(|j| format!("column{j}")).collect(),
        weights: (0..rows).map(|i| (0..columns).map(|j| weight(i, j)).collect()).collect(),
    }
}

/// Labels that try to pass for markup or control sequences.
pub fn hostile() -> Matrix {
    let labels = [
        "</text><script>alert(1)</script>",
        "\"'&<>]]>",
        "\x1b[2J\u{0}\u{8}",
        "a\u{202e}b\u{2028}c",
        "line\r\nbreak\ttab,\"quoted\"",
        "=1+1",
        "",
        "\u{ffff}\u{fffe}",
    ];
    let long = "很长的标签".repeat(2000);
    let labels: Vec<String> = labels.into_iter().map(String::from).chain([long]).collect();
    let row = vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0, 0.0, 1e-45, 1e38, 0.5, 0.25];
    Matrix { columns: labels.clone(), weights: vec![row; labels.len()], rows: labels }
}

/// Compares a drawing with its snapshot; `UPDATE_SNAPSHOTS=1` updates the snapshot instead.
pub fn kept(name: &str, drawn: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/explore/drawing/golden").join(name);
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, drawn).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(expected == drawn, "{} is drawn otherwise:\n{drawn}", path.display());
}
