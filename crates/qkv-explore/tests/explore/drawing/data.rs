//! Weights as data: files are read back by the rules of the format, not of the writer.

use super::example::{hostile, large, small};
use qkv_explore::Matrix;
use safetensors::{Dtype, SafeTensors};

#[test]
fn an_npy_has_a_header_of_version_one_and_rows_of_f32() {
    for matrix in [small(), large(123, 45), large(0, 0)] {
        let npy = matrix.npy().unwrap();
        assert_eq!(npy[..8], *b"\x93NUMPY\x01\x00");
        let length = usize::from(u16::from_le_bytes([npy[8], npy[9]]));
        assert_eq!((10 + length) % 64, 0);
        let header = std::str::from_utf8(&npy[10..10 + length]).unwrap();
        let shape = format!("({}, {})", matrix.rows.len(), matrix.columns.len());
        let dictionary = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
        assert_eq!(header.trim_end(), dictionary);
        assert!(header.ends_with('\n') && header.trim_end_matches('\n').len() == length - 1);
        let numbers: Vec<f32> =
            npy[10 + length..].chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
        assert_eq!(numbers, matrix.weights.concat());
    }
}

#[test]
fn safetensors_has_the_weights_and_their_labels() {
    let bytes = small().safetensors().unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let labels =
        |name: &str| -> Vec<String> { serde_json::from_str(&header.metadata().as_ref().unwrap()[name]).unwrap() };
    assert_eq!((labels("query_tokens"), labels("key_tokens")), (small().rows, small().columns));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let weights = file.tensor("weights").unwrap();
    assert_eq!((weights.dtype(), weights.shape()), (Dtype::F32, &[5, 4][..]));
    let numbers: Vec<f32> =
        weights.data().chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(numbers, small().weights.concat());
    assert_eq!(small().safetensors().unwrap(), bytes, "the same bytes again");
}

#[test]
fn json_reads_back() {
    let value: serde_json::Value = serde_json::from_str(&small().json()).unwrap();
    assert_eq!(value["rows"], serde_json::json!(small().rows));
    assert_eq!(value["columns"], serde_json::json!(small().columns));
    let weights: Vec<Vec<f32>> = serde_json::from_value(value["weights"].clone()).unwrap();
    assert_eq!(weights, small().weights);
}

/// Reads CSV by RFC 4180: cells with commas, quotes or line ends are quoted.
fn parsed(csv: &str) -> Vec<Vec<String>> {
    let (mut rows, mut row, mut cell, mut quoted) = (Vec::new(), Vec::new(), String::new(), false);
    let mut chars = csv.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if quoted && chars.peek() == Some(&'"') => cell.extend(chars.next()),
            '"' => quoted = !quoted,
            ',' if !quoted => row.push(std::mem::take(&mut cell)),
            '\r' if !quoted => {
                assert_eq!(chars.next(), Some('\n'));
                row.push(std::mem::take(&mut cell));
                rows.push(std::mem::take(&mut row));
            }
            c => cell.push(c),
        }
    }
    assert!(!quoted && cell.is_empty() && row.is_empty());
    rows
}

#[test]
fn csv_reads_back_whatever_labels_hold() {
    for matrix in [small(), hostile()] {
        let rows = parsed(&matrix.csv());
        assert_eq!((&rows[0][0][..], &rows[0][1..]), ("", &matrix.columns[..]));
        assert_eq!(rows.len(), matrix.rows.len() + 1);
        for ((row, label), weights) in rows[1..].iter().zip(&matrix.rows).zip(&matrix.weights) {
            assert_eq!(row[0], *label);
            let numbers: Vec<f32> = row[1..].iter().map(|cell| cell.parse().unwrap()).collect();
            let bits = |numbers: &[f32]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&numbers), bits(weights));
        }
    }
}

#[test]
fn weights_without_labels_are_not_written() {
    let ragged = Matrix { rows: vec!["a".into()], columns: vec!["b".into()], weights: vec![vec![]] };
    assert!(ragged.npy().is_err() && ragged.safetensors().is_err());
}
