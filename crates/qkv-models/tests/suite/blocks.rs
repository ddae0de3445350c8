//! Blocks of GGUF files are widened as Python's `gguf` package does.

use half::f16;
use qkv_simd::Isa;
use qkv_simd::blocks::BlockType;
use qkv_simd::quantized::{Vectors, products};
use qkv_simd::team::Team;

/// Blocks of every type, and their values according to Python's `gguf` package.
#[test]
fn blocks_are_widened_as_others_do() {
    let golden: Vec<(u32, Vec<u8>, Vec<f32>)> = serde_json::from_str(include_str!("../golden/blocks.json")).unwrap();
    assert_eq!(golden.len(), 11);
    for (kind, bytes, expected) in golden {
        let storage = BlockType::of(kind).unwrap();
        let found = storage.widen(&bytes);
        assert_eq!(found.len(), expected.len(), "{storage}");
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.to_bits(), expected.to_bits(), "{storage} at {at}: {found} {expected}");
        }
    }
}

#[test]
fn products_read_the_elements_that_are_widened() {
    let golden: Vec<(u32, Vec<u8>, Vec<f32>)> = serde_json::from_str(include_str!("../golden/blocks.json")).unwrap();
    let (isa, team, mut read) = (Isa::best(), Team::new(1), 0);
    for (kind, bytes, widened) in golden {
        let (storage, width) = (BlockType::of(kind).unwrap(), widened.len());
        let Some(matrix) = storage.quantized(&bytes, width, &|row| row) else { continue };
        let x: Vec<f32> = (0..width).map(|at| (at * 29 % 61) as f32 / 30.0 - 1.0).collect();
        let mut y = [0.0];
        products(isa, &team, &Vectors::new(isa, &x, width), &mut [(&matrix, &mut y)]);
        let terms = || x.iter().zip(&widened).map(|(&x, &w)| f64::from(x) * f64::from(w));
        let (expected, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
        assert!((f64::from(y[0]) - expected).abs() <= size * 3e-5, "{storage}: {} {expected}", y[0]);
        read += 1;
    }
    assert_eq!(read, 8);
}

#[test]
fn blocks_are_widened_low_halves_first() {
    let scale = f16::from_f32(0.5).to_le_bytes();
    let least = f16::from_f32(-2.0).to_le_bytes();
    let nibbles: Vec<u8> = (0..16).map(|x| x | (15 - x) << 4).collect();
    let above = BlockType::Q4Above.widen(&[&scale[..], &least, &nibbles].concat());
    assert_eq!(above[..3], [-2.0, -1.5, -1.0]);
    assert_eq!(above[16..18], [5.5, 5.0]);
    let scaled = BlockType::Q4Scaled.widen(&[&scale[..], &nibbles].concat());
    assert_eq!((scaled[0], scaled[15], scaled[16]), (-4.0, 3.5, 3.5));
    let bytes: Vec<u8> = (0..32).map(|x| (x as i8 - 16) as u8).collect();
    let eight = BlockType::Q8.widen(&[&scale[..], &bytes].concat());
    assert_eq!((eight[0], eight[31], eight.len()), (-8.0, 7.5, 32));
}
