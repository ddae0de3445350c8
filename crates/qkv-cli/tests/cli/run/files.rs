//! Invalid files: each is refused with one sentence that names the file and the tensor, and exit code 1.

use crate::run::program::{Folder, Input, noise, qkv};
use safetensors::Dtype;

fn good() -> Input {
    let [q, k, v] = qkv::<f32>();
    Input::of(&q, &k, &v)
}

/// A file with this header, followed by the given number of bytes.
fn with_header(header: &str, data: usize) -> Folder {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    let folder = Folder::new();
    folder.put("in.safetensors", &bytes);
    folder
}

#[test]
fn a_file_that_is_not_there_is_said_to_be() {
    Folder::new().fails("", &["error: cannot open `in.safetensors`: No such file"]);
}

#[test]
fn a_folder_is_not_read() {
    Folder::new().qkv("run --input .").fails(&["cannot read `.`: it is a folder"]);
}

#[test]
fn what_is_not_safetensors_is_said_to_be() {
    let folder = Folder::new();
    for (bytes, why) in [
        (&b""[..], "the file has 0 bytes"),
        (b"hello", "the file has 5 bytes"),
        (b"hello, world, this is text", "it claims"),
        (&[255; 64], "it claims"),
        (b"\x04\0\0\0\0\0\0\0\xff\xff\xff\xff", "expected value"),
        (b"\x02\0\0\0\0\0\0\0[]", "expected an object of tensors"),
    ] {
        folder.put("in.safetensors", bytes);
        folder.fails("", &["`in.safetensors`: safetensors header: ", why, "hint: "]);
    }
}

#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    let whole = good().bytes();
    let folder = Folder::new();
    for end in (0..whole.len()).step_by(97).chain([whole.len() - 1]) {
        folder.put("in.safetensors", &whole[..end]);
        folder.fails("", &["`in.safetensors`: ", "hint: "]);
    }
    folder.put("in.safetensors", &[&whole[..], b"x"].concat());
    folder.fails("", &["the tensors have", "follow the header"]);
}

