//! Promises of tensor files: what is written is read back, exactly or to the requested precision; the same tensors give
//! the same bytes; and a malformed file is refused with its name and the tensor's.

use proptest::prelude::*;
use qkv_formats::files::tensors::{NamedTensor, Storage, TensorFile, to_bytes, write};

fn file(bytes: Vec<u8>) -> TensorFile {
    TensorFile::from_bytes(bytes, "m.safetensors").expect("it is valid")
}

fn refused(bytes: impl Into<Vec<u8>>) -> String {
    TensorFile::from_bytes(bytes.into(), "m.safetensors").expect_err("it is not valid").to_string()
}

/// A file with any header and any data.
fn forged(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

proptest! {
    #[test]
    fn f32_comes_back_bit_by_bit(bits in prop::collection::vec(any::<u32>(), 0..50)) {
        let values: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        let tensor = NamedTensor { name: "x", shape: &[values.len()], values: &values };
        let bytes = to_bytes(&[tensor], Storage::F32).expect("bytes");
        let read = file(bytes).read("x").expect("it is there");
        prop_assert_eq!(read.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), bits);
    }

    #[test]
    fn eight_bits_are_within_half_a_scale(
        rows in 1usize..6, cols in 1usize..9, exponent in -30i32..30, seed in prop::collection::vec(-1.0f32..1.0, 54),
    ) {
        let values: Vec<f32> = seed[..rows * cols].iter().map(|x| x * 2f32.powi(exponent)).collect();
        let tensor = NamedTensor { name: "w", shape: &[rows, cols], values: &values };
        let file = file(to_bytes(&[tensor], Storage::Rows8).expect("bytes"));
        let read = file.read_shaped("w", &[rows, cols]).expect("it is there");
        for (values, read) in values.chunks(cols).zip(read.chunks(cols)) {
            let largest = values.iter().fold(0f32, |most, x| most.max(x.abs()));
            for (x, y) in values.iter().zip(read) {
                prop_assert!((x - y).abs() <= largest / 127.0 * 0.5001, "{x} became {y} beside {largest}");
            }
        }
        prop_assert_eq!(file.names().collect::<Vec<_>>(), ["w"]);
        // Rounding is idempotent.
        let again = to_bytes(&[NamedTensor { values: &read, ..tensor }], Storage::Rows8).expect("bytes");
        let twice = TensorFile::from_bytes(again, "m").expect("valid").read("w").expect("it is there");
        for (once, twice) in read.iter().zip(&twice) {
            prop_assert!((once - twice).abs() <= 1e-6 * once.abs());
        }
    }

    #[test]
    fn halves_are_within_their_precision(values in prop::collection::vec(-1000.0f32..1000.0, 1..50)) {
        for (storage, bound) in [(Storage::F16, 1.0 / 2048.0), (Storage::Bf16, 1.0 / 256.0)] {
            let tensor = NamedTensor { name: "x", shape: &[values.len(), 1], values: &values };
            let read = file(to_bytes(&[tensor], storage).expect("bytes")).read("x").expect("it is there");
            for (x, y) in values.iter().zip(&read) {
                prop_assert!((x - y).abs() <= bound * x.abs() + 1e-7, "{x} became {y}");
            }
        }
    }

    #[test]
    fn any_bytes_are_a_file_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = TensorFile::from_bytes(bytes, "m.safetensors");
    }

    #[test]
    fn a_file_with_other_bytes_in_it_never_panics(
        at in 0usize..500, byte: u8, cut in any::<bool>(), digit in b'0'..=b'9',
    ) {
        let values = [0.5f32; 12];
        let tensor = |name, shape| NamedTensor { name, shape, values: &values };
        let tensors = [tensor("a", &[3, 4][..]), tensor("b", &[12])];
        for spoiled in [byte, digit] {
            let mut bytes = to_bytes(&tensors, Storage::Rows8).expect("bytes");
            let at = at % bytes.len();
            bytes[at] = spoiled;
            if cut { bytes.truncate(at) }
            if let Ok(file) = TensorFile::from_bytes(bytes, "m.safetensors") {
                for name in file.names() {
                    let _ = file.read(name);
                }
            }
        }
    }
}

#[test]
fn the_order_of_tensors_does_not_change_the_bytes() {
    let a = NamedTensor { name: "a", shape: &[1], values: &[1.0] };
    let b = NamedTensor { name: "b.weight", shape: &[1, 2], values: &[2.0, 3.0] };
    for storage in [Storage::F32, Storage::F16, Storage::Bf16, Storage::Rows8] {
        assert_eq!(to_bytes(&[a, b], storage).expect("bytes"), to_bytes(&[b, a], storage).expect("bytes"));
    }
}

#[test]
fn a_file_that_is_cut_off_or_goes_on_is_refused() {
    let whole = to_bytes(&[NamedTensor { name: "a", shape: &[2], values: &[1.0, 2.0] }], Storage::F32).expect("bytes");
    let data = whole.len() - 8;
    for length in 0..data {
        assert!(refused(&whole[..length]).starts_with("`m.safetensors`: safetensors header: "));
    }
    for length in data..whole.len() {
        let missing = format!("`m.safetensors`: tensor `a`: its bytes end at 8, the data at {}", length - data);
        assert_eq!(refused(&whole[..length]), missing);
    }
    let longer = [&whole[..], &[0]].concat();
    let expected = "`m.safetensors`: safetensors header: the tensors have 8 bytes, 9 follow the header";
    assert_eq!(refused(longer), expected);
}