#[test]
fn a_header_that_lies_is_refused_by_name() {
    let q = |entry: &str| format!("{{\"q\":{entry}}}");
    for (header, why) in [
        (q(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#), "tensor `q`: its shape [2] of F32 needs 8 bytes"),
        (q(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#), "tensor `q`: its shape [1] of F32 needs 4 bytes"),
        (q(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#), "tensor `q`: its bytes begin at 4, after a gap"),
        (q(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}"#), "overflows"),
        (q(r#"{"dtype":"F32","shape":[9223372036854775807,3],"data_offsets":[0,8]}"#), "overflows"),
        (q(r#"{"dtype":"F33","shape":[1],"data_offsets":[0,4]}"#), "`q` is not a tensor"),
        (q(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#), "`q` is not a tensor"),
        (q(r#"{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}"#), "`q` is not a tensor"),
        (q(r#"{"dtype":"F32","shape":[1]}"#), "`q` is not a tensor"),
        (q("7"), "`q` is not a tensor"),
        (q(r#"{"dtype":"F4","shape":[1],"data_offsets":[0,1]}"#), "does not fill whole bytes"),
    ] {
        with_header(&header, 8).fails("", &["`in.safetensors`: ", why]);
    }
    let overlapping = r#"{"q":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                          "k":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    with_header(overlapping, 12).fails("", &["tensor `k`: its bytes begin at 4, inside another tensor"]);
    let entry = r#""q":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    with_header(&format!("{{{entry},{entry}}}"), 8).fails("", &["`q` is there twice"]);
}

#[test]
fn offsets_at_the_end_of_the_address_space_are_refused() {
    let piece = 1u64 << 60;
    let entries: Vec<String> = (0..15)
        .map(|at| {
            let (from, to) = (at * piece, (at + 1) * piece);
            format!(r#""t{at}":{{"dtype":"U8","shape":[{piece}],"data_offsets":[{from},{to}]}}"#)
        })
        .collect();
    with_header(&format!("{{{}}}", entries.join(",")), 8).fails("", &["its bytes end at", "the data at 8"]);
}

#[test]
fn a_tensor_that_is_missing_is_named_with_what_is_there() {
    for name in ["q", "k", "v"] {
        good().without(name).folder().fails("", &[&format!("`in.safetensors`: `{name}` is missing"), "hint: the file"]);
    }
    with_header("{}", 0).fails("", &["`q` is missing", "no tensors"]);
    let one = |name: &str, shape: &[usize]| good().numbers(name, shape, &vec![0i32; shape.iter().product()]).folder();
    one("segments_q", &[2, 7]).fails("", &["`segments_k` is missing: `segments_q` needs it"]);
    one("segments_k", &[2, 9]).fails("", &["`segments_q` is missing: `segments_k` needs it"]);
    good().folder().fails("--score general", &["`w` is missing", "hint: add the tensor `w` to the file"]);
    good().folder().fails("--score additive", &["`v_score` is missing"]);
}

#[test]
fn a_tensor_of_the_wrong_type_is_named() {
    let integers = |name: &str, shape: &[usize]| good().numbers(name, shape, &vec![1i64; shape.iter().product()]);
    integers("q", &[2, 4, 7, 8]).folder().fails("", &["`q` is of type I64, expected F32, F64, BF16 or F16"]);
    integers("q", &[2, 4, 7, 8]).folder().fails("--dtype f32", &["`q` is of type I64"]);
    integers("bias", &[9]).folder().fails("", &["`bias` is of type I64"]);
    integers("mask", &[9]).folder().fails("", &["`mask` is of type I64, expected BOOL or U8"]);
    let floats = |name: &str, shape: &[usize]| good().numbers(name, shape, &vec![1f32; shape.iter().product()]);
    floats("mask", &[7, 9]).folder().fails("", &["`mask` is of type F32", "hint: a float mask"]);
    floats("key_lengths", &[2]).folder().fails("", &["`key_lengths` is of type F32, expected integers"]);
    let eighth = good().raw("v", Dtype::F8_E4M3, &[2, 2, 9, 8], vec![0; 288]);
    eighth.folder().fails("", &["`v` is of type F8_E4M3"]);
}

#[test]
fn integers_out_of_range_are_refused() {
    good()
        .numbers("key_lengths", &[2], &[-1, 3])
        .folder()
        .fails("", &["`key_lengths` holds -1, expected lengths from 0"]);
    good().numbers("key_lengths", &[2], &[9, 10]).folder().fails("", &["`key_lengths` holds 10", "to 9"]);
    good()
        .numbers("key_lengths", &[2], &[u64::MAX, 3])
        .folder()
        .fails("", &["`key_lengths` holds 1844674407370955161"]);
    let segments = good().numbers("segments_k", &[2, 9], &[0i64; 18]).numbers("segments_q", &[2, 7], &[1i64 << 31; 14]);
    segments.folder().fails("", &["`segments_q` holds 2147483648, expected segments that fit 32 bits"]);
}

#[test]
fn a_tensor_of_the_wrong_shape_is_named() {
    let floats = |name: &str, shape: &[usize]| good().numbers(name, shape, &vec![1f32; shape.iter().product()]);
    let whole = |name: &str, shape: &[usize]| good().numbers(name, shape, &vec![1i32; shape.iter().product()]);
    for (file, words) in [
        (floats("q", &[4, 7, 8]), "`q` has shape [4, 7, 8], expected 4 axes"),
        (floats("q", &[1, 2, 4, 7, 8]), "`q` has shape [1, 2, 4, 7, 8], expected 4 axes"),
        (floats("q", &[2, 3, 7, 8]), "`q` has 3 heads and `k` has 2"),
        (floats("k", &[1, 2, 9, 8]), "`k` has shape [1, 2, 9, 8], expected a batch of 2"),
        (floats("k", &[2, 2, 9, 4]), "`k` has shape [2, 2, 9, 4], expected a width of 8"),
        (floats("v", &[2, 2, 8, 8]), "`v` has shape [2, 2, 8, 8], expected [2, 2, 9"),
        (floats("d_out", &[2, 4, 7, 9]), "`d_out` has shape [2, 4, 7, 9], expected [2, 4, 7, 8]"),
        (floats("bias", &[1, 2, 4, 7, 9]), "`bias` has shape [1, 2, 4, 7, 9], expected 1 to 4 axes"),
        (floats("bias", &[]), "`bias` has shape [], expected 1 to 4 axes"),
        (floats("bias", &[8]), "`bias` has shape [1, 1, 1, 8], expected something that broadcasts"),
        (floats("sinks", &[3]), "`sinks` has shape [3], expected [4]"),
        (floats("table", &[4, 6]), "`table` has shape [4, 6], expected an odd number of columns"),
        (floats("table", &[3, 5]), "`table` has shape [3, 5]"),
        (floats("scale", &[3]), "`scale` has shape [3], expected [1] or [4]"),
        (whole("key_lengths", &[3]), "`key_lengths` has shape [3], expected [2]"),
        (whole("segments_q", &[7, 2]), "`segments_q` has shape [7, 2], expected [2, 7]"),
        (good().numbers("mask", &[8, 9], &[1u8; 72]), "`mask` has shape [1, 1, 8, 9]"),
    ] {
        file.folder().fails("", &["`in.safetensors`: ", words]);
    }
}

#[test]
fn a_tensor_that_the_choices_have_no_use_for_is_an_error() {
    let given = |name: &str, shape: &[usize]| good().numbers(name, shape, &vec![1f32; shape.iter().product()]).folder();
    given("w", &[8, 8]).fails("", &["`w` was given, but", "hint: `w` is for `--score general`"]);
    given("v_score", &[8]).fails("--score general", &["`v_score` was given, but", "`--score additive`"]);
    given("scale", &[1]).fails("--scale 2", &["`scale` was given, but", "hint: leave out either"]);
}

#[test]
fn a_target_that_cannot_be_written_is_refused() {
    let folder = good().folder();
    let run = |output: &str| folder.qkv(&format!("run --input in.safetensors --output {output}"));
    run("nowhere/out.safetensors").fails(&["`nowhere/out.safetensors`: cannot be written", "no folder `nowhere`"]);
    run(".").fails(&["`.`: cannot be written: it is a folder"]);
    run("in.safetensors").fails(&["`in.safetensors`: cannot be written: it is the input", "hint: "]);
    run("./in.safetensors").fails(&["it is the input"]);
}

#[test]
fn an_old_output_is_replaced_and_nothing_else_is_left_behind() {
    let folder = good().folder();
    folder.put("out.safetensors", b"old");
    let written = folder.run("");
    assert_eq!(written.names(), ["lse", "out"]);
    assert_eq!(folder.names(), ["in.safetensors", "out.safetensors"]);
}

#[test]
fn no_change_to_a_file_makes_the_program_fall() {
    let (q, k) = (noise::<f32, 4>([1, 2, 3, 4], 1), noise::<f32, 4>([1, 1, 5, 4], 2));
    let file = Input::of(&q, &k, &k).tensor("d_out", &q).numbers("key_lengths", &[1], &[4u8]);
    let file = file.numbers("d_lse", &[1, 2, 3], &[0.5f32; 6]);
    let biased = file.clone().numbers("bias", &[5], &[0.5f32; 5]);
    let centred = file.clone().numbers("center", &[1, 2, 3], &[1.5f32; 6]);
    let chosen = file.clone().numbers("d_log_prob", &[1, 2, 3], &[0.5f32; 6]);
    let calls = [
        ("", biased.bytes()),
        ("--local predictive:2", centred.bytes()),
        ("--select sample --straight-through", chosen.bytes()),
        ("--select top-k:3", file.bytes()),
        ("--pattern lsh:4,2,0", file.bytes()),
        ("--features elu", file.bytes()),
        ("--features favor:5", file.bytes()),
    ];
    let folder = Folder::new();
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    for _ in 0..200 {
        let (choices, mut bytes) = calls[random(calls.len())].clone();
        let header = usize::from(bytes[0]) + 256 * usize::from(bytes[1]) + 8;
        for _ in 0..=random(2) {
            bytes[random(header)] = b"0123456789[]{},:\"FBIU"[random(21)];
        }
        folder.put("in.safetensors", &bytes);
        let ran = folder.qkv(&format!("run --input in.safetensors --threads 1 {choices}"));
        assert!(matches!(ran.code, Some(0 | 1)), "{:?}: {ran:?}", String::from_utf8_lossy(&bytes[..header]));
    }
}