#[test]
fn a_header_that_lies_is_refused_and_the_tensor_named() {
    let entry = |name: &str, shape: &str, from: u64, to: u64| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let one =
        |shape: &str, from, to, data: &[u8]| refused(forged(&format!("{{{}}}", entry("w", shape, from, to)), data));
    let tensor = |what: &str| format!("`m.safetensors`: tensor `w`: {what}");
    assert_eq!(one("[3]", 0, 8, &[0; 8]), tensor("its shape [3] of F32 needs 12 bytes, not 0 to 8"));
    let huge = "[4611686018427387904,4611686018427387904]";
    assert!(one(huge, 0, 8, &[0; 8]).ends_with("4611686018427387904] overflows"));
    let beyond = one("[1099511627776]", 0, 4398046511104, &[0; 8]);
    assert_eq!(beyond, tensor("its bytes end at 4398046511104, the data at 8"));
    assert_eq!(one("[1]", 4, 8, &[0; 8]), tensor("its bytes begin at 4, after a gap that begins at 0"));
    assert_eq!(one("[1]", 8, 4, &[0; 8]), tensor("its shape [1] of F32 needs 4 bytes, not 8 to 4"));
    let both = format!("{{{},{}}}", entry("v", "[2]", 0, 8), entry("w", "[2]", 4, 12));
    let overlap = tensor("its bytes begin at 4, inside another tensor that ends at 8");
    assert_eq!(refused(forged(&both, &[0; 12])), overlap);
    let header = "`m.safetensors`: safetensors header: ";
    assert!(refused(forged("{\"w\": 3}", &[])).starts_with(&format!("{header}`w` is not a tensor")));
    assert!(refused(forged("\u{ff}\"", &[])).starts_with(header));
    assert!(refused(u64::MAX.to_le_bytes()).starts_with(&format!("{header}it claims 18446744073709551615 bytes")));
}

#[test]
fn sizes_whose_sum_wraps_around_to_the_right_one_are_refused() {
    const MOST: u64 = u64::MAX / 8;
    let mut header = String::from("{");
    let mut from = 0u64;
    for at in 0..8 {
        // The last one ends such that its sum with the header's length is, modulo 2⁶⁴, the length of the file.
        let to = if at < 7 { from + MOST } else { 0u64.wrapping_sub(8 + 1000) };
        let comma = if at > 0 { "," } else { "" };
        header += &format!(
            r#"{comma}"{at}":{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#,
            to.wrapping_sub(from)
        );
        from = to;
    }
    let bytes = forged(&format!("{:<1000}", header + "}"), &[]);
    assert!(refused(bytes).starts_with("`m.safetensors`: tensor `0`: its bytes end at "));
}

#[test]
fn a_type_or_shape_that_was_not_asked_for_is_refused_and_the_tensor_named() {
    let read = |header: &str, data: &[u8]| file(forged(header, data)).read("w").expect_err("no").to_string();
    let wide = read(r#"{"w":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}"#, &[0; 8]);
    assert_eq!(wide, "`m.safetensors`: tensor `w`: it is I64, expected F32, F16, BF16 or 8-bit rows");
    let alone = read(r#"{"w":{"dtype":"I8","shape":[2,2],"data_offsets":[0,4]}}"#, &[0; 4]);
    assert_eq!(alone, "`m.safetensors`: tensor `w.scale`: it is missing");
    let flat = read(r#"{"w":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}"#, &[0; 4]);
    assert_eq!(flat, "`m.safetensors`: tensor `w`: its 8-bit rows have shape [4], expected a matrix");
    let scales = r#"{"w":{"dtype":"I8","shape":[2,2],"data_offsets":[0,4]},"w.scale":{"dtype":"I8","shape":[2],"data_offsets":[4,6]}}"#;
    assert_eq!(read(scales, &[0; 6]), "`m.safetensors`: tensor `w.scale`: it is I8, expected F32, F16 or BF16");
    let file =
        file(to_bytes(&[NamedTensor { name: "w", shape: &[2], values: &[1.0, 2.0] }], Storage::F32).expect("bytes"));
    let error = file.read_shaped("w", &[1, 2]).expect_err("another shape");
    assert_eq!(error.to_string(), "`m.safetensors`: tensor `w`: its shape is [2], expected [1, 2]");
    assert_eq!(file.read("v").expect_err("no such").to_string(), "`m.safetensors`: tensor `v`: it is missing");
}

#[test]
fn what_cannot_be_written_is_refused_before_anything_is() {
    let place = tempfile::tempdir().expect("a folder");
    let path = place.path().join("m.safetensors");
    let refused = |tensors: &[NamedTensor]| write(&path, tensors, Storage::Rows8).expect_err("no").to_string();
    let bad = NamedTensor { name: "w", shape: &[2, 1], values: &[1.0, f32::NAN] };
    assert_eq!(refused(&[bad]), "tensor `w` has a value in row 1 that is not finite");
    assert_eq!(refused(&[NamedTensor { shape: &[3], ..bad }]), "tensor `w` has shape [3] and 2 values");
    let good = NamedTensor { values: &[1.0, 2.0], ..bad };
    assert_eq!(refused(&[good, good]), "tensor `w.scale` is there twice");
    assert!(!path.exists());
}
